"""The sampler: its table against the law to 60 digits, its look-up against the table, its draws against both."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from secure_agg import DiscreteGaussian, SystemRandom
from secure_agg.discrete_gaussian import AliasTable, alias_table, magnitude_masses
from secure_agg.randomness import KeyStream, StreamScratch
from tests.support.sum_fleet import SeededRandom

STDS = [1 / 16, 0.5, 1.0, 1.7, 3.0, 100.0, 4096.0]
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
DIGITS = 60


def ideal(std: float, count: int) -> tuple[list[Decimal], Decimal]:
    """Returns (exp(-k^2 / (2 s^2)) for k below `count`, the sum of these over all whole k), to 60 digits.

    Each term is its own exponential and not derived from the one before. The sum ends when terms no longer change it.
    """
    with localcontext() as context:
        context.prec = DIGITS
        double = 2 * Decimal(std) ** 2
        weights = [(-Decimal(k * k) / double).exp() for k in range(count)]
        total = 1 + 2 * sum(weights[1:], Decimal(0))
        step = 1 if std < 200 else 0
        if step:
            k, more = count, Decimal(1)
            while more > Decimal(10) ** -DIGITS * total:
                more = 2 * (-Decimal(k * k) / double).exp()
                total += more
                k += 1
        else:
            # Poisson summation: s sqrt(2 pi) (1 + 2 exp(-2 pi^2 s^2) + ...), whose second term is below 10^-300000.
            total = Decimal(std) * (2 * PI).sqrt()
        return weights, total


@pytest.mark.parametrize("std", [*STDS, pytest.param(16384.0, marks=pytest.mark.long)], ids=lambda s: f"s={s:g}")
def test_the_table_with_its_tail_is_within_2_to_minus_100_of_the_law(std: float) -> None:
    masses = magnitude_masses(std)
    assert sum(masses) == 2**127
    assert all(mass > 0 for mass in masses)
    weights, total = ideal(std, len(masses))
    with localcontext() as context:
        context.prec = DIGITS
        law = [weights[0] / total, *(2 * weight / total for weight in weights[1:])]
        tail = 1 - sum(law, Decimal(0))
        apart = sum((abs(Decimal(m) / 2**127 - p) for m, p in zip(masses, law, strict=True)), Decimal(0))
        # Rounding to 60 digits may make an empty tail look negative.
        assert -(Decimal(10) ** -50) < tail < Decimal(2) ** -100
        assert (apart + abs(tail)) / 2 < Decimal(2) ** -100


def test_the_tail_is_truncated_as_soon_as_the_budget_allows() -> None:
    # One entry fewer would leave out more than 2^-101.
    for std in (0.5, 1.0, 3.0, 100.0):
        count = len(magnitude_masses(std))
        weights, total = ideal(std, 3 * count)
        with localcontext() as context:
            context.prec = DIGITS
            assert 2 * sum(weights[count:], Decimal(0)) / total < Decimal(2) ** -101
            assert 2 * sum(weights[count - 1 :], Decimal(0)) / total > Decimal(2) ** -102


def thresholds(table: AliasTable) -> tuple[list[int], list[int]]:
    """Returns (T, alias) of every column, as whole numbers."""
    low = (1 << table.columns) - 1
    packed, rest = table.packed.tolist(), table.rest.tolist()
    threshold = [((p >> table.columns) << 64) | r for p, r in zip(packed, rest, strict=True)]
    return threshold, [column ^ (p & low) for column, p in enumerate(packed)]


@pytest.mark.parametrize("std", STDS, ids=lambda s: f"s={s:g}")
def test_the_columns_hold_exactly_the_masses(std: float) -> None:
    masses = magnitude_masses(std)
    table = alias_table(masses)
    share = 1 << (127 - table.columns)
    held = [0] * (1 << table.columns)
    for column, (threshold, alias) in enumerate(zip(*thresholds(table), strict=True)):
        assert 0 <= threshold <= share
        held[column] += threshold
        held[alias] += share - threshold
    assert held[: len(masses)] == masses
    assert not any(held[len(masses) :])
    assert table.largest == len(masses) - 1 == DiscreteGaussian(std).largest


class Written:
    """A key stream with given words, for words that occur by chance only once in 2^47 draws."""

    def __init__(self, *reads: np.ndarray) -> None:
        self.reads = [np.asarray(read, dtype="<u8") for read in reads]

    def read(self, n: int, scratch: StreamScratch) -> np.ndarray:
        words = self.reads.pop(0)
        assert words.nbytes == n
        scratch.view[:n] = words.view(np.uint8)
        return scratch.view[:n]


@pytest.mark.parametrize(
    "masses",
    [
        *map(magnitude_masses, (1 / 16, 0.5, 3.0, 4096.0)),
        # Not a Gaussian's table, but a valid one: its last column is an alias, and one column is full.
        [1, 2**127 - 1],
        [2**125 + 2**64, 2**125, 2**125 - 2**64, 2**125],
    ],
    ids=lambda masses: f"{len(masses)} magnitudes",
)
@pytest.mark.parametrize("negative", [0, 1])
def test_draws_match_the_columns_on_both_sides_of_every_threshold(masses: list[int], negative: int) -> None:
    table = alias_table(masses)
    size, share = 1 << table.columns, 1 << (127 - table.columns)
    threshold, alias = thresholds(table)
    # 127 bits just below, at and just above each threshold, and the ends of each column.
    for offset in (-1, 0, 1, "first", "last"):
        bits = [
            {"first": 0, "last": share - 1}[offset] if isinstance(offset, str) else min(share - 1, max(0, t + offset))
            for t in threshold
        ]
        words = [(negative << 63) | ((b >> 64) << table.columns) | column for column, b in enumerate(bits)]
        tied = [b & (2**64 - 1) for b, t in zip(bits, threshold, strict=True) if b >> 64 == t >> 64]
        reads = [np.array(words, dtype=np.uint64)] + ([np.array(tied, dtype=np.uint64)] if tied else [])
        stream = Written(*reads)
        drawn = table.draw(size, stream, StreamScratch(8 * size))
        expected = [c if b < t else a for c, (b, t, a) in enumerate(zip(bits, threshold, alias, strict=True))]
        assert (drawn * (-1 if negative else 1)).tolist() == expected
        assert not stream.reads


@pytest.mark.parametrize("std", [0.5, 1.0, 3.0, 4096.0, 16384.0], ids=lambda s: f"s={s:g}")
def test_draws_fit_the_law(std: float) -> None:
    count = 400_000
    drawn = DiscreteGaussian(std).sample(count, SeededRandom(f"fit {std}"))
    assert drawn.dtype == np.dtype("<i4")
    largest = DiscreteGaussian(std).largest
    assert np.abs(drawn.astype(np.int64)).max() <= largest
    values = np.arange(-largest, largest + 1)
    law = np.exp(-(values.astype(np.float64) ** 2) / (2 * std**2))
    law /= law.sum()
    # Cells of probability at least 1/128, so that thousands of draws are expected in each.
    cell = np.minimum((np.cumsum(law) * 128).astype(np.int64), 127)
    expected = np.bincount(cell, weights=law, minlength=128) * count
    seen = np.bincount(cell[drawn.astype(np.int64) + largest], minlength=128)
    used = expected > 5
    freedom = int(used.sum()) - 1
    chi_square = float((((seen - expected) ** 2)[used] / expected[used]).sum())
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom)
    # Within six standard errors of the mean, the variance and the skew.
    variance = float((law * values**2).sum())
    assert abs(drawn.mean()) < 6 * math.sqrt(variance / count)
    fourth = float((law * values.astype(np.float64) ** 4).sum())
    assert abs((drawn.astype(np.float64) ** 2).mean() - variance) < 6 * math.sqrt((fourth - variance**2) / count)
    assert abs(int((drawn > 0).sum()) - int((drawn < 0).sum())) < 6 * math.sqrt(count)
    if std >= 1.5:
        assert variance == pytest.approx(std**2, rel=1e-12)


def test_adjacent_draws_and_blocks_are_uncorrelated() -> None:
    drawn = DiscreteGaussian(4096.0).sample(100_000, SeededRandom("apart")).astype(np.float64) / 4096
    for lag in (1, 2, 16 * 1024, 32 * 1024):
        products = drawn[lag:] * drawn[:-lag]
        assert abs(products.mean()) < 6 / math.sqrt(products.size)


def test_a_seed_gives_these_draws_on_every_machine() -> None:
    drawn = DiscreteGaussian(4096.0).sample(100_000, SeededRandom("golden"))
    assert drawn[:8].tolist() == [-4393, -5762, 1643, -4002, 1874, -3141, -3326, -4835]
    assert (
        hashlib.sha256(drawn.tobytes()).hexdigest()
        == "15f8ea707651482beaaf1e273e2a164e2393a42e991e55588bcff2ed565390e3"
    )


def test_samples_differ_and_are_added_in_place() -> None:
    gaussian = DiscreteGaussian(3)
    assert gaussian == DiscreteGaussian(3.0)
    one, other = (gaussian.sample(1000, SystemRandom()) for _ in range(2))
    assert (one != other).any()
    vector = np.arange(40_000, dtype="<i4")
    gaussian.add_into(vector, SeededRandom("add"))
    np.testing.assert_array_equal(vector - np.arange(40_000), gaussian.sample(40_000, SeededRandom("add")))
    assert gaussian.sample(0, SystemRandom()).shape == (0,)


def test_a_stream_is_read_without_overlap() -> None:
    # The second block's noise continues the stream after the first and does not restart it.
    drawn = DiscreteGaussian(4096.0).sample(40_000, SeededRandom("blocks"))
    table = alias_table(magnitude_masses(4096.0))
    scratch = StreamScratch(8 * 40_000)
    stream = KeyStream(SeededRandom("blocks").bytes(32), scratch)
    np.testing.assert_array_equal(drawn, table.draw(40_000, stream, scratch))


@pytest.mark.parametrize("std", [0, -1.0, 0.06, 65537, math.nan, math.inf, True, "3"])
def test_a_standard_deviation_without_a_table_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match="from 1/16 to 65536"):
        DiscreteGaussian(std)
