"""What an answer to a measurement costs, against dp-accounting."""

import itertools

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from learning.accounting.events import event_from, metrics_alone
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.accounting.spend import epsilon_pld, merged
from learning.survey.answer import event_of_answer, std_for, vector_of
from tacit.measurement import Measurement
from tacit.mechanism import OwnDiscreteGaussian
from tacit.validation import HALF, distance_of, shifts_of

WHOLE = Measurement(job="desk", document=bytes(32), weights=bytes(32), manifest=bytes(32), values=1)
BY_LABEL = WHOLE.model_copy(update={"breakdown": ("a", "b")})


def event(question, multiplier, adjacency="add-remove"):
    noise = OwnDiscreteGaussian(std=multiplier * distance_of(adjacency), bound=64_000)
    return event_of_answer(question, noise, adjacency)


# Multiplier and epsilon at delta 1e-6, as the gate counts, rounded to three digits.
GOLDEN = [
    (WHOLE, "add-remove", 2.0, 2.28),
    (WHOLE, "add-remove", 8.0, 0.508),
    (WHOLE, "replace-one", 8.0, 0.508),
    (BY_LABEL, "add-remove", 2.0, 2.28),
    (BY_LABEL, "replace-one", 8.0, 0.553),
]


@pytest.mark.parametrize(("question", "adjacency", "multiplier", "counted"), GOLDEN)
def test_the_gates_epsilon_is_above_the_librarys_exact_one(question, adjacency, multiplier, counted):
    found = epsilon_counted([event(question, multiplier, adjacency)], Limit(8.0, 1e-6, adjacency))
    assert found == pytest.approx(counted, rel=0.01)
    # The library's exact PLD of the same discrete Gaussians, shifted as far as one row can in each number.
    exact = None
    for shift, count in shifts_of(adjacency).items():
        one = privacy_loss_distribution.from_discrete_gaussian_mechanism(
            multiplier * distance_of(adjacency), shift, value_discretization_interval=1e-4
        ).self_compose(count)
        exact = one if exact is None else exact.compose(one)
    assert found >= exact.get_epsilon_for_delta(1e-6)
    accountant = RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(multiplier))
    assert found <= 1.12 * accountant.get_epsilon(1e-6)


@pytest.mark.parametrize("multiplier", [0.6, 2.0])
def test_six_shifts_of_a_breakdown_are_within_its_charge(multiplier):
    """A row that changes its label: six numbers move by HALF. The library's exact PLD is below what is charged."""
    std = multiplier * distance_of("replace-one")
    exact = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        std, HALF, value_discretization_interval=1e-3
    ).self_compose(6)
    limit = Limit(100.0, 1e-6, "replace-one")
    assert exact.get_epsilon_for_delta(1e-6) <= epsilon_counted([event(BY_LABEL, multiplier, "replace-one")], limit)


def test_an_answer_says_what_it_holds_and_a_breakdown_has_no_distribution_where_six_numbers_move():
    added, replaced = event(BY_LABEL, 4.0), event(BY_LABEL, 4.0, "replace-one")
    assert added == event(WHOLE, 4.0)
    assert (added.vector, event(WHOLE, 4.0, "replace-one").vector, replaced.vector) == (
        "metrics",
        "metrics",
        "breakdown",
    )
    assert epsilon_pld([added], 1e-6, "add-remove") is not None
    assert epsilon_pld([replaced], 1e-6, "replace-one") is None
    whole = event(WHOLE, 4.0, "replace-one")
    assert epsilon_pld([whole, replaced], 1e-6, "replace-one") is None
    assert len(merged([whole, replaced, whole.model_copy(update={"vector": "histograms"})])) == 3
    for each in (whole, replaced):
        assert event_from(each.model_dump(mode="json")) == each
        # Both count under metrics_epsilon.
        assert metrics_alone(each) == each


@pytest.mark.parametrize(("question", "adjacency"), itertools.product((WHOLE, BY_LABEL), ("add-remove", "replace-one")))
def test_the_std_for_an_epsilon_is_the_least_that_its_ledger_admits(question, adjacency):
    limit = Limit(0.5, 1e-6, adjacency)
    std = std_for(vector_of(question, adjacency), distance_of(adjacency), 0.5, 1e-6, adjacency)

    def counts(std):
        return epsilon_counted(
            [event_of_answer(question, OwnDiscreteGaussian(std=std, bound=64_000), adjacency)], limit
        )

    assert counts(std) <= 0.5 < counts(0.98 * std)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_breakdown_is_a_charge_of_its_own(adjacency):
    limit = Limit(8.0, 1e-6, adjacency)
    one = epsilon_counted([event(WHOLE, 4.0, adjacency)], limit)
    both = epsilon_counted([event(WHOLE, 4.0, adjacency), event(BY_LABEL, 4.0, adjacency)], limit)
    assert both > 1.35 * one
    # Two kinds of events cost no less than twice the same.
    assert both >= epsilon_counted([event(WHOLE, 4.0, adjacency).model_copy(update={"steps": 2})], limit)
