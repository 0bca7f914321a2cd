"""The examples of a release: every probability is exact, and every set as likely as any other."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from learning.mechanisms import noise
from learning.mechanisms.noise import draw_fixed, draw_poisson
from tests.support.random_sources import Seeded, Written


def words(*numbers):
    return Written(b"".join(number.to_bytes(8, "little") for number in numbers))


@pytest.mark.parametrize("rate", [0.5, 0.1, 1 / 3, 2.0**-64, 1 - 2.0**-53, 1e-30])
def test_the_probability_is_the_rate_to_the_last_bit(rate):
    threshold = int(Fraction(rate) * 2**64)
    if threshold:
        assert draw_poisson(3, rate, words(threshold - 1, threshold, 0)).tolist() == [0, 2]
    else:
        assert draw_poisson(2, rate, words(0, 1)).tolist() == []
    assert Fraction(threshold, 2**64) <= Fraction(rate)
    assert draw_poisson(2, rate, words(2**64 - 1, 2**64 - 1)).tolist() == []


def test_poisson_draws_are_independent_of_each_other():
    """All 2^5 sets come as often as independent coins give them, over 40,000 draws (chi-square)."""
    source, rate, count = Seeded("poisson"), 0.3, 40_000
    seen = Counter(tuple(draw_poisson(5, rate, source).tolist()) for _ in range(count))
    subsets = [subset for size in range(6) for subset in itertools.combinations(range(5), size)]
    expected = [count * rate ** len(subset) * (1 - rate) ** (5 - len(subset)) for subset in subsets]
    assert set(seen) <= set(subsets)
    assert stats.chisquare([seen[subset] for subset in subsets], expected).pvalue > 0.01


def test_large_draws_continue_after_the_first_block(monkeypatch):
    whole = draw_poisson(3000, 0.25, Seeded("blocks"))
    monkeypatch.setattr(noise, "_DRAWN_AT_ONCE", 1000)
    drawn = draw_poisson(3000, 0.25, Seeded("blocks"))
    assert drawn.dtype == whole.dtype == np.int64
    for first in (0, 1000, 2000):
        assert 200 < ((drawn >= first) & (drawn < first + 1000)).sum() < 300
    assert (np.diff(drawn) > 0).all()


def test_certain_and_empty_draws():
    assert draw_poisson(4, 1.0, Written(b"")).tolist() == [0, 1, 2, 3]
    assert draw_poisson(0, 0.5, Written(b"")).tolist() == []
    assert draw_fixed(3, 3, words(5, 1, 9)).tolist() == [0, 1, 2]
    assert draw_fixed(3, 0, words(5, 1, 9)).tolist() == []


@pytest.mark.parametrize(("count", "lot"), [(4, 1), (4, 2), (5, 3), (5, 5)])
def test_every_set_is_equally_likely_exactly(count, lot):
    """Over all orders of distinct numbers, which are equally likely, each set comes equally often."""
    seen = Counter(
        tuple(draw_fixed(count, lot, words(*order)).tolist())
        for order in itertools.permutations([3, 2**40, 2**62, 2**63, 2**64 - 1][:count])
    )
    subsets = list(itertools.combinations(range(count), lot))
    assert set(seen) == set(subsets)
    assert len(set(seen.values())) == 1


def test_equal_numbers_are_drawn_again():
    assert draw_fixed(3, 1, words(7, 7, 7, 9, 9, 1, 6, 4, 5)).tolist() == [1]


def test_large_fixed_lots_are_uniform():
    source, count = Seeded("fixed"), 30_000
    seen = Counter(tuple(draw_fixed(6, 2, source).tolist()) for _ in range(count))
    assert len(seen) == 15
    assert stats.chisquare(list(seen.values())).pvalue > 0.01
    drawn = draw_fixed(100_000, 5000, source)
    assert len(np.unique(drawn)) == 5000
    assert stats.kstest(drawn / 100_000, "uniform").pvalue > 0.01


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_invalid_rates_are_refused(rate):
    with pytest.raises(ValueError, match="sampling rate"):
        draw_poisson(5, rate, Written(b""))


def test_impossible_draws_are_refused():
    with pytest.raises(ValueError, match="lot of 6"):
        draw_fixed(5, 6, Written(b""))
    with pytest.raises(ValueError, match="number of examples"):
        draw_poisson(-1, 0.5, Written(b""))
