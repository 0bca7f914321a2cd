"""Privacy loss distributions (PLDs) on a grid, in numpy: composed where Rényi divergences are loose.

A PLD is the law of the loss L = ln(P(x) / Q(x)) of a pair (P, Q) for x from P. It gives the pair's hockey-stick
divergence, delta(e) = E[max(0, 1 - exp(e - L))], and the L of independent releases add up.

Guarantees:

- A PLD here bounds the true one from above: its delta is at least the pair's, at every epsilon. Atoms are put on the
  grid so that both the mass and the mean of exp(-L) stay right (Doroshenko et al. 2022, "Connect the dots: tighter
  discrete approximations of privacy loss distributions", algorithm 1). Tails that are cut count as infinite losses.
- Both directions of a pair are composed, and the worse one counts.

Rounding in double precision is not bounded here: `learning.accounting.gate` takes what it may cost from delta.
`tests/unit/learning/accounting/test_pld.py` compares every function with dp-accounting's, which needs scipy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Losses", "Pld", "discrete_gaussian_pld", "gaussian_delta", "gaussian_pld", "identity_pld", "laplace_pld"]

Vector = NDArray[np.float64]

# Standard deviations beyond which a Gaussian's mass, 6e-23, counts as an infinite loss.
_TAIL = 9.8
# The mass that one composition may cut from both tails together.
_CUT = 1e-15
# Moments with which Chernoff's bound finds those tails, times the length of the distribution.
_MOMENTS = range(1, 21)
# Beyond this, Mills' ratio is its asymptotic series to the last bit.
_FAR = 15.0

_erfc: Any = np.frompyfunc(math.erfc, 1, 1)


@dataclass(frozen=True, eq=False)
class Losses:
    """A distribution of losses in one direction.

    Attributes:
        width: The grid's width.
        low: The first loss, in widths.
        mass: (n,) Probabilities of the losses low, low + 1, ... in widths.
        infinite: Probability of an infinite loss.
    """

    width: float
    low: int
    mass: Vector
    infinite: float

    @classmethod
    def connected(cls, delta: Callable[[Vector], Vector], lowest: float, highest: float, width: float) -> Self:
        """The distribution whose delta is the pair's at every grid point between two losses, and above it between them.

        Args:
            delta: The pair's delta at each of some epsilons.
            lowest, highest: Losses beyond which there is hardly any mass.
            width: The grid's width.
        """
        low, high = math.floor(lowest / width), math.ceil(highest / width)
        # Never rising, whatever the last bits are.
        deltas = np.minimum.accumulate(np.clip(delta(np.arange(low, high + 1, dtype=np.float64) * width), 0.0, 1.0))
        falls = np.diff(deltas)
        mass = np.zeros(len(deltas))
        # Between two grid points delta is linear in exp(epsilon): algorithm 1, with equal gaps.
        mass[0] = 1 - deltas[0]
        if len(falls):
            mass[0] += falls[0] / math.expm1(width)
            mass[1:-1] = (falls[1:] - falls[:-1] * math.exp(width)) / math.expm1(width)
            mass[-1] = falls[-1] / math.expm1(-width)
        return cls(width, low, np.maximum(0.0, mass), float(deltas[-1]))

    @classmethod
    def of_atoms(cls, losses: Vector, mass: Vector, infinite: float, width: float) -> Self:
        """The distribution of atoms, each split between the grid points around it.

        Args:
            losses: (n,) The atoms' losses.
            mass: (n,) Their probabilities.
            infinite: Probability of an infinite loss.
            width: The grid's width.
        """
        below = np.floor(losses / width).astype(np.int64)
        # a + b = 1 and a + b exp(-width) = exp(-(loss - below)): the mean of exp(-loss) stays right.
        above = np.clip(np.expm1(below * width - losses) / math.expm1(-width), 0.0, 1.0)
        low = int(below.min())
        places = np.zeros(int(below.max()) - low + 2)
        np.add.at(places, below - low, mass * (1 - above))
        np.add.at(places, below - low + 1, mass * above)
        return cls(width, low, places, infinite)

    def plus(self, other: "Losses") -> "Losses":
        """The losses of two releases together."""
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        count = len(self.mass) + len(other.mass) - 1
        size = _fast(count)
        mass = np.fft.irfft(np.fft.rfft(self.mass, size) * np.fft.rfft(other.mass, size), size)[:count]
        # What is cut below counts at the first loss that is kept, and what is cut above as infinite.
        first = int(np.searchsorted(np.cumsum(mass), _CUT / 2, side="right"))
        last = count - int(np.searchsorted(np.cumsum(mass[::-1]), _CUT / 2, side="right"))
        last = max(last, first + 1)
        kept = mass[first:last].copy()
        kept[0] += mass[:first].sum()
        return Losses(self.width, self.low + other.low + first, kept, infinite + float(mass[last:].sum()))

    def times(self, count: int) -> "Losses":
        """The losses of `count` such releases together. Raises ValueError if there is none."""
        if count < 1:
            raise ValueError(f"a distribution is composed with itself at least once, got {count}")
        first, last = self._where(count)
        kept = last - first + 1
        size = _fast(max(kept, len(self.mass)))
        # The transform wraps around: what lies beyond the two ends falls between them, and is counted as infinite too.
        mass = np.roll(np.fft.irfft(np.fft.rfft(self.mass, size) ** count, size), -first)[:kept]
        infinite = _CUT - math.expm1(count * math.log1p(-self.infinite))
        return Losses(self.width, self.low * count + first, mass, infinite)

    def _where(self, count: int) -> tuple[int, int]:
        """The places between which all but `_CUT` of the mass of `count` releases lies, by Chernoff's bound."""
        at, first, last = np.arange(len(self.mass)), 0, (len(self.mass) - 1) * count
        with np.errstate(divide="ignore"):
            logs = np.log(self.mass)
        for moment in _MOMENTS:
            order = moment / len(self.mass)
            for sign in (1, -1):
                exponents = logs + sign * order * at
                top = float(exponents.max())
                total = top + math.log(float(np.exp(exponents - top).sum()))
                bound = sign * (count * total + math.log(2 / _CUT)) / order
                if sign > 0:
                    last = min(last, math.ceil(bound))
                else:
                    first = max(first, math.floor(bound))
        return first, max(first, last)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon, from 0 up, at which the delta is at most `delta`; inf if there is none."""
        if self.infinite > delta:
            return math.inf
        # From the largest loss down to the smallest above zero. Smaller ones have no part at an epsilon of at least 0.
        losses = (self.low + np.arange(len(self.mass))[::-1]) * self.width
        losses = losses[losses > 0]
        mass = self.mass[::-1][: len(losses)]
        above = self.infinite + np.cumsum(mass)
        # E[exp(-L)] over losses so far; the masses that it weighs underflow to zero where a loss is beyond 745.
        below = np.cumsum(np.exp(-losses) * mass)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            crossing = np.where((above > delta) & (below > 0), np.log((above - delta) / below), -math.inf)
        # After the losses from k on, delta(crossing) is `delta` if no further loss is above that crossing.
        following = np.append(losses[1:], 0.0)
        (found,) = np.nonzero((crossing >= following) | ((above >= delta) & (below == 0)))
        if not len(found):
            return 0.0
        at = int(found[0])
        return max(0.0, float(crossing[at] if below[at] > 0 else losses[at]))


@dataclass(frozen=True, eq=False)
class Pld:
    """The distributions of losses of a pair, in both directions; `add` is None if they are the same."""

    remove: Losses
    add: Losses | None = None

    def plus(self, other: "Pld") -> "Pld":
        """The pair of two releases together, both in the same direction."""
        if self.add is None and other.add is None:
            return Pld(self.remove.plus(other.remove))
        add = (self.add or self.remove).plus(other.add or other.remove)
        return Pld(self.remove.plus(other.remove), add)

    def times(self, count: int) -> "Pld":
        """The pair of `count` such releases together."""
        return Pld(self.remove.times(count), None if self.add is None else self.add.times(count))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which both directions' delta is at most `delta`; inf if there is none."""
        return max(each.epsilon(delta) for each in (self.remove, self.add) if each is not None)


