"""`coordinator job plot`: draws a job's accuracy or loss, its cohorts and dropouts, and what members reported."""

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coordinator.cli.common import Dir, Json, Operator, operator_folder, operator_stub, run
from toolkit.console import ExitCode, fail, print_json
from toolkit.install import install_with

if TYPE_CHECKING:
    from coordinator.cli.panels import Panel
    from coordinator.cli.series import History

__all__ = ["plot"]


def plot(
    name: Annotated[str, typer.Argument(help="The job's name.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file to write, .png or .svg. An existing one is replaced."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Draw in the terminal.")] = False,
    metric: Annotated[
        Literal["accuracy", "loss"], typer.Option(help="What to show of the versions: accuracy or loss.")
    ] = "accuracy",
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Draw a job: accuracy or loss with standard errors, cohorts and dropouts by phase, reported epsilons.

    With --json it prints the series that it draws.
    """
    kind = None if out is None else {".png": "png", ".svg": "svg"}.get(out.suffix.lower())
    if out is not None and kind is None:
        fail(f"--out {out} is neither .png nor .svg; name the file with one of the two", ExitCode.USAGE)
    if out is None and not text and not as_json:
        fail("name the file with --out (.png or .svg), or draw in the terminal with --text", ExitCode.USAGE)
    where = operator_folder(operator, folder)
    from coordinator.cli.panels import panels
    from coordinator.cli.series import fetch_history, points

    async def work() -> "History":
        async with operator_stub(where) as stub:
            return await fetch_history(stub, name)

    found = points(run(work()))
    shown = panels(found, metric)
    if not shown and not as_json:
        fail(
            f"job {name} has nothing to draw: no round has ended and nothing was measured; "
            "`coordinator status --watch` shows what it waits for",
            ExitCode.NOT_FOUND,
        )
    if out is not None and kind is not None and shown:
        _write(out, name, shown, kind)
    if as_json:
        series: dict[str, list[object]] = {}
        for each in found:
            series.setdefault(each.key, []).append(each.as_json())
        print_json({"job": name, "file": str(out) if out is not None and shown else None, "series": series})
        return
    if text:
        from coordinator.cli.text_plot import text_plot

        typer.echo(text_plot(f"Job {name}", shown, shutil.get_terminal_size().columns))
    if out is not None:
        typer.echo(f"Wrote {out}.")


def _write(out: Path, name: str, shown: "list[Panel]", kind: str) -> None:
    from coordinator.cli.drawing import drawn

    try:
        image = drawn(f"Job {name}", shown, "svg" if kind == "svg" else "png")
    except ImportError as error:
        fail(
            f"drawing a file needs matplotlib ({error.name or error} is missing); "
            f"{install_with('coordinator', 'plots')}, or use --text",
            ExitCode.USAGE,
        )
    partial = out.with_name(f".{out.name}.partial")
    try:
        # Whole or not at all: a full disk leaves an earlier plot as it is.
        partial.write_bytes(image)
        partial.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        fail(f"{out} cannot be written: {error.strerror}; choose another file with --out", ExitCode.FAILED)
