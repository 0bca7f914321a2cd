"""Both machines together, in one thread, under a fake clock."""

import pytest

import secure_agg
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.effects import Status
from edge_client.privacy.policy import Policy
from tacit.messages import AttemptOpened
from tacit.reason import Reason
from tests.support.fleet import Fleet, job_document

# What a member has just been sent when it is lost, and the phase in which it is then missed.
PHASES = {
    AttemptOpened: "advertise",
    secure_agg.Roster: "share",
    secure_agg.ReceivedDealings: "mask",
    secure_agg.Survivors: "confirm",
    secure_agg.Confirmations: "unmask",
}


def test_a_job_runs_to_its_end():
    fleet = Fleet(5).connect().run()
    fleet.check()
    assert fleet.state.status is Status.FINISHED
    assert fleet.state.version_number == 3
    assert len(fleet.results) == 3
    assert all(len(survivors) == 5 for survivors, _ in fleet.results.values())
    assert all(member.over == [Reason.REASON_JOB_FINISHED] for member in fleet.members.values())


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_one_member_lost_in_any_phase_is_a_dropout_of_that_phase(message, how):
    fleet = Fleet(5)

    def lose(name, arriving):
        if name == "m2" and isinstance(getattr(arriving, "payload", None), message):
            getattr(fleet, how)(name)

    fleet.before = lose
    fleet.connect().run()
    fleet.check()
    first = fleet.ends()[0]
    assert first.published
    assert [(lost.member, lost.phase) for lost in first.dropouts] == [("m2", PHASES[message])]
    in_sum = PHASES[message] in ("confirm", "unmask")
    assert ("m2" in first.survivors) == in_sum
    assert fleet.state.version_number == 3


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
def test_a_short_break_in_any_phase_costs_nothing(message):
    fleet = Fleet(5)
    done = []

    def blink(name, arriving):
        if name == "m2" and isinstance(getattr(arriving, "payload", None), message) and not done:
            done.append(fleet.now_ms)
            fleet.cut(name)
            fleet.at(500, lambda: fleet.connect(name))

    fleet.before = blink
    fleet.connect().run()
    fleet.check()
    assert done
    assert all(end.published and not end.dropouts for end in fleet.ends())


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
def test_below_the_threshold_the_attempt_is_abandoned_and_the_next_one_works(message):
    fleet = Fleet(5)
    lost = {"m1", "m3"}

    def lose(name, arriving):
        if name in lost and isinstance(getattr(arriving, "payload", None), message) and fleet.state.attempt == 1:
            fleet.kill(name)
            fleet.at(60_000, lambda: fleet.restart(name))

    fleet.before = lose
    fleet.connect().run()
    fleet.check()
    first = fleet.ends()[0]
    assert not first.published
    assert first.reason == Reason.REASON_THRESHOLD_LOST
    assert {dropout.member for dropout in first.dropouts} == lost
    assert first.attempt not in fleet.results
    assert fleet.state.status is Status.FINISHED


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
def test_a_restarted_member_is_a_dropout_even_if_it_is_back_at_once(message):
    fleet = Fleet(5)

    def restart(name, arriving):
        if name == "m2" and isinstance(getattr(arriving, "payload", None), message) and fleet.state.attempt == 1:
            fleet.kill(name)
            fleet.restart(name)

    fleet.before = restart
    fleet.connect().run()
    fleet.check()
    first = fleet.ends()[0]
    assert first.published
    assert [lost.reason for lost in first.dropouts] == [Reason.REASON_MEMBER_RESTARTED]
    # Nobody joined an attempt twice.
    for member in fleet.members.values():
        assert len(member.joined) == len(set(member.joined))


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
def test_the_coordinator_killed_in_any_phase_reopens_the_round(message):
    fleet = Fleet(5)
    crashed = []

    def crash(name, arriving):
        if isinstance(getattr(arriving, "payload", None), message) and not crashed:
            crashed.append(fleet.now_ms)
            fleet.at(0, fleet.crash_coordinator)

    fleet.before = crash
    fleet.connect().run()
    fleet.check()
    assert crashed
    assert fleet.state.status is Status.FINISHED
    assert fleet.state.version_number == 3
    rounds = [record.round for record in fleet.records if isinstance(record, fx.OpenRound)]
    assert rounds == [1, 2, 3]
    # The update that was trained before the crash was used after it: five members, three rounds.
    assert sum(len(member.joined) for member in fleet.members.values()) <= 4 * 5


