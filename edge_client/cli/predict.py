"""`edge_client predict` labels texts with an exported model, on this machine and without torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.console import ExitCode, fail, json_requested, print_json, printable

if TYPE_CHECKING:
    from learning.text.examples import TextRow

__all__ = ["predict"]


def predict(
    bundle: Annotated[Path, typer.Option(help="The folder that `export` wrote.", show_default=False)],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            help="The texts. Without any, and without --file, standard input has one a line.", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help=".jsonl, .csv or .tsv (also .gz), .parquet, .arrow, or .txt with one text a line.", show_default=False
        ),
    ] = None,
    text: Annotated[str, typer.Option(help="The column of --file that holds the text.")] = "text",
    text_b: Annotated[
        str | None,
        typer.Option(help="The column of --file that holds a pair's second text. Default: text_b.", show_default=False),
    ] = None,
    skip_invalid: Annotated[
        bool,
        typer.Option(
            "--skip-invalid",
            help="Skip rows of --file that cannot be read, and say on standard error how many and which. Not for .txt.",
        ),
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="How many texts go through the model at once.")] = 64,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="One JSON object a line.")
    ] = False,
) -> None:
    """Print the most probable label of each text and its probability, one line a text, in the order of the texts.

    Empty lines are skipped. A model for pairs takes the texts two by two, or lines with a tab between the two.
    """
    from export.predictor import Predictor
    from learning.text.examples import DataInvalid, RowInvalid
    from tacit.bundle import BundleInvalid

    if texts and file is not None:
        fail("give texts or --file, not both", ExitCode.USAGE)
    try:
        predictor = Predictor.load(bundle)
        if texts:
            given = _two_by_two(texts) if predictor.pairs else [*texts]
        elif file is not None:
            given = _from_file(file, text, text_b, predictor.pairs, skip_invalid)
        else:
            given = _lines(_from_standard_input(), "standard input", predictor.pairs)
    except RowInvalid as error:
        hint = "" if file is None or _is_plain(file) else "; or skip such rows with --skip-invalid"
        fail(f"{error}{hint}", ExitCode.USAGE)
    except (BundleInvalid, DataInvalid) as error:
        missing = not bundle.exists() or (file is not None and not file.exists())
        fail(str(error), ExitCode.NOT_FOUND if missing else ExitCode.USAGE)
    given = [item for item in given if not isinstance(item, str) or item.strip()]
    if not given:
        fail("there is no text to label; give texts, --file FILE, or lines on standard input", ExitCode.USAGE)
    width = max(map(len, predictor.labels))
    # Batch by batch, so that a long file shows its first results early.
    for first in range(0, len(given), batch):
        try:
            found = predictor.predict(given[first : first + batch], batch)
        except BundleInvalid as error:
            fail(str(error), ExitCode.FAILED)
        for prediction in found:
            if as_json or json_requested():
                print_json(
                    {
                        "label": prediction.label,
                        "probability": round(prediction.probability, 6),
                        "probabilities": {label: round(value, 6) for label, value in prediction.probabilities.items()},
                    }
                )
            else:
                typer.echo(f"{printable(prediction.label):<{width}}  {prediction.probability:.4f}")


def _two_by_two(texts: list[str]) -> "list[TextRow]":
    if len(texts) % 2:
        fail(
            f"the model labels pairs, and there are {len(texts)} texts; give each pair's two texts one after the other",
            ExitCode.USAGE,
        )
    return list(zip(texts[::2], texts[1::2], strict=True))


def _lines(lines: list[str], where: str, pairs: bool) -> "list[TextRow]":
    """Reads one text a line, or one pair a line with a tab between; skips empty lines between pairs."""
    if not pairs:
        return [*lines]
    found: list[TextRow] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        first, tab, second = line.partition("\t")
        if not tab or not first.strip() or not second.strip():
            fail(
                f"{where}, line {number}: the model labels pairs of texts; write both in one line, with a tab between",
                ExitCode.USAGE,
            )
        found.append((first, second))
    return found


def _from_file(path: Path, column: str, second: str | None, pairs: bool, skip_invalid: bool) -> "list[TextRow]":
    from learning.text.data import read_data
    from learning.text.examples import text_rows
    from learning.text.textual import read_text

    if _is_plain(path):
        if skip_invalid:
            fail(f"every line of {path} is a text; --skip-invalid is for files with columns", ExitCode.USAGE)
        return _lines([line.removesuffix("\r") for line in read_text(path).split("\n")], str(path), pairs)
    if skip_invalid and pairs:
        # With a name for the column, a row without its second text counts as one that cannot be read.
        second = second or "text_b"
    rows = read_data(path, text=column, label=None, text_b=second, skip_invalid=skip_invalid)
    if rows.skipped:
        typer.echo(printable(rows.skipped.sentence(len(rows.examples))), err=True)
    return text_rows(rows.examples, pairs=pairs)


def _is_plain(path: Path) -> bool:
    """Whether every line of the file is a text."""
    return path.name.lower().endswith((".txt", ".txt.gz"))


def _from_standard_input() -> list[str]:
    if sys.stdin.isatty():
        typer.echo("Type one text a line (a pair with a tab between); end with Ctrl-D.", err=True)
    try:
        lines = sys.stdin.buffer.read().decode().split("\n")
    except UnicodeDecodeError:
        fail("standard input is not UTF-8; convert it first", ExitCode.USAGE)
    return [line.removesuffix("\r") for line in lines]
