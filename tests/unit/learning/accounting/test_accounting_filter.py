"""The Rényi filter: what it admits, what it never admits, and that its caps add up to its share of delta."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.accounting.events import FixedLotGaussian, Laplace, SampledGaussian
from learning.accounting.filter import RENYI_SHARE, Limit, RenyiFilter, cost, epsilon_mixed
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi
from learning.accounting.spend import epsilon_pld, epsilon_renyi, spend, total

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
        ({"unit": "household"}, "unit must be example, person or member, got 'household'"),
    ],
)
def test_an_invalid_limit_is_refused(numbers, said):
    with pytest.raises(ValueError, match=said):
        Limit(**{"epsilon": 1.0, "delta": 1e-5, **numbers})


def deltas(limit):
    """The hockey-stick divergence at epsilon that each order's cap allows (Canonne, Kamath, Steinke 2020, Prop. 12)."""
    caps = RenyiFilter(limit).caps
    logs = (ALPHA - 1) * (caps - limit.epsilon) - np.log(ALPHA - 1) + ALPHA * np.log1p(-1 / ALPHA)
    return np.exp(logs)


LIMITS = [Limit(0.05, 1e-9), Limit(1.0, 1e-5), Limit(3.0, 1e-6), Limit(8.0, 1e-6), Limit(60.0, 1e-3), Limit(2.0, 0.5)]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_the_caps_of_all_orders_together_allow_the_filters_share_of_delta(limit):
    allowed = deltas(limit)
    assert allowed.sum() == pytest.approx(RENYI_SHARE * limit.delta, rel=1e-9)
    # Most of it belongs to orders near the one that fits the limit.
    best = float(ALPHA[np.argmax(allowed)])
    ideal = 1 + 1.5 * max(4.5, -math.log(limit.delta)) / limit.epsilon
    assert best == min(ORDERS, key=lambda order: abs(math.log((order - 1) / (ideal - 1))))


def test_caps_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        RenyiFilter(Limit(3.0, 1e-6)).caps[0] = 100


@settings(deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(-25, -0.01), st.floats(0.01, 1), st.floats(0, 25))
def test_a_lower_limit_has_no_higher_cap(epsilon, log_delta, lower, fewer):
    """Or else lowering a limit could let events pass that the former limit refused."""
    limit = Limit(epsilon, math.exp(log_delta))
    low = Limit(epsilon * lower, math.exp(log_delta - fewer))
    room = 1e-9 * (1 + np.abs(RenyiFilter(limit).caps))
    assert np.all(RenyiFilter(low).caps <= RenyiFilter(limit).caps + room)


def test_events_pass_exactly_up_to_the_cap_of_one_order():
    gate = RenyiFilter(Limit(3.0, 1e-6))
    for at in np.flatnonzero(gate.caps > 0):
        just = np.full(len(ORDERS), np.inf)
        just[at] = gate.caps[at]
        assert gate.admits(just)
        just[at] = math.nextafter(gate.caps[at], math.inf)
        assert not gate.admits(just)


def test_an_order_without_a_positive_cap_admits_nothing():
    gate = RenyiFilter(Limit(3.0, 1e-6))
    assert not np.all(gate.caps > 0)
    free = np.where(gate.caps > 0, np.inf, 0.0)
    assert not gate.admits(free)
    # No order has any room here, so not even a free event passes.
    assert not RenyiFilter(Limit(1e-4, 1e-9)).admits(NOTHING)


@pytest.mark.parametrize("wrong", [NOTHING - 1e-9, np.full(len(ORDERS), np.nan), np.zeros(3), np.array(0.0)])
def test_arrays_that_are_no_divergences_are_refused(wrong):
    for call in (RenyiFilter(Limit(3.0, 1e-6)).admits, lambda spent: epsilon_mixed(spent, Limit(3.0, 1e-6))):
        with pytest.raises(ValueError, match="Rényi divergences"):
            call(wrong)


@pytest.mark.parametrize("steps", [1, 8, 3000])
def test_the_counted_epsilon_is_the_smallest_limit_that_admits_it(steps):
    spent = renyi(SampledGaussian(multiplier=2, rate=0.1, steps=steps), "add-remove")
    least = epsilon_mixed(spent, Limit(8.0, 1e-5))
    assert RenyiFilter(Limit(least * (1 + 1e-9), 1e-5)).admits(spent)
    assert not RenyiFilter(Limit(least * (1 - 1e-9), 1e-5)).admits(spent)
    assert epsilon_mixed(NOTHING, Limit(8.0, 1e-5)) == 0
    assert epsilon_mixed(np.full(len(ORDERS), np.inf), Limit(8.0, 1e-5)) == math.inf


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


def test_pure_epsilons_add_up_to_nearly_the_whole_limit():
    """The large orders serve Laplace: 100 rounds of 0.01 leave a hundredth of a limit of 1.01 unused."""
    limit = Limit(1.01, 1e-6)
    assert RenyiFilter(limit).admits(cost(Laplace(epsilon=0.01, steps=100), limit))
    assert not RenyiFilter(Limit(0.05, 1e-9)).admits(cost(Laplace(epsilon=0.05), Limit(0.05, 1e-9)))


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_one_order_chosen_in_hindsight_would_admit_more(epsilon):
    """The price of not knowing the best order beforehand, and of the other filter: a fifth of epsilon at most."""
    limit = Limit(epsilon, 1e-6)
    each = renyi(SampledGaussian(multiplier=400, rate=1), "add-remove")
    most = math.floor(float((RenyiFilter(limit).caps / each).max()))
    alone = epsilon_renyi(most * each, limit.delta)
    assert alone < epsilon < alone * 1.2


def former(spent, delta):
    """The epsilon of the gate before decision 45: equal shares of delta, and Markov's inequality for the tail."""
    return float((spent + math.log(len(ORDERS) / delta) / (ALPHA - 1)).min())


@pytest.mark.parametrize("delta", [1e-5, 1e-6, 1e-9])
def test_a_second_kind_of_event_gets_more_than_the_former_gate_allowed(delta):
    """Over plans that spend 0.3 to 30."""
    ratios = []
    for rate, steps in ((1, 1), (1, 100), (0.256, 200), (0.1, 50), (0.01, 50), (0.01, 1000), (0.001, 10_000)):
        for multiplier in np.geomspace(0.3, 300, 40):
            spent = renyi(SampledGaussian(multiplier=float(multiplier), rate=rate, steps=steps), "add-remove")
            counted = epsilon_mixed(spent, Limit(1.0, delta))
            if 0.3 <= counted <= 30:
                ratios.append(counted / former(spent, delta))
    assert len(ratios) > 80
    assert max(ratios) < 1
    assert np.mean(ratios) < 0.93
