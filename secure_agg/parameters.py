"""How many neighbours, and what threshold among them, make the sparse graph as good as the complete one.

Guarantees: `find` gives the least even number of neighbours k, and a threshold t for it, such that in a random
Harary graph of degree k on n members, of whom the coordinator runs floor(gamma n) and of whom floor(delta n) may
be lost, all of these hold but for a probability of 2^-sigma:

- those who are neither corrupt nor lost stay connected, so that the masks between them hide all but their sum;
- no honest member has more than `corrupt_neighbours` corrupt neighbours, so that t shares of its secrets take the
  consent of at least `honest` honest neighbours; and (semi-malicious) 2t > k + `corrupt_neighbours`, so that both
  secrets of one member can never be rebuilt, whatever lists of survivors its neighbours were told;

and, for the sake of progress only, but for 2^-correctness, everybody keeps t neighbours.

The members must be placed on the ring at random after the corrupt ones are chosen. A coordinator that answers
last can try 2^g rosters and pick one, at a cost of g of the sigma bits; that is why sigma is 80.

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
# Below this a promise that holds but for 2^-sigma is not worth the name; what a member takes part in is its policy's to
# say.
MIN_SIGMA = 40
# Up to here somebody who wants the complete graph's promise, which no probability enters, may pay for it: n^2 shares
# and agreements.
MAX_COMPLETE_GRAPH = 1000
CORRECTNESS = 20
# What is tabulated and searched for numbers that come from somebody else is bounded by these.
MAX_MEMBERS = 100_000
MAX_NEIGHBOURS = 4096
_MILLION = 10**6
_LOG_2 = math.log(2)


class NoParameters(ValueError):
    """No number of neighbours gives what is asked for. The text says what would."""


@dataclass(frozen=True, slots=True)
class SparseParameters:
    """A degree and a threshold, and what they are worth.

    neighbours: k, even. threshold: t of the k, the least that will do. honest: h = t - corrupt_neighbours, the
    honest inputs that every sum that can be opened holds at least. corrupt_neighbours: t1 (before its semi-malicious
    replacement), the most corrupt neighbours of any honest member. largest_threshold: the largest t for which
    everybody keeps t neighbours when as many are lost as may be.
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
    """The least even k, and its t, for n members of whom a share gamma is corrupt and a share delta may be lost.

    gamma, delta: shares of n in [0, 1), of at most six decimals, taken exactly (floor(gamma n) is a count, and
    0.29 * 100 as floats is below 29). sigma, correctness: bits. semi_malicious: the coordinator may tell neighbours
    of one member different lists of survivors. absent: how many of those who may be lost may be missing from the
    roster already, where the corrupt ones weigh more. Raises NoParameters where no k would do.
    """
    corrupt = of_millionths(n, to_millionths(gamma))
    lost = of_millionths(n, to_millionths(delta))
    return find_counts(n, corrupt, lost, sigma, correctness, semi_malicious, absent=absent)


def to_millionths(share: Fraction | float) -> int:
    """A share in [0, 1) as whole millionths. Raises NoParameters when it is none."""
    scaled = Fraction(share) * _MILLION
    millionths = round(scaled)
    # A float is off its decimal by 2^-53 at most; anything further away has more than six decimals.
    if not 0 <= millionths < _MILLION or abs(scaled - millionths) > Fraction(1, _MILLION):
        raise NoParameters(f"a share of the members lies in [0, 1) and has at most six decimals, got {share!r}")
    return millionths


def of_millionths(n: int, millionths: int) -> int:
    """floor(share * n), exactly."""
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
    """`find` for whole numbers of corrupt and lost members. Raises NoParameters."""
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
    """What k neighbours are worth, with the least threshold for them; None where k does not do. Raises NoParameters
    for counts that make no sense.
    """
    _check(n, corrupt, lost, sigma, correctness, semi_malicious, absent)
    if k < 2 or k % 2 or k > min(n - absent - 1, MAX_NEIGHBOURS):
        return None
    # Members that are missing from the roster leave the same members to be connected, on a smaller ring: the bound for
    # the whole ring is the larger one.
    if _log_disconnected(n, corrupt + lost, k) >= -(sigma + 1) * _LOG_2:
        return None
    corrupted = corrupt_neighbours(n - absent, corrupt, k, sigma)
    # ceil((t1 + k - 1.25) / 2), which for whole numbers is this; the least t above it has 2t > k + t1.
    exceed = (corrupted + k) // 2 if semi_malicious else corrupted
    survive = surviving_neighbours(n, lost, k, correctness)
    if survive <= exceed:
        return None
    threshold = max(exceed + 1, 2)
    return SparseParameters(k, threshold, threshold - corrupted, corrupted, max(survive, threshold))


@lru_cache(maxsize=4096)
def corrupt_neighbours(n: int, corrupt: int, k: int, sigma: int) -> int:
    """t1: the least x such that one member has more than x corrupt neighbours with probability at most
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
            f"of {n} members {corrupt} are corrupt, {lost} may be lost and {absent} be absent from the roster: "
            "some must remain that are neither corrupt nor lost, and those absent count among the lost"
        )
    # Then t1' is above the mean of what survives, for every k; and U3 cannot bring the confirmations it needs either.
    if semi_malicious and 2 * (n - lost) <= n + corrupt:
        raise NoParameters(
            f"{n - lost} of {n} members with {corrupt} corrupt are no majority of the honest ones: "
            "two lists of survivors could both be confirmed; assume fewer lost or corrupt"
        )


def _log_disconnected(n: int, removed: int, k: int) -> float:
    """Log of the bound on the probability that the ring without `removed` members falls apart: n (n - k - 1) / 2
    pairs of places to cut it, each by k removed members.
    """
    pairs = n * (n - k - 1) / 2
    if k > removed or pairs <= 0:
        return -math.inf
    table = _log_factorials(n)
    return float(math.log(pairs) + table[removed] + table[n - k] - table[n] - table[removed - k])


def _log_probabilities(n: int, marked: int, k: int) -> NDArray[np.float64]:
    """Log P[Hyp(n, marked, k) = x] for x = 0 .. k: x marked ones among k drawn out of n, -inf where impossible."""
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
    """log(i!) for i = 0 .. n at least."""
    # A table for the next power of two serves all n below it: one cohort is looked at with many smaller rosters.
    return _log_factorial_table(n.bit_length())


@lru_cache(maxsize=20)
def _log_factorial_table(bits: int) -> NDArray[np.float64]:
    table = np.fromiter((math.lgamma(i + 1) for i in range(1 << bits)), dtype=np.float64, count=1 << bits)
    table.flags.writeable = False
    return table
