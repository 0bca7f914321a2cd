"""The matrices of correlated noise: their error two ways, golden values, jax-privacy's beside ours, and exact norms."""

import math
from fractions import Fraction

import numpy as np
import pytest
from pydantic import ValidationError

from learning.mechanisms.banded import best_coefficients, error_of, independent_error, prefix_variances, square_root
from tacit import mechanism
from tacit.mechanism import MAX_BAND, DpSgd


def dense(coefficients, steps):
    """C, (T, T)."""
    return sum(each * np.eye(steps, k=-j) for j, each in enumerate(coefficients))


@pytest.mark.parametrize(("band", "steps"), [(1, 7), (2, 7), (3, 20), (8, 50)])
def test_the_error_is_that_of_the_dense_matrix(band, steps):
    c = square_root(band)
    sums = np.tril(np.ones((steps, steps))) @ np.linalg.inv(dense(c, steps))
    assert np.allclose(prefix_variances(c, steps), (sums**2).sum(axis=1))
    largest = np.sqrt((dense(c, steps) ** 2).sum(axis=0).max())
    assert error_of(c, steps) == pytest.approx(np.linalg.norm(sums) / math.sqrt(steps) * largest)


def with_root(ratio):
    """Two bands whose noise is `ratio` times as large at each step, and a norm just below 1."""
    first = (1 - 1e-9) / math.sqrt(1 + ratio**2)
    return first, first * ratio


def test_independent_noise_is_one_band():
    assert best_coefficients(1, 9) == (1.0,)
    assert error_of(np.array([1.0]), 9) == pytest.approx(independent_error(9)) == pytest.approx(math.sqrt(5))


def test_two_bands_by_hand():
    # With c = (1, r): a = 1, 1 - r, 1 - r + r^2, and the error for T = 2 is (1 + r^2)(2 + (1 - r)^2) / 2.
    best = np.array(best_coefficients(2, 2))
    ratio = np.linspace(0, 1, 100_001)
    by_hand = ratio[np.argmin((1 + ratio**2) * (2 + (1 - ratio) ** 2))]
    assert best[1] / best[0] == pytest.approx(by_hand, abs=2e-5)


@pytest.mark.parametrize(
    ("band", "steps", "error"),
    [(2, 30, 2.9810), (4, 30, 2.4071), (8, 100, 3.1253), (16, 500, 4.7017), (32, 500, 3.8186)],
)
def test_golden_errors(band, steps, error):
    found = np.array(best_coefficients(band, steps))
    assert error_of(found, steps) == pytest.approx(error, rel=1e-3)
    assert error_of(found, steps) <= error_of(square_root(band), steps) * (1 + 1e-9)
    # No direction leads further down.
    for k in range(band):
        for by in (-1e-3, 1e-3):
            moved = found.copy()
            moved[k] += by
            assert error_of(moved, steps) >= error_of(found, steps) * (1 - 1e-6)


# jax compiles its search for each shape, which takes three seconds.
@pytest.mark.parametrize(
    ("band", "steps"),
    [pytest.param(2, 30, marks=pytest.mark.long), (8, 100), pytest.param(16, 200, marks=pytest.mark.long)],
)
def test_jax_privacy_finds_no_better_matrix_and_the_same_errors(band, steps):
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    theirs = np.array(toeplitz.optimize_banded_toeplitz(steps, band), dtype=np.float64)
    ours = np.array(best_coefficients(band, steps))
    errors = np.array(toeplitz.per_query_error(strategy_coef=ours, n=steps))
    assert np.allclose(errors, prefix_variances(ours, steps), rtol=1e-4)
    assert error_of(ours, steps) <= error_of(theirs, steps) * (1 + 1e-5)
    assert error_of(ours, steps) == pytest.approx(error_of(theirs, steps), rel=2e-3)


