"""What noised metrics cost, alone and with training, against dp-accounting."""

import functools
import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy.signal import fftconvolve
from scipy.stats import norm

from learning.accounting.calibration import repeated, rounds_affordable
from learning.accounting.costs import event_of_metrics
from learning.accounting.events import (
    Beside,
    DiscreteGaussian,
    Laplace,
    SampledGaussian,
    event_from,
    measuring,
    planned,
)
from learning.accounting.filter import Limit, epsilon_mixed
from learning.accounting.gate import (
    GATE_NUMBERS,
    PrivacyFilter,
    epsilon_counted,
    epsilon_homogeneous,
    homogeneous,
    plan_of,
)
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi
from learning.accounting.spend import composed_steps, epsilon_pld, epsilon_renyi, merged
from secure_agg.discrete_gaussian import DiscreteGaussian as Sampler
from tacit.validation import HALF, MetricNoise, distance_of, shifts_of

NOISE = MetricNoise(28.0, 1000)
DELTA = 1e-6


def test_the_event_is_about_this_members_own_noise_and_the_ledgers_adjacency():
    own = event_of_metrics(NOISE, "add-remove")
    assert isinstance(own, DiscreteGaussian)
    assert (own.multiplier, own.unit, own.steps) == (pytest.approx(28.0), "example", 1)
    replaced = event_of_metrics(NOISE, "replace-one", "member")
    assert replaced.multiplier == pytest.approx(28.0 * math.sqrt(3) / 3)
    assert replaced.unit == "member"
    assert event_from(replaced.model_dump(mode="json")) == replaced


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 7.5])
def test_the_divergence_is_that_of_the_real_distribution_or_above(multiplier):
    """One coordinate, shifted by whole steps, summed entry by entry."""
    step = 7
    s = multiplier * step
    k = np.arange(-int(60 * s) - 60 * step, int(60 * s) + 60 * step + 1, dtype=np.float64)
    log_p = -(k**2) / (2 * s * s)
    log_p -= np.logaddexp.reduce(log_p)
    log_q = -((k - step) ** 2) / (2 * s * s)
    log_q -= np.logaddexp.reduce(log_q)
    ours = renyi(DiscreteGaussian(multiplier=multiplier), "add-remove")
    for order, bound in zip(ORDERS, ours, strict=True):
        if order > 8:
            break
        exact = np.logaddexp.reduce(order * log_p + (1 - order) * log_q) / (order - 1)
        assert exact <= bound * (1 + 1e-9)
        assert exact == pytest.approx(bound, rel=1e-6 if multiplier >= 1 else 0.2)


def test_twenty_measurements_against_the_librarys_discrete_gaussian():
    """A unit moves one coordinate only, by the whole distance: whole numbers have such a distance near ours."""
    distance = math.ceil(math.sqrt(3) * HALF)
    library = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        28.0 * distance, sensitivity=distance, value_discretization_interval=1e-4, use_connect_dots=True
    ).self_compose(20)
    theirs = library.get_epsilon_for_delta(DELTA)
    ours = epsilon_renyi(renyi(DiscreteGaussian(multiplier=28.0, steps=20), "add-remove"), DELTA)
    assert theirs == pytest.approx(0.655165, rel=1e-3)
    assert theirs < ours < 1.2 * theirs


def test_training_and_metrics_together_against_the_librarys_accountant():
    training = SampledGaussian(multiplier=1.5, rate=0.1, steps=100)
    metrics = DiscreteGaussian(multiplier=28.0, steps=20)
    orders = [order for order in ORDERS if order.is_integer() and order > 1 and order <= 64]
    library = RdpAccountant(orders)
    library.compose(dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.5)), 100)
    library.compose(dp_event.GaussianDpEvent(28.0), 20)
    together = renyi(training, "add-remove") + renyi(metrics, "add-remove")
    ours = [float(together[ORDERS.index(order)]) for order in orders]
    assert ours == pytest.approx(list(library._rdp), rel=1e-8)
    limit = Limit(8.0, DELTA)
    # As two kinds of events, which only the Rényi filter admits together.
    assert epsilon_counted([training, metrics], limit) == pytest.approx(5.293144, rel=1e-4)
    assert epsilon_counted([metrics], limit) == pytest.approx(0.665627, rel=1e-4)
    assert epsilon_counted([training], limit) == pytest.approx(4.105492, rel=1e-4)


