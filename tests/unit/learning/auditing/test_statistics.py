"""The bounds against golden values, and against mechanisms whose epsilon is known."""

import math

import numpy as np
import pytest

from learning.auditing.statistics import (
    MAX_EPSILON,
    Guesses,
    Shares,
    area_under_curve,
    each_confidence,
    guessed,
    one_run_bound,
    paired_bound,
    shares_of,
    true_positive_rate,
)


def pure(made: int, confidence: float) -> float:
    """The bound of guesses that are all right at delta 0, in closed form: (e^x / (1 + e^x))^made = 1 - confidence."""
    chance = (1 - confidence) ** (1 / made)
    return math.log(chance / (1 - chance))


@pytest.mark.parametrize("made", [10, 100, 1000])
def test_guesses_that_are_all_right_prove_what_the_closed_form_says(made: int) -> None:
    assert one_run_bound(Guesses(made, made, made), 0.0, 0.95) == pytest.approx(pure(made, 0.95), abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "made", "correct", "delta", "expected"),
    [
        # At delta 0 it is the logit of Clopper and Pearson's bound for 95 of 100, which is 0.8977.
        (1000, 100, 95, 0.0, 2.1724),
        (1000, 100, 95, 1e-5, 2.1652),
        (1000, 100, 50, 1e-5, 0.0),
        (10_000, 1000, 600, 1e-5, 0.2950),
    ],
)
def test_the_bound_is_that_of_the_theorem(rows: int, made: int, correct: int, delta: float, expected: float) -> None:
    found = one_run_bound(Guesses(rows, made, correct), delta, 0.95)
    assert found == pytest.approx(expected, abs=1e-4)
    # At the bound, the probability of as many right guesses is what the confidence leaves.
    if expected:
        assert authors(rows, made, correct, found, delta) == pytest.approx(0.05, rel=1e-4)


def authors(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """The p-value as the paper's appendix has it."""
    from scipy import stats

    q = 1 / (1 + math.exp(-eps))
    beta, alpha, total = float(stats.binom.sf(v - 1, r, q)), 0.0, 0.0
    for i in range(1, v + 1):
        total += float(stats.binom.pmf(v - i, r, q))
        alpha = max(alpha, total / i)
    return min(1.0, beta + alpha * delta * 2 * m)


def test_fewer_right_guesses_and_a_larger_delta_prove_less() -> None:
    bounds = [one_run_bound(Guesses(500, 100, right), 1e-6, 0.95) for right in range(50, 101)]
    assert bounds == sorted(bounds)
    by_delta = [one_run_bound(Guesses(500, 100, 99), delta, 0.95) for delta in (0.0, 1e-6, 1e-4, 1e-2)]
    assert by_delta == sorted(by_delta, reverse=True)
    assert by_delta[-1] == 0.0


def randomised_response(epsilon: float, coins: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Each coin, told truly with probability e^epsilon / (1 + e^epsilon), for which the bound is tight."""
    truth = random.random(coins.shape) < 1 / (1 + math.exp(-epsilon))
    # A fair tie-break, so that the order of equal answers says nothing.
    return np.where(truth, coins, ~coins) + 0.1 * random.random(coins.shape)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_the_bound_holds_at_its_confidence_and_is_not_trivial(epsilon: float) -> None:
    random, above, bounds = np.random.Generator(np.random.Philox(1)), 0, []
    trials = 200
    for _ in range(trials):
        coins = random.random(1000) < 0.5
        scores = randomised_response(epsilon, coins, random)
        bounds.append(one_run_bound(guessed(scores, coins, Shares(0.25, 0.25)), 0.0, 0.9))
        above += bounds[-1] > epsilon
    # 10 % of 200, and three standard deviations.
    assert above <= 20 + 3 * 4.3
    # It is no bound that always says nothing.
    assert float(np.median(bounds)) >= 0.6 * epsilon


def test_choosing_the_number_of_guesses_on_the_judged_scores_would_break_the_bound() -> None:
    """Why `shares_of` gets other scores: the best of many numbers of guesses is above epsilon far too often."""
    random, chosen, apart = np.random.Generator(np.random.Philox(2)), 0, 0
    trials, epsilon, delta, confidence = 150, 0.5, 0.0, 0.9
    for _ in range(trials):
        coins = random.random((2, 200)) < 0.5
        scores = randomised_response(epsilon, coins, random)
        shares = shares_of(scores[0], coins[0], confidence, 200)
        apart += one_run_bound(guessed(scores[1], coins[1], shares), delta, confidence) > epsilon
        best = shares_of(scores[1], coins[1], confidence, 200)
        chosen += one_run_bound(guessed(scores[1], coins[1], best), delta, confidence) > epsilon
    assert apart <= 15 + 3 * 3.7
    assert chosen > 15 + 3 * 3.7


def test_a_gaussian_without_its_noise_is_far_above_its_claim() -> None:
    random = np.random.Generator(np.random.Philox(3))
    coins = random.random(400) < 0.5
    noised, bare = coins + 4.0 * random.standard_normal(400), coins + 1e-9 * random.standard_normal(400)
    found = []
    for scores in (noised, bare):
        shares = shares_of(scores[:100], coins[:100], 0.95, 300)
        found.append(one_run_bound(guessed(scores[100:], coins[100:], shares), 1e-6, 0.95))
    # Noise of four times the distance: epsilon is about 1 at delta 1e-6.
    assert found[0] < 1.2
    assert found[1] > 3.0


def test_pairs_prove_half_of_what_coins_prove() -> None:
    guesses = Guesses(200, 200, 190)
    assert paired_bound(guesses, 0.0, 0.95) == pytest.approx(one_run_bound(guesses, 0.0, 0.95) / 2, abs=1e-6)
    assert paired_bound(guesses, 1e-6, 0.95) < one_run_bound(guesses, 1e-6, 0.95) / 2


def test_guesses_are_the_highest_and_the_lowest() -> None:
    scores, present = np.array([0.1, 0.9, 0.5, 0.7]), np.array([False, True, True, False])
    assert guessed(scores, present, Shares(0.25, 0.25)) == Guesses(4, 2, 2)
    assert guessed(scores, present, Shares(0.5, 0.5)) == Guesses(4, 4, 2)
    # Both shares together never exceed the rows.
    assert guessed(scores, present, Shares(0.9, 0.9)).made == 4
    with pytest.raises(ValueError, match="finite"):
        guessed(np.array([1.0, math.nan]), np.array([True, False]), Shares(0.5, 0.5))


def test_extremes() -> None:
    assert one_run_bound(Guesses(0, 0, 0), 1e-6, 0.95) == 0.0
    assert one_run_bound(Guesses(10, 10, 0), 1e-6, 0.95) == 0.0
    assert one_run_bound(Guesses(10**5, 10**5, 10**5), 0.0, 0.95) < 11 < MAX_EPSILON
    assert each_confidence(0.95, 5) == pytest.approx(0.99)


def test_descriptions_of_an_attack() -> None:
    inside, outside = np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.0, 0.0])
    assert area_under_curve(inside, outside) == pytest.approx((3 + 2.5 + 2) / 9)
    assert true_positive_rate(inside, outside, 0.0) == pytest.approx(1 / 3)
    assert true_positive_rate(inside, outside, 0.34) == 1.0
