"""Estimates of loss and accuracy from a sum of noised metrics, and when a job stops by them. Pure.

Everything here is a function of opened sums, so it costs no member any privacy.

The sum is (S1, S2, S3) + noise of n members. With m units of validation data in it, S3 = HALF m, and the mean of a
metric over these units, between 0 and 1, is 1/2 + S / (2 HALF m). Dividing two noised sums has the error (delta method)

    sqrt(v + 4 r^2 v) / m,    v = (n s^2 + m / 4) / (2 HALF)^2,    r = mean - 1/2

in which m / 4 bounds the variance of the units' random rounding, and 4 v is the variance of the estimate of m. The
formula holds while m is many times its own error. So below `MIN_RATIO` errors nothing is shown. Nor is it below
`MIN_UNITS` units. Both look at the noised count alone.

The error is that of the noise: how far an estimate may be from the mean over the rows that were measured. Rows are a
sample of what the model will meet, and that error is not in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tacit.validation import HALF, MetricNoise

__all__ = [
    "MIN_RATIO",
    "MIN_UNITS",
    "Estimate",
    "Measured",
    "StoppingRule",
    "Validation",
    "Verdict",
    "best_of",
    "estimate",
    "judge",
]

MIN_RATIO = 5.0
MIN_UNITS = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A number and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a sum says about one version: mean loss in nats, accuracy from 0 to 1, and the number of units."""

    loss: Measured
    accuracy: Measured
    units: Measured


@dataclass(frozen=True, slots=True)
class Validation:
    """What members said, under noise, about the version that a round started from.

    Attributes:
        members: Members whose vectors were read, with those that measured nothing.
        estimate: None if nothing is shown.
    """

    members: int
    estimate: Estimate | None


def estimate(total: Sequence[int], members: int, noise: MetricNoise, loss_bound: float) -> Estimate | None:
    """Reads a sum.

    Args:
        total: The three sums, in steps.
        members: The number of members in the sum.
        noise: The noise of each member.
        loss_bound: The bound on a row's loss, in nats.

    Returns:
        The estimate; None if too few units are in the sum for an honest one.

    Raises:
        ValueError: No valid inputs of that many members make this sum.
    """
    if len(total) != 3 or members < 1 or any(abs(each) > members * noise.largest for each in total):
        raise ValueError(f"no valid metrics of {members} members make this sum")
    loss, correct, count = (each / (2 * HALF) for each in total)
    units = 2 * count
    variance = (members * noise.std**2 + max(units, 0.0) / 4) / (2 * HALF) ** 2
    error = 2 * math.sqrt(members) * noise.std / (2 * HALF)
    if units < max(MIN_UNITS, MIN_RATIO * error):
        return None

    def mean(summed: float) -> Measured:
        centred = summed / units
        spread = math.sqrt(variance * (1 + 4 * centred**2)) / units
        return Measured(min(max(0.5 + centred, 0.0), 1.0), spread)

    found = mean(loss)
    return Estimate(
        loss=Measured(loss_bound * found.value, loss_bound * found.error),
        accuracy=mean(correct),
        units=Measured(units, error),
    )


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When a job stops.

    Attributes:
        patience: Stale versions, without one that improves among them; 0: the job never stops early.
        min_improvement: Least improvement of accuracy that counts.
    """

    patience: int
    min_improvement: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What estimates say about a job.

    Attributes:
        best: Index of the best version among the estimates; see `best_of`.
        reference: Index of the last version that improved, with which later ones are compared; None if nothing was
            shown.
        stale: Versions since then that did not improve, without those that say nothing.
        stop: Whether the job stops.
    """

    best: int | None
    reference: int | None
    stale: int
    stop: bool


def best_of(accuracies: Sequence[Measured | None]) -> int | None:
    """Chooses the best version: the one whose accuracy less its error is highest, and the first of equals.

    Its estimate is the largest of several noisy ones, so it is too high on average.

    Args:
        accuracies: Estimates in the order of their versions; None where nothing is shown.

    Returns:
        Its index; None if nothing was shown.
    """
    # Less one error, so that a noisier estimate needs to be higher.
    lowest = {at: found.value - found.error for at, found in enumerate(accuracies) if found is not None}
    return max(lowest, key=lambda at: lowest[at], default=None)


def judge(accuracies: Sequence[Measured | None], rule: StoppingRule) -> Verdict:
    """Decides whether a job stops, from the accuracy of each measured version in order.

    A version is compared with the last one that improved. Let d be the difference and e its standard error. The version

        improves    if d is more than e and more than `min_improvement`
        is stale    if e is at most `min_improvement`, and d + e is less: such an improvement would have shown
        says nothing otherwise, and where no estimate is shown

    A version that is compared with is often a lucky one, so d is too low on average. With a large error that alone
    would look like a job that no longer improves. So a job whose errors stay above `min_improvement` runs all its
    rounds.

    Args:
        accuracies: Estimates in the order of their versions; None where nothing is shown.
        rule: When to stop.
    """
    best = best_of(accuracies)
    at_reference: int | None = None
    reference: Measured | None = None
    stale = 0
    for at, found in enumerate(accuracies):
        if found is None:
            continue
        if reference is None:
            at_reference, reference = at, found
            continue
        difference, error = found.value - reference.value, math.hypot(found.error, reference.error)
        if difference > max(error, rule.min_improvement):
            at_reference, reference, stale = at, found, 0
        elif error <= rule.min_improvement and difference + error < rule.min_improvement:
            stale += 1
            if stale == rule.patience:
                return Verdict(best, at_reference, stale, True)
    return Verdict(best, at_reference, stale, False)
