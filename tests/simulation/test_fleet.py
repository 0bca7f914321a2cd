"""Both machines together, in one thread, under a fake clock."""

import dataclasses

import pytest

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.timers import Absence, PhaseDeadline, Window
from edge_client.policy.model_rules import MANIFEST
from edge_client.policy.policy import Policy
from edge_client.policy.rules import JOB
from edge_client.session import states
from secure_agg.member import share
from tacit.attempt import AttemptId
from tacit.context import application_digest
from tacit.messages import Assignment, AttemptMessage, AttemptOpened, Ready
from tacit.reason import Reason
from tacit.vector import layout_of
from tests.support.fleet import Fleet, job_document

# The message that a member has just received when it is lost, and the phase that then misses it.
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
    assert fleet.state.status is JobStatus.FINISHED
    assert fleet.state.version_number == 3
    assert len(fleet.results) == 3
    assert all(len(survivors) == 5 for survivors, _ in fleet.results.values())
    assert all(member.over == [Reason.REASON_JOB_FINISHED] for member in fleet.members.values())


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_member_lost_in_any_phase_is_a_dropout_of_that_phase(message, how):
    fleet = Fleet(5)

    def lose(name, arriving):
        if name == "m2" and isinstance(getattr(arriving, "payload", None), message):
            getattr(fleet, how)(name)

    fleet.before = lose
    fleet.connect().run()
    fleet.check()
    first = fleet.ends()[0]
    assert first.published
    # Once the others' shares open the sum, nobody waits for the last member, so it is no dropout.
    lost = [] if PHASES[message] == "unmask" else [("m2", PHASES[message])]
    assert [(dropout.member, dropout.phase) for dropout in first.dropouts] == lost
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
def test_below_the_threshold_an_attempt_is_abandoned_and_the_next_works(message):
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
    assert fleet.state.status is JobStatus.FINISHED


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
def test_a_coordinator_killed_in_any_phase_reopens_the_round(message):
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
    assert fleet.state.status is JobStatus.FINISHED
    assert fleet.state.version_number == 3
    rounds = [record.round for record in fleet.records if isinstance(record, fx.OpenRound)]
    assert rounds == [1, 2, 3]
    # Updates trained before the crash were used after it: five members, three rounds.
    assert sum(len(member.joined) for member in fleet.members.values()) <= 4 * 5


@pytest.mark.parametrize("back_ms", [1_000, None], ids=["back-in-time", "gone-for-good"])
def test_a_restarted_coordinator_waits_briefly_for_its_last_cohort(back_ms):
    """Otherwise it would take the first few that are back for everyone, and open the round over them alone."""
    fleet, crashed = Fleet(5), []

    def crash() -> None:
        crashed.append(fleet.now_ms)
        fleet.kill("m4")
        fleet.crash_coordinator()
        if back_ms is not None:
            fleet.at(back_ms, lambda: fleet.restart("m4"))

    def watch(_: str, arriving: object) -> None:
        if isinstance(getattr(arriving, "payload", None), secure_agg.ReceivedDealings) and not crashed:
            crashed.append(-1)
            fleet.at(0, crash)

    fleet.before = watch
    fleet.connect().run(lambda: fleet.state.attempt == 2)
    waited = fleet.now_ms - crashed[-1]
    first, second = [record for record in fleet.records if isinstance(record, fx.OpenAttempt)]
    assert len(first.cohort) == 5
    awaited = [count.fields for count in fleet.counts if count.what == "members_awaited"]
    reconnect = fleet.job.rounds.deadlines.reconnect
    assert awaited == [{"members": 5, "seconds": reconnect}]
    if back_ms is None:
        assert set(second.cohort) == {"m0", "m1", "m2", "m3"}
        assert 1000 * reconnect <= waited < 1000 * (reconnect + 5)
    else:
        assert set(second.cohort) == set(first.cohort)
        assert back_ms <= waited < 1000 * fleet.job.rounds.deadlines.training
    fleet.run()
    fleet.check()
    assert fleet.state.version_number == 3


