"""Shows how far `edge_client export` and `edge_client evaluate` are."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from toolkit.console import printable

if TYPE_CHECKING:
    from edge_client.agent.own_model import Watch

__all__ = ["watching"]


@contextmanager
def watching(quiet: bool) -> Iterator["Watch"]:
    """Yields what shows progress: sentences on standard error and, on a terminal, a bar. When quiet, neither."""
    from edge_client.agent.own_model import Watch

    if quiet or not sys.stderr.isatty():
        yield Watch() if quiet else Watch(say=lambda line: typer.echo(printable(line), err=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("adapting"),
        BarColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        task = bar.add_task("", total=None, note="", visible=False)

        def step(step: int, steps: int, loss: float) -> None:
            note = f"loss {loss:.3f}"
            bar.update(task, completed=step, total=steps, note=note, visible=step < steps, refresh=step in (1, steps))

        yield Watch(lambda line: bar.console.print(printable(line), markup=False), step)
