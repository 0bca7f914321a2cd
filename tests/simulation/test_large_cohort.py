"""A cohort above 200: both machines on the sparse graph, with rosters by digest, whole rounds in one thread.

Includes what a lying coordinator can do with the numbers of a sparse graph, and with the certificates of a roster.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import secure_agg
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.machine import transition as coordinators
from coordinator.rounds.state import Aggregating, Publishing
from coordinator.rounds.timers import Look
from edge_client.policy.policy import Policy
from edge_client.session import states
from edge_client.session.machine import transition
from secure_agg import sparse_thresholds, thresholds_for
from secure_agg.session import KEYS_BYTES
from tacit.job import Aggregation
from tacit.messages import AttemptOpened, AttemptRefusal
from tacit.reason import Reason, word
from tests.support.fleet import Fleet, job_document

SIZE, FEW = 250, 210
VICTIM = "m7"


def large(size=SIZE, aggregation=Aggregation()):  # noqa: B008
    """A fleet of this size, all in one cohort. All share a process, so each signature is verified once."""
    job = job_document(aggregation, count=1, min_members=205, target_members=size)
    return Fleet(size, job=job)


# A graph with 22 neighbours in place of 56, and so a third of the work, for what does not depend on their number.
CORRUPT, LOST = 0.02, 0.05


def few():
    """A fleet of the smallest large cohort, on a light graph that every member's policy allows."""
    job = job_document(
        Aggregation(max_corrupt_share=CORRUPT, max_lost_share=LOST), count=1, min_members=205, target_members=FEW
    )
    policy = Policy(mechanisms=("none",), min_corrupt_share=CORRUPT)
    return Fleet(FEW, job=job, policy=policy)


def payload_of(message):
    return getattr(message, "payload", None)


def refusals(fleet, name=VICTIM):
    return [payload_of(each) for each in fleet.members[name].said if isinstance(payload_of(each), AttemptRefusal)]


# The light graph loses at most 10 of 210, and costs a third. With 56 neighbours, at most 25 of 250 may be lost.
@pytest.mark.parametrize(("fleet_of", "size"), [(few, FEW), pytest.param(large, SIZE, marks=pytest.mark.long)])
def test_a_round_with_dropouts_in_every_phase_opens_the_sum(fleet_of, size):
    fleet = fleet_of()
    # Two are lost before each phase, by what they receive in it.
    phases = [
        AttemptOpened,
        secure_agg.DigestRoster,
        secure_agg.ReceivedDealings,
        secure_agg.Survivors,
        secure_agg.Confirmations,
    ]
    lost = {f"m{10 * number + at}": kind for number, kind in enumerate(phases, start=1) for at in (1, 2)}
    sizes = []

    def lose(name, message):
        if isinstance(payload_of(message), lost.get(name, ())):
            fleet.kill(name)
        if isinstance(payload_of(message), secure_agg.DigestRoster):
            sizes.append(len(message.payload.advertisements))

    fleet.before = lose
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    (end,) = fleet.ends()
    assert end.published
    in_sum = {name for name, kind in lost.items() if kind in (secure_agg.Survivors, secure_agg.Confirmations)}
    assert set(end.survivors) == set(fleet.members) - (lost.keys() - in_sum)
    assert len(end.survivors) == size - 6
    missed = {each.member: each.phase for each in end.dropouts}
    assert {missed[name] for name, kind in lost.items() if kind is secure_agg.DigestRoster} == {"share"}
    assert len(sizes) == size - 2
    assert set(sizes) == {size - 2}
    # Nobody read more than its neighbours' dealings.
    context = fleet.members["m0"].state.memory.sent[0]
    assert context.survivors == frozenset(end.survivors)


@pytest.fixture(scope="module")
def about():
    """A fleet in which a member is about to receive the numbers of a sparse graph, and that message."""
    fleet, message = large(), []

    def keep(name, arriving):
        if name == VICTIM and isinstance(payload_of(arriving), AttemptOpened):
            message.append(arriving)

    fleet.before = keep
    # The message is never delivered.
    fleet.lose = lambda name, leaving: isinstance(payload_of(leaving), AttemptOpened) and name == VICTIM
    sent = fleet._send

    def send(name, leaving):
        if name == VICTIM and isinstance(payload_of(leaving), AttemptOpened):
            message.append(leaving)
        sent(name, leaving)

    fleet._send = send
    fleet.connect().run(lambda: bool(message))
    return fleet, message[0]


