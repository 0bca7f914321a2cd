"""`tacit.local_federation`: a real coordinator and members from Python, to an exported model, and nothing is left."""

import asyncio
import signal
import subprocess
import sys
import threading

import psutil
import pytest

import tacit
from tacit.job import JobSpec
from tests.support.tried_jobs import TOML, written_job, written_rows
from toolkit.console import CommandFailed, ExitCode

NONE = (
    TOML.split("# Found by the operator.")[0]
    + "[training]\nlearning_rate = 0.05\n[rounds]\ncount = 2\nmin_members = 3\n"
)


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with tacit.local_federation(("north", "east", "south"), folder=tmp_path_factory.mktemp("town") / "here") as found:
        yield found


def test_a_job_from_rows_to_a_model(town, tmp_path):
    job, _ = written_job(tmp_path, NONE)
    rows = written_rows(120)
    parts = {name: [(row["text"], row["label"]) for row in rows[at::3]] for at, name in enumerate(town.members)}
    done = town.train(job, parts)
    assert (done["status"], done["version_number"]) == ("finished", 2)
    # A ledger of that name is in each home: a member in a thread is a member.
    assert all(any((member.home / "receipts").rglob("*.json")) for member in town.members.values())
    model = tacit.load(town.coordinator.export("tried", tmp_path / "model"))
    assert model.predict(["the sun"])[0].label in ("day", "night")
    assert [each["name"] for each in town.coordinator.jobs()] == ["tried"]
    assert {each["name"] for each in town.coordinator.members()} == set(town.members)


def test_the_same_calls_in_an_event_loop(town):
    async def work():
        coordinator = tacit.AsyncCoordinator(town.coordinator.folder)
        async for status in coordinator.watch():
            return status, await coordinator.status()

    first, second = asyncio.run(work())
    assert first["federation"] == second["federation"] == town.coordinator.status()["federation"]
    assert next(iter(town.coordinator.watch()))["federation"] == first["federation"]


def test_failures_are_sentences(town, tmp_path):
    with pytest.raises(CommandFailed, match="nothing") as failed:
        town.coordinator.finished("nothing")
    assert failed.value.code is ExitCode.NOT_FOUND
    with pytest.raises(CommandFailed, match="is not an operator's folder"):
        tacit.Coordinator(tmp_path)
    with pytest.raises(CommandFailed, match=r"edge_client enrol"):
        tacit.Member(tmp_path / "nobody").run([("a", "day")], ledger="own")
    with pytest.raises(ValueError, match="there is no member 'west'"):
        town.train(JobSpec.from_toml(written_job(tmp_path, NONE)[0]), {"west": []})
    with pytest.raises(CommandFailed, match="token"):
        tacit.Member.enrol(tmp_path / "thief", "no token")


def test_ctrl_c_ends_a_member_and_then_the_program(town, monkeypatch):
    """Also after an earlier stop, and in a notebook, whose loop runs while the member has a thread."""
    member, begun = town.members["north"], tacit.Member._begun
    member.stop()

    def presses(self, stop):
        begun(self, stop)
        if stop is not None:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    async def in_a_notebook():
        member.run([("the sun", "day")], ledger="pressed", until_finished=False)

    monkeypatch.setattr(tacit.Member, "_begun", presses)
    theirs = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, theirs)
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            member.run([("the sun", "day")], ledger="pressed", until_finished=False)
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(in_a_notebook())
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)
        loop.close()
    # It has let go of its home.
    monkeypatch.undo()
    member.start([("the sun", "day")], ledger="pressed").stop()


def test_a_coordinator_does_not_outlive_a_killed_program(tmp_path):
    script = f"""
import sys, tacit
with tacit.local_federation(0, folder={str(tmp_path / "town")!r}):
    print("ready", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"ready\n"
        (coordinator,) = psutil.Process(program.pid).children()
        program.kill()
    assert psutil.wait_procs([coordinator], timeout=30)[0]


def test_nothing_is_left_behind(tmp_path):
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with tacit.local_federation(1) as town:
        folder = town.folder
        assert {each.pid for each in psutil.Process().children(recursive=True)} - before
    assert not folder.exists()
    assert not {each.pid for each in psutil.Process().children(recursive=True)} - before
