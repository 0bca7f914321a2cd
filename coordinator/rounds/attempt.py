"""Opens an attempt over a cohort, takes answers and vectors, and drops members.

A member's keys are taken only under a certificate that the others will find in the roster log of this attempt, with the
signatures of the witnesses that they may have pinned. Under any other, each of them would refuse the whole roster, so
one member that renews at the right moment would stop them all. The others check the roster themselves; this protects
the attempt, not them.
"""

from collections.abc import Mapping
from dataclasses import replace

import secure_agg
from coordinator.domain.jobs import Dropout
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.blame import after_complaint, decide, owed_by, unanswered
from coordinator.rounds.phases import (
    SILENT,
    advance_if_settled,
    close_phase,
    enter_phase,
    note_dropout,
    tell_dropped,
)
from coordinator.rounds.standing import bar, leave_out_of_round, note_silence
from coordinator.rounds.state import Aggregating, Collecting, Publishing
from coordinator.rounds.step import Step, deadline_timer, look_timer, window_timer
from secure_agg import server as protocol
from tacit.attempt import AttemptId
from tacit.context import context_of
from tacit.limits import UPLOAD_MESSAGE
from tacit.messages import AttemptEnded, AttemptMessage, AttemptOpened, AttemptRefusal
from tacit.reason import Reason, of_protocol, sentence, word

__all__ = ["answered", "deadline_passed", "drop", "open_attempt", "uploaded"]

# While a large cohort's shares arrive, the coordinator checks at most this many times whether they open the sum, and
# again after each of the last answers.
_MAX_CHECKS_PER_PHASE, _LAST = 64, 16

_LOOK_SECONDS = 1.0


def open_attempt(step: Step, ready: tuple[str, ...]) -> None:
    """Opens the round's next attempt over the members in `ready`."""
    state, parameters = step.state, step.state.parameters
    cohort = tuple(sorted(ready))
    step.do(fx.CancelTimer(window_timer(state)))
    members = {name: replace(view, ready=view.ready and name not in cohort) for name, view in state.members.items()}
    state = replace(state, attempt=state.attempt + 1, attempts_in_round=state.attempts_in_round + 1, members=members)
    attempt = state.attempt_id()
    head = parameters.log_head()
    context = context_of(
        parameters.job,
        federation=parameters.federation,
        round=state.round,
        attempt=state.attempt,
        model=state.version,
        members=len(cohort),
        head=b"" if head is None else head.head.digest,
    )
    opening = protocol.open_attempt(context, cohort, parameters.verify, key_of=parameters.key_of)
    outbox = {member: AttemptOpened(context, head) for member in cohort}
    phase = Aggregating(
        attempt,
        cohort,
        opening,
        step.now_ms,
        outbox,
        logged=None if head is None else head.head.size,
        # Fixed now: members ask for the signatures as soon as they hear of the attempt.
        witnessed=parameters.witnessed().entries,
    )
    step.state = replace(state, phase=phase)
    approved = tuple(name for name in cohort if state.members[name].approvals)
    step.do(fx.Persist((fx.OpenAttempt(attempt, cohort, approved),)))
    step.do(counts.AttemptOpened(cohort=len(cohort), attempt=attempt))
    enter_phase(step)


