"""`edge_client evaluate` measures this member's own model on a file of its own."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from edge_client.cli.watching import watching
from toolkit.console import json_requested, print_json, printable

__all__ = ["evaluate"]

# Characters of a line if standard output is not a terminal.
_MAX_WIDTH = 160


def evaluate(
    job: Annotated[str, typer.Argument(help="The job's name.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Your examples, as for `edge_client run`.", show_default=False)],
    test: Annotated[
        Path,
        typer.Option(
            help="Your labelled texts to measure on, which you did not train on: .jsonl, .csv or .tsv, plain or .gz.",
            show_default=False,
        ),
    ],
    text: Annotated[str, typer.Option(help="The column of both files that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column of both files that holds the label.")] = "label",
    text_b: Annotated[
        str | None,
        typer.Option(
            help="The column that holds a pair's second text, for jobs on pairs. Default: text_b, if a file has it.",
            show_default=False,
        ),
    ] = None,
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Skip rows that cannot be read, and say how many and which.")
    ] = False,
    data_name: Annotated[str, typer.Option(help="Your name for this data, as for `edge_client run`.")] = "data",
    epochs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help="Epochs on --data that adapt your private parameters to the version. Default: as for "
            "`edge_client export`.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    home: Annotated[
        Path | None, typer.Option(help="This member's folder. Default: TACIT_HOME, or ~/.tacit.", show_default=False)
    ] = None,
    backbone: Annotated[
        list[Path] | None,
        typer.Option(help="A folder with a prompted job's frozen model, as for `edge_client run`.", show_default=False),
    ] = None,
    private_key_file: Annotated[
        Path | None, typer.Option(help="The key file that seals your private parameters, if any.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print one JSON object.")
    ] = False,
) -> None:
    """Measure your own model on your own texts: what `edge_client export` would write, with your private parameters.

    It is your own look at your own data: it sends nothing, and no ledger is charged.
    It downloads the job's newest version, and leaves no model behind.
    Keep the figures to yourself: no noise protects what you publish of them.

    Beside accuracy and loss it prints a 95 % confidence interval (Wilson),
    the accuracy of the majority class, balanced accuracy, macro F1,
    the expected calibration error (15 bins of equal width), and the confusion matrix.
    """
    from toolkit.tls import tls_13_only

    tls_13_only()

    from edge_client.agent.measuring import measure_own
    from edge_client.agent.runner import RunOptions
    from edge_client.cli.private import sentences
    from export.figures_report import confusion_lines, figures_json, figures_lines, headline

    quiet = as_json or json_requested()
    options: RunOptions = RunOptions(
        data=data,
        text=text,
        label=label,
        text_b=text_b,
        skip_invalid=skip_invalid,
        device=device,
        home=home,
        data_name=data_name,
        private_key_file=private_key_file,
        backbones=tuple(backbone or ()),
    )
    with sentences(), watching(quiet) as watch:
        done = measure_own(job, options, test, epochs=epochs, watch=watch)
    if quiet:
        print_json(
            {
                "job": done.job,
                "version": done.version,
                "digest": done.digest.hex(),
                "private_values": done.private,
                **figures_json(done.figures),
                "reading": done.coverage.as_json(done.max_tokens),
                "also_in_data": done.known,
                "rows_skipped": done.skipped.rows,
            }
        )
        return
    typer.echo(printable(f"version {done.version} of {done.job}: {headline(done.figures)}"))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _MAX_WIDTH
    for line in (*figures_lines(done.figures), *confusion_lines(done.figures, width)):
        typer.echo(line)
    typer.echo(done.coverage.sentence(done.max_tokens))
    if done.known:
        typer.echo(
            printable(
                f"{done.known} of {done.figures.examples} texts of {test} are also in {data}, so the figures are too "
                "good; give --test texts that you did not train on"
            )
        )
