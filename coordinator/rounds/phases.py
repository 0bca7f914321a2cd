"""Moves an attempt through its five phases: advertise, share, mask, confirm, unmask.

    enter_phase    sends the phase's messages and sets its one deadline
    close_phase    ends it once everyone has answered, or the deadline has passed, or too few members are left

`secure_agg.server` says what the answers amount to. Either the next phase begins, or the sum is published, or the
attempt is abandoned.

Nothing here sends, stores or waits. Each function adds effects (`fx`) and counts to its `Step`, in the order in which
they must happen.
"""

from collections.abc import Collection
from dataclasses import replace

import secure_agg
from coordinator.domain.jobs import Dropout
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds.course import after_abandoned, attempt_over
from coordinator.rounds.standing import bar, note_silence
from coordinator.rounds.state import Aggregating, Collecting, JobState, Publishing
from coordinator.rounds.step import Step, absence_timer, deadline_timer, seconds_since
from secure_agg import server as protocol
from secure_agg.server import Seated
from tacit.attempt import AttemptId
from tacit.limits import DIGEST_ROSTER_ABOVE
from tacit.messages import AttemptEnded, AttemptMessage, CoordinatorPayload
from tacit.reason import Reason, of_protocol, sentence, word

__all__ = [
    "SILENT",
    "advance_if_settled",
    "close_phase",
    "enter_phase",
    "note_dropout",
    "tell_dropped",
    "watch_absence",
]

# A loss for one of these at the end of a phase is no reason to bar the member from the next attempt.
_NOBODYS_FAULT = frozenset(
    {
        secure_agg.Reason.PHASE_DEADLINE,
        secure_agg.Reason.GROUP_TOO_SMALL,
        secure_agg.Reason.RECONSTRUCTION_FAILED,
    }
)

# A member dropped for one of these may be honest on a bad line, so it is left out for a while, never for good.
SILENT = frozenset(
    {Reason.REASON_PHASE_DEADLINE, Reason.REASON_DISCONNECTED, Reason.REASON_MEMBER_RESTARTED},
)


def enter_phase(step: Step) -> None:
    """Sends the phase's messages, sets its one deadline, and watches members that are already absent."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    name = phase.protocol.phase.value
    deadline = float(getattr(step.state.parameters.job.rounds.deadlines, name))
    step.do(fx.SetTimer(deadline_timer(phase), deadline))
    # Members of a group share one payload. It is encoded only once if they come one after the other.
    first_of = {id(payload): member for member, payload in sorted(phase.outbox.items(), reverse=True)}
    for member, payload in sorted(phase.outbox.items(), key=lambda item: (first_of[id(item[1])], item[0])):
        step.do(fx.Send(member, AttemptMessage(phase.attempt, payload)))
    for member in sorted(phase.protocol.waiting):
        if not step.state.members[member].connected:
            watch_absence(step, member)


def watch_absence(step: Step, member: str) -> None:
    """Sets the timer that drops a disconnected member unless it reconnects in time."""
    view = step.state.members[member]
    seconds = step.state.parameters.job.rounds.deadlines.reconnect
    step.do(fx.SetTimer(absence_timer(view, member), seconds))


def advance_if_settled(step: Step) -> None:
    """Closes the phase if nobody is waited for any more, it cannot succeed, or the shares already open the sum."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    if not phase.protocol.waiting or phase.protocol.hopeless:
        close_phase(step)
    elif isinstance(phase.protocol, protocol.CollectingUnmaskings) and phase.protocol.enough:
        close_phase(step, early=True)


def close_phase(step: Step, *, early: bool = False, deadline: bool = False) -> None:
    """Ends the phase, and enters the next, publishes the sum or abandons the attempt.

    Args:
        early: the shares received so far should open the sum, so nobody else is waited for. If a dishonest dealer makes
            that fail, nothing happens, because another set of shares may still rebuild its secret.
        deadline: the deadline has passed. Otherwise nobody is late: if too few members are left, those still waited for
            hear how the attempt ended, and get no blame.
    """
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    closing = phase.protocol
    name = closing.phase.value
    outcome = closing.close()
    if early and (isinstance(outcome, secure_agg.Abandoned) or _gave_up_a_group(outcome[2])):
        return
    step.do(fx.CancelTimer(deadline_timer(phase)))
    step.do(counts.PhaseEnded(phase=name, seconds=seconds_since(step, phase.phase_ms), attempt=phase.attempt))
    if isinstance(outcome, secure_agg.Abandoned):
        noted = {dropout.member for dropout in phase.dropouts}
        lost = tuple(each for each in outcome.dropped if each.member not in noted)
        _note_late(step, lost if deadline else _not_late(lost), name)
        _abandon(step, of_protocol(outcome.reason), f"{name}: {outcome.detail}")
        return
    following, outgoing, late = outcome
    _note_late(step, late if deadline else _not_late(late), name)
    _count_groups(step, closing, following, phase.attempt)
    _begin(step, following, dict(outgoing), closed=name)


