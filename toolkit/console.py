"""How both command lines speak: one style of help, exit codes, one way to fail, `--json`.

A command that cannot do what it was asked raises `CommandFailed` with a sentence that says what happened and what to
do. `run_app` prints it on standard error (as JSON with `--json`) and ends with its exit code.

A sentence may hold what another machine said: `CommandFailed` takes out what a
terminal would act on, and what is printed of another machine's words goes through `printable`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from toolkit.text import MAX_SHOWN, clean

if TYPE_CHECKING:
    import typer

__all__ = [
    "CommandFailed",
    "ExitCode",
    "fail",
    "json_requested",
    "print_json",
    "printable",
    "program",
    "run_app",
]


class ExitCode(IntEnum):
    """What a command ends with. The same table stands in docs/operations.md."""

    OK = 0
    FAILED = 1  # The work itself failed (a check, a parity test, a training run).
    USAGE = 2  # Input that cannot be right: an option, a file, a document.
    UNREACHABLE = 3  # Nobody answered at the address, or TLS failed.
    REFUSED = 4  # The other side, or the member's own policy, said no.
    NOT_FOUND = 5  # A job, member, version or file of that name does not exist.
    INTERRUPTED = 130


def printable(text: str) -> str:
    """Text as it may be printed: line breaks and tabs stay, whatever else a terminal acts on does not."""
    return clean(text, MAX_SHOWN, lines=True)


class CommandFailed(Exception):
    """A command's end with a sentence for a person."""

    def __init__(self, sentence: str, code: ExitCode = ExitCode.FAILED) -> None:
        sentence = printable(sentence)
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


def fail(sentence: str, code: ExitCode = ExitCode.FAILED) -> NoReturn:
    """Raises CommandFailed."""
    raise CommandFailed(sentence, code)


def json_requested() -> bool:
    """Whether `--json` stands anywhere in the command, or TACIT_JSON=1 in the environment."""
    return "--json" in sys.argv[1:] or os.environ.get("TACIT_JSON") == "1"


def print_json(value: Any) -> None:
    """One JSON object on a line of standard output."""
    sys.stdout.write(json.dumps(value, sort_keys=True, default=str) + "\n")
    sys.stdout.flush()


def program(name: str, version: Callable[[], str], *, help: str, epilog: str) -> "typer.Typer":
    """Makes the root of a command line: boxed help, shell completion, `--version`, suggestions for what is mistyped.

    Args:
        name: The program's name, as a person types it.
        version: Returns the version. Only `--version` calls it.
        help: What the program is for.
        epilog: The lines below the list of commands.

    Returns:
        A typer app without commands.
    """
    import typer
    from typer.core import TyperGroup

    class Root(TyperGroup):
        # The errors of every level pass through the root: these two methods parse all options and commands.
        def make_context(self, *arguments: Any, **more: Any) -> Any:
            with _suggestions():
                return super().make_context(*arguments, **more)

        def invoke(self, ctx: Any) -> Any:
            with _suggestions():
                return super().invoke(ctx)

    app = typer.Typer(
        name=name,
        cls=Root,
        help=help,
        epilog=epilog,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )

    def print_version(asked: bool) -> None:
        if asked:
            typer.echo(f"{name} {version()}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
        ] = False,
    ) -> None:
        pass

    return app


@contextmanager
def _suggestions() -> Iterator[None]:
    """Words an unknown option as typer words an unknown command: "Did you mean '--home'?"."""
    try:
        yield
    except Exception as error:
        # Only an unknown option has possibilities. Its class is private to typer.
        if possibilities := getattr(error, "possibilities", None):
            meant = ", ".join(repr(option) for option in possibilities)
            error.message = f"{error.message}. Did you mean {meant}?"  # type: ignore[attr-defined]
            error.possibilities = None  # type: ignore[attr-defined]
        raise


def run_app(app: Callable[[], object]) -> NoReturn:
    """Runs a typer app; every foreseen failure becomes a sentence and an exit code, never a traceback."""
    try:
        app()
    except CommandFailed as error:
        if json_requested():
            print_json({"error": error.sentence, "exit_code": int(error.code)})
        else:
            sys.stderr.write(f"error: {error.sentence}\n")
        sys.exit(int(error.code))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(0)
