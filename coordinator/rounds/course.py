"""The course of a job: rounds begin and end, attempts are abandoned, the job halts."""

from dataclasses import replace

from coordinator.domain.jobs import EndAttempt, JobStatus
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds.standing import REPEATED, asked_again, too_few_are_left
from coordinator.rounds.state import Aggregating, Halted, Publishing, TrainingWindow
from coordinator.rounds.step import Step, deadline_timer, window_timer
from tacit.messages import Assignment, AttemptEnded, AttemptMessage, JobEnded
from tacit.reason import Reason, sentence, word

__all__ = ["after_abandoned", "assign", "attempt_over", "begin_training", "halt", "round_over"]

# Details of these are for the operator only. An internal failure may tell where the store lies and what to do there. An
# invalid sum shows numbers, and a member that caused it could subtract its own to get the others'.
_OPERATORS = frozenset({Reason.REASON_INTERNAL, Reason.REASON_RESULT_INVALID})


def begin_training(step: Step) -> None:
    """Opens the next round, or continues the open one."""
    state = step.state
    members = {name: replace(view, ready=False) for name, view in state.members.items()}
    if not state.round_open:
        members = {name: asked_again(view) for name, view in members.items()}
        state = replace(state, round=state.round + 1, round_open=True, attempts_in_round=0)
        step.do(fx.Persist((fx.OpenRound(state.round),)))
        step.do(counts.RoundOpened(round=state.round))
    state = replace(state, members=members)
    step.state = replace(state, phase=TrainingWindow(step.now_ms, asked=frozenset(state.available)))
    step.do(fx.SetTimer(window_timer(step.state), state.parameters.job.rounds.deadlines.training))
    for member in step.state.available:
        assign(step, member)


def assign(step: Step, member: str) -> None:
    """Tells a member what to train, and how much of the window is left."""
    state = step.state
    deadline = state.parameters.job.rounds.deadlines.training
    opened = state.phase.opened_ms if isinstance(state.phase, TrainingWindow) else step.now_ms
    # The clock may have been set meanwhile: at most the whole window, at least one millisecond.
    left = min(max(1, int(opened + 1000 * deadline - step.now_ms)), int(1000 * deadline))
    step.do(
        fx.Send(
            member,
            Assignment(
                job=state.name,
                round=state.round,
                job_document=state.parameters.document,
                version=state.version,
                version_number=state.version_number,
                window_ms=left,
            ),
        )
    )


def after_abandoned(step: Step) -> None:
    """Starts the round's next attempt if it has one left; otherwise ends the round and opens the next one."""
    state = step.state
    rounds = state.parameters.job.rounds
    if state.attempts_in_round < rounds.max_attempts:
        begin_training(step)
        return
    round_over(step, Reason.REASON_ATTEMPTS_EXHAUSTED)


def round_over(step: Step, reason: Reason) -> None:
    """Abandons the round, and opens the next one unless too many in a row were abandoned."""
    state = step.state
    rounds = state.parameters.job.rounds
    step.do(fx.CancelTimer(window_timer(state)), fx.Persist((fx.EndRound(state.round, False, reason),)))
    step.do(counts.RoundAbandoned(reason=word(reason)))
    step.state = replace(state, round_open=False, failed_rounds=state.failed_rounds + 1)
    if step.state.failed_rounds >= rounds.max_failed_rounds:
        declined = reason == Reason.REASON_TOO_FEW_READY and too_few_are_left(step.state, REPEATED)
        halt(step, JobStatus.PAUSED, Reason.REASON_MEMBERS_DECLINED if declined else Reason.REASON_ROUNDS_FAILING)
    else:
        begin_training(step)


def attempt_over(step: Step, reason: Reason, detail: str = "") -> None:
    """Abandons the attempt under way. The caller decides what happens to the round."""
    phase = step.state.phase
    if not isinstance(phase, Aggregating | Publishing):
        return
    if isinstance(phase, Aggregating):
        step.do(fx.CancelTimer(deadline_timer(phase)))
    step.do(
        fx.CloseUploads(phase.attempt, keep_sum=False),
        fx.Persist(
            (
                EndAttempt(
                    attempt=phase.attempt,
                    published=False,
                    reason=reason,
                    detail=detail,
                    survivors=phase.survivors,
                    dropouts=phase.dropouts,
                ),
            )
        ),
    )
    step.do(counts.AttemptAbandoned(reason=word(reason), detail=detail, attempt=phase.attempt))
    gone = {dropout.member for dropout in phase.dropouts}
    told = "" if reason in _OPERATORS else detail
    ended = AttemptEnded(False, reason, told or sentence(reason))
    for member in phase.cohort:
        if member not in gone:
            step.do(fx.Send(member, AttemptMessage(phase.attempt, ended)))
    step.state = replace(step.state, phase=Halted())


def halt(step: Step, status: JobStatus, reason: Reason) -> None:
    """Ends what is under way and sets a status in which the job does nothing."""
    if isinstance(step.state.phase, Aggregating):
        attempt_over(step, reason)
    records: list[fx.Record] = []
    if status is JobStatus.ABORTED and step.state.round_open:
        records.append(fx.EndRound(step.state.round, False, reason))
        step.state = replace(step.state, round_open=False)
        step.do(counts.RoundAbandoned(reason=word(reason)))
    records.append(fx.SetStatus(status, reason))
    step.do(fx.Persist(tuple(records)), fx.CancelTimer(window_timer(step.state)))
    step.do(counts.StatusChanged(status=status, reason=word(reason)))
    phase = step.state.phase if isinstance(step.state.phase, Publishing) else Halted()
    step.state = replace(step.state, status=status, reason=reason, phase=phase)
    _tell_job_ended(step, reason)


def _tell_job_ended(step: Step, reason: Reason) -> None:
    # Members that sit the job out wait for its end as much as the others.
    for member, view in step.state.members.items():
        if view.connected:
            step.do(fx.Send(member, JobEnded(step.state.name, reason, step.state.version)))
