"""A member sleeps while its command says so, and never in the middle of a round."""

import asyncio
import os
import select
import stat

import pytest
from structlog.testing import capture_logs

from edge_client.session import idle as module
from edge_client.session.agent import Agent
from edge_client.session.idle import Idle, IdleInvalid


def script(folder, text):
    path = folder / "look"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("text", "goes"), [("exit 0", True), ("exit 1", False), ("exit 75", False), ("kill -9 $$", False)]
)
def test_only_exit_code_0_means_go(tmp_path, text, goes):
    assert asyncio.run(Idle(str(script(tmp_path, text))).goes()) is goes


def test_arguments_are_words_and_no_shell_reads_them(tmp_path):
    look = script(tmp_path, f'[ "$1" = "a b" ] && [ "$2" = "\\$(touch {tmp_path}/made)" ]')
    assert asyncio.run(Idle(f"{look} 'a b' '$(touch {tmp_path}/made)'").goes())
    assert not (tmp_path / "made").exists()


def test_a_command_that_is_missing_or_hangs_means_not_now(tmp_path, monkeypatch):
    assert not asyncio.run(Idle(str(tmp_path / "nothing")).goes())
    monkeypatch.setattr(module, "_COMMAND_SECONDS", 0.1)
    assert not asyncio.run(Idle(str(script(tmp_path, "exec tail -f /dev/null"))).goes())


def test_a_command_that_hangs_leaves_no_process_behind(tmp_path, monkeypatch):
    """The command is a shell with a child of its own, which holds a pipe open for as long as it lives."""
    os.mkfifo(tmp_path / "pipe")
    look = script(tmp_path, f'tail -f /dev/null > "{tmp_path}/pipe"; true')
    monkeypatch.setattr(module, "_COMMAND_SECONDS", 0.5)
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with capture_logs() as logs:
            assert not asyncio.run(Idle(str(look)).goes())
        # The pipe ends once its last writer has.
        assert select.select([end], [], [], 10)[0]
        assert os.read(end, 1) == b""
    finally:
        os.close(end)
    assert [each["event"] for each in logs] == ["idle_command_failing", "sleeping"]


def test_the_command_gets_three_variables_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_PROXY_PASSWORD", "secret")
    monkeypatch.setenv("LANG", "C")
    assert asyncio.run(Idle(str(script(tmp_path, f'env > "{tmp_path}/seen"'))).goes())
    found = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    # A shell adds some of its own.
    assert {"PATH", "HOME", "LANG"} <= found <= {"PATH", "HOME", "LANG", "PWD", "OLDPWD", "SHLVL", "_"}


@pytest.mark.parametrize("command", ["", "  ", "'unfinished", "a\0b"])
def test_what_is_no_command_is_refused(command):
    with pytest.raises(IdleInvalid, match="--idle"):
        Idle(command)


def test_it_waits_until_the_command_says_go(tmp_path):
    look = script(tmp_path, f'echo . >> "{tmp_path}/looks"; [ "$(wc -l < "{tmp_path}/looks")" -ge 3 ]')
    asyncio.run(Idle(str(look), seconds=0.01).until_it_goes())
    assert (tmp_path / "looks").read_text() == ".\n" * 3


class Task:
    def __init__(self, ended):
        self._ended = ended

    def done(self):
        return self._ended


class Line:
    """The agent's connection: counts hang-ups, and stops the loop after some looks."""

    def __init__(self, looks):
        self.left, self.hung_up = looks, 0

    async def stub(self):
        self.left -= 1
        if self.left < 0:
            raise asyncio.CancelledError

    def hang_up(self):
        self.hung_up += 1


def follow(tmp_path, text, **held):
    agent = object.__new__(Agent)
    line = Line(3)
    vars(agent).update(
        {"_link": line, "_preparing": {}, "_held": {}, "_uploads": {}, "_events": asyncio.Queue()} | held
    )

    async def run():
        with pytest.raises(asyncio.CancelledError):
            await agent._follow_idle(Idle(str(script(tmp_path, text)), seconds=0.001))

    asyncio.run(run())
    return line.hung_up


def test_the_session_ends_between_rounds_alone(tmp_path):
    assert follow(tmp_path, "exit 1") == 3
    assert follow(tmp_path, "exit 0") == 0
    heard = asyncio.Queue()
    heard.put_nowait("an assignment")
    for busy in (
        {"_events": heard},
        {"_preparing": {"job": Task(False)}},
        {"_held": {"job": None}},
        {"_uploads": {"attempt": Task(False)}},
    ):
        assert follow(tmp_path, "exit 1", **busy) == 0
    # What has ended does not keep the session.
    assert follow(tmp_path, "exit 1", _preparing={"job": Task(True)}, _uploads={"attempt": Task(True)}) == 3
