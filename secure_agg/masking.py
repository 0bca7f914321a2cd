"""Adds masks, which are key streams, into a vector: in place, block by block, on all cores.

Guarantees: a whole mask is never in memory. A block of the vector stays in the processor's cache while every stream is
added to it. The result is the same to the bit for any number of threads. Arithmetic is modulo 2^32 and reduced to 2^b
at the end, which equals reducing each step because 2^b divides 2^32. A stream is the AES-256-CTR key stream of its
32-byte key, read as little-endian uint32.

Each thread works on its own range of the vector and starts every stream at the range's position, which counter mode
allows. The cipher and numpy's addition both release the interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from secure_agg.packing import add_packed
from secure_agg.randomness import CIPHER_BLOCK, StreamScratch, stream_writer

__all__ = [
    "BLOCK_BYTES",
    "RING_DTYPE",
    "Accumulator",
    "MaskStream",
    "apply_streams",
    "check_threads",
    "check_vector",
    "split",
    "threads_for",
]

BLOCK_BYTES = 256 * 1024
_VALUE_BYTES = 4
_BLOCK_VALUES = BLOCK_BYTES // _VALUE_BYTES
# A range starts on a cache line, which is also the start of a cipher block.
_LINE_VALUES = 16
# Streams that are open at a time. Each cipher has state, which adds up with tens of thousands of them.
_BATCH = 1024
# A smaller range is not worth a thread: opening the streams once more costs more than it saves.
_MIN_RANGE_BYTES = 64 * 1024
# For less stream in total, starting threads costs more than they save.
_MIN_WORK_BYTES = 8 * 1024 * 1024

RING_DTYPE = np.dtype("<u4")
"""The only type of a ring vector. On a little-endian machine, i.e. nearly all, it equals np.uint32."""


@dataclass(frozen=True, slots=True)
class MaskStream:
    """One mask: the 32-byte key of its stream, and whether it is added or subtracted."""

    key: bytes = field(repr=False)
    add: bool


def apply_streams(
    vector: NDArray[np.uint32], streams: Iterable[MaskStream], bits: int, *, threads: int | None = None
) -> None:
    """Adds every stream to `vector`, or subtracts it, modulo 2^bits, in place.

    Args:
        vector: has passed `check_vector`.
        streams: the masks.
        bits: width of the ring.
        threads: maximum number of threads; by default one per core of this process, and fewer if there is little to do.
            The result does not depend on it.

    Raises:
        ValueError: `threads` is below one.
    """
    check_threads(threads)
    rest = iter(streams)
    while batch := tuple(islice(rest, _BATCH)):
        ranges = split(vector.size, threads_for(vector.nbytes, len(batch)) if threads is None else threads)
        if len(ranges) == 1:
            _apply(vector, batch, bits, ranges[0])
            continue
        with ThreadPoolExecutor(len(ranges) - 1) as others:
            running = [others.submit(_apply, vector, batch, bits, part) for part in ranges[1:]]
            _apply(vector, batch, bits, ranges[0])
            for each in running:
                each.result()


def split(values: int, parts: int) -> tuple[slice, ...]:
    """Splits 0 to `values` into at most `parts` ranges of about equal length. Every range but the last is a whole
    number of cache lines long. There is always at least one range, which may be empty.
    """
    lines = -(-values // _LINE_VALUES)
    parts = max(1, min(parts, lines))
    edges = [lines * part // parts * _LINE_VALUES for part in range(parts)]
    return tuple(slice(start, end) for start, end in zip(edges, [*edges[1:], values], strict=True))


def threads_for(vector_bytes: int, streams: int) -> int:
    """The fastest number of threads for that many streams over a vector of that size, on this process's cores."""
    if vector_bytes * streams < _MIN_WORK_BYTES:
        return 1
    return max(1, min(_cores(), vector_bytes // _MIN_RANGE_BYTES))


def _cores() -> int:
    # The cores that this process may use, if the system can tell: a container often has fewer than the machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _apply(vector: NDArray[np.uint32], streams: Sequence[MaskStream], bits: int, part: slice) -> None:
    """Applies streams to one range, which starts on a cipher block."""
    values = part.stop - part.start
    scratch = StreamScratch(min(BLOCK_BYTES, values * _VALUE_BYTES))
    out, words = scratch.out, scratch.view.view(RING_DTYPE)
    counter = (part.start * _VALUE_BYTES // CIPHER_BLOCK).to_bytes(CIPHER_BLOCK, "big")
    # The two functions of the inner loop are looked up once, because a thousand streams run through it for every block.
    steps = [(stream_writer(stream.key, counter), np.add if stream.add else np.subtract) for stream in streams]
    for start in range(part.start, part.stop, _BLOCK_VALUES):
        block = vector[start : min(start + _BLOCK_VALUES, part.stop)]
        zeros, mask = scratch.zeros[: block.nbytes], words[: block.size]
        for write, combine in steps:
            write(zeros, out)
            combine(block, mask, block)
        _reduce(block, bits)


def check_vector(vector: NDArray[np.uint32], values: int, bits: int) -> None:
    """Checks that `vector` holds `values` numbers below 2^bits and can be changed in place.

    Raises:
        ValueError: it does not or cannot.
    """
    if not isinstance(vector, np.ndarray) or vector.dtype != RING_DTYPE or vector.ndim != 1:
        raise ValueError("a ring vector is a one-dimensional numpy array of little-endian uint32")
    if vector.size != values:
        raise ValueError(f"the context fixes {values} values, the vector has {vector.size}")
    if not vector.flags.c_contiguous or not vector.flags.writeable:
        raise ValueError("a ring vector is changed in place, so it must be contiguous and writable")
    if bits < 32 and vector.size and int(vector.max()) >> bits:
        raise ValueError(f"a value lies outside the ring of {bits} bits")


def check_threads(threads: int | None) -> None:
    """Checks a number of threads; None means one per core.

    Raises:
        ValueError: it is below one.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"expanding masks needs at least one thread, got {threads}; leave it out for all cores")


class Accumulator:
    """The running sum of masked vectors: one array of d values for any number of members."""

    __slots__ = ("bits", "total")

    def __init__(self, values: int, bits: int) -> None:
        self.bits = bits
        self.total: NDArray[np.uint32] = np.zeros(values, dtype=RING_DTYPE)

    def add(self, chunk: bytes | bytearray | memoryview, offset: int) -> None:
        """Adds the packed values of `chunk` at `offset` (in values, a multiple of 8). Raises like `add_packed`."""
        add_packed(self.total, chunk, offset, self.bits)


def _reduce(block: NDArray[np.uint32], bits: int) -> None:
    if bits < 32:
        np.bitwise_and(block, np.uint32((1 << bits) - 1), out=block)
