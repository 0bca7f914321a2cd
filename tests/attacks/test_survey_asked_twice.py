"""A coordinator asks again, or opens two attempts of one answer, and subtracts the sums.

Its first attempt fails after the sum was opened, or in a phase that it says failed, and the second has one member less.
The difference of the two sums is that member's answer, with whatever noise does not cancel.

- If members drew new noise for each attempt and charged it once, averages over attempts would take the noise away.
- If a member held its answer and the ledger counted the noise of all honest members, it would count too little.
- Tacit holds one answer for each question and charges by the member's own noise. Asking anew is charged anew.
"""

import functools
import math

import numpy as np
import pytest

from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.survey.answer import event_of_answer, noised
from learning.survey.counts import counts_of
from learning.text.examples import Example
from tacit.mechanism import OwnDiscreteGaussian
from tacit.survey import LabelHistogram, Survey
from tests.support.random_sources import Seeded

QUESTION = Survey(histograms=(LabelHistogram(labels=("ill", "well")),))
NOISE = OwnDiscreteGaussian(std=6.0)
MEMBERS, RUNS, ATTEMPTS = 5, 400, 100
LIMIT = Limit(8.0, 1e-6)


def rows(member, there):
    """Twenty healthy rows; member 0 also has one of label `ill`, or not."""
    found = [Example(f"text {number}", "well") for number in range(20)]
    return [*found, Example("one more", "ill")] if member == 0 and there else found


@functools.cache
def counted(member, there):
    """What a member counts once for a question. Noise is what it could draw anew."""
    return counts_of(QUESTION, rows(member, there), None, "example")


def answer(run, member, there, draw=0):
    return noised(counted(member, there), NOISE, Seeded(f"{run}/{member}/{draw}/{there}")).change.astype(np.float64)


def isolated(run, there, *, holds):
    """What the coordinator makes of many pairs of attempts, the second of each pair without member 0: the average of
    their differences. `holds` is whether members send the answer that they hold, or draw new noise for each attempt.
    """
    if holds:
        answers = [answer(run, member, there) for member in range(MEMBERS)]
        # Every pair is the same, so an average gains nothing.
        return sum(answers) - sum(answers[1:])
    found = []
    for pair in range(0, ATTEMPTS, 2):
        first = sum(answer(run, member, there, draw=pair) for member in range(MEMBERS))
        second = sum(answer(run, member, there, draw=pair + 1) for member in range(1, MEMBERS))
        found.append(first - second)
    return np.mean(found, axis=0)


def told_apart(runs, *, holds):
    """Share of the runs in which the coordinator rightly says whether member 0 has a row of label `ill`."""
    right = 0
    for run in range(runs):
        for there in (False, True):
            right += (isolated(run, there, holds=holds)[0] > 0.5) == there
    return right / (2 * runs)


def test_new_noise_for_each_attempt_would_wear_off_and_held_noise_does_not():
    worn_spread = np.std([isolated(run, False, holds=False)[0] for run in range(20)])
    held_spread = np.std([isolated(run, False, holds=True)[0] for run in range(RUNS)])
    # An average over 50 pairs has 50 times the information, in which the other members' noise is part of the price.
    assert worn_spread < 0.6 * NOISE.std
    assert held_spread == pytest.approx(NOISE.std, rel=0.12)


def test_what_the_difference_shows_is_what_was_charged():
    without = np.array([isolated(run, False, holds=True) for run in range(RUNS)])
    having = np.array([isolated(run, True, holds=True) for run in range(RUNS)])
    # The standardised distance of the best test between the two, which is 1 / multiplier for Gaussian noise.
    shown = (having[:, 0].mean() - without[:, 0].mean()) / without[:, 0].std()
    event = event_of_answer(QUESTION, NOISE, "add-remove")
    assert shown == pytest.approx(1 / event.multiplier, abs=5 * math.sqrt(2 / RUNS))
    assert told_apart(100, holds=True) == pytest.approx(0.5 + 0.5 * math.erf(0.5 / NOISE.std / math.sqrt(2)), abs=0.12)
    # The charge by the noise of all honest members, of which nothing is left in the difference, would be too small.
    together = event.model_copy(update={"multiplier": event.multiplier * math.sqrt(MEMBERS - 1)})
    assert epsilon_counted([together], LIMIT) < 0.6 * epsilon_counted([event], LIMIT)


def test_asking_the_same_question_in_another_job_is_charged_again():
    one = event_of_answer(QUESTION, NOISE, "add-remove")
    # Two answers with noise of their own: their mean has less noise, as one answer of multiplier sqrt(2) less would.
    means = [(answer(run, 0, False, 1)[0] + answer(run, 0, False, 2)[0]) / 2 for run in range(RUNS)]
    assert np.std(means) == pytest.approx(NOISE.std / math.sqrt(2), rel=0.12)
    better = one.model_copy(update={"multiplier": one.multiplier / math.sqrt(2)})
    assert epsilon_counted([one, one], LIMIT) >= epsilon_counted([better], LIMIT) * (1 - 1e-9)