def identity_pld(width: float) -> Pld:
    """The pair of no release."""
    return Pld(Losses(width, 0, np.ones(1), 0.0))


def gaussian_pld(multiplier: float, width: float, rate: float = 1.0) -> Pld:
    """A Gaussian of standard deviation `multiplier`, shifted by one with probability `rate` (Poisson sampling).

    With m = 1 / multiplier and Gaussians of deviation one, (P, Q) is ((1 - q) N(0) + q N(m), N(0)), or the reverse.
    Both deltas are a multiple of the plain Gaussian's at another epsilon:

        q G(ln((e^epsilon - 1 + q) / q))                                        one example more in P
        (1 - (1 - q) e^epsilon) G(epsilon + ln q - ln(1 - (1 - q) e^epsilon))   one example less
    """
    shift = 1 / multiplier

    def loss(at: float) -> float:
        plain = shift * at - shift * shift / 2
        return plain if rate == 1 else float(np.logaddexp(math.log1p(-rate), math.log(rate) + plain))

    if rate == 1:
        plain = Losses.connected(lambda e: gaussian_delta(e, shift), loss(-_TAIL), loss(_TAIL + shift), width)
        return Pld(plain)

    def more(epsilons: Vector) -> Vector:
        ratios = np.expm1(np.minimum(epsilons, 1.0))
        inside = (ratios + rate) / rate
        # Where no output has a lower loss, all of P counts.
        made, some = -ratios, inside > 0
        # Beyond 1 the same without e^epsilon, which overflows where hardly any noise has losses above 700.
        held = np.maximum(epsilons[some], 1.0)
        large = held + np.log1p((rate - 1) * np.exp(-held)) - math.log(rate)
        made[some] = rate * gaussian_delta(np.where(epsilons[some] < 1, np.log(inside[some]), large), shift)
        return made

    def less(epsilons: Vector) -> Vector:
        left = -np.expm1(epsilons + math.log1p(-rate))
        made, some = np.zeros_like(epsilons), left > 0
        made[some] = left[some] * gaussian_delta(epsilons[some] + math.log(rate) - np.log(left[some]), shift)
        return made

    return Pld(
        Losses.connected(more, loss(-_TAIL), loss(_TAIL + shift), width),
        Losses.connected(less, -loss(_TAIL + shift), -loss(-_TAIL), width),
    )


