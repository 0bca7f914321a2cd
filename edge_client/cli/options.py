"""The options that several commands of `edge_client` have, each with one name and one help text."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DataFile",
    "DataName",
    "Device",
    "Home",
    "Json",
    "KeyFile",
    "MessagesColumn",
    "OwnBackbones",
    "PersonColumn",
    "PersonCount",
    "PromptColumn",
    "ResponseColumn",
    "Runtime",
    "SecondText",
    "SkipInvalid",
]

Home = Annotated[
    Path | None,
    typer.Option("--home", help="This member's folder. Default: TACIT_HOME, or ~/.tacit.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print JSON.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Runtime = Annotated[
    str,
    typer.Option(
        help="auto, torch, or device (no torch, for jobs that train a head alone). auto: torch if it is installed."
    ),
]
SkipInvalid = Annotated[
    bool, typer.Option("--skip-invalid", help="Skip rows that cannot be read, and say how many and which.")
]

# Of commands that make the member's own model from the data that it takes part with.
DataFile = Annotated[Path, typer.Option(help="Your examples, as for `edge_client run`.", show_default=False)]
DataName = Annotated[str, typer.Option(help="Your name for this data, as for `edge_client run`.")]
SecondText = Annotated[
    str | None,
    typer.Option(
        help="The column that holds a pair's second text, for jobs on pairs. Default: text_b, if a file has it.",
        show_default=False,
    ),
]
PromptColumn = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        help="The column that holds a prompt, for jobs whose model writes. Default: prompt, if a file has it.",
        show_default=False,
    ),
]
ResponseColumn = Annotated[
    str | None,
    typer.Option(
        "--response",
        help="The column that holds the response to the prompt. Default: response, if a file has it.",
        show_default=False,
    ),
]
MessagesColumn = Annotated[
    str | None,
    typer.Option(
        "--messages",
        help="The column that holds a dialogue's turns, in place of a prompt and a response. Default: messages, if a "
        "file has it.",
        show_default=False,
    ),
]
PersonColumn = Annotated[
    str | None,
    typer.Option(
        "--person",
        help="The column that names whose row it is (patient, customer, author), if your policy protects persons. It "
        "stays here.",
        show_default=False,
    ),
]
PersonCount = Annotated[
    int | None,
    typer.Option(
        "--persons",
        min=1,
        help="How many persons your examples are of (N), if persons are protected.",
        show_default=False,
    ),
]
OwnBackbones = Annotated[
    list[Path] | None,
    typer.Option(help="A folder with a prompted job's frozen model, as for `edge_client run`.", show_default=False),
]
KeyFile = Annotated[
    Path | None, typer.Option(help="The key file that seals your private parameters, if any.", show_default=False)
]