def test_a_restarted_coordinator_without_a_last_cohort_does_not_wait():
    fleet = Fleet(5)
    fleet.crash_coordinator()
    fleet.connect().run()
    fleet.check()
    assert not [count for count in fleet.counts if count.what == "members_awaited"]
    assert fleet.state.version_number == 3


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
    assert fleet.state.status is JobStatus.FINISHED
    assert len(fleet.results) == 3


def test_a_job_is_paused_resumed_and_aborted():
    fleet = Fleet(4)
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    fleet.post(ev.Pause())
    fleet.run()
    assert fleet.state.status is JobStatus.PAUSED
    paused_at = fleet.state.version_number
    assert all(Reason.REASON_JOB_PAUSED in member.over for member in fleet.members.values())
    fleet.post(ev.Resume())
    fleet.run(lambda: fleet.state.version_number > paused_at)
    fleet.check()
    fleet.post(ev.Abort())
    fleet.run()
    assert fleet.state.status is JobStatus.ABORTED
    assert not fleet.state.round_open
    assert all(member.over[-1] == Reason.REASON_JOB_ABORTED for member in fleet.members.values())
    fleet.post(ev.Resume())
    fleet.run()
    assert fleet.state.status is JobStatus.ABORTED


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
    if not first.published:  # The last phase may be over before the pause arrives.
        assert first.reason == Reason.REASON_JOB_PAUSED
        assert fleet.ends()[1].attempt.round == first.attempt.round
    assert fleet.state.status is JobStatus.FINISHED


def test_a_member_back_after_three_rounds_takes_part_again():
    fleet = Fleet(5, job=job_document(count=5))
    fleet.connect("m0", "m1", "m2", "m3")
    fleet.run(lambda: fleet.state.version_number == 3)
    fleet.connect("m4").run()
    fleet.check()
    cohorts = [len(record.cohort) for record in fleet.records if isinstance(record, fx.OpenAttempt)]
    assert cohorts[:3] == [4, 4, 4]
    assert cohorts[-1] == 5


def test_a_refusal_by_policy_is_heard_and_the_others_go_on():
    fleet = Fleet(5)
    strict = fleet.members["m0"]
    strict.environment = dataclasses.replace(strict.environment, policy=Policy(mechanisms=("none",), min_cohort=50))
    fleet.connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    declined = fleet.state.members["m0"].declined
    assert declined is not None
    assert declined[0] == Reason.REASON_POLICY_COHORT
    assert "50" in declined[1]
    assert strict.opened == []


@pytest.mark.parametrize(
    ("reason", "times"),
    [
        # What a policy demands of a job is the same in every round.
        *((reason, 1) for reason in sorted({rule.reason for rule in (*JOB, *MANIFEST)})),  # type: ignore[attr-defined]
        (Reason.REASON_POLICY_CONDITIONS, 3),
    ],
)
def test_a_refused_job_is_offered_once_and_a_postponed_one_every_round(reason, times):
    fleet, asked = Fleet(4), []

    def before(name, message):
        if name == "m0" and isinstance(message, Assignment):
            asked.append(message.round)
            fleet.post(ev.Declined("m0", message.round, reason, "its policy says so"))

    fleet.before = before
    fleet.lose = lambda name, message: name == "m0" and isinstance(message, Ready)
    fleet.connect().run()
    assert fleet.state.status is JobStatus.FINISHED
    assert asked == [1, 2, 3][:times]


@pytest.mark.parametrize("paused", [False, True])
def test_a_decline_of_another_round_does_not_count_for_this_one(paused):
    """After a restore a member may still ask for a version of a forgotten round. That is no reason to leave it out."""
    fleet = Fleet(4, job=job_document(count=3))
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    if paused:
        fleet.post(ev.Pause())
        fleet.run(lambda: fleet.state.status is JobStatus.PAUSED)
    fleet.post(ev.Declined("m0", 110, Reason.REASON_BUNDLE_UNSUITABLE, "no job has a blob d19749dc7901"))
    if paused:
        fleet.run()
        assert fleet.state.available == ("m0", "m1", "m2", "m3")
        fleet.post(ev.Resume())
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert "m0" in [record for record in fleet.records if isinstance(record, fx.OpenAttempt)][-1].cohort


