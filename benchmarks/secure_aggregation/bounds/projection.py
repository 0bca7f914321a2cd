"""Random projections of ring vectors, from a seed, block by block and exact in float64."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from secure_agg.randomness import KeyStream, StreamScratch

__all__ = ["combine", "project"]

_BLOCK_VALUES = 4096

Ring = NDArray[np.uint32]


def _coins(seed: bytes, projections: int, values: int) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Yields R block by block: a range of columns, and the coins there."""
    scratch = StreamScratch(projections * _BLOCK_VALUES // 4)
    stream = KeyStream(seed, scratch)
    for start in range(0, values, _BLOCK_VALUES):
        columns = slice(start, min(start + _BLOCK_VALUES, values))
        pairs = np.unpackbits(stream.read(scratch.capacity, scratch)).reshape(2, projections, _BLOCK_VALUES)
        coins = pairs[0].astype(np.int8) - pairs[1].astype(np.int8)
        yield columns, coins[:, : columns.stop - start].astype(np.float64)


def project(seed: bytes, vector: Ring, projections: int, bits: int) -> NDArray[np.int64]:
    """Returns R x modulo 2^bits as signed numbers, shape (projections,)."""
    result = np.zeros(projections, dtype=np.int64)
    for columns, coins in _coins(seed, projections, vector.size):
        # 4096 products below 2^32 are exact.
        result += (coins @ vector[columns].astype(np.float64)).astype(np.int64)
    return (result + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def combine(seed: bytes, weights: NDArray[np.uint8], vectors: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """Returns W R x modulo 2^bits for several vectors.

    Args:
        seed: of R.
        weights: W, zeros and ones, shape (combinations, projections).
        vectors: shape (vectors, d).
        bits: width of the ring.

    Returns:
        Numbers from 0 to 2^bits - 1, shape (vectors, combinations).
    """
    result = np.zeros((vectors.shape[0], weights.shape[0]), dtype=np.int64)
    sums = weights.astype(np.float64)
    for columns, coins in _coins(seed, weights.shape[1], vectors.shape[1]):
        # At most 4096 products of 2^8 and 2^32: 2^52, exact.
        result += (vectors[:, columns].astype(np.float64) @ (sums @ coins).T).astype(np.int64)
    return result % (1 << bits)
