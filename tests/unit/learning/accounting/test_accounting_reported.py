"""The reported epsilon: by PLD where one exists, else by Rényi; and what a multiplier means to the library."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy import optimize, stats

from learning.accounting.events import DiscreteGaussianSum, FixedLotGaussian, Laplace, SampledGaussian
from learning.accounting.gate import HOMOGENEOUS_SHARE, epsilon_homogeneous
from learning.accounting.spend import (
    ORDERS,
    EventUnaccountable,
    Limit,
    Spend,
    epsilon_pld,
    epsilon_renyi,
    renyi,
    spend,
    total,
)

ADD, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE
FIXED = FixedLotGaussian(multiplier=2, lot=10, population=100)
RING = DiscreteGaussianSum(honest=1, std=4096, distance=1000, values=10)


def of_library(accountant, event, count=1):
    accountant.compose(event, count)
    return accountant.get_epsilon(1e-5)


def analytic_gaussian(distance, delta):
    """Balle, Wang 2018, Theorem 8: the exact epsilon of N(0, 1) and N(distance, 1)."""

    def excess(epsilon):
        first = stats.norm.cdf(distance / 2 - epsilon / distance)
        return first - math.exp(epsilon + stats.norm.logcdf(-distance / 2 - epsilon / distance)) - delta

    return optimize.brentq(excess, 1e-9, 200)


# --- How the library's two accountants differ -------------------------------------------------------------------------


def test_under_replace_one_the_library_reads_one_multiplier_in_two_ways():
    """For dp-accounting 0.6.0. If this fails, the library has changed. Our code asks neither accountant for
    REPLACE_ONE, so our figures stay, but the documentation must follow.
    """
    gaussian, half = dp_event.GaussianDpEvent(10.0), dp_event.GaussianDpEvent(5.0)
    by_rdp = [of_library(RdpAccountant(neighboring_relation=relation), gaussian, 100) for relation in (ADD, REPLACE)]
    assert by_rdp[0] == by_rdp[1]
    by_pld = of_library(PLDAccountant(REPLACE, 1e-3), gaussian, 100)
    assert by_pld == pytest.approx(of_library(PLDAccountant(ADD, 1e-3), half, 100), abs=1e-6)
    assert by_pld > 2 * of_library(PLDAccountant(ADD, 1e-3), gaussian, 100)


def test_ours_is_relative_to_the_distance_under_both():
    """The same pair of Gaussians under either adjacency, in our terms and in those of the library's two accountants."""
    poisson = SampledGaussian(multiplier=3.0, rate=1.0, steps=20)
    fixed = FixedLotGaussian(multiplier=3.0, lot=50, population=50, steps=20)
    np.testing.assert_array_equal(renyi(poisson, "add-remove"), renyi(fixed, "replace-one"))
    ours = epsilon_pld([poisson], 1e-5, "add-remove")
    assert epsilon_pld([fixed], 1e-5, "replace-one") == ours
    # For the library's PLD, replacing a record clipped to C moves the sum by 2 C, so its multiplier is twice ours.
    assert of_library(PLDAccountant(REPLACE, 1e-3), dp_event.GaussianDpEvent(6.0), 20) == pytest.approx(ours, rel=1e-4)
    theirs = RdpAccountant(ORDERS, REPLACE)
    theirs.compose(dp_event.GaussianDpEvent(3.0), 20)
    np.testing.assert_allclose(renyi(fixed, "replace-one"), theirs.rdp, rtol=1e-12)


# --- Privacy loss distributions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("multiplier", "steps"), [(0.4, 1), (2.0, 10), (50.0, 400)])
def test_plain_gaussians_match_the_analytic_epsilon(multiplier, steps):
    found = epsilon_pld([SampledGaussian(multiplier=multiplier, rate=1, steps=steps)], 1e-6, "add-remove")
    exact = analytic_gaussian(math.sqrt(steps) / multiplier, 1e-6)
    assert exact * (1 - 1e-6) <= found <= exact * 1.005


def exact_delta(mu, epsilon):
    """The delta of a plain Gaussian at distance mu (Balle, Wang 2018, Theorem 8), to 40 digits."""
    with mpmath.workdps(40):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("multiplier", "steps"), [(0.05, 1), (0.3, 30), (1, 30), (5, 1000), (100, 1), (100, 100_000)])