def refused(about, context):
    """The member's refusal of these numbers. Checks that it shows no key."""
    fleet, message = about
    member = fleet.members[VICTIM]
    bent = replace(message, payload=AttemptOpened(context))
    _, effects = transition(member.environment, member.state, states.Received(bent))
    said = [payload_of(each.message) for each in effects if isinstance(each, states.Say)]
    assert not any(isinstance(each, secure_agg.Advertisement) for each in said)
    assert not any(isinstance(each, states.Joined) for each in effects)
    (refusal,) = [each for each in said if isinstance(each, AttemptRefusal)]
    (note,) = [each for each in effects if isinstance(each, states.Note) and each.what == "attempt_refused"]
    assert note.fields["reason"] == word(refusal.reason)
    assert note.fields["detail"] == refusal.detail
    return refusal


def test_a_member_computes_the_numbers_of_a_sparse_graph_itself(about):
    fleet, message = about
    context = message.payload.context
    assert context.sparse is not None
    assert (context.cohort, context.assumed_corrupt) == (250, 25)
    assert (context.sparse.sigma, context.sparse.corrupt_millionths, context.sparse.lost_millionths) == (
        80,
        100_000,
        100_000,
    )
    member = fleet.members[VICTIM]
    _, effects = transition(member.environment, member.state, states.Received(message))
    assert any(isinstance(payload_of(getattr(each, "message", None)), secure_agg.Advertisement) for each in effects)


def weaker(context, **change):
    """The smallest graph that these weaker numbers allow, with all numbers consistent."""
    graph = context.sparse
    numbers = {
        "corrupt": graph.corrupt_millionths / 10**6,
        "lost": graph.lost_millionths / 10**6,
        "sigma": graph.sigma,
        "absent": graph.absent,
        **change,
    }
    found, threshold, corrupt = sparse_thresholds(context.cohort, **numbers)
    return replace(context, graph=found, threshold=threshold, assumed_corrupt=corrupt)


CONSISTENT = {
    "sigma": ({"sigma": 60}, ("sigma (60, not 80)",)),
    "gamma": ({"corrupt": 0.05}, ("corrupt_millionths (50000, not 100000)", "assumed_corrupt (12, not 25)")),
    "delta": ({"lost": 0.05}, ("lost_millionths (50000, not 100000)", "degree")),
    "absent": ({"absent": 0}, ("absent (0, not 12)",)),
}


@pytest.mark.parametrize("number", CONSISTENT)
def test_weaker_but_consistent_numbers_are_not_those_of_the_job(about, number):
    change, words = CONSISTENT[number]
    refusal = refused(about, weaker(about[1].payload.context, **change))
    assert refusal.reason == Reason.REASON_CONTEXT_UNEXPECTED
    assert not [each for each in words if each not in refusal.detail], refusal.detail


ALONE = {
    "degree": lambda context: {"graph": replace(context.sparse, degree=context.sparse.degree - 10)},
    "threshold": lambda context: {"threshold": context.threshold - 1},
    "sigma": lambda context: {"graph": replace(context.sparse, sigma=60)},
    "a sigma below any": lambda context: {"graph": replace(context.sparse, sigma=39)},
    "gamma": lambda context: {"graph": replace(context.sparse, corrupt_millionths=50_000)},
    "assumed corrupt": lambda context: {"assumed_corrupt": 12},
    "delta": lambda context: {"graph": replace(context.sparse, lost_millionths=50_000, absent=0)},
    "absent": lambda context: {"graph": replace(context.sparse, absent=0)},
    "the graph": lambda context: {"graph": secure_agg.Graph.COMPLETE, "threshold": 200},
}
# Alone, these contradict the rest. The others give a context that is not the job's.
CONTRADICTING = {"degree", "threshold", "a sigma below any", "gamma", "assumed corrupt"}


