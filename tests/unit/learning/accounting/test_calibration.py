"""Noise for a budget and rounds for noise: the answer is the smallest that passes, and the gate itself agrees."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from learning.accounting.calibration import (
    MAX_ROUNDS,
    NotAffordable,
    calibrate,
    calibrate_fixed,
    epsilon_at_gate,
    repeated,
    rounds_affordable,
)
from learning.accounting.events import DiscreteGaussianSum, FixedLotGaussian, Laplace, PrivacyEvent, SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter
from learning.accounting.renyi import EventUnaccountable
from learning.accounting.spend import spend
from tests.support.sweep import sweep

LIMIT = Limit(3.0, 1e-6)
REPLACE = Limit(3.0, 1e-6, "replace-one")

# The event at a multiplier, and its limit.
KINDS: dict[str, tuple[Callable[[float], PrivacyEvent], Limit]] = {
    "dp-sgd": (lambda z: SampledGaussian(multiplier=z, rate=0.05, steps=10), LIMIT),
    "gaussian-update": (lambda z: SampledGaussian(multiplier=z / 2, rate=0.1), LIMIT),
    "output": (lambda z: SampledGaussian(multiplier=z / 2, rate=1), LIMIT),
    "fixed": (lambda z: FixedLotGaussian(multiplier=z / 2, lot=10, population=100), REPLACE),
    "laplace": (lambda z: Laplace(epsilon=1 / z), REPLACE),
    "ring": (lambda z: DiscreteGaussianSum(honest=2, std=4096, distance=8192 / z, values=1000), LIMIT),
}


def before(multiplier):
    """The next smaller number of three digits."""
    decade = 10.0 ** (math.floor(math.log10(multiplier) + 1e-12) - 2)
    digits = round(multiplier / decade)
    return (digits - 1) * decade if digits > 100 else 999 * decade / 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1, 40])
def test_the_gate_admits_all_rounds_at_the_noise_found_and_not_below(kind, rounds):
    event_at, limit = KINDS[kind]
    found = calibrate(event_at, rounds, limit)
    assert found == float(f"{found:.3g}")

    gate = PrivacyFilter(limit)
    assert gate.admits([event_at(found)] * rounds)
    assert not gate.admits([event_at(before(found))] * rounds)


def test_the_answer_for_the_plain_gaussian_follows_the_closed_form():
    """The delta of a Gaussian (Balle, Wang 2018) at the homogeneous filter's three quarters, with mu = 10 / (z / 2)."""
    event_at, _ = KINDS["output"]

    def delta(multiplier):
        mu = 20 / multiplier
        return norm.cdf(mu / 2 - 3.0 / mu) - math.exp(3.0) * norm.cdf(-mu / 2 - 3.0 / mu)

    exact = brentq(lambda z: delta(z) - 0.75e-6, 10, 100)
    assert exact <= calibrate(event_at, 100, LIMIT) <= exact * 1.011


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_of_a_fixed_plan_is_the_smallest_that_it_allows(kind):
    event_at, limit = KINDS[kind]
    found = calibrate_fixed(event_at, 20, limit)

    def epsilon(multiplier):
        return spend([repeated(event_at(multiplier), 20)], limit).epsilon

    assert found <= calibrate(event_at, 20, limit)
    assert epsilon(found) <= limit.epsilon < epsilon(before(found))


def test_a_budget_that_no_noise_keeps_is_refused():
    event_at, _ = KINDS["output"]
    for search in (calibrate, calibrate_fixed):
        with pytest.raises(NotAffordable, match=r"epsilon 0.001 at delta 1e-06 .* 10 rounds"):
            search(event_at, 10, Limit(0.001, 1e-6))


def test_the_smallest_multiplier_may_be_enough():
    event_at = KINDS["output"][0]
    generous = Limit(1e6, 1e-6)
    assert calibrate(event_at, 1, generous) == 0.01
    assert calibrate_fixed(event_at, 1, generous) == 0.01


def test_earlier_spending_needs_more_noise_and_leaves_fewer_rounds():
    event_at, limit = KINDS["dp-sgd"]
    event, other = event_at(3.0), SampledGaussian(multiplier=5.0, rate=0.2)
    assert calibrate(event_at, 20, limit, [other]) > calibrate(event_at, 20, limit)
    fresh = rounds_affordable(event, limit)
    assert rounds_affordable(event, limit, [event] * 5) == fresh - 5
    assert rounds_affordable(event, limit, [repeated(event, fresh)]) == 0
    assert rounds_affordable(event, limit, [repeated(event, 2 * fresh)]) == 0
    # Beside another kind of event, only the Rényi filter decides.
    assert 0 < rounds_affordable(event, limit, [other]) < 0.9 * fresh


