"""Masked vectors over slow lines: what moves gets more time, what does not is dropped, and the job bounds both."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.domain.jobs import JobStatus
from coordinator.rounds import attempt as attempts
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds.machine import transition
from coordinator.rounds.timers import PhaseDeadline
from edge_client.policy.policy import Policy
from secure_agg.server import CollectingMasked
from tacit.job import Deadlines
from tacit.reason import Reason
from tests.support.fleet import Fleet, job_document

MASK = 100.0
PLAIN = Policy(mechanisms=("none",))


@pytest.fixture(autouse=True, scope="module")
def _counted_in_bytes():
    """The vectors here are smaller than a message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempts, "UPLOAD_MESSAGE", 0)
        yield


class SlowFleet(Fleet):
    """A fleet whose vectors take time. `speeds` has the seconds that a member needs for its whole vector.

    `first` has the seconds before its first byte, and `messages` says in how many messages its vector is counted.
    """

    def __init__(self, members, speeds, *, job=None, stops=None, first=None, messages=None):
        job = job or job_document(count=1, deadlines=Deadlines(training=60, reconnect=2, mask=MASK))
        super().__init__(members, policy=PLAIN, job=job)
        self.speeds = speeds
        self.first = first or {}
        self.messages = messages
        # The share of its vector after which a member sends nothing more.
        self.stops = stops or {}
        self._began = {}

    def _upload(self, member, attempt, packed, message):
        before = self.first.get(member.name, 0)
        self._began[attempt, member.name] = (self.now_ms + 1000 * before, len(packed))
        seconds = before + self.speeds.get(member.name, 0)
        if member.name not in self.stops:
            self.at(1000 * seconds, lambda: super(SlowFleet, self)._upload(member, attempt, packed, message))

    def arrived(self):
        """Bytes of each vector. Here they have few, so parts of a byte count."""
        found = {}
        for (attempt, name), (began_ms, size) in self._began.items():
            if attempt == getattr(self.state.phase, "attempt", None):
                share = max(0.0, (self.now_ms - began_ms) / max(1, 1000 * self.speeds.get(name, 0)))
                share = min(share, self.stops.get(name, 1.0))
                found[name] = size * (share if self.messages is None else int(share * self.messages) / self.messages)
        return found


def played(speeds, *, members=5, **how):
    fleet = SlowFleet(members, speeds, **how)
    fleet.connect().run()
    fleet.check()
    return fleet


def lasted(fleet):
    """Seconds that the mask phases took."""
    return [count.seconds for count in fleet.counts if isinstance(count, counts.PhaseEnded) and count.phase == "mask"]


def waits(fleet):
    return [(count.members, count.seconds) for count in fleet.counts if isinstance(count, counts.UploadsAwaited)]


def test_a_vector_that_moves_is_waited_for():
    fleet = played({"m4": 390})
    (end,) = fleet.ends()
    assert end.published
    assert "m4" in end.survivors
    assert end.dropouts == ()
    assert waits(fleet) == [(1, MASK)] * 3
    assert 389 <= lasted(fleet)[0] <= 392


def test_a_member_that_begins_late_is_judged_from_its_first_byte():
    """Downloads, masking and the ledger come before it, and nobody knows how long they take."""
    fleet = played({"m4": 300}, first={"m4": 80})
    (end,) = fleet.ends()
    assert (end.dropouts, waits(fleet)) == ((), [(1, MASK)] * 3)


@pytest.mark.parametrize(("message", "stays"), [(1 / 6, True), (0, False)])
def test_bytes_are_counted_in_messages_and_nobody_is_dropped_for_the_part_of_one(monkeypatch, message, stays):
    """At a little more than the floor, two of six messages arrive before each look, or one."""
    fleet = SlowFleet(5, {"m4": 390}, messages=6)
    fleet.connect().run(lambda: bool(fleet._began))
    size = next(iter(fleet._began.values()))[1]
    monkeypatch.setattr(attempts, "UPLOAD_MESSAGE", message * size)
    fleet.run()
    (end,) = fleet.ends()
    assert ("m4" in end.survivors) is stays


def test_one_that_would_not_arrive_in_the_jobs_limit_is_dropped_at_the_second_look():
    fleet = played({"m4": 410})
    (end,) = fleet.ends()
    assert end.published
    assert [(lost.member, lost.reason) for lost in end.dropouts] == [("m4", Reason.REASON_PHASE_DEADLINE)]
    assert waits(fleet) == [(1, MASK)]
    assert 2 * MASK <= lasted(fleet)[0] < 2 * MASK + 1


def test_a_vector_that_stops_costs_one_deadline_more():
    """It was fast, stops at nine tenths, and would otherwise hold the round for nine tenths of the limit."""
    fleet = played({"m4": 105}, stops={"m4": 0.9})
    (end,) = fleet.ends()
    assert [(lost.member, lost.reason) for lost in end.dropouts] == [("m4", Reason.REASON_PHASE_DEADLINE)]
    assert waits(fleet) == [(1, MASK)]
    assert 2 * MASK <= lasted(fleet)[0] < 2 * MASK + 1


