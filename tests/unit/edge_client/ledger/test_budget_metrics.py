"""Metrics and training are one event: reserved, charged, released and forfeited together, and measured only if paid."""

import pytest

from edge_client.ledger.budget import Budget
from edge_client.ledger.ledger import LedgerMisused
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy, PolicyRefusal
from learning.accounting.calibration import epsilon_at_gate
from learning.accounting.events import DiscreteGaussian, Laplace, measuring, metrics_alone, metrics_beside, planned
from learning.accounting.filter import Limit, epsilon_mixed
from learning.accounting.gate import epsilon_counted, homogeneous
from learning.accounting.spend import total
from tacit.attempt import AttemptId
from tacit.messages import Assignment
from tacit.reason import Reason
from tacit.validation import NoisedMetrics
from tests.support import party
from tests.unit.learning.mechanisms.test_mechanisms import DP_SGD, GAUSSIAN, LAPLACE, RING, job

EXAMPLES = 200
METRICS = NoisedMetrics(noise_multiplier=28.0)
RING = {**RING, "noise_multiplier": 20.0}
ON = {"metrics_epsilon": 1.0, "epsilon": 100.0}


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def opened(tmp_path, identity):
    """Opens the budget of the home again, as a new process would."""
    running = []

    def open_again(**policy) -> Budget:
        while running:
            running.pop().__exit__(None, None, None)
        manager = open_budget(tmp_path, identity, Policy(**policy), ["one", "two"])
        running.append(manager)
        return manager.__enter__()

    yield open_again
    while running:
        running.pop().__exit__(None, None, None)


def measured_job(mechanism=GAUSSIAN, **metrics):
    return job(mechanism, metrics=METRICS.model_copy(update=metrics).model_dump())


def reserved(budget, document, round_=1):
    version = bytes([round_]) * 32
    assignment = Assignment(document.name, round_, document.digest(), version, round_ - 1, 1000)
    return budget.reserve(assignment, document, budget.protection(document, EXAMPLES))


def attempt(round_=1, number=1):
    return AttemptId("questions", round_, number)


def spent(budget):
    """Steps and measurements that count as spent."""
    events = budget.statement("questions").of_job
    alone = [metrics_alone(each) for each in events]
    return sum(each.steps for each in events), sum(each.steps for each in alone if each is not None)


@pytest.mark.parametrize("mechanism", [DP_SGD, GAUSSIAN, LAPLACE, RING], ids=lambda each: each["name"])
def test_a_measurement_is_charged_once_in_however_many_attempts(opened, mechanism):
    budget = opened(**ON)
    document = measured_job(mechanism)
    held = reserved(budget, document)
    assert held.measured
    each = budget.protection(document, EXAMPLES).event.steps
    assert spent(budget) == (each, 1)
    for number in (1, 2, 3):
        budget.charge(attempt(number=number), held)
        budget.ended(attempt(number=number), "phase_deadline", b"", None)
    # Noise in the ring is drawn anew for each attempt. The metrics never are.
    assert spent(budget) == ((3 if mechanism is RING else 1) * each, 1)


def test_only_measured_rounds_are_paid_for_and_all_are_one_kind(opened):
    budget, document = opened(**ON), measured_job(every=3)
    held = [reserved(budget, document, round_) for round_ in range(1, 8)]
    assert [each.measured for each in held] == [True, False, False, True, False, False, True]
    assert spent(budget) == (7, 3)
    (event,) = budget.statement("questions").of_job[:1]
    assert metrics_beside(event).every == 3
    assert len({metrics_beside(each).every for each in budget.statement("questions").of_job}) == 1


def test_a_member_whose_policy_is_silent_pays_for_the_training_alone(opened):
    budget, document = opened(epsilon=100.0), measured_job()
    held = reserved(budget, document)
    assert not held.measured
    assert budget.statement("questions").of_job == (budget.protection(job(GAUSSIAN), EXAMPLES).event,)


def test_metrics_with_less_noise_than_the_policy_wants_are_noise_alone_and_not_paid(opened):
    document = measured_job()
    budget = opened(**ON, min_noise_multiplier=28.1)
    assert not reserved(budget, document).measured
    assert budget.statement("questions").of_job == (budget.protection(job(GAUSSIAN), EXAMPLES).event,)
    budget = opened(**ON, min_noise_multiplier=28.0)
    assert reserved(budget, document.model_copy(update={"name": "other"})).measured


def test_a_spent_part_stops_the_measuring_and_not_the_training(opened):
    two = epsilon_at_gate(DiscreteGaussian(multiplier=28.0, steps=2), 1e-6, "add-remove")
    budget, document = opened(epsilon=100.0, metrics_epsilon=1.001 * two), measured_job()
    held = [reserved(budget, document, round_) for round_ in range(1, 6)]
    assert [each.measured for each in held] == [True, True, False, False, False]
    assert spent(budget) == (5, 2)
    # It is counted over all jobs of the ledger.
    other = measured_job(DP_SGD).model_copy(update={"name": "other"})
    assert not reserved(budget, other).measured
    # What was released is there again. The other job began without metrics, and stays so.
    budget.release(held[0], "not sent")
    assert not reserved(budget, other, 2).measured
    assert reserved(budget, document, 6).measured