def test_rounds_that_keep_failing_pause_the_job():
    fleet = Fleet(5, policy=Policy(mechanisms=("none",), min_cohort=6))
    fleet.connect().run()
    # Nobody takes part, so the job waits with its reasons, and no attempt was opened in vain.
    assert not fleet.results
    assert all(view.declined for view in fleet.state.members.values())

    fleet = Fleet(5, job=job_document(max_attempts=2, max_failed_rounds=2))
    fleet.lose = lambda name, message: isinstance(getattr(message, "payload", None), secure_agg.Dealing)
    fleet.connect().run()
    assert fleet.state.status is JobStatus.PAUSED
    assert fleet.state.reason == Reason.REASON_ROUNDS_FAILING
    assert len(fleet.ends()) == 4


def test_an_update_for_an_ended_round_is_not_counted():
    fleet = Fleet(3).connect()
    fleet.run(lambda: fleet.state.round == 1)
    fleet.post(ev.SaidReady("m0", 1, bytes([9]) * 32))
    fleet.post(ev.SaidReady("m1", 7, fleet.state.version))
    fleet.run(lambda: stale(fleet) == 2 or fleet_ready(fleet) > 0)
    assert stale(fleet) == 2
    assert fleet_ready(fleet) == 0
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED


def stale(fleet):
    return sum(count.what == "stale_ready" for count in fleet.counts)


def fleet_ready(fleet):
    return len(getattr(fleet.state.phase, "ready_order", ()))


def test_a_ready_member_that_has_left_is_not_in_the_cohort():
    fleet = Fleet(5, job=job_document(count=1, target_members=5))
    fleet.lose = lambda name, message: name == "m4" and isinstance(message, Ready)
    fleet.connect().run(lambda: fleet_ready(fleet) == 4)
    fleet.cut("m0")
    fleet.run(hours=0.01)
    # The window closes with m1, m2 and m3: m0 has left, and m4 was never heard.
    fleet.run(lambda: bool(fleet.ends()))
    opened = [record for record in fleet.records if isinstance(record, fx.OpenAttempt)]
    assert opened[0].cohort == ("m1", "m2", "m3")


def test_a_late_timer_ends_nothing_else():
    fleet = Fleet(5)
    fleet.connect().run(lambda: phase_of(fleet) == "share")
    before = fleet.state
    fleet._coordinator(ev.TimerFired(PhaseDeadline(1, "advertise")))
    fleet._coordinator(ev.TimerFired(Window(1, 0)))
    fleet._coordinator(ev.TimerFired(Absence("m0", 1)))
    assert fleet.state == before
    fleet.run()
    assert all(not end.dropouts for end in fleet.ends())


def phase_of(fleet):
    collecting = getattr(fleet.state.phase, "protocol", None)
    return collecting.phase.value if collecting is not None else None


def test_a_member_absent_at_the_start_of_a_phase_is_awaited_briefly():
    fleet = Fleet(9, job=job_document(count=1))

    def leave(name, message):
        # Its vector has arrived, so it is in the sum, but it leaves before it can confirm.
        if name == "m2" and isinstance(getattr(message, "payload", None), secure_agg.ReceivedDealings):
            fleet.at(30, lambda: fleet.cut("m2"))

    def slow(name, message):
        return name == "m3" and isinstance(message, secure_agg.MaskedInput) and fleet.now_ms < 20_000

    fleet.before = leave
    fleet.lose = slow
    fleet.connect().run(lambda: bool(fleet.ends()))
    end = fleet.ends()[0]
    assert end.published
    assert ("m2", "confirm", Reason.REASON_DISCONNECTED) in [
        (lost.member, lost.phase, lost.reason) for lost in end.dropouts
    ]
    deadlines = fleet.job.rounds.deadlines
    assert fleet.now_ms < 1000 * (deadlines.mask + 5 * deadlines.reconnect)


