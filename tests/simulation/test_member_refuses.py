"""A coordinator lies to one member, which refuses, says why, and reveals nothing; the others' sum still opens.

Lies within the aggregation protocol are tested in tests/unit/secure_agg. Here the lies are about which update goes
into an attempt, under which numbers, and how often.
"""

from dataclasses import replace

import pytest

import secure_agg
from coordinator.domain.jobs import JobStatus
from edge_client.policy.policy import Policy
from edge_client.policy.rules import fingerprint
from edge_client.session import states
from edge_client.session.journal import Sent
from secure_agg.member.seat import HeldShares
from secure_agg.secret import Secret
from tacit.attempt import AttemptId
from tacit.context import application_digest
from tacit.job import Aggregation
from tacit.mechanism import DistributedGaussian
from tacit.messages import AttemptEnded, AttemptMessage, AttemptOpened, AttemptRefusal, JobEnded
from tacit.reason import Reason
from tacit.vector import layout_of
from tests.support.fleet import Fleet, job_document
from tests.support.sum_fleet import TestIdentity, key_of

VICTIM = "m0"
OTHER = bytes([7]) * 32


def refusals(fleet, name=VICTIM):
    return [
        message.payload.reason
        for message in fleet.members[name].said
        if isinstance(getattr(message, "payload", None), AttemptRefusal)
    ]


def said(fleet, kind, name=VICTIM):
    return [
        message.payload for message in fleet.members[name].said if isinstance(getattr(message, "payload", None), kind)
    ]


def bent(kind, change, *, attempt=None):
    """A coordinator that changes one kind of payload for the victim."""

    def bend(name, message):
        payload = getattr(message, "payload", None)
        if name == VICTIM and isinstance(payload, kind):
            return replace(message, payload=change(payload))
        return message

    return bend


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": OTHER}, Reason.REASON_CONTEXT_UNEXPECTED),
        ({"application": OTHER}, Reason.REASON_CONTEXT_UNEXPECTED),
        ({"federation": OTHER}, Reason.REASON_CONTEXT_UNEXPECTED),
        ({"values": 3}, Reason.REASON_CONTEXT_UNEXPECTED),
        ({"bits": 16}, Reason.REASON_CONTEXT_UNEXPECTED),
        ({"round": 9}, Reason.REASON_CONTEXT_UNEXPECTED),
        # n sets the scales, so another n gives another application digest.
        ({"cohort": 4, "threshold": 3}, Reason.REASON_CONTEXT_UNEXPECTED),
        ({"assumed_corrupt": 0}, Reason.REASON_CONTEXT_UNEXPECTED),
        ({"threshold": 3, "assumed_corrupt": 0}, Reason.REASON_CONTEXT_UNEXPECTED),
    ],
    ids=str,
)
def test_an_attempt_with_other_numbers_is_refused_before_a_key_is_shown(change, reason):
    fleet = Fleet(5)
    fleet.bend = bent(AttemptOpened, lambda opened: AttemptOpened(replace(opened.context, **change)))
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    fleet.check()
    assert refusals(fleet)[0] == reason
    assert said(fleet, secure_agg.Advertisement) == []
    assert fleet.members[VICTIM].opened == []
    assert fleet.members[VICTIM].joined == []
    # The other four are enough.
    assert fleet.state.version_number == 1


def test_a_different_job_document_for_one_member_is_refused():
    fleet = Fleet(5)
    fleet.connect()
    other = job_document().model_copy(update={"seed": 1})
    victim = fleet.members[VICTIM]
    trained = fleet._trained

    def trained_otherwise(member, assignment):
        if member is victim:
            fleet.job, kept = other, fleet.job
            trained(member, assignment)
            fleet.job = kept
        else:
            trained(member, assignment)

    fleet._trained = trained_otherwise
    fleet.run(lambda: fleet.state.version_number == 1)
    assert refusals(fleet)[0] == Reason.REASON_CONTEXT_UNEXPECTED
    assert victim.opened == []


def test_an_attempt_number_not_above_every_earlier_one_is_a_replay():
    fleet = Fleet(5, job=job_document(count=2))
    opened = []

    def bend(name, message):
        if name == VICTIM and isinstance(getattr(message, "payload", None), AttemptOpened):
            opened.append(message)
            return replace(opened[0]) if len(opened) > 1 else message
        return message

    fleet.bend = bend
    fleet.connect().run(lambda: fleet.state.status is JobStatus.FINISHED)
    assert len(opened) == 2
    assert refusals(fleet) == [Reason.REASON_ATTEMPT_REPLAYED]
    assert fleet.members[VICTIM].joined == [AttemptId("questions", 1, 1)]


