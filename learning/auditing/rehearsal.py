"""Rehearsals: this machine's own software trains one round again, over rows that are in by coins, and is attacked.

Nothing leaves, so no ledger is charged. A rehearsal differs from a round in three things: canaries are added, some of
the member's rows are left out by coins, and some are never in (the population of RMIA). Each leaves a row that counts
and contributes nothing, so N is the number of all rows and the round's event is that of N.

**The attacker** sees one member's update before it is masked, knows all texts, the version, the private parameters and
everything else but the coins and the noise. Secure aggregation shows the coordinator only sums, so it sees less; the
claim of a mechanism on the member's machine is about this attacker, whom only noise and clipping stop.

**Attacks.** Each gets every rehearsal's update, and scores each of its rows.

- `canaries`: how much of a canary's gradient (at the version) is in the update. The update is fitted by the gradients
  of all rows (ridge regression), so that they do not hide each other, and each canary's mean over all rehearsals is
  subtracted. With more than `MAX_EXACT` values, the gradients' inner products are taken after a count sketch (Charikar,
  Chen, Farach-Colton 2002); the update's own products stay exact.
- `loss`: of the member's own rows, under the version plus the update, beside the version's.
- `rmia`: the same with the other rehearsals as reference models, and own rows that are never in as the population.

The first rehearsals decide how many rows each attack guesses, and the ridge. They are not judged
(`statistics.shares_of`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learning.auditing.canaries import absent, coins_of, with_coins
from learning.auditing.membership import rmia_scores, threshold_scores
from learning.auditing.statistics import Guesses, area_under_curve, guessed, shares_of
from learning.auditing.subject import Subject
from learning.models.division import EMBEDDING
from learning.text.examples import Example
from secure_agg import RandomSource
from tacit.manifest import Manifest

__all__ = ["MIN_ROWS", "Attacked", "Cast", "Rehearsed", "cast_of", "rehearse", "runs_within"]

Vector = NDArray[np.float32]
Scores = NDArray[np.float64]
Coins = NDArray[np.bool_]

# Own rows with fewer of which an attack on them proves nothing.
MIN_ROWS = 20
MAX_ROWS = 200
# Values of an update up to which inner products of gradients are exact; a sketch has as many buckets.
MAX_EXACT = 1 << 15
# Ridges that the first rehearsals choose from, beside gradients of length 1: the more noise, the larger.
_RIDGES = (1e-6, 1e-4, 1e-2, 1.0)
# Columns of the sketches that are held in float64 at a time.
_COLUMNS = 1 << 12
# Own rows that are fitted besides the canaries.
_MAX_FITTED = 200


@dataclass(frozen=True)
class Cast:
    """The rows of all rehearsals.

    Attributes:
        canaries: In by coins.
        rows: Own rows, in by coins; empty if there are too few.
        population: Own rows that are never in.
        others: Own rows that are always in.
    """

    canaries: Sequence[Example]
    rows: Sequence[Example]
    population: Sequence[Example]
    others: Sequence[Example]

    @property
    def size(self) -> int:
        """N of a rehearsal."""
        return len(self.canaries) + len(self.rows) + len(self.population) + len(self.others)


@dataclass(frozen=True)
class Attacked:
    """What one attack did over all judged rehearsals.

    Attributes:
        guesses: The guesses that the bound follows from.
        inside, outside: Scores of rows that were in and out, to describe the attack with.
    """

    attack: str
    guesses: Guesses
    inside: Scores
    outside: Scores


@dataclass(frozen=True)
class Rehearsed:
    """The result of all rehearsals.

    Attributes:
        attacked: One for each attack that applies.
        missing: Attacks that do not, with the reason.
        update: The last rehearsal's update, (d,).
        trained: The rows that it was trained on.
        runs, pilots: Rehearsals judged, and set apart before.
    """

    attacked: tuple[Attacked, ...]
    missing: dict[str, str]
    update: Vector
    trained: Sequence[Example]
    runs: int
    pilots: int


def cast_of(canaries: Sequence[Example], own: Sequence[Example], random: RandomSource) -> Cast:
    """Draw which own rows are in by coins, never, and always: a quarter, an eighth, and the rest, up to `MAX_ROWS`."""
    order = np.argsort(np.frombuffer(random.bytes(8 * len(own)), dtype="<u8"), kind="stable").tolist()
    asked = min(MAX_ROWS, len(own) // 4)
    if asked < MIN_ROWS:
        return Cast(canaries, [], [], list(own))
    never = max(1, asked // 2)
    parts = order[:asked], order[asked : asked + never], order[asked + never :]
    rows, population, others = ([own[at] for at in part] for part in parts)
    return Cast(canaries, rows, population, others)


def rehearse(
    subject: Subject,
    cast: Cast,
    runs: Callable[[float], int],
    random: RandomSource,
    *,
    confidence: float,
    tell: Callable[[int, int], None] = lambda _done, _all: None,
    clock: Callable[[], float],
) -> Rehearsed:
    """Train rehearsals and attack them.

    Args:
        subject: What is attacked.
        cast: The rows.
        runs: Gets the seconds of the first rehearsal and says how many to make, 2 or more. It sees no score.
        random: Source of coins, draws and noise.
        confidence: With which each attack's bound is to hold.
        tell: Called with the rehearsals made, and how many there will be.
        clock: The time in seconds.

    Raises:
        ValueError: An attack's score is not a number.
        As `train_update`.
    """
    releases: list[Vector] = []
    coins: list[tuple[Coins, Coins]] = []
    began, count, trained = clock(), 2, list(cast.others)
    while len(releases) < count:
        there, kept = (coins_of(len(part), random) for part in (cast.canaries, cast.rows))
        canaries, rows = with_coins(cast.canaries, there), with_coins(cast.rows, kept)
        trained = [*cast.others, *rows, *canaries]
        seed = int.from_bytes(random.bytes(7), "big")
        releases.append(subject.release([*trained, *map(absent, cast.population)], random, seed))
        coins.append((there, kept))
        if len(releases) == 1:
            count = max(2, runs(clock() - began))
        tell(len(releases), count)
    pilots = max(1, count // 4)
    updates = np.stack(releases)
    there, kept = (np.stack(part) for part in zip(*coins, strict=True))
    scores: dict[str, tuple[Sequence[Scores], Coins]] = {}
    missing: dict[str, str] = {}
    if len(cast.canaries):
        scores["canaries"] = _canary_scores(subject, cast, updates), there
    usable = subject.corpus(cast.rows).read().usable if cast.rows else np.empty(0, dtype=np.int64)
    if len(usable):
        by_loss, by_ratio = _row_scores(subject, cast, updates)
        scores |= {"loss": ([by_loss], kept[:, usable]), "rmia": ([by_ratio], kept[:, usable])}
    else:
        missing = dict.fromkeys(
            ("loss", "rmia"), f"needs {4 * MIN_ROWS} own rows with labels of the job, because it leaves some out"
        )
    attacked = [_judged(attack, *each, pilots, confidence) for attack, each in scores.items()]
    last = [each for each in trained if each.label is not None]
    return Rehearsed(tuple(attacked), missing, updates[-1], last, count - pilots, pilots)


def _judged(attack: str, ways: Sequence[Scores], coins: Coins, pilots: int, confidence: float) -> Attacked:
    """Choose among ways to score by the pilots, and guess in the others."""
    apart, there = coins[:pilots].ravel(), coins[pilots:].ravel()
    scores = max(ways, key=lambda each: _separated(each[:pilots].ravel(), apart))
    shares = shares_of(scores[:pilots].ravel(), apart, confidence, len(there))
    judged = scores[pilots:].ravel()
    return Attacked(attack, guessed(judged, there, shares), judged[there], judged[~there])


def _separated(scores: Scores, present: Coins) -> float:
    """How well the scores tell rows apart; 0 if all coins fell alike."""
    return area_under_curve(scores[present], scores[~present]) if 0 < present.sum() < len(present) else 0.0


def _row_scores(subject: Subject, cast: Cast, updates: Vector) -> tuple[Scores, Scores]:
    """Scores (runs, U) of the own rows: by the loss alone, and by RMIA."""
    rows, population = subject.corpus(cast.rows), subject.corpus(cast.population)
    before = subject.losses(subject.values, rows)
    losses, others = (
        np.stack([subject.losses(subject.values + update, part) for update in updates]) for part in (rows, population)
    )
    by_loss = threshold_scores(losses, before)
    if not others.shape[1]:
        return by_loss, by_loss
    apart = [np.delete(np.arange(len(updates)), at) for at in range(len(updates))]
    by_ratio = [rmia_scores(losses[at], others[at], losses[rest], others[rest]) for at, rest in enumerate(apart)]
    return by_loss, np.stack(by_ratio)


def _canary_scores(subject: Subject, cast: Cast, updates: Vector) -> list[Scores]:
    """Scores (runs, m) of each way to fit an update: by all values or the embedding's alone, and by each ridge."""
    parts = [subject.gradients(subject.corpus(part)) for part in (cast.canaries, cast.rows, cast.others) if part]
    fitted = [(part, at) for part in parts for at in range(len(part))][: len(parts[0]) + _MAX_FITTED]
    fits = [_Fit(updates, len(fitted))]
    if (embedding := _embedding(subject.manifest)) is not None:
        fits.append(_Fit(updates[:, embedding], len(fitted), embedding))
    for place, (part, at) in enumerate(fitted):
        gradient = part.of([at])
        for fit in fits:
            fit.add(place, gradient)
    return [scores for fit in fits for scores in fit.scores(len(cast.canaries))]


