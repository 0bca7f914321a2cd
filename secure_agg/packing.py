"""Packs ring vectors into bytes: b bits a value, without gaps.

Guarantees: a vector has exactly one packed form, because bits beyond the last value must be zero. Packing needs no
second vector, only blocks that stay in a core's cache. An error leaves vector and sum unchanged.

Format: value i is bits i*b to i*b + b - 1 of a bit stream, lowest bit first, and bit j of the stream is bit j % 8 of
byte j // 8. So b = 32 is little-endian uint32 as in memory, and b = 8, 16 and 24 are little-endian numbers of one, two
and three bytes. Eight values fill b bytes for every b, so a vector may be cut at multiples of eight values.

Method in numpy: two values make an item, a 64-bit word that holds 2b bits, and a period of items fills a whole number
of words (for odd b, 32 items fill b words). One operation shifts the same item of every period at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["add_packed", "pack_in_place", "packed_digest", "packed_size", "unpack_into"]

RING = np.dtype("<u4")
_WORD = np.dtype("<u8")
_WIDEST = 32
_WORD_BITS = 64
# Values that fill whole bytes for every b. A packed vector may be cut at multiples of it.
_CUT = 8
# A multiple of every period. A block with its items and words stays in a core's L2 cache, and is long enough to hide
# the overhead of numpy calls.
_BLOCK_VALUES = 64 * 1024


class _Shift(NamedTuple):
    """One piece of a word made of items, or of an item made of words: its source, and the shift's direction and
    distance.
    """

    source: int
    left: bool
    distance: np.uint64


class _Plan(NamedTuple):
    """How items of 2b bits map to words of 64: the pieces of each word, and the pieces of each item."""

    words: tuple[tuple[_Shift, ...], ...]
    items: tuple[tuple[_Shift, ...], ...]


class _Codec:
    """Packs and unpacks blocks of at most `values` values of one width (below 32), in its own memory."""

    __slots__ = ("_bits", "_items", "_period", "_plan", "_spare", "_values", "_words")

    def __init__(self, bits: int, values: int) -> None:
        self._bits = bits
        self._plan = _plan(bits)
        self._period = 2 * len(self._plan.items)
        periods = -(-values // self._period)
        self._values = np.zeros(periods * self._period, dtype=RING)
        self._items = np.empty(periods * len(self._plan.items), dtype=_WORD)
        self._spare = np.empty_like(self._items)
        self._words = np.empty(periods * len(self._plan.words), dtype=_WORD)

    def pack(self, values: NDArray[np.uint32]) -> memoryview:
        """Packs `values` into memory that the next call overwrites. Bits above b are dropped."""
        periods = -(-values.size // self._period)
        if values.size % self._period:
            # Zeros fill the last period; they are the format's unused bits.
            whole = self._values[: periods * self._period]
            whole[: values.size] = values
            whole[values.size :] = 0
        else:
            whole = values
        pairs = whole.view(_WORD)
        items, spare = self._items[: pairs.size], self._spare[: pairs.size]
        low = (1 << self._bits) - 1
        np.right_shift(pairs, np.uint64(_WIDEST - self._bits), items)
        np.bitwise_and(items, np.uint64(low << self._bits), items)
        np.bitwise_and(pairs, np.uint64(low), spare)
        np.bitwise_or(items, spare, items)
        words = self._words[: periods * len(self._plan.words)]
        _regroup(items, words, self._plan.words, spare[:periods])
        return words.view(np.uint8).data[: packed_size(values.size, self._bits)]

    def unpack(self, data: memoryview, count: int) -> NDArray[np.uint32]:
        """Unpacks `count` values into memory that the next call overwrites."""
        periods = -(-count // self._period)
        words = self._words[: periods * len(self._plan.words)]
        # Stale bytes after the last one only affect values after the last one.
        words.view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        items = self._items[: periods * len(self._plan.items)]
        spare = self._spare[: items.size]
        _regroup(words, items, self._plan.items, spare[:periods])
        pairs = self._values.view(_WORD)[: items.size]
        low = (1 << self._bits) - 1
        np.left_shift(items, np.uint64(_WIDEST - self._bits), pairs)
        np.bitwise_and(pairs, np.uint64(low << _WIDEST), pairs)
        np.bitwise_and(items, np.uint64(low), spare)
        np.bitwise_or(pairs, spare, pairs)
        return self._values[:count]


def packed_size(values: int, bits: int) -> int:
    """Size in bytes of `values` values of `bits` bits: ceil(values * bits / 8).

    Raises:
        ValueError: a number is out of range.
    """
    _check_bits(bits)
    if values < 0:
        raise ValueError(f"a vector cannot have {values} values")
    return -(-values * bits // 8)


def pack_in_place(vector: NDArray[np.uint32], bits: int) -> memoryview:
    """Overwrites the front of the vector's memory with its packed bytes.

    Args:
        vector: numbers below 2^bits, little-endian uint32, one-dimensional, contiguous, writable.
        bits: b.

    Returns:
        A view of the packed bytes. The memory after them is meaningless.

    Raises:
        ValueError: the vector is of another kind; it is unchanged.
    """
    _check_vector(vector, bits)
    if not vector.flags.writeable:
        raise ValueError("a vector is packed in its own memory, so it must be writable")
    data = vector.view(np.uint8).data
    if bits < _WIDEST:
        at = 0
        # Each packed block ends before the end of its source block, so nothing is overwritten before it is read.
        for part in _packed_blocks(vector, bits):
            data[at : at + len(part)] = part
            at += len(part)
    return data[: packed_size(vector.size, bits)]


def unpack_into(out: NDArray[np.uint32], data: bytes | bytearray | memoryview, bits: int) -> None:
    """Fills `out` with the values in `data`.

    Raises:
        ValueError: `data` does not have `packed_size(out.size, bits)` bytes, or a bit beyond the last value is set;
            `out` is unchanged.
    """
    packed = memoryview(data).cast("B")
    _check_target(out)
    expected = packed_size(out.size, bits)
    if len(packed) != expected:
        raise ValueError(f"{out.size} values of {bits} bits are {expected} bytes, got {len(packed)}")
    _check_unused(packed, out.size, bits)
    for start, values in _unpacked_blocks(packed, out.size, bits):
        out[start : start + values.size] = values


def add_packed(total: NDArray[np.uint32], chunk: bytes | bytearray | memoryview, offset: int, bits: int) -> None:
    """Adds a piece of a packed vector to the running sum, modulo 2^bits, in place.

    Args:
        total: the sum, numbers below 2^bits.
        chunk: packed values: a multiple of 8 of them, or all that are left.
        offset: index of its first value, a multiple of 8.
        bits: b.

    Raises:
        ValueError: the chunk does not fit there, or a bit beyond the last value is set; nothing was added.
    """
    packed = memoryview(chunk).cast("B")
    _check_target(total)
    values = _values_in(len(packed), total.size, offset, bits)
    _check_unused(packed, values, bits)
    mask = np.uint32((1 << bits) - 1)
    for start, part in _unpacked_blocks(packed, values, bits):
        here = total[offset + start : offset + start + part.size]
        np.add(here, part, here)
        if bits < _WIDEST:
            np.bitwise_and(here, mask, here)


def packed_digest(vector: NDArray[np.uint32], bits: int) -> bytes:
    """Computes SHA-256 of the packed bytes, block by block. `vector` is unchanged and need not be writable.

    Raises:
        ValueError: as in `pack_in_place`.
    """
    _check_vector(vector, bits)
    hasher = hashlib.sha256()
    if bits == _WIDEST:
        hasher.update(vector.view(np.uint8).data)
    else:
        for part in _packed_blocks(vector, bits):
            hasher.update(part)
    return hasher.digest()


def _packed_blocks(vector: NDArray[np.uint32], bits: int) -> Iterator[memoryview]:
    codec = _Codec(bits, min(_BLOCK_VALUES, vector.size))
    for start in range(0, vector.size, _BLOCK_VALUES):
        yield codec.pack(vector[start : start + _BLOCK_VALUES])


def _unpacked_blocks(packed: memoryview, values: int, bits: int) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Yields (index of the first value, values) block by block, in memory that the next block overwrites."""
    if bits == _WIDEST:
        if values:
            yield 0, np.frombuffer(packed, dtype=RING)
        return
    codec = _Codec(bits, min(_BLOCK_VALUES, values))
    for start in range(0, values, _BLOCK_VALUES):
        count = min(_BLOCK_VALUES, values - start)
        first = start * bits // 8
        yield start, codec.unpack(packed[first : first + packed_size(count, bits)], count)


