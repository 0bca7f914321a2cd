"""Arithmetic modulo the prime p = 2^61 - 1, on arrays of uint64 below p.

Products of matrices run in float64, limb by limb: a limb has at most 21 bits, so a sum of 2^11 products is exact.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_256

import numpy as np
from numpy.typing import NDArray

from secure_agg.randomness import RandomSource

__all__ = ["ELEMENT_BYTES", "Elements", "P", "dot", "drawn", "hashed", "interpolation", "mul", "reduce", "sub", "total"]

P = 2**61 - 1
ELEMENT_BYTES = 8

Elements = NDArray[np.uint64]

_P = np.uint64(P)
_LIMBS = ((0, 21), (21, 20), (41, 20))
_MAX_TERMS = 2**11


def _u(number: int) -> np.uint64:
    return np.uint64(number)


def reduce(values: Elements) -> Elements:
    """Returns any uint64 modulo p."""
    folded = (values & _P) + (values >> _u(61))
    return np.where(folded >= _P, folded - _P, folded)


def sub(left: Elements, right: Elements) -> Elements:
    """Returns the difference."""
    return reduce(left + (_P - right))


def mul(left: Elements, right: Elements) -> Elements:
    """Returns the product of each pair, by schoolbook multiplication of halves of 31 and 30 bits."""
    low = _u(2**31 - 1)
    a, b, c, d = left >> _u(31), left & low, right >> _u(31), right & low
    middle = a * d + b * c
    # 2^62 = 2 and 2^61 = 1 modulo p. The four terms add up to less than 2^64.
    return reduce(_u(2) * (a * c) + (middle >> _u(30)) + ((middle & _u(2**30 - 1)) << _u(31)) + b * d)


def dot(left: Elements, right: "Elements | Limbs") -> Elements:
    """Returns the product of two matrices of shapes (r, c) and (c, n).

    Args:
        left: the first matrix.
        right: the second one, or its limbs if it is used often.

    Raises:
        ValueError: c is above 2^11, so that float64 would not be exact.
    """
    if left.shape[1] > _MAX_TERMS:
        raise ValueError(f"a product of matrices has at most {_MAX_TERMS} terms, got {left.shape[1]}; split it")
    rights = right if isinstance(right, Limbs) else Limbs.of(right)
    result = np.zeros((left.shape[0], rights.columns), dtype=np.uint64)
    for at, part in Limbs.of(left).parts:
        for beside, other in rights.parts:
            product = (part @ other).astype(np.uint64)
            result = reduce(result + _times_power_of_two(product, at + beside))
    return result


def _times_power_of_two(values: Elements, power: int) -> Elements:
    """Returns values * 2^power: 2^61 is 1 modulo p, so the 61 bits rotate."""
    places = power % 61
    return ((values << _u(places)) & _P) | (values >> _u(61 - places))


@dataclass(frozen=True)
class Limbs:
    """A matrix in limbs.

    Args:
        columns: its number of columns.
        parts: the limbs that are not all zero, each with its place.
    """

    columns: int
    parts: tuple[tuple[int, NDArray[np.float64]], ...]

    @classmethod
    def of(cls, values: Elements) -> "Limbs":
        """Splits a matrix."""
        parts = ((at, (values >> _u(at)) & _u(2**bits - 1)) for at, bits in _LIMBS)
        return cls(values.shape[1], tuple((at, part.astype(np.float64)) for at, part in parts if part.any()))


def total(values: Elements) -> int:
    """Returns the sum of all elements modulo p."""
    return sum(values.ravel().tolist()) % P


def hashed(count: int, *parts: bytes) -> Elements:
    """Returns `count` elements from SHAKE256 over the framed parts. Their bias is below 2^-60."""
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return _from_bytes(shake_256(framed).digest(ELEMENT_BYTES * count))


def drawn(random: RandomSource, *shape: int) -> Elements:
    """Returns random elements of a shape."""
    return _from_bytes(random.bytes(ELEMENT_BYTES * int(np.prod(shape)))).reshape(shape)


def _from_bytes(data: bytes) -> Elements:
    return reduce(np.frombuffer(data, dtype="<u8") & _P)


def interpolation(nodes: int, points: NDArray[np.int64]) -> Elements:
    """Returns the matrix, shape (len(points), nodes), that takes a polynomial's values at 0 .. nodes - 1 to `points`.

    Args:
        nodes: the polynomial's degree is below it.
        points: whole numbers from `nodes` up.
    """
    factorials, below, inverses = _tables(int(points.max()) + 1)
    weights = [below[i] * below[nodes - 1 - i] * (-1) ** (nodes - 1 - i) % P for i in range(nodes)]
    # The product of (x - j) over the nodes is x! / (x - nodes)!.
    whole = [factorials[x] * below[x - nodes] % P for x in points.tolist()]
    distances = points[:, None] - np.arange(nodes)[None, :]
    outer = mul(np.array(whole, dtype=np.uint64)[:, None], np.array(weights, dtype=np.uint64)[None, :])
    return mul(outer, inverses[distances])


@lru_cache(maxsize=4)
def _tables(size: int) -> tuple[list[int], list[int], Elements]:
    """Returns i!, 1 / i! and 1 / i modulo p for all i below `size` (0 for 1 / 0)."""
    factorials, below, inverses = [1], [1], [0, 1]
    for i in range(2, size):
        inverses.append((P - P // i) * inverses[P % i] % P)
    for i in range(1, size):
        factorials.append(factorials[-1] * i % P)
        below.append(below[-1] * inverses[i] % P)
    return factorials, below, np.array(inverses[:size], dtype=np.uint64)
