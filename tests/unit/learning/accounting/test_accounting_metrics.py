"""What noised metrics cost, alone and with training, against dp-accounting."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from learning.accounting.calibration import rounds_affordable
from learning.accounting.costs import event_of_metrics
from learning.accounting.events import DiscreteGaussian, SampledGaussian, event_from
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi
from learning.accounting.spend import epsilon_pld, epsilon_renyi, merged
from secure_agg.discrete_gaussian import DiscreteGaussian as Sampler
from tacit.validation import HALF, MetricNoise

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
    assert epsilon_counted([training, metrics], limit) == pytest.approx(5.293144, rel=1e-4)
    assert epsilon_counted([metrics], limit) == pytest.approx(0.719558, rel=1e-4)
    assert epsilon_counted([training], limit) == pytest.approx(4.105492, rel=1e-4)


def test_metrics_are_a_kind_of_their_own():
    """They have no PLD, so a ledger that holds training too is counted by the Rényi filter."""
    training, metrics = SampledGaussian(multiplier=28.0, rate=1), DiscreteGaussian(multiplier=28.0)
    assert len(merged([training, metrics, metrics])) == 2
    assert epsilon_pld([metrics], DELTA, "add-remove") is None
    limit = Limit(1.0, DELTA)
    assert rounds_affordable(metrics, limit) < rounds_affordable(training, limit)
    assert rounds_affordable(metrics, limit, [training] * 10) < rounds_affordable(metrics, limit)


def test_a_ledger_of_another_unit_refuses_them():
    with pytest.raises(EventUnaccountable, match="one member"):
        epsilon_counted([event_of_metrics(NOISE, "add-remove", "member")], Limit(1.0, DELTA))


def test_the_sampler_has_the_parameter_that_is_charged():
    drawn = Sampler(NOISE.std)
    assert drawn.std / (math.sqrt(3) * HALF) == pytest.approx(event_of_metrics(NOISE, "add-remove").multiplier)
