"""Estimates from noised sums, and when a job stops by them."""

import math

import numpy as np
import pytest

from coordinator.domain.validation import MIN_RATIO, Measured, StoppingRule, best_of, estimate, judge
from learning.validation.contribution import metrics_of, noised
from secure_agg.discrete_gaussian import DiscreteGaussian
from tacit.validation import HALF, MetricNoise
from tests.support.random_sources import Seeded

BOUND = 4.0
RULE = StoppingRule(patience=2, min_improvement=0.02)


def test_a_sum_without_visible_noise_gives_the_means():
    total = [HALF * 2000 - 2 * HALF * 500, HALF * 2000 - 2 * HALF * 400, HALF * 2000]
    found = estimate(total, 2, MetricNoise(0.01, 2000), BOUND)
    assert found is not None
    assert found.accuracy.value == pytest.approx(0.8)
    assert found.loss.value == pytest.approx(0.75 * BOUND)
    assert found.units.value == 2000
    assert found.accuracy.error < 0.001


@pytest.mark.parametrize("accuracy", [0.5, 0.9])
def test_the_stated_error_is_the_error(accuracy):
    noise, members, rows = MetricNoise(20.0, 1000), 4, 500
    random = np.random.default_rng(7)
    errors = {"accuracy": [], "loss": [], "units": []}
    for at in range(1500):
        losses = random.random(rows * members) * BOUND
        right = random.random(rows * members) < accuracy
        total = metrics_of(losses, right, range(rows * members), BOUND, Seeded(f"{at}"))
        for member in range(members):
            total = total + noised(None, noise, Seeded(f"{at}/{member}"))
        found = estimate(total.tolist(), members, noise, BOUND)
        assert found is not None
        errors["accuracy"].append((found.accuracy.value - right.mean()) / found.accuracy.error)
        errors["loss"].append((found.loss.value - losses.mean()) / found.loss.error)
        errors["units"].append((found.units.value - rows * members) / found.units.error)
    for name, each in errors.items():
        scaled = np.array(each)
        # Four standard errors of a standard deviation, and a little for the delta method.
        assert scaled.std() == pytest.approx(1, abs=4 / math.sqrt(2 * 1500) + 0.02), name
        assert abs(scaled.mean()) < 4 / math.sqrt(1500) + 0.02, name


def test_ninety_five_of_a_hundred_truths_lie_within_the_stated_error():
    """The smallest cohort of `benchmarks.metrics` at its noise, with the noise alone and many draws of it."""
    noise, members, units, accuracy, runs = MetricNoise(39.4, 4000), 3, 3000, 0.7, 6000
    drawn = DiscreteGaussian(noise.std).sample(3 * members * runs, Seeded("many")).reshape(runs, members, 3)
    clear = np.array([0, round((2 * accuracy - 1) * HALF * units), HALF * units])
    within = 0
    for sums in drawn.sum(axis=1, dtype=np.int64):
        found = estimate((clear + sums).tolist(), members, noise, BOUND)
        assert found is not None
        within += abs(found.accuracy.value - accuracy) <= 1.96 * found.accuracy.error
    # Four standard errors.
    assert within / runs == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / runs))


def test_nothing_is_shown_of_members_that_measure_nothing():
    noise = MetricNoise(20.0, 1000)
    for at in range(300):
        total = sum(noised(None, noise, Seeded(f"{at}/{member}")) for member in range(5))
        assert estimate(total.tolist(), 5, noise, BOUND) is None


def test_nothing_is_shown_below_the_minimum_of_units():
    noise = MetricNoise(0.01, 1000)
    assert estimate([0, 0, HALF * 29], 2, noise, BOUND) is None
    assert estimate([0, 0, HALF * 31], 2, noise, BOUND) is not None
    loud = MetricNoise(20.0, 1000)
    error = 2 * math.sqrt(2) * loud.std / (2 * HALF)
    assert estimate([0, 0, int(HALF * (MIN_RATIO * error - 1))], 2, loud, BOUND) is None
    assert estimate([0, 0, int(HALF * (MIN_RATIO * error + 1))], 2, loud, BOUND) is not None


def test_a_sum_that_no_valid_inputs_make_is_refused():
    noise = MetricNoise(1.0, 100)
    with pytest.raises(ValueError, match="no valid metrics of 3 members"):
        estimate([0, 0, 3 * noise.largest + 1], 3, noise, BOUND)


def shown(*values, error=0.005):
    return [None if value is None else Measured(value, error) for value in values]


def test_a_job_stops_when_its_accuracy_no_longer_improves():
    found = judge(shown(0.5, 0.6, 0.7, 0.705, 0.703), RULE)
    assert (found.stop, found.stale, found.best, found.reference) == (True, 2, 3, 2)


def test_a_job_goes_on_while_it_improves():
    found = judge(shown(0.5, 0.53, 0.56, 0.59, 0.62), RULE)
    assert (found.stop, found.stale, found.best) == (False, 0, 4)


def test_a_job_without_patience_never_stops():
    found = judge(shown(0.5, *[0.6] * 9), StoppingRule(patience=0, min_improvement=0.02))
    assert (found.stop, found.stale, found.best, found.reference) == (False, 8, 1, 1)


def test_slow_improvements_add_up():
    """Each is below the least improvement, and compared with the last version that improved, not with the last one."""
    assert not judge(shown(0.5, 0.514, 0.528, 0.542, 0.556), RULE).stop


def test_noise_larger_than_the_least_improvement_stops_nothing():
    """Noise alone sets the version that others are compared with too high. These jobs improve all the time."""
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(scale=0.05, size=30)
        found = judge([Measured(0.5 + 0.005 * at + each, 0.05) for at, each in enumerate(noise)], RULE)
        assert (found.stop, found.stale) == (False, 0)


def test_what_is_not_shown_counts_for_nothing():
    assert judge([None, None, None], RULE).best is None
    assert not judge(shown(0.6, None, None, None), RULE).stop
    assert judge(shown(0.6, None, 0.6, None, 0.6), RULE).stop


def test_the_first_of_equally_good_versions_is_the_best():
    assert best_of(shown(None, 0.6, 0.7, 0.7)) == 2
    assert best_of([None, None]) is None
    assert best_of([]) is None


def test_the_best_version_is_not_one_that_only_a_large_error_lifts():
    found = judge([Measured(0.70, 0.01), Measured(0.72, 0.10)], RULE)
    assert found.best == 0
