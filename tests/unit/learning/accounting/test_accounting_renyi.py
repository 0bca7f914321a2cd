"""Rényi divergences against closed forms, against integrals computed another way, and against dp-accounting."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import integrate, stats

from learning.accounting import renyi as module
from learning.accounting.events import DiscreteGaussianSum, FixedLotGaussian, Laplace, SampledGaussian
from learning.accounting.spend import ORDERS, EventUnaccountable, Limit, renyi, total

ALPHA = np.array(ORDERS)
WHOLE = np.array([order.is_integer() for order in ORDERS])


def sampled(multiplier, rate, steps=1):
    return renyi(SampledGaussian(multiplier=multiplier, rate=rate, steps=steps), "add-remove")


def fixed(multiplier, lot, population, steps=1):
    event = FixedLotGaussian(multiplier=multiplier, lot=lot, population=population, steps=steps)
    return renyi(event, "replace-one")


def library(event, relation, orders=ORDERS):
    accountant = RdpAccountant(orders, relation)
    accountant.compose(event)
    return accountant.rdp


def divergence(p, q, order, ends):
    """D_order(p || q) for two densities, by adaptive quadrature."""
    value, _ = integrate.quad(
        lambda x: q(x) * (p(x) / q(x)) ** order, *ends, limit=400, epsabs=0, epsrel=1e-11, points=(0.0, 1.0, order)
    )
    return math.log(value) / (order - 1)


# --- The orders -------------------------------------------------------------------------------------------------------


def test_the_orders_rise_from_just_above_one():
    assert ORDERS[0] > 1
    assert np.all(np.diff(ALPHA) > 0)


# --- Poisson draw -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 7.5, 300.0])
def test_all_examples_at_once_is_the_plain_gaussian(multiplier):
    np.testing.assert_allclose(sampled(multiplier, 1.0), ALPHA / (2 * multiplier**2), rtol=1e-14)
    np.testing.assert_allclose(fixed(multiplier, 70, 70), ALPHA / (2 * multiplier**2), rtol=1e-14)


@pytest.mark.parametrize(("multiplier", "rate"), [(1.0, 0.01), (2.0, 0.1), (0.7, 0.3), (4.0, 0.9), (20.0, 0.5)])
def test_the_sampled_gaussian_is_its_integral_in_the_worse_direction(multiplier, rate):
    def density(x, mean=0.0):
        return math.exp(-(((x - mean) / multiplier) ** 2) / 2) / (multiplier * math.sqrt(2 * math.pi))

    def mixed(x):
        return (1 - rate) * density(x) + rate * density(x, 1.0)

    ours = sampled(multiplier, rate)
    for order in (1.25, 1.65, 2.0, 2.75, 4.5, 8.0, 12.0):
        at = ORDERS.index(order)
        ends = (-14 * multiplier, order + 14 * multiplier)
        assert ours[at] == pytest.approx(divergence(mixed, density, order, ends), rel=1e-7, abs=1e-14)
        back = divergence(density, mixed, order, (-14 * multiplier - order, 14 * multiplier + 1))
        assert back <= ours[at] * (1 + 1e-7) + 1e-14


@pytest.mark.parametrize(("multiplier", "rate"), [(1.0, 0.01), (2.0, 0.1), (0.7, 0.001), (4.0, 0.9), (0.06, 0.05)])
def test_the_sampled_gaussian_agrees_with_the_library(multiplier, rate):
    """At whole orders they agree to every digit. At fractional orders the library sums its alternating series without
    the signs, so it lies above: by half at order 1.25, by nothing from 6 up.
    """
    ours = sampled(multiplier, rate)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier))
    theirs = library(event, NeighboringRelation.ADD_OR_REMOVE_ONE)
    np.testing.assert_allclose(ours[WHOLE], theirs[WHOLE], rtol=1e-8)
    assert np.all(ours <= theirs * (1 + 1e-8))
    np.testing.assert_allclose(ours[ALPHA > 6], theirs[ALPHA > 6], rtol=1e-4)


@pytest.mark.parametrize(("multiplier", "rate"), [(0.051, 0.05), (0.1, 0.3)])
def test_the_integral_is_as_exact_at_very_little_noise(multiplier, rate):
    """There a single term of the library's series matters, at fractional orders too."""
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier))
    theirs = library(event, NeighboringRelation.ADD_OR_REMOVE_ONE)
    np.testing.assert_allclose(sampled(multiplier, rate), theirs, rtol=1e-10)


