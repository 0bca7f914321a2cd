"""Decides how many synthetic texts each label gets: a histogram with its own noise, paid for by its own event.

    counts + Z, each Z a discrete Gaussian of parameter s (Canonne, Kamath, Steinke 2020; drawn by `secure_agg`)
    clipped at zero

One text more or less changes one count by one, so the histograms of such neighbours have L2 distance 1. One text in
place of another changes two counts: sqrt 2. Counts and noise are whole numbers, so the bound holds without any loss to
rounding, and it is the one that the ledger knows (`DiscreteGaussianSum` of one share). Clipping and allocating are
post-processing. The list of labels is the job's, and public: a label that nobody has gets noise like any other.

Beside the steps of the training it is another kind of event, so the gate counts all of them by Rényi divergences.
"""

import math

import numpy as np
from numpy.typing import NDArray

from learning.accounting.calibration import calibrate
from learning.accounting.events import Adjacency, DiscreteGaussianSum
from learning.accounting.filter import Limit
from secure_agg import DiscreteGaussian, RandomSource

__all__ = ["allocated", "histogram_event", "noised_histogram", "std_for"]

Counts = NDArray[np.int64]

# Leaves room for the largest draw in a sum of 32 bits.
_MAX_TEXTS = 2**30
_MIN_STD, _MAX_STD = 1 / 16, 65536.0


def noised_histogram(counts: Counts, std: float, random: RandomSource) -> Counts:
    """Adds a discrete Gaussian of parameter `std` to each label's count, (L,), and clips at zero.

    Charge `histogram_event` before you call this.

    Raises:
        ValueError: A count is negative or enormous, or `std` is outside 1/16 to 65,536.
    """
    if counts.ndim != 1 or not counts.size or counts.min() < 0 or counts.max() > _MAX_TEXTS:
        raise ValueError(f"counts of labels must be whole numbers from 0 to {_MAX_TEXTS}, one for each label")
    noise = DiscreteGaussian(std).sample(len(counts), random)
    clipped: Counts = np.maximum(counts.astype(np.int64) + noise, 0)
    return clipped


def histogram_event(std: float, labels: int, adjacency: Adjacency) -> DiscreteGaussianSum:
    """The event of one noised histogram, under the ledger's adjacency."""
    distance = 1.0 if adjacency == "add-remove" else math.sqrt(2)
    return DiscreteGaussianSum(honest=1, std=std, distance=distance, values=labels, unit="example")


def std_for(epsilon: float, delta: float, labels: int, adjacency: Adjacency = "add-remove") -> float:
    """The smallest std of three digits whose histogram an empty ledger of (epsilon, delta) admits.

    Raises:
        NotAffordable: No std up to 10,000 is enough.
        ValueError: epsilon or delta is out of range.
    """

    def event_at(multiplier: float) -> DiscreteGaussianSum:
        return histogram_event(min(max(multiplier, _MIN_STD), _MAX_STD), labels, adjacency)

    return max(calibrate(event_at, 1, Limit(epsilon, delta, adjacency)), _MIN_STD)


def allocated(histogram: Counts, count: int) -> Counts:
    """Divides `count` texts among labels in the histogram's proportions, or evenly if it is all zeros.

    Remaining texts go to the largest remainders, and among equal ones to the earlier label.

    Returns:
        The number of texts of each label, (L,).

    Raises:
        ValueError: `count` is negative, or the histogram is invalid.
    """
    if count < 0 or histogram.ndim != 1 or not histogram.size or histogram.min() < 0:
        raise ValueError("texts are divided by counts of labels, none of which may be negative")
    weights = [int(each) for each in histogram] if histogram.any() else [1] * len(histogram)
    total = sum(weights)
    # Whole numbers, since rounding must not decide which label gets the last text.
    shares = [count * each // total for each in weights]
    remainders = [count * each % total for each in weights]
    order = sorted(range(len(weights)), key=lambda place: (-remainders[place], place))
    for place in order[: count - sum(shares)]:
        shares[place] += 1
    return np.array(shares, dtype=np.int64)
