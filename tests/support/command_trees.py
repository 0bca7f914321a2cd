"""Makes a program's tree of commands once for a process, where typer makes it again for each command line.

All commands of the coordinator take 20 ms of a core to make. An installed program runs one command line, and makes its
tree once. A tree has no state of a command line, which is in the context of each.
"""

import functools

__all__ = ["made_once"]


def made_once() -> None:
    """From now on, an app's commands are those that it has at its first command line."""
    import typer.main
    import typer.testing

    if not hasattr(typer.main.get_command, "cache_info"):
        made = functools.cache(typer.main.get_command)
        typer.main.get_command = typer.testing._get_command = made  # type: ignore[attr-defined]
