"""The number of neighbours, and the threshold among them, that make the sparse graph as good as the complete one.

Guarantees: `find` returns the smallest even number of neighbours k, and a threshold t for it, with the following
properties. Take a random Harary graph of degree k on n members, of whom the coordinator controls floor(gamma n) and
floor(delta n) may drop out. Except with probability 2^-sigma, all of these hold:

- Members that are neither corrupt nor lost stay connected, so the masks between them hide everything but their sum.
- No honest member has more than `corrupt_neighbours` corrupt neighbours, so collecting t shares of its secrets takes
  the consent of at least `honest` honest neighbours. Also (semi-malicious) 2t > k + `corrupt_neighbours`, so nobody can
  ever rebuild both secrets of one member, whatever lists of survivors its neighbours were told.

Except with probability 2^-correctness, every member keeps t neighbours. This one matters only for progress.

Assumption: the members are placed on the ring at random after the corrupt ones are chosen. A coordinator that answers
last can try 2^g rosters and pick one, which costs g of the sigma bits; that is why sigma is 80.

Source: Bell, Bonawitz, Gascon, Lepoint, Raykova 2020, Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead, section 3 (conditions) and its published table of (k, t). Tails are sums of exact terms in log space,
smallest first, not bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CORRECTNESS",
    "MAX_COMPLETE_GRAPH",
    "MAX_MEMBERS",
    "MAX_NEIGHBOURS",
    "MIN_SIGMA",
    "SIGMA",
    "NoParameters",
    "SparseParameters",
    "corrupt_neighbours",
    "evaluate",
    "find",
    "find_counts",
    "of_millionths",
    "surviving_neighbours",
    "to_millionths",
]

SIGMA = 80
# The lowest sigma that counts as a guarantee at all. A member's policy decides what it takes part in.
MIN_SIGMA = 40
# The complete graph, whose guarantee involves no probability, is available up to this size. It costs n^2 shares and
# seals.
MAX_COMPLETE_GRAPH = 1000
CORRECTNESS = 20
# Bounds on tables and searches for numbers that come from another party.
MAX_MEMBERS = 100_000
MAX_NEIGHBOURS = 1024
_MILLION = 10**6
_LOG_2 = math.log(2)


class NoParameters(ValueError):
    """No number of neighbours meets the requirements. The text says what would help."""


@dataclass(frozen=True, slots=True)
class SparseParameters:
    """A degree and a threshold, and what they guarantee.

    Args:
        neighbours: k, even.
        threshold: t of the k, the smallest that is sufficient.
        honest: h = t - corrupt_neighbours, the minimum number of honest inputs in any sum that can be opened.
        corrupt_neighbours: t1 (before its semi-malicious replacement), the maximum number of corrupt neighbours of any
            honest member.
        largest_threshold: the largest t for which every member keeps t neighbours at the maximum dropout.
    """

    neighbours: int
    threshold: int
    honest: int
    corrupt_neighbours: int
    largest_threshold: int


def find(
    n: int,
    gamma: Fraction | float,
    delta: Fraction | float,
    sigma: int = SIGMA,
    correctness: int = CORRECTNESS,
    semi_malicious: bool = True,
    *,
    absent: int = 0,
) -> SparseParameters:
    """Finds the smallest even k, and its t.

    Args:
        n: size of the cohort.
        gamma: share of n that may be corrupt, in [0, 1), with at most six decimals. It is taken exactly, because
            floor(gamma n) is a count and 0.29 * 100 in floats is below 29.
        delta: share of n that may drop out; as gamma.
        sigma: bits of the guarantee.
        correctness: bits of the guarantee of progress.
        semi_malicious: whether the coordinator may tell neighbours of one member different lists of survivors.
        absent: how many of the members that may drop out may already be missing from the roster, where the corrupt ones
            weigh more.

    Raises:
        NoParameters: no k is sufficient.
    """
    corrupt = of_millionths(n, to_millionths(gamma))
    lost = of_millionths(n, to_millionths(delta))
    return find_counts(n, corrupt, lost, sigma, correctness, semi_malicious, absent=absent)


def to_millionths(share: Fraction | float) -> int:
    """Converts a share in [0, 1) to whole millionths.

    Raises:
        NoParameters: it is out of range or has more than six decimals.
    """
    scaled = Fraction(share) * _MILLION
    millionths = round(scaled)
    # A float differs from its decimal by at most 2^-53; anything further away has more than six decimals.
    if not 0 <= millionths < _MILLION or abs(scaled - millionths) > Fraction(1, _MILLION):
        raise NoParameters(f"a share of the members lies in [0, 1) and has at most six decimals, got {share!r}")
    return millionths


def of_millionths(n: int, millionths: int) -> int:
    """Computes floor(share * n) exactly."""
    return n * millionths // _MILLION


@lru_cache(maxsize=256)
def find_counts(
    n: int,
    corrupt: int,
    lost: int,
    sigma: int = SIGMA,
    correctness: int = CORRECTNESS,
    semi_malicious: bool = True,
    *,
    absent: int = 0,
) -> SparseParameters:
    """Does what `find` does, for counts of corrupt and lost members.

    Raises:
        NoParameters: no k is sufficient.
    """
    _check(n, corrupt, lost, sigma, correctness, semi_malicious, absent)
    for k in range(2, min(n - absent - 1, MAX_NEIGHBOURS) + 1, 2):
        found = evaluate(n, corrupt, lost, k, sigma, correctness, semi_malicious, absent=absent)
        if found is not None:
            return found
    raise NoParameters(
        f"no sparse graph of {n} members, each with at most {MAX_NEIGHBOURS} neighbours, withstands {corrupt} corrupt "
        f"and {lost} lost ones with sigma {sigma}; form another cohort, or assume fewer"
    )


@lru_cache(maxsize=1024)
def evaluate(
    n: int,
    corrupt: int,
    lost: int,
    k: int,
    sigma: int = SIGMA,
    correctness: int = CORRECTNESS,
    semi_malicious: bool = True,
    *,
    absent: int = 0,
) -> SparseParameters | None:
    """What k neighbours guarantee, with the smallest threshold for them; None if k is not sufficient.

    Raises:
        NoParameters: the counts are impossible.
    """
    _check(n, corrupt, lost, sigma, correctness, semi_malicious, absent)
    if k < 2 or k % 2 or k > min(n - absent - 1, MAX_NEIGHBOURS):
        return None
    # With members missing from the roster, the same members must stay connected on a smaller ring. The bound for the
    # whole ring is the larger one.
    if _log_disconnected(n, corrupt + lost, k) >= -(sigma + 1) * _LOG_2:
        return None
    corrupted = corrupt_neighbours(n - absent, corrupt, k, sigma)
    # ceil((t1 + k - 1.25) / 2), which for whole numbers equals this; the smallest t above it has 2t > k + t1.
    exceed = (corrupted + k) // 2 if semi_malicious else corrupted
    survive = surviving_neighbours(n, lost, k, correctness)
    if survive <= exceed:
        return None
    threshold = max(exceed + 1, 2)
    return SparseParameters(k, threshold, threshold - corrupted, corrupted, max(survive, threshold))


@lru_cache(maxsize=4096)
def corrupt_neighbours(n: int, corrupt: int, k: int, sigma: int) -> int:
    """t1: the smallest x such that one member has more than x corrupt neighbours with probability at most
    2^-(sigma + 1) / n.
    """
    at_least = np.logaddexp.accumulate(_log_probabilities(n, corrupt, k)[::-1])[::-1]
    more_than = np.append(at_least[1:], -np.inf)
    return int(np.argmax(more_than <= -(sigma + 1) * _LOG_2 - math.log(n)))


@lru_cache(maxsize=4096)
def surviving_neighbours(n: int, lost: int, k: int, correctness: int = CORRECTNESS) -> int:
    """t2: the first x such that one member keeps at most x neighbours with probability at least
    2^-correctness / n.
    """
    at_most = np.logaddexp.accumulate(_log_probabilities(n, n - lost, k))
    return int(np.argmax(at_most >= -correctness * _LOG_2 - math.log(n)))


def _check(n: int, corrupt: int, lost: int, sigma: int, correctness: int, semi_malicious: bool, absent: int) -> None:
    if not 3 <= n <= MAX_MEMBERS:
        raise NoParameters(f"a sparse graph serves 3 to {MAX_MEMBERS} members, got {n}")
    if sigma < 1 or correctness < 1:
        raise NoParameters(f"sigma and correctness are bits, at least 1 each, got {sigma} and {correctness}")
    if corrupt < 0 or not 0 <= absent <= lost or corrupt + lost >= n:
        raise NoParameters(
            f"{n} members, {corrupt} corrupt, {lost} that may be lost, {absent} of these absent from the roster: some "
            "must remain that are neither corrupt nor lost, and at most as many can be absent as may be lost"
        )
    # Then t1' exceeds the mean of the survivors for every k, and U3 could not yield enough confirmations either.
    if semi_malicious and 2 * (n - lost) <= n + corrupt:
        raise NoParameters(
            f"{n - lost} of {n} members with {corrupt} corrupt are not a majority of the honest ones, so two lists of "
            "survivors could both be confirmed; assume fewer lost or corrupt"
        )


def _log_disconnected(n: int, removed: int, k: int) -> float:
    """Log of a bound on the probability that removing `removed` members disconnects the ring: there are
    n (n - k - 1) / 2 pairs of places to cut it, and cutting it at one pair takes k removed members.
    """
    pairs = n * (n - k - 1) / 2
    if k > removed or pairs <= 0:
        return -math.inf
    table = _log_factorials(n)
    return float(math.log(pairs) + table[removed] + table[n - k] - table[n] - table[removed - k])


def _log_probabilities(n: int, marked: int, k: int) -> NDArray[np.float64]:
    """Log P[Hyp(n, marked, k) = x] for x = 0 .. k: x marked members among k drawn from n; -inf where impossible."""
    low, high = max(0, k - (n - marked)), min(k, marked)
    table = _log_factorials(n)
    x = np.arange(low, high + 1)
    out = np.full(k + 1, -np.inf)
    out[low : high + 1] = (
        (table[marked] - table[x] - table[marked - x])
        + (table[n - marked] - table[k - x] - table[n - marked - k + x])
        - (table[n] - table[k] - table[n - k])
    )
    return out


def _log_factorials(n: int) -> NDArray[np.float64]:
    """log(i!) for i from 0 to at least n."""
    # One cohort is evaluated with many smaller rosters, so a table for the next power of two serves all n below it.
    return _log_factorial_table(n.bit_length())


@lru_cache(maxsize=20)
def _log_factorial_table(bits: int) -> NDArray[np.float64]:
    table = np.fromiter((math.lgamma(i + 1) for i in range(1 << bits)), dtype=np.float64, count=1 << bits)
    table.flags.writeable = False
    return table
