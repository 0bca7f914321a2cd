"""Figures at delta 1e-5 that others can compare with, each to the digits given."""

import pytest

from learning.accounting.costs import event_of_round
from learning.accounting.events import FixedLotGaussian, SampledGaussian
from learning.accounting.spend import Limit, epsilon_pld, epsilon_renyi, renyi, spend
from tacit.mechanism import DpSgd, GaussianUpdate

DELTA = 1e-5


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "as_steps", "as_updates"),
    [(0.01, 1.0, 1000, 1.83, 13.36), (0.05, 1.0, 100, 3.50, 18.19), (0.1, 2.0, 50, 1.65, 5.15)],
)
def test_sampled_gaussian_by_pld(rate, sigma, steps, as_steps, as_updates):
    """DP-SGD's steps, and the same numbers as whole updates, which one example moves by 2 C instead of C."""
    lot, examples = round(rate * 10_000), 10_000
    step = event_of_round(DpSgd(noise_multiplier=sigma, lot=lot, steps=steps), examples)
    update = event_of_round(GaussianUpdate(noise_multiplier=sigma, lot=lot), examples)
    assert step == SampledGaussian(multiplier=sigma, rate=rate, steps=steps)
    assert update == SampledGaussian(multiplier=sigma / 2, rate=rate)
    assert epsilon_pld([step], DELTA, "add-remove") == pytest.approx(as_steps, abs=0.005)
    assert epsilon_pld([update] * steps, DELTA, "add-remove") == pytest.approx(as_updates, abs=0.005)


def test_a_fixed_lot_by_renyi():
    """The paper's sigma = 1 is noise of C on a change clipped to C. Another example in the lot can reverse that change,
    from one end of the ball to the other: 2 C. So the multiplier over the distance is 1/2, which gives 20.99. Counted
    as 1 it would give 3.58, an understatement.
    """
    mechanism = GaussianUpdate(noise_multiplier=1.0, lot=100, sampling="fixed")
    event = event_of_round(mechanism, 10_000)
    assert event == FixedLotGaussian(multiplier=0.5, lot=100, population=10_000)
    assert epsilon_renyi(1000 * renyi(event, "replace-one"), DELTA) == pytest.approx(20.99, abs=0.005)
    naive = event.model_copy(update={"multiplier": 1.0, "steps": 1000})
    assert spend([naive], Limit(8, DELTA, "replace-one")).epsilon == pytest.approx(3.58, abs=0.005)


@pytest.mark.parametrize(("epsilon", "sigma"), [(8.0, 12.1), (4.0, 21.7), (1.0, 74.7)])
def test_output_perturbation(epsilon, sigma):
    """`gaussian-update` on all examples for 100 rounds: the smallest sigma of three digits that keeps an epsilon."""

    def whole(sigma: float) -> float:
        event = event_of_round(GaussianUpdate(noise_multiplier=sigma, lot=1000), 1000)
        found = epsilon_pld([event] * 100, DELTA, "add-remove")
        assert found is not None
        return found

    assert whole(sigma) <= epsilon < whole(sigma - 0.1)
