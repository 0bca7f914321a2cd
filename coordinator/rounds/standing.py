"""A member's standing in a job: what it declined, what it was dropped for, and which deadlines it missed.

A member that misses `max_missed_deadlines` deadlines in a row is left out for the rest of the round and the next one,
then for 2, 4 and up to 64 rounds, until a published sum contains it. If the others are fewer than `min_members`, it is
asked anyway. A member dropped for what it sent is left out for the rest of the round, and after the third time until
the operator resumes the job.
"""

from dataclasses import replace

from coordinator.rounds import counts
from coordinator.rounds.state import JobState, MemberView
from coordinator.rounds.step import Step
from tacit.reason import Reason, word

__all__ = [
    "FOR_GOOD",
    "LASTING",
    "OF_STEWARDS",
    "REPEATED",
    "asked_again",
    "bar",
    "enough_are_back",
    "leave_out_of_round",
    "note_silence",
    "too_few_are_left",
]

# Refusals that last until the member restarts. After any other, the next round asks again.
LASTING = frozenset(
    {
        Reason.REASON_JOB_NOT_ADMITTED,
        Reason.REASON_DATA_UNSUITABLE,
        Reason.REASON_POLICY_MECHANISM,
        Reason.REASON_POLICY_COHORT,
        Reason.REASON_POLICY_CORRUPTION,
        Reason.REASON_POLICY_TWO_PARTY_SUM,
        Reason.REASON_BUNDLE_UNSUITABLE,
        Reason.REASON_PRIVACY_UNACCOUNTABLE,
        Reason.REASON_POLICY_JOB_KIND,
        Reason.REASON_POLICY_BASE_MODEL,
        Reason.REASON_POLICY_PARAMETERS,
        Reason.REASON_POLICY_AUTHORITY,
        Reason.REASON_POLICY_NOISE,
        Reason.REASON_POLICY_CORPUS,
        Reason.REASON_MEMBER_WITHDREW,
    }
)

# Refusals that a member cannot take back by itself before the next round. If they leave too few, the job pauses.
FOR_GOOD = LASTING | {
    Reason.REASON_BUDGET_SPENT,
    Reason.REASON_TRAINING_DIVERGED,
    Reason.REASON_APPROVAL_DECLINED,
}

# These two may pass. They count as final once every retry (`max_failed_rounds` rounds) has ended the same way.
REPEATED = FOR_GOOD | {Reason.REASON_TRAINING_FAILED, Reason.REASON_PRIVATE_STATE_UNUSABLE}

# What a member says whose stewards have not approved the job, or no longer do.
OF_STEWARDS = frozenset({Reason.REASON_APPROVAL_AWAITED, Reason.REASON_APPROVAL_DECLINED})

_MAX_FAULTS = 3

# The most rounds that a silent member is left out before it is tried again.
_LONGEST_SPAN = 64

_NEVER = 2**63


def asked_again(view: MemberView) -> MemberView:
    """Returns the member without a refusal that may pass, so that the next round asks it again."""
    lasting = view.declined is not None and view.declined[0] in LASTING
    return view if lasting else replace(view, declined=None)


def bar(step: Step, member: str, reason: Reason) -> None:
    """Leaves a member out for what it sent: for the rest of the round, after a few times until the operator resumes."""
    view = step.state.members[member]
    faults = view.faults + 1
    until = _NEVER if faults >= _MAX_FAULTS else step.state.round + 1
    step.state = step.state.with_member(member, replace(view, faults=faults, barred_until=until, ready=False))
    step.do(counts.Barred(member=member, faults=faults, reason=word(reason)))


def leave_out_of_round(step: Step, member: str) -> None:
    """Leaves a member out for the rest of the round, without a fault."""
    view = step.state.members[member]
    until = max(view.barred_until, step.state.round + 1)
    step.state = step.state.with_member(member, replace(view, barred_until=until, ready=False))


def note_silence(step: Step, member: str, phase: str) -> None:
    """Notes a missed deadline. From `max_missed_deadlines` in a row, leaves the member out, each time twice as long."""
    view = step.state.members[member]
    losses, limit = view.missed_deadlines + 1, step.state.parameters.job.rounds.max_missed_deadlines
    step.do(counts.DeadlineMissed(member=member, phase=phase, in_a_row=losses))
    away_until = view.away_until
    if losses >= limit:
        span = min(2 ** min(losses - limit, 30), _LONGEST_SPAN)
        away_until = step.state.round + 1 + span
        step.do(counts.LeftOut(member=member, in_a_row=losses, until_round=away_until))
    step.state = step.state.with_member(member, replace(view, missed_deadlines=losses, away_until=away_until))


def too_few_are_left(state: JobState, reasons: frozenset[Reason]) -> bool:
    """Whether members that declined for these reasons are why there is no cohort.

    If too few were ever here, they are not: others may come.
    """
    needed = state.parameters.job.rounds.min_members
    left = sum(1 for view in state.members.values() if view.declined is None or view.declined[0] not in reasons)
    return left < needed <= len(state.members)


def enough_are_back(state: JobState) -> bool:
    """Whether a job that paused for lack of members has enough of them again."""
    willing = [
        view
        for view in state.members.values()
        if view.connected and (view.declined is None or view.declined[0] not in REPEATED)
    ]
    return len(willing) >= state.parameters.job.rounds.min_members
