"""What noised metrics say of the version that a round started from, and whether the job goes on. Pure.

The last segment of each sum holds the metrics of its members (`tacit.vector`). In groups the sums are added up: each
member's own noise is all that its vector needs, and one estimate of all members has the smaller error.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.domain.validation import Measured, StoppingRule, Validation, best_of, estimate, judge
from coordinator.rounds.publish import GroupSum
from coordinator.rounds.state import JobState
from secure_agg import Layout
from tacit.job import JobDocument
from tacit.vector import layout_of

__all__ = ["best_version", "measure", "stops_early"]


def measure(job: JobDocument, round: int, cohort: int, sums: Sequence[GroupSum]) -> tuple[Validation | None, bool]:
    """Reads the metrics of a round.

    A group whose metrics no valid vectors make is left out. It refuses no sum: otherwise one member could stop a job
    with numbers that move no version.

    Args:
        job: The job's document.
        round: The round's number.
        cohort: The cohort size that the attempt's context fixed.
        sums: The opened sums, one for each group, before the version is made of them.

    Returns:
        What was measured, None if the round measures nothing; and whether a group was left out.
    """
    if job.metrics is None or not job.metrics.measured(round):
        return None, False
    noise, layout = job.metrics.noise, layout_of(job, cohort)
    metrics = Layout(layout.segments[-1:], layout.bits)
    members, total, left_out = 0, np.zeros(metrics.values), False
    for group in sums:
        steps = metrics.decode(group.total[job.values :])[metrics.segments[0].name]
        if np.abs(steps).max() > group.members * noise.largest:
            left_out = True
        else:
            members, total = members + group.members, total + steps
    if not members:
        return Validation(sum(group.members for group in sums), None), True
    found = estimate([int(each) for each in total], members, noise, job.metrics.loss_bound)
    return Validation(members, found), left_out


def stops_early(state: JobState) -> bool:
    """Whether the job stops because its versions no longer improve; see `coordinator.domain.validation.judge`."""
    metrics = state.parameters.job.metrics
    if metrics is None:
        return False
    rule = StoppingRule(metrics.patience, metrics.min_improvement)
    return judge(tuple(state.accuracies.values()), rule).stop


def best_version(accuracies: Mapping[int, Measured | None]) -> tuple[int, Measured] | None:
    """Returns the number of the best measured version and its estimated accuracy; None if nothing is shown of any."""
    at = best_of(tuple(accuracies.values()))
    if at is None:
        return None
    number = tuple(accuracies)[at]
    accuracy = accuracies[number]
    return None if accuracy is None else (number, accuracy)