def test_a_silent_member_gets_no_time_from_one_that_moves():
    fleet = SlowFleet(5, {"m4": 250}, stops={"m3": 0.0})
    fleet.connect()
    fleet.run(lambda: bool(waits(fleet)))
    assert fleet.state.members["m3"].missed_deadlines == 1
    fleet.run()
    (end,) = fleet.ends()
    assert [(lost.member, lost.reason) for lost in end.dropouts] == [("m3", Reason.REASON_PHASE_DEADLINE)]
    assert "m4" in end.survivors
    assert lasted(fleet)[0] < 252


def test_the_limit_holds_whatever_moves():
    """A member that drips at the floor holds a round as long as the job says, and no longer."""
    limit = Deadlines(training=60, reconnect=2, mask=MASK, mask_limit=250)
    fleet = SlowFleet(5, {"m4": 249.9}, job=job_document(count=1, deadlines=limit), stops={"m4": 0.999})
    fleet.connect().run()
    (end,) = fleet.ends()
    assert [lost.member for lost in end.dropouts] == ["m4"]
    assert waits(fleet) == [(1, 100), (1, 50)]
    assert 250 <= lasted(fleet)[0] < 251


def test_the_limit_holds_whatever_the_desk_counts():
    """A vector cannot have more bytes than it has. If it could, the floor alone would hold no member to the limit."""
    limit = Deadlines(training=60, reconnect=2, mask=MASK, mask_limit=250)
    fleet = SlowFleet(5, {}, job=job_document(count=1, deadlines=limit), stops={"m4": 0.0})
    counted = itertools.count(1)
    fleet.arrived = lambda: {"m4": 10**6 * next(counted)}
    fleet.connect().run(lambda: len(waits(fleet)) > 3)
    (end,) = fleet.ends()
    assert [lost.member for lost in end.dropouts] == ["m4"]
    assert waits(fleet) == [(1, 100), (1, 50)]
    assert 250 <= lasted(fleet)[0] < 251


def test_without_a_longer_limit_the_deadline_is_one():
    limit = Deadlines(training=60, reconnect=2, mask=MASK, mask_limit=MASK)
    fleet = played({"m4": 101}, job=job_document(count=1, deadlines=limit))
    assert [lost.member for lost in fleet.ends()[0].dropouts] == ["m4"]
    assert waits(fleet) == []


def test_too_few_that_move_end_the_attempt_at_the_deadline_and_only_the_others_are_late():
    fleet = SlowFleet(5, {"m4": 250}, stops=dict.fromkeys(("m0", "m1", "m2"), 0.0))
    fleet.connect()
    fleet.run(lambda: bool(fleet.ends()))
    (end,) = fleet.ends()
    assert (end.published, end.reason) == (False, Reason.REASON_THRESHOLD_LOST)
    assert [lost.member for lost in end.dropouts] == ["m0", "m1", "m2"]
    late = {name: view.missed_deadlines for name, view in fleet.state.members.items()}
    assert late == {"m0": 1, "m1": 1, "m2": 1, "m3": 0, "m4": 0}


def test_a_late_look_changes_nothing():
    """The look of an earlier attempt or phase fires after it is over."""
    fleet = SlowFleet(5, {"m4": 390})
    fleet.connect().run(lambda: bool(waits(fleet)))
    assert isinstance(fleet.state.phase.protocol, CollectingMasked)
    before = fleet.state
    for timer in (PhaseDeadline(before.attempt - 1, "mask"), PhaseDeadline(before.attempt, "share")):
        after, effects = transition(before, fleet.fired(timer), fleet.now_ms)
        assert (after, effects) == (before, ())


def test_every_job_ends_whatever_moves():
    """Also when nobody is fast enough, round after round."""
    fleet = played(dict.fromkeys(("m0", "m1", "m2"), 2000), job=job_document(count=2, max_failed_rounds=2))
    assert fleet.state.status is JobStatus.PAUSED
    assert {record.reason for record in fleet.records if isinstance(record, fx.EndAttempt)} == {
        Reason.REASON_THRESHOLD_LOST
    }


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 99, 101, 200, 310, 390, 500]), min_size=5, max_size=5),
    st.dictionaries(st.integers(0, 4), st.sampled_from([0.0, 0.2, 0.6, 0.99]), max_size=3),
)
def test_any_speeds(seconds, stops):
    """No phase outlasts the job's limit. Who keeps to the floor is in the sum, and nobody else was dropped."""
    speeds = {f"m{number}": each for number, each in enumerate(seconds)}
    fleet = SlowFleet(5, speeds, stops={f"m{number}": share for number, share in stops.items()})
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    (end,) = fleet.ends()
    assert all(each <= 4 * MASK + 1 for each in lasted(fleet))
    sound = {name for name, each in speeds.items() if each <= 390 and int(name[1:]) not in stops}
    assert not sound & {lost.member for lost in end.dropouts}
    if end.published:
        assert sound <= set(end.survivors)
        assert {lost.member for lost in end.dropouts} == set(speeds) - set(end.survivors)
