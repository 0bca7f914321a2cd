"""A member's vector of noised metrics: one bounded contribution of each unit, summed, with the member's own noise.

Guarantees: a unit adds whole numbers within the bounds of `tacit.validation`, whatever its losses are (a loss that is
not a number counts as the largest). The noise is drawn from the cryptographic source passed in, and from nothing else.
Values beyond the ring's room are cut after the noise was added, which costs no privacy.

Claim. Sending the vector is a `discrete-gaussian` event, however often the same vector is sent. Assumptions: a row's
loss and answer depend on the version and on that row alone, and the version is a function of earlier releases. So no
parameters that the member trained on its own rows and keeps may be part of the model. docs/validation.md has the proof.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from secure_agg import RandomSource
from secure_agg.discrete_gaussian import DiscreteGaussian
from tacit.validation import HALF, METRICS, MetricNoise

__all__ = ["by_label", "metrics_of", "noised"]

Steps = NDArray[np.int64]


def metrics_of(
    losses: NDArray[np.float64],
    correct: NDArray[np.bool_],
    units: Sequence[Hashable],
    loss_bound: float,
    random: RandomSource,
) -> Steps:
    """Sums one contribution of each unit. It has no noise yet and must not leave the member.

    Args:
        losses: (U,) The loss of each row of validation data.
        correct: (U,) Whether the model's answer is right.
        units: The unit of each row.
        loss_bound: A row's loss is clipped to this, in nats.
        random: Source of the rounding's randomness.

    Returns:
        (3,) whole numbers, in steps.

    Raises:
        ValueError: The arrays do not fit each other, or the bound is not positive.
    """
    if not losses.shape == correct.shape == (len(units),):
        raise ValueError(f"{len(units)} units, losses {losses.shape} and answers {correct.shape} are not the same rows")
    if not loss_bound > 0:
        raise ValueError(f"the bound on a loss must be positive, got {loss_bound!r}")
    places: dict[Hashable, int] = {}
    for unit in units:
        places.setdefault(unit, len(places))
    at = np.fromiter((places[unit] for unit in units), dtype=np.int64, count=len(units))
    rows = np.bincount(at, minlength=len(places))
    clipped = np.clip(np.nan_to_num(losses, nan=loss_bound, posinf=loss_bound), 0.0, loss_bound) / loss_bound
    sums = [np.bincount(at, weights=each, minlength=len(places)) for each in (clipped, correct.astype(np.float64))]
    loss, right = (_rounded(np.minimum(each / rows, 1.0), random) for each in sums)
    return np.array([(loss - HALF).sum(), (right - HALF).sum(), HALF * len(places)], dtype=np.int64)


def by_label(
    losses: NDArray[np.float64],
    correct: NDArray[np.bool_],
    labels: NDArray[np.int64],
    count: int,
    units: Sequence[Hashable],
    loss_bound: float,
    random: RandomSource,
) -> Steps:
    """Sums the rows of each label apart. A unit whose rows have several labels is one unit of each.

    So a row is in the sums of its own label alone. A unit of several labels is in several: only where the ledger
    protects single rows does one unit move three sums.

    Args:
        losses: As in `metrics_of`.
        correct: As in `metrics_of`.
        labels: (U,) The label of each row, below `count`.
        count: The number of labels.
        units: As in `metrics_of`.
        loss_bound: As in `metrics_of`.
        random: As in `metrics_of`.

    Returns:
        (3 count,) whole numbers, in steps, label after label.

    Raises:
        ValueError: As in `metrics_of`.
    """
    places = [np.flatnonzero(labels == label) for label in range(count)]
    return np.concatenate(
        [metrics_of(losses[at], correct[at], [units[row] for row in at.tolist()], loss_bound, random) for at in places]
    )


def noised(metrics: Steps | None, noise: MetricNoise, random: RandomSource) -> Steps:
    """Adds this member's noise. Call it once for a version: every attempt sends the same vector.

    Args:
        metrics: (3,), from `metrics_of`; None if this member measures nothing. Its vector is then noise alone, and
            looks like any other.
        noise: The numbers of the noise.
        random: Source of the noise.

    Returns:
        (3,) whole numbers of a magnitude of at most `noise.largest`.
    """
    sent = DiscreteGaussian(noise.std).sample(METRICS, random).astype(np.int64)
    if metrics is not None:
        sent += metrics
    return np.clip(sent, -noise.largest, noise.largest)


def _rounded(shares: NDArray[np.float64], random: RandomSource) -> Steps:
    """Rounds shares of 2 HALF up or down to whole steps, at random and without bias."""
    steps = 2 * HALF * shares
    floor = np.floor(steps)
    words = np.frombuffer(random.bytes(8 * len(shares)), dtype="<u8") >> np.uint64(11)
    up = words.astype(np.float64) * 2.0**-53 < steps - floor
    rounded: Steps = floor.astype(np.int64) + up
    return rounded
