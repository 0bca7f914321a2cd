"""Runs commands of the two programs one after the other in this process, in whatever environment it runs in.

It reads a JSON list of command lines on standard input, and writes one of [exit code, standard output, standard error].
The single word `commands` asks for every command of both programs: each then runs with `--help`.
"""

import contextlib
import functools
import io
import json
import sys

import typer.main

from coordinator.cli import app as coordinator
from edge_client.cli import app as edge_client
from toolkit.console import run_app

# As `tests.support.command_trees`, which is not there outside of the source tree.
typer.main.get_command = functools.cache(typer.main.get_command)
PROGRAMS = {"coordinator": coordinator, "edge_client": edge_client}


def commands() -> list[list[str]]:
    """The words of every command and group."""
    waiting = [([name], typer.main.get_command(app)) for name, app in PROGRAMS.items()]
    found = []
    while waiting:
        words, command = waiting.pop()
        found.append(words)
        waiting += [([*words, name], inner) for name, inner in getattr(command, "commands", {}).items()]
    return found


def typed(words: list[str]) -> list[object]:
    """What a command prints, and its exit code."""
    out, error, code = io.StringIO(), io.StringIO(), None
    sys.argv = words
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            run_app(PROGRAMS[words[0]])
        except SystemExit as ended:
            code = ended.code
    return [code, out.getvalue(), error.getvalue()]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if asked == "commands":
        asked = [[*words, "--help"] for words in commands()]
        sys.stdout.write(json.dumps([[words, *typed(words)] for words in asked]))
    else:
        sys.stdout.write(json.dumps([typed(words) for words in asked]))