@pytest.mark.parametrize("number", ALONE)
def test_one_number_lowered_alone_is_refused_by_name(about, number):
    context = about[1].payload.context
    change = ALONE[number](context)
    if number in CONTRADICTING:
        with pytest.raises(secure_agg.ContextInvalid) as why:
            replace(context, **change)
        refusal = refused(about, str(why.value))
        assert refusal.reason == Reason.REASON_CONTEXT_INVALID
        assert str(why.value)[:300] in refusal.detail
    else:
        refusal = refused(about, replace(context, **change))
        assert refusal.reason == Reason.REASON_CONTEXT_UNEXPECTED
        named = {"delta": "lost_millionths", "the graph": "graph (complete, not sparse)"}.get(number, number)
        assert named in refusal.detail


def test_the_numbers_of_a_job_must_meet_the_members_own_minimum():
    """Every member computes the job's numbers, and its own policy has the last word on them."""
    fleet = large(aggregation=Aggregation(max_corrupt_share=0.05))
    context = None

    def keep(name, message):
        nonlocal context
        if isinstance(payload_of(message), AttemptOpened):
            context = message.payload.context

    fleet.before = keep
    fleet.connect().run(lambda: bool(refusals(fleet)))
    assert context.sparse.corrupt_millionths == 50_000
    (refusal,) = refusals(fleet)
    assert refusal.reason == Reason.REASON_POLICY_CORRUPTION
    assert "12 corrupt members; the policy requires 25" in refusal.detail


@dataclass
class Fetching:
    """A round in which three members lack something of the roster, what each lacks, and all members' certificates."""

    fleet: Fleet
    certificates: dict[str, bytes]
    withheld_certificate: bytes
    withheld_keys: bytes


# Who lacks a neighbour's keys, and who has all certificates but two and its own. The victim lacks a certificate.
KEYLESS, NEWCOMER, UNKNOWN = "m17", "m27", ("m98", "m99")


@pytest.fixture(scope="module")
def fetching():
    fleet, keys, seen = few(), [], []
    certificates = {name: each.environment.identity.certificate for name, each in fleet.members.items()}
    digests = {name: secure_agg.certificate_digest(each) for name, each in certificates.items()}
    everybody = fleet.serves

    def serves(name, digest):
        found = everybody(name, digest)
        if (name, digest) == (VICTIM, digests["m99"]):
            return None
        if name != KEYLESS or found is None or len(found) != KEYS_BYTES or keys not in ([], [digest]):
            return found
        keys[:] = [digest]
        return None

    def again(name, message):
        # The connection breaks after the roster, which comes again while the certificates are on their way.
        if name == NEWCOMER and isinstance(payload_of(message), secure_agg.DigestRoster) and not seen:
            seen.append(message)
            fleet.at(1, lambda: fleet.tell(NEWCOMER, states.Received(message)))

    known = {digests[name]: each for name, each in certificates.items() if name not in (*UNKNOWN, NEWCOMER)}
    member = fleet.members[NEWCOMER]
    member.environment = replace(member.environment, certificate_of=known.get)
    fleet.serves, fleet.before = serves, again
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    return Fetching(fleet, certificates, digests["m99"], *keys)


def test_what_members_cannot_fetch_costs_nobody_else(fetching):
    (end,) = fetching.fleet.ends()
    assert end.published
    assert {(each.member, each.reason) for each in end.dropouts} == {
        (VICTIM, Reason.REASON_ROSTER_CERTIFICATE_MISSING),
        (KEYLESS, Reason.REASON_ROSTER_KEYS_MISSING),
    }
    assert set(end.survivors) == fetching.fleet.members.keys() - {VICTIM, KEYLESS}


def test_a_missing_certificate_is_refused_by_name(fetching):
    (refusal,) = refusals(fetching.fleet)
    assert refusal.reason == Reason.REASON_ROSTER_CERTIFICATE_MISSING
    assert "m99" in refusal.detail
    assert fetching.withheld_certificate.hex() in refusal.detail
    assert fetching.fleet.members[VICTIM].kept == []


