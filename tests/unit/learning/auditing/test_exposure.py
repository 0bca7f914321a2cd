"""Exposure: ranks, the fitted tail, and the range of what was never planted."""

import math

import numpy as np
import pytest
from scipy import stats

from learning.auditing.exposure import (
    candidates_of,
    exposure_range,
    exposures_of,
    extrapolated_exposure,
    make_canaries,
    sampled_exposure,
)
from simulation.virtual_members import SeededRandom


def test_canaries_have_their_own_prompts_and_uniform_digits() -> None:
    made = make_canaries(100_000, SeededRandom("canaries"))
    assert len({each.prompt for each in made}) == 100_000
    counts = np.bincount(np.array([each.secret for each in made]).ravel(), minlength=10)
    # 600,000 digits: chi squared with 9 degrees of freedom, at 1 in 10,000. The remainder of a byte would be at 220.
    assert float(((counts - 60_000.0) ** 2 / 60_000).sum()) < stats.chi2.ppf(1 - 1e-4, 9)
    assert made[0].bits == pytest.approx(6 * math.log2(10))
    assert made[0].response == " ".join(map(str, made[0].secret))
    assert made[0].response not in repr(made[0])


def test_candidates_are_other_secrets_after_the_same_prompt() -> None:
    canary = make_canaries(1, SeededRandom("one"), digits=2)[0]
    found = candidates_of(canary, 50, SeededRandom("others"))
    assert len({each.secret for each in found}) == 50
    assert canary.secret not in {each.secret for each in found}
    assert {each.prompt for each in found} == {canary.prompt}
    with pytest.raises(ValueError, match="ask for fewer or for more digits"):
        candidates_of(canary, 51, SeededRandom("others"))


def test_sampled_exposure_is_by_rank() -> None:
    candidates = np.array([[10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]] * 4)
    # Ranks 1, 2 (an equal loss is before it), 5 and 8 of 8.
    found = sampled_exposure(np.array([9.0, 10.0, 13.5, 99.0]), candidates)
    assert found.tolist() == pytest.approx([3.0, 2.0, math.log2(8 / 5), 0.0])


def test_extrapolated_exposure_is_the_mass_below_the_loss() -> None:
    draws = np.random.default_rng(0)
    candidates = stats.skewnorm.rvs(-2.0, loc=40, scale=3, size=(3, 2000), random_state=draws)
    losses = np.array([38.0, 30.0, 10.0])
    bits, fit = extrapolated_exposure(losses, candidates)
    # In the body it is the true mass, and what ranks say.
    assert bits[0] == pytest.approx(-math.log2(stats.skewnorm.cdf(38.0, -2.0, 40, 3)), abs=0.15)
    assert bits[0] == pytest.approx(sampled_exposure(losses, candidates)[0], abs=0.15)
    # Far out, where no rank goes on and scipy's own distribution function fails: the normal tail, within a few percent.
    assert bits[2] == pytest.approx(-stats.norm.logcdf(10.0, 40, 3) / math.log(2), rel=0.1)
    assert bits[1] == pytest.approx(-math.log2(stats.skewnorm.cdf(30.0, -2.0, 40, 3)), rel=0.1)
    assert bits[2] > 60 > bits[1]
    assert fit.min() > 0.01


def test_the_fitted_tail_is_that_of_the_normal_distribution_at_any_depth() -> None:
    from learning.auditing.exposure import _log_mass

    for upper in (-37.0, -20.0, -3.0, 0.0, 2.0):
        assert _log_mass(upper, 0.0, 0.0, 1.0) == pytest.approx(stats.norm.logcdf(upper), rel=1e-3)
    assert _log_mass(50.0, 0.0, 0.0, 1.0) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("candidates", [100, 199, 1000])
def test_what_was_never_planted_is_inside_the_range_as_often_as_it_says(candidates: int) -> None:
    draws = np.random.default_rng(candidates)
    low, high = exposure_range(candidates)
    # Skewed losses: the range assumes no distribution.
    drawn = draws.exponential(1.0, (4000, candidates + 1))
    found = sampled_exposure(drawn[:, 0], drawn[:, 1:])
    error = 3 * math.sqrt(0.025 * 0.975 / 4000)
    assert (found > high).mean() <= 0.025 + error
    assert (found < low).mean() <= 0.025 + error
    # It is no wider than it must be: one rank more on each side would be too much.
    assert ((found > high) | (found < low)).mean() >= 0.05 - 2 / candidates - 2 * error


def test_the_range_of_a_mean_is_narrower_and_holds_means() -> None:
    low, high = exposure_range(200, 8)
    drawn = np.random.default_rng(5).normal(0, 1, (8 * 2000, 201))
    means = sampled_exposure(drawn[:, 0], drawn[:, 1:]).reshape(2000, 8).mean(axis=1)
    assert 0.93 <= ((low <= means) & (means <= high)).mean() <= 0.97
    assert exposure_range(200)[0] < low < high < exposure_range(200)[1]


def test_planted_canaries_are_outside_and_others_inside() -> None:
    draws = np.random.default_rng(9)
    candidates = draws.normal(50, 4, (6, 150))
    clean = exposures_of(draws.normal(50, 4, 6), candidates)
    assert not clean.remembered
    assert clean.inside >= 5
    planted = exposures_of(np.full(6, 12.0), candidates)
    assert planted.remembered
    assert planted.inside == 0
    assert planted.sampled.tolist() == pytest.approx([math.log2(151)] * 6)
    assert planted.extrapolated.min() > math.log2(151)


def test_a_diverged_model_is_refused() -> None:
    with pytest.raises(ValueError, match="the model diverged"):
        sampled_exposure(np.array([np.nan]), np.ones((1, 100)))
    with pytest.raises(ValueError, match="expected"):
        sampled_exposure(np.ones(2), np.ones((1, 100)))
