"""Complaints about dealers: passed on, answered, and what a guilty dealer costs.

A complaint goes to its dealer at once, and what the dealer opens goes to the receiver, which then masks. A dealer that
is convicted by what it opened, or about which more receivers complain than can be corrupt, is barred, and the attempt
ends at once. A dealer that is silent, or gone, costs the attempt only itself and the receivers that waited for it.
"""

from dataclasses import replace

import secure_agg
from coordinator.domain.jobs import Dropout
from coordinator.rounds import counts, timers
from coordinator.rounds import effects as fx
from coordinator.rounds.course import after_abandoned, attempt_over
from coordinator.rounds.phases import note_dropout, tell_dropped
from coordinator.rounds.standing import bar
from coordinator.rounds.state import Aggregating
from coordinator.rounds.step import Step
from secure_agg import server as protocol
from tacit.messages import AttemptMessage
from tacit.reason import Reason
from tacit.wire import evidence_to_bytes

__all__ = ["after_complaint", "decide", "owed_by", "unanswered"]

# A dealer has this long to open a secret, or a quarter of the mask phase if that is less: it checks one signature and
# sends one short message.
_ANSWER_SECONDS = 10.0


def unanswered(phase: Aggregating) -> tuple[secure_agg.Complaint, ...]:
    """The complaints that wait for an answer."""
    collecting = phase.protocol
    return collecting.unanswered if isinstance(collecting, protocol.CollectingMasked) else ()


def owed_by(phase: Aggregating, dealer: str) -> tuple[secure_agg.Complaint, ...]:
    """The complaints that a dealer has yet to answer."""
    return tuple(each for each in unanswered(phase) if each.dealer == dealer)


def after_complaint(step: Step, before: Aggregating) -> None:
    """Passes on what is new: complaints to dealers, complete sets of openings to receivers."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating):
        return
    now, past = phase.protocol, before.protocol
    if not isinstance(now, protocol.CollectingMasked) or not isinstance(past, protocol.CollectingMasked):
        return
    known, guilty = set(past.unanswered), now.outnumbered | phase.silent
    seconds = min(_ANSWER_SECONDS, step.state.parameters.job.rounds.deadlines.mask / 4)
    for complaint in now.unanswered:
        if complaint in known:
            continue
        step.do(
            counts.Complained(
                member=complaint.complainant, dealer=complaint.dealer, part=complaint.part.value, attempt=phase.attempt
            )
        )
        if complaint.dealer not in guilty | now.lost.keys():
            timer = timers.Answer(phase.attempt.attempt, complaint.dealer, complaint.complainant)
            step.do(fx.Send(complaint.dealer, AttemptMessage(phase.attempt, complaint)), fx.SetTimer(timer, seconds))
    for member in now.complaints:
        openings = now.openings_for(member)
        if openings is not None and past.openings_for(member) is None:
            step.do(fx.Send(member, AttemptMessage(phase.attempt, openings)))
            step.do(counts.ComplaintsAnswered(member=member, openings=len(openings.openings), attempt=phase.attempt))
            phase = replace(phase, outbox={**phase.outbox, member: openings})
    step.state = replace(step.state, phase=phase)
    decide(step)


def decide(step: Step) -> None:
    """Ends the attempt if a dealer is convicted, or outnumbered. What one quarrel shows does not wait for another: the
    phase could close before it, and the evidence be lost.
    """
    phase = step.state.phase
    if not isinstance(phase, Aggregating) or not isinstance(phase.protocol, protocol.CollectingMasked):
        return
    collecting = phase.protocol
    guilty = _guilty(collecting)
    if not guilty:
        return
    for dropout in guilty.values():
        dealer, reason = dropout.member, dropout.reason
        present = step.state.phase
        if isinstance(present, Aggregating) and dealer not in {lost.member for lost in present.dropouts}:
            note_dropout(step, present, dropout)
            tell_dropped(step, phase.attempt, dealer, reason, dropout.detail)
        bar(step, dealer, reason)
    worst = min(guilty.values(), key=lambda each: _WORST.index(each.reason))
    attempt_over(step, worst.reason, f"{collecting.phase.value}: {', '.join(sorted(guilty))}")
    after_abandoned(step)


_WORST = (Reason.REASON_DEALER_CONVICTED, Reason.REASON_COMPLAINTS_TOO_MANY)


def _guilty(collecting: protocol.CollectingMasked) -> dict[str, Dropout]:
    """The guilty dealers, each under the gravest finding."""
    name, guilty = collecting.phase.value, {}
    for dealer in collecting.outnumbered:
        most = collecting.context.max_complainants
        detail = f"more than {most} receivers complained, and at most {most} can be corrupt"
        guilty[dealer] = Dropout(dealer, name, Reason.REASON_COMPLAINTS_TOO_MANY, detail)
    for evidence in collecting.evidence:
        opening = evidence.opening
        detail = f"the {opening.part.value} that it opened for {opening.complainant} contradict what it signed"
        guilty[opening.dealer] = Dropout(
            opening.dealer, name, Reason.REASON_DEALER_CONVICTED, detail, evidence_to_bytes(evidence)
        )
    return guilty
