"""The discrete Gaussian of Canonne, Kamath and Steinke 2020, drawn from an exact table.

    P[X = k] = exp(-k^2 / (2 s^2)) / sum over all whole j of exp(-j^2 / (2 s^2))

Guarantees: one draw differs from that law by less than 2^-100 in total variation, including the truncated tail. No draw
exceeds `largest` in magnitude. Draws are exactly symmetric. The table is computed in whole numbers only, so it is the
same on every machine. Assumption: uniform stream bytes (AES-256-CTR under a fresh key from the source passed in).

Why a table and not the paper's rejection sampler (Algorithm 3): members draw tens of millions of values a round, and a
table needs one look-up for each, in a number of steps that does not depend on the result. The total variation adds up:
d values drawn by h members are within h d 2^-100 of the ideal, below 2^-67 for a hundred members and sixty million
values. That adds (1 + e^epsilon) times as much to a delta at epsilon (docs/accounting.md).

It does not hide which table entries were used from another process on the same machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from secure_agg.randomness import KeyStream, RandomSource, StreamScratch

__all__ = ["MAX_STD", "MIN_STD", "DiscreteGaussian"]

MIN_STD = 1 / 16
MAX_STD = 65536.0
"""A table has about 12 s entries; this one has 770,000."""

# Fixed-point bits of the weights: errors of the recurrence below stay under k^2 2^-256 < 2^-216.
_PLACES = 256
# Half of the allowed total variation goes to the tail; rounding the weights takes less than 2^-107.
_TAIL_BITS = 101
# 127 bits decide a magnitude: the first word except its top bit, which is the sign, and a second word for ties.
_MASS_BITS = 127
_LOW_63 = np.uint64(2**63 - 1)
_WORD_MASK = 2**64 - 1

_BLOCK_VALUES = 16 * 1024


@dataclass(frozen=True, slots=True)
class DiscreteGaussian:
    """The discrete Gaussian on the whole numbers with parameter s = `std`, a number from 1/16 to 65,536.

    The theorems are about s. The actual standard deviation is below s, by less than one part in 10^15 from s = 1.5 up.
    The first use of an s builds its table, which takes 0.1 seconds of one core for s = 4096 and 0.3 for 16384. Tables
    are cached in the process.

    Raises:
        ValueError: s is out of range.
    """

    std: float

    def __post_init__(self) -> None:
        s = self.std
        if not isinstance(s, (int, float)) or isinstance(s, bool) or not MIN_STD <= s <= MAX_STD:
            raise ValueError(
                f"the parameter s of a discrete Gaussian is a number from 1/16 to {MAX_STD:g} steps of the "
                f"grid, got {s!r}; choose a finer or coarser grid"
            )
        object.__setattr__(self, "std", float(s))

    @property
    def largest(self) -> int:
        """The largest magnitude that can be drawn, about 12 s."""
        return _table(self.std).largest

    def sample(self, count: int, random: RandomSource) -> NDArray[np.int32]:
        """Returns `count` independent draws. Takes 32 bytes from `random`."""
        drawn: NDArray[np.int32] = np.zeros(count, dtype="<i4")
        self.add_into(drawn, random)
        return drawn

    def add_into(self, vector: NDArray[np.int32], random: RandomSource) -> None:
        """Adds one draw to every value of `vector`, in place, block by block. Takes 32 bytes from `random`.

        The caller must ensure that no value leaves 32 bits; a draw has a magnitude of at most `largest`.
        """
        table = _table(self.std)
        scratch = StreamScratch(8 * min(_BLOCK_VALUES, max(1, vector.size)))
        stream = KeyStream(random.bytes(32), scratch)
        for start in range(0, vector.size, _BLOCK_VALUES):
            block = vector[start : start + _BLOCK_VALUES]
            np.add(block, table.draw(block.size, stream, scratch), out=block, casting="same_kind")


@dataclass(frozen=True, slots=True)
class AliasTable:
    """Walker's alias table (1977) of magnitudes, over 2^columns columns of equal mass, in exact integers.

    Column i yields its own magnitude i if 127 - columns further bits, read as a number, are below a threshold T, and
    otherwise its alias.

    Args:
        columns: log2 of the number of columns.
        packed: for each column, the top 63 - columns bits of T above `columns` bits of i xor alias, so that one look-up
            yields both.
        rest: for each column, the low 64 bits of T.
        largest: the largest magnitude.
    """

    columns: int
    packed: NDArray[np.uint64]
    rest: NDArray[np.uint64]
    largest: int

    def draw(self, count: int, stream: KeyStream, scratch: StreamScratch) -> NDArray[np.int64]:
        """Returns `count` signed draws. `scratch` must hold at least 8 * count bytes."""
        words = stream.read(8 * count, scratch).view("<u8")
        low = np.uint64((1 << self.columns) - 1)
        column = words & low
        # An arithmetic shift: all ones for a negative draw, else zero.
        sign = words.view("<i8") >> np.int64(63)
        words = words & _LOW_63
        # Every index is below the table's length; "clip" only spares numpy a checked copy.
        found = np.take(self.packed, column.view("<i8"), mode="clip")
        # Below the threshold the difference is negative, so its sign is all ones, which inverted mask the alias out.
        # This also holds for a full column, whose threshold is 2^63.
        beyond = ~((words - found).view("<i8") >> np.int64(63))
        magnitude: NDArray[np.int64] = column.view("<i8") ^ ((found & low).view("<i8") & beyond)
        words ^= found
        tied = words <= low
        if tied.any():
            self._settle(np.flatnonzero(tied), column, magnitude, stream, scratch)
        # Two's complement: inverting and adding one negates the value.
        magnitude ^= sign
        magnitude -= sign
        return magnitude

    def _settle(
        self,
        places: NDArray[np.intp],
        column: NDArray[np.uint64],
        magnitude: NDArray[np.int64],
        stream: KeyStream,
        scratch: StreamScratch,
    ) -> None:
        """Decides by a second word where the first equals the threshold's top, once in about 2^47 draws."""
        chosen = column[places].view("<i8")
        second = stream.read(8 * places.size, scratch).view("<u8")
        flip = (self.packed[chosen] & np.uint64((1 << self.columns) - 1)).view("<i8")
        magnitude[places] = np.where(second < self.rest[chosen], chosen, chosen ^ flip)


