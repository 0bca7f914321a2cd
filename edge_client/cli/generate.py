"""`edge_client generate` answers with an exported model that writes, on this machine and without torch."""

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.console import ExitCode, fail, json_requested, print_json
from toolkit.text import clean

if TYPE_CHECKING:
    from export.generating import Generator, Response, Sampling
    from learning.text.turns import Dialogue

__all__ = ["generate"]


def generate(
    bundle: Annotated[Path, typer.Option(help="The folder that `export` wrote.", show_default=False)],
    question: Annotated[
        str | None,
        typer.Argument(help="The question. Without it, and without --file, standard input is it.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help=".jsonl, .csv or .tsv (also .gz) with a `prompt` or `messages` in each row; all are answered.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="The column of --file that holds the prompt. Default: prompt.", show_default=False),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="What the system says first, unless a row of --file says it.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens of a response. Default: as the job says.", show_default=False),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, help="0: always the likeliest token. Default: as the bundle says, 0.", show_default=False
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among this many tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Choose among the likeliest tokens up to this probability.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed chooses the same tokens.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End a response at this text, which is left out; may be repeated.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=256, help="How many rows of --file are answered at once.")] = 8,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: one for each core.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="One JSON object a response.")
    ] = False,
) -> None:
    """Answer a question with an exported model. The answer appears as it is written."""
    from dataclasses import replace

    from export.generating import Generator, ModelFailed
    from tacit.bundle import BundleInvalid

    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal may not know a character, which is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    if question is not None and file is not None:
        fail("give a question or --file, not both", ExitCode.USAGE)
    if file is not None and not file.exists():
        fail(f"{file} does not exist; name a .jsonl file with a prompt in each row", ExitCode.NOT_FOUND)
    if prompt is not None and file is None:
        fail("--prompt names a column of --file; add --file, or give the question alone", ExitCode.USAGE)
    given = _from_file(file, prompt, system) if file is not None else [_one(question, system)]
    try:
        generator = Generator.load(bundle, threads=threads, once=file is None)
    except BundleInvalid as error:
        fail(str(error), ExitCode.USAGE if bundle.exists() else ExitCode.NOT_FOUND)
    plain = as_json or json_requested()
    told: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    try:
        chosen = replace(generator.sampling, seed=seed, **{key: each for key, each in told.items() if each is not None})
        if file is None and not plain:
            _stream(generator, given[0], chosen, max_new_tokens, tuple(stop or ()))
            return
        ends = tuple(stop or ())
        for response in generator.write_all(given, chosen, max_new_tokens=max_new_tokens, stop=ends, batch=batch):
            _show(response, plain)
    except ValueError as error:  # PromptTooLong, or an option's value.
        fail(str(error), ExitCode.USAGE)
    except ModelFailed as error:
        fail(str(error))
    except BrokenPipeError:
        # The reader is gone (`| head`), which is not an error.
        _silence()
    except OSError as error:
        _silence()
        fail(f"the answer cannot be written: {error.strerror}")


def _silence() -> None:
    """Sends what is still to be written nowhere, so that it does not fail once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stream(
    generator: "Generator", dialogue: "Dialogue", sampling: "Sampling", most: int | None, stop: tuple[str, ...]
) -> None:
    for piece in generator.write(dialogue, sampling, max_new_tokens=most, stop=stop):
        sys.stdout.write(_safe(piece))
        sys.stdout.flush()
    typer.echo()


def _show(response: "Response", plain: bool) -> None:
    if plain:
        print_json(
            {
                "response": response.text,
                "ended": response.ended,
                "prompt_tokens": response.prompt_tokens,
                "tokens": response.tokens,
            }
        )
    else:
        typer.echo(f"{_safe(response.text)}\n")


def _safe(text: str) -> str:
    # A model's text may hold what a terminal acts on.
    return clean(text, len(text), lines=True)


def _one(question: str | None, system: str | None) -> "Dialogue":
    from learning.text.turns import Dialogue

    if question is None:
        if sys.stdin.isatty():
            typer.echo("Type the question; end with Ctrl-D.", err=True)
        try:
            question = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            fail("standard input is not UTF-8; convert it first", ExitCode.USAGE)
    if not question.strip():
        fail("there is no question; give one, --file FILE, or text on standard input", ExitCode.USAGE)
    return Dialogue.of(question, system=system)


def _from_file(path: Path, prompt: str | None, system: str | None) -> "list[Dialogue]":
    """Reads the prompts of a file. A response at the end of a dialogue is left out."""
    from learning.text.data import read_data
    from learning.text.examples import DataInvalid
    from learning.text.turns import Dialogue, Turn

    try:
        examples = read_data(path, label=None, prompt=prompt, rows_for="prompts").examples
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    found = [each.dialogue for each in examples if each.dialogue is not None]
    if len(found) != len(examples):
        fail(
            f"{path}: a row has no prompt; name its column with --prompt, or give `messages` in each row",
            ExitCode.USAGE,
        )
    if system is None:
        return found
    said = Turn("system", system)
    return [each if each.turns[0].role == "system" else Dialogue((said, *each.turns)) for each in found]