def test_a_silent_member_ends_the_phase_at_its_deadline():
    fleet = Fleet(5)
    fleet.lose = lambda name, message: (
        name == "m4" and isinstance(getattr(message, "payload", None), secure_agg.Dealing)
    )
    fleet.connect().run(lambda: bool(fleet.ends()))
    end = fleet.ends()[0]
    assert end.published
    assert [(lost.member, lost.reason) for lost in end.dropouts] == [("m4", Reason.REASON_PHASE_DEADLINE)]
    deadlines = fleet.job.rounds.deadlines
    assert 1000 * deadlines.share <= fleet.now_ms < 1000 * (deadlines.share + 10)


def test_a_window_below_the_minimum_is_extended_and_the_updates_stay_good():
    fleet = Fleet(3)
    fleet.connect("m0", "m1")
    fleet.run(lambda: fleet.now_ms > 200_000, hours=0.06)
    assert fleet.state.attempt == 0
    assert [count for count in fleet.counts if count.what == "window_extended"]
    fleet.connect("m2").run()
    fleet.check()
    assert fleet.state.status is Status.FINISHED
    assert len(fleet.results) == 3


def test_pause_resume_abort():
    fleet = Fleet(4)
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    fleet.post(ev.Pause())
    fleet.run()
    assert fleet.state.status is Status.PAUSED
    paused_at = fleet.state.version_number
    assert all(Reason.REASON_JOB_PAUSED in member.over for member in fleet.members.values())
    fleet.post(ev.Resume())
    fleet.run(lambda: fleet.state.version_number > paused_at)
    fleet.check()
    fleet.post(ev.Abort())
    fleet.run()
    assert fleet.state.status is Status.ABORTED
    assert not fleet.state.round_open
    assert all(member.over[-1] == Reason.REASON_JOB_ABORTED for member in fleet.members.values())
    fleet.post(ev.Resume())
    fleet.run()
    assert fleet.state.status is Status.ABORTED


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
def test_a_pause_in_any_phase_abandons_the_attempt_and_keeps_the_round(message):
    fleet = Fleet(4)
    paused = []

    def pause(name, arriving):
        if isinstance(getattr(arriving, "payload", None), message) and not paused:
            paused.append(name)
            fleet.post(ev.Pause())
            fleet.post(ev.Resume(), 5000)

    fleet.before = pause
    fleet.connect().run()
    fleet.check()
    first = fleet.ends()[0]
    if not first.published:  # The last phase can be over before the pause arrives.
        assert first.reason == Reason.REASON_JOB_PAUSED
        assert fleet.ends()[1].attempt.round == first.attempt.round
    assert fleet.state.status is Status.FINISHED


def test_a_member_back_after_three_rounds_takes_part_again():
    fleet = Fleet(5, job=job_document(count=5))
    fleet.connect("m0", "m1", "m2", "m3")
    fleet.run(lambda: fleet.state.version_number == 3)
    fleet.connect("m4").run()
    fleet.check()
    cohorts = [len(record.cohort) for record in fleet.records if isinstance(record, fx.OpenAttempt)]
    assert cohorts[:3] == [4, 4, 4]
    assert cohorts[-1] == 5


def test_a_policy_that_refuses_is_heard_and_the_others_go_on():
    fleet = Fleet(5)
    strict = fleet.members["m0"]
    strict.environment = secure_replace(strict.environment, Policy(mechanisms=("none",), least_cohort=50))
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is Status.FINISHED
    declined = fleet.state.members["m0"].declined
    assert declined is not None
    assert declined[0] == Reason.REASON_POLICY_COHORT
    assert "50" in declined[1]
    assert strict.opened == []


def secure_replace(environment, policy):
    from dataclasses import replace

    return replace(environment, policy=policy)


def test_attempts_for_one_version_are_capped_by_the_members_policy():
    fleet = Fleet(5, policy=Policy(mechanisms=("none",), attempts_a_version=2), job=job_document(attempts=10))
    # Every sum fails in its last phase: two of five never confirm.
    fleet.lose = lambda name, message: (
        name in ("m0", "m1") and isinstance(getattr(message, "payload", None), secure_agg.Confirmation)
    )
    fleet.connect().run(lambda: len(fleet.ends()) >= 4, hours=2)
    assert all(len(member.opened) <= 2 for member in fleet.members.values())
    assert not fleet.results


def test_rounds_that_keep_failing_pause_the_job():
    fleet = Fleet(5, policy=Policy(mechanisms=("none",), least_cohort=6))
    fleet.connect().run()
    # Nobody takes part: the job waits with its reasons, and no attempt was ever opened a second time for nothing.
    assert not fleet.results
    assert all(view.declined for view in fleet.state.members.values())

    fleet = Fleet(5, job=job_document(attempts=2, failures=2))
    fleet.lose = lambda name, message: isinstance(getattr(message, "payload", None), secure_agg.Dealing)
    fleet.connect().run()
    assert fleet.state.status is Status.PAUSED
    assert fleet.state.reason == Reason.REASON_ROUNDS_FAILING
    assert len(fleet.ends()) == 4