def laplace_pld(epsilon: float, width: float) -> Pld:
    """Laplace noise of scale 1 / epsilon, shifted by one."""

    def delta(epsilons: Vector) -> Vector:
        return -np.expm1(np.where(epsilons < -epsilon, epsilons, np.minimum(0.0, (epsilons - epsilon) / 2)))

    return Pld(Losses.connected(delta, -epsilon, epsilon, width))


@lru_cache(maxsize=64)
def discrete_gaussian_pld(std: float, shift: int, width: float) -> Pld:
    """A discrete Gaussian on the whole numbers, P(x) proportional to exp(-x^2 / (2 std^2)), shifted by whole steps."""
    # Twice the tail of a Gaussian, since a narrow one's sum over whole numbers is no integral.
    most = math.ceil(2 * _TAIL * std) + 1
    at = np.arange(-most, most + 1, dtype=np.float64)
    mass = np.exp(-(at**2) / (2 * std * std))
    # The loss at x is ln(P(x) / P(x - shift)).
    losses = shift * (shift - 2 * at) / (2 * std * std)
    return Pld(Losses.of_atoms(losses, mass / mass.sum(), math.exp(-50), width))


def gaussian_delta(epsilons: Vector, shift: float) -> Vector:
    """G(epsilon) of two Gaussians of deviation one at distance `shift`: Q(a) - e^epsilon Q(b) with Q(x) = P(N > x).

    a and b are epsilon / shift minus and plus shift / 2 (Balle and Wang 2018, theorem 8). Where b is far out, e^epsilon
    Q(b) is phi(a) times Mills' ratio of b, which neither overflows nor vanishes.
    """
    a, b = epsilons / shift - shift / 2, epsilons / shift + shift / 2
    second = np.empty_like(b)
    far = b > _FAR
    second[~far] = np.exp(epsilons[~far]) * _upper(b[~far])
    inverse = 1 / np.square(b[far])
    series, term = np.ones_like(inverse), np.ones_like(inverse)
    for odd in range(1, 21, 2):
        term = -odd * term * inverse
        series += term
    second[far] = np.exp(-np.square(a[far]) / 2) / math.sqrt(2 * math.pi) * series / b[far]
    return np.maximum(0.0, _upper(a) - second)


def _upper(at: Vector) -> Vector:
    """Q(x), the mass of a standard Gaussian above x."""
    return 0.5 * np.asarray(_erfc(at / math.sqrt(2)), dtype=np.float64)


def _fast(least: int) -> int:
    """The smallest length from `least` up with no prime factor above five, which transforms take least time for."""
    best = 1 << (least - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            # The smallest power of two that makes it long enough.
            two = 1 << max(0, (-(-least // three) - 1).bit_length())
            best = min(best, three * two)
            three *= 3
        five *= 5
    return best
