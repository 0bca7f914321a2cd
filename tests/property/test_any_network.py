"""A whole federation in one thread, under a clock and a network that hypothesis generates.

Hypothesis generates operations (kills, restarts, broken connections, coordinator crashes, pauses) and a network that
delays, repeats, reorders and loses messages in both directions; then nothing more fails. Whatever happened, every
opened sum is that of U3's inputs, nothing opens below the threshold, no member reveals both shares of another, nothing
happens twice, and the job ends.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from edge_client.policy.policy import Policy
from tests.support.fleet import DELAY_MS, Fleet, job_document

# The bound on sums for one version would stop a job that fails this often. tests/attacks tests that bound.
POLICY = Policy(mechanisms=("none",), allow_second_sum=True)
QUIET_MS = 120_000


@dataclass(frozen=True)
class Operation:
    """Something that happens to a party at some time, and for how long."""

    at_ms: int
    kind: str
    member: int
    for_ms: int


operations = st.lists(
    st.builds(
        Operation,
        at_ms=st.integers(0, QUIET_MS),
        kind=st.sampled_from(["kill", "cut", "crash", "pause"]),
        member=st.integers(0, 7),
        for_ms=st.sampled_from([0, 1, 50, 1500, 20_000]),
    ),
    max_size=25,
)


@dataclass(frozen=True)
class Network:
    """Probabilities for each message, and the longest delay."""

    seed: int
    lost: float
    repeated: float
    longest_ms: int


networks = st.builds(
    Network,
    seed=st.integers(0, 2**32),
    lost=st.sampled_from([0.0, 0.02, 0.1]),
    repeated=st.sampled_from([0.0, 0.1, 0.5]),
    longest_ms=st.sampled_from([DELAY_MS, 100, 3000]),
)


def play(members, network, happenings):
    chances = random.Random(network.seed)
    fleet = Fleet(members, seed=network.seed, policy=POLICY, job=job_document(count=2, max_failed_rounds=1000))

    def delays(name, message):
        if fleet.now_ms > QUIET_MS:
            return (DELAY_MS,)
        copies = 1 + (chances.random() < network.repeated)
        return tuple(chances.randint(1, network.longest_ms) for _ in range(copies) if chances.random() >= network.lost)

    fleet.delays = delays

    def outlasting(action):
        def wrapped():
            action()

        wrapped.of_member = True  # type: ignore[attr-defined]
        return wrapped

    def back(name):
        member = fleet.members[name]
        if not member.alive:
            fleet.restart(name)
        elif not member.connected:
            fleet.connect(name)

    def happen(operation):
        name = f"m{operation.member % members}"
        if operation.kind == "kill":
            fleet.kill(name)
        elif operation.kind == "cut":
            fleet.cut(name)
        elif operation.kind == "crash":
            fleet.crash_coordinator()
        else:
            fleet.post(ev.Pause())
            fleet.at(operation.for_ms + 1, outlasting(lambda: fleet.post(ev.Resume())))
        fleet.at(operation.for_ms + 1, outlasting(lambda: back(name)))

    for operation in happenings:
        fleet.at(operation.at_ms, outlasting(lambda operation=operation: happen(operation)))
    fleet.at(QUIET_MS + 30_000, outlasting(lambda: fleet.post(ev.Resume())))
    for name in fleet.members:
        fleet.at(QUIET_MS + 25_000, outlasting(lambda name=name: back(name)))
    return fleet.connect().run()


def check(fleet):
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    cohorts = {record.attempt: record.cohort for record in fleet.records if isinstance(record, fx.OpenAttempt)}
    for end in fleet.ends():
        if end.published:
            threshold, _ = secure_agg.default_thresholds(len(cohorts[end.attempt]))
            assert threshold <= len(end.survivors)
            assert set(end.survivors) <= set(cohorts[end.attempt])
    opened = [record.round for record in fleet.records if isinstance(record, fx.OpenRound)]
    ended = [record.round for record in fleet.records if isinstance(record, fx.EndRound)]
    assert opened == sorted(set(opened))
    assert ended == opened
    for member in fleet.members.values():
        assert len(member.joined) == len(set(member.joined))
        assert len(member.opened) == len(set(member.opened))
        revealed = {}
        for message in member.said:
            payload = getattr(message, "payload", None)
            if isinstance(payload, secure_agg.Unmasking):
                # A repeat is the same to the byte, and no member reveals both shares of another.
                assert revealed.setdefault(message.attempt, payload) == payload
                seeds = {share.dealer for share in payload.seed_shares}
                keys = {share.dealer for share in payload.root_shares}
                assert not seeds & keys
                assert member.name not in keys


@given(members=st.integers(3, 8), network=networks, happenings=operations)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_network_leads_to_a_sum_or_a_clean_end(members, network, happenings):
    check(play(members, network, happenings))


@pytest.mark.long
@pytest.mark.timeout(1200)
@given(members=st.integers(3, 8), network=networks, happenings=operations)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_network_leads_to_a_sum_or_a_clean_end_at_length(members, network, happenings):
    check(play(members, network, happenings))
