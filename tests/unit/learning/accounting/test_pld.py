"""The privacy loss distributions in numpy are those of dp-accounting, and bound the exact divergence from above."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as library
from scipy.fft import next_fast_len
from scipy.stats import norm

from learning.accounting import pld
from learning.accounting.pld import (
    Losses,
    discrete_gaussian_pld,
    gaussian_delta,
    gaussian_pld,
    identity_pld,
    laplace_pld,
)

DELTAS = (1e-2, 1e-4, 1e-6, 1e-9)


def theirs_of(multiplier: float, width: float, rate: float = 1.0):
    return library.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=width,
        sampling_prob=rate,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


def composed(*parts):
    """The library's distributions (each `count` times) together, transformed in extended precision.

    Its own transforms in double precision move an epsilon at delta 1e-9 by one or two millionths, up or down by
    processor. So do ours (docs/accounting.md), and the difference of both is no measure of ours.
    """
    whole = library.identity(value_discretization_interval=parts[0][0]._pmf_remove._discretization)
    for each, count in parts:
        whole = whole.compose(each.self_compose(count))
    pmfs = []
    for side in ("_pmf_remove", "_pmf_add"):
        one = [(getattr(each, side).to_dense_pmf(), count) for each, count in parts]
        window = getattr(whole, side).to_dense_pmf()
        size = next_fast_len(max(window.size, *(pmf.size for pmf, _ in one)), real=True)
        product = np.ones(size // 2 + 1, dtype=np.clongdouble)
        for pmf, count in one:
            product *= np.fft.rfft(pmf._probs.astype(np.longdouble), size) ** count
        first = window._lower_loss - sum(pmf._lower_loss * count for pmf, count in one)
        mass = np.roll(np.fft.irfft(product, size), -first)[: window.size]
        pmfs.append(
            pld_pmf.DensePLDPmf(
                window._discretization, window._lower_loss, mass.astype(np.float64), window._infinity_mass, True
            )
        )
    return library.PrivacyLossDistribution(*pmfs)


def agree(ours, theirs, rel=2e-6):
    for delta in DELTAS:
        assert ours.epsilon(delta) == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=rel, abs=1e-9)


@pytest.mark.parametrize(
    ("multiplier", "rate", "count", "width"),
    [
        (1.0, 0.01, 1000, 4e-4),
        (0.5, 0.1, 50, 1e-3),
        (4.0, 0.05, 3000, 1e-4),
        (1.1, 0.999, 40, 1e-3),
        (2.0, 1.0, 7, 1e-3),
        (0.05, 0.5, 3, 2e-2),
        (0.02, 1.0, 1, 5e-2),
    ],
)
def test_a_sampled_gaussian_is_the_librarys(multiplier, rate, count, width):
    agree(gaussian_pld(multiplier, width, rate).times(count), composed((theirs_of(multiplier, width, rate), count)))


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 6.0])
def test_laplace_noise_is_the_librarys(epsilon):
    theirs = library.from_laplace_mechanism(1 / epsilon, value_discretization_interval=1e-4).self_compose(5)
    agree(laplace_pld(epsilon, 1e-4).times(5), theirs)


@pytest.mark.parametrize(
    ("std", "shift", "width"),
    [
        (55.4, 32, 1e-3),
        pytest.param(20.0, 64, 1e-3, marks=pytest.mark.long),
        (300.0, 32, 1e-3),
        (0.7, 1, 1e-3),
        (14.0, 32, 1e-3),
    ],
)
def test_a_discrete_gaussian_is_the_librarys(std, shift, width):
    theirs = library.from_discrete_gaussian_mechanism(
        std, shift, value_discretization_interval=width, use_connect_dots=True
    )
    agree(discrete_gaussian_pld(std, shift, width).times(9), theirs.self_compose(9))


def test_releases_of_different_kinds_compose_as_the_librarys_do():
    width = 5e-4
    ours = identity_pld(width).plus(gaussian_pld(3.0, width)).plus(gaussian_pld(1.0, width, 0.02).times(300))
    theirs = [(theirs_of(3.0, width), 1), (theirs_of(1.0, width, 0.02), 300)]
    agree(ours, composed(*theirs))
    more = library.from_laplace_mechanism(1 / 0.3, value_discretization_interval=width)
    agree(ours.plus(laplace_pld(0.3, width)), composed(*theirs, (more, 1)))


def test_a_plain_gaussians_delta_is_exact_where_its_parts_overflow():
    # Three branches of the formula, in the tail and where e^epsilon alone is infinite.
    for epsilon, shift in [(1.0, 0.5), (40.0, 3.0), (800.0, 40.0), (1405.0, 50.0), (-0.5, 0.7)]:
        a, b = epsilon / shift - shift / 2, epsilon / shift + shift / 2
        exact = norm.sf(a) - math.exp(epsilon + norm.logsf(b))
        assert gaussian_delta(np.array([epsilon]), shift)[0] == pytest.approx(exact, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("rate", [1e-8, 1e-3, 0.12])
def test_hardly_any_noise_costs_its_whole_loss_although_e_to_the_epsilon_overflows(rate):
    # The release that exceeds 0.9 tells that the unit was drawn: with probability `rate`, against less than e^-1800.
    multiplier = 0.0148
    found = gaussian_pld(multiplier, 0.02, rate).epsilon(rate / 10)
    assert rate * norm.sf(-0.1 / multiplier) - math.exp(min(0.0, found + norm.logsf(0.9 / multiplier))) <= rate / 10
    # A draw alone has a loss of 1 / 2 multiplier^2 on average, less ln(1 / rate).
    assert found == pytest.approx(1 / (2 * multiplier**2) + math.log(rate), rel=0.05)


@pytest.mark.parametrize("width", [0.5, 0.05, 1e-3])
def test_a_grid_only_ever_adds(width):
    """Composed plain Gaussians are one Gaussian, so the exact epsilon is known."""
    for count, multiplier in [(1, 1.0), (20, 5.0)]:
        found = gaussian_pld(multiplier, width).times(count).epsilon(1e-5)
        shift = math.sqrt(count) / multiplier
        assert gaussian_delta(np.array([found]), shift)[0] <= 1e-5
        if width < 0.01:
            assert gaussian_delta(np.array([found * 0.995]), shift)[0] > 1e-5


@pytest.mark.parametrize("rate", [0.001, 0.3])
def test_the_worse_direction_counts(rate):
    both = gaussian_pld(1.0, 1e-4, rate).times(10)
    each = [both.remove.epsilon(1e-6), both.add.epsilon(1e-6)]
    assert each[0] != each[1]
    assert both.epsilon(1e-6) == max(each)


def test_atoms_keep_their_mass_and_the_mean_of_what_they_weigh():
    random = np.random.default_rng(3)
    losses, mass = random.normal(0, 2, 200), random.random(200)
    mass /= mass.sum()
    found = Losses.of_atoms(losses, mass, 0.0, 0.05)
    grid = (found.low + np.arange(len(found.mass))) * 0.05
    assert found.mass.min() >= 0
    assert found.mass.sum() == pytest.approx(1, abs=1e-12)
    assert (found.mass * np.exp(-grid)).sum() == pytest.approx((mass * np.exp(-losses)).sum(), rel=1e-12)


def test_what_is_cut_counts_as_infinite():
    heavy = Losses(0.1, 0, np.array([0.5, 0.4999]), 1e-4)
    assert heavy.epsilon(0.9e-4) == math.inf
    assert heavy.times(3).infinite == pytest.approx(3e-4, rel=1e-3)
    assert heavy.plus(heavy).infinite == pytest.approx(2e-4, rel=1e-3)
    assert identity_pld(0.1).epsilon(1e-9) == 0
    with pytest.raises(ValueError, match="at least once"):
        heavy.times(0)


def test_lengths_of_transforms_have_small_factors():
    for least in (1, 7, 100, 12_345, 98_765, 2**20 - 1):
        found = pld._fast(least)
        left = found
        for factor in (2, 3, 5):
            while left % factor == 0:
                left //= factor
        assert left == 1
        assert least <= found <= 1.25 * least + 1


def test_what_a_composition_cuts_is_never_lost(monkeypatch):
    """With cuts large enough to see: no mass vanishes, and delta stays above the uncut distribution's."""
    one = gaussian_pld(1.0, 0.05).remove
    exact = one.plus(one)
    monkeypatch.setattr(pld, "_CUT", 1e-2)
    cut = one.plus(one)
    assert len(cut.mass) < len(exact.mass)
    assert cut.mass.sum() + cut.infinite == pytest.approx(1, abs=1e-9)
    assert cut.infinite > 1e-3
    assert one.times(2).infinite >= 1e-2
    for delta in (0.05, 0.02):
        assert min(cut.epsilon(delta), one.times(2).epsilon(delta)) > exact.epsilon(delta)


def test_either_direction_may_be_the_worse_one():
    small, large = gaussian_pld(5.0, 1e-3).remove, gaussian_pld(0.5, 1e-3).remove
    assert pld.Pld(small, large).epsilon(1e-5) == pld.Pld(large, small).epsilon(1e-5) == large.epsilon(1e-5)