def answered(step: Step, event: ev.Answered) -> None:
    """Takes a member's answer, or its refusal, in the present phase."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating) or event.message.attempt != phase.attempt:
        _tell_stale(step, event.member, event.message.attempt)
        return
    payload = event.message.payload
    if isinstance(payload, AttemptRefusal):
        if event.member not in phase.cohort:
            return
        said = payload.detail or sentence(payload.reason)
        step.do(counts.Refused(reason=word(payload.reason), member=event.member, detail=said))
        silent(step, event.member)
        drop(step, event.member, payload.reason, payload.detail)
        return
    if isinstance(payload, secure_agg.Advertisement) and (unseated := _unseated(phase, event.entry)) is not None:
        drop(step, event.member, *unseated)
        return
    verdict = phase.protocol.receive(event.member, payload)
    if isinstance(verdict, secure_agg.Dropped) and isinstance(payload, secure_agg.Opening):
        # An opening that proves nothing is none.
        silent(step, event.member)
        return
    _take(step, phase, event.member, verdict)
    if isinstance(payload, secure_agg.Complaints | secure_agg.Opening) and verdict is not phase.protocol:
        after_complaint(step, phase)
        _drop_stranded(step)


def _unseated(phase: Aggregating, entry: int | None) -> tuple[Reason, str] | None:
    """Returns why the others would refuse a roster with the certificate of this entry; None if they would not.

    It is nobody's fault: a renewal may have fallen between the opening and the member's answer.
    """
    if phase.logged is None:
        return None
    if entry is None or entry > phase.logged:
        detail = f"its certificate is not among the {phase.logged} entries of this attempt's roster log, or was revoked"
        return Reason.REASON_LOG_CERTIFICATE_UNKNOWN, detail
    if phase.witnessed is not None and entry > phase.witnessed:
        detail = f"its certificate is entry {entry} of the roster log, and the witnesses have signed {phase.witnessed}"
        return Reason.REASON_POLICY_WITNESSES, f"{detail}; it takes part again once they have signed that one"
    return None


def _tell_stale(step: Step, member: str, attempt: AttemptId) -> None:
    phase = step.state.phase
    if isinstance(phase, Publishing) and attempt == phase.attempt:
        return  # A repeat that came after enough answers: the member hears the outcome once the version is out.
    ended = AttemptEnded(False, Reason.REASON_ATTEMPT_STALE)
    step.do(fx.Send(member, AttemptMessage(attempt, ended)))


def uploaded(step: Step, event: ev.Uploaded) -> None:
    """Accepts or rejects a masked vector that has arrived."""
    phase = step.state.phase
    if (
        not isinstance(phase, Aggregating)
        or event.attempt != phase.attempt
        or not isinstance(phase.protocol, protocol.CollectingMasked)
    ):
        step.do(fx.RejectVector(event.attempt, event.member, Reason.REASON_UPLOAD_CLOSED, ""))
        return
    verdict = phase.protocol.receive(event.member, event.input, event.digest)
    if isinstance(verdict, secure_agg.Dropped):
        reason = of_protocol(verdict.reason)
        step.do(fx.RejectVector(event.attempt, event.member, reason, verdict.detail))
    elif verdict is not phase.protocol:
        step.do(fx.AddVector(event.attempt, event.member))
    _take(step, phase, event.member, verdict)
    # A complaint of a member that masked all the same waits for nothing.
    decide(step)


def _take(step: Step, phase: Aggregating, member: str, verdict: Collecting | secure_agg.Dropped) -> None:
    if isinstance(verdict, secure_agg.Dropped):
        # A member that may not speak (any longer) changes nothing; one that misbehaves is dropped.
        if member in phase.protocol.waiting or member in phase.protocol.answers:
            drop(step, member, of_protocol(verdict.reason), verdict.detail, fault=True)
        return
    if verdict is phase.protocol:
        return  # A repeat.
    step.state = replace(step.state, phase=replace(phase, protocol=verdict))
    if _may_be_settled(verdict):
        advance_if_settled(step)
    elif verdict.context.graph is not secure_agg.Graph.COMPLETE:
        # Checks again a second after the last answer, even if the remaining members stay silent.
        step.do(fx.SetTimer(look_timer(phase), _LOOK_SECONDS))


def _may_be_settled(collecting: Collecting) -> bool:
    """Whether one more answer may have ended the phase.

    A full check visits every member, so one after each answer would take quadratic time in a large cohort. Only a loss
    can leave too few members, and each loss is checked when it happens. On a sparse graph, where an answer can show it
    too, and in groups, a full check also follows once no answer has come for a second.
    """
    answers, expected = len(collecting.answers), len(collecting.expected)
    if answers + len(collecting.lost) >= expected:
        return True
    if not isinstance(collecting, protocol.CollectingUnmaskings):
        return False
    context = collecting.context
    if context.sparse is not None:
        # Every member needs shares from t of its k neighbours, so at least t/k of all members must have answered.
        possible = answers * context.sparse.degree >= context.threshold * expected
    elif context.grouped is not None:
        possible = answers >= context.threshold * context.grouped.least
    else:
        return True
    return possible and (answers % (expected // _MAX_CHECKS_PER_PHASE + 1) == 0 or expected - answers <= _LAST)


def drop(step: Step, member: str, reason: Reason, detail: str = "", *, fault: bool = False) -> None:
    """Drops a member from the attempt, which goes on while its thresholds hold.

    Args:
        fault: the member misbehaved, so it is also barred.
    """
    if _lose(step, member, reason, detail, fault=fault):
        _settle(step)


def deadline_passed(step: Step, arrived: Mapping[str, int]) -> None:
    """Ends the phase at its deadline. Members whose masked vectors still move get more time, and only they.

    At the first look, a vector moves if anything of it has arrived: nobody knows when the member could begin. Later it
    moves if at least `size / longest_mask` bytes a second have arrived since the last look. The next look comes after
    `deadlines.mask` seconds. So a member that stops costs the others that much and no more, and a slow one at most
    `longest_mask` altogether.

    Args:
        arrived: bytes of each member's masked vector that have arrived.
    """
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    deadlines = step.state.parameters.job.rounds.deadlines
    awaited = phase.awaited_seconds + deadlines.mask
    more = min(deadlines.mask, deadlines.longest_mask - awaited)
    moving = _moving(phase, arrived, deadlines.mask / deadlines.longest_mask if phase.awaited_seconds else 0.0)
    if more <= 0 or not moving:
        close_phase(step, deadline=True)
        return
    step.state = replace(step.state, phase=replace(phase, awaited_seconds=awaited, arrived=dict(arrived)))
    step.do(fx.SetTimer(deadline_timer(phase), more))
    step.do(counts.UploadsAwaited(members=len(moving), seconds=more, attempt=phase.attempt))
    # All of them first: the attempt may end with the first one that it cannot do without.
    for member in sorted(phase.protocol.waiting - moving):
        _lose(step, member, Reason.REASON_PHASE_DEADLINE)
    _settle(step)


def _moving(phase: Aggregating, arrived: Mapping[str, int], share: float) -> frozenset[str]:
    """The members of whose vectors at least this share has arrived since the last look, and not nothing.

    Bytes arrive in messages, so one message less may have been counted than has arrived.
    """
    if not isinstance(phase.protocol, protocol.CollectingMasked):
        return frozenset()
    context = phase.protocol.context
    least = max(1.0, share * secure_agg.packed_size(context.values, context.bits) - UPLOAD_MESSAGE)
    return frozenset(
        member for member in phase.protocol.waiting if arrived.get(member, 0) - phase.arrived.get(member, 0) >= least
    )


def _settle(step: Step) -> None:
    """Does what follows from a loss."""
    _drop_stranded(step)
    decide(step)
    advance_if_settled(step)


def _lose(step: Step, member: str, reason: Reason, detail: str = "", *, fault: bool = False) -> bool:
    """Drops a member without what follows from it. Returns whether the phase expected it."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating) or member in {dropout.member for dropout in phase.dropouts}:
        return False
    collecting = phase.protocol.drop(member, _protocol_reason(reason), detail)
    if collecting is phase.protocol:
        return False  # It was lost before, or never took part.
    note_dropout(step, replace(phase, protocol=collecting), Dropout(member, collecting.phase.value, reason, detail))
    tell_dropped(step, phase.attempt, member, reason, detail)
    if fault:
        bar(step, member, reason)
    elif reason in SILENT:
        note_silence(step, member, collecting.phase.value)
    return True


