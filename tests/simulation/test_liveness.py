"""A job ends or says why not: members that fail once, members at fault, members that cannot go on."""

import os
import sys
from dataclasses import replace

import numpy as np
import pytest

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.machine import transition
from coordinator.rounds.waiting import waiting
from edge_client.policy.policy import Policy
from edge_client.session import states
from edge_client.session.journal import Memory, Sent
from secure_agg.server import CollectingMasked
from tacit import wire
from tacit.attempt import AttemptId
from tacit.mechanism import DistributedGaussian, GaussianUpdate, NoMechanism
from tacit.messages import AttemptMessage, AttemptRefusal, Decline, Ready, Standby
from tacit.reason import Reason
from tests.support.crooked import complaint_by, opened_by, resigned
from tests.support.fleet import Fleet, job_document

PLAIN = Policy(mechanisms=("none",))


def failing_once(fleet, name):
    original, failed = fleet._trained, []

    def trained(member, assignment):
        if member.name == name and not failed:
            failed.append(assignment)
            failure = states.PreparationFailed(assignment, Reason.REASON_TRAINING_FAILED, "no memory")
            fleet.tell(name, failure)
        else:
            original(member, assignment)

    fleet._trained = trained


def test_a_failed_training_is_asked_for_again_in_the_next_round():
    fleet = Fleet(3)
    failing_once(fleet, "m0")
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    ends = [record for record in fleet.records if isinstance(record, fx.EndRound)]
    assert [end.published for end in ends] == [False, True, True, True]
    assert ends[0].reason == Reason.REASON_TOO_FEW_READY


def test_a_dealing_that_does_not_open_costs_the_attempt_but_not_the_job():
    fleet = Fleet(5)
    heard, done = fleet._heard, []

    def forged(name, message):
        if name == "m4" and isinstance(getattr(message, "payload", None), secure_agg.Dealing) and not done:
            done.append(message)
            dealing = message.payload
            # The server cannot see that what the dealer sealed, and signed, is garbage.
            others = [share.receiver for share in dealing.shares if share.receiver != "m4"]
            return ev.Answered(name, AttemptMessage(message.attempt, rubbish_for(fleet, "m4", dealing, others)))
        return heard(name, message)

    fleet._heard = forged
    fleet.connect().run()
    fleet.check()
    assert done
    assert fleet.state.status is JobStatus.FINISHED
    # Its own software dealt something else than it signed, and refuses to open it.
    assert fleet.ends()[0].reason == Reason.REASON_COMPLAINTS_TOO_MANY
    assert fleet.ends()[1].published


@pytest.fixture
def on_no_polynomial(monkeypatch):
    """Makes m4 commit to and deal shares that are on no polynomial, so its secrets cannot be rebuilt."""
    share, advertise = sys.modules["secure_agg.member.share"], sys.modules["secure_agg.member.advertise"]
    deal_shares, deal_secret = share.deal_shares, share.deal_secret

    def deal(seat, *given):
        if seat.member == "m4":
            share.deal_secret = lambda secret, t, points, source: tuple(b"\0" + os.urandom(32) for _ in points)  # type: ignore[attr-defined]
        try:
            return deal_shares(seat, *given)
        finally:
            share.deal_secret = deal_secret  # type: ignore[attr-defined]

    monkeypatch.setattr(advertise, "deal_shares", deal)


def barred(fleet):
    return [count.fields["member"] for count in fleet.counts if count.what == "barred"]


