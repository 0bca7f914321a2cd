"""A member sleeps while its command says so, and never in the middle of a round."""

import asyncio
import stat

import pytest

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


@pytest.mark.parametrize("command", ["", "  ", "'unfinished"])
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
    vars(agent).update({"_link": line, "_preparing": {}, "_held": {}, "_uploads": {}} | held)

    async def run():
        with pytest.raises(asyncio.CancelledError):
            await agent._follow_idle(Idle(str(script(tmp_path, text)), seconds=0.001))

    asyncio.run(run())
    return line.hung_up


def test_the_session_ends_between_rounds_alone(tmp_path):
    assert follow(tmp_path, "exit 1") == 3
    assert follow(tmp_path, "exit 0") == 0
    for busy in (
        {"_preparing": {"job": Task(False)}},
        {"_held": {"job": None}},
        {"_uploads": {"attempt": Task(False)}},
    ):
        assert follow(tmp_path, "exit 1", **busy) == 0
    # What has ended does not keep the session.
    assert follow(tmp_path, "exit 1", _preparing={"job": Task(True)}, _uploads={"attempt": Task(True)}) == 3