def test_a_crash_between_the_last_version_and_the_status_is_repaired():
    fleet = Fleet(3).connect().run()
    assert isinstance(fleet.records[-1], fx.SetStatus)
    del fleet.records[-1]
    rounds = sum(isinstance(record, fx.OpenRound) for record in fleet.records)
    fleet.crash_coordinator()
    fleet.run()
    assert fleet.state.status is JobStatus.FINISHED
    assert sum(isinstance(record, fx.OpenRound) for record in fleet.records) == rounds


def test_a_hopeless_attempt_ends_before_its_deadline():
    fleet = Fleet(5)

    def lose(name, message):
        if name in ("m1", "m3") and isinstance(getattr(message, "payload", None), secure_agg.Roster):
            fleet.kill(name)

    fleet.before = lose
    # m0 is connected and silent, so without the early end the phase would last until its deadline.
    fleet.lose = lambda name, message: (
        name == "m0" and isinstance(getattr(message, "payload", None), secure_agg.Dealing)
    )
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert fleet.ends()[0].reason == Reason.REASON_THRESHOLD_LOST
    assert fleet.now_ms < 1000 * fleet.job.rounds.deadlines.share / 2


def test_a_published_update_is_not_sent_again():
    fleet = Fleet(5, job=job_document(count=2)).connect()
    victim = fleet.members["m0"]
    fleet.run(lambda: any(ended.published for _, ended in victim.ended))
    assert victim.update is None
    again = AttemptId("questions", 1, 2)
    context = dataclasses.replace(published_context(fleet), attempt=2)
    fleet.tell("m0", states.Received(AttemptMessage(again, AttemptOpened(context))))
    assert victim.said[-1].payload.reason == Reason.REASON_MEMBER_RESTARTED
    assert again not in victim.joined


def published_context(fleet):
    layout = layout_of(fleet.job, 5)
    threshold, corrupt = secure_agg.default_thresholds(5)
    return secure_agg.RoundContext(
        federation=fleet.parameters.federation,
        job="questions",
        round=1,
        attempt=1,
        application=application_digest(fleet.job, layout),
        model=fleet.job.weights,
        cohort=5,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=layout.values,
        bits=layout.bits,
    )


def seconds_of(fleet, phase):
    """How many seconds each attempt spent in this phase."""
    return [
        count.fields["seconds"] for count in fleet.counts if count.what == "phase" and count.fields["phase"] == phase
    ]


def test_the_sum_is_opened_with_the_first_shares_that_suffice():
    fleet = Fleet(5)
    slow = 1000 * fleet.job.rounds.deadlines.unmask // 2

    def delays(name, message):
        late = name == "m2" and isinstance(getattr(message, "payload", None), secure_agg.Unmasking)
        return (slow,) if late else (20,)

    fleet.delays = delays
    fleet.connect().run()
    fleet.check()
    assert len(fleet.ends()) == 3
    for end in fleet.ends():
        assert end.published
        assert not end.dropouts
        assert "m2" in end.survivors
    assert max(seconds_of(fleet, "unmask")) < 1
    assert fleet.members["m2"].ended[0][1].published
    assert not any(view.faults for view in fleet.state.members.values())


@pytest.mark.parametrize("members", [5, 7])
def test_shares_that_do_not_rebuild_a_secret_do_not_end_the_waiting(members, monkeypatch):
    # With five members all must then answer; with seven nobody waits for the last.
    fleet = Fleet(members)
    honest = share.deal_secret  # type: ignore[attr-defined]

    def dishonest(secret, threshold, points, random):
        dealt = honest(secret, threshold, points, random)
        if random is fleet.members["m2"].environment.random:
            # Off the polynomial at the first point, with a commitment to that share.
            return (bytes([0, dealt[0][1] ^ 1]) + dealt[0][2:], *dealt[1:])
        return dealt

    monkeypatch.setattr(share, "deal_secret", dishonest)
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    first = fleet.ends()[0]
    assert secure_agg.default_thresholds(members)[0] == {5: 4, 7: 5}[members]
    assert first.published
    assert [(lost.member, lost.reason) for lost in first.dropouts] == [("m2", Reason.REASON_DEALER_SEED_INCONSISTENT)]
    assert fleet.state.members["m2"].faults == 1