def test_plain_gaussians_are_never_below_the_exact_epsilon(multiplier, steps):
    """Also at deltas below the rounding of a Fourier transform, for the report and for the gate."""
    event = SampledGaussian(multiplier=multiplier, rate=1, steps=steps)
    mu = math.sqrt(steps) / multiplier
    for delta in (1e-6, 1e-10, 1e-11, 1e-12, 1e-13, 1e-14, 1e-16):
        reported = epsilon_pld([event], delta, "add-remove")
        assert exact_delta(mu, reported) <= delta * (1 + 1e-9)
        # And not far above it, where a Fourier transform would lose everything.
        assert exact_delta(mu, reported * 0.98 - 1e-4) > delta or reported < 1e-3
        gated = epsilon_homogeneous(event, delta, "add-remove")
        assert exact_delta(mu, gated) <= HOMOGENEOUS_SHARE * delta * (1 + 1e-9)


def test_plain_gaussians_of_several_multipliers_become_one():
    mixed = [SampledGaussian(multiplier=multiplier, rate=1) for multiplier in (2.0, 3.0, 7.0)]
    exact = analytic_gaussian(math.sqrt(sum(1 / m**2 for m in (2.0, 3.0, 7.0))), 1e-6)
    assert epsilon_pld(mixed, 1e-6, "add-remove") == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_one_laplace_release_is_exact(epsilon):
    # delta(e) = 1 - exp((e - epsilon) / 2) (Balle, Barthe, Gaboardi 2018, Theorem 3).
    expected = epsilon + 2 * math.log1p(-1e-2)
    for adjacency in ("add-remove", "replace-one"):
        assert epsilon_pld([Laplace(epsilon=epsilon)], 1e-2, adjacency) == pytest.approx(expected, abs=2e-3)


def test_equal_events_are_merged_in_any_order():
    first, second = SampledGaussian(multiplier=1, rate=0.02), SampledGaussian(multiplier=1.5, rate=0.01)
    alternating = [first, second] * 150
    merged = [first.model_copy(update={"steps": 150}), second.model_copy(update={"steps": 150})]
    assert epsilon_pld(alternating, 1e-5, "add-remove") == epsilon_pld(merged, 1e-5, "add-remove")
    different = [first, second.model_copy(update={"rate": 0.0100001})] * 150
    assert epsilon_pld(different, 1e-5, "add-remove") != epsilon_pld(merged, 1e-5, "add-remove")


RATED = SampledGaussian(multiplier=1, rate=0.02)
LOT = FixedLotGaussian(multiplier=1, lot=2, population=100)


@pytest.mark.parametrize(
    ("event", "changed"),
    [
        (RATED, {"multiplier": 1.5}),
        (RATED, {"rate": 0.5}),
        (LOT, {"multiplier": 1.5}),
        (LOT, {"lot": 40}),
        (LOT, {"population": 1000}),
        (Laplace(epsilon=0.1), {"epsilon": 2.0}),
        (RING, {"honest": 2}),
        (RING, {"std": 99.0}),
        (RING, {"distance": 1.0}),
    ],
)
def test_events_that_differ_in_one_number_are_two(event, changed):
    other = event.model_copy(update=changed)
    adjacency = "replace-one" if event.kind == "fixed-lot-gaussian" else "add-remove"
    for pair in ([event, other], [other, event]):
        expected = renyi(event, adjacency) + renyi(other, adjacency)
        np.testing.assert_allclose(total(pair, Limit(1, 1e-5, adjacency)), expected, rtol=1e-12)
    # Steps are no part of what tells events apart.
    several = [event.model_copy(update={"steps": 3}), event, other, event]
    expected = 5 * renyi(event, adjacency) + renyi(other, adjacency)
    np.testing.assert_allclose(total(several, Limit(1, 1e-5, adjacency)), expected, rtol=1e-12)


def test_events_of_two_units_are_never_merged():
    with pytest.raises(EventUnaccountable):
        total([RING, RING.model_copy(update={"unit": "member"})], Limit(1, 1e-5))