# ---- beside a training -----------------------------------------------------------------------------------------------

# 5 steps a round, and every round may be measured.
ROUND = SampledGaussian(multiplier=1.5, rate=0.1, steps=5, metrics=Beside(multiplier=28.0, every=5, measured=1))


def test_a_measured_job_stays_one_kind_of_event():
    """The example of decision 49: 100 steps of dp-sgd and 20 measurements."""
    limit = Limit(8.0, DELTA)
    found = epsilon_counted([ROUND] * 20, limit)
    assert found == pytest.approx(4.177, abs=0.001)
    # Against the library, composed by hand: three coordinates, each shifted by 32 steps.
    sampled = privacy_loss_distribution.from_gaussian_mechanism(
        1.5, sampling_prob=0.1, value_discretization_interval=1e-4
    ).self_compose(100)
    std = 28.0 * math.sqrt(3) * HALF
    coordinate = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        std, sensitivity=HALF, value_discretization_interval=1e-4, use_connect_dots=True
    ).self_compose(60)
    assert found == pytest.approx(sampled.compose(coordinate).get_epsilon_for_delta(0.75 * DELTA), rel=0.01)


def test_measurements_that_were_left_out_cost_the_same_and_late_ones_cost_steps():
    """A plan of K steps has room for one measurement for each `every` of them, whichever rounds those are in."""
    limit, silent = Limit(8.0, DELTA), measuring(ROUND, 0)
    whole = epsilon_counted([ROUND] * 20, limit)
    assert epsilon_counted([silent] * 20, limit) == whole == epsilon_counted([silent] * 10 + [ROUND] * 10, limit)
    # Six measurements need a plan of 26 steps, which then has room for 25 steps and one more.
    often = measuring(ROUND, 6)
    assert plan_of(often) == planned(ROUND, 26)
    by_plan = [epsilon_homogeneous(each, DELTA, "add-remove") for each in (planned(ROUND, 25), often)]
    assert by_plan[0] < by_plan[1] == epsilon_homogeneous(planned(ROUND, 26), DELTA, "add-remove")
    # Here the Rényi filter is better, because it adds up only what there was.
    assert epsilon_counted([often], limit) == epsilon_mixed(renyi(often, "add-remove"), limit) < by_plan[1]


@pytest.mark.parametrize(
    "changed",
    [{"multiplier": 27.0}, {"multiplier": 29.0}, {"every": 4}, {"every": 10}],
    ids=["less noise", "more noise", "more often", "more rarely"],
)
def test_other_metrics_make_another_kind_of_event(changed):
    other = ROUND.model_copy(update={"metrics": ROUND.metrics.model_copy(update=changed)})
    assert homogeneous([ROUND, other]) is None
    assert homogeneous([ROUND, ROUND.model_copy(update={"metrics": None})]) is None
    assert homogeneous([ROUND, measuring(ROUND, 0)]) == measuring(ROUND.model_copy(update={"steps": 10}), 1)
    limit = Limit(8.0, DELTA)
    mixed = epsilon_mixed(renyi(ROUND, "add-remove") * 10 + renyi(other, "add-remove") * 10, limit)
    assert epsilon_counted([ROUND] * 10 + [other] * 10, limit) == pytest.approx(mixed)


def test_a_member_that_never_measures_counts_the_training_alone():
    bare = ROUND.model_copy(update={"metrics": None})
    assert epsilon_counted([bare] * 20, Limit(8.0, DELTA)) == pytest.approx(4.105492, rel=1e-4)


