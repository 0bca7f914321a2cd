"""The noise on an answer, what it costs, and that every attempt sends the same vector."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from learning.accounting.calibration import NotAffordable
from learning.accounting.events import metrics_alone
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.accounting.renyi import EventUnaccountable
from learning.accounting.spend import epsilon_pld, merged
from learning.survey.answer import Answering, event_of_answer, noised, std_for
from secure_agg.discrete_gaussian import MAX_STD, DiscreteGaussian
from tacit import validation
from tacit.mechanism import OwnDiscreteGaussian
from tacit.question import distance_of
from tacit.survey import LabelHistogram, RowHistogram, Survey
from tacit.vector import layout_of
from tests.support.random_sources import Seeded
from tests.support.surveys import ASKED, NOISE, survey_job

ONE = Survey(histograms=(LabelHistogram(labels=("a",)),))


def test_the_noise_is_the_discrete_gaussian_of_the_job_on_every_bin():
    counts = np.array([100, 0, 7, 0, 1, 0])
    drawn = np.array([noised(counts, NOISE, Seeded(str(run))).change - counts for run in range(4000)])
    assert np.abs(drawn.mean(axis=0)).max() < 5 * NOISE.std / math.sqrt(4000)
    assert drawn.std(axis=0) == pytest.approx([NOISE.std] * 6, rel=0.06)
    assert np.array_equal(drawn, np.rint(drawn))
    assert np.abs(np.corrcoef(drawn.T) - np.eye(6)).max() < 0.08


def test_counts_beyond_the_room_are_cut_after_the_noise():
    largest = NOISE.bound + DiscreteGaussian(NOISE.std).largest
    sent = noised(np.array([10**9, 0, 0, 0, 0, 0]), NOISE, Seeded("x")).change
    assert sent[0] == largest
    assert np.abs(sent[1:]).max() < largest


def test_every_attempt_sends_the_same_vector_whatever_the_random_source():
    job, answering = survey_job(), Answering(event_of_answer(ASKED, NOISE, "add-remove"))
    answer = noised(np.array([100, 0, 7, 0, 1, 0]), NOISE, Seeded("drawn"))
    first, again = (answering.encode(job, answer, 5, Seeded(seed)) for seed in ("one", "other"))
    assert np.array_equal(first, again)
    decoded = layout_of(job, 5).decode(first.copy())["update"]
    assert np.array_equal(decoded, answer.change)
    # A sum of the largest possible vectors does not wrap.
    for members in (3, 200):
        layout = layout_of(job, members)
        largest = np.full(6, NOISE.bound + DiscreteGaussian(NOISE.std).largest, dtype=np.float64)
        for side in (largest, -largest):
            one = layout.encode({"update": side}, Seeded("x")).astype(np.uint64)
            total = ((one * members) % (1 << layout.bits)).astype(np.uint32)
            assert np.array_equal(layout.decode(total)["update"], members * side)


def test_nothing_trains_and_nothing_is_noised_twice():
    answering = Answering(event_of_answer(ASKED, NOISE, "add-remove"))
    with pytest.raises(TypeError):
        answering.train(None, Seeded("x"))
    with pytest.raises(TypeError):
        answering.protect(np.zeros(6, np.float32), Seeded("x"))


@pytest.mark.parametrize(
    ("question", "adjacency", "unit", "squared"),
    [
        (ONE, "add-remove", "example", 1),
        (ONE, "replace-one", "example", 2),
        (ASKED, "add-remove", "example", 3),
        (ASKED, "replace-one", "example", 4),
        (ASKED, "add-remove", "member", 2),
        (ASKED, "replace-one", "member", 4),
    ],
)
def test_the_event_is_one_discrete_gaussian_by_the_distance(question, adjacency, unit, squared):
    event = event_of_answer(question, OwnDiscreteGaussian(std=30.0, unit=unit), adjacency)
    assert (event.kind, event.steps, event.unit) == ("discrete-gaussian", 1, unit)
    assert event.multiplier == pytest.approx(30 / math.sqrt(squared), rel=1e-12)
    epsilon_counted([event], Limit(8.0, 1e-6, adjacency, unit))
    other = "member" if unit == "example" else "example"
    with pytest.raises(EventUnaccountable):
        epsilon_counted([event], Limit(8.0, 1e-6, adjacency, other))


# Multiplier and epsilon at delta 1e-6, as the gate counts, rounded to three digits.
GOLDEN = [(2.0, 2.45), (5.0, 0.913), (10.0, 0.436), (30.0, 0.136)]


@pytest.mark.parametrize(("multiplier", "counted"), GOLDEN)
def test_the_gates_epsilon_is_above_the_exact_one_and_near_the_librarys(multiplier, counted):
    noise = OwnDiscreteGaussian(std=multiplier)
    found = epsilon_counted([event_of_answer(ONE, noise, "add-remove")], Limit(8.0, 1e-6))
    assert found == pytest.approx(counted, rel=0.01)
    # The library's exact PLD of the same discrete Gaussian, for a shift by one.
    exact = privacy_loss_distribution.from_discrete_gaussian_mechanism(multiplier, value_discretization_interval=1e-4)
    assert found >= exact.get_epsilon_for_delta(1e-6)
    # Its Rényi accountant, at the gate's whole delta. The gate uses a part of delta, so it counts a little more.
    accountant = RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(multiplier))
    assert accountant.get_epsilon(1e-6) <= found * 1.02
    assert found <= 1.12 * accountant.get_epsilon(1e-6)


def test_an_answer_is_not_counted_as_a_vector_of_metrics():
    """Metrics of the same multiplier have a pair of distributions in fine steps. It does not bound coarse noise."""
    answer = event_of_answer(ONE, OwnDiscreteGaussian(std=0.5), "add-remove")
    assert epsilon_pld([answer], 1e-6, "add-remove") is None
    assert metrics_alone(answer) is None
    metrics = answer.model_copy(update={"vector": "metrics"})
    assert metrics_alone(metrics) == metrics
    assert len(merged([answer, metrics])) == 2


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(
    ("question", "adjacency", "unit"),
    [(ONE, "add-remove", "example"), (ASKED, "replace-one", "example"), (ASKED, "add-remove", "member")],
)
def test_the_std_for_an_epsilon_is_the_least_that_its_ledger_admits(question, adjacency, unit, epsilon):
    limit = Limit(epsilon, 1e-6, adjacency, unit)

    def counts(std):
        return epsilon_counted([event_of_answer(question, OwnDiscreteGaussian(std=std, unit=unit), adjacency)], limit)

    std = std_for("histograms", distance_of(question, adjacency, unit), epsilon, 1e-6, adjacency, unit)
    assert counts(std) <= epsilon
    assert counts(0.98 * std) > epsilon


def test_an_epsilon_below_what_the_widest_noise_costs_is_not_affordable():
    """The table of the noise ends at 65,536, which is no answer to an epsilon that needs more."""
    distance = validation.distance_of("add-remove")
    assert std_for("metrics", distance, 0.0025, 1e-6) < MAX_STD
    with pytest.raises(NotAffordable, match="65536"):
        std_for("metrics", distance, 0.002, 1e-6)


def test_more_histograms_in_one_answer_cost_less_than_asking_one_after_another():
    two = Survey(histograms=(LabelHistogram(labels=("a",)), RowHistogram(at_most=(10,))))
    limit = Limit(8.0, 1e-6, "add-remove", "member")
    noise = OwnDiscreteGaussian(std=10.0, unit="member")
    together = epsilon_counted([event_of_answer(two, noise, "add-remove")], limit)
    apart = epsilon_counted([event_of_answer(ONE, noise, "add-remove")] * 2, limit)
    # One vector of distance sqrt(2) composes like two of distance 1: nothing is lost, and nothing is hidden.
    assert together == pytest.approx(apart, rel=1e-6)