def test_events_of_several_kinds_compose():
    parts = [
        SampledGaussian(multiplier=1, rate=0.02, steps=50),
        Laplace(epsilon=0.3),
        SampledGaussian(multiplier=9, rate=1),
    ]
    alone = [epsilon_pld([part], 1e-5, "add-remove") for part in parts]
    together = epsilon_pld(parts, 1e-5, "add-remove")
    assert max(alone) < together < sum(alone)
    reference = PLDAccountant(ADD, 1e-4)
    reference.compose(dp_event.PoissonSampledDpEvent(0.02, dp_event.GaussianDpEvent(1.0)), 50)
    reference.compose(dp_event.LaplaceDpEvent(1 / 0.3))
    reference.compose(dp_event.GaussianDpEvent(9.0))
    assert together == pytest.approx(reference.get_epsilon(1e-5), rel=5e-3)


@pytest.mark.parametrize(("multiplier", "rate", "steps"), [(2.0, 1e-3, 100_000), (5.0, 1e-3, 100_000)])
def test_many_tiny_losses_are_not_lost_in_the_grid(multiplier, rate, steps):
    """On a grid of 1e-3, the first would be 29 per cent too high."""
    event = SampledGaussian(multiplier=multiplier, rate=rate, steps=steps)
    found = epsilon_pld([event], 1e-5, "add-remove")
    # Never above Rényi, which has no grid, and never far from the finest grid.
    assert found < epsilon_renyi(renyi(event, "add-remove"), 1e-5)
    sampled = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier))
    fine = of_library(PLDAccountant(ADD, 2e-5), sampled, steps)
    assert fine * 0.999 <= found <= fine * 1.01


def test_without_a_formula_it_is_none_and_without_events_zero():
    poisson = SampledGaussian(multiplier=2, rate=0.5)
    assert epsilon_pld([FIXED], 1e-5, "replace-one") is None
    assert epsilon_pld([RING], 1e-5, "add-remove") is None
    assert epsilon_pld([poisson, RING], 1e-5, "add-remove") is None
    assert epsilon_pld([], 1e-5, "add-remove") == 0.0


def test_next_to_no_noise_is_infinite_and_takes_no_time():
    assert epsilon_pld([SampledGaussian(multiplier=1e-4, rate=0.5, steps=10)], 1e-5, "add-remove") == math.inf


# --- Spend ------------------------------------------------------------------------------------------------------------


def test_spend_names_its_accountant():
    poisson = SampledGaussian(multiplier=1, rate=0.01, steps=100)
    by_pld = spend([poisson], Limit(8, 1e-5))
    assert by_pld == Spend(epsilon_pld([poisson], 1e-5, "add-remove"), "pld", by_pld.renyi)
    assert 0 < by_pld.epsilon < by_pld.renyi
    by_renyi = spend([poisson, RING], Limit(8, 1e-5))
    assert by_renyi.by == "renyi"
    assert by_renyi.epsilon == by_renyi.renyi > by_pld.renyi
    assert spend([], Limit(8, 1e-5)) == Spend(0.0, "pld", 0.0)


@pytest.mark.parametrize(("multiplier", "rate", "steps"), [(1.0, 0.01, 1000), (8.0, 1.0, 3), (0.5, 0.2, 40)])
def test_the_renyi_report_is_the_librarys_conversion(multiplier, rate, steps):
    spent = renyi(SampledGaussian(multiplier=multiplier, rate=rate, steps=steps), "add-remove")
    expected, _ = compute_epsilon(ORDERS, spent, 1e-6)
    assert epsilon_renyi(spent, 1e-6) == pytest.approx(expected, rel=1e-12)


def test_the_renyi_report_at_its_ends():
    assert epsilon_renyi(np.zeros(len(ORDERS)), 1e-6) == 0
    assert epsilon_renyi(np.full(len(ORDERS), np.inf), 1e-6) == math.inf
    # So little that total variation is below delta: epsilon is 0.
    little = renyi(SampledGaussian(multiplier=100, rate=1e-7), "add-remove")
    assert epsilon_renyi(little, 1e-6) == 0
    assert epsilon_renyi(little, 1e-12) > 0
