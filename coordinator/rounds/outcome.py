"""What comes of an opened sum: a version, or a failure."""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.domain.explosion import WINDOW, Size, explosion
from coordinator.domain.jobs import EndAttempt, JobStatus
from coordinator.domain.validation import Measured, Validation
from coordinator.rounds import counts
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.course import after_abandoned, attempt_over, begin_training, halt
from coordinator.rounds.measuring import best_version, stops_early
from coordinator.rounds.state import Halted, Publishing
from coordinator.rounds.step import Step, seconds_since
from tacit.messages import AttemptEnded, AttemptMessage
from tacit.reason import Reason

__all__ = ["compute_failed", "computed"]


def computed(step: Step, event: ev.Computed) -> None:
    """Publishes the new version, then opens the next round or finishes the job."""
    state, phase = step.state, step.state.phase
    if not isinstance(phase, Publishing) or event.attempt != phase.attempt:
        return
    number = state.version_number + 1
    finished = number >= state.parameters.job.rounds.count
    optimiser = state.parameters.job.server.optimiser
    norms = event.norms
    # The sums of answers are no weights, and are as large as the answers.
    asks = state.parameters.job.question is not None
    exploded = None if asks else explosion(number, Size.of(state.parameters.job), state.norms, norms)
    records: list[fx.Record] = [
        EndAttempt(
            attempt=phase.attempt,
            published=True,
            reason=Reason.REASON_UNSPECIFIED,
            detail="",
            survivors=phase.survivors,
            dropouts=phase.dropouts,
            result=event.result,
            version=event.version,
            training=event.training,
        ),
        fx.PublishVersion(
            number, event.version, state.round, norms, exploded, optimiser, event.server_state, event.validation
        ),
        fx.EndRound(state.round, True, Reason.REASON_UNSPECIFIED),
    ]
    # All of it is written before it is announced, or nothing.
    step.do(fx.Persist(tuple(records)), fx.CloseUploads(phase.attempt, keep_sum=False))
    step.do(counts.PhaseEnded(phase="publish", seconds=seconds_since(step, phase.phase_ms), attempt=phase.attempt))
    step.do(counts.AttemptPublished(attempt=phase.attempt))
    step.do(counts.RoundPublished(survivors=len(phase.survivors), version=number))
    step.do(
        counts.VersionPublished(
            number=number,
            digest=event.version.hex(),
            optimiser=optimiser,
            norm=norms.version,
            change=norms.change,
        )
    )
    if exploded is not None:
        step.do(
            counts.VersionExploded(number=number, measure=exploded.measure, times=exploded.times, than=exploded.than)
        )
    if event.groups is not None:
        step.do(counts.GroupsCombined(groups=event.groups))
    if event.training is not None:
        step.do(counts.TrainingMeasured(loss=event.training.loss, accuracy=event.training.accuracy))
    accuracies = _measured(step, event.validation)
    if event.metrics_invalid:
        step.do(counts.MetricsInvalid(number=number))
    # A published sum that contains a member clears its missed deadlines, unless it owed a receiver an answer.
    members = {
        name: replace(view, missed_deadlines=0, away_until=0)
        if view.missed_deadlines and name in phase.survivors and name not in phase.silent
        else view
        for name, view in state.members.items()
    }
    step.state = replace(
        state,
        members=members,
        version=event.version,
        version_number=number,
        server_state=event.server_state,
        norms=(*state.norms, norms)[-WINDOW:],
        exploded=state.exploded or exploded,
        accuracies=accuracies,
        confirmed_sums=(),
        round_open=False,
        failed_rounds=0,
        phase=Halted(),
    )
    ended = AttemptEnded(True, Reason.REASON_UNSPECIFIED, "", event.result, event.version)
    for member in phase.survivors:
        step.do(fx.Send(member, AttemptMessage(phase.attempt, ended)))
    if finished:
        halt(step, JobStatus.FINISHED, Reason.REASON_JOB_FINISHED)
    elif stops_early(step.state):
        halt(step, JobStatus.FINISHED, Reason.REASON_NO_IMPROVEMENT)
    elif state.status is JobStatus.RUNNING:
        begin_training(step)


def compute_failed(step: Step, event: ev.ComputeFailed) -> None:
    """Abandons the attempt; pauses the job if every further attempt would fail too."""
    phase = step.state.phase
    if not isinstance(phase, Publishing) or event.attempt != phase.attempt:
        return
    attempt_over(step, event.reason, event.detail)
    if step.state.status is not JobStatus.RUNNING:
        return
    if event.lasting:
        # Members would train, and pay, for attempts that cannot succeed.
        halt(step, JobStatus.PAUSED, event.reason)
    else:
        after_abandoned(step)


def _measured(step: Step, validation: Validation | None) -> Mapping[int, Measured | None]:
    """The accuracy of each measured version, with that of the version that the members were given in this round."""
    before, number = step.state.accuracies, step.state.version_number
    if validation is None:
        return before
    step.do(counts.VersionMeasured(number=number, validation=validation))
    accuracies = {**before, number: None if validation.estimate is None else validation.estimate.accuracy}
    best = best_version(accuracies)
    if best is not None and best != best_version(before):
        step.do(counts.BestChanged(number=best[0], accuracy=best[1].value, accuracy_error=best[1].error))
    return accuracies