def test_a_measurement_that_has_no_room_in_the_limit_is_left_out_before_the_training_is(opened):
    """With two kinds of events the Rényi filter counts, which adds only what is measured."""
    document = measured_job()
    event, other = opened(**ON).protection(document, EXAMPLES).event, Laplace(epsilon=0.1)
    enough = epsilon_counted([other, event, event, measuring(event, 0)], Limit(1.0, 1e-6))
    budget = opened(epsilon=enough * (1 + 1e-6), metrics_epsilon=enough)
    budget.charge_beside(other, document, round=9, version=b"v" * 32, mechanism="label-histogram")
    held = [reserved(budget, document, round_) for round_ in range(1, 4)]
    assert [each.measured for each in held] == [True, True, False]
    with pytest.raises(PolicyRefusal) as refused:
        reserved(budget, document, 4)
    assert refused.value.reason == Reason.REASON_BUDGET_SPENT


def test_the_first_event_of_a_job_decides_its_kind(opened):
    document = measured_job()
    budget = opened(epsilon=100.0)
    budget.charge(attempt(1), reserved(budget, document))
    # The policy allows metrics now, but the job's events have none. Another job measures.
    budget = opened(**ON)
    assert not reserved(budget, document, 2).measured
    assert len(budget.statement("questions").of_job) == 1
    other = document.model_copy(update={"name": "other"})
    assert reserved(budget, other).measured


def test_a_policy_that_ends_metrics_keeps_the_kind_and_stops_measuring(opened):
    document = measured_job()
    budget = opened(**ON)
    budget.charge(attempt(1), reserved(budget, document))
    budget = opened(epsilon=100.0)
    held = reserved(budget, document, 2)
    assert not held.measured
    assert spent(budget) == (2, 1)
    assert len({metrics_beside(each).multiplier for each in budget.statement("questions").of_job}) == 1


def test_a_restart_frees_both_parts_of_what_was_not_charged(opened):
    budget, document = opened(**ON), measured_job()
    first = reserved(budget, document)
    budget.charge(attempt(1), first)
    second = reserved(budget, document, 2)
    assert spent(budget) == (2, 2)
    budget = opened(**ON)
    assert spent(budget) == (1, 1)
    with pytest.raises(LedgerMisused):
        budget._ledger.charge(second.reservation, 1)


def test_a_failed_training_forfeits_its_metrics_too(opened):
    budget, document = opened(**ON), measured_job()
    held = reserved(budget, document)
    budget.forfeit(held)
    budget.release(held, "training did not end")
    assert spent(budget) == (1, 1)


def test_a_member_that_can_never_measure_a_job_pays_for_none_of_its_metrics(opened):
    """One measurement alone is more than metrics may spend, so the job's events have none beside them."""
    budget, document = opened(epsilon=100.0, metrics_epsilon=0.5), measured_job(noise_multiplier=2.0)
    assert not reserved(budget, document).measured
    assert budget.statement("questions").of_job == (budget.protection(job(GAUSSIAN), EXAMPLES).event,)


def test_equal_steps_without_metrics_join_those_that_came_before_with_some(opened):
    """A plan of the first kind holds both, so they need not be counted as two kinds."""
    budget, document = opened(**ON), measured_job()
    for round_ in range(1, 6):
        reserved(budget, document, round_)
    bare = job(GAUSSIAN).model_copy(update={"name": "bare"})
    for round_ in range(1, 6):
        assert not reserved(budget, bare, round_).measured
    (kind,) = {measuring(each, 0).model_copy(update={"steps": 1}) for each in budget.statement("bare").events}
    assert metrics_beside(kind) is not None
    event = budget.protection(document, EXAMPLES).event
    assert budget.statement("bare").figures().epsilon == pytest.approx(
        epsilon_counted([planned(event, 10)], Limit(1.0, 1e-6))
    )


def test_metrics_never_join_equal_steps_that_came_before_without(opened):
    """They were chosen after something was released, so they are another kind."""
    budget = opened(**ON)
    bare = job(GAUSSIAN).model_copy(update={"name": "bare"})
    for round_ in range(1, 6):
        reserved(budget, bare, round_)
    assert reserved(budget, measured_job()).measured
    kinds = budget.statement("bare").events
    assert homogeneous(kinds) is None
    assert budget.statement("bare").figures().epsilon == pytest.approx(
        epsilon_mixed(total(kinds, Limit(1.0, 1e-6)), Limit(1.0, 1e-6))
    )


def test_a_round_that_is_begun_again_is_not_measured_at_the_price_of_further_steps(opened):
    """The vector was charged and lost in a restart. A second one would need a plan of six steps."""
    budget, document = opened(**ON), measured_job(every=5)
    first = reserved(budget, document)
    budget.charge(attempt(1), first)
    budget = opened(**ON)
    again = reserved(budget, document)
    assert first.measured
    assert not again.measured
    assert spent(budget) == (2, 1)
    # Where every round is measured, each step has a measurement of its own.
    other = measured_job().model_copy(update={"name": "other"})
    budget.charge(AttemptId("other", 1, 1), reserved(budget, other))
    assert reserved(opened(**ON), other).measured