def _begin(
    step: Step, following: Collecting | protocol.OpenedSum, outbox: dict[str, CoordinatorPayload], *, closed: str
) -> None:
    """Enters the phase after `closed`, or publishes the opened sum.

    Some phases need something in place before their first message, such as open uploads. It is put in place here.
    """
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    if isinstance(following, protocol.OpenedSum):
        # With groups, a group that is lost takes its members out of the survivors. The same holds below.
        _publish(step, replace(phase, survivors=following.survivors), following)
        return
    if isinstance(following, protocol.CollectingDealings) and (
        following.context.grouped is not None or following.context.cohort > DIGEST_ROSTER_ABOVE
    ):
        # Digests in place of certificates and keys: members fetch what they lack, and of keys only their neighbours'.
        outbox = _rosters_by_digest(following.session, outbox)
    if isinstance(following, protocol.CollectingMasked):
        # Before anyone is asked for a vector.
        context, session = following.context, following.session
        groups = {member: session.group_of(member) for member in following.expected} if context.grouped else {}
        step.do(fx.OpenUploads(phase.attempt, following.expected, context.values, context.bits, groups))
    if isinstance(following, protocol.CollectingConfirmations):
        if _short_of_confirmed(step.state, phase, following):
            missing = "a member of the sum that was confirmed before is missing, and the others confirm no smaller sum"
            _abandon(step, Reason.REASON_THRESHOLD_LOST, f"{closed}: {missing}")
            return
        step.do(fx.CloseUploads(phase.attempt, keep_sum=True))
        _fix_survivors(step, phase.attempt, following.survivors)
    if isinstance(following, protocol.CollectingConfirmations | protocol.CollectingUnmaskings):
        phase = replace(phase, survivors=following.survivors)
    step.state = replace(step.state, phase=replace(phase, protocol=following, outbox=outbox, phase_ms=step.now_ms))
    enter_phase(step)


def _publish(step: Step, phase: Aggregating, opened: protocol.OpenedSum) -> None:
    """Ends the last phase, and has the next version computed from the sum."""
    step.state = replace(
        step.state,
        phase=Publishing(phase.attempt, phase.cohort, phase.survivors, phase.dropouts, step.now_ms, phase.silent),
    )
    step.do(fx.Compute(phase.attempt, opened, phase.survivors))


def _abandon(step: Step, reason: Reason, detail: str) -> None:
    """Ends the attempt without a sum, and decides what comes after it."""
    attempt_over(step, reason, detail)
    after_abandoned(step)


def _rosters_by_digest(session: secure_agg.Session, members: Collection[str]) -> dict[str, CoordinatorPayload]:
    """Returns one roster for all members or, with groups, one for each group."""
    if session.context.grouped is None:
        return dict.fromkeys(members, secure_agg.DigestRoster(tuple(session.entries.values())))
    rosters: dict[int, CoordinatorPayload] = {}
    for member in members:
        group = session.group_of(member)
        if group not in rosters:
            rosters[group] = session.roster_of(group)
    return {member: rosters[session.group_of(member)] for member in members}


def _short_of_confirmed(state: JobState, phase: Aggregating, following: protocol.CollectingConfirmations) -> bool:
    """Whether this attempt retries a confirmed sum and lacks one of its members.

    Members would refuse the shorter list, and once given out, it would fix the next attempt's cohort, too.
    """
    cohort = frozenset(phase.cohort)
    return cohort in state.confirmed_sums and frozenset(following.survivors) != cohort


def _fix_survivors(step: Step, attempt: AttemptId, survivors: tuple[str, ...]) -> None:
    """Stores the survivors before a member hears of them, so that the same members are asked again after a crash."""
    members = frozenset(survivors)
    if not step.state.one_sum_a_version:
        return
    step.do(fx.Persist((fx.FixSurvivors(attempt, survivors),)))
    if members not in step.state.confirmed_sums:
        step.state = replace(step.state, confirmed_sums=(*step.state.confirmed_sums, members))


def _not_late(lost: tuple[secure_agg.Dropped, ...]) -> tuple[secure_agg.Dropped, ...]:
    """Returns the losses, less those of members that still had time to answer."""
    return tuple(each for each in lost if each.reason is not secure_agg.Reason.PHASE_DEADLINE)


def _gave_up_a_group(lost: tuple[secure_agg.Dropped, ...]) -> bool:
    """Whether a dishonest dealer made a group fail. Another set of shares may still open that group."""
    return any(each.reason is secure_agg.Reason.RECONSTRUCTION_FAILED for each in lost)


def _count_groups(
    step: Step, closing: Collecting, following: Collecting | protocol.OpenedSum, attempt: AttemptId
) -> None:
    """Counts the groups that were lost in the phase that ended."""
    if closing.context.grouped is None:
        return
    total = closing.context.grouped.groups
    before = total - closing.lost_groups if isinstance(closing, Seated) else total
    if isinstance(following, protocol.OpenedSum):
        left = len(following.by_group())
    else:
        left = total - following.lost_groups if isinstance(following, Seated) else total
    if left < before:
        step.do(counts.GroupsLost(phase=closing.phase.value, lost=before - left, left=left, attempt=attempt))


def _note_late(step: Step, late: tuple[secure_agg.Dropped, ...], phase_name: str) -> None:
    """Records each loss, tells the member, and bars it if the loss is its fault."""
    for lost in late:
        phase = step.state.phase
        if isinstance(phase, Aggregating):
            reason = of_protocol(lost.reason)
            note_dropout(step, phase, Dropout(lost.member, phase_name, reason, lost.detail))
            tell_dropped(step, phase.attempt, lost.member, reason, lost.detail)
            if lost.reason not in _NOBODYS_FAULT:
                bar(step, lost.member, reason)
            elif reason in SILENT:
                note_silence(step, lost.member, phase_name)


def note_dropout(step: Step, phase: Aggregating, dropout: Dropout) -> None:
    """Records and counts a dropout."""
    step.state = replace(step.state, phase=replace(phase, dropouts=(*phase.dropouts, dropout)))
    step.do(
        counts.DroppedOut(
            phase=dropout.phase,
            reason=word(dropout.reason),
            member=dropout.member,
            detail=dropout.detail or sentence(dropout.reason),
            attempt=phase.attempt,
        )
    )


def tell_dropped(step: Step, attempt: AttemptId, member: str, reason: Reason, detail: str) -> None:
    """Tells a member that it is out of the attempt, and why."""
    step.do(fx.Send(member, AttemptMessage(attempt, AttemptEnded(False, reason, detail))))
