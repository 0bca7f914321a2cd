"""The numbers of one test of lengths, and what it proves.

R has `projections` rows of independent coins: -1, 0, 1 with probabilities 1/4, 1/2, 1/4. A member with vector x shows
that every coordinate of z = R x, taken modulo 2^b as a signed number, is at most T, and that |z|^2 is at most K.

**Lemma 1** (no wrap). Let x be fixed before R, modulo 2^b, and longer than N = 5 T. Then each coordinate of R x is
within T modulo 2^b with probability at most 0.87, if 2^(b-1) >= T + 6 sqrt(N^2 + 4 T^2). *Proof.* If a coordinate of x
is above 2 T, then for any fixed rest at most one of "its coin is 0" and "its coin is 1 or -1" keeps z within T: 1/2.
Otherwise take coordinates until their length l is at least N; l^2 <= N^2 + 4 T^2. Their part W of z has the variance
l^2 / 2, and the third moments divided by the variance's power 3/2 add up to at most 2 T sqrt(2) / l. By Berry-Esseen
(0.56, Shevtsova 2010) W is in an interval of length 2 T with probability at most 3.04 sqrt(2) T / l <= 0.86. Another
window modulo 2^b needs |W| >= 2^(b-1) - T, which has probability at most 2 e^-36 (Hoeffding). The rest of z is
independent of W. So all 256 coordinates pass with probability below 2^-51.

**Lemma 2** (length). If |x| <= N, no projection wraps, except with probability 2 e^-36 each. For one, E z^2 = |x|^2 / 2
and E z^4 <= 3 (E z^2)^2, so E exp(-u z^2) <= 1 - m u + 3/2 (m u)^2 with m = |x|^2 / 2. By Chernoff's bound,
|z|^2 <= (1 - e) m k has probability at most min over v of ((1 - v + 3/2 v^2) exp(v (1 - e)))^k. `shortest_share` is the
1 - e at which this is 2^-40.

Hence a vector that passes is no longer than `max_norm`, except with probability 2^-39, all terms together. (Lattice
proofs use the same coins: Gentry, Halevi and Lyubashevsky 2022.)

An honest vector of length `norm` passes except with probability 2^-30: z is sub-Gaussian with the variance |x|^2 / 2.
"""

import math
from dataclasses import dataclass

from secure_agg.distributed import Grid

__all__ = ["Numbers", "noise_norm", "with_noise"]

_COMBINATIONS = 64
_PROJECTIONS = 256
_MISSED_BITS, _PASSED_BITS = 30, 40


@dataclass(frozen=True)
class Numbers:
    """The numbers of one test.

    Args:
        norm: beta, the largest length of an honest vector in steps of the grid.
        values: d.
        together: the number of members that may lie together and still be bound by `max_norm` times their number.
    """

    norm: float
    values: int
    together: int = 1
    projections: int = _PROJECTIONS
    combinations: int = _COMBINATIONS

    @property
    def max_projection(self) -> int:
        """T, the largest coordinate of an honest member's projections."""
        return math.ceil(self.norm * math.sqrt(math.log(2 * self.projections) + _MISSED_BITS * math.log(2)))

    @property
    def max_squares(self) -> int:
        """K, the largest squared length of an honest member's projections."""
        return math.ceil(self.projections / 2 * self.norm**2 * longest_share(self.projections))

    @property
    def max_norm(self) -> float:
        """The largest length of one lying member's vector that passes, in steps."""
        return math.sqrt(2 * self.max_squares / (self.projections * shortest_share(self.projections)))

    @property
    def slack(self) -> float:
        """How many times longer than an honest member's a lying member's vector may be."""
        return self.max_norm / self.norm

    @property
    def bits(self) -> int:
        """b, the narrowest ring in which Lemma 1 holds for `together` members."""
        most = self.together * self.max_projection
        half = most * (1 + 6 * math.sqrt(5**2 + 4))
        return math.ceil(math.log2(half)) + 1


def longest_share(projections: int) -> float:
    """Returns 1 + e such that |R x|^2 exceeds (1 + e) k |x|^2 / 2 with probability at most 2^-30."""
    target = 2 * _MISSED_BITS * math.log(2) / projections
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if middle - math.log1p(middle) >= target else (middle, high)
    return 1 + high


def shortest_share(projections: int) -> float:
    """Returns 1 - e of Lemma 2."""
    target = _PASSED_BITS * math.log(2) / projections
    grid = (v / 10_000 for v in range(1, 6_000))
    return max((-target - math.log(1 - v + 1.5 * v * v)) / v for v in grid)


def noise_norm(std: float, values: int) -> float:
    """Returns the length that `values` discrete Gaussian draws of parameter std exceed with probability 2^-30.

    They are sub-Gaussian, so their squared length has the tail of chi-squared (Laurent and Massart 2000, lemma 1).
    """
    t = _MISSED_BITS * math.log(2)
    return std * math.sqrt(values + 2 * math.sqrt(values * t) + 2 * t)


def with_noise(grid: Grid, together: int = 1) -> Numbers:
    """Returns the numbers for the encodings of a grid: the rounded clip plus the tail of a member's noise."""
    return Numbers(grid.bound + noise_norm(grid.std, grid.values), grid.values, together)