def test_missing_keys_of_a_neighbour_are_refused_by_name(fetching):
    (refusal,) = refusals(fetching.fleet, KEYLESS)
    assert refusal.reason == Reason.REASON_ROSTER_KEYS_MISSING
    assert fetching.withheld_keys.hex() in refusal.detail


def test_only_unknown_certificates_are_fetched_and_only_once(fetching):
    fleet, certificates = fetching.fleet, fetching.certificates
    member = fleet.members[NEWCOMER]
    (fetched,) = member.fetched
    degree = thresholds_for(FEW, corrupt=CORRUPT, lost=LOST)[0].degree
    named = {secure_agg.certificate_digest(each) for each in certificates.values()}
    assert len(named.intersection(fetched.digests)) == len(UNKNOWN)
    # Only certificates are kept. The keys of its neighbours are for this attempt alone.
    assert len(set(fetched.digests) - named) == degree
    assert set(member.kept) == {certificates[name] for name in UNKNOWN}
    assert refusals(fleet, NEWCOMER) == []
    assert len(fleet.members["m0"].fetched[0].digests) == FEW - 1 + degree


def test_another_roster_during_the_fetch_is_a_second_roster():
    fleet = few()

    def twice(name, message):
        if name == VICTIM and isinstance(payload_of(message), secure_agg.DigestRoster) and not refusals(fleet):
            shorter = secure_agg.DigestRoster(message.payload.advertisements[:-1])
            fleet.at(1, lambda: fleet.tell(VICTIM, states.Received(replace(message, payload=shorter))))

    fleet.before = twice
    fleet.connect().run(lambda: bool(refusals(fleet)))
    (refusal,) = refusals(fleet)
    assert refusal.reason == Reason.REASON_SECOND_ROSTER
    assert "different roster" in refusal.detail
    said = [payload_of(each) for each in fleet.members[VICTIM].said]
    assert not any(isinstance(each, secure_agg.Dealing) for each in said)


def unmasking_until_one_tells(collecting, said):
    """Returns the answers in an order in which the last one opens the sum.

    The coordinator would not check at that answer by itself: it checks at every fourth, and at each of the last
    sixteen.
    """
    for seed in range(20):
        arriving = []
        taking = collecting
        for at in np.random.default_rng(seed).permutation(len(said)):
            arriving.append(said[at])
            taking = taking.receive(said[at].member, said[at].message.payload)
            if taking.enough:
                break
        if len(arriving) % 4 and len(said) - len(arriving) > 16:
            return arriving
    raise AssertionError("no such order among twenty")


def test_the_last_answer_opens_the_sum_though_many_stay_silent():
    """A large cohort is not checked after every answer, and the last answer must not wait for the deadline."""
    fleet, said = few(), []

    def hold_back(name, message):
        unmasking = isinstance(payload_of(message), secure_agg.Unmasking)
        if unmasking:
            said.append(ev.Answered(name, message))
        return unmasking

    fleet.lose = hold_back
    fleet.connect().run(lambda: len(said) == FEW)
    state, timers = fleet.state, []
    assert isinstance(state.phase, Aggregating)
    for event in unmasking_until_one_tells(state.phase.protocol, said):
        state, effects = coordinators(state, event, fleet.now_ms)
        timers = [each for each in effects if isinstance(each, fx.SetTimer)]
        assert isinstance(state.phase, Aggregating)
    assert state.phase.protocol.enough
    # The driver is asked for a check soon, which closes the phase. A check for another phase does not.
    (timer,) = timers
    assert timer.timer == Look(1, "unmask")
    assert timer.seconds <= 2
    unmoved, _ = coordinators(state, ev.TimerFired(Look(1, "confirm")), fleet.now_ms)
    assert unmoved.phase is state.phase
    closed, effects = coordinators(state, ev.TimerFired(timer.timer), fleet.now_ms)
    assert isinstance(closed.phase, Publishing)
    (compute,) = [each for each in effects if isinstance(each, fx.Compute)]
    assert len(compute.survivors) == FEW
