"""From an opened sum to the next version: pure arithmetic on vectors.

The members sent w * (new - base) / W, w, and their metrics (`tacit.job.layout_of`); what comes out is their mean
weighted by number of examples (McMahan et al. 2017, FedAvg), stepped onto the base by the server optimiser. Under a
privacy mechanism they sent the change alone, and the mean is over members. It goes
block by block, and the next version takes the sum's place in memory: besides the base there is no second vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.effects import Training
from secure_agg import Layout
from tacit.job import JobDocument, layout_of

__all__ = ["ResultInvalid", "Step", "next_version"]

_BLOCK = 64 * 1024


class ResultInvalid(ValueError):
    """The opened sum cannot be a sum of valid inputs."""


@dataclass(frozen=True)
class Step:
    """The next version's values, float32 (d,), and the round's training metrics."""

    values: NDArray[np.float32]
    training: Training | None


def next_version(
    job: JobDocument, cohort: int, survivors: int, total: NDArray[np.uint32], base: NDArray[np.float32]
) -> Step:
    """Decodes a sum over `survivors` members of an attempt whose context fixed `cohort`.

    total: uint32 (d + 4,), under a mechanism (d,), contiguous and writable. It is overwritten: the returned values are
    a view of it.

    Raises:
        ResultInvalid: a weight or metric outside what that many members can have sent, a value beyond the bound. What
            is left of `total` is of no use then.
    """
    layout = layout_of(job, cohort)
    update, *rest = layout.segments
    share, training = 1 / survivors, None
    if rest:
        share, training = _numbers(job, survivors, Layout(tuple(rest), layout.bits).decode(total[update.length :]))
    # Each input was rounded to the grid: a step of it a member beyond the bound is still honest.
    bound = survivors * (update.bound + 1 / update.scale)
    step = job.server.learning_rate * share
    values = total.view("<f4")[: update.length]
    for start in range(0, update.length, _BLOCK):
        here = slice(start, min(start + _BLOCK, update.length))
        block = Layout((replace(update, length=here.stop - start),), layout.bits).decode(total[here])["update"]
        if np.abs(block).max() > bound:
            raise ResultInvalid(f"a coordinate of the sum lies beyond {bound:g}")
        values[here] = base[here] + step * block
        if not np.isfinite(values[here]).all():
            raise ResultInvalid("the next version would hold a value that is not finite")
    return Step(values, training)


def _numbers(
    job: JobDocument, survivors: int, sums: Mapping[str, NDArray[np.float64]]
) -> tuple[float, Training | None]:
    """What the summed change is multiplied by to be a mean, and the training metrics. Raises: ResultInvalid."""
    largest = float(job.aggregation.max_weight)
    weight = float(sums["weight"][0])
    if not 1 <= weight <= survivors * largest:
        raise ResultInvalid(f"the weights sum to {weight:g}; {survivors} members can send 1 to {survivors * largest:g}")
    count, correct = float(sums["count"][0]), float(sums["correct"][0])
    if not 0 <= correct <= count <= survivors * largest:
        raise ResultInvalid(f"{correct:g} correct of {count:g} examples cannot be")
    training = Training(count, float(sums["loss_sum"][0]) / count, correct / count) if count else None
    return largest / weight, training