def test_the_renyi_filter_adds_only_what_was_measured():
    histogram, limit = Laplace(epsilon=0.1), Limit(8.0, DELTA)
    silent, measured = [measuring(ROUND, 0)] * 20, [ROUND] * 20
    bare = [ROUND.model_copy(update={"metrics": None})] * 20
    assert epsilon_counted([*silent, histogram], limit) == epsilon_counted([*bare, histogram], limit)
    assert epsilon_counted([*measured, histogram], limit) > epsilon_counted([*silent, histogram], limit)


def test_a_job_has_fewer_rounds_with_metrics_and_none_beyond_the_number():
    limit = Limit(4.5, DELTA)
    for spent in ([], [Laplace(epsilon=0.1)]):
        bare = rounds_affordable(ROUND.model_copy(update={"metrics": None}), limit, spent)
        rounds = rounds_affordable(ROUND, limit, spent)
        assert 0 < rounds < bare
        assert PrivacyFilter(limit).admits([*spent, repeated(ROUND, rounds)])
        assert not PrivacyFilter(limit).admits([*spent, repeated(ROUND, rounds + 1)])
    assert rounds_affordable(ROUND, limit, [ROUND] * 3) == rounds_affordable(ROUND, limit) - 3


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("std", [1 / 16, 0.3, 1.0, 1.7, 3.0, 10.0, 20.0])
def test_metrics_with_hardly_any_noise_are_counted_and_not_an_error(adjacency, std):
    """A job may order as little noise as the sampler draws, down to 1/16 of a step."""
    multiplier, limit = std / distance_of(adjacency), Limit(8.0, DELTA, adjacency)
    for measured in (0, 1, 3):
        event = Laplace(epsilon=0.1, metrics=Beside(multiplier=multiplier, every=1, measured=measured))
        found = epsilon_counted([event, event], limit)
        assert found > 1 / (2 * multiplier**2) if measured else found < 1
        assert PrivacyFilter(limit).admits([event]) == (not measured)
    assert rounds_affordable(measuring(event, 1), limit) == 0


def test_the_least_noise_with_a_distribution_has_one_under_both_adjacencies():
    for adjacency in ("add-remove", "replace-one"):
        for multiplier in (0.25, 0.3, 0.5):
            found = epsilon_pld([DiscreteGaussian(multiplier=multiplier)], DELTA, adjacency)
            assert 8 < found < epsilon_renyi(renyi(DiscreteGaussian(multiplier=multiplier), adjacency), DELTA)
        assert epsilon_pld([DiscreteGaussian(multiplier=0.24)], DELTA, adjacency) is None


def test_rounding_is_subtracted_for_each_coordinate_of_metrics_too():
    plain = SampledGaussian(multiplier=1.5, rate=1, metrics=Beside(multiplier=28.0, every=5, measured=4))
    assert composed_steps(plain) == 12
    assert composed_steps(planned(ROUND, 100)) == 100 + 3 * 20
    assert composed_steps(DiscreteGaussian(multiplier=28.0, steps=7)) == 21
    # A table of wide noise is a longer sum.
    assert composed_steps(DiscreteGaussian(multiplier=200.0, steps=7)) == 4 * 21


def test_the_numbers_that_fix_the_gate_name_the_steps_of_metrics():
    assert GATE_NUMBERS[-2:] == (3.0, HALF)


