"""`edge_client evaluate` measures this member's own model on a file of its own."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from edge_client.cli.options import (
    DataFile,
    DataName,
    Device,
    Home,
    Json,
    KeyFile,
    OwnBackbones,
    SecondText,
    SkipInvalid,
)
from edge_client.cli.watching import watching
from toolkit.console import json_requested, print_json, printable

__all__ = ["evaluate"]

# Characters of a line if standard output is not a terminal.
_MAX_WIDTH = 160


def evaluate(
    job: Annotated[str, typer.Argument(help="The job's name.", show_default=False)],
    data: DataFile,
    test: Annotated[
        Path,
        typer.Option(
            help="Your labelled texts to measure on, which you did not train on: .jsonl, .csv or .tsv (also .gz), "
            ".parquet, .arrow, or a datasets folder.",
            show_default=False,
        ),
    ],
    text: Annotated[str, typer.Option(help="The column of both files that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column of both files that holds the label.")] = "label",
    text_b: SecondText = None,
    skip_invalid: SkipInvalid = False,
    data_name: DataName = "data",
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
    device: Device = "auto",
    home: Home = None,
    backbone: OwnBackbones = None,
    private_key_file: KeyFile = None,
    as_json: Json = False,
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
