"""What a row's events are to a person with several rows: bounds beside dp-accounting's mixtures and by enumeration."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as library

from learning.accounting.costs import event_of_round
from learning.accounting.events import (
    Beside,
    DiscreteGaussian,
    DiscreteGaussianSum,
    FixedLotGaussian,
    Laplace,
    SampledGaussian,
)
from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter, epsilon_counted
from learning.accounting.groups import of_person
from learning.accounting.renyi import EventUnaccountable
from learning.accounting.spend import epsilon_pld
from learning.synthesis.labels import histogram_event
from learning.text.examples import Example
from tacit.mechanism import DpSgd, PersonRows

DELTA = 1e-5
PERSON = Limit(8.0, DELTA, unit="person")


def mechanism(**changes) -> DpSgd:
    return DpSgd(**{"noise_multiplier": 1.0, "lot": 100, "steps": 1000, "unit": "person"} | changes)


def test_a_training_by_person_costs_what_dp_sgd_costs_and_counts_persons():
    """The golden figures of dp-sgd: rate 0.01, sigma 1, 1000 steps at delta 1e-5 are epsilon 1.83, whoever is drawn."""
    event = event_of_round(mechanism(person=PersonRows(max_examples=7)), 10_000)
    assert event == SampledGaussian(multiplier=1.0, rate=0.01, steps=1000, unit="person")
    assert epsilon_pld([event], DELTA, "add-remove") == pytest.approx(1.83, abs=0.005)
    # How many rows of a person a draw uses, and how they combine, moves no figure: the clip bounds their sum.
    for use in (PersonRows(max_examples=1), PersonRows(max_examples=5000, combine="sum")):
        assert event_of_round(mechanism(person=use), 10_000) == event
    # dp-accounting, directly: one step's distribution composed with itself.
    step = library.from_gaussian_mechanism(1.0, sampling_prob=0.01, value_discretization_interval=1e-4)
    assert step.self_compose(1000).get_epsilon_for_delta(DELTA) == pytest.approx(1.83, abs=0.005)


def test_persons_and_rows_are_never_added_up():
    event = event_of_round(mechanism(person=PersonRows(max_examples=7)), 10_000)
    with pytest.raises(EventUnaccountable, match="protects one person, but the unit of this ledger is one example"):
        epsilon_counted([event], Limit(8.0, DELTA))
    with pytest.raises(EventUnaccountable, match="protects one example, but the unit of this ledger is one person"):
        PrivacyFilter(PERSON).admits([event, SampledGaussian(multiplier=9.0, rate=0.1)])


@pytest.mark.parametrize(
    ("rows", "rate", "sigma", "steps"),
    [
        (2, 0.1, 4.0, 20),
        (5, 0.05, 6.0, 50),
        pytest.param(10, 0.3, 30.0, 30, marks=pytest.mark.long),
        pytest.param(3, 1.0, 20.0, 10, marks=pytest.mark.long),
    ],
)
def test_a_group_of_rows_costs_at_least_its_exact_mixture(rows, rate, sigma, steps):
    """dp-accounting composes the mixture of Gaussians that k sampled rows are (Ganesh 2024). Ours is never below it."""
    event = SampledGaussian(multiplier=sigma, rate=rate, steps=steps)
    ours = epsilon_pld([of_person(event, rows)], DELTA, "add-remove")
    binomial = [math.comb(rows, j) * rate**j * (1 - rate) ** (rows - j) for j in range(rows + 1)]
    exact = library.from_mixture_gaussian_mechanism(
        sigma, [float(j) for j in range(rows + 1)], binomial, value_discretization_interval=1e-3
    )
    theirs = exact.self_compose(steps).get_epsilon_for_delta(DELTA)
    assert ours is not None
    assert theirs * 0.999 <= ours
    one = epsilon_pld([event], DELTA, "add-remove")
    assert one is not None
    assert ours > one


def test_a_group_of_one_row_is_that_row():
    for rate in (1e-12, 0.01, 0.5, 1.0):
        event = SampledGaussian(multiplier=2.0, rate=rate, steps=3)
        found = of_person(event, 1)
        assert isinstance(found, SampledGaussian)
        assert (found.multiplier, found.steps, found.unit) == (2.0, 3, "person")
        assert rate <= found.rate <= rate * (1 + 1e-14)


@pytest.mark.parametrize("rate", [1e-9, 0.003, 0.4, 0.999])
@pytest.mark.parametrize("rows", [2, 50, 10_000])
def test_the_rate_is_that_of_drawing_any_row(rate, rows):
    found = of_person(SampledGaussian(multiplier=2.0, rate=rate), rows)
    assert isinstance(found, SampledGaussian)
    exact = 1 - (1 - np.longdouble(rate)) ** rows
    assert float(exact) * (1 - 1e-9) <= found.rate <= min(1.0, float(exact) * (1 + 1e-9) + 1e-18)
    assert found.multiplier == 2.0 / rows


def test_the_divergence_of_any_group_stays_below_the_bound():
    """By enumeration: k rows of any lengths up to a clip, drawn independently, against none of them, at one step."""
    random, x = np.random.default_rng(5), np.linspace(-60, 60, 240_001)
    dx = x[1] - x[0]

    def normal(mean: float, std: float):
        return np.exp(-((x - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))

    for _ in range(20):
        rows, rate, std = int(random.integers(1, 5)), float(random.uniform(0.05, 1)), float(random.uniform(1, 4))
        shifts = random.uniform(-1, 1, size=rows)
        with_person = sum(
            rate ** bin(s).count("1")
            * (1 - rate) ** (rows - bin(s).count("1"))
            * normal(float(sum(shifts[j] for j in range(rows) if s >> j & 1)), std)
            for s in range(2**rows)
        )
        without = normal(0.0, std)
        group = of_person(SampledGaussian(multiplier=std, rate=rate), rows)
        assert isinstance(group, SampledGaussian)
        top = (1 - group.rate) * normal(0.0, group.multiplier) + group.rate * normal(1.0, group.multiplier)
        low = normal(0.0, group.multiplier)
        for epsilon in (0.0, 0.2, 0.7, 1.5):
            for mine, other, p, q in ((with_person, without, top, low), (without, with_person, low, top)):
                real = float(np.maximum(mine - math.exp(epsilon) * other, 0).sum() * dx)
                bound = float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * dx)
                assert real <= bound + 1e-6


def test_noise_that_covers_any_change_covers_a_person_at_the_same_cost():
    event = Laplace(epsilon=0.5)
    assert of_person(event, 50) == event.model_copy(update={"unit": "person"})


def test_a_person_moves_a_histogram_of_labels_by_all_its_rows():
    """A released corpus' histogram is a sum of one share, whose distance is that of one row. A person has k of them."""
    event = histogram_event(10.0, 5, "add-remove")
    found = of_person(event, 50)
    assert isinstance(found, DiscreteGaussianSum)
    examples = [Example("x", "a")] * 53
    with_person, without = (np.bincount([0] * count, minlength=5) for count in (len(examples), 3))
    assert float(np.linalg.norm(with_person - without)) == 50 <= found.distance
    # As far apart as a plain Gaussian of that multiplier, never less.
    exact = epsilon_pld([SampledGaussian(multiplier=10.0 / 50, rate=1.0)], DELTA, "add-remove")
    assert exact is not None
    assert epsilon_counted([found], PERSON) >= exact