def exact_delta(std, shifts, epsilon, gaussian=None):
    """Delta of coordinates shifted by whole steps, summed over all outcomes; beside a plain Gaussian of a multiplier.

    The loss is linear in the noise: the sum of shift * noise / s^2, less half the sum of shift^2 / s^2. Shifts are
    multiples of the smallest, so that the sum is a whole number of its multiples.
    """
    unit, reach = min(shifts), int(14 * std)
    k = np.arange(-reach, reach + 1)
    masses = np.exp(-(k**2) / (2 * std * std))
    masses /= masses.sum()
    spread = np.ones(1)
    for shift in shifts:
        times = shift // unit
        stretched = np.zeros(2 * reach * times + 1)
        stretched[::times] = masses
        spread = fftconvolve(spread, stretched)
    total = np.arange(len(spread)) - (len(spread) - 1) // 2
    loss = unit * total / std**2 + sum(shift**2 for shift in shifts) / (2 * std**2)
    left = epsilon - loss
    if gaussian is None:
        return float((np.maximum(0.0, -np.expm1(left)) * spread).sum())
    # Delta of a Gaussian at any real epsilon (Balle, Wang 2018, Theorem 8).
    first = norm.cdf(0.5 / gaussian - left * gaussian)
    second = np.exp(np.minimum(left, 600)) * norm.cdf(-0.5 / gaussian - left * gaussian)
    return float((np.maximum(0.0, first - second) * spread).sum())


@pytest.mark.parametrize("multiplier", [1.0, 4.0])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_the_distribution_of_metrics_against_a_direct_sum(adjacency, multiplier):
    std = multiplier * distance_of(adjacency)
    shifts = [shift for shift, count in shifts_of(adjacency).items() for _ in range(count)]
    assert math.hypot(*shifts) == pytest.approx(distance_of(adjacency))
    for delta in (1e-3, 1e-6):
        ours = epsilon_pld([DiscreteGaussian(multiplier=multiplier)], delta, adjacency)
        # The grid of the library is finer than the steps of the losses here, so it is exact but for rounding.
        assert exact_delta(std, shifts, ours) <= delta * (1 + 1e-9)
        assert exact_delta(std, shifts, 0.99 * ours) > delta
        # Beside one plain Gaussian, which is a kind that has a closed form.
        plain = SampledGaussian(multiplier=2.0, rate=1, metrics=Beside(multiplier=multiplier, every=1, measured=1))
        if adjacency == "add-remove":
            together = epsilon_pld([plain], delta, adjacency)
            assert exact_delta(std, shifts, together, 2.0) <= delta * (1 + 1e-9)
            assert exact_delta(std, shifts, 0.99 * together, 2.0) > delta


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 2.5])
def test_the_largest_shifts_dominate_all_smaller_ones(epsilon):
    """Three coordinates of log-concave noise, every shift within the bounds, by summing over all outcomes."""
    std, most = 2.0, (2, 2, 1)
    k = np.arange(-30, 31)

    def masses(shift):
        found = np.exp(-((k - shift) ** 2) / (2 * std * std))
        return found / found.sum()

    def delta(shifts):
        p = functools.reduce(np.multiply.outer, [masses(shift) for shift in shifts])
        q = functools.reduce(np.multiply.outer, [masses(0)] * 3)
        return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())

    worst = delta(most)
    for shifts in itertools.product(*(range(-bound, bound + 1) for bound in most)):
        assert delta(shifts) <= worst + 1e-15


def test_metrics_alone_are_a_kind_of_their_own():
    training, metrics = SampledGaussian(multiplier=28.0, rate=1), DiscreteGaussian(multiplier=28.0)
    assert len(merged([training, metrics, metrics])) == 2
    limit = Limit(1.0, DELTA)
    assert rounds_affordable(metrics, limit) == pytest.approx(rounds_affordable(training, limit), rel=0.02)
    assert rounds_affordable(metrics, limit, [training] * 10) < rounds_affordable(metrics, limit)


def test_a_ledger_of_another_unit_refuses_them():
    with pytest.raises(EventUnaccountable, match="one member"):
        epsilon_counted([event_of_metrics(NOISE, "add-remove", "member")], Limit(1.0, DELTA))


def test_the_sampler_has_the_parameter_that_is_charged():
    drawn = Sampler(NOISE.std)
    assert drawn.std / (math.sqrt(3) * HALF) == pytest.approx(event_of_metrics(NOISE, "add-remove").multiplier)
