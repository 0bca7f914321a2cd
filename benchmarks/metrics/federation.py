"""Members with validation data, whose noised metrics are summed in the ring, and a model for them to measure.

The split, the vector, its noise, the ring and the estimate are the product's code. Secure aggregation is left out: it
returns the sum exactly. The model is softmax regression on a mixture of Gaussians, with noise on each member's update.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.domain.validation import Estimate, estimate
from learning.accounting.calibration import calibrate
from learning.accounting.events import DiscreteGaussian
from learning.accounting.filter import Limit
from learning.validation.contribution import metrics_of, noised
from learning.validation.split import Split
from simulation.virtual_members import SeededRandom
from tacit.validation import METRICS, MetricNoise

__all__ = ["LOSS_BOUND", "MEASURED", "Member", "Truth", "measure", "members_of", "noise_for"]

# Versions that a job measures, all of which its epsilon pays for.
MEASURED = 20
DELTA = 1e-6
SHARE, ROWS, MAX_UNITS = 0.2, 5000, 4000
LOSS_BOUND = 4.0


@dataclass(frozen=True)
class Member:
    """One member: which of its rows it trains on and which it measures. measures: whether its policy agrees."""

    name: str
    trains: NDArray[np.int64]
    measured: NDArray[np.int64]
    measures: bool


@dataclass(frozen=True)
class Truth:
    """What an estimate is about: means over the rows that were measured."""

    loss: float
    accuracy: float


def noise_for(epsilon: float) -> MetricNoise:
    """The noise with which `MEASURED` measurements cost this epsilon, if the ledger holds nothing else."""
    limit = Limit(epsilon, DELTA)
    multiplier = calibrate(lambda each: DiscreteGaussian(multiplier=each), MEASURED, limit)
    return MetricNoise(multiplier, MAX_UNITS)


def members_of(count: int, seed: int) -> list[Member]:
    """Members with `ROWS` rows each. From ten members on, the policy of each tenth allows no metrics."""
    made = []
    for number in range(count):
        name = f"{seed}/{number}"
        split = Split(hashlib.sha256(name.encode()).digest(), SHARE)
        units = [f"{name}/{row}".encode() for row in range(ROWS)]
        kept = split.kept_back(units)
        measured = np.flatnonzero(split.measured(units, MAX_UNITS))
        made.append(Member(name, np.flatnonzero(~kept), measured, number % 10 != 9))
    return made


def measure(
    members: list[Member],
    losses: list[NDArray[np.float64]],
    correct: list[NDArray[np.bool_]],
    noise: MetricNoise,
    seed: str,
) -> tuple[Estimate | None, Truth]:
    """Measures one version.

    Args:
        members: The cohort.
        losses, correct: For each member, of all its rows.
        noise: The noise of each member.
        seed: Of all randomness.
    """
    mask = np.uint64(2 ** noise.bits_needed(len(members)) - 1)
    total = np.zeros(METRICS, dtype=np.uint64)
    seen_losses, seen_correct = [], []
    for member, loss, right in zip(members, losses, correct, strict=True):
        rows = member.measured
        random = SeededRandom(f"{seed}/{member.name}")
        metrics = metrics_of(loss[rows], right[rows], rows.tolist(), LOSS_BOUND, random) if member.measures else None
        total = (total + noised(metrics, noise, random).astype(np.uint64)) & mask
        if member.measures:
            seen_losses.append(np.clip(loss[rows], 0, LOSS_BOUND))
            seen_correct.append(right[rows])
    half = 2 ** (noise.bits_needed(len(members)) - 1)
    lifted = [each - 2 * half if each >= half else each for each in total.tolist()]
    truth = Truth(float(np.concatenate(seen_losses).mean()), float(np.concatenate(seen_correct).mean()))
    return estimate(lifted, len(members), noise, LOSS_BOUND), truth
