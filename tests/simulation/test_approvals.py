"""Members whose stewards must approve a job: who waits, what the job says meanwhile, and what stops a vector."""

from dataclasses import replace

import pytest

from coordinator.domain.jobs import JobStatus
from coordinator.rounds import counts
from coordinator.rounds import events as ev
from coordinator.rounds.state import TrainingWindow
from coordinator.rounds.waiting import waiting
from edge_client.policy.policy import PolicyRefusal
from edge_client.session import states
from tacit.messages import AttemptMessage, AttemptOpened, AttemptRefusal, Decline, Ready
from tacit.reason import Reason
from tests.support.fleet import Fleet, job_document

AWAITED, DECLINED = Reason.REASON_APPROVAL_AWAITED, Reason.REASON_APPROVAL_DECLINED


class AskingFleet(Fleet):
    """A fleet in which some members ask their stewards. What these say is known here; the machines are the real ones.

    Like the agent, a member asks before it trains, before it joins (inside the machine), and before it masks.
    """

    def __init__(self, members, *asking, **options):
        super().__init__(members, **options)
        # What the stewards of each asking member say; None: they approve.
        self.said = dict.fromkeys(asking, AWAITED)
        for name in asking:
            member = self.members[name]
            member.environment = replace(member.environment, approved=lambda job, name=name: self.ask(name))

    def ask(self, name):
        if (reason := self.said.get(name)) is not None:
            raise PolicyRefusal(reason, "what the stewards said")

    def decide(self, name, reason=None, *, seen=True):
        """The stewards decide. `seen`: the running member has looked since."""
        self.said[name] = reason
        phase = self.members[name].state.phase(self.job.name)
        if not seen:
            return
        if isinstance(phase, states.Awaiting) and reason is None:
            self.tell(name, states.Approved(phase.assignment))
        elif isinstance(phase, states.Awaiting | states.Holding) and reason is not None:
            self.tell(name, states.ApprovalAwaited(phase.assignment, self.job, reason, "what the stewards said"))

    def _trained(self, member, assignment):
        try:
            self.ask(member.name)
        except PolicyRefusal as refusal:
            self.tell(member.name, states.ApprovalAwaited(assignment, self.job, refusal.reason, refusal.detail))
            return
        super()._trained(member, assignment)

    def _mask(self, member, effect):
        try:
            self.ask(member.name)
        except PolicyRefusal as refusal:
            self.tell(member.name, states.MaskingFailed(effect.attempt, refusal.reason, refusal.detail))
            return
        super()._mask(member, effect)

    def told(self, name, kind):
        return [message for message in self.members[name].said if isinstance(message, kind)]

    def refusals(self, name):
        said = [message.payload for message in self.told(name, AttemptMessage)]
        return [payload.reason for payload in said if isinstance(payload, AttemptRefusal)]


def test_a_job_waits_for_stewards_for_days_without_a_failed_round_and_says_so():
    fleet = AskingFleet(3, "m2")
    fleet.connect().run(hours=72)
    fleet.check()
    assert fleet.state.status is JobStatus.RUNNING
    assert (fleet.state.round, fleet.state.failed_rounds, fleet.state.version_number) == (1, 0, 0)
    assert waiting(fleet.state) == (
        "2 of the 3 members needed are available; the stewards of m2 have yet to approve it"
    )
    assert fleet.told("m2", Ready) == []
    # The others trained once, and nobody is blamed for silence.
    assert len(fleet.told("m0", Ready)) >= 1
    assert not [each for each in fleet.counts if isinstance(each, counts.DeadlineMissed)]
    fleet.decide("m2")
    fleet.run(lambda: fleet.state.version_number == 3)
    fleet.check()
    assert all("m2" in survivors for survivors, _ in fleet.results.values())
    assert waiting(fleet.state) == ""


def test_members_that_approve_are_told_apart_from_those_that_have_not_looked_or_declined():
    fleet = AskingFleet(5, "m2", "m3", "m4")
    fleet.connect()
    fleet.said["m2"], fleet.said["m4"] = None, DECLINED
    fleet.run(lambda: len(fleet.told("m2", Ready)) > 0 and fleet.state.members["m4"].declined is not None)
    assert fleet.state.awaiting_approval == ("m3",)
    assert fleet.state.members["m4"].declined == (DECLINED, "what the stewards said")
    assert "m4" not in waiting(fleet.state)
    # Three are enough: the others go on, and the stewards are asked again in each round.
    fleet.run(lambda: fleet.state.version_number == 2)
    fleet.check()
    assert {each.round for each in fleet.told("m3", Decline)} >= {1, 2}


def test_declines_that_leave_too_few_pause_the_job_until_the_operator_resumes_it():
    fleet = AskingFleet(3, "m2")
    fleet.connect()
    fleet.said["m2"] = DECLINED
    fleet.run(lambda: fleet.state.status is JobStatus.PAUSED)
    assert fleet.state.reason == Reason.REASON_MEMBERS_DECLINED
    assert "m2 declined: what the stewards said" in waiting(fleet.state)
    fleet.decide("m2")
    fleet.post(ev.Resume())
    fleet.run(lambda: fleet.state.version_number == 1)
    fleet.check()