def test_a_tiny_divergence_keeps_its_digits():
    # q^2 (e^(1/sigma^2) - 1) alpha / 2, up to terms of q^3.
    rate, multiplier = 1e-9, 1.5
    expected = rate**2 * math.expm1(1 / multiplier**2) * ALPHA / 2
    small = ALPHA < 8
    np.testing.assert_allclose(sampled(multiplier, rate)[small], expected[small], rtol=1e-5)


def test_very_little_noise_is_bounded_from_above():
    """Below a multiplier of 0.05, fractional orders are interpolated: slightly above the integral next to it."""
    close = sampled(0.0501, 0.1)
    beyond = sampled(0.0499, 0.1)
    assert np.all(beyond >= close)
    np.testing.assert_allclose(beyond, close, rtol=0.6)


# --- A lot of a fixed size --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("multiplier", "lot"), [(0.5, 10), (1.0, 10), (2.0, 200), (5.0, 50)])
def test_a_fixed_lot_agrees_with_the_library_where_that_is_stable(multiplier, lot):
    event = dp_event.SampledWithoutReplacementDpEvent(1000, lot, dp_event.GaussianDpEvent(multiplier))
    low = ALPHA <= 32
    theirs = library(event, NeighboringRelation.REPLACE_ONE, ALPHA[low])
    expected = np.minimum(theirs, ALPHA[low] / (2 * multiplier**2))
    np.testing.assert_allclose(fixed(multiplier, lot, 1000)[low], expected, rtol=1e-6)


