"""Eight members in two groups over real processes: one is killed, and both groups open."""

import sys

import pytest

from tacit.reason import Reason
from tests.support.processes import Process, running_federation

MEMBERS = tuple(f"m{number}" for number in range(8))
GROUPS = "[aggregation]\ngroups = 2\nassumed_corrupt = 1\n"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("cohorts"), *MEMBERS) as running:
        yield running


def test_a_member_killed_in_its_group_costs_no_group(federation, tmp_path):
    federation.job("cohorts", count=1, min_members=8, mechanism=GROUPS)
    others = [federation.start(name) for name in MEMBERS[:-1]]
    victim, halted = MEMBERS[-1], tmp_path / "halt"
    halted.touch()
    words = [sys.executable, "-m", "tests.support.halting_member", "mask", str(halted), "--", "run"]
    words += ["--data", str(federation.data(victim)), "--home", str(federation.home(victim)), "--log-format", "json"]
    process = Process(victim, words, federation.folder / f"{victim}.log")
    federation.processes.append(process)
    process.wait_for("halted", phase="mask")
    process.kill()
    detail = federation.finished("cohorts")
    (attempt,) = [attempt for each in detail.rounds for attempt in each.attempts]
    assert attempt.outcome == "published"
    assert [(lost.member, lost.phase, lost.reason) for lost in attempt.dropouts] == [
        (victim, "mask", Reason.REASON_DISCONNECTED)
    ]
    assert sorted(attempt.survivors) == sorted(MEMBERS[:-1])
    # A member fetched what it needs of its own group alone: three certificates and the keys of the same three.
    for member in others:
        member.wait_for("certificates_fetched", fetched=6, missing=0)
