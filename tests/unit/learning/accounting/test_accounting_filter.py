"""The gate: what it admits, what it never admits, and that everything admitted stays within the limit."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.accounting.events import FixedLotGaussian, Laplace, SampledGaussian
from learning.accounting.spend import (
    ORDERS,
    EventUnaccountable,
    Limit,
    RenyiFilter,
    cost,
    epsilon_counted,
    epsilon_pld,
    epsilon_renyi,
    renyi,
    spend,
    total,
)

ALPHA = np.array(ORDERS)
NOTHING = np.zeros(len(ORDERS))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"epsilon": 0.0}, "epsilon must be a positive number"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta must lie between 0 and 1"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"adjacency": "swap"}, "adjacency must be add-remove or replace-one, got 'swap'"),
        ({"unit": "household"}, "unit must be example or member, got 'household'"),
    ],
)
def test_an_invalid_limit_is_refused(numbers, said):
    with pytest.raises(ValueError, match=said):
        Limit(**{"epsilon": 1.0, "delta": 1e-5, **numbers})


def test_each_cap_pays_for_the_union_over_all_orders():
    caps = RenyiFilter(Limit(3.0, 1e-6)).caps
    expected = [3.0 - math.log(len(ORDERS) / 1e-6) / (order - 1) for order in ORDERS]
    np.testing.assert_allclose(caps, expected, rtol=1e-14)
    assert caps[0] < 0 < caps[-1] < 3.0
    with pytest.raises(ValueError, match="read-only"):
        caps[0] = 100


def test_an_event_passes_exactly_up_to_the_cap_of_one_order():
    gate = RenyiFilter(Limit(3.0, 1e-6))
    for at in np.flatnonzero(gate.caps > 0):
        just = np.full(len(ORDERS), np.inf)
        just[at] = gate.caps[at]
        assert gate.admits(NOTHING, just)
        assert gate.admits(just, NOTHING)
        just[at] = math.nextafter(gate.caps[at], math.inf)
        assert not gate.admits(NOTHING, just)


def test_an_order_without_a_positive_cap_admits_nothing():
    gate = RenyiFilter(Limit(3.0, 1e-6))
    free = np.where(gate.caps > 0, np.inf, 0.0)
    assert not gate.admits(NOTHING, free)
    # No order has any room here, so not even a free event passes.
    hopeless = RenyiFilter(Limit(1e-4, 1e-9))
    assert not hopeless.admits(NOTHING, NOTHING)
    assert hopeless.remaining(NOTHING) == 0


@pytest.mark.parametrize("wrong", [NOTHING - 1e-9, np.full(len(ORDERS), np.nan), np.zeros(3), np.array(0.0)])
def test_arrays_that_are_no_divergences_are_refused(wrong):
    gate = RenyiFilter(Limit(3.0, 1e-6))
    for call in (
        lambda: gate.admits(wrong, NOTHING),
        lambda: gate.admits(NOTHING, wrong),
        lambda: gate.remaining(wrong),
    ):
        with pytest.raises(ValueError, match="Rényi divergences"):
            call()


@pytest.mark.parametrize("spent", [0, 1, 7])
def test_the_counted_epsilon_is_the_smallest_limit_that_admits_it(spent):
    event = SampledGaussian(multiplier=2, rate=0.1)
    before, each = spent * renyi(event, "add-remove"), renyi(event, "add-remove")
    least = epsilon_counted(before + each, 1e-5)
    assert RenyiFilter(Limit(least * (1 + 1e-12), 1e-5)).admits(before, each)
    assert not RenyiFilter(Limit(least * (1 - 1e-12), 1e-5)).admits(before, each)
    assert epsilon_counted(NOTHING, 1e-5) == 0


def test_the_remaining_share_falls_from_one_to_zero_as_events_pass():
    limit = Limit(2.0, 1e-5)
    gate, each = RenyiFilter(limit), cost(SampledGaussian(multiplier=2, rate=0.1), limit)
    spent, left = NOTHING, [1.0]
    while gate.admits(spent, each):
        spent = spent + each
        left.append(gate.remaining(spent))
    assert len(left) > 10
    assert all(after < before for before, after in pairwise(left))
    assert left[-1] < 0.1
    # The share of the limit that the counted epsilon leaves.
    assert left[-1] == 1 - epsilon_counted(spent, limit.delta) / limit.epsilon
    assert gate.remaining(NOTHING) == 1
    assert gate.remaining(spent + 10 * each) == 0
    assert gate.remaining(np.full(len(ORDERS), np.inf)) == 0


def test_an_event_about_another_unit_is_refused():
    event = Laplace(epsilon=0.1, unit="member")
    with pytest.raises(EventUnaccountable, match="protects one member, but the unit of this ledger is one example"):
        cost(event, Limit(1, 1e-5))
    for summary in (total, spend):
        with pytest.raises(EventUnaccountable, match="member"):
            summary([Laplace(epsilon=0.1), event], Limit(1, 1e-5))
    np.testing.assert_array_equal(cost(event, Limit(1, 1e-5, unit="member")), renyi(event, "add-remove"))


def test_an_event_of_another_adjacency_is_refused():
    poisson, fixed = SampledGaussian(multiplier=1, rate=0.1), FixedLotGaussian(multiplier=1, lot=1, population=10)
    for event, adjacency in ((poisson, "replace-one"), (fixed, "add-remove")):
        for call in (cost, lambda event, limit: total([event], limit), lambda event, limit: spend([event], limit)):
            with pytest.raises(EventUnaccountable, match="adjacency"):
                call(event, Limit(1, 1e-5, adjacency))
        with pytest.raises(EventUnaccountable, match="adjacency"):
            epsilon_pld([event], 1e-5, adjacency)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.floats(0.6, 8), st.floats(0.005, 1)), min_size=1, max_size=4),
    st.floats(0.3, 10),
    st.sampled_from([1e-5, 1e-7, 1e-9]),
    st.randoms(use_true_random=False),
)
def test_what_passes_is_within_the_limit_by_every_other_accountant(kinds, epsilon, delta, choice):
    limit = Limit(epsilon, delta)
    gate, spent, passed = RenyiFilter(limit), NOTHING, []
    for _ in range(300):
        multiplier, rate = choice.choice(kinds)
        event = SampledGaussian(multiplier=multiplier, rate=rate)
        if gate.admits(spent, cost(event, limit)):
            spent = spent + cost(event, limit)
            passed.append(event)
    found = spend(passed, limit)
    assert found.renyi <= epsilon
    assert found.epsilon <= epsilon
    assert found.by == "pld"


def test_pure_epsilons_add_up_to_nearly_the_whole_limit():
    """The large orders serve Laplace: 100 rounds of 0.01 leave a hundredth of a limit of 1.01 unused."""
    limit = Limit(1.01, 1e-6)
    assert RenyiFilter(limit).admits(NOTHING, cost(Laplace(epsilon=0.01, steps=100), limit))
    assert not RenyiFilter(Limit(0.05, 1e-9)).admits(NOTHING, cost(Laplace(epsilon=0.05), Limit(0.05, 1e-9)))


def test_one_order_chosen_in_hindsight_would_admit_more():
    """The price of not knowing the best order beforehand: the filter never reaches the cap without ln m."""
    limit = Limit(2.0, 1e-5)
    gate, each = RenyiFilter(limit), cost(SampledGaussian(multiplier=2, rate=0.1), limit)
    most = math.floor(float((gate.caps / each).max()))
    alone = math.floor(float(((2.0 - math.log(1 / 1e-5) / (ALPHA - 1)) / each).max()))
    assert gate.admits(NOTHING, most * each)
    assert most < alone
    assert not gate.admits(NOTHING, alone * each)


def test_the_reported_epsilon_is_below_the_gates():
    spent = cost(SampledGaussian(multiplier=1, rate=0.01, steps=1000), Limit(1, 1e-5))
    assert epsilon_renyi(spent, 1e-5) < float((spent + math.log(len(ORDERS) / 1e-5) / (ALPHA - 1)).min())
