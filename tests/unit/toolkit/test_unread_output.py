"""Output that nobody reads: a program ends with the exit code of what it did, and without a traceback."""

import os
import subprocess
import sys
import textwrap

import pytest

from toolkit.console import ExitCode

PROGRAM = textwrap.dedent("""
    import socket
    import sys

    from toolkit.console import ExitCode, fail, print_json, program, run_app

    app = program("coordinator", lambda: "1", help="It.", epilog="")

    @app.command()
    def works() -> None:
        # More than a pipe holds.
        for _ in range(20_000):
            print_json({"a": "line"})

    @app.command()
    def shows() -> None:
        print("progress", file=sys.stderr, flush=True)

    @app.command()
    def connects() -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.send(b"a backup")

    @app.command()
    def fails(json: bool = False) -> None:
        fail("there is no such job", ExitCode.NOT_FOUND)

    run_app(app)
""")


def without_a_reader(stream: str, *words: str) -> tuple[int, str]:
    """Runs the program with a stream whose reader has gone. Returns its exit code and what the other stream has."""
    reading, writing = os.pipe()
    os.close(reading)
    other = "stderr" if stream == "stdout" else "stdout"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=writing if stream == "stdout" else subprocess.PIPE,
            stderr=writing if stream == "stderr" else subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writing)
    return ended.returncode, getattr(ended, other)


@pytest.mark.parametrize(("stream", "word"), [("stdout", "works"), ("stderr", "shows")])
def test_a_command_whose_reader_has_gone_is_no_failure(stream, word):
    assert without_a_reader(stream, word) == (ExitCode.OK, "")


def test_a_connection_that_breaks_is_a_failure():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, "connects"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == ExitCode.UNREACHABLE
    assert ended.stderr.startswith("error: the other side of a connection closed it")


@pytest.mark.parametrize(("stream", "words"), [("stderr", ["fails"]), ("stdout", ["fails", "--json"])])
def test_a_failure_that_nobody_reads_keeps_its_exit_code(stream, words):
    assert without_a_reader(stream, *words) == (ExitCode.NOT_FOUND, "")