def silent(step: Step, dealer: str) -> None:
    """Goes on without a dealer that owes an answer to a complaint and does not give it; there is no proof against it.

    A vector that it has sent stays in the sum. Then only the receivers that wait for its answer are lost.
    """
    phase = step.state.phase
    if not isinstance(phase, Aggregating) or not owed_by(phase, dealer):
        return
    step.state = replace(step.state, phase=replace(phase, silent=phase.silent | {dealer}))
    if dealer in phase.protocol.waiting:
        drop(step, dealer, Reason.REASON_DEALER_SILENT)
    else:
        _drop_stranded(step)
        advance_if_settled(step)


def _drop_stranded(step: Step) -> None:
    """Drops the members whose complaint nobody will answer, because the dealer is silent or gone.

    The dealer is left out of the round, also if it left before the complaint came: it could deal garbage and leave in
    each attempt. A liar can do this to an honest member, but only to one that is gone or does not answer.
    """
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    for complaint in unanswered(phase):
        dealer = complaint.dealer
        if dealer not in phase.protocol.lost and dealer not in phase.silent:
            continue
        why = next((lost.reason for lost in phase.dropouts if lost.member == dealer), Reason.REASON_DEALER_SILENT)
        # One that was itself stranded did nothing.
        if why != Reason.REASON_COMPLAINT_UNANSWERED and step.state.members[dealer].barred_until <= step.state.round:
            leave_out_of_round(step, dealer)
            if why not in SILENT:
                note_silence(step, dealer, phase.protocol.phase.value)
        detail = f"{dealer} left the attempt" if dealer in phase.protocol.lost else f"{dealer} does not answer"
        drop(step, complaint.complainant, Reason.REASON_COMPLAINT_UNANSWERED, detail)


def _protocol_reason(reason: Reason) -> secure_agg.Reason:
    name = word(reason).upper()
    known = secure_agg.Reason.__members__
    return known.get(name, secure_agg.Reason.MEMBER_REFUSED)
