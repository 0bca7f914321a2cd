"""Combines the means of several groups into one: mean, coordinate-wise median, trimmed mean, rejection of outliers.

Robustness, if f of g opened groups hold a member that sends what it likes, and f < g / 2 (trimmed-mean: f <= trim):

- Every coordinate of the median and of the trimmed mean is between the smallest and the largest value of the good
  groups there, however far away the f groups are.
- After rejection, the result is no further from that median than the furthest good group.
- The plain mean is not robust: one group moves it at will.

A bad member can always move its own group's mean at will, so f counts groups and not members. Shifts within the spread
of the good groups pass: no rule can tell them from data.

Rejection drops a group if its mean is longer than twice the median length, or further than twice the median distance
from the coordinate-wise median. The median of g sorted numbers here is the one at index g // 2, from 0. At least one
group is within both bounds, since more than half are within each. A kept group that is further away than the median
distance is clipped to it (decision 33). More than half of the groups are good, so the median distance is at most that
of the furthest good group. (Zhao et al. 2023, FedPrompt, name checks of mean and standard deviation on prompts as
further work. Here the checks are on groups, since secure aggregation reveals no member's update. The clipping is the
centred clipping of Karimireddy, He and Jaggi 2021.)

Under every rule except `mean`, groups have equal weight, whatever their size. A group with an invalid sum
(`coordinator.rounds.publish`) is one of the f.

All functions work on blocks of coordinates over all groups, so they need the memory of a few blocks. They are pure
except for the noise, which comes only from the random source passed in.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from secure_agg import RandomSource
from secure_agg.randomness import KeyStream, StreamScratch
from tacit.job import Aggregation

__all__ = ["add_gaussian", "combine", "shares"]

# Multiple of the median length, and of the median distance, beyond which a group is rejected.
_FURTHEST = 2.0
_UNIT = 2.0**-53

_Rows = NDArray[np.float64]


def combine(rows: _Rows, numbers: Aggregation, kept: Sequence[float] = ()) -> NDArray[np.float64]:
    """Combines the groups' means by the job's rule.

    Args:
        rows: The groups' means, shape (g, k), float64. Under `mean`, a caller that weights groups has already done so.
        numbers: The job's rule and its parameters.
        kept: For reject-outliers, the result of `shares` for these groups.

    Returns:
        The combined mean, shape (k,), float64.

    Raises:
        ValueError: there are fewer groups than the rule needs to outvote one, or none, or `kept` does not have one
            share for each group.
    """
    groups = rows.shape[0]
    match numbers.combine:
        case "median":
            _check_enough(groups, 3)
            return np.asarray(np.median(rows, axis=0), dtype=np.float64)
        case "trimmed-mean":
            _check_enough(groups, 2 * numbers.trimmed + 1)
            return np.asarray(np.sort(rows, axis=0)[numbers.trimmed : groups - numbers.trimmed].mean(axis=0))
        case "reject-outliers":
            if len(kept) != groups or not any(kept):
                raise ValueError(
                    f"{len(kept)} shares for {groups} groups; each group needs one, and one must be above 0"
                )
            middle = np.median(rows, axis=0)
            stay = np.array(kept) > 0
            weights = np.array(kept)[stay] / np.count_nonzero(stay)
            return np.asarray(middle + weights @ (rows[stay] - middle))
        case _:
            _check_enough(groups, 1)
            return np.asarray(rows.mean(axis=0))


def shares(blocks: Iterable[_Rows], *, invalid: int = 0) -> tuple[float, ...]:
    """Computes how much of each group's difference from the coordinate-wise median reject-outliers keeps.

    Args:
        blocks: All coordinates of the groups' means, block by block. Each block has shape (g, k), with any k.
        invalid: Number of further groups that opened to an impossible sum. They are bad and already removed, but count
            towards the three groups that the rule needs. Without them, f - invalid of g - invalid groups are bad, which
            is still less than half.

    Returns:
        One share for each group: 0 if it is rejected, 1 if it is no further from the median than the median distance,
        and otherwise the factor that clips it to that distance.

    Raises:
        ValueError: fewer than 3 groups opened, half or more of them are invalid, or there is no block.
    """
    lengths: _Rows | None = None
    distances: _Rows | None = None
    for rows in blocks:
        _check_enough(rows.shape[0] + invalid, 3)
        if 2 * invalid >= rows.shape[0] + invalid:
            raise ValueError(f"{invalid} invalid groups and {rows.shape[0]} valid ones: the good ones are no majority")
        length = np.einsum("ij,ij->i", rows, rows)
        away = rows - np.median(rows, axis=0)
        distance = np.einsum("ij,ij->i", away, away)
        lengths = length if lengths is None else lengths + length
        distances = distance if distances is None else distances + distance
    if lengths is None or distances is None:
        raise ValueError("there is no block to compare the groups by")
    far = np.sqrt(distances)
    stay = _near(np.sqrt(lengths)) & _near(far)
    # Only groups beyond the median distance are clipped. A group within it may be at distance 0.
    clipped = np.divide(_middle(far), far, out=np.ones_like(far), where=far > _middle(far))
    return tuple(float(each) for each in np.where(stay, clipped, 0.0))


def add_gaussian(values: NDArray[np.float64], std: float, random: RandomSource) -> None:
    """Adds independent Gaussian noise N(0, std^2) to every value, in place.

    Each draw uses 53 bits of a fresh AES-256-CTR stream. The noise blurs what is published. It is not a mechanism that
    a ledger counts, since the party that adds it knows the sum without it, and its last bits are those of a float.

    Args:
        values: The values to change, float64.
        std: The standard deviation, 0 or more.
        random: The random source.

    Raises:
        ValueError: the standard deviation is negative or not finite.

    Source:
        Box and Muller 1958.
    """
    if not math.isfinite(std) or std < 0:
        raise ValueError(f"a standard deviation must be finite and at least 0, got {std!r}")
    if not std or not values.size:
        return
    pairs = -(-values.size // 2)
    scratch = StreamScratch(16 * pairs)
    words = KeyStream(random.bytes(32), scratch).read(16 * pairs, scratch).view(np.uint64) >> np.uint64(11)
    # The uniform number is in (0, 1], so its logarithm is finite.
    radius = np.sqrt(-2 * np.log((words[:pairs].astype(np.float64) + 1) * _UNIT)) * std
    angle = words[pairs:].astype(np.float64) * (_UNIT * 2 * math.pi)
    values[:pairs] += radius * np.cos(angle)
    rest = values.size - pairs
    values[pairs:] += (radius * np.sin(angle))[:rest]


def _near(numbers: _Rows) -> NDArray[np.bool_]:
    return np.asarray(numbers <= _FURTHEST * _middle(numbers))


def _middle(numbers: _Rows) -> float:
    return float(np.sort(numbers)[len(numbers) // 2])


def _check_enough(groups: int, least: int) -> None:
    if groups < least:
        raise ValueError(f"{groups} groups are left, but the rule needs {least}: with fewer, one group decides alone")
