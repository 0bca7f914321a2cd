"""The means of several groups made into one: mean, coordinate-wise median, trimmed mean, rejection of outliers.

What a rule withstands, with g groups opened of which f hold a member that sends what it likes, and f < g / 2
(trimmed-mean: f <= trim): every coordinate of the median and of the trimmed mean lies between the smallest and the
largest value that a good group has there, however far away the f lie. After rejection the result is no further from
that median than the furthest good group is. The plain mean withstands nothing: one group moves it at will. A bad
member moves its own group's mean at will in any case; that is why f counts groups and not members. Shifts that stay
within the spread of the good groups pass: no rule tells them from data.

Rejection, in words: a group goes when its mean is longer than twice the middle length of all, or lies further than
twice the middle distance from the coordinate-wise median; the middle of g sorted numbers is the one at place g // 2,
from 0. At least one group is within both, since more than half are within each. Who stays and lies further away than
the middle distance is drawn in to it (decision 33): more than half of the groups are good, so that the middle distance
is none beyond the furthest good one's. (Mean and deviation checks on prompts are the further work of Zhao et al. 2023,
FedPrompt; here they are made on groups, since secure aggregation shows no member's. Drawing in is the centred clipping
of Karimireddy, He and Jaggi 2021.)

Groups count alike under every rule but `mean`, whatever their size. An invalid sum (`coordinator.rounds.publish`) makes
its group one of the f.

Everything works on blocks of some coordinates of all groups, so that memory stays at a few blocks, and is pure but for
the noise, which comes from the source that is handed in and from nothing else.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from secure_agg import RandomSource
from secure_agg.randomness import KeyStream, StreamScratch
from tacit.job import Aggregation

__all__ = ["add_gaussian", "combine", "shares"]

# Of the middle length, and of the middle distance from the median.
_FURTHEST = 2.0
_UNIT = 2.0**-53

_Rows = NDArray[np.float64]


def combine(rows: _Rows, numbers: Aggregation, kept: Sequence[float] = ()) -> NDArray[np.float64]:
    """The groups' means (g, k) as one, (k,), by the job's rule; float64. Under `mean` a caller that weighs groups has
    done so already.

    kept: for reject-outliers what `shares` says of these groups.

    Raises:
        ValueError: fewer groups than the rule needs to outvote one, or none; or not a share for each.
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
                raise ValueError(f"{len(kept)} shares for {groups} groups: one is needed for each, and some above 0")
            middle = np.median(rows, axis=0)
            stay = np.array(kept) > 0
            weights = np.array(kept)[stay] / np.count_nonzero(stay)
            return np.asarray(middle + weights @ (rows[stay] - middle))
        case _:
            _check_enough(groups, 1)
            return np.asarray(rows.mean(axis=0))


def shares(blocks: Iterable[_Rows], *, invalid: int = 0) -> tuple[float, ...]:
    """What reject-outliers leaves of each group's way from the coordinate-wise median: 0 of one that it throws away, 1
    of one that lies no further than the middle one, and of others what makes them lie so far. From all their
    coordinates, block by block: each (g, k), k as it comes.

    invalid: groups opened besides those, to a sum that cannot be. They are bad and away already, and count towards the
    three that the rule needs: without them f - invalid of g - invalid are bad, which is less than half as before.

    Raises:
        ValueError: fewer than 3 groups opened, half of them invalid, or no block.
    """
    lengths: _Rows | None = None
    distances: _Rows | None = None
    for rows in blocks:
        _check_enough(rows.shape[0] + invalid, 3)
        if 2 * invalid >= rows.shape[0] + invalid:
            raise ValueError(f"{invalid} invalid groups beside {rows.shape[0]}: the good ones are no majority")
        length = np.einsum("ij,ij->i", rows, rows)
        away = rows - np.median(rows, axis=0)
        distance = np.einsum("ij,ij->i", away, away)
        lengths = length if lengths is None else lengths + length
        distances = distance if distances is None else distances + distance
    if lengths is None or distances is None:
        raise ValueError("there is no block, so nothing to tell groups apart by")
    far = np.sqrt(distances)
    stay = _near(np.sqrt(lengths)) & _near(far)
    # Who lies no further than the middle one may lie nowhere else than the median.
    clipped = np.divide(_middle(far), far, out=np.ones_like(far), where=far > _middle(far))
    return tuple(float(each) for each in np.where(stay, clipped, 0.0))


def add_gaussian(values: NDArray[np.float64], std: float, random: RandomSource) -> None:
    """Adds an independent N(0, deviation^2) to every value, in place (Box and Muller 1958), from 53 bits each of a
    fresh AES-256-CTR stream. It blurs what is published; it is no mechanism that a ledger counts, since whoever adds it
    knows the sum without it, and its last bits are a float's.

    Raises:
        ValueError: a deviation that is negative or not finite.
    """
    if not math.isfinite(std) or std < 0:
        raise ValueError(f"a deviation is a number from 0, got {std!r}")
    if not std or not values.size:
        return
    pairs = -(-values.size // 2)
    scratch = StreamScratch(16 * pairs)
    words = KeyStream(random.bytes(32), scratch).read(16 * pairs, scratch).view(np.uint64) >> np.uint64(11)
    # In (0, 1], so that its logarithm is finite.
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
        raise ValueError(f"{groups} groups are left, and the rule needs {least}: with fewer, one of them decides alone")
