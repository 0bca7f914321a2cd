"""Rounding, noise and sums: what a member encodes, and what a cohort's sum decodes to."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from secure_agg import (
    DiscreteGaussian,
    EncodingInvalid,
    Grid,
    Phase,
    RoundingFailed,
    SystemRandom,
    clip_l2,
    decode_distributed,
    distributed,
    encode_distributed,
    round_conditionally,
)
from secure_agg.randomness import KeyStream, StreamScratch
from tests.support.sum_fleet import Fleet, SeededRandom, names

GRID = Grid(clip=1.0, noise_multiplier=1.0, honest=3, values=20_000, members=5)
BITS = GRID.bits_needed(5)
# c = 0.2 steps: rounding the only value up (probability 0.2) exceeds B = 0.995.
COARSE = Grid(clip=1.0, noise_multiplier=20480.0, honest=1, values=1, members=2)


def vector(seed: int, grid: Grid = GRID) -> np.ndarray:
    return clip_l2(np.random.default_rng(seed).normal(size=grid.values), grid.clip)


def norm_square(rounded: np.ndarray) -> int:
    return sum(value * value for value in rounded.tolist())


# Rounding.


def test_rounding_is_to_an_adjacent_step_and_unbiased() -> None:
    values = vector(1)
    scaled = values * GRID.scale
    rounded = round_conditionally(values, GRID, SeededRandom("round"))
    assert rounded.dtype == np.dtype("<i4")
    up = rounded - np.floor(scaled)
    assert set(np.unique(up)) == {0.0, 1.0}
    assert norm_square(rounded) <= GRID.largest_square
    # The errors' mean, over 20,000 coordinates with a variance of at most 1/4 each: eight standard errors.
    assert abs((rounded - scaled).mean()) < 8 * 0.5 / math.sqrt(GRID.values)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.93])
def test_the_probability_of_rounding_up_is_the_fraction(fraction: float) -> None:
    grid = Grid(1.0, 1.0, 1, 200_000, 2)
    # Half of them are negative, where the floor has the larger magnitude. All are far inside the norm, so there is no
    # retry.
    values = np.where(np.arange(grid.values) % 2 == 0, fraction, fraction - 3) / grid.scale
    rounded = round_conditionally(values, grid, SeededRandom("up"))
    for part, low in ((rounded[::2], 0), (rounded[1::2], -3)):
        assert set(np.unique(part)) == {low, low + 1}
        assert abs((part - low).mean() - fraction) < 8 * 0.5 / math.sqrt(part.size)


def test_values_on_the_grid_are_unchanged() -> None:
    grid = Grid(1.0, 1.0, 1, 3, 2)
    values = np.array([0.0, -4000.0, 17.0]) / grid.scale
    for seed in range(20):
        assert round_conditionally(values, grid, SeededRandom(str(seed))).tolist() == [0, -4000, 17]


def test_a_rounding_that_is_too_long_is_drawn_again() -> None:
    # Without the condition, one in five would be 1.
    assert COARSE.largest_square == 0
    for seed in range(60):
        assert round_conditionally(np.array([1.0]), COARSE, SeededRandom(f"{seed}")).tolist() == [0]


def test_rounding_that_never_succeeds_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_TRIES", 1)
    failed = 0
    for seed in range(60):
        scratch = StreamScratch(8)
        first = KeyStream(SeededRandom(f"{seed}").bytes(32), scratch).read(8, scratch)
        up = int(first.view("<u8")[0] >> np.uint64(11)) * 2.0**-53 < COARSE.radius
        out = np.full(1, 5, dtype="<i4")
        if up:
            failed += 1
            with pytest.raises(RoundingFailed, match="check the random source"):
                round_conditionally(np.array([1.0]), COARSE, SeededRandom(f"{seed}"), out)
        else:
            round_conditionally(np.array([1.0]), COARSE, SeededRandom(f"{seed}"), out)
        assert out.tolist() == [0]
    # One in five, within five standard errors.
    assert 1 <= failed <= 28


def test_roundings_succeed_as_often_as_the_theorem_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_TRIES", 1)
    # Every fraction is one half, the norm is at its limit, dimension and radius are similar: the worst case.
    values = np.full(400, 9.5)
    grid = Grid(1.0, 4096 / float(np.linalg.norm(values)), 1, 400, 2)
    succeeded = 0
    for seed in range(400):
        try:
            round_conditionally(values / grid.scale, grid, SeededRandom(f"{seed}"))
            succeeded += 1
        except RoundingFailed:
            pass
    assert succeeded / 400 > 1 - math.exp(-0.5)


def test_the_norm_is_checked_in_whole_numbers_over_all_blocks() -> None:
    # Two blocks, every fraction one half, the norm at its limit: about one rounding in seven is too long, but never
    # because of one block alone.
    values = np.full(20_000, 9.5)
    grid = Grid(1.0, 4096 / float(np.linalg.norm(values)), 1, values.size, 2)
    unconditional = values[None, :] + np.random.default_rng(0).choice([-0.5, 0.5], size=(60, values.size))
    assert ((unconditional**2).sum(axis=1) > grid.largest_square).any()
    for seed in range(60):
        rounded = round_conditionally(values / grid.scale, grid, SeededRandom(f"{seed}")).astype(np.int64)
        assert int(np.dot(rounded, rounded)) <= grid.largest_square


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int8])
def test_any_real_type_is_accepted(kind: type) -> None:
    grid = Grid(10.0, 1.0, 1, 3, 2)
    values = np.array([1, -2, 0], dtype=kind)
    rounded = round_conditionally(values, grid, SeededRandom("kind"))
    assert np.abs(rounded - values.astype(np.float64) * grid.scale).max() < 1


# Encoding and decoding.


def test_an_encoding_is_the_rounding_plus_a_share_in_the_ring() -> None:
    values = vector(2)
    source = SeededRandom("encode")
    rounded = round_conditionally(values, GRID, source)
    noise = DiscreteGaussian(GRID.std).sample(GRID.values, source)
    encoded = encode_distributed(values, GRID, BITS, SeededRandom("encode"))
    assert encoded.dtype == np.dtype("<u4")
    assert int(encoded.max()) < 2**BITS
    np.testing.assert_array_equal(encoded, (rounded.astype(np.int64) + noise) % 2**BITS)
    np.testing.assert_array_equal(
        decode_distributed(encoded, GRID, BITS), (rounded.astype(np.int64) + noise) / GRID.scale
    )


def test_a_seed_gives_this_encoding_on_every_machine() -> None:
    encoded = encode_distributed(np.linspace(-0.01, 0.01, GRID.values) / 2, GRID, BITS, SeededRandom("golden"))
    assert (
        hashlib.sha256(encoded.tobytes()).hexdigest()
        == "bc41f4e43cef3cff05215fea5309761e9db8a1b0466d623fb1d242e446db0114"
    )


def test_every_encoding_draws_fresh_noise() -> None:
    values = vector(3)
    one, other = (encode_distributed(values, GRID, BITS, SystemRandom()) for _ in range(2))
    assert (one != other).mean() > 0.99


def test_an_encoding_fills_its_part_of_a_longer_vector() -> None:
    whole = np.full(GRID.values + 2, 7, dtype="<u4")
    part = encode_distributed(vector(4), GRID, BITS, SeededRandom("part"), out=whole[1:-1])
    assert part.base is whole
    np.testing.assert_array_equal(whole[1:-1], encode_distributed(vector(4), GRID, BITS, SeededRandom("part")))
    assert (whole[0], whole[-1]) == (7, 7)


def test_one_share_has_its_standard_deviation() -> None:
    decoded = decode_distributed(encode_distributed(vector(5), GRID, BITS, SeededRandom("share")), GRID, BITS)
    noise = decoded - vector(5)
    # sigma^2 / h, within six standard errors. The rounding's variance is 10^-8 of it.
    assert noise.var() == pytest.approx(1 / 3, rel=6 * math.sqrt(2 / GRID.values))


def test_encoding_needs_memory_only_for_the_vector_and_some_blocks() -> None:
    grid = Grid(1.0, 1.0, 3, 1_000_000, 5)
    values = np.zeros(grid.values)
    encode_distributed(values, grid, 32, SystemRandom())
    tracemalloc.start()
    encode_distributed(values, grid, 32, SystemRandom())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * 4 * grid.values


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 19_999])
def test_values_that_are_not_finite_are_refused_and_erased(bad: float, place: int) -> None:
    values = vector(6)
    values[place] = bad
    out = np.full(GRID.values, 9, dtype="<u4")
    with pytest.raises(EncodingInvalid, match="not finite"):
        encode_distributed(values, GRID, BITS, SystemRandom(), out)
    assert not out.any()


@pytest.mark.parametrize("factor", [1.00001, 3.0, 1e6, 1e200, 1.7e308])
def test_an_unclipped_vector_is_refused_and_erased(factor: float) -> None:
    values = vector(7)
    values /= np.linalg.norm(values)
    encode_distributed(values, GRID, BITS, SystemRandom())
    with np.errstate(over="ignore"):
        values = values * factor
    out = np.full(GRID.values, 9, dtype="<u4")
    with pytest.raises(EncodingInvalid, match="clip before encoding"):
        encode_distributed(values, GRID, BITS, SystemRandom(), out)
    assert not out.any()


class DryAfter:
    """A source that fails after a number of requests."""

    def __init__(self, requests: int) -> None:
        self.left = requests

    def bytes(self, n: int, /) -> bytes:
        if not self.left:
            raise OSError("no more randomness")
        self.left -= 1
        return SystemRandom().bytes(n)


def test_an_error_leaves_no_values_without_noise() -> None:
    out = np.full(GRID.values, 9, dtype="<u4")
    with pytest.raises(OSError, match="no more randomness"):
        encode_distributed(vector(8), GRID, BITS, DryAfter(1), out)
    assert not out.any()


@pytest.mark.parametrize("bits", [BITS - 1, 33, 0, -1, 20.0])
def test_a_ring_that_could_wrap_is_refused(bits: int) -> None:
    with pytest.raises(EncodingInvalid, match=f"need a ring of {BITS} to 32 bits"):
        encode_distributed(vector(9), GRID, bits, SystemRandom())


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(19_999),
        np.zeros((20_000, 1)),
        np.zeros(20_000, dtype=complex),
        np.array(["a"] * 20_000),
        [0.0] * 20_000,
    ],
    ids=["short", "shape", "complex", "text", "list"],
)
def test_a_vector_that_does_not_fit_the_grid_is_refused(values: Any) -> None:
    with pytest.raises(EncodingInvalid, match="the grid takes"):
        encode_distributed(values, GRID, BITS, SystemRandom())


def test_a_buffer_that_does_not_fit_the_ring_is_refused() -> None:
    for out in (np.zeros(20_000, "<i4"), np.zeros(19_999, "<u4"), np.zeros(20_000)):
        with pytest.raises(EncodingInvalid, match="encoding writes"):
            encode_distributed(vector(10), GRID, BITS, SystemRandom(), out)
    with pytest.raises(EncodingInvalid, match="rounding writes"):
        round_conditionally(vector(10), GRID, SystemRandom(), np.zeros(20_000))


@pytest.mark.parametrize("total", [np.zeros(20_000, np.int64), np.zeros(19_999, "<u4"), np.zeros((20_000, 1), "<u4")])
def test_a_sum_of_another_shape_is_not_decoded(total: np.ndarray) -> None:
    with pytest.raises(EncodingInvalid, match="a sum is"):
        decode_distributed(total, GRID, BITS)


@pytest.mark.parametrize("bits", [1, 33, 20.0])
def test_a_sum_of_another_ring_is_not_decoded(bits: int) -> None:
    with pytest.raises(EncodingInvalid, match="width of the ring"):
        decode_distributed(np.zeros(GRID.values, "<u4"), GRID, bits)


# Sums.


def encodings(n: int, bits: int = BITS) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns (the members' vectors, their encodings)."""
    rows = np.stack([vector(100 + member) for member in range(n)])
    return rows, [encode_distributed(row, GRID, bits, SeededRandom(f"member {i}")) for i, row in enumerate(rows)]