def test_counts_and_metrics_move_with_each_row():
    answer = DiscreteGaussian(vector="histograms", multiplier=30.0)
    assert of_person(answer, 5) == answer.model_copy(update={"unit": "person", "multiplier": 6.0})
    trained = SampledGaussian(multiplier=9.0, rate=0.1, metrics=Beside(multiplier=40.0, every=3, measured=1))
    found = of_person(trained, 4)
    assert isinstance(found, SampledGaussian)
    assert found.metrics == Beside(multiplier=10.0, every=3, measured=1)


def test_what_has_no_bound_is_refused():
    with pytest.raises(EventUnaccountable, match='keep unit = "example"'):
        of_person(FixedLotGaussian(multiplier=2.0, lot=3, population=9), 2)
    for event, rows in ((SampledGaussian(multiplier=1, rate=1), 0), (Laplace(epsilon=1, unit="member"), 2)):
        with pytest.raises(ValueError, match="no bound by group privacy"):
            of_person(event, rows)


def test_a_person_in_two_members_data_is_under_both_limits_together():
    """No member knows of the other. Both releases together are within the sum of the two limits, and can need it."""
    event = SampledGaussian(multiplier=1.0, rate=0.05, steps=100, unit="person")
    one, both = epsilon_counted([event], PERSON), epsilon_counted([event, event], PERSON)
    assert one < both <= 2 * one
    assert PrivacyFilter(Limit(one * 1.01, DELTA, unit="person")).admits([event])
    assert not PrivacyFilter(Limit(one * 1.01, DELTA, unit="person")).admits([event, event])
