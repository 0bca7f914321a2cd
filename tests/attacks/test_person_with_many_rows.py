"""A person with fifty rows: DP-SGD by row goes above its claim for the person, and by person stays under it.

The attacker knows all rows except whether one person's are there, and sees what a member's own code releases of a round
in which everybody is drawn. It projects the release on the person's own gradient. Rows are clipped one by one, so fifty
that agree move the sum by fifty clips; the claim of one row hides one. By person they move it by one clip.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from learning.auditing.statistics import MAX_EPSILON, Guesses, guessed, one_run_bound, shares_of
from learning.auditing.subject import claim_of
from secure_agg.randomness import SystemRandom
from tests.support.audited_jobs import LABELS, NOISED, WORDS, rows_of, subject_of

# With 20 runs to judge, a person that is always found proves an epsilon of 1.8, above every claim here.
DELTA, CONFIDENCE, ROWS, OTHERS, RUNS = 1e-5, 0.95, 50, 12, 40
PERSON = {"unit": "person", "person": {"max_examples": ROWS, "combine": "sum"}}
# By person with at most five of its rows, averaged: the default of a job.
FEW = {"unit": "person", "person": {"max_examples": 5}}


def released(kind: str, **unit):
    """Scores of releases, whether the person was there in each, and the claim of one release."""
    subject = subject_of(kind, NOISED | unit)
    others = [replace(each, person=f"other {at}") for at, each in enumerate(rows_of(OTHERS))]
    canary = [replace(rows_of(1, seed=9)[0], text=" ".join(WORDS[:6]), label=LABELS[1], person="canary")] * ROWS
    direction = subject.gradients(subject.corpus(canary[:1])).of([0]).astype(np.float64)
    coins = np.random.default_rng(3).random(RUNS) < 0.5
    scores = np.array(
        [
            -float(subject.release([*others, *(canary if there else [])], SystemRandom(), seed=at) @ direction)
            for at, there in enumerate(coins)
        ]
    )
    event = subject.protection(OTHERS + 1).event
    assert event is not None
    claim = claim_of(subject.job, [event], DELTA)
    assert claim is not None
    return scores, coins, claim


def proved(scores, coins) -> float:
    """A lower bound on epsilon. The shares to guess are chosen on half of the runs, and judged on the other half."""
    half = len(scores) // 2
    shares = shares_of(scores[:half], coins[:half], CONFIDENCE, len(scores) - half)
    found: Guesses = guessed(scores[half:], coins[half:], shares)
    return one_run_bound(found, DELTA, CONFIDENCE)


@pytest.mark.parametrize("kind", ["head", "prompt"])
def test_rows_that_are_clipped_one_by_one_reveal_their_person(kind):
    scores, coins, claim = released(kind)
    bound = proved(scores, coins)
    assert claim < 1.2
    assert claim < bound < MAX_EPSILON
    # Fifty rows at the same multiplier are a shift of fifty clips: the two sides do not even meet.
    assert scores[coins].min() > scores[~coins].max()


# A prompt's five rows pass the same code as its fifty, and as a head's five.
SWEEP = pytest.param("prompt", FEW, id="prompt-five rows, averaged", marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        pytest.param("head", PERSON, id="head-all rows, summed"),
        pytest.param("prompt", PERSON, id="prompt-all rows, summed"),
        pytest.param("head", FEW, id="head-five rows, averaged"),
        SWEEP,
    ],
)
def test_the_same_person_stays_under_the_claim_of_one_person(kind, unit):
    scores, coins, claim = released(kind, **unit)
    assert proved(scores, coins) < claim < 1.2
    # The attack works on what it can see: the two sides lie apart by no more than the clip moves them, in noise.
    apart = (scores[coins].mean() - scores[~coins].mean()) / scores[~coins].std()
    assert abs(apart) < math.sqrt(NOISED["steps"]) / NOISED["noise_multiplier"] + 6 / math.sqrt(RUNS / 2)