def test_no_more_rounds_are_counted_than_are_needed():
    event, limit = KINDS["dp-sgd"][0](3.0), LIMIT
    fresh = rounds_affordable(event, limit)
    for most in (0, 1, fresh // 2, fresh - 1, fresh, fresh + 1):
        assert rounds_affordable(event, limit, most=most) == min(most, fresh)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(sorted(KINDS)),
    st.floats(1.0, 50.0),
    st.floats(0.2, 20),
    st.sampled_from([1e-5, 1e-9]),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_ledger_admits_as_many_rounds_as_were_planned(kind, multiplier, epsilon, delta, used, mixed):
    event_at, of_kind = KINDS[kind]
    limit, event = Limit(epsilon, delta, of_kind.adjacency), event_at(multiplier)
    spent = [event_at(2 * multiplier if mixed else multiplier)] * used
    gate, planned = PrivacyFilter(limit), rounds_affordable(event, limit, spent)
    if planned:
        assert gate.admits([*spent, repeated(event, planned)])
    if planned < 100_000:
        assert not gate.admits([*spent, repeated(event, planned + 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_counted_exactly_up_to_the_cap(kind):
    event_at, limit = KINDS[kind]
    event = event_at(8.0)
    needed = epsilon_at_gate(repeated(event, 30), limit.delta, limit.adjacency)
    for factor, rounds in ((1 + 1e-7, 30), (1 - 1e-7, 29)):
        assert rounds_affordable(event, Limit(needed * factor, limit.delta, limit.adjacency)) == rounds


def test_an_almost_free_release_gets_the_largest_number_of_rounds():
    assert rounds_affordable(SampledGaussian(multiplier=1e9, rate=1e-6), LIMIT) == MAX_ROUNDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_epsilon_of_a_job_is_the_smallest_limit_that_admits_it(kind):
    event_at, limit = KINDS[kind]
    whole = repeated(event_at(8.0), 30)
    needed = epsilon_at_gate(whole, limit.delta, limit.adjacency)
    for factor, passes in ((1 + 1e-9, True), (1 - 1e-9, False)):
        near = Limit(needed * factor, limit.delta, limit.adjacency)
        assert PrivacyFilter(near).admits([whole]) is passes


def test_a_wrong_unit_or_adjacency_is_refused():
    event_at, _ = KINDS["dp-sgd"]
    for call in (
        lambda limit: calibrate(event_at, 3, limit),
        lambda limit: calibrate_fixed(event_at, 3, limit),
        lambda limit: rounds_affordable(event_at(1.0), limit),
    ):
        for limit in (REPLACE, Limit(3.0, 1e-6, unit="member")):
            with pytest.raises(EventUnaccountable):
                call(limit)


def test_a_job_has_at_least_one_round():
    with pytest.raises(ValueError, match="at least one round"):
        repeated(KINDS["dp-sgd"][0](1.0), 0)
    assert repeated(KINDS["dp-sgd"][0](1.0), 7).steps == 70


@pytest.mark.parametrize(
    ("rate", "rounds", "epsilon", "delta"),
    sweep(
        (
            (*plan, epsilon, delta)
            for plan in ((0.01, 5000), (0.1, 50), (0.256, 200), (1.0, 30))
            for epsilon in (1.0, 2.0, 4.0, 8.0)
            for delta in (1e-5, 1e-6)
        ),
        (0.01, 5000, 8.0, 1e-6),
        (0.1, 50, 2.0, 1e-5),
        (0.256, 200, 4.0, 1e-6),
        (1.0, 30, 1.0, 1e-5),
    ),
)
def test_a_job_needs_at_most_five_per_cent_more_noise_than_its_pld(rate, rounds, epsilon, delta):
    limit = Limit(epsilon, delta)

    def event_at(multiplier):
        return SampledGaussian(multiplier=multiplier, rate=rate)

    assert 1 <= calibrate(event_at, rounds, limit) / calibrate_fixed(event_at, rounds, limit) <= 1.05
