"""Packed vectors: the format against a reference in whole numbers, and everything that is refused."""

from __future__ import annotations

import hashlib
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg import Accumulator, add_packed, pack_in_place, packed_size, packing, unpack_into, vector_digest

ALL_WIDTHS = range(1, 33)
BLOCK = packing._BLOCK_VALUES


def by_hand(values: list[int], bits: int) -> bytes:
    """The format by its definition: value i is at bit i * b of a little-endian number."""
    number = sum(value << (i * bits) for i, value in enumerate(values))
    return number.to_bytes(-(-len(values) * bits // 8), "little")


def values_of(size: int, bits: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, size, dtype=np.uint64).astype("<u4")


def packed(values: np.ndarray, bits: int) -> bytes:
    return bytes(pack_in_place(values.copy(), bits))


# The format.


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(ALL_WIDTHS))
def test_packing_follows_the_format_and_unpacks(data: st.DataObject, bits: int) -> None:
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=200))
    vector = np.array(values, dtype="<u4")
    held = vector.copy()
    view = pack_in_place(held, bits)
    assert view.tobytes() == by_hand(values, bits)
    assert len(view) == packed_size(len(values), bits)
    back = np.full(len(values), 7, dtype="<u4")
    unpack_into(back, view, bits)
    assert back.tolist() == values
    assert vector_digest(vector, bits) == hashlib.sha256(by_hand(values, bits)).digest()
    assert vector.tolist() == values


@pytest.mark.parametrize("bits", ALL_WIDTHS)
def test_every_width_at_its_extreme_values(bits: int) -> None:
    # A single 1 among zeros and a single 0 among ones: each bit goes to its own place.
    top = 2**bits - 1
    for size in (1, 7, 8, 63, 64, 65, 129):
        for place in {0, size // 2, size - 1}:
            for background, odd in ((0, top), (top, 0), (top, 1), (0, 1 << (bits - 1))):
                values = [background] * size
                values[place] = odd
                vector = np.array(values, dtype="<u4")
                assert packed(vector, bits) == by_hand(values, bits)
                back = np.zeros(size, dtype="<u4")
                unpack_into(back, by_hand(values, bits), bits)
                assert back.tolist() == values


@pytest.mark.parametrize("bits", [2, 5, 16, 21, 31, 32])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63, 2 * BLOCK + 65])
def test_blocks_join_without_a_gap(bits: int, size: int) -> None:
    vector = values_of(size, bits)
    stream = np.unpackbits(np.frombuffer(packed(vector, bits), dtype=np.uint8), bitorder="little")
    shifts = np.arange(bits, dtype=np.uint32)
    expected = ((vector[:, None] >> shifts) & 1).astype(np.uint8).reshape(-1)
    np.testing.assert_array_equal(stream[: expected.size], expected)
    assert not stream[expected.size :].any()
    back = np.empty(size, dtype="<u4")
    unpack_into(back, packed(vector, bits), bits)
    np.testing.assert_array_equal(back, vector)
    assert vector_digest(vector, bits) == hashlib.sha256(packed(vector, bits)).digest()


def test_whole_byte_widths_match_memory() -> None:
    vector = values_of(1001, 32)
    assert packed(vector, 32) == vector.tobytes()
    assert packed(vector & np.uint32(0xFFFF), 16) == vector.astype("<u2").tobytes()
    assert packed(vector & np.uint32(0xFF), 8) == vector.astype("u1").tobytes()
    three = vector.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    assert packed(vector & np.uint32(0xFFFFFF), 24) == three


def test_sizes() -> None:
    assert [packed_size(d, b) for d, b in ((0, 5), (1, 1), (1, 9), (8, 21), (9, 21), (3, 32))] == [0, 1, 2, 21, 24, 12]
    with pytest.raises(ValueError, match="-1 values"):
        packed_size(-1, 8)


# In place, without a second vector.


@pytest.mark.parametrize("bits", [3, 21, 32])
def test_packing_works_in_the_vectors_own_memory(bits: int) -> None:
    vector = values_of(500, bits)
    expected = packed(vector, bits)
    view = pack_in_place(vector, bits)
    assert vector.view(np.uint8)[: len(expected)].tobytes() == expected
    vector.view(np.uint8)[0] ^= 0xFF
    assert view[0] == expected[0] ^ 0xFF


@pytest.mark.parametrize("bits", [21, 32])
def test_nothing_here_needs_a_second_vector(bits: int) -> None:
    vector = values_of(4_000_000, bits)
    total = np.zeros_like(vector)
    data = packed(vector, bits)
    for work in (
        lambda: vector_digest(vector, bits),
        lambda: unpack_into(total, data, bits),
        lambda: add_packed(total, data, 0, bits),
        lambda: pack_in_place(vector, bits),
    ):
        tracemalloc.start()
        try:
            work()
            assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
        finally:
            tracemalloc.stop()


