"""What is read from the sum of a measurement: nothing without an error, and the truth within the error."""

import math

import numpy as np
import pytest

from coordinator.domain.measurement import result_of
from learning.survey.answer import noised
from learning.validation.contribution import by_label, metrics_of
from tacit.measurement import Measurement
from tacit.mechanism import OwnDiscreteGaussian
from tests.support.random_sources import Seeded

WHOLE = Measurement(job="desk", document=bytes(32), weights=bytes(32), manifest=bytes(32), values=1, loss_bound=4.0)
LABELS = ("a", "b", "rare")
BY_LABEL = WHOLE.model_copy(update={"breakdown": LABELS})
NOISE = OwnDiscreteGaussian(std=150.0, bound=64_000)
MEMBERS, ROWS, RUNS = 4, 400, 250


def rows(member):
    draw = np.random.default_rng(member)
    labels = draw.choice(3, size=ROWS, p=[0.6, 0.38, 0.02])
    right = draw.random(ROWS) < np.array([0.9, 0.6, 0.2])[labels]
    return np.where(right, 0.3, 2.5) + draw.random(ROWS), right, labels


def total(question, run):
    found = np.zeros(question.bins)
    for member in range(MEMBERS):
        losses, right, labels = rows(member)
        coins = Seeded(f"{run}/{member}")
        if question.breakdown:
            counts = by_label(losses, right, labels, 3, range(ROWS), question.loss_bound, coins)
        else:
            counts = metrics_of(losses, right, range(ROWS), question.loss_bound, coins)
        found = found + noised(counts, NOISE, Seeded(f"noise/{run}/{member}")).change.astype(np.float64)
    # As it is published: the mean in float32, times the members.
    return (found / MEMBERS).astype(np.float32).astype(np.float64) * MEMBERS


def truth(place=None):
    parts = [rows(member) for member in range(MEMBERS)]
    losses, right, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    here = slice(None) if place is None else labels == place
    return losses[here].mean(), right[here].mean(), len(losses[here])


def within(found, expected, errors):
    shown = (found.loss, found.accuracy, found.units)
    return [abs(each.value - true) <= errors * each.error for each, true in zip(shown, expected, strict=True)]


# 250 runs at 95 %: a binomial with a standard deviation of 1.4 points, and five of those.
LEAST = 0.95 - 5 * math.sqrt(0.95 * 0.05 / RUNS)


@pytest.mark.parametrize("question", [WHOLE, BY_LABEL], ids=["whole", "by-label"])
def test_the_truth_lies_within_the_stated_error_as_often_as_it_says(question):
    covered, of_labels = [], {0: [], 1: []}
    for run in range(RUNS):
        found = result_of(question, NOISE, total(question, run), MEMBERS)
        covered.append(within(found.whole, truth(), 1.96))
        for place, each in of_labels.items():
            if question.breakdown:
                each.append(within(found.by_label[place].estimate, truth(place), 1.96))
    for each in (covered, *(of_labels.values() if question.breakdown else ())):
        shares = np.mean(each, axis=0)
        assert (shares > LEAST).all(), shares
        # Nor is the error stated far too large: that would hide what was paid for.
        assert (shares < 0.999).all(), shares


def test_a_breakdown_states_a_larger_error_over_all_rows_than_one_mean():
    one = result_of(WHOLE, NOISE, total(WHOLE, 0), MEMBERS).whole
    summed = result_of(BY_LABEL, NOISE, total(BY_LABEL, 0), MEMBERS).whole
    assert summed.accuracy.error == pytest.approx(math.sqrt(3) * one.accuracy.error, rel=0.05)
    assert summed.units.error == pytest.approx(math.sqrt(3) * one.units.error)


def test_a_label_with_too_few_rows_beside_the_noise_is_not_shown():
    found = result_of(BY_LABEL, NOISE, total(BY_LABEL, 0), MEMBERS)
    assert [each.label for each in found.by_label] == list(LABELS)
    assert found.by_label[2].estimate is None
    assert found.by_label[0].estimate is not None
    # Nothing at all is shown of members that measured next to nothing.
    little = result_of(WHOLE, NOISE, [0.0, 0.0, 32.0 * 25], MEMBERS)
    assert little.whole is None


@pytest.mark.parametrize("spoilt", [[0.0, 0.0], [1e9, 0.0, 0.0]])
def test_a_sum_that_no_answers_make_is_refused(spoilt):
    with pytest.raises(ValueError, match="sum"):
        result_of(WHOLE, NOISE, spoilt, MEMBERS)