def test_the_journal_reveals_a_replay_to_the_next_process():
    fleet = Fleet(5)
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    victim = fleet.members[VICTIM]
    first = next(record.attempt for record in fleet.records if type(record).__name__ == "OpenAttempt")
    context = replace_context(fleet, first)
    fleet.kill(VICTIM)
    fleet.restart(VICTIM)
    fleet.tell(VICTIM, states.Received(AttemptMessage(first, AttemptOpened(context))))
    assert refusals(fleet)[-1] == Reason.REASON_ATTEMPT_REPLAYED
    assert victim.joined.count(first) == 1


def replace_context(fleet, attempt):
    threshold, corrupt = secure_agg.default_thresholds(5)
    layout = layout_of(fleet.job, 5)
    return secure_agg.RoundContext(
        federation=fleet.parameters.federation,
        job="questions",
        round=attempt.round,
        attempt=attempt.attempt,
        application=application_digest(fleet.job, layout),
        model=fleet.job.weights,
        cohort=5,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=layout.values,
        bits=layout.bits,
    )


SECOND = {
    secure_agg.Roster: (
        Reason.REASON_SECOND_ROSTER,
        lambda roster: secure_agg.Roster(roster.advertisements[:4]),
    ),
    secure_agg.ReceivedDealings: (
        Reason.REASON_SECOND_DEALINGS,
        lambda dealings: secure_agg.ReceivedDealings(dealings.dealings[:3]),
    ),
    secure_agg.Survivors: (
        Reason.REASON_SECOND_SURVIVORS,
        lambda survivors: secure_agg.Survivors(survivors.members[:4]),
    ),
    secure_agg.Confirmations: (
        Reason.REASON_SECOND_UNMASK_REQUEST,
        lambda confirmations: secure_agg.Confirmations(confirmations.confirmations[:4]),
    ),
}


@pytest.mark.parametrize("kind", SECOND, ids=lambda kind: kind.__name__)
def test_a_repeated_message_is_answered_and_a_changed_one_is_refused(kind):
    reason, change = SECOND[kind]
    fleet = Fleet(5)
    seen = []

    def twice(name, message):
        if name == VICTIM and isinstance(getattr(message, "payload", None), kind) and not seen:
            seen.append(message)
            fleet.at(1, lambda: fleet.tell(VICTIM, states.Received(message)))
            bad = replace(message, payload=change(message.payload))
            fleet.at(2, lambda: fleet.tell(VICTIM, states.Received(bad)))

    fleet.before = twice
    fleet.connect().run(lambda: bool(fleet.ends()))
    answers = {
        secure_agg.Roster: secure_agg.Dealing,
        secure_agg.Survivors: secure_agg.Confirmation,
        secure_agg.Confirmations: secure_agg.Unmasking,
    }
    assert set(refusals(fleet)) == {reason}
    if kind in answers:
        first = said(fleet, answers[kind])[:2]
        assert len(first) == 2
        assert first[0] == first[1]
    else:
        # The vector is sent once for one set of dealings, however often they come.
        assert len(fleet.members[VICTIM].opened) == 1


@pytest.mark.parametrize(
    "payload",
    [secure_agg.Roster(()), secure_agg.Survivors(("m0",)), secure_agg.Confirmations(())],
    ids=lambda payload: type(payload).__name__,
)
def test_messages_of_an_attempt_this_process_did_not_join_are_refused(payload):
    fleet = Fleet(5).connect()
    fleet.tell(VICTIM, states.Received(AttemptMessage(AttemptId("questions", 1, 1), payload)))
    assert refusals(fleet) == [Reason.REASON_MEMBER_RESTARTED]


def test_a_message_out_of_turn_is_refused():
    fleet = Fleet(5)
    fleet.bend = bent(secure_agg.Roster, lambda roster: secure_agg.Survivors(("m0", "m1", "m2", "m3", "m4")))
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert refusals(fleet) == [Reason.REASON_MESSAGE_NOT_EXPECTED]


