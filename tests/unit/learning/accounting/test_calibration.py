"""Noise for a budget and rounds for noise: the answer is the smallest that passes, and the gate itself agrees."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.accounting.calibration import (
    MAX_ROUNDS,
    NotAffordable,
    calibrate,
    calibrate_pld,
    epsilon_at_gate,
    repeated,
    rounds_affordable,
)
from learning.accounting.events import DiscreteGaussianSum, FixedLotGaussian, Laplace, SampledGaussian
from learning.accounting.spend import ORDERS, EventUnaccountable, Limit, RenyiFilter, cost, epsilon_pld

LIMIT = Limit(3.0, 1e-6)
REPLACE = Limit(3.0, 1e-6, "replace-one")
NOTHING = np.zeros(len(ORDERS))

# The event at a multiplier, and its limit.
KINDS = {
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

    def passing(multiplier):
        gate, spent, each = RenyiFilter(limit), NOTHING, cost(event_at(multiplier), limit)
        for done in range(rounds):
            if not gate.admits(spent, each):
                return done
            spent = spent + each
        return rounds

    assert passing(found) == rounds
    assert passing(before(found)) < rounds


def test_the_answer_for_the_plain_gaussian_follows_the_formula():
    """T alpha / (2 z^2) = epsilon - ln(m / delta) / (alpha - 1), at the best order."""
    event_at, _ = KINDS["output"]
    found = calibrate(event_at, 100, LIMIT)
    room = [(order, 3.0 - math.log(len(ORDERS) / 1e-6) / (order - 1)) for order in ORDERS]
    exact = 2 * min(math.sqrt(100 * order / (2 * cap)) for order, cap in room if cap > 0)
    assert exact <= found <= exact * 1.01


@pytest.mark.parametrize("kind", ["dp-sgd", "gaussian-update", "output", "laplace"])
def test_the_plds_answer_is_the_smallest_that_it_allows(kind):
    event_at, limit = KINDS[kind]
    found = calibrate_pld(event_at, 20, limit)

    def epsilon(multiplier):
        return epsilon_pld([repeated(event_at(multiplier), 20)], limit.delta, limit.adjacency)

    assert found < calibrate(event_at, 20, limit)
    assert epsilon(found) <= limit.epsilon < epsilon(before(found))


@pytest.mark.parametrize("kind", ["fixed", "ring"])
def test_without_a_pld_there_is_no_answer(kind):
    event_at, limit = KINDS[kind]
    assert calibrate_pld(event_at, 20, limit) is None


def test_a_budget_that_no_noise_keeps_is_refused():
    event_at, _ = KINDS["output"]
    for search in (calibrate, calibrate_pld):
        with pytest.raises(NotAffordable, match=r"epsilon 0.001 at delta 1e-06 .* 10 rounds"):
            search(event_at, 10, Limit(0.001, 1e-6))


def test_the_smallest_multiplier_may_be_enough():
    event_at = KINDS["output"][0]
    generous = Limit(1e6, 1e-6)
    assert calibrate(event_at, 1, generous) == 0.01
    assert calibrate_pld(event_at, 1, generous) == 0.01


def test_earlier_spending_needs_more_noise_and_leaves_fewer_rounds():
    event_at, limit = KINDS["dp-sgd"]
    spent = 5 * cost(event_at(3.0), limit)
    assert calibrate(event_at, 20, limit, spent) > calibrate(event_at, 20, limit)
    fresh = rounds_affordable(event_at(3.0), limit)
    assert rounds_affordable(event_at(3.0), limit, spent) == fresh - 5
    assert rounds_affordable(event_at(3.0), limit, fresh * cost(event_at(3.0), limit)) == 0
    assert rounds_affordable(event_at(3.0), limit, np.full(len(ORDERS), np.inf)) == 0


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(sorted(KINDS)),
    st.floats(1.0, 50.0),
    st.floats(0.2, 20),
    st.sampled_from([1e-5, 1e-9]),
    st.floats(0, 1),
)
def test_a_ledger_admits_as_many_rounds_as_were_planned(kind, multiplier, epsilon, delta, used):
    event_at, of_kind = KINDS[kind]
    limit = Limit(epsilon, delta, of_kind.adjacency)
    gate, each = RenyiFilter(limit), cost(event_at(multiplier), limit)
    spent = used * 3 * each
    planned = rounds_affordable(event_at(multiplier), limit, spent)
    for _ in range(min(planned, 5000)):
        assert gate.admits(spent, each)
        spent = spent + each
    if planned <= 5000:
        assert not gate.admits(spent, each * (1 + 1e-7))


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
        assert RenyiFilter(near).admits(NOTHING, cost(whole, near)) is passes


def test_a_wrong_unit_or_adjacency_is_refused():
    event_at, _ = KINDS["dp-sgd"]
    for call in (
        lambda limit: calibrate(event_at, 3, limit),
        lambda limit: calibrate_pld(event_at, 3, limit),
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
    ("rate", "rounds", "epsilon"), [(0.01, 1000, 1.0), (0.01, 1000, 8.0), (0.1, 50, 4.0), (1.0, 100, 2.0)]
)
def test_the_gate_needs_a_sixth_to_two_thirds_more_noise_than_the_pld(rate, rounds, epsilon):
    """The documentation says so, at delta 1e-5."""
    limit = Limit(epsilon, 1e-5)

    def event_at(multiplier):
        return SampledGaussian(multiplier=multiplier, rate=rate)

    ratio = calibrate(event_at, rounds, limit) / calibrate_pld(event_at, rounds, limit)
    assert 1.16 < ratio < 1.67