def theorem_27(multiplier, share, order):
    """Wang, Balle, Kasiviswanathan 2019, Theorem 27 with its alternating sums, in 2,000 bits."""
    with mpmath.workprec(2000):
        gamma, precision = mpmath.mpf(share), 1 / mpmath.mpf(multiplier) ** 2
        moments = [mpmath.exp(k * (k - 1) * precision / 2) for k in range(order + 1)]

        def difference(power):
            return mpmath.fsum((-1) ** (power - k) * math.comb(power, k) * moments[k] for k in range(power + 1))

        even = {power: difference(power) for power in range(2, order + 2, 2) if power <= order}
        even[order + 1] = difference_beyond = None
        if order % 2:
            moments.append(mpmath.exp((order + 1) * order * precision / 2))
            difference_beyond = difference(order + 1)
        even[order + 1] = difference_beyond
        terms = [mpmath.mpf(1)]
        for j in range(2, order + 1):
            low, high = even[2 * (j // 2)], even[2 * ((j + 1) // 2)]
            terms.append(gamma**j * math.comb(order, j) * min(4 * mpmath.sqrt(low * high), 2 * moments[j]))
        return float(mpmath.log(mpmath.fsum(terms)) / (order - 1))


@pytest.mark.parametrize(("multiplier", "lot"), [(0.5, 10), (3.0, 100), (10.0, 10), (50.0, 200)])
def test_a_fixed_lot_is_the_theorem_where_float64_is_not_enough(multiplier, lot):
    ours = fixed(multiplier, lot, 1000)
    for order in (2, 3, 5, 8, 25, 60, 116):
        expected = min(theorem_27(multiplier, lot / 1000, order), order / (2 * multiplier**2))
        # A bound at a higher order holds here too, so ours may be slightly lower.
        assert ours[ORDERS.index(float(order))] == pytest.approx(expected, rel=1e-6)


def test_the_library_loses_its_differences_at_large_multipliers():
    """The reason not to use the library's function: at sigma 50 its bound is many times the theorem's."""
    event = dp_event.SampledWithoutReplacementDpEvent(1000, 200, dp_event.GaussianDpEvent(50.0))
    theirs = library(event, NeighboringRelation.REPLACE_ONE, [160.0])
    assert theirs[0] > 5 * fixed(50.0, 200, 1000)[ORDERS.index(160.0)]


@pytest.mark.parametrize(("multiplier", "lot"), [(0.5, 10), (1.0, 100), (4.0, 500), (30.0, 900)])
def test_a_fixed_lot_bounds_two_explicit_data_sets(multiplier, lot):
    """The one record that differs sends 0 in place of 1, or -1/2 in place of 1/2; all others send nothing."""
    share = lot / 1000

    def mixed(at):
        def density(x):
            return (1 - share) * stats.norm.pdf(x, 0, multiplier) + share * stats.norm.pdf(x, at, multiplier)

        return density

    ours = fixed(multiplier, lot, 1000)
    assert np.all(ours >= sampled(multiplier, share) * (1 - 1e-9))
    for order in (1.5, 2.0, 5.0, 10.0):
        ends = (-order - 14 * multiplier, order + 14 * multiplier)
        assert divergence(mixed(0.5), mixed(-0.5), order, ends) <= ours[ORDERS.index(order)]


# --- Laplace ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 8.0])
def test_laplace_is_its_closed_form_its_integral_and_the_library(epsilon):
    ours = renyi(Laplace(epsilon=epsilon), "add-remove")
    closed = [
        math.log(a / (2 * a - 1) * math.exp((a - 1) * epsilon) + (a - 1) / (2 * a - 1) * math.exp(-a * epsilon))
        / (a - 1)
        for a in ORDERS
        if a * epsilon < 600
    ]
    np.testing.assert_allclose(ours[: len(closed)], closed, rtol=1e-8)
    theirs = library(dp_event.LaplaceDpEvent(1 / epsilon), NeighboringRelation.REPLACE_ONE)
    np.testing.assert_allclose(ours, theirs, rtol=1e-8)
    for order in (1.5, 3.0, 7.0):
        scale = 1 / epsilon

        def log_density(x, scale=scale):
            return -abs(x) / scale - math.log(2 * scale)

        # Piecewise exponential: three integrals without a kink.
        parts = [(-60 * scale, 0.0), (0.0, 1.0), (1.0, 1 + 60 * scale)]
        value = sum(
            integrate.quad(
                lambda x, o=order: math.exp(o * log_density(x - 1) + (1 - o) * log_density(x)),
                *part,
                epsabs=0,
                epsrel=1e-10,
            )[0]
            for part in parts
        )
        assert ours[ORDERS.index(order)] == pytest.approx(math.log(value) / (order - 1), rel=1e-6, abs=1e-12)


def test_laplace_costs_at_most_its_epsilon_under_both_adjacencies():
    event = Laplace(epsilon=0.4, steps=3)
    np.testing.assert_array_equal(renyi(event, "add-remove"), renyi(event, "replace-one"))
    assert np.all(renyi(event, "add-remove") <= 1.2)
    assert renyi(event, "add-remove")[-1] > 1.199


@given(st.floats(1e-3, 20), st.floats(1e-3, 20))
def test_a_laplace_shift_over_two_coordinates_is_no_worse_than_over_one(first, second):
    apart = renyi(Laplace(epsilon=first), "add-remove") + renyi(Laplace(epsilon=second), "add-remove")
    assert np.all(apart <= renyi(Laplace(epsilon=first + second), "add-remove") * (1 + 1e-9))


# --- Noise in the ring ------------------------------------------------------------------------------------------------


def discrete_gaussian(std, reach=60):
    at = np.arange(-reach, reach + 1)
    weights = np.exp(-(at**2) / (2 * std**2))
    return weights / weights.sum()


@pytest.mark.parametrize(("honest", "std", "distance"), [(1, 1.0, 1), (1, 0.3, 1), (2, 1.0, 2), (3, 0.6, 1)])
def test_the_bound_holds_for_the_exact_sum_of_shares(honest, std, distance):
    """One coordinate, whose distribution is computed by convolution."""
    share = law = discrete_gaussian(std)
    for _ in range(honest - 1):
        law = np.convolve(law, share)
    event = DiscreteGaussianSum(honest=honest, std=std, distance=distance, values=1)
    bound = renyi(event, "add-remove")
    here, there = law[distance:], law[:-distance]
    both = (here > 1e-80) & (there > 1e-80)
    for order in (1.5, 2.0, 3.0):
        exact = math.log(float((here[both] ** order * there[both] ** (1 - order)).sum())) / (order - 1)
        assert exact <= bound[ORDERS.index(order)] * (1 + 1e-9)


def test_a_fine_grid_makes_the_sum_a_gaussian():
    """Sixteen shares of std 4096 at distance 4096 are a Gaussian of multiplier 4, which the library has."""
    event = DiscreteGaussianSum(honest=16, std=4096.0, distance=4096.0, values=10**7, steps=2)
    theirs = library(dp_event.GaussianDpEvent(4.0), NeighboringRelation.REPLACE_ONE)
    np.testing.assert_allclose(renyi(event, "add-remove"), 2 * theirs, rtol=1e-12)


def test_a_coarse_grid_costs_what_the_theorem_says():
    honest, std, distance, values = 3, 0.8, 2.5, 40
    tau = 10 * sum(math.exp(-2 * math.pi**2 * std**2 * k / (k + 1)) for k in (1, 2))
    reach = distance / (math.sqrt(honest) * std)
    expected = [min(a / 2 * reach**2 + tau * values, a / 2 * (reach + tau * math.sqrt(values)) ** 2) for a in ORDERS]
    event = DiscreteGaussianSum(honest=honest, std=std, distance=distance, values=values)
    np.testing.assert_allclose(renyi(event, "add-remove"), expected, rtol=1e-12)
    assert np.any(np.array(expected) > ALPHA / 2 * reach**2 * 1.001)


def test_shares_too_small_for_the_theorem_have_no_bound():
    event = DiscreteGaussianSum(honest=2, std=0.49, distance=1.0, values=1)
    assert np.all(np.isinf(renyi(event, "add-remove")))
    alone = event.model_copy(update={"honest": 1})
    assert np.all(np.isfinite(renyi(alone, "add-remove")))


def test_replacing_a_member_is_twice_as_far_and_an_example_is_not():
    event = DiscreteGaussianSum(honest=1, std=100.0, distance=50.0, values=9, unit="member")
    np.testing.assert_allclose(renyi(event, "replace-one"), 4 * renyi(event, "add-remove"), rtol=1e-12)
    example = event.model_copy(update={"unit": "example"})
    np.testing.assert_array_equal(renyi(example, "replace-one"), renyi(example, "add-remove"))


# --- Properties of all formulas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "adjacency", "said"),
    [
        (SampledGaussian(multiplier=1, rate=0.5), "replace-one", "Poisson draw"),
        (SampledGaussian(multiplier=1, rate=1.0), "replace-one", "replace-one"),
        (FixedLotGaussian(multiplier=1, lot=5, population=10), "add-remove", "fixed size"),
        (FixedLotGaussian(multiplier=1, lot=10, population=10), "add-remove", "add-remove"),
        (FixedLotGaussian(multiplier=1, lot=11, population=10), "replace-one", "11 cannot be drawn"),
    ],
)
def test_an_event_without_a_formula_is_refused(event, adjacency, said):
    with pytest.raises(EventUnaccountable, match=said):
        renyi(event, adjacency)


EVENTS = st.one_of(
    st.builds(SampledGaussian, multiplier=st.floats(0.05, 100), rate=st.floats(1e-6, 1)).map(
        lambda event: (event, "add-remove")
    ),
    st.builds(FixedLotGaussian, multiplier=st.floats(0.05, 100), lot=st.integers(1, 100), population=st.just(100)).map(
        lambda event: (event, "replace-one")
    ),
    st.builds(Laplace, epsilon=st.floats(1e-6, 100)).map(lambda event: (event, "replace-one")),
    st.builds(
        DiscreteGaussianSum,
        honest=st.integers(1, 50),
        std=st.floats(0.5, 5000),
        distance=st.floats(0.1, 1e5),
        values=st.integers(1, 10**6),
    ).map(lambda event: (event, "add-remove")),
)


@settings(deadline=None, max_examples=60)
@given(EVENTS, st.integers(2, 1000))
def test_divergences_rise_with_the_order_and_add_up_over_steps(pair, steps):
    event, adjacency = pair
    one = renyi(event, adjacency)
    assert one.shape == (len(ORDERS),)
    assert np.all(one > 0)
    with np.errstate(invalid="ignore"):
        assert not np.any(np.diff(one) < 0)
    whole = renyi(event.model_copy(update={"steps": steps}), adjacency)
    np.testing.assert_allclose(whole, steps * one, rtol=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.05, 50), st.floats(1.01, 4), st.floats(1e-4, 0.5), st.floats(1.01, 2))
