"""The keys of training that models which write use: the schedule over rounds, pieces, weight decay."""

import math

import pytest
from pydantic import ValidationError

from tacit.job import JobSpec, Schedule, Training
from tacit.job_parts import rate_factor


def factors(rounds: int, **schedule: object) -> list[float]:
    made = Schedule.model_validate(schedule)
    return [rate_factor(made, number, rounds) for number in range(1, rounds + 1)]


def test_without_a_schedule_the_rate_stays() -> None:
    assert [rate_factor(None, number, 3) for number in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert factors(3) == [1.0, 1.0, 1.0]


def test_warm_up_grows_in_equal_steps_to_the_whole_rate() -> None:
    assert factors(5, warmup_rounds=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    # A job that ends during its warm-up never has the whole rate.
    assert factors(2, warmup_rounds=3) == [0.25, 0.5]


def test_linear_decay() -> None:
    assert factors(4, decay="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(5, warmup_rounds=1, decay="linear") == [0.5, 1.0, 0.75, 0.5, 0.25]


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    found = factors(6, warmup_rounds=2, decay="cosine")
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert all(0 < each <= 1 for each in factors(1000, decay="cosine"))


@pytest.mark.parametrize("number", [0, 4])
def test_a_round_that_the_job_does_not_have_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"no round {number}"):
        rate_factor(Schedule(decay="linear"), number, 3)


def test_a_rounds_training_has_its_rates_and_nothing_else() -> None:
    whole = Training(learning_rate=0.1, embedding_learning_rate=0.2, schedule=Schedule(decay="linear"), batch=3)
    second = whole.in_round(2, 2)
    assert (second.learning_rate, second.embedding_learning_rate) == (0.05, 0.1)
    assert second.model_copy(update={"learning_rate": 0.1, "embedding_learning_rate": 0.2}) == whole
    assert whole.in_round(1, 2) is whole
    assert Training(schedule=Schedule(decay="linear")).in_round(2, 2).embedding_learning_rate is None


def test_only_adamw_decays_weights() -> None:
    assert Training(optimiser="adamw", weight_decay=0.1).weight_decay == 0.1
    with pytest.raises(ValidationError, match='only optimiser = "adamw" has this key'):
        Training(optimiser="adam", weight_decay=0.1)


def test_weights_may_decay_to_zero_in_a_step_and_no_further() -> None:
    """A sentence says what is wrong with more (`test_job_sentences`)."""
    body = {"schema": 1, "name": "desk", "labels": ["a", "b"], "vocabulary": {"kind": "words", "file": "words.txt"}}
    training = {"optimiser": "adamw", "learning_rate": 2.0, "embedding_learning_rate": 1.0}
    JobSpec.model_validate({**body, "training": {**training, "weight_decay": 0.5}})
    with pytest.raises(ValidationError, match="flip their signs"):
        JobSpec.model_validate({**body, "training": {**training, "weight_decay": 0.501}})


def test_packing_is_refused_with_its_reason() -> None:
    with pytest.raises(ValidationError, match="packed rows see each other"):
        Training.model_validate({"packing": True})
