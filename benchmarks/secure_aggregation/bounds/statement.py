"""What a member proves about its projections, as bits, squares and linear equations.

The witness, first commitment: the bits of every projection (so that it is within T), the bits of what is left up to K,
the bits of a pad for each combination, the projections themselves, and their squares. Second commitment, once the
combinations are known: the bits of a carry for each.

The equations, all in the field: each projection is what its bits say; the squares and the rest add up to K; each
combination of projections plus its pad is the public number, plus the carry times 2^b. Nothing wraps in the field.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.secure_aggregation.bounds.argument import WIDTH, Equations, Relation
from benchmarks.secure_aggregation.bounds.field import Elements, P
from benchmarks.secure_aggregation.bounds.numbers import Numbers

__all__ = ["OutOfBounds", "Statement"]


class OutOfBounds(ValueError):
    """The projections are too long, so there is nothing to prove."""


def weights_up_to(most: int) -> list[int]:
    """Returns weights whose sums are all numbers from 0 to `most` and no other."""
    places = most.bit_length()
    return [1 << i for i in range(places - 1)] + [most - (1 << places - 1) + 1]


def bits_of(number: int, most: int) -> list[int]:
    """Returns a choice of the weights that adds up to `number`."""
    weights = weights_up_to(most)
    last = int(number >= 1 << len(weights) - 1)
    rest = number - last * weights[-1]
    return [rest >> i & 1 for i in range(len(weights) - 1)] + [last]


@dataclass(frozen=True)
class Statement:
    """The layout of the witness for some numbers in a ring of `bits` bits."""

    numbers: Numbers
    bits: int

    def __post_init__(self) -> None:
        if self.numbers.projections > WIDTH:
            raise ValueError(f"the argument holds {WIDTH} projections, got {self.numbers.projections}")
        if self.numbers.bits > self.bits:
            raise ValueError(f"this test needs a ring of {self.numbers.bits} bits, got {self.bits}")
        if self.numbers.projections * self.numbers.max_projection**2 >= P:
            raise ValueError("the squares wrap in the field; choose a smaller norm")

    @cached_property
    def _fields(self) -> tuple[tuple[int, int], ...]:
        """How many numbers of each kind have bits, and the largest: projections, rest, pads."""
        k, most = self.numbers.projections, self.numbers.max_projection
        return (k, 2 * most), (1, self.numbers.max_squares), (self.numbers.combinations, (1 << self.bits) - 1)

    @property
    def _carry(self) -> int:
        """The largest carry, in either direction."""
        return (self.numbers.projections * self.numbers.max_projection >> self.bits) + 2

    @cached_property
    def bit_rows(self) -> int:
        """Rows of bits in the first commitment."""
        return -(-sum(count * most.bit_length() for count, most in self._fields) // WIDTH)

    @property
    def late_rows(self) -> int:
        """Rows of the second commitment."""
        return -(-self.numbers.combinations * (2 * self._carry).bit_length() // WIDTH)

    def first(self, projected: NDArray[np.int64], pads: NDArray[np.int64]) -> Elements:
        """Returns the rows of the first commitment.

        Raises:
            OutOfBounds: the projections do not keep the bounds.
        """
        z = [int(each) for each in projected]
        rest = self.numbers.max_squares - sum(each * each for each in z)
        if max(map(abs, z)) > self.numbers.max_projection or rest < 0:
            raise OutOfBounds("the vector is longer than the bound allows; clip it before it is masked")
        numbers = ([each + self.numbers.max_projection for each in z], [rest], pads.tolist())
        kinds = zip(self._fields, numbers, strict=True)
        flat = [bit for (_, most), kind in kinds for number in kind for bit in bits_of(number, most)]
        result = np.zeros((self.bit_rows + 2, WIDTH), dtype=np.uint64)
        result.ravel()[: len(flat)] = flat
        result[-2, : len(z)] = [each % P for each in z]
        result[-1, : len(z)] = [each * each % P for each in z]
        return result

    def late(self, sums: NDArray[np.int64]) -> Elements:
        """Returns the rows of the second commitment. sums: each combination plus its pad, not reduced."""
        flat = [bit for each in sums.tolist() for bit in bits_of((each >> self.bits) + self._carry, 2 * self._carry)]
        result = np.zeros((self.late_rows, WIDTH), dtype=np.uint64)
        result.ravel()[: len(flat)] = flat
        return result

    def relation(self, linear: Equations, public: NDArray[np.int64]) -> Relation:
        """Returns what one member proves, given its public combinations. linear: from `linear`, equal for all."""
        shift = self._carry << self.bits
        offset = [self.numbers.max_projection] * self.numbers.projections
        right = [*offset, self.numbers.max_squares, *((int(each) - shift) % P for each in public)]
        return Relation(self.bit_rows, self.late_rows, linear, np.array(right, dtype=np.uint64))

    def linear(self, weights: NDArray[np.uint8]) -> Equations:
        """Returns the left sides of all equations, given W."""
        k, combinations = self.numbers.projections, self.numbers.combinations
        z, squares, late = (WIDTH * (self.bit_rows + row) for row in range(3))
        of_z, of_rest, of_pads = (weights_up_to(most) for _, most in self._fields)
        of_carries = [P - (weight << self.bits) for weight in weights_up_to(2 * self._carry)]
        at_rest = k * len(of_z)
        at_pads = at_rest + len(of_rest)
        entries: list[tuple[int, int, int]] = []

        def add(equation: int, start: int, values: list[int]) -> None:
            entries.extend((equation, start + i, value) for i, value in enumerate(values) if value)

        for j in range(k):
            add(j, j * len(of_z), of_z)
            add(j, z + j, [P - 1])
        add(k, squares, [1] * k)
        add(k, at_rest, of_rest)
        for i in range(combinations):
            add(k + 1 + i, z, weights[i].tolist())
            add(k + 1 + i, at_pads + i * len(of_pads), of_pads)
            add(k + 1 + i, late + i * len(of_carries), of_carries)
        rows, places, values = zip(*entries, strict=True)
        width = late + WIDTH * self.late_rows
        return Equations(np.array(rows), np.array(places), np.array(values, dtype=np.uint64), width)