def test_after_a_refusal_a_member_sits_out_only_the_rest_of_the_round():
    fleet = Fleet(5, job=job_document(count=2))
    attempts = []

    def once(name, message):
        payload = getattr(message, "payload", None)
        if name == VICTIM and isinstance(payload, secure_agg.Roster):
            attempts.append(message.attempt)
            if len(attempts) == 1:
                return replace(message, payload=secure_agg.Roster(payload.advertisements[:2]))
        return message

    fleet.bend = once
    fleet.connect().run()
    fleet.check()
    assert refusals(fleet) == [Reason.REASON_ROSTER_TOO_SMALL]
    assert fleet.state.status is JobStatus.FINISHED
    last = fleet.ends()[-1]
    assert VICTIM in last.survivors


def test_a_cohort_of_two_needs_both_exceptions():
    two = job_document(Aggregation(assumed_corrupt=0), min_members=2, target_members=2)
    strict = Fleet(2, job=two, policy=Policy(mechanisms=("none",), min_cohort=2, assumed_corrupt=0))
    strict.connect().run(hours=1)
    assert not strict.results
    assert refusals(strict)[0] == Reason.REASON_POLICY_TWO_PARTY_SUM
    allowed = Policy(mechanisms=("none",), min_cohort=2, assumed_corrupt=0, allow_two_party_sums=True)
    willing = Fleet(2, job=two, policy=allowed).connect().run()
    willing.check()
    assert willing.state.status is JobStatus.FINISHED


def test_an_attempt_with_fewer_honest_noise_shares_is_refused():
    """The noise was accounted for h members, and a coordinator that claims more corrupt members lowers h."""
    ring = DistributedGaussian(noise_multiplier=50.0, honest=3)
    fleet = Fleet(
        5, policy=Policy(min_honest=2), job=job_document(target_members=5).model_copy(update={"mechanism": ring})
    )
    fleet.bend = bent(AttemptOpened, lambda opened: AttemptOpened(replace(opened.context, assumed_corrupt=2)))
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    fleet.check()
    assert refusals(fleet)[0] == Reason.REASON_CONTEXT_UNEXPECTED
    assert said(fleet, secure_agg.Advertisement) == []
    assert fleet.state.version_number == 1


def pins_of(*names):
    return {name: fingerprint(key_of(TestIdentity(name).certificate)).hex() for name in names}


def test_a_roster_with_more_than_n_c_unpinned_members_is_refused():
    fleet = Fleet(5)
    strict = fleet.members[VICTIM]
    policy = Policy(mechanisms=("none",), peers=pins_of("m1", "m2"))
    strict.environment = replace(strict.environment, policy=policy)
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    assert refusals(fleet)[0] == Reason.REASON_POLICY_PEERS
    assert said(fleet, secure_agg.Dealing) == []
    assert strict.opened == []


def test_a_roster_of_pinned_peers_and_n_c_others_is_accepted():
    fleet = Fleet(5)
    strict = fleet.members[VICTIM]
    policy = Policy(mechanisms=("none",), peers=pins_of("m1", "m2", "m3"))
    strict.environment = replace(strict.environment, policy=policy)
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    assert refusals(fleet) == []
    assert len(strict.signed) == 1


# ---- one update for a version ---------------------------------------------------------------------------------------


def test_a_second_update_for_a_version_is_refused_before_a_key_is_shown():
    """The coordinator opens it without asking who is ready. An honest one hears of this when it assigns the round."""
    fleet = Fleet(5)

    def spend(name, message):
        if name == VICTIM and isinstance(getattr(message, "payload", None), AttemptOpened):
            member = fleet.members[VICTIM]
            assert isinstance(member.state.phase("questions"), states.Holding)
            sent = (Sent(AttemptId("questions", 0, 1), fleet.job.weights, OTHER, update=OTHER),)
            member.state = replace(member.state, memory=replace(member.state.memory, sent=sent))

    fleet.before = spend
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert refusals(fleet) == [Reason.REASON_POLICY_SECOND_SUM]
    assert said(fleet, secure_agg.Advertisement) == []
    # Nobody waited for it, and nobody lost a vector over it.
    assert fleet.ends()[0].published


# ---- secrets of an attempt that was left ----------------------------------------------------------------------------


