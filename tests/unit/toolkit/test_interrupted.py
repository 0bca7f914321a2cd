"""Ctrl-C and the end of input, at a prompt and in a running command: a word and an exit code, never `Aborted.`."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from toolkit.console import ExitCode

# A program with a prompt, a hidden prompt, a question, and a command that runs until it is interrupted.
PROGRAM = textwrap.dedent("""
    import signal
    import time

    import typer

    from toolkit.console import program, run_app

    # A shell lets what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app = program("coordinator", lambda: "1", help="It.", epilog="")

    @app.command()
    def plain() -> None:
        typer.prompt("Word", err=True)

    @app.command()
    def hidden() -> None:
        typer.prompt("Word", hide_input=True)

    @app.command()
    def question() -> None:
        typer.confirm("Word")

    @app.command()
    def running() -> None:
        print("Word", flush=True)
        while True:  # `pause` would sleep through a signal that came just before it.
            time.sleep(0.05)

    run_app(app)
""")
COMMANDS = ["plain", "hidden", "question", "running"]


def on_a_terminal(*words: str, key: bytes) -> tuple[int, str]:
    """Types a key once the program has said `Word`, and returns its exit code and what the terminal showed after."""
    master, slave = pty.openpty()
    started = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown, typed, end = b"", False, time.monotonic() + 60

    def press() -> None:
        if key == b"\x03":
            started.send_signal(signal.SIGINT)
        else:
            os.write(master, key)

    try:
        while time.monotonic() < end:
            if not select.select([master], [], [], 4)[0]:
                # Between its prompt and its reading, a program loses a key and sleeps through a signal.
                if typed:
                    press()
                continue
            try:
                read = os.read(master, 4096)
            except OSError:  # Linux: the other side is closed.
                break
            if not read:
                break
            shown += read
            if not typed and re.search(rb"Word(.*: |\r\n)", shown):
                typed, shown = True, b""
                press()
        return started.wait(60), shown.decode().replace("\r\n", "\n")
    finally:
        started.kill()
        os.close(master)


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_with_130_and_a_word_on_a_line_of_its_own(command):
    code, shown = on_a_terminal(command, key=b"\x03")
    assert code == ExitCode.INTERRUPTED
    assert shown.endswith("\ninterrupted\n")
    assert "bort" not in shown


@pytest.mark.parametrize("command", ["plain", "question"])
def test_the_end_of_input_says_that_there_was_no_answer(command):
    # Ctrl-D.
    code, shown = on_a_terminal(command, key=b"\x04")
    assert code == ExitCode.USAGE
    assert shown.endswith("\nerror: the input ended before the answer; answer at a terminal, or give options instead\n")
    assert "bort" not in shown


@pytest.mark.parametrize("command", ["plain", "question"])
def test_without_a_terminal_no_answer_is_a_sentence_too(command):
    words = [sys.executable, "-c", PROGRAM, command]
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.USAGE
    assert "error: the input ended before the answer" in ended.stderr


def test_as_json_it_is_an_object():
    environment = os.environ | {"TACIT_JSON": "1"}
    words = [sys.executable, "-c", PROGRAM, "running"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout.readline() == "Word\n"
        running.send_signal(signal.SIGINT)
        said, _ = running.communicate(timeout=60)
    assert running.returncode == ExitCode.INTERRUPTED
    assert json.loads(said) == {"error": "interrupted", "exit_code": 130}