def test_jax_privacys_sensitivity_is_the_root_of_the_participations():
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    for band, steps in ((4, 32), (8, 100)):
        found = toeplitz.minsep_sensitivity_squared(np.array(best_coefficients(band, steps)), min_sep=band, n=steps)
        # Their last columns are cut off at T and ours are counted whole.
        assert float(found) <= -(-steps // band) * (1 + 1e-5)
        assert float(found) > -(-steps // band) - 1


def test_norms_are_below_one_exactly():
    for band, steps in ((2, 2), (3, 10), (17, 60), (MAX_BAND, 200)):
        found = best_coefficients(band, steps)
        assert 1 - Fraction(1, 10**6) < sum(Fraction(each) ** 2 for each in found) <= 1
        assert DpSgd(noise_multiplier=1.0, coefficients=found).band == band


@pytest.mark.parametrize(
    ("coefficients", "why"),
    [
        ((1.0, 2.0**-40), "add up to more than 1"),
        # One unit in the last place too long: floating-point arithmetic would round the sum to 1.
        ((math.nextafter(1.0, 2.0), 0.0), "less than or equal to 1"),
        ((0.6, 0.8000000000000002), "add up to more than 1"),
        ((0.0, 0.5), "the first must be positive"),
        ((), "the first must be positive"),
        ((0.05, 0.99), "grow from step to step"),
        ((5e-324, 0.5), "grow from step to step"),
        # These grow too slowly to be seen in the first 1,000 steps: by 1.002 and 1.0005 a step, or not at all.
        (with_root(1.002), "grow from step to step"),
        (with_root(-1.0005), "grow from step to step"),
        (with_root(1.0), "grow from step to step"),
        ((0.5, *[0.0] * 62, 0.501), "grow from step to step"),
        ((0.5,), "the only coefficient is 1"),
        ((0.1,) * (MAX_BAND + 1), "at most"),
        ((float("nan"), 0.1), "coefficients"),
    ],
)
def test_a_member_refuses_a_matrix_that_is_longer_than_it_claims(coefficients, why):
    with pytest.raises(ValidationError, match=why):
        DpSgd(noise_multiplier=1.0, coefficients=coefficients)


@pytest.mark.parametrize("coefficients", [with_root(1.002), with_root(-1.0005)])
def test_noise_that_grows_late_grows_without_bound(coefficients):
    """What the refusal is for: at most 16 for 1,000 steps, and past 2^20 in a job's million."""
    entries = [1 / coefficients[0]]
    for _ in range(40_000):
        entries.append(-coefficients[1] * entries[-1] / coefficients[0])
    assert max(abs(each) for each in entries[:1000]) <= 16
    assert abs(entries[-1]) > 2.0**20


def test_the_matrices_of_our_own_plans_pass():
    for band in (2, 3, 4, 8, 16, 32, MAX_BAND):
        for steps in (band, 2 * band, 300, 5_000):
            found = best_coefficients(band, max(steps, band))
            assert DpSgd(noise_multiplier=1.0, steps=1_000_000, coefficients=found).band == band
    # Noise that dies out slowly, too.
    assert DpSgd(noise_multiplier=1.0, steps=1_000_000, coefficients=with_root(-0.999)).band == 2


def test_the_check_ends_undecided_after_a_bounded_number_of_products(monkeypatch):
    """A document must not cost what it asks for. Noise that dies out too slowly to be proved is refused."""
    assert mechanism._ENTRIES <= 1 << 16
    slow = with_root(-0.9995)
    assert DpSgd(noise_multiplier=1.0, steps=1_000_000, coefficients=slow).band == 2
    monkeypatch.setattr(mechanism, "_ENTRIES", 1)
    with pytest.raises(ValidationError, match="grow from step to step"):
        DpSgd(noise_multiplier=1.0, steps=1_000_000, coefficients=slow)


def test_the_sum_is_exact_where_floats_round():
    c = (0.6, 0.8)
    # In floating point this is 1.0; exactly it is more.
    assert c[0] ** 2 + c[1] ** 2 == 1.0
    assert sum(Fraction(each) ** 2 for each in c) > 1
    with pytest.raises(ValidationError, match="add up to more than 1"):
        DpSgd(noise_multiplier=1.0, coefficients=c)


def test_a_band_outside_the_steps_is_refused():
    for band in (0, 6):
        with pytest.raises(ValueError, match="bands"):
            best_coefficients(band, 5)
    with pytest.raises(ValueError, match="at least one band"):
        square_root(0)
