"""SIGKILL in every phase of a round, to members and to the coordinator, with real processes."""

import sys

import pytest

from tacit.reason import Reason
from tacit.v1 import operator_pb2 as pb
from tests.support.processes import Process, running_federation
from tests.support.sweep import sweep

MEMBERS = ("north", "east", "south", "west")
PHASES = ("advertise", "share", "mask", "confirm", "unmask")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("federation"), *MEMBERS) as running:
        yield running


@pytest.fixture(autouse=True)
def _members_end(federation):
    yield
    for process in federation.processes[:]:
        if process is not federation.coordinator:
            process.end()
            federation.processes.remove(process)


@pytest.fixture
def halting(federation, tmp_path):
    """Starts members that halt in a phase while the file `halting.file` exists."""

    def start(name, phase, *more):
        words = [sys.executable, "-m", "tests.support.halting_member", phase, str(start.file), "--", "run"]  # type: ignore[attr-defined]
        words += [
            "--data",
            str(federation.data(name)),
            "--home",
            str(federation.home(name)),
            "--log-format",
            "json",
            *more,
        ]
        member = Process(name, words, federation.folder / f"{name}.log")
        federation.processes.append(member)
        return member

    start.file = tmp_path / "halt"  # type: ignore[attr-defined]
    start.file.touch()  # type: ignore[attr-defined]
    return start


def attempts(detail):
    return [attempt for each in detail.rounds for attempt in each.attempts]


# The simulated fleet's tests have every phase.
@pytest.mark.parametrize("phase", sweep(PHASES, "share"))
def test_a_round_survives_one_killed_member(federation, halting, phase):
    job = f"one-{phase}"
    federation.job(job, count=1, min_members=4)
    for name in MEMBERS[:3]:
        federation.start(name)
    victim = halting("west", phase)
    victim.wait_for("halted", phase=phase)
    victim.kill()
    detail = federation.finished(job)
    (attempt,) = attempts(detail)
    # In unmask, the others' shares open the sum, so a member that has not answered yet is no dropout.
    missed = [] if phase == "unmask" else [("west", phase, Reason.REASON_DISCONNECTED)]
    assert [(lost.member, lost.phase, lost.reason) for lost in attempt.dropouts] == missed
    # After the mask phase, a vector that has arrived is in the sum, even if its sender is gone.
    assert ("west" in attempt.survivors) == (phase in ("confirm", "unmask"))
    assert len(attempt.survivors) >= 3


@pytest.mark.parametrize("phase", sweep(PHASES, "mask"))
def test_too_many_killed_members_abandon_the_attempt(federation, halting, phase):
    job = f"all-but-{phase}"
    federation.job(job, count=1, min_members=4)
    for name in MEMBERS[:2]:
        federation.start(name)
    victims = [halting(name, phase) for name in MEMBERS[2:]]
    for victim in victims:
        victim.wait_for("halted", phase=phase)
    for victim in victims:
        victim.kill()
    detail = federation.wait_for(job, lambda detail: attempts(detail) and attempts(detail)[0].outcome != "open")
    first = attempts(detail)[0]
    assert (first.outcome, first.reason) == ("abandoned", Reason.REASON_THRESHOLD_LOST)
    assert {(lost.member, lost.phase) for lost in first.dropouts} == {("south", phase), ("west", phase)}
    assert detail.job.version_number == 0
    # The members come back, and the same round succeeds.
    for name in MEMBERS[2:]:
        federation.start(name)
    detail = federation.finished(job)
    assert attempts(detail)[-1].outcome == "published"
    assert sorted(attempts(detail)[-1].survivors) == sorted(MEMBERS)


@pytest.mark.parametrize("phase", sweep(PHASES, "unmask"))
def test_a_killed_coordinator_repeats_the_round(federation, halting, phase):
    job = f"coordinator-{phase}"
    federation.job(job, count=2, min_members=4)
    # Shares of three members would open the sum, so only two answer in unmask.
    answering = 2 if phase == "unmask" else 3
    others = [federation.start(name) for name in MEMBERS[:answering]]
    for held in [halting(name, phase) for name in MEMBERS[answering:]]:
        held.wait_for("halted", phase=phase)
    federation.wait_for(job, lambda detail: detail.job.phase == phase and detail.job.answered == answering)
    federation.coordinator.kill()
    halting.file.unlink()
    for member in others:
        member.wait_for("disconnected")
    federation.serve()
    detail = federation.finished(job)
    first, second = attempts(detail)[:2]
    assert (first.outcome, first.reason) == ("abandoned", Reason.REASON_COORDINATOR_RESTARTED)
    assert (second.outcome, sorted(second.survivors)) == ("published", sorted(MEMBERS))
    assert [version.number for version in detail.versions] == [0, 1, 2]


def test_a_stuck_job_does_not_hold_up_another(federation, halting):
    federation.job("wedged", count=1, min_members=4)
    for name in MEMBERS[:3]:
        federation.start(name)
    held = halting("west", "share", "--job", "wedged")
    held.wait_for("halted", phase="share")
    assert federation.show("wedged").job.phase == "share"
    federation.job("beside", count=2, min_members=3)
    # Three members of the second job are also in the first job's attempt, and wait there.
    detail = federation.finished("beside")
    assert detail.job.version_number == 2
    assert federation.show("wedged").job.status == pb.JOB_STATUS_RUNNING
    halting.file.unlink()
    federation.finished("wedged")


def test_a_silent_member_is_dropped_at_the_deadline(federation, halting):
    federation.job("silent", count=1, min_members=4, deadlines={"share": 3})
    for name in MEMBERS[:3]:
        federation.start(name)
    held = halting("west", "share")
    held.wait_for("halted", phase="share")
    detail = federation.finished("silent")
    (attempt,) = attempts(detail)
    assert [(lost.member, lost.phase, lost.reason) for lost in attempt.dropouts] == [
        ("west", "share", Reason.REASON_PHASE_DEADLINE)
    ]
    assert held.process.poll() is None
