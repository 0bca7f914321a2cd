"""A job ends, or says why not: members that fail once, members at fault, members that cannot go on."""

import os
import sys
from dataclasses import replace

import pytest

import secure_agg
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.effects import Status
from coordinator.rounds.machine import transition
from edge_client.privacy.policy import Policy
from edge_client.session import states
from tacit.messages import AttemptMessage, Decline
from tacit.reason import Reason
from tests.support.fleet import Fleet, job_document

UNCAPPED = Policy(mechanisms=("none",), attempts_a_version=1000)


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


def test_one_training_that_failed_is_asked_again_in_the_next_round():
    fleet = Fleet(3)
    failing_once(fleet, "m0")
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is Status.FINISHED
    ends = [record for record in fleet.records if isinstance(record, fx.EndRound)]
    assert [end.published for end in ends] == [False, True, True, True]
    assert ends[0].reason == Reason.REASON_TOO_FEW_READY


def test_a_dealing_that_does_not_open_costs_an_attempt_and_not_the_job():
    fleet = Fleet(5)
    heard, done = fleet._heard, []

    def forged(name, message):
        if name == "m4" and isinstance(getattr(message, "payload", None), secure_agg.Dealing) and not done:
            done.append(message)
            dealing = message.payload
            # What is sealed is not under the dealer's signature: the server cannot see that it is rubbish.
            shares = tuple(
                share if share.receiver == "m4" else replace(share, sealed=b"x" * len(share.sealed))
                for share in dealing.shares
            )
            return ev.Answered(name, AttemptMessage(message.attempt, replace(dealing, shares=shares)))
        return heard(name, message)

    fleet._heard = forged
    fleet.connect().run()
    fleet.check()
    assert done
    assert fleet.state.status is Status.FINISHED
    assert {lost.reason for lost in fleet.ends()[0].dropouts} >= {Reason.REASON_DEALINGS_CIPHERTEXT_INVALID}


def test_a_dealer_that_commits_to_no_polynomial_is_left_out_of_the_next_attempt(monkeypatch):
    share, advertise = sys.modules["secure_agg.member.share"], sys.modules["secure_agg.member.advertise"]
    deal_shares, deal_secret = share.deal_shares, share.deal_secret

    def deal(seat, masking, sealing, random):
        if seat.member == "m4":
            share.deal_secret = lambda secret, t, points, source: tuple(b"\0" + os.urandom(32) for _ in points)
        try:
            return deal_shares(seat, masking, sealing, random)
        finally:
            share.deal_secret = deal_secret

    monkeypatch.setattr(advertise, "deal_shares", deal)
    fleet = Fleet(5, policy=Policy(mechanisms=("none",), allow_close_sums=True, attempts_a_version=1000))
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is Status.FINISHED
    assert "m4" not in fleet.ends()[1].survivors
    # Three times is enough; it is not asked again in this job.
    barred = [count for count in fleet.counts if count.what == "barred"]
    assert [count.fields["member"] for count in barred] == ["m4"] * min(3, fleet.job.rounds.count)


def test_members_whose_certificates_ran_out_are_not_drawn_for_ever():
    fleet = Fleet(5)
    real = fleet.parameters.verify

    def verify(certificate, message, signature):
        name = real(certificate, message, signature)
        if name in ("m3", "m4"):
            raise secure_agg.IdentityInvalid("the certificate has expired")
        return name

    fleet.state = replace(fleet.state, parameters=replace(fleet.parameters, verify=verify))
    fleet.connect().run()
    assert fleet.state.status is Status.FINISHED
    assert all(set(end.survivors) == {"m0", "m1", "m2"} for end in fleet.ends() if end.published)


def test_members_that_have_sent_all_they_may_bring_the_job_to_a_stop_that_says_so():
    fleet = Fleet(5)
    fleet.lose = lambda name, message: (
        fleet.state.attempt <= 3
        and name in ("m0", "m1")
        and isinstance(getattr(message, "payload", None), secure_agg.Confirmation)
    )
    fleet.connect().run()
    assert fleet.state.status is Status.PAUSED
    assert fleet.state.reason == Reason.REASON_ROUNDS_FAILING
    declined = [view.declined for view in fleet.state.members.values()]
    assert all(each is not None and each[0] == Reason.REASON_POLICY_ATTEMPTS for each in declined)
    assert all("attempts_a_version" in each[1] for each in declined)


def test_what_cannot_even_be_judged_costs_its_sender_the_attempt_and_nobody_else():
    fleet = Fleet(5)
    fleet.connect().run(lambda: bool(getattr(fleet.state.phase, "cohort", ())))
    fleet._coordinator(ev.Misbehaved("m2", "its Answered could not be worked out"))
    fleet.run()
    fleet.check()
    assert fleet.state.status is Status.FINISHED
    assert [(lost.member, lost.reason) for lost in fleet.ends()[0].dropouts] == [
        ("m2", Reason.REASON_MESSAGE_MALFORMED)
    ]


def test_resuming_a_job_that_has_all_its_versions_finishes_it():
    fleet = Fleet(3).connect().run()
    paused = replace(fleet.state, status=Status.PAUSED, reason=Reason.REASON_JOB_PAUSED)
    state, effects = transition(paused, ev.Resume(), 0)
    assert state.status is Status.FINISHED
    records = [record for effect in effects if isinstance(effect, fx.Persist) for record in effect.records]
    assert not any(isinstance(record, fx.OpenRound) for record in records)


def test_a_ready_that_was_lost_is_asked_for_again():
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
    assert fleet.state.status is Status.FINISHED


@pytest.mark.parametrize("seed", range(12))
def test_chaos(seed):
    chaos(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 400))
def test_chaos_at_length(seed):
    chaos(seed)


def chaos(seed):
    """Kills, broken connections, coordinator crashes, pauses, lost messages; and then quiet. The job must end."""
    random = __import__("random").Random(seed)
    job = job_document(count=random.choice([2, 4]), attempts=random.choice([1, 3]), failures=1000)
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
    assert fleet.state.status is Status.FINISHED
    for member in fleet.members.values():
        assert len(member.joined) == len(set(member.joined))
        assert len(member.opened) == len(set(member.opened))


def replace_cap():
    """What bounds sums of one version would stop a job that fails this often; it has tests of its own."""
    return Policy(mechanisms=("none",), attempts_a_version=100_000, allow_close_sums=True)


def outlasting(action):
    """Survives a crash of the coordinator: it is not one of its timers."""

    def wrapped():
        action()

    wrapped.of_member = True
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
    fleet.connect().run(lambda: fleet.state.status is Status.FINISHED)
    fleet.run(hours=1)
    assert fleet.members["m0"].over == [Reason.REASON_JOB_FINISHED]
    # It was asked anew each round: a limit by month opens again.
    declined = [message for message in fleet.members["m0"].said if isinstance(message, Decline)]
    assert [message.round for message in declined] == [1, 2, 3]