def test_more_noise_costs_less_and_a_larger_rate_costs_more(multiplier, more, rate, larger):
    here = sampled(multiplier, rate)
    assert np.all(sampled(multiplier * more, rate) <= here * (1 + 1e-9))
    assert np.all(sampled(multiplier, rate * larger) >= here * (1 - 1e-9))
    # Sampling never makes it worse.
    assert np.all(here <= ALPHA / (2 * multiplier**2) * (1 + 1e-12))


@settings(deadline=None, max_examples=25)
@given(st.floats(0.05, 50), st.floats(1.01, 4), st.integers(1, 60), st.integers(1, 40))
def test_a_fixed_lot_costs_less_with_noise_and_more_with_its_size(multiplier, more, lot, larger):
    here = fixed(multiplier, lot, 100)
    assert np.all(fixed(multiplier * more, lot, 100) <= here * (1 + 1e-9))
    assert np.all(fixed(multiplier, lot + larger, 100) >= here * (1 - 1e-9))
    assert np.all(here <= ALPHA / (2 * multiplier**2) * (1 + 1e-12))


@settings(deadline=None, max_examples=60)
@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False), st.floats(0, 1, exclude_min=True))
def test_no_odd_event_has_a_negative_cost_or_nan(multiplier, rate):
    events = [
        (SampledGaussian(multiplier=multiplier, rate=rate), "add-remove"),
        (FixedLotGaussian(multiplier=multiplier, lot=3, population=7), "replace-one"),
        (Laplace(epsilon=multiplier), "add-remove"),
        (DiscreteGaussianSum(honest=2, std=multiplier, distance=min(1 / rate, 1e300), values=5), "add-remove"),
    ]
    for event, adjacency in events:
        assert np.all(renyi(event, adjacency) >= 0), event


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (SampledGaussian, {"multiplier": math.inf, "rate": 0.5}),
        (SampledGaussian, {"multiplier": math.inf, "rate": 1.0}),
        (FixedLotGaussian, {"multiplier": math.inf, "lot": 2, "population": 9}),
        (Laplace, {"epsilon": math.inf}),
        (DiscreteGaussianSum, {"honest": 1, "std": math.inf, "distance": 1.0, "values": 1}),
    ],
)
def test_an_event_with_an_infinite_number_is_refused(kind, numbers):
    with pytest.raises(ValidationError):
        kind(**numbers)
    adjacency = "replace-one" if kind is FixedLotGaussian else "add-remove"
    with pytest.raises(EventUnaccountable, match="infinite"):
        renyi(kind.model_construct(**numbers), adjacency)


def test_a_caller_may_change_its_array():
    first = sampled(1.1, 0.07)
    first[:] = 0
    assert np.all(sampled(1.1, 0.07) > 0)


def test_a_long_ledger_computes_each_formula_once():
    """20,000 events of ten kinds need ten computations."""
    module._sampled_gaussian.cache_clear()
    kinds = [SampledGaussian(multiplier=1 + 0.125 * kind, rate=0.01, steps=3) for kind in range(10)]
    limit = Limit(8, 1e-5)
    whole = total([kinds[at % 10] for at in range(20_000)], limit)
    one_by_one = sum(renyi(kinds[at % 10], "add-remove") for at in range(20_000))
    assert module._sampled_gaussian.cache_info().misses == 10
    np.testing.assert_allclose(whole, one_by_one, rtol=1e-10)
