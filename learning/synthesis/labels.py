"""How many texts of each label to make up: a histogram with noise of its own, paid for by an event of its own.

    counts + Z, each Z a discrete Gaussian of parameter s (Canonne, Kamath, Steinke 2020; `secure_agg` draws it)
    clipped at zero

One text changes one count by one, so that the histograms of two neighbours (one text there or not) have L2 distance 1;
one text in place of another changes two counts: sqrt 2. Both are whole, so that their bound holds with nothing lost to
rounding, and it is the one the ledger knows (`DiscreteGaussianSum` of one share). Clipping and dividing up is
post-processing. The list of labels is the job's, and public: a label that nobody has gets noise like any other.

A ledger with such an event is reported by Rényi divergences, a little above the PLD that DP-SGD alone would have.
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

# A sum in 32 bits has room for the largest draw beside it.
_MAX_TEXTS = 2**30
_MIN_STD, _MAX_STD = 1 / 16, 65536.0


def noised_histogram(counts: Counts, std: float, random: RandomSource) -> Counts:
    """Counts of labels, (L,), each with its own discrete Gaussian of this parameter, none below zero. Charge
    `histogram_event` beforehand.

    Raises:
        ValueError: negative or enormous counts, or a deviation outside 1/16 to 65,536.
    """
    if counts.ndim != 1 or not counts.size or counts.min() < 0 or counts.max() > _MAX_TEXTS:
        raise ValueError(f"counts of labels are whole numbers from 0 to {_MAX_TEXTS}, one for each label")
    noise = DiscreteGaussian(std).sample(len(counts), random)
    clipped: Counts = np.maximum(counts.astype(np.int64) + noise, 0)
    return clipped


def histogram_event(std: float, labels: int, adjacency: Adjacency) -> DiscreteGaussianSum:
    """What one noised histogram costs the data set, under its ledger's adjacency."""
    distance = 1.0 if adjacency == "add-remove" else math.sqrt(2)
    return DiscreteGaussianSum(honest=1, std=std, distance=distance, values=labels, unit="example")


def std_for(epsilon: float, delta: float, labels: int, adjacency: Adjacency = "add-remove") -> float:
    """The smallest deviation, of three digits, whose histogram an empty ledger of (epsilon, delta) lets pass.

    Raises:
        NotAffordable: none up to 10,000 does.
        ValueError: an epsilon or a delta that there is not.
    """

    def event_at(multiplier: float) -> DiscreteGaussianSum:
        return histogram_event(min(max(multiplier, _MIN_STD), _MAX_STD), labels, adjacency)

    return max(calibrate(event_at, 1, Limit(epsilon, delta, adjacency)), _MIN_STD)


def allocated(histogram: Counts, count: int) -> Counts:
    """`count` texts divided among labels in the histogram's proportions, (L,): largest remainders first, then the
    earlier label. Evenly where the histogram is all zeros.

    Raises:
        ValueError: a negative count, or a histogram that is none.
    """
    if count < 0 or histogram.ndim != 1 or not histogram.size or histogram.min() < 0:
        raise ValueError("texts are divided by counts of labels, none of them negative")
    weights = [int(each) for each in histogram] if histogram.any() else [1] * len(histogram)
    total = sum(weights)
    # Whole numbers: which label gets the last text must not hang on a rounding.
    shares = [count * each // total for each in weights]
    remainders = [count * each % total for each in weights]
    order = sorted(range(len(weights)), key=lambda place: (-remainders[place], place))
    for place in order[: count - sum(shares)]:
        shares[place] += 1
    return np.array(shares, dtype=np.int64)
