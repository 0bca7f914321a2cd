"""Encoding in the ring and decoding, and every reason to refuse a vector."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from secure_agg import (
    EncodingInvalid,
    Layout,
    LayoutInvalid,
    Segment,
    SystemRandom,
    clip_coordinates,
    clip_l2,
)
from secure_agg.randomness import KeyStream, StreamScratch
from tests.support.sum_fleet import SeededRandom

LAYOUT = Layout((Segment("update", 4, 1000.0, 2.0), Segment("weight", 1, 1.0, 100.0)), 24)


def vectors(update: list[float] | None = None, weight: float = 7.0) -> dict[str, np.ndarray]:
    return {"update": np.array(update or [0.5, -2.0, 2.0, 0.0]), "weight": np.array([weight])}


def test_values_that_need_no_rounding_come_back_exactly() -> None:
    encoded = LAYOUT.encode(vectors(), SystemRandom())
    assert encoded.dtype == np.dtype("<u4")
    assert encoded.tolist() == [500, 2**24 - 2000, 2000, 0, 7]
    decoded = LAYOUT.decode(encoded)
    assert decoded["update"].tolist() == [0.5, -2.0, 2.0, 0.0]
    assert decoded["weight"].tolist() == [7.0]
    assert decoded["update"].dtype == np.float64


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=5, max_size=5), min_size=1, max_size=9),
    st.sampled_from([16, 24, 32]),
)
def test_a_sum_of_encodings_is_off_by_at_most_one_step_a_member(rows: list[list[float]], bits: int) -> None:
    layout = Layout((Segment("update", 5, 512.0, 3.0),), bits)
    layout.check_no_wrap(len(rows))
    total = np.zeros(5, dtype="<u4")
    for row in rows:
        total += layout.encode({"update": np.array(row)}, SystemRandom())
    total &= np.uint32(2**bits - 1)
    difference = layout.decode(total)["update"] - np.sum(rows, axis=0)
    assert np.abs(difference).max() <= len(rows) / 512.0 + 1e-9


def test_rounding_is_stochastic_and_unbiased() -> None:
    d = 200_000
    layout = Layout((Segment("update", d, 1.0, 10.0),), 32)
    for fraction in (0.25, -0.25, 3.9):
        rounded = layout.decode(layout.encode({"update": np.full(d, fraction)}, SeededRandom("r")))["update"]
        assert set(np.unique(rounded)) == {np.floor(fraction), np.floor(fraction) + 1}
        # Within eight standard errors of the mean.
        assert abs(rounded.mean() - fraction) < 8 * 0.5 / np.sqrt(d)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(-(2.0**20), 2.0**20), st.sampled_from([-(2.0**20), 2.0**20, -0.0, 5e-324, -5e-324, 0.5])),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([1.0, 0.37, 2047.99]),
    st.integers(0, 99),
)
def test_rounding_matches_its_definition(values: list[float], scale: float, seed: int) -> None:
    """Computed in integers: the floor, plus one where 53 random bits are below the fraction."""
    layout = Layout((Segment("update", len(values), scale, 2.0**20),), 32)
    encoded = layout.encode({"update": np.array(values)}, SeededRandom(f"{seed}"))
    scratch = StreamScratch(8 * len(values))
    words = KeyStream(SeededRandom(f"{seed}").bytes(32), scratch).read(8 * len(values), scratch).view("<u8").tolist()
    for value, word, got in zip(values, words, encoded.tolist(), strict=True):
        scaled = value * scale
        fraction = scaled - math.floor(scaled)
        assert got == (math.floor(scaled) + ((word >> 11) * 2.0**-53 < fraction)) % 2**32


def test_the_widest_values_fit_with_their_sign() -> None:
    layout = Layout((Segment("update", 2, 1.0, 2.0**31 - 2),), 32)
    edge = 2.0**31 - 2
    assert layout.encode({"update": np.array([edge, -edge])}, SystemRandom()).tolist() == [2**31 - 2, 2**31 + 2]


def test_two_encodings_draw_different_roundings() -> None:
    layout = Layout((Segment("update", 1000, 1.0, 1.0),), 32)
    source = SystemRandom()
    one, other = (layout.encode({"update": np.full(1000, 0.5)}, source) for _ in range(2))
    assert (one != other).any()


def test_coordinates_of_different_blocks_round_independently() -> None:
    block = 32 * 1024
    layout = Layout((Segment("update", 2 * block, 1.0, 1.0),), 32)
    encoded = layout.encode({"update": np.full(2 * block, 0.5)}, SystemRandom())
    assert 0.4 < (encoded[:block] == encoded[block:]).mean() < 0.6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3])
def test_a_value_that_is_not_finite_is_refused(bad: float, place: int) -> None:
    update = [0.0, 0.0, 0.0, 0.0]
    update[place] = bad
    with pytest.raises(EncodingInvalid, match="not finite"):
        LAYOUT.encode(vectors(update), SystemRandom())


@pytest.mark.parametrize("value", [2.0000001, -2.0000001, 1e300])
def test_a_value_beyond_the_bound_is_refused_and_not_clipped(value: float) -> None:
    with pytest.raises(EncodingInvalid, match="beyond its bound"):
        LAYOUT.encode(vectors([0.0, value, 0.0, 0.0]), SystemRandom())


@pytest.mark.parametrize(
    "wrong",
    [
        {"update": np.zeros(4)},
        {"update": np.zeros(4), "weight": np.zeros(1), "more": np.zeros(1)},
        {"update": np.zeros(5), "weight": np.zeros(1)},
        {"update": np.zeros((4, 1)), "weight": np.zeros(1)},
        {"update": np.zeros(4, dtype=complex), "weight": np.zeros(1)},
        {"update": np.array(["a"] * 4), "weight": np.zeros(1)},
    ],
)
def test_a_vector_that_does_not_fit_the_layout_is_refused(wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(EncodingInvalid):
        LAYOUT.encode(wrong, SystemRandom())


@pytest.mark.parametrize("total", [np.zeros(4, dtype="<u4"), np.zeros(5, dtype=np.int64), np.zeros((5, 1), "<u4")])
def test_a_sum_of_another_shape_is_not_decoded(total: np.ndarray) -> None:
    with pytest.raises(EncodingInvalid):
        LAYOUT.decode(total)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_no_wrap_is_exact_at_the_edge(bits: int) -> None:
    # bound * scale + 1 is exactly 2^(b-1) / 4, so three members fit and four exceed the room by one.
    layout = Layout((Segment("update", 1, 1.0, 2.0 ** (bits - 3) - 1),), bits)
    layout.check_no_wrap(3)
    with pytest.raises(LayoutInvalid, match="could wrap"):
        layout.check_no_wrap(4)
    extreme = layout.encode({"update": np.array([-(2.0 ** (bits - 3)) + 1])}, SystemRandom())
    total = (extreme * np.uint32(3)) & np.uint32(2**bits - 1)
    assert layout.decode(total)["update"][0] == 3 * (-(2.0 ** (bits - 3)) + 1)


def test_a_layout_that_one_member_would_wrap_cannot_be_built() -> None:
    with pytest.raises(LayoutInvalid, match="could wrap"):
        Layout((Segment("update", 1, 1.0, 200.0),), 8)


def test_every_field_of_a_layout_is_in_its_digest() -> None:
    one = Segment("update", 4, 10.0, 2.0)
    layouts = [
        Layout((one,), 24),
        Layout((one,), 25),
        Layout((Segment("updates", 4, 10.0, 2.0),), 24),
        Layout((Segment("update", 5, 10.0, 2.0),), 24),
        Layout((Segment("update", 4, 11.0, 2.0),), 24),
        Layout((Segment("update", 4, 10.0, 2.5),), 24),
        Layout((one, Segment("weight", 1, 1.0, 1.0)), 24),
        Layout((Segment("weight", 1, 1.0, 1.0), one), 24),
    ]
    assert len({layout.digest() for layout in layouts}) == len(layouts)
    assert layouts[6].values == 5


@settings(max_examples=100, deadline=None)
@example([7.0, 1.192092896e-07], 7.0)
@given(st.lists(st.floats(-1e200, 1e200), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_l2_clipping_keeps_direction_and_never_exceeds_the_norm(values: list[float], norm: float) -> None:
    clipped = clip_l2(np.array(values), norm)
    assert np.linalg.norm(clipped) <= norm
    largest = np.abs(values).max()
    if largest > 0:
        scaled = np.array(values) / largest
        if largest * np.linalg.norm(scaled) <= norm * (1 - 2.0**-50):
            assert clipped.tolist() == values
        else:
            np.testing.assert_allclose(clipped, norm * scaled / np.linalg.norm(scaled), rtol=1e-9, atol=1e-300)


def test_clipping_accepts_any_real_type_and_copies() -> None:
    original = np.array([3.0, 4.0], dtype=np.float32)
    np.testing.assert_allclose(clip_l2(original, 1.0), [0.6, 0.8])
    assert clip_coordinates(original, 3.5).tolist() == [3.0, 3.5]
    assert clip_coordinates(-original, 3.5).tolist() == [-3.0, -3.5]
    assert original.tolist() == [3.0, 4.0]
    assert clip_l2(np.zeros(3), 1.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("clip", [clip_l2, clip_coordinates])
def test_clipping_refuses_values_that_are_not_finite(clip) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(EncodingInvalid, match="not finite"):
            clip(np.array([1.0, bad]), 1.0)
    for limit in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(EncodingInvalid, match="positive"):
            clip(np.array([1.0]), limit)