def secrets_of(stage):
    """Every secret in a member's state, of whatever type."""
    found = [getattr(stage, name) for name in ("_root", "_seeds", "_sealing", "_seed") if hasattr(stage, name)]
    found += [*getattr(stage, "_chosen", {}).values(), *getattr(stage, "_pair_seeds", {}).values()]
    held = [*getattr(stage, "_held", {}).values(), *getattr(stage, "_own_shares", {}).values()]
    return [*found, *(each.root for each in held), *(each.seed for each in held)]


def readable(secret):
    try:
        return bool(secret.reveal())
    except LookupError:
        return False


@pytest.mark.parametrize(
    "stage",
    [
        secure_agg.AwaitingRoster,
        secure_agg.AwaitingDealings,
        secure_agg.ReadyToMask,
        secure_agg.AwaitingSurvivors,
        secure_agg.AwaitingConfirmations,
    ],
)
@pytest.mark.parametrize("way", ["ended", "assigned", "out of turn", "job over"])
def test_secrets_of_an_attempt_are_overwritten_however_it_is_left(stage, way):
    fleet = Fleet(5).connect()
    member = fleet.members[VICTIM]

    def there():
        return isinstance(getattr(member.state.phase("questions"), "stage", None), stage)

    fleet.run(there)
    phase = member.state.phase("questions")
    assert any(readable(each) for each in secrets_of(phase.stage))
    left = {
        "ended": AttemptMessage(phase.attempt, AttemptEnded(False, Reason.REASON_THRESHOLD_LOST)),
        "assigned": phase.holding.assignment,
        "out of turn": AttemptMessage(phase.attempt, secure_agg.Confirmations(())),
        "job over": JobEnded("questions", Reason.REASON_JOB_PAUSED, OTHER),
    }[way]
    fleet.tell(VICTIM, states.Received(left))
    assert not isinstance(member.state.phase("questions"), states.InAttempt)
    assert not any(readable(each) for each in secrets_of(phase.stage))


def test_a_vector_masked_after_its_attempt_was_left_leaves_no_shares():
    fleet = Fleet(5).connect()
    member = fleet.members[VICTIM]
    fleet.run(lambda: isinstance(getattr(member.state.phase("questions"), "stage", None), secure_agg.AwaitingSurvivors))
    phase = member.state.phase("questions")
    # The masking thread holds a copy of what the machine had before it heard of the end.
    kept = {name: HeldShares(Secret(b"m" * 33), Secret(b"s" * 33)) for name in phase.stage._held}
    late = replace(phase.stage, _held=kept)
    fleet.tell(VICTIM, states.Received(AttemptMessage(phase.attempt, AttemptEnded(False, Reason.REASON_CANCELLED))))
    fleet.tell(VICTIM, states.Masked(phase.attempt, late))
    assert not any(readable(each) for each in secrets_of(late))


def test_secrets_made_before_a_policy_refuses_are_overwritten_too(monkeypatch):
    """The next state exists already when the policy checks the roster, and when the vector is counted."""
    made = []
    for kind, method in ((secure_agg.AwaitingRoster, "on_roster"), (secure_agg.AwaitingDealings, "on_dealings")):
        real = getattr(kind, method)

        def keeping(self, *given, real=real):
            answer = real(self, *given)
            made.append(answer[0] if isinstance(answer, tuple) else answer)
            return answer

        monkeypatch.setattr(kind, method, keeping)
    Fleet(5, policy=Policy(mechanisms=("none",), peers=pins_of("m1"))).connect().run(lambda: len(made) == 5)
    fleet = Fleet(5).connect()
    fleet.run(
        lambda: isinstance(
            getattr(fleet.members[VICTIM].state.phase("questions"), "stage", None), secure_agg.AwaitingDealings
        )
    )
    member = fleet.members[VICTIM]
    before, made[5:] = made[:5], []
    sent = (Sent(AttemptId("questions", 0, 1), fleet.job.weights, OTHER, update=OTHER),)
    member.state = replace(member.state, memory=replace(member.state.memory, sent=sent))
    fleet.run(lambda: bool(refusals(fleet)))
    assert refusals(fleet) == [Reason.REASON_POLICY_SECOND_SUM]
    (ready,) = [each for each in made if isinstance(each, secure_agg.ReadyToMask) and each.seat.member == VICTIM]
    for stage in (*before, ready):
        assert secrets_of(stage)
        assert not any(readable(each) for each in secrets_of(stage))
