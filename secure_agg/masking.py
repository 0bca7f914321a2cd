"""Masks as streams: many streams added into one vector, in place, block by block, on as many cores as there are.

Guarantees: a whole mask is never in memory; a block of the vector stays in the processor's cache while every
stream is added to it; the result is the same to the bit for any number of threads; arithmetic is modulo 2^32 and
reduced to 2^b at the end, which is the same as reducing each step because 2^b divides 2^32. A stream is the
AES-256-CTR key stream of its 32-byte key, read as little-endian uint32.

Each thread has a range of the vector to itself and enters every stream at the range's own place, which counter mode
allows; the cipher and numpy's addition both release the interpreter lock.
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
# A range starts on a line of the cache, which is also the start of a cipher block.
_LINE_VALUES = 16
# So many streams at a time are open: what a cipher keeps for each adds up where they are tens of thousands.
_BATCH = 1024
# Below this a range is not worth a thread: opening the streams once more costs more than it saves.
_MIN_RANGE_BYTES = 64 * 1024
# Below this much stream in all, starting threads costs more than they save.
_MIN_WORK_BYTES = 8 * 1024 * 1024

RING_DTYPE = np.dtype("<u4")
"""The one type of a ring vector. On the usual (little-endian) machine it equals np.uint32."""


@dataclass(frozen=True, slots=True)
class MaskStream:
    """One mask: the 32-byte key it grows from, and whether it is added or subtracted."""

    key: bytes = field(repr=False)
    add: bool


def apply_streams(
    vector: NDArray[np.uint32], streams: Iterable[MaskStream], bits: int, *, threads: int | None = None
) -> None:
    """vector += or -= every stream, modulo 2^bits, in place. `vector` has passed `check_vector`.

    threads: at most so many work at once; as many as this process has cores unless given, and fewer where there is
    little to do. The result does not depend on it. Raises ValueError for less than one.
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
    """At most `parts` ranges that make up 0 to `values`, about equal, each but the last a whole number of lines of the
    cache long; one range, if need be an empty one, at least.
    """
    lines = -(-values // _LINE_VALUES)
    parts = max(1, min(parts, lines))
    edges = [lines * part // parts * _LINE_VALUES for part in range(parts)]
    return tuple(slice(start, end) for start, end in zip(edges, [*edges[1:], values], strict=True))


def threads_for(vector_bytes: int, streams: int) -> int:
    """How many threads make so many streams over a vector of so many bytes fastest, on the cores this process has."""
    if vector_bytes * streams < _MIN_WORK_BYTES:
        return 1
    return max(1, min(_cores(), vector_bytes // _MIN_RANGE_BYTES))


def _cores() -> int:
    # What this process may use, where the system can tell: a container often has fewer cores than the machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _apply(vector: NDArray[np.uint32], streams: Sequence[MaskStream], bits: int, part: slice) -> None:
    """`apply_streams` on one range, which starts on a cipher block."""
    values = part.stop - part.start
    scratch = StreamScratch(min(BLOCK_BYTES, values * _VALUE_BYTES))
    out, words = scratch.out, scratch.view.view(RING_DTYPE)
    counter = (part.start * _VALUE_BYTES // CIPHER_BLOCK).to_bytes(CIPHER_BLOCK, "big")
    # The two calls of the inner loop, looked up once; a thousand streams go through it for every block.
    steps = [(stream_writer(stream.key, counter), np.add if stream.add else np.subtract) for stream in streams]
    for start in range(part.start, part.stop, _BLOCK_VALUES):
        block = vector[start : min(start + _BLOCK_VALUES, part.stop)]
        zeros, mask = scratch.zeros[: block.nbytes], words[: block.size]
        for write, combine in steps:
            write(zeros, out)
            combine(block, mask, block)
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


def check_threads(threads: int | None) -> None:
    """Raise ValueError unless `threads` is a number of threads, or None for as many as there are cores."""
    if threads is not None and threads < 1:
        raise ValueError(f"masks are expanded by at least one thread, got {threads}; leave it out for all cores")


class Accumulator:
    """The running sum of masked vectors: one array of d values, whatever the number of members."""

    __slots__ = ("bits", "total")

    def __init__(self, values: int, bits: int) -> None:
        self.bits = bits
        self.total: NDArray[np.uint32] = np.zeros(values, dtype=RING_DTYPE)

    def add(self, chunk: bytes | bytearray | memoryview, offset: int) -> None:
        """Add the packed values of `chunk` at `offset` (in values, a multiple of 8). Errors as `add_packed`."""
        add_packed(self.total, chunk, offset, self.bits)


def _reduce(block: NDArray[np.uint32], bits: int) -> None:
    if bits < 32:
        np.bitwise_and(block, np.uint32((1 << bits) - 1), out=block)