# Adding.


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 8, 12, 20, 31, 32]), st.integers(0, 150))
def test_pieces_of_a_packed_vector_add_up_to_the_whole(data: st.DataObject, bits: int, size: int) -> None:
    total, added = values_of(size, bits, 1), values_of(size, bits, 2)
    expected = (total + added) & np.uint32(2**bits - 1)
    whole = packed(added, bits)
    cuts = sorted(data.draw(st.sets(st.integers(0, size // 8))))
    edges = [0, *(8 * cut for cut in cuts if 0 < 8 * cut < size), size]
    for start, end in itertools.pairwise(edges):
        piece = whole[start * bits // 8 : packed_size(end, bits)]
        add_packed(total, memoryview(piece), start, bits)
    np.testing.assert_array_equal(total, expected)


def test_the_accumulator_adds_chunks_in_the_ring() -> None:
    total = Accumulator(9, 4)
    total.add(by_hand([15, 1, 2, 3, 4, 5, 6, 7], 4), 0)
    total.add(bytearray(by_hand([1, 15, 0, 0, 0, 0, 0, 9], 4)), 0)
    total.add(memoryview(by_hand([9], 4)), 8)
    assert total.total.tolist() == [0, 0, 2, 3, 4, 5, 6, 0, 9]


@pytest.mark.parametrize(
    ("chunk", "offset", "bits", "says"),
    [
        (b"\1" * 5, 0, 32, "neither a multiple of 32"),
        (b"\1" * 32, 4, 32, "multiple of 8 values within"),
        (b"\1" * 32, -8, 32, "multiple of 8 values within"),
        (b"", 24, 32, "multiple of 8 values within"),
        (b"\1" * 64, 8, 32, "reaches outside a sum of 18"),
        (b"\1" * 96, 0, 32, "reaches outside a sum of 18"),
        (b"\1" * 4, 0, 3, "neither a multiple of 3"),
        (b"\1" * 3, 16, 3, "reaches outside"),
        (b"\x40", 16, 3, "bit beyond the last value"),
        (b"\0" * 6 + b"\x80", 0, 3, "bit beyond the last value"),
        (b"", 0, 0, "1 to 32 bits"),
        (b"", 0, 33, "1 to 32 bits"),
        (b"", 0, True, "1 to 32 bits"),
    ],
)
def test_a_chunk_that_does_not_fit_adds_nothing(chunk: bytes, offset: int, bits: int, says: str) -> None:
    total = np.zeros(18, dtype="<u4")
    with pytest.raises(ValueError, match=says):
        add_packed(total, chunk, offset, bits)
    assert not total.any()


# Refusals.


@pytest.mark.parametrize("bits", [1, 5, 21, 31])
def test_every_bit_beyond_the_last_value_must_be_zero(bits: int) -> None:
    size = 5
    good = by_hand([0] * size, bits)
    for bit in range(size * bits % 8, 8):
        bad = bytearray(good)
        bad[-1] |= 1 << bit
        out = np.full(size, 3, dtype="<u4")
        with pytest.raises(ValueError, match="bit beyond the last value"):
            unpack_into(out, bad, bits)
        assert out.tolist() == [3] * size


@pytest.mark.parametrize("length", [0, 10, 12, 20])
def test_a_wrong_number_of_bytes_is_not_unpacked(length: int) -> None:
    out = np.full(4, 3, dtype="<u4")
    with pytest.raises(ValueError, match="4 values of 21 bits are 11 bytes"):
        unpack_into(out, bytes(length), 21)
    assert out.tolist() == [3] * 4


@pytest.mark.parametrize(
    "vector",
    [
        [0] * 4,
        np.zeros(4, dtype=">u4"),
        np.zeros(4, dtype=np.int64),
        np.zeros((2, 2), dtype="<u4"),
        np.zeros(8, dtype="<u4")[::2],
        np.array([0, 2**20, 0, 0], dtype="<u4"),
        np.frombuffer(bytes(16), dtype="<u4"),
    ],
    ids=["list", "big-endian", "int64", "matrix", "strided", "out of ring", "read-only"],
)
def test_a_vector_outside_the_ring_is_not_packed(vector: Any) -> None:
    before = list(np.asarray(vector).reshape(-1))
    with pytest.raises(ValueError, match=r"to pack|outside the ring|writable"):
        pack_in_place(vector, 20)
    assert list(np.asarray(vector).reshape(-1)) == before


def test_a_digest_needs_values_in_the_ring_and_a_readable_vector() -> None:
    with pytest.raises(ValueError, match="outside the ring of 20 bits"):
        vector_digest(np.array([2**20], dtype="<u4"), 20)
    assert vector_digest(np.frombuffer(bytes(16), dtype="<u4"), 32) == hashlib.sha256(bytes(16)).digest()


@pytest.mark.parametrize(
    "work", [lambda out: unpack_into(out, bytes(16), 32), lambda out: add_packed(out, bytes(16), 0, 32)]
)
@pytest.mark.parametrize(
    "out", [np.zeros(4, dtype=">u4"), np.zeros(4, dtype=np.int64), np.frombuffer(bytes(16), dtype="<u4")]
)
def test_values_are_unpacked_only_into_a_ring_vector(work: Callable[[Any], None], out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="writable one-dimensional"):
        work(out)
