"""Masks as streams: many streams added into one vector, in place, block by block.

Guarantees: a whole mask is never in memory; a block of the vector stays in the processor's cache while every
stream is added to it; arithmetic is modulo 2^32 and reduced to 2^b at the end, which is the same as reducing
each step because 2^b divides 2^32. A stream is the AES-256-CTR key stream of its 32-byte key, read as
little-endian uint32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from secure_agg.randomness import KeyStream, StreamScratch

__all__ = [
    "BLOCK_BYTES",
    "RING_DTYPE",
    "Accumulator",
    "MaskStream",
    "add_into",
    "apply_streams",
    "check_vector",
]

BLOCK_BYTES = 512 * 1024
_VALUE_BYTES = 4
_BLOCK_VALUES = BLOCK_BYTES // _VALUE_BYTES

RING_DTYPE = np.dtype("<u4")
"""The one type of a ring vector. On the usual (little-endian) machine it equals np.uint32."""


@dataclass(frozen=True, slots=True)
class MaskStream:
    """One mask: the 32-byte key it grows from, and whether it is added or subtracted."""

    key: bytes = field(repr=False)
    add: bool


def apply_streams(vector: NDArray[np.uint32], streams: Iterable[MaskStream], bits: int) -> None:
    """vector += or -= every stream, modulo 2^bits, in place. `vector` has passed `check_vector`."""
    scratch = StreamScratch(min(BLOCK_BYTES, vector.size * _VALUE_BYTES))
    running = [(KeyStream(stream.key, scratch), stream.add) for stream in streams]
    words = scratch.view.view(RING_DTYPE)
    for start in range(0, vector.size, _BLOCK_VALUES):
        block = vector[start : start + _BLOCK_VALUES]
        for stream, add in running:
            stream.read(block.nbytes, scratch)
            (np.add if add else np.subtract)(block, words[: block.size], out=block)
        _reduce(block, bits)


def check_vector(vector: NDArray[np.uint32], values: int, bits: int) -> None:
    """Raise ValueError unless `vector` is `values` numbers below 2^bits, to be worked on in place."""
    if not isinstance(vector, np.ndarray) or vector.dtype != RING_DTYPE or vector.ndim != 1:
        raise ValueError("a ring vector is a one-dimensional numpy array of little-endian uint32")
    if vector.size != values:
        raise ValueError(f"the context fixes {values} values, the vector has {vector.size}")
    if not vector.flags.c_contiguous or not vector.flags.writeable:
        raise ValueError("a ring vector is worked on in place: it must be contiguous and writable")
    if bits < 32 and vector.size and int(vector.max()) >> bits:
        raise ValueError(f"a value lies outside the ring of {bits} bits")


def add_into(total: NDArray[np.uint32], chunk: bytes | bytearray | memoryview, offset: int, bits: int) -> None:
    """Add a chunk of an upload to the running sum, modulo 2^bits, in place.

    chunk: little-endian uint32 values. offset: index of the chunk's first value. Raises ValueError when the
    chunk is not a whole number of values, or reaches outside the sum; nothing is added then.
    """
    if len(memoryview(chunk).cast("B")) % _VALUE_BYTES:
        raise ValueError("a chunk holds whole values of four bytes")
    values = np.frombuffer(chunk, dtype=RING_DTYPE)
    if offset < 0 or offset + values.size > total.size:
        raise ValueError(f"a chunk of {values.size} values at {offset} reaches outside a sum of {total.size}")
    part = total[offset : offset + values.size]
    np.add(part, values, out=part)
    _reduce(part, bits)


class Accumulator:
    """The running sum of masked vectors: one array of d values, whatever the number of members."""

    __slots__ = ("bits", "total")

    def __init__(self, values: int, bits: int) -> None:
        self.bits = bits
        self.total: NDArray[np.uint32] = np.zeros(values, dtype=RING_DTYPE)

    def add(self, chunk: bytes | bytearray | memoryview, offset: int) -> None:
        """Add `chunk` at `offset` (in values). Errors as `add_into`."""
        add_into(self.total, chunk, offset, self.bits)


def _reduce(block: NDArray[np.uint32], bits: int) -> None:
    if bits < 32:
        np.bitwise_and(block, np.uint32((1 << bits) - 1), out=block)