def _regroup(
    source: NDArray[np.uint64],
    out: NDArray[np.uint64],
    pieces: tuple[tuple[_Shift, ...], ...],
    spare: NDArray[np.uint64],
) -> None:
    """Computes each column of `out`, viewed as one row per period, from shifted columns of `source`."""
    periods = spare.size
    columns = source.reshape(periods, -1)
    made = out.reshape(periods, -1)
    for index, shifts in enumerate(pieces):
        target = made[:, index]
        first, *others = shifts
        (np.left_shift if first.left else np.right_shift)(columns[:, first.source], first.distance, target)
        for piece in others:
            (np.left_shift if piece.left else np.right_shift)(columns[:, piece.source], piece.distance, spare)
            np.bitwise_or(target, spare, target)


@lru_cache(maxsize=_WIDEST)
def _plan(bits: int) -> _Plan:
    width = 2 * bits
    period = int(np.lcm(width, _WORD_BITS))
    return _Plan(
        words=_pieces(width, _WORD_BITS, period),
        items=_pieces(_WORD_BITS, width, period),
    )


def _pieces(source: int, target: int, period: int) -> tuple[tuple[_Shift, ...], ...]:
    """For every run of `target` bits in a period, the runs of `source` bits that overlap it."""
    return tuple(
        tuple(
            _Shift(index, index * source > start, np.uint64(abs(index * source - start)))
            for index in range(start // source, -(-(start + target) // source))
        )
        for start in range(0, period, target)
    )


def _values_in(size: int, values: int, offset: int, bits: int) -> int:
    """How many values a chunk of `size` bytes holds at `offset` in a vector of `values`. Raises ValueError."""
    _check_bits(bits)
    if offset < 0 or offset % _CUT or offset > values:
        raise ValueError(f"a chunk starts at a multiple of {_CUT} values within the sum of {values}, not at {offset}")
    left = values - offset
    if size == packed_size(left, bits):
        return left
    if size % bits:
        raise ValueError(
            f"a chunk of {size} bytes is neither a multiple of {bits}, the bytes of {_CUT} values, nor the last one"
        )
    held = size // bits * _CUT
    if held > left:
        raise ValueError(f"a chunk of {held} values at {offset} reaches outside a sum of {values}")
    return held


def _check_unused(packed: memoryview, values: int, bits: int) -> None:
    used = values * bits % 8
    if used and packed[-1] >> used:
        raise ValueError("a bit beyond the last value is set, so the vector was not packed correctly")


def _check_vector(vector: NDArray[np.uint32], bits: int) -> None:
    _check_bits(bits)
    if not isinstance(vector, np.ndarray) or vector.dtype != RING or vector.ndim != 1 or not vector.flags.c_contiguous:
        raise ValueError("a vector to pack is a contiguous one-dimensional numpy array of little-endian uint32")
    if bits < _WIDEST and vector.size and int(vector.max()) >> bits:
        raise ValueError(f"a value lies outside the ring of {bits} bits")


def _check_target(values: NDArray[np.uint32]) -> None:
    if not isinstance(values, np.ndarray) or values.dtype != RING or values.ndim != 1 or not values.flags.writeable:
        raise ValueError("values are unpacked into a writable one-dimensional numpy array of little-endian uint32")


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= _WIDEST:
        raise ValueError(f"a value is packed into 1 to {_WIDEST} bits, got {bits!r}")
