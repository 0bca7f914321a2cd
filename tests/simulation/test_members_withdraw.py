"""A member that withdraws in any phase: what it still sends, whom the coordinator still asks, and which sum has it."""

from dataclasses import replace

import pytest

from coordinator.domain.jobs import JobStatus
from coordinator.rounds import events as ev
from coordinator.rounds.state import Aggregating, Publishing, TrainingWindow
from edge_client.policy.policy import PolicyRefusal
from edge_client.session import states
from tacit.messages import AttemptMessage, AttemptRefusal, Decline, JobEnded, Ready
from tacit.reason import Reason
from tests.support.fleet import Fleet

WITHDREW = Reason.REASON_MEMBER_WITHDREW
GONE = "m1"
PHASES = ("advertise", "share", "mask", "confirm", "unmask")


class LeavingFleet(Fleet):
    """A fleet of which one member's home may say that it withdrew. Like the agent, it also asks before it trains."""

    def __init__(self, members, **options):
        super().__init__(members, **options)
        self.withdrew = False
        member = self.members[GONE]
        member.environment = replace(member.environment, withdrawn=lambda name, job: self.ask(GONE))

    def ask(self, name):
        if self.withdrew and name == GONE:
            raise PolicyRefusal(WITHDREW, "this member withdrew")

    def leave(self, *, seen=True, told=False):
        """The member withdraws. `seen`: its process has looked since. `told`: so has the coordinator."""
        self.withdrew = True
        if seen:
            self.tell(GONE, states.Withdrew(self.job.name, WITHDREW, "this member withdrew"))
        if told:
            self.post(ev.Left(GONE))

    def _trained(self, member, assignment):
        try:
            self.ask(member.name)
        except PolicyRefusal as refusal:
            self.tell(member.name, states.PreparationFailed(assignment, refusal.reason, refusal.detail))
            return
        super()._trained(member, assignment)

    def phase_of(self):
        phase = self.state.phase
        return phase.protocol.phase.value if isinstance(phase, Aggregating) else None


def said(fleet, kind):
    return [message for message in fleet.members[GONE].said if isinstance(message, kind)]


def attempts_with(fleet):
    """The attempts for which a vector of the member was on its way."""
    return [attempt.attempt for attempt in fleet.members[GONE].opened]


@pytest.mark.parametrize("told", [False, True], ids=["the coordinator has not heard", "the coordinator has heard"])
@pytest.mark.parametrize("phase", PHASES)
def test_it_leaves_a_running_attempt_and_joins_no_other(phase, told):
    fleet = LeavingFleet(5)
    fleet.connect().run(lambda: fleet.phase_of() == phase)
    at = fleet.state.attempt
    vectors = attempts_with(fleet)
    fleet.leave(told=told)
    fleet.run(lambda: fleet.state.status is JobStatus.FINISHED)
    fleet.check()
    assert fleet.state.version_number == 3
    # No vector is begun after it, and no later sum has the member.
    assert attempts_with(fleet) == vectors
    later = [survivors for attempt, (survivors, _) in sums(fleet) if attempt > at]
    assert later
    assert not any(GONE in survivors for survivors in later)
    # Before its vector is there, it is in no sum at all.
    if phase in ("advertise", "share"):
        assert not any(GONE in survivors for _, (survivors, _) in sums(fleet))
    assert WITHDREW in fleet.members[GONE].over


def sums(fleet):
    return [(attempt.attempt, found) for attempt, found in fleet.results.items()]


def test_it_stops_training_and_says_why():
    fleet = LeavingFleet(4)
    fleet.connect().run(lambda: isinstance(fleet.members[GONE].state.phase(fleet.job.name), states.Preparing))
    fleet.leave()
    fleet.run(lambda: fleet.state.version_number == 1)
    assert said(fleet, Ready) == []
    assert [each.reason for each in said(fleet, Decline)] == [WITHDREW]
    assert fleet.state.members[GONE].withdrew


def test_a_process_that_has_not_looked_yet_joins_nothing_and_masks_nothing():
    fleet = LeavingFleet(4)
    fleet.connect().run(lambda: isinstance(fleet.members[GONE].state.phase(fleet.job.name), states.Holding))
    fleet.leave(seen=False)
    fleet.run(lambda: fleet.state.status is JobStatus.FINISHED)
    fleet.check()
    assert fleet.members[GONE].joined == []
    refusals = [message.payload for message in said(fleet, AttemptMessage)]
    assert any(isinstance(each, AttemptRefusal) and each.reason == WITHDREW for each in refusals)


def test_a_client_that_goes_on_all_the_same_is_asked_for_nothing():
    fleet = LeavingFleet(4)
    fleet.connect().run(lambda: isinstance(fleet.state.phase, TrainingWindow) and len(fleet.state.available) == 4)
    fleet.post(ev.Left(GONE))
    fleet.run(lambda: fleet.state.members[GONE].withdrew)
    # It says READY, declines for another reason, and comes back as another process: nothing changes that.
    ready = ev.SaidReady(GONE, fleet.state.round, fleet.state.version)
    declined = ev.Declined(GONE, fleet.state.round, Reason.REASON_POLICY_CONDITIONS, "not now")
    for event in (ready, declined, ev.Connected(GONE, b"another process!"), ready):
        assert isinstance(fleet.state.phase, TrainingWindow)
        fleet._coordinator(event)
        assert fleet.state.members[GONE].withdrew
    fleet.run(lambda: fleet.state.status is JobStatus.FINISHED)
    fleet.check()
    assert not any(GONE in survivors for _, (survivors, _) in sums(fleet))


def test_a_sum_that_is_being_opened_has_it_and_the_job_goes_on():
    fleet = LeavingFleet(4)
    fleet.connect().run(lambda: isinstance(fleet.state.phase, Publishing))
    fleet.leave(told=True)
    fleet.run(lambda: fleet.state.status is JobStatus.FINISHED)
    fleet.check()
    with_it = [GONE in survivors for _, (survivors, _) in sorted(sums(fleet))]
    assert with_it == [True, False, False]


def test_a_withdrawal_that_leaves_too_few_pauses_the_job():
    fleet = LeavingFleet(3)
    fleet.connect().run(lambda: fleet.state.version_number == 1)
    fleet.leave(told=True)
    fleet.run(lambda: fleet.state.status is JobStatus.PAUSED)
    assert fleet.state.reason == Reason.REASON_MEMBERS_DECLINED


def test_a_member_that_is_told_that_it_withdrew_leaves_too():
    fleet = LeavingFleet(4)
    fleet.connect().run(lambda: isinstance(fleet.members[GONE].state.phase(fleet.job.name), states.Holding))
    fleet.tell(GONE, states.Received(JobEnded(fleet.job.name, WITHDREW, fleet.state.version)))
    assert isinstance(fleet.members[GONE].state.phase(fleet.job.name), states.Waiting)
    assert fleet.members[GONE].over == [WITHDREW]
