"""From guesses about coins to a lower bound on epsilon.

**The game.** Each of m rows is in the data if its own fair coin says so. An attacker sees the release and gives every
row a score. It guesses "in" for those with the highest scores, "out" for those with the lowest, and abstains from the
rest. How many it guesses is fixed before these scores are seen (`shares_of`, from other scores).

**Claim** (`one_run_bound`). If the release is (epsilon, delta)-differentially private for each row, the returned bound
exceeds epsilon with a probability of at most 1 - confidence (Steinke, Nasr, Jagielski 2023, "Privacy auditing with one
(1) training run", Theorem 5.2). *Assumptions:* the coins are fair, independent, and used for nothing else; delta is the
claim's. It assumes nothing of the attack, of the other rows, or of how the scores depend on each other.

Several releases, each with coins of its own, are one release for this theorem: a coin reaches only one of them. So
scores of all of them are ranked together.

**Pairs** (`paired_bound`). Rows that a member did not train on were not chosen by coins. Each is paired with a row that
was trained on, and the attacker says which of the two that is. If both come from one source, the coin is fair. Turning
it replaces a row by another, which is (2 epsilon, (1 + e^epsilon) delta)-private (Dwork and Roth 2014, Theorem 2.2).

Several bounds hold together at confidence c if each holds at 1 - (1 - c) / tests (`each_confidence`, Bonferroni).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Guesses",
    "Shares",
    "area_under_curve",
    "each_confidence",
    "guessed",
    "one_run_bound",
    "paired_bound",
    "shares_of",
    "true_positive_rate",
]

Scores = NDArray[np.float64]
Coins = NDArray[np.bool_]

# A larger epsilon promises nothing, and e^epsilon stays a number.
MAX_EPSILON = 60.0

# Shares of the rows that `shares_of` tries on each side.
_TRIED = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5)


@dataclass(frozen=True)
class Guesses:
    """What an attacker guessed of `rows` rows, and how much of it was right."""

    rows: int
    made: int
    correct: int


@dataclass(frozen=True)
class Shares:
    """The shares of the rows that are guessed to be in and out, fixed before the scores are seen."""

    high: float
    low: float


def each_confidence(confidence: float, tests: int) -> float:
    """The confidence of each of `tests` bounds that hold together at `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / max(1, tests)


def one_run_bound(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon, 0 if the guesses prove nothing.

    Args:
        guesses: Of rows whose coins were fair and independent.
        delta: The claim's.
        confidence: With which the bound holds.

    Source: Steinke, Nasr, Jagielski 2023, Theorem 5.2.
    """
    return _least(lambda epsilon: _chance(guesses, epsilon, delta), confidence)


def paired_bound(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon from guesses which row of each pair was trained on; arguments as above."""
    return _least(lambda epsilon: _chance(guesses, 2 * epsilon, (1 + math.exp(epsilon)) * delta), confidence)


def _least(chance: Callable[[float], float], confidence: float) -> float:
    """The smallest epsilon under which guesses as good as these are not too unlikely."""
    from scipy import optimize

    def excess(epsilon: float) -> float:
        return chance(epsilon) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    if excess(MAX_EPSILON) < 0:
        return MAX_EPSILON
    # The lower end of the bracket, so that a rounded root never lies above the bound.
    return max(0.0, float(optimize.brentq(excess, 0.0, MAX_EPSILON, xtol=1e-9)) - 1e-9)


def _chance(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Bound the probability of at least this many right guesses under (epsilon, delta)-differential privacy."""
    from scipy import stats

    made, correct = guesses.made, guesses.correct
    right = 1 / (1 + math.exp(-epsilon))
    base = float(stats.binom.sf(correct - 1, made, right))
    # P[v > Binomial >= v - i] for i = 1 ... v.
    near = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), made, right))
    slope = float((near / np.arange(1, correct + 1)).max()) if correct else 0.0
    return base + 2 * guesses.rows * delta * slope


def guessed(scores: Scores, present: Coins, shares: Shares) -> Guesses:
    """Guess for one release, and count.

    Args:
        scores: (m,) Higher means "in". Equal scores are ordered by their place, which no coin moves.
        present: (m,) The coins.
        shares: How many to guess, at least one if a share is not 0.

    Raises:
        ValueError: A score is not a number: such an attack did not work.
    """
    if not np.isfinite(scores).all():
        raise ValueError("an attack's score is not a finite number")
    high, low = (min(math.ceil(share * len(scores)), len(scores)) for share in (shares.high, shares.low))
    low = min(low, len(scores) - high)
    order = np.argsort(scores, kind="stable")
    right = int(present[order[len(order) - high :]].sum()) + int((~present[order[:low]]).sum())
    return Guesses(len(scores), high + low, right)


def shares_of(scores: Scores, present: Coins, confidence: float, rows: int) -> Shares:
    """The shares that would prove most of `rows` rows like these, at delta 0. These rows are then judged by nobody.

    Args:
        scores, present: (m,) Of rows set apart.
        confidence: As in `one_run_bound`.
        rows: The number of rows that will be judged.
    """
    from scipy import stats

    tried = [Shares(high, low) for high in _TRIED for low in _TRIED if 0 < high + low <= 1]
    found = [guessed(scores, present, shares) for shares in tried]
    made = np.array([math.ceil(each.high * rows) + math.ceil(each.low * rows) for each in tried])
    rates = np.array([each.correct / each.made for each in found])
    correct = np.floor(made * rates)
    # Clopper and Pearson's bound on the chance of a right guess, which grows with the bound on epsilon. If nothing is
    # proved, the share of right guesses decides, and then their number.
    proved = np.maximum(stats.beta.ppf(1 - confidence, np.maximum(correct, 1), made - correct + 1), 0.5)
    return tried[max(range(len(tried)), key=lambda at: (proved[at], rates[at] + 1e-3 * made[at] / rows))]


def area_under_curve(inside: Scores, outside: Scores) -> float:
    """The probability that a row that is in scores higher than one that is out; equal scores count half."""
    from scipy import stats

    ranks = stats.rankdata(np.concatenate([inside, outside]))
    wins = float(ranks[: len(inside)].sum()) - len(inside) * (len(inside) + 1) / 2
    return wins / (len(inside) * len(outside))


def true_positive_rate(inside: Scores, outside: Scores, false_positive_rate: float) -> float:
    """The share of `inside` found at the lowest threshold that takes at most this share of `outside` for inside.

    It describes an attack; its threshold is chosen on the same scores, so no bound may follow from it.
    """
    allowed = math.floor(false_positive_rate * len(outside))
    threshold = np.sort(outside)[::-1][allowed] if allowed < len(outside) else -np.inf
    return float((inside > threshold).mean())
