"""What both command lines share: one style of help, exit codes, one way to fail, `--json`.

A command that cannot do its work raises `CommandFailed` with a sentence that says what happened and what to do.
`run_app` prints it on standard error, or as JSON with `--json`, and ends with its exit code.

A sentence may quote another machine. `CommandFailed` removes what a terminal would act on. Other text from another
machine must go through `printable` before it is printed.
"""

import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from toolkit.install import extra_with, install_with
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
    """Exit codes of commands. docs/operations.md has the same table."""

    OK = 0
    FAILED = 1  # The work itself failed (a check, a parity test, a training run).
    USAGE = 2  # Invalid input: an option, a file, a document.
    UNREACHABLE = 3  # Nobody answered at the address, or TLS failed.
    REFUSED = 4  # The other side, or the member's own policy, said no.
    NOT_FOUND = 5  # A job, member, version or file of that name does not exist.
    ABOVE_CLAIM = 6  # An audit's lower bound on epsilon is above what the job claims.
    INTERRUPTED = 130


def printable(text: str) -> str:
    """Cleans text for printing. Line breaks and tabs stay; all else that a terminal acts on is replaced."""
    return clean(text, MAX_SHOWN, lines=True)


class CommandFailed(Exception):
    """A command failed; `sentence` tells a person why and what to do."""

    def __init__(self, sentence: str, code: ExitCode = ExitCode.FAILED) -> None:
        sentence = printable(sentence)
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


def fail(sentence: str, code: ExitCode = ExitCode.FAILED) -> NoReturn:
    """Raises CommandFailed."""
    raise CommandFailed(sentence, code)


def json_requested() -> bool:
    """Whether the command line contains `--json`, or the environment TACIT_JSON=1."""
    return "--json" in sys.argv[1:] or os.environ.get("TACIT_JSON") == "1"


def print_json(value: Any) -> None:
    """Prints one JSON object on a line of standard output."""
    sys.stdout.write(json.dumps(value, sort_keys=True, default=str) + "\n")
    sys.stdout.flush()


def program(name: str, version: Callable[[], str], *, help: str, epilog: str) -> "typer.Typer":
    """Makes the root of a command line: boxed help, shell completion, `--version`, suggestions for mistyped words.

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
        # Errors of every level pass through the root, because these two methods parse all options and commands.
        def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
            if not args or "--help" in args:
                _import_help()
            with _suggestions():
                return super().make_context(info_name, args, *rest, **more)

        def invoke(self, ctx: Any) -> Any:
            with _suggestions(), _missing_parts(member=name == "edge_client"), _unanswered(), _unread():
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


def _import_help() -> None:
    """Imports what draws typer's help, without what our help has none of: a third of the time that `--help` takes.

    typer imports rich's Markdown and tracebacks, and these a parser and a highlighter. Help is in rich's markup, and a
    failure is a sentence. rich looks for attrs, whose objects nothing here prints.
    """
    if "typer.rich_utils" in sys.modules:
        return
    left_out = {"rich.markdown": "Markdown", "rich.traceback": "Traceback", "attr": None}
    placed: list[str] = []
    for name, kind in left_out.items():
        if name not in sys.modules:
            module = None if kind is None else ModuleType(name)
            if kind is not None:
                setattr(module, kind, type(kind, (), {}))
            # None refuses the import.
            sys.modules[name] = module  # type: ignore[assignment]
            placed.append(name)
    try:
        import typer.rich_utils  # noqa: F401  for sys.modules, where typer finds it
    finally:
        for name in placed:
            del sys.modules[name]


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


@contextmanager
def _missing_parts(*, member: bool) -> Iterator[None]:
    """Words a module that is not installed, but that an extra brings: "torch is not installed; `pip install ...`"."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_with(error.name or "", member=member)
        if extra is None:
            raise
        # Of two extras, one is the program's own, so that the sentence fits a machine that has neither.
        extras = dict.fromkeys(("edge" if member else "coordinator", extra))
        fail(f"this command needs {error.name}, which is not installed; {install_with(*extras)}", ExitCode.USAGE)


@contextmanager
def _unanswered() -> Iterator[None]:
    """Words Ctrl-C, and the end of input at a prompt. typer would print "Aborted." for either, or nothing."""
    import typer

    try:
        yield
    except KeyboardInterrupt:
        raise _interrupted() from None
    except typer.Abort as error:
        # A prompt raises it in place of both.
        if not isinstance(error.__context__, EOFError):
            raise _interrupted() from None
        if sys.stderr.isatty():
            sys.stderr.write("\n")
        fail("the input ended before the answer; answer at a terminal, or give options instead", ExitCode.USAGE)


@contextmanager
def _unread() -> Iterator[None]:
    """Ends well if the reader of the output is gone (`| head`), where typer would end with 1 and without a word."""
    try:
        yield
    except BrokenPipeError as error:
        # The same error comes from a connection that its other side has closed.
        watched = select.poll()
        for stream in (sys.stdout, sys.stderr):
            watched.register(stream, 0)
        if not watched.poll(0):
            raise CommandFailed(
                "the other side of a connection closed it before everything was written; try again",
                ExitCode.UNREACHABLE,
            ) from error
        _write_nowhere()


def _interrupted() -> CommandFailed:
    return CommandFailed("interrupted", ExitCode.INTERRUPTED)


def run_app(app: Callable[[], object]) -> NoReturn:
    """Runs a typer app. Every expected failure becomes a sentence and an exit code, never a traceback."""
    try:
        try:
            app()
        except KeyboardInterrupt:
            raise _interrupted() from None
    except CommandFailed as error:
        # The exit code still says that it failed if nobody reads why.
        try:
            _say(error)
        except BrokenPipeError:
            _write_nowhere()
        sys.exit(int(error.code))
    sys.exit(0)


def _say(error: CommandFailed) -> None:
    if json_requested():
        print_json({"error": error.sentence, "exit_code": int(error.code)})
        return
    if error.code is ExitCode.INTERRUPTED:
        # A terminal shows ^C where the person typed it.
        sys.stderr.write(f"\n{error.sentence}\n" if sys.stderr.isatty() else f"{error.sentence}\n")
    else:
        sys.stderr.write(f"error: {error.sentence}\n")
    sys.stderr.flush()


def _write_nowhere() -> None:
    """Python writes what is left at its end, and would complain again that nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