@pytest.mark.parametrize("seen", [True, False], ids=["seen while holding", "seen when the attempt opens"])
def test_a_withdrawal_after_ready_keeps_the_vector_here_and_a_new_approval_continues(seen):
    fleet = AskingFleet(4, "m3", job=job_document(min_members=4))
    fleet.connect()
    fleet.said["m3"] = None

    def withdraw(name, message):
        if name == "m3" and isinstance(getattr(message, "payload", None), AttemptOpened) and fleet.said["m3"] is None:
            fleet.decide("m3", AWAITED, seen=seen)

    if seen:
        fleet.run(lambda: len(fleet.told("m3", Ready)) == 1)
        fleet.decide("m3", AWAITED)
    else:
        fleet.before = withdraw
    # The attempt that was opened with m3 goes on without it; the next round needs all four.
    fleet.run(hours=1)
    fleet.check()
    member = fleet.members["m3"]
    assert [survivors for survivors, _ in fleet.results.values()] == [("m0", "m1", "m2")]
    assert (member.joined, member.opened) == ([], [])
    assert fleet.refusals("m3") == [AWAITED]
    # It dropped what it held, so that nothing stays reserved for it.
    assert member.update is None
    assert isinstance(member.state.phase("questions"), states.Awaiting)
    assert fleet.state.awaiting_approval == ("m3",)
    fleet.before = lambda name, message: None
    fleet.decide("m3")
    fleet.run(lambda: fleet.state.version_number == 2)
    fleet.check()
    assert list(fleet.results.values())[-1][0] == ("m0", "m1", "m2", "m3")


def test_a_withdrawal_in_the_middle_of_an_attempt_leaves_it_before_anything_is_masked():
    fleet = AskingFleet(4, "m3", job=job_document(min_members=3, count=1))
    fleet.connect()
    fleet.said["m3"] = None
    mask = fleet._mask

    def withdraw_first(member, effect):
        if member.name == "m3":
            fleet.decide("m3", AWAITED, seen=False)
        mask(member, effect)
        if member.name == "m3":
            # It waits for its stewards, and does not sit the round out.
            assert isinstance(member.state.phase("questions"), states.Awaiting)
            assert member.update is None

    fleet._mask = withdraw_first
    fleet.run(lambda: fleet.state.version_number == 1)
    fleet.check()
    ((survivors, _),) = fleet.results.values()
    assert survivors == ("m0", "m1", "m2")
    assert not [name for _, name in fleet.inputs if name == "m3"]
    assert fleet.refusals("m3") == [AWAITED]


def test_a_coordinator_that_restarts_hears_again_who_waits():
    fleet = AskingFleet(3, "m2")
    fleet.connect().run(hours=1)
    before = len(fleet.told("m2", Decline))
    fleet.crash_coordinator()
    fleet.run(lambda: isinstance(fleet.state.phase, TrainingWindow) and len(fleet.told("m2", Decline)) > before)
    fleet.run(hours=1)
    assert fleet.state.awaiting_approval == ("m2",)
    assert fleet.state.members["m2"].missed_deadlines == 0


def test_a_late_answer_of_the_stewards_changes_nothing_for_another_round():
    fleet = AskingFleet(4, "m3", job=job_document(min_members=3))
    fleet.connect()
    fleet.run(lambda: fleet.told("m3", Decline) != [])
    first = fleet.members["m3"].state.phase("questions").assignment
    fleet.run(lambda: fleet.state.round == 2 and len(fleet.told("m3", Decline)) == 2)
    before = fleet.members["m3"].state
    fleet.tell("m3", states.Approved(first))
    fleet.tell("m3", states.ApprovalAwaited(first, fleet.job, DECLINED, "late"))
    assert fleet.members["m3"].state == before


class NightFleet(AskingFleet):
    """An asking fleet whose m0 declines every round, because its policy does not let it train at night."""

    def _trained(self, member, assignment):
        if member.name == "m0":
            self.tell("m0", states.PreparationFailed(assignment, Reason.REASON_POLICY_CONDITIONS, "at night"))
        else:
            super()._trained(member, assignment)


def test_a_round_ends_for_a_member_that_sits_it_out_only_if_it_would_be_enough_without_stewards():
    enough = NightFleet(4, "m3")
    enough.connect().run(hours=24)
    assert (enough.state.status, enough.state.failed_rounds) == (JobStatus.PAUSED, enough.job.rounds.max_failed_rounds)
    needed = NightFleet(3, "m2")
    needed.connect().run(hours=24)
    assert (needed.state.status, needed.state.round, needed.state.failed_rounds) == (JobStatus.RUNNING, 1, 0)