@pytest.mark.parametrize(
    ("mechanism", "policy"),
    [
        # The default policy, in a job with noise of members' own, and with noise in the ring.
        (GaussianUpdate(noise_multiplier=1.0, clip=10), Policy()),
        (DistributedGaussian(noise_multiplier=1.0, clip=10, honest=2), Policy()),
        # Without noise, only members that allow sums to be subtracted can go on.
        (NoMechanism(), Policy(mechanisms=("none",), allow_second_sum=True)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
@pytest.mark.usefixtures("on_no_polynomial")
def test_a_dealer_whose_shares_are_on_no_polynomial_is_left_out_next(mechanism, policy):
    fleet = Fleet(5, policy=policy, job=job_document(count=4).model_copy(update={"mechanism": mechanism}))
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    # The second sum of a round is the first one without the dealer.
    assert [(end.published, "m4" in end.survivors) for end in fleet.ends()] == [(False, True), (True, False)] * 3 + [
        (True, False)
    ]
    # After the third time it is not asked again in this job.
    assert barred(fleet) == ["m4"] * 3


@pytest.mark.usefixtures("on_no_polynomial")
def test_without_noise_such_a_dealer_ends_a_job_with_default_policies():
    """The price of `policy_second_sum`, as docs/threat-model.md says.

    Without the dealer the sum has one member less, and the coordinator, whom members do not trust, could have opened
    the first one.
    """
    fleet = Fleet(5).connect().run()
    assert (fleet.state.status, fleet.state.reason) == (JobStatus.PAUSED, Reason.REASON_ROUNDS_FAILING)
    assert fleet.state.version_number == 0
    refused = {count.fields["reason"] for count in fleet.counts if count.what == "refusal"}
    assert refused == {"policy_second_sum"}
    # It does not go on without the dealer either.
    fleet.cut("m4")
    fleet.run(hours=1)
    before = len(fleet.ends())
    fleet.post(ev.Resume())
    fleet.run()
    assert fleet.state.status is JobStatus.PAUSED
    assert len(fleet.ends()) > before
    # Whatever was tried, they confirmed only the sum with the dealer.
    assert {end.survivors for end in fleet.ends() if end.survivors} == {("m0", "m1", "m2", "m3", "m4")}


def rubbish_for(fleet, dealer, dealing, victims):
    """The dealing with garbage in place of the sealed keys for these members, signed again by the dealer."""
    session = fleet.state.phase.protocol.session
    identity = fleet.members[dealer].environment.identity
    for victim in victims:
        dealing = resigned(
            session, identity, dealing, victim, lambda share: replace(share, sealed_key=b"x" * len(share.sealed_key))
        )
    return dealing


def sealing_rubbish(fleet, dealer, victims):
    """Makes the dealer seal garbage for these members. The coordinator cannot see it."""
    heard = fleet._heard

    def forged(name, message):
        if name != dealer or not isinstance(getattr(message, "payload", None), secure_agg.Dealing):
            return heard(name, message)
        bad = rubbish_for(fleet, dealer, message.payload, victims)
        return ev.Answered(name, AttemptMessage(message.attempt, bad))

    fleet._heard = forged
    # The dealer joins every attempt, whatever its own software would say.
    member = fleet.members[dealer]
    member.environment = replace(member.environment, policy=PLAIN)
    return fleet


def answering(fleet, dealer, answer):
    """Makes a dealer answer complaints as it likes: `answer` returns what it opens, or None for silence.

    Its own software kept the keys that it had drawn, which are those that it committed to.
    """
    heard = fleet._heard

    def bend(name, message):
        complaint = getattr(message, "payload", None)
        if name != dealer or not isinstance(complaint, secure_agg.Complaint):
            return message
        stage = fleet.members[dealer].state.phase("questions").stage
        key = stage._openable._secrets[complaint.complainant, complaint.part].reveal()
        opened = answer(key)
        if opened is not None:
            identity = fleet.members[dealer].environment.identity
            opening = opened_by(stage.seat.session, identity, complaint, opened)
            fleet.post(heard(dealer, AttemptMessage(message.attempt, opening)), 5)
        return Standby()

    fleet.bend = bend
    return fleet


# With three members nobody can go on without the dealer. Larger cohorts go through the same code.
COHORTS = [
    (3, 1),
    (4, 1),
    pytest.param(5, 1, marks=pytest.mark.long),
    (10, 2),
    pytest.param(20, 4, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("members", "victims"), COHORTS)
def test_a_dealer_that_seals_garbage_and_opens_well_stops_nobody(members, victims):
    dealer = f"m{members - 1}"
    fleet = sealing_rubbish(Fleet(members), dealer, {f"m{each}" for each in range(victims)})
    answering(fleet, dealer, lambda key: key).connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert [(end.published, len(end.survivors)) for end in fleet.ends()] == [(True, members)] * 3
    assert barred(fleet) == []
    answered = [count for count in fleet.counts if count.what == "complaints_answered"]
    assert len(answered) == 3 * victims


@pytest.mark.parametrize(("members", "victims"), COHORTS)
def test_a_dealer_that_opens_another_key_is_convicted_at_once(members, victims):
    dealer = f"m{members - 1}"
    job = job_document(count=2, max_failed_rounds=20)
    fleet = sealing_rubbish(Fleet(members, job=job), dealer, {f"m{each}" for each in range(victims)})
    answering(fleet, dealer, lambda key: bytes(32)).connect()
    fleet.run(lambda: bool(fleet.ends()))
    first = fleet.ends()[0]
    assert (first.published, first.reason) == (False, Reason.REASON_DEALER_CONVICTED)
    assert fleet.now_ms < 10_000
    # What is stored convinces anybody with the dealer's certificate.
    (lost,) = first.dropouts
    assert (lost.member, lost.reason) == (dealer, Reason.REASON_DEALER_CONVICTED)
    evidence = wire.evidence_from_bytes(lost.evidence)
    certificate = fleet.members[dealer].environment.identity.certificate
    assert secure_agg.convicts(evidence, certificate, fleet.parameters.verify)
    assert not secure_agg.convicts(
        evidence, fleet.members["m0"].environment.identity.certificate, fleet.parameters.verify
    )
    if members > 3:
        fleet.run(lambda: len(fleet.ends()) == 2)
        assert fleet.ends()[1].published
        assert dealer not in fleet.ends()[1].survivors
        # A retry: nobody waited for a training window or the deadline of a phase.
        assert fleet.now_ms < 20_000
    fleet.run()
    fleet.check()
    if members > 3:
        assert fleet.state.status is JobStatus.FINISHED
    assert set(barred(fleet)) == {dealer}


@pytest.mark.parametrize(("members", "victims"), COHORTS)
def test_a_dealer_that_is_silent_costs_its_victims_one_sum_and_itself_the_round(members, victims):
    dealer, chosen = f"m{members - 1}", {f"m{each}" for each in range(victims)}
    fleet = sealing_rubbish(Fleet(members), dealer, chosen)
    answering(fleet, dealer, lambda key: None).connect()
    fleet.run(lambda: bool(fleet.ends()))
    first = fleet.ends()[0]
    # Its vector is in the sum, and as good as any other.
    assert {(lost.member, lost.reason) for lost in first.dropouts} == {
        (victim, Reason.REASON_COMPLAINT_UNANSWERED) for victim in chosen
    }
    assert fleet.now_ms < 20_000
    if members > 3:
        assert first.published
        assert set(first.survivors) == set(fleet.members) - chosen
    else:
        assert first.reason == Reason.REASON_THRESHOLD_LOST
    assert fleet.state.members[dealer].missed_deadlines == 1
    # It is nobody's fault for sure, so it is not barred for good.
    assert barred(fleet) == []
    fleet.run(hours=1)
    fleet.check()


def test_a_dealer_that_restarts_in_place_of_an_answer_is_left_out_of_the_round():
    fleet = sealing_rubbish(Fleet(4), "m3", {"m0"})

    def restarts(key):
        fleet.kill("m3")
        fleet.restart("m3")

    answering(fleet, "m3", restarts).connect()
    fleet.run(lambda: len(fleet.ends()) == 2)
    first, second = fleet.ends()
    assert {each.member: each.reason for each in first.dropouts} == {
        "m3": Reason.REASON_MEMBER_RESTARTED,
        "m0": Reason.REASON_COMPLAINT_UNANSWERED,
    }
    assert second.published
    assert set(second.survivors) == {"m0", "m1", "m2"}
    assert barred(fleet) == []


def leaving_at_the_dealings(fleet, dealer, then=lambda: None):
    """Makes a dealer refuse what was dealt to it, before its victims' complaints arrive."""

    def bend(name, message):
        if name != dealer or not isinstance(getattr(message, "payload", None), secure_agg.ReceivedDealings):
            return message
        refusal = AttemptRefusal(Reason.REASON_DEALINGS_TOO_FEW)
        fleet.post(ev.Answered(dealer, AttemptMessage(message.attempt, refusal)), 0)
        fleet.at(0, then)
        return Standby()

    fleet.bend = bend
    return fleet


@pytest.mark.parametrize("members", [4, 5])
def test_a_dealer_of_garbage_that_leaves_before_the_complaint_is_left_out_of_the_round(members):
    dealer = f"m{members - 1}"
    fleet = sealing_rubbish(Fleet(members, job=job_document(count=2)), dealer, {"m0"})
    leaving_at_the_dealings(fleet, dealer).connect().run(hours=2)
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert [end.published for end in fleet.ends()] == [False, True, False, True]
    assert all(dealer not in end.survivors for end in fleet.ends())
    # From the second time in a row, longer and longer.
    assert [count.fields["member"] for count in fleet.counts if count.what == "left_out"] == [dealer]


def test_a_victim_that_is_stranded_while_a_liar_complains_about_it_is_not_to_blame():
    fleet = sealing_rubbish(Fleet(10, policy=PLAIN, job=job_document(count=1)), "m9", {"m0"})
    leaving_at_the_dealings(fleet, "m9", lambda: complain(fleet, "m8", about="m0")).connect()
    (end,) = fleet.run(lambda: bool(fleet.ends())).ends()
    assert end.published
    until = {name: fleet.state.members[name].barred_until for name in ("m0", "m9")}
    assert until == {"m0": 0, "m9": 2}


def test_a_conviction_does_not_wait_for_another_quarrel():
    fleet = sealing_rubbish(Fleet(10), "m9", {"m0"})
    answering(fleet, "m9", lambda key: bytes(32))
    sealing_rubbish(fleet, "m7", {"m2"})
    fleet.lose = lambda name, message: (
        name == "m7" and isinstance(getattr(message, "payload", None), secure_agg.Complaint)
    )
    fleet.connect().run(lambda: bool(fleet.ends()))
    first = fleet.ends()[0]
    assert first.reason == Reason.REASON_DEALER_CONVICTED
    assert [(each.member, bool(each.evidence)) for each in first.dropouts] == [("m9", True)]
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED


def test_members_awaited_when_an_attempt_becomes_hopeless_are_not_late():
    fleet = masking(5)
    lose_the_attempt(fleet, "m0", "m1")
    first = fleet.ends()[0]
    assert (first.published, first.reason) == (False, Reason.REASON_THRESHOLD_LOST)
    fleet.run(lambda: bool(fleet.members["m4"].ended))
    for name in ("m2", "m3", "m4"):
        attempt, ended = fleet.members[name].ended[0]
        assert (attempt, ended.reason, ended.detail) == (first.attempt, Reason.REASON_THRESHOLD_LOST, first.detail)
    assert "phase_deadline" not in {count.fields.get("reason") for count in fleet.counts}


def test_unmasking_waits_for_nobody_once_the_threshold_has_answered():
    fleet = Fleet(5, policy=PLAIN, job=job_document(count=2))
    assert secure_agg.default_thresholds(5)[0] == 4

    def slow(name, message):
        late = name == "m4" and isinstance(getattr(message, "payload", None), secure_agg.Unmasking)
        return (20_000,) if late else (5,)

    fleet.delays = slow
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    # Its answer is still on the way, and its vector is in the sum.
    assert fleet.now_ms < 20_000
    assert set(fleet.ends()[0].survivors) == set(fleet.members)
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    # It is no dropout and missed nothing, and each attempt ended for it as for the others.
    assert not any(end.dropouts for end in fleet.ends())
    assert fleet.state.members["m4"].missed_deadlines == 0
    assert [ended.published for _, ended in fleet.members["m4"].ended] == [True, True]


# ---- false complaints about m9, which did nothing wrong ------------------------------------------------------------


def masking(members=10):
    """A cohort of which vectors are requested: n_C is 2, and 4 may be lost."""
    fleet = Fleet(members, policy=PLAIN, job=job_document(max_attempts=3, max_failed_rounds=50)).connect()
    return until_masking(fleet)


def until_masking(fleet, attempt=1):
    def there():
        collecting = getattr(fleet.state.phase, "protocol", None)
        return fleet.state.attempt >= attempt and isinstance(collecting, CollectingMasked)

    fleet.run(there)
    assert there()
    return fleet


def lose_the_attempt(fleet, *names):
    """Loses the attempt through refusals that name nobody."""
    for name in names:
        refusal = AttemptMessage(fleet.state.attempt_id(), AttemptRefusal(Reason.REASON_INTERNAL, "it says"))
        fleet._coordinator(ev.Answered(name, refusal))
    assert not fleet.ends()[-1].published


def complain(fleet, *liars, about="m9", sign=None):
    """Members complain about a dealer that did nothing wrong. `sign` signs in their place."""
    collecting = fleet.state.phase.protocol
    session = collecting.session
    for liar in liars:
        share = next(each for each in collecting.dealings[about].shares if each.receiver == liar)
        identity = fleet.members[sign or liar].environment.identity
        leaf = session.dealing_leaf(about, share)
        complaint = replace(complaint_by(session, identity, about, secure_agg.Part.SHARES, leaf), complainant=liar)
        said = AttemptMessage(fleet.state.attempt_id(), secure_agg.Complaints((complaint,)))
        fleet._coordinator(ev.Answered(liar, said))


def test_n_c_liars_cost_one_message_of_latency_and_convict_nobody():
    fleet = masking()
    complain(fleet, "m0", "m1")
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert barred(fleet) == []
    # The liars' own software masks all the same, so even the first sum has everybody.
    assert [(end.published, len(end.survivors)) for end in fleet.ends()] == [(True, 10)] * 3
    openings = [
        message.payload
        for message in fleet.members["m9"].said
        if isinstance(getattr(message, "payload", None), secure_agg.Opening)
    ]
    assert [each.complainant for each in openings] == ["m0", "m1"]


def test_one_more_than_n_c_prove_that_one_of_them_is_honest():
    fleet = masking()
    complain(fleet, "m0", "m1")
    assert fleet.ends() == []
    complain(fleet, "m2")
    # The first two have not been answered yet, but their dealer is guilty whatever it says.
    assert fleet.ends()[0].reason == Reason.REASON_COMPLAINTS_TOO_MANY
    assert barred(fleet) == ["m9"]
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert barred(fleet) == ["m9"]


def test_a_complaint_that_its_receiver_did_not_sign_costs_its_sender_the_round():
    fleet = masking()
    complain(fleet, "m0", sign="m1")
    assert barred(fleet) == ["m0"]
    fleet.run(lambda: bool(fleet.ends()))
    assert fleet.ends()[0].published
    assert not [
        each for each in fleet.members["m9"].said if isinstance(getattr(each, "payload", None), secure_agg.Opening)
    ]


def test_a_complaint_about_a_dropout_costs_only_the_liar():
    fleet = masking()
    fleet._coordinator(ev.Misbehaved("m9", "it sent something else"))
    complain(fleet, "m0")
    (end,) = fleet.run(lambda: bool(fleet.ends())).ends()
    assert end.published
    reasons = {lost.member: lost.reason for lost in end.dropouts}
    assert reasons["m0"] == Reason.REASON_COMPLAINT_UNANSWERED
    assert set(reasons) == {"m0", "m9"}
    assert barred(fleet) == ["m9"]


def test_a_liar_does_not_use_up_what_dropouts_a_cohort_bears():
    """It holds its vector back, and complains about a member that has sent its own and is gone."""
    fleet = Fleet(10, policy=PLAIN, job=job_document(count=3))
    coordinator, gone = fleet._coordinator, set()
    fleet.lose = lambda name, message: (
        name in gone and isinstance(getattr(message, "payload", None), secure_agg.Complaint)
    )

    def lie(about):
        if isinstance(getattr(fleet.state.phase, "protocol", None), CollectingMasked):
            gone.add(about)
            complain(fleet, "m0", about=about)

    def hear(event):
        if not isinstance(event, ev.Uploaded) or event.member != "m0":
            coordinator(event)
            return
        others = [name for name in fleet.state.phase.cohort if name != "m0"]
        fleet.at(1000, lambda: lie(others[event.attempt.attempt % len(others)]))

    fleet._coordinator = hear
    fleet.connect().run(hours=4)
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert [(end.published, len(end.survivors)) for end in fleet.ends()] == [(True, 9)] * 3
    assert {lost.member for end in fleet.ends() for lost in end.dropouts} == {"m0"}


def test_a_dealer_that_reconnects_is_asked_again():
    fleet = answering(sealing_rubbish(Fleet(5), "m4", {"m0"}), "m4", lambda key: key)
    answer, asked = fleet.bend, []

    def bend(name, message):
        if not isinstance(getattr(message, "payload", None), secure_agg.Complaint):
            return message
        asked.append(fleet.now_ms)
        if len(asked) == 1:
            # The first one is lost with the connection.
            fleet.at(500, lambda: fleet.cut("m4"))
            fleet.at(1500, lambda: fleet.connect("m4"))
            return Standby()
        return answer(name, message)

    fleet.bend = bend
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert len(asked) == 2
    assert fleet.ends()[0].published
    assert len(fleet.ends()[0].survivors) == 5


def test_members_with_expired_certificates_are_not_drawn_forever():
    fleet = Fleet(5)
    real = fleet.parameters.verify

    def verify(certificate, message, signature):
        name = real(certificate, message, signature)
        if name in ("m3", "m4"):
            raise secure_agg.IdentityInvalid("the certificate has expired")
        return name

    fleet.state = replace(fleet.state, parameters=replace(fleet.parameters, verify=verify))
    fleet.connect().run()
    assert fleet.state.status is JobStatus.FINISHED
    assert all(set(end.survivors) == {"m0", "m1", "m2"} for end in fleet.ends() if end.published)


def losing_confirmations(fleet, attempts):
    """Loses two of five confirmations in this many attempts: everybody signed, and the sum stays closed."""
    fleet.lose = lambda name, message: (
        fleet.state.attempt <= attempts
        and name in ("m0", "m1")
        and isinstance(getattr(message, "payload", None), secure_agg.Confirmation)
    )
    return fleet


def test_a_confirmed_sum_is_retried_with_the_same_members_and_vectors():
    fleet = losing_confirmations(Fleet(6), 3)
    fleet.cut("m5")
    fleet.connect("m0", "m1", "m2", "m3", "m4").run(lambda: bool(fleet.ends()))
    # Another member is connected from now on, and could take part.
    fleet.connect("m5").run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    cohorts = [record.cohort for record in fleet.records if isinstance(record, fx.OpenAttempt)]
    assert cohorts[:4] == [("m0", "m1", "m2", "m3", "m4")] * 4
    assert "m5" in cohorts[4]
    for name in cohorts[0]:
        vectors = [fleet.inputs[attempt, name] for attempt in fleet.members[name].opened[:4]]
        assert all(np.array_equal(vector, vectors[0]) for vector in vectors)


def test_a_retry_that_loses_a_member_does_not_replace_the_confirmed_sum():
    """Its members would refuse the shorter list, and would be asked for it in every later attempt."""
    fleet = losing_confirmations(Fleet(5, job=job_document(max_attempts=10, max_missed_deadlines=10)), 1)
    confirmations, lost = fleet.lose, []

    def lose(name, message):
        if fleet.state.attempt == 2 and name == "m4" and isinstance(message, secure_agg.MaskedInput):
            lost.append(message)
            return True
        return confirmations(name, message)

    fleet.lose = lose
    fleet.connect().run()
    fleet.check()
    assert lost
    assert fleet.state.status is JobStatus.FINISHED
    first = next(end for end in fleet.ends() if end.published)
    assert first.survivors == ("m0", "m1", "m2", "m3", "m4")
    assert not [count for count in fleet.counts if count.what == "refusal"]


def test_a_restarted_coordinator_knows_which_members_confirmed_a_sum():
    fleet = losing_confirmations(Fleet(6), 1)
    fleet.connect("m0", "m1", "m2", "m3", "m4").run(lambda: bool(fleet.members["m4"].signed))
    fleet.crash_coordinator()
    assert fleet.state.confirmed_sums == (frozenset({"m0", "m1", "m2", "m3", "m4"}),)
    fleet.connect("m5").run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert not [count for count in fleet.counts if count.what == "refusal"]


def test_members_in_no_confirmed_sum_go_on_without_the_others():
    fleet = losing_confirmations(Fleet(9, job=job_document(count=2)), 1)
    fleet.connect("m0", "m1", "m2", "m3", "m4").run(lambda: bool(fleet.ends()))
    fleet.kill("m4")
    fleet.connect("m5", "m6", "m7", "m8").run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    published = [end for end in fleet.ends() if end.published]
    assert set(published[0].survivors) == {"m5", "m6", "m7", "m8"}
    # All members may be in the next version.
    assert set(published[1].survivors) == {f"m{number}" for number in range(9)} - {"m4"}


def test_a_member_with_another_update_declines_before_others_mask_for_it():
    fleet = Fleet(5, job=job_document(min_members=4))
    sent = (Sent(AttemptId("questions", 0, 1), fleet.job.weights, bytes(32), update=bytes(32)),)
    for name in ("m0", "m1"):
        fleet.members[name].state = states.MemberState(Memory({}, sent))
    fleet.connect().run()
    assert fleet.state.reason == Reason.REASON_ROUNDS_FAILING
    assert fleet.state.members["m0"].declined[0] == Reason.REASON_POLICY_SECOND_SUM
    assert not any(isinstance(message, Ready) for message in fleet.members["m0"].said)
    assert all(not member.opened for member in fleet.members.values())


def test_a_message_that_breaks_the_machine_costs_only_its_sender():
    fleet = Fleet(5)
    fleet.connect().run(lambda: bool(getattr(fleet.state.phase, "cohort", ())))
    fleet._coordinator(ev.Misbehaved("m2", "its Answered could not be processed"))
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert [(lost.member, lost.reason) for lost in fleet.ends()[0].dropouts] == [
        ("m2", Reason.REASON_MESSAGE_MALFORMED)
    ]


def test_resuming_a_job_that_has_all_versions_finishes_it():
    fleet = Fleet(3).connect().run()
    paused = replace(fleet.state, status=JobStatus.PAUSED, reason=Reason.REASON_JOB_PAUSED)
    state, effects = transition(paused, ev.Resume(), 0)
    assert state.status is JobStatus.FINISHED
    records = [record for effect in effects if isinstance(effect, fx.Persist) for record in effect.records]
    assert not any(isinstance(record, fx.OpenRound) for record in records)


def test_a_lost_ready_is_asked_for_again():
    fleet = Fleet(3, job=job_document(count=1))
    lost = []

    def lose(name, message):
        if name == "m1" and type(message).__name__ == "Ready" and not lost:
            lost.append(message)
            return True
        return False

    fleet.lose = lose
    fleet.connect().run()
    assert lost
    assert fleet.state.status is JobStatus.FINISHED


@pytest.mark.parametrize("seed", range(6))
def test_chaos_ends_in_a_finished_job(seed):
    chaos(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6, 400))
def test_longer_chaos_ends_in_a_finished_job(seed):
    chaos(seed)


def chaos(seed):
    """Kills, broken connections, coordinator crashes, pauses and lost messages, then quiet. The job must finish."""
    random = __import__("random").Random(seed)
    job = job_document(count=random.choice([2, 4]), max_attempts=random.choice([1, 3]), max_failed_rounds=1000)
    fleet = Fleet(random.choice([3, 4, 5, 6, 8]), seed=seed, policy=replace_cap(), job=job)
    quiet_ms = random.choice([20_000, 90_000, 300_000])
    loss = random.choice([0, 0.02, 0.1])
    fleet.lose = lambda name, message: fleet.now_ms < quiet_ms and random.random() < loss

    def back(name):
        member = fleet.members[name]
        if not member.alive:
            fleet.restart(name)
        elif not member.connected:
            fleet.connect(name)

    def act(kind, name):
        if kind == "kill":
            fleet.kill(name)
        elif kind == "cut":
            fleet.cut(name)
        elif kind == "crash":
            fleet.crash_coordinator()
        elif kind == "pause":
            fleet.post(ev.Pause())
            fleet.post(ev.Resume(), random.choice([1, 100, 3000]))
        for other in fleet.members:
            fleet.at(random.choice([1, 50, 1500, 20_000]), outlasting(lambda other=other: back(other)))

    at = 0.0
    while at < quiet_ms:
        at += random.expovariate(1 / random.choice([300, 2000, 8000]))
        kind = random.choices(["kill", "cut", "crash", "pause"], [35, 40, 10, 8])[0]
        name = random.choice(list(fleet.members))
        fleet.at(at, outlasting(lambda kind=kind, name=name: act(kind, name)))
    fleet.at(quiet_ms + 30_000, outlasting(lambda: fleet.post(ev.Resume())))
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    for member in fleet.members.values():
        assert len(member.joined) == len(set(member.joined))
        assert len(member.opened) == len(set(member.opened))


def replace_cap():
    """Allows second sums: the rule against them, tested elsewhere, would stop a job that fails this often."""
    return Policy(mechanisms=("none",), allow_second_sum=True)


def outlasting(action):
    """Makes an action survive a crash of the coordinator, because it is not one of its timers."""

    def wrapped():
        action()

    wrapped.of_member = True  # type: ignore[attr-defined]
    return wrapped


def test_a_member_that_sits_the_job_out_hears_of_its_end():
    fleet = Fleet(5)
    trained = fleet._trained

    def unwilling(member, assignment):
        if member.name == "m0":
            failed = states.PreparationFailed(assignment, Reason.REASON_BUDGET_SPENT, "at its limit")
            fleet.tell(member.name, failed)
        else:
            trained(member, assignment)

    fleet._trained = unwilling
    fleet.connect().run(lambda: fleet.state.status is JobStatus.FINISHED)
    fleet.run(hours=1)
    assert fleet.members["m0"].over == [Reason.REASON_JOB_FINISHED]
    # It was asked anew each round, because a monthly limit opens again.
    declined = [message for message in fleet.members["m0"].said if isinstance(message, Decline)]
    assert [message.round for message in declined] == [1, 2, 3]


# ---- members that join and never send -----------------------------------------------------------------------------


def silent(fleet, *names, while_=lambda fleet: True):
    """These members train and advertise, and send nothing after that."""

    def lose(name, message):
        payload = getattr(message, "payload", None)
        late = payload is not None and not isinstance(payload, secure_agg.Advertisement | AttemptRefusal)
        late = late or isinstance(message, secure_agg.MaskedInput)
        return name in names and late and while_(fleet)

    fleet.lose = lose
    return fleet


def left_out(fleet):
    return [count.fields["member"] for count in fleet.counts if count.what == "left_out"]


def late(fleet):
    """Attempts in which a phase ended at its deadline."""
    return {
        count.fields["attempt"]
        for count in fleet.counts
        if count.what == "dropout" and count.fields["reason"] == "phase_deadline"
    }


def test_one_silent_member_of_four_does_not_stop_cohorts_of_three():
    """m0 is always ready first, so with cohorts of three it is in each unless it is left out."""
    fleet = silent(Fleet(4, job=job_document(target_members=3, count=10)), "m0")
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert fleet.state.failed_rounds == 0
    # One attempt is lost. From then on, members without a missed deadline come first.
    assert [end.published for end in fleet.ends()] == [False, *[True] * 10]
    assert all("m0" not in end.survivors for end in fleet.ends())


def test_one_silent_member_of_four_costs_the_deadline_in_few_rounds():
    fleet = silent(Fleet(4, job=job_document(count=40)), "m3")
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    # Rounds 1 and 2, and then after 1, 2, 4, 8, and 16 rounds without it.
    assert [int(attempt.split("/")[1].split(".")[0]) for attempt in sorted(late(fleet), key=_number)] == [
        1,
        2,
        4,
        7,
        12,
        21,
        38,
    ]
    assert set(left_out(fleet)) == {"m3"}


def _number(attempt):
    return int(attempt.rsplit(".", 1)[1])


def test_without_the_limit_a_silent_member_costs_every_round_its_deadline():
    """The counterexample: what the limit is for."""
    fleet = silent(Fleet(4, job=job_document(count=20, max_missed_deadlines=1000)), "m3")
    fleet.connect().run()
    assert len(late(fleet)) == 20


def test_a_job_stopped_by_one_silent_member_of_three_names_it():
    fleet = silent(Fleet(3), "m2").connect().run()
    fleet.check()
    assert (fleet.state.status, fleet.state.reason) == (JobStatus.PAUSED, Reason.REASON_ROUNDS_FAILING)
    assert set(left_out(fleet)) == {"m2"}
    assert "m2 missed" in waiting(fleet.state)


def test_a_member_that_never_gets_ready_costs_the_window_in_few_rounds():
    fleet = Fleet(4, job=job_document(count=40))
    fleet.lose = lambda name, message: name == "m3" and isinstance(message, Ready)
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    missed = [count for count in fleet.counts if count.what == "deadline_missed"]
    assert {(count.fields["member"], count.fields["phase"]) for count in missed} == {("m3", "training")}
    assert len(missed) == 7


def test_an_honest_member_returns_by_itself_once_its_line_is_good():
    fleet = silent(Fleet(4, job=job_document(count=30)), "m3", while_=lambda fleet: fleet.state.round <= 5)
    fleet.connect().run()
    fleet.check()
    assert left_out(fleet) == ["m3"] * 2
    ends = [end for end in fleet.ends() if end.attempt.round >= 7]
    assert ends
    assert all("m3" in end.survivors for end in ends)
    assert fleet.state.members["m3"].missed_deadlines == 0


def test_a_member_that_restarts_in_every_attempt_is_left_out():
    fleet = Fleet(4, job=job_document(count=40))

    def restarts(name, message):
        if name == "m3" and isinstance(getattr(message, "payload", None), secure_agg.Roster):
            fleet.kill(name)
            fleet.restart(name)

    fleet.before = restarts
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert len(left_out(fleet)) == 6


def test_a_left_out_member_counts_again_once_the_others_are_too_few():
    fleet = silent(Fleet(4, job=job_document(count=8)), "m3", while_=lambda fleet: fleet.state.round <= 2)
    fleet.connect().run(lambda: fleet.state.round == 3)
    assert "m3" not in fleet.state.available
    fleet.cut("m0")
    fleet.run(lambda: fleet.state.version_number == 3)
    fleet.check()
    assert set(fleet.ends()[-1].survivors) == {"m1", "m2", "m3"}


def test_a_silent_member_is_named_while_the_job_goes_on_without_it():
    fleet = silent(Fleet(4, job=job_document(count=10)), "m3")
    fleet.connect().run(lambda: fleet.state.round == 3)
    assert waiting(fleet.state) == "m3 missed 2 deadlines in a row and is left out until round 4"


def test_resuming_a_job_forgets_missed_deadlines():
    fleet = silent(Fleet(3), "m2", while_=lambda fleet: fleet.now_ms < 3_600_000 * 40).connect().run()
    assert fleet.state.members["m2"].missed_deadlines
    fleet.post(ev.Resume())
    fleet.run(lambda: fleet.state.status is JobStatus.RUNNING)
    assert fleet.state.members["m2"].missed_deadlines == 0


# ---- a version that explodes ---------------------------------------------------------------------------------------


def exploding(fleet, times, *, in_round):
    """Every member's change is `times` as long in one round."""
    hand_over = fleet.hand_over

    def longer(member, assignment, update):
        factor = np.float32((times if assignment.round == in_round else 1) / 100)
        hand_over(member, assignment, replace(update, change=update.change * factor))

    fleet.hand_over = longer
    return fleet


def test_a_version_that_explodes_is_counted_noted_and_known_after_a_restart():
    fleet = exploding(Fleet(3, job=job_document(count=7)), 100, in_round=5).connect()
    fleet.run(lambda: fleet.state.version_number == 4)
    assert not any(isinstance(count, counts.VersionExploded) for count in fleet.counts)
    fleet.run(lambda: fleet.state.version_number == 5)
    found = fleet.state.exploded
    assert found is not None
    assert (found.number, found.measure) == (5, "change")
    assert found.times == pytest.approx(100, rel=0.5)
    (counted,) = [count for count in fleet.counts if isinstance(count, counts.VersionExploded)]
    assert (counted.number, counted.measure, counted.times, counted.warns) == (5, "change", found.times, True)
    (stored,) = [record for record in fleet.records if isinstance(record, fx.PublishVersion) and record.exploded]
    assert stored.exploded == found
    norms = fleet.state.norms
    fleet.crash_coordinator()
    assert (fleet.state.exploded, fleet.state.norms) == (found, norms)
    # It goes on, and later versions do not replace the first that exploded.
    fleet.run()
    fleet.check()
    assert (fleet.state.status, fleet.state.exploded) == (JobStatus.FINISHED, found)


def test_sound_versions_explode_never():
    fleet = exploding(Fleet(3, job=job_document(count=8)), 3, in_round=6).connect().run()
    assert fleet.state.status is JobStatus.FINISHED
    assert fleet.state.exploded is None


# ---- members that decline for good --------------------------------------------------------------------------------


def declining(fleet, *names, reason=Reason.REASON_TRAINING_DIVERGED, from_round=1):
    trained = fleet._trained

    def unwilling(member, assignment):
        if member.name in names and assignment.round >= from_round:
            fleet.tell(member.name, states.PreparationFailed(assignment, reason, "it has its reasons"))
        else:
            trained(member, assignment)

    fleet._trained = unwilling
    return fleet


@pytest.mark.parametrize("names", [("m0",), ("m0", "m1", "m2")], ids=len)
@pytest.mark.parametrize(
    "reason",
    [
        Reason.REASON_TRAINING_DIVERGED,
        Reason.REASON_BUNDLE_UNSUITABLE,
        Reason.REASON_BUDGET_SPENT,
        Reason.REASON_POLICY_MECHANISM,
        # Asked again in every round until all retries have failed.
        Reason.REASON_TRAINING_FAILED,
    ],
)
def test_a_job_declined_for_good_by_too_many_pauses_and_says_why(names, reason):
    fleet = declining(Fleet(3), *names, reason=reason, from_round=3)
    fleet.connect().run(hours=6)
    fleet.check()
    assert (fleet.state.status, fleet.state.reason) == (JobStatus.PAUSED, Reason.REASON_MEMBERS_DECLINED)
    assert fleet.state.version_number == 2
    # Members that were willing to go on are told too.
    assert all(member.over[-1] == Reason.REASON_MEMBERS_DECLINED for member in fleet.members.values())
    assert "m0 declined: it has its reasons" in waiting(fleet.state)


def test_declines_that_may_pass_are_not_members_declined():
    fleet = declining(Fleet(3), "m0", reason=Reason.REASON_POLICY_CONDITIONS).connect().run(hours=6)
    assert fleet.state.reason == Reason.REASON_ROUNDS_FAILING


def test_a_job_waits_for_members_that_never_came_and_says_how_many():
    fleet = declining(Fleet(3), "m0", reason=Reason.REASON_POLICY_MECHANISM)
    fleet.connect("m0", "m1").run(hours=6)
    assert fleet.state.status is JobStatus.RUNNING
    assert waiting(fleet.state) == "1 of the 3 members needed are available; m0 declined: it has its reasons"


def test_a_job_goes_on_if_the_others_are_enough():
    fleet = declining(Fleet(4), "m0", reason=Reason.REASON_POLICY_MECHANISM).connect().run()
    assert fleet.state.status is JobStatus.FINISHED


def test_a_declined_job_resumes_by_itself_once_enough_members_are_back():
    fleet = declining(Fleet(3), "m0", reason=Reason.REASON_POLICY_MECHANISM)
    fleet.connect().run(lambda: fleet.state.status is JobStatus.PAUSED)
    assert fleet.state.reason == Reason.REASON_MEMBERS_DECLINED
    # A new process of the same member, with another policy.
    fleet._trained = Fleet._trained.__get__(fleet)
    fleet.kill("m0")
    fleet.run(hours=1)
    fleet.restart("m0")
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED


def test_resuming_a_declined_job_asks_members_with_a_spent_budget_again():
    fleet = declining(Fleet(3), "m0", reason=Reason.REASON_BUDGET_SPENT)
    fleet.connect().run(lambda: fleet.state.status is JobStatus.PAUSED)
    fleet._trained = Fleet._trained.__get__(fleet)
    fleet.post(ev.Resume())
    fleet.run()
    assert fleet.state.status is JobStatus.FINISHED