@pytest.mark.parametrize("shares", [1, 3, 5])
def test_a_sum_decodes_with_the_variance_of_its_noise_shares(shares: int) -> None:
    rows, encoded = encodings(shares)
    total = np.zeros(GRID.values, dtype="<u4")
    for one in encoded:
        total += one
    total &= np.uint32(2**BITS - 1)
    noise = decode_distributed(total, GRID, BITS) - rows.sum(axis=0)
    # sigma^2 = 1 for h = 3 shares, and shares / h of that in general, within six standard errors.
    assert noise.var() == pytest.approx(shares / 3, rel=6 * math.sqrt(2 / GRID.values))
    assert abs(noise.mean()) < 6 * math.sqrt(shares / 3 / GRID.values)


@pytest.mark.parametrize("lost", [set(), {"m2"}], ids=["all", "one lost"])
@pytest.mark.parametrize("bits", [BITS, 32])
def test_a_masked_cohorts_sum_opens_with_its_noise(lost: set[str], bits: int) -> None:
    fleet = Fleet(5, values=GRID.values, bits=bits)
    # The grid relies on exactly what the attempt guarantees.
    assert fleet.context.honest == GRID.honest
    rows, encoded = encodings(5, bits)
    fleet.inputs = dict(zip(names(5), encoded, strict=True))
    total = fleet.run({Phase.MASK: lost})
    assert isinstance(total, np.ndarray)
    left = [i for i, name in enumerate(names(5)) if name not in lost]
    np.testing.assert_array_equal(total, fleet.plain_sum([names(5)[i] for i in left]))
    # The masked vectors themselves look arbitrary.
    assert (fleet.masked["m0"] != encoded[0]).mean() > 0.99
    noise = decode_distributed(total, GRID, bits) - rows[left].sum(axis=0)
    assert noise.var() == pytest.approx(len(left) / 3, rel=6 * math.sqrt(2 / GRID.values))


def test_two_of_five_revealed_shares_leave_the_guaranteed_noise() -> None:
    rows, encoded = encodings(5)
    mask = np.uint32(2**BITS - 1)
    total = np.zeros(GRID.values, dtype="<u4")
    for one in encoded:
        total += one
    # The corrupt members know their own encodings in the opened sum to the last bit.
    known = (total - encoded[0] - encoded[1]) & mask
    noise = decode_distributed(known, GRID, BITS) - rows[2:].sum(axis=0)
    assert noise.var() == pytest.approx(1.0, rel=6 * math.sqrt(2 / GRID.values))