def magnitude_masses(std: float) -> list[int]:
    """Probabilities of the magnitudes 0, 1, ... in units of 2^-127. They add up to exactly 2^127.

    The list ends where all larger magnitudes together have a probability below 2^-101 under the ideal law.
    """
    weights = _weights(Fraction(std))
    total = sum(weights)
    masses = [(weight << _MASS_BITS) // total for weight in weights]
    masses[0] += (1 << _MASS_BITS) - sum(masses)
    return masses


def _weights(s: Fraction) -> list[int]:
    """exp(-k^2 / (2 s^2)) in units of 2^-256, doubled for k > 0 because a magnitude stands for two values."""
    one = 1 << _PLACES
    # With q = exp(-1 / (2 s^2)) the weight of k is q^(k^2), and the next one is q^(2k + 1) times that.
    q = _exp_of_minus(1 / (2 * s * s))
    square = q * q >> _PLACES
    weights = [one]
    total = one
    weight, ratio = one, q
    while True:
        weight = weight * ratio >> _PLACES
        ratio = ratio * square >> _PLACES
        # All further ratios are smaller, so a geometric series bounds the rest. `total` bounds the normaliser from
        # below.
        if (2 * weight << (_TAIL_BITS + _PLACES)) < total * (one - ratio):
            return weights
        weights.append(2 * weight)
        total += 2 * weight


def _exp_of_minus(x: Fraction) -> int:
    """exp(-x) for x > 0 in units of 2^-256, within two units: the series for a small argument, then squarings."""
    guarded = _PLACES + 64
    halvings = max(0, math.ceil(x).bit_length())
    small = x / 2**halvings
    term = total = 1 << guarded
    n = 0
    while term:
        n += 1
        term = term * small.numerator // (small.denominator * n)
        total += -term if n % 2 else term
    for _ in range(halvings):
        total = total * total >> guarded
    return total >> 64


def alias_table(masses: list[int]) -> AliasTable:
    """Builds the alias table of magnitudes with these masses, which add up to 2^127 (Vose 1991, in whole numbers)."""
    columns = max(1, (len(masses) - 1).bit_length())
    size = 1 << columns
    share = 1 << (_MASS_BITS - columns)
    left = masses + [0] * (size - len(masses))
    keep = [share] * size
    flips = [0] * size
    small = [column for column in range(size) if left[column] < share]
    large = [column for column in range(size) if left[column] >= share]
    while small:
        column, donor = small.pop(), large[-1]
        keep[column] = left[column]
        flips[column] = column ^ donor
        left[donor] -= share - left[column]
        if left[donor] < share:
            large.pop()
            small.append(donor)
    packed = np.array([(t >> 64 << columns) | flip for t, flip in zip(keep, flips, strict=True)], dtype=np.uint64)
    rest = np.array([threshold & _WORD_MASK for threshold in keep], dtype=np.uint64)
    # All draws with this standard deviation share them.
    packed.setflags(write=False)
    rest.setflags(write=False)
    return AliasTable(columns, packed, rest, len(masses) - 1)


@lru_cache(maxsize=8)
def _table(std: float) -> AliasTable:
    return alias_table(magnitude_masses(std))