def _embedding(manifest: Manifest) -> slice | None:
    """The embedding's place among the shared values; None if it is not shared."""
    at = 0
    for tensor in manifest.tensors:
        size = int(np.prod(tensor.shape))
        if tensor.name == EMBEDDING:
            return slice(at, at + size)
        at += size
    return None


class _Fit:
    """Updates as combinations of the rows' gradients, over all values or a part of them."""

    def __init__(self, updates: Vector, rows: int, part: slice = slice(None)) -> None:
        self._updates, self._part = updates, part
        self._sketch = _Sketch(updates.shape[1])
        self._seen = np.empty((rows, self._sketch.width), dtype=np.float32)
        self._inner = np.empty((rows, len(updates)))

    def add(self, place: int, gradient: Vector) -> None:
        """Takes the gradient of one row, (d,)."""
        # Long gradients would outweigh the others, though each is clipped.
        here = gradient[self._part] / max(float(np.linalg.norm(gradient[self._part])), 1e-12)
        self._seen[place] = self._sketch.of(here)
        # A step goes against the gradient.
        self._inner[place] = -(self._updates @ here)

    def scores(self, canaries: int) -> Iterator[Scores]:
        """Scores (runs, canaries) for each ridge: the coefficients of the first rows, less their means."""
        gram = np.zeros((len(self._seen), len(self._seen)))
        for first in range(0, self._sketch.width, _COLUMNS):
            block = self._seen[:, first : first + _COLUMNS].astype(np.float64)
            gram += block @ block.T
        for ridge in _RIDGES:
            found = np.linalg.solve(gram + ridge * np.eye(len(gram)), self._inner)[:canaries].T
            yield np.ascontiguousarray(found - found.mean(axis=0))


class _Sketch:
    """A count sketch of vectors of d values, or the vectors themselves if they are short."""

    def __init__(self, values: int) -> None:
        self.width = min(values, MAX_EXACT)
        self._exact = values <= MAX_EXACT
        if not self._exact:
            draws = np.random.Generator(np.random.Philox(0))
            self._buckets = draws.integers(0, self.width, values, dtype=np.int32)
            self._signs = (draws.integers(0, 2, values, dtype=np.int8) * 2 - 1).astype(np.float32)

    def of(self, vector: Vector) -> Vector:
        """The sketch, (width,)."""
        if self._exact:
            return vector
        return np.bincount(self._buckets, weights=self._signs * vector, minlength=self.width).astype(np.float32)


def runs_within(seconds: float, at_most: int) -> Callable[[float], int]:
    """The number of rehearsals that fit into this many seconds, from the time of the first; 2 to `at_most`."""
    return lambda first: max(2, min(at_most, math.floor(seconds / max(first, 1e-3))))
