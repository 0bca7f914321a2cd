"""Measures how often estimates from noised metrics lie within their stated error.

coverage: the share of shown estimates whose error is at most 1.96 standard errors, with the bounds of Clopper and
    Pearson 1934 at 95 %. A version's losses and answers are drawn; accuracy rises over the rounds.
stopping: the accuracy of the version that the rule chose, beside that of the version at which the job stopped and the
    best in hindsight, on rows that no member has.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks.library.record import Figure, open_results, parser
from benchmarks.metrics.federation import MEASURED, ROWS, Member, measure, members_of, noise_for
from coordinator.domain.validation import Estimate, Measured, StoppingRule, judge

__all__ = ["coverage", "main", "stopping"]

BENCH = "metrics"
# 2: the accuracy at the stop.
REVISION = 2
MEMBERS, EPSILONS = (3, 10, 100), (0.1, 0.5, 1.0)
ROUNDS = 200
RULE = StoppingRule(patience=3, min_improvement=0.02)
# Rounds of a job; each `EVERY`th version is measured.
EVERY = 3
_CLASSES, _WIDTH = 4, 20
_NORMAL = 1.96

Floats = NDArray[np.float64]


def coverage(members: int, epsilon: float, rounds: int) -> list[Figure]:
    """Measure `rounds` versions, in jobs of `MEASURED`."""
    noise, cohort = noise_for(epsilon), members_of(members, 0)
    random = np.random.default_rng([members, int(1000 * epsilon)])
    within: dict[str, list[bool]] = {"accuracy": [], "loss": []}
    errors: dict[str, list[float]] = {"accuracy": [], "loss": []}
    for number in range(rounds):
        level = 0.5 + 0.4 * (number % MEASURED) / MEASURED
        correct = [random.random(ROWS) < level for _ in cohort]
        losses = [random.exponential(np.where(right, 0.2, 2.0)) for right in correct]
        found, truth = measure(cohort, losses, correct, noise, f"coverage/{members}/{epsilon}/{number}")
        if found is None:
            continue
        for name, each in within.items():
            stated: Measured = getattr(found, name)
            errors[name].append(stated.error)
            each.append(abs(stated.value - getattr(truth, name)) <= _NORMAL * stated.error)
    beside = {"shown": len(within["accuracy"]), "rounds": rounds, "noise_multiplier": noise.multiplier}
    if not beside["shown"]:
        return [Figure("shown", 0.0, more=beside)]
    figures = {"accuracy": "coverage", "loss": "coverage_loss"}
    return [
        Figure(
            figures[name],
            round(float(np.mean(each)), 4),
            more=beside | {"standard_error": round(float(np.mean(errors[name])), 4), **_bounds(each)},
        )
        for name, each in within.items()
    ]


def _bounds(each: list[bool]) -> dict[str, float]:
    count, of = sum(each), len(each)
    low = 0.0 if not count else float(stats.beta.ppf(0.025, count, of - count + 1))
    high = 1.0 if count == of else float(stats.beta.ppf(0.975, count + 1, of - count))
    return {"low": round(low, 4), "high": round(high, 4)}


def stopping(members: int, epsilon: float) -> list[Figure]:
    """Train a job of `EVERY * MEASURED` rounds, and apply the rule after each measurement."""
    noise, cohort = noise_for(epsilon), members_of(members, 1)
    random = np.random.default_rng([members, 1])
    centres = 0.55 * random.standard_normal((_CLASSES, _WIDTH))

    def drawn(count: int) -> tuple[Floats, NDArray[np.int64]]:
        labels = random.integers(_CLASSES, size=count)
        return centres[labels] + random.standard_normal((count, _WIDTH)), labels

    data, (test, answers) = [drawn(ROWS) for _ in cohort], drawn(20_000)
    weights = np.zeros((_WIDTH, _CLASSES))
    truths: list[float] = []
    found: list[Estimate | None] = []
    for number in range(EVERY * MEASURED):
        if number % EVERY == 0:
            judged = [_judged(weights, *each) for each in data]
            seed = f"stopping/{members}/{epsilon}/{number}"
            measured, _ = measure(cohort, [one for one, _ in judged], [right for _, right in judged], noise, seed)
            found.append(measured)
            truths.append(float(_judged(weights, test, answers)[1].mean()))
        steps = [_step(weights, *each, member, random) for each, member in zip(data, cohort, strict=True)]
        weights = weights + np.mean(steps, axis=0)
    best_of_all = max(truths)
    for end in range(1, len(found) + 1):
        verdict = judge([None if each is None else each.accuracy for each in found[:end]], RULE)
        if verdict.stop:
            break
    if verdict.best is None:
        return [Figure("shown", 0.0, more={"best_in_hindsight": round(best_of_all, 4)})]
    chosen = found[verdict.best]
    assert chosen is not None  # noqa: S101  for the type checker: the best was shown
    beside = {
        "accuracy_at_stop": round(truths[end - 1], 4),
        "best_in_hindsight": round(best_of_all, 4),
        "estimate": round(chosen.accuracy.value, 4),
        "standard_error": round(chosen.accuracy.error, 4),
        "stopped_at": EVERY * (end - 1),
        "rounds": EVERY * MEASURED,
        "stopped": verdict.stop,
    }
    return [Figure("accuracy_of_best", truths[verdict.best], more=beside)]


def _judged(weights: Floats, rows: Floats, labels: NDArray[np.int64]) -> tuple[Floats, NDArray[np.bool_]]:
    scores = rows @ weights
    scores -= scores.max(axis=1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return -logs[np.arange(len(labels)), labels], scores.argmax(axis=1) == labels


def _step(
    weights: Floats, rows: Floats, labels: NDArray[np.int64], member: Member, random: np.random.Generator
) -> Floats:
    """One noised gradient step on the rows that the member trains on."""
    rows, labels = rows[member.trains], labels[member.trains]
    scores = rows @ weights
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    likely[np.arange(len(labels)), labels] -= 1
    step: Floats = -0.1 * (rows.T @ likely) / len(labels) + 0.02 * random.standard_normal(weights.shape)
    return step


def main() -> None:
    """Command line."""
    chosen = parser("metrics.coverage").parse_args()
    results = open_results(BENCH, quick=chosen.quick, revision=REVISION)
    sizes, rounds = ((3, 10), 40) if chosen.quick else (MEMBERS, ROUNDS)
    for members in sizes:
        for epsilon in EPSILONS:
            for part, run in (
                ("coverage", partial(coverage, members, epsilon, rounds)),
                ("stopping", partial(stopping, members, epsilon)),
            ):
                case = {"part": part, "members": members, "epsilon": epsilon}
                if not results.done(case):
                    results.open([0])
                    results.add(case, run())


if __name__ == "__main__":
    main()
