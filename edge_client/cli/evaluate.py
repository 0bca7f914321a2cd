"""`edge_client evaluate` measures this member's own model on a file of its own."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.cli.options import (
    DataFile,
    DataName,
    Device,
    Home,
    Json,
    KeyFile,
    MessagesColumn,
    OwnBackbones,
    PromptColumn,
    ResponseColumn,
    SecondText,
    SkipInvalid,
)
from edge_client.cli.watching import watching
from toolkit.console import ExitCode, fail, json_requested, print_json, printable
from toolkit.interruption import Interruption

if TYPE_CHECKING:
    from edge_client.agent.measuring import Measured
    from export.evaluate_writing import WritingFigures
    from export.figures import Figures

__all__ = ["evaluate"]

# Characters of a line if standard output is not a terminal.
_MAX_WIDTH = 160


def evaluate(
    job: Annotated[str, typer.Argument(help="The job's name.", show_default=False)],
    data: DataFile,
    test: Annotated[
        Path,
        typer.Option(
            help="Your labelled texts to measure on, or prompts with responses for a model that writes, which you did "
            "not train on: .jsonl, .csv or .tsv (also .gz), .parquet, .arrow, or a datasets folder.",
            show_default=False,
        ),
    ],
    text: Annotated[str, typer.Option(help="The column of both files that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column of both files that holds the label.")] = "label",
    text_b: SecondText = None,
    prompt: PromptColumn = None,
    response: ResponseColumn = None,
    messages: MessagesColumn = None,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate",
            help="Also let a model that writes answer the prompts of --test, and compare: BLEU, ROUGE-L, exact match.",
        ),
    ] = False,
    answers: Annotated[
        int | None,
        typer.Option(min=1, help="With --generate: answer only this many prompts, the first of the file."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, max=100, help="With --generate: the temperature of the sampled answers.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="With --generate: the seed of the sampled answers.")] = 0,
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

    Of a model that writes it measures loss, perplexity and accuracy per response token;
    with --generate also BLEU, ROUGE-L and exact match of greedy and of sampled answers.
    Rows with the same prompt are references of one answer.

    Ctrl-C, or SIGTERM, cuts the measurement of a model that writes off.
    It then prints the figures of the rows and answers that it had reached, and how many are missing.
    """
    if (answers is not None or temperature != 1.0 or seed) and not generate:
        fail("--answers, --temperature and --seed are of generated answers; add --generate", ExitCode.USAGE)
    from toolkit.tls import tls_13_only

    tls_13_only()

    from edge_client.agent.measuring import answering_of, measure_own
    from edge_client.agent.runner import RunOptions
    from edge_client.cli.private import sentences

    quiet = as_json or json_requested()
    options: RunOptions = RunOptions(
        data=data,
        text=text,
        label=label,
        text_b=text_b,
        prompt=prompt,
        response=response,
        messages=messages,
        skip_invalid=skip_invalid,
        device=device,
        home=home,
        data_name=data_name,
        private_key_file=private_key_file,
        backbones=tuple(backbone or ()),
    )
    with sentences(), watching(quiet) as watch, Interruption() as interruption:
        asked = answering_of(answers, temperature, seed) if generate else None
        done = measure_own(job, options, test, epochs=epochs, answering=asked, interruption=interruption, watch=watch)
    _show(done, data, test, quiet)
    if done.cut:
        fail("interrupted", ExitCode.INTERRUPTED)


def _show(done: "Measured", data: Path, test: Path, as_json: bool) -> None:
    report = _report(done.figures)
    if as_json:
        print_json(
            {
                "job": done.job,
                "version": done.version,
                "digest": done.digest.hex(),
                "private_values": done.private,
                **report.figures_json(done.figures),
                "reading": done.reading_json,
                "also_in_data": done.known,
                "rows_skipped": done.skipped.rows,
            }
        )
        return
    typer.echo(printable(f"version {done.version} of {done.job}: {report.headline(done.figures)}"))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _MAX_WIDTH
    for line in report.all_lines(done.figures, width):
        typer.echo(line)
    typer.echo(printable(done.reading))
    if done.known:
        typer.echo(
            printable(
                f"{done.known} of {done.rows} {done.what} of {test} are also in {data}, so the figures are too good; "
                f"give --test {done.what} that you did not train on"
            )
        )


def _report(found: "Figures | WritingFigures") -> Any:
    """The module that shows figures of this kind. Only those of a model that writes need the export extra."""
    from export.figures import Figures

    if isinstance(found, Figures):
        from export import figures_report

        return figures_report
    from export import answer_report

    return answer_report
