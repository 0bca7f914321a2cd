"""Measures what `job try --suggest` proposes to a head, beside the best of the search.

The cells are those of the frontier's search. A cell's rows are those of its search: recipes train on the rows that are
held in, and are scored on validation rows. Test rows are not read. The rule is told what an operator knows without
data: the labels, the number of members, the rows of the smallest one, and epsilon. Beside it is the best of all trials
of the search on the same features, members and epsilon, in long or short steps, with lots or without.

The search's best is the largest of several trials with one seed, so it is partly luck. So `--seed` measures both with
other seeds, too: a recipe that was chosen for its luck has none there.

The cells of HELD_OUT had no part in the choice of the rule's constants. A run searches them first.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frontier.accuracy import REVISION, SEARCH, SEEDS, Bench, Cell, cells_of
from benchmarks.frontier.setup import DATASETS, KeptFeatures, read_data
from benchmarks.frontier.training import DELTA, Recipe
from benchmarks.library.record import RESULTS, Figure, open_results, parser, read_lines
from learning.training.device import pick_device
from simulation.suggestion import Situation, suggest
from tacit.job import JobSpec
from tacit.mechanism import DpSgd
from tacit.model import PromptedModel
from tacit.prompt import Head, NoInjection

__all__ = ["BENCH", "HELD_OUT", "best_trials", "main", "recipe_by_rule"]

BENCH = "frontier_suggested"

HELD_OUT = tuple(cells_of(["20newsgroups"], [3, 10], [1.0, 4.0], ["head-layers", "head-layers, short steps"]))

Line = Mapping[str, Any]


def best_trials(searched: Sequence[Line]) -> dict[Cell, Line]:
    """Return the best trial of each private head by row among several members. The cell has full lots and long steps.

    Args:
        searched: lines of the search; those of other revisions do not count.
    """
    best: dict[Cell, Line] = {}
    for line in searched:
        case = line.get("case", {})
        method = str(case.get("method", "")).removesuffix(", short steps")
        if line.get("revision") != REVISION or method not in ("head", "head-layers"):
            continue
        if case["epsilon"] == "none" or case["members"] < 2 or "unit" in case:
            continue
        cell = Cell(case["dataset"], case["members"], case["epsilon"], method)
        if cell not in best or line["value"] > best[cell]["value"]:
            best[cell] = line
    return best


def recipe_by_rule(labels: int, examples: int, members: int, epsilon: float) -> Recipe:
    """Return the recipe that the rule proposes to a head.

    Args:
        labels: how many the job has.
        examples: rows of the smallest member.
    """
    head = PromptedModel(base="unread", injection=NoInjection(), task=Head())
    spec = JobSpec(name="frontier", labels=tuple(f"label {number}" for number in range(labels)), model=head)
    job = suggest(spec, Situation(examples, members, epsilon, delta=DELTA)).job
    mechanism, training = job.mechanism, job.training
    if not isinstance(mechanism, DpSgd):
        raise TypeError("a head with noise trains by dp-sgd")
    return Recipe(
        "labels", training.optimiser, training.learning_rate, mechanism.steps, job.rounds.count, mechanism.clip
    )


def measure(bench: Bench, cell: Cell, best: Line, seed: int) -> None:
    """Measure a cell's suggestion, and the search's best recipe, with a seed, unless both are measured."""
    data = read_data(cell.dataset)
    examples = len(data.held_in) // cell.members
    assert cell.epsilon is not None  # noqa: S101  a private cell
    by_rule = recipe_by_rule(len(data.labels), examples, cell.members, cell.epsilon)
    told = {"labels": len(data.labels), "examples": examples}
    _measure(bench, cell, "rule", by_rule, seed, told)
    case = best["case"]
    searched = Cell(cell.dataset, cell.members, cell.epsilon, case["method"], mechanism=case["mechanism"])
    known = best["value"] if seed == best["seed"] else None
    _measure(bench, searched, "search", Recipe(**case["recipe"]), seed, {}, named=cell, known=known)


def _measure(
    bench: Bench,
    cell: Cell,
    of: str,
    recipe: Recipe,
    seed: int,
    told: Mapping[str, Any],
    *,
    named: Cell | None = None,
    known: float | None = None,
) -> None:
    """Measure a recipe unless it is measured. known: its accuracy, if the search has it."""
    case, written = {**(named or cell).case, "of": of}, recipe.as_json()
    if any(line["recipe"] == written for line in bench.results.done(case, seed)):
        return
    bench.results.open(SEEDS[:1])
    more = {"recipe": written, **told}
    if known is None:
        found = bench.train(cell, recipe, seed, trial=True)
        known, more["noise_multiplier"] = round(found.accuracy, 5), found.noise_multiplier
    bench.results.add(case, [Figure("validation_accuracy", known, more=more)], seed=seed)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options: argparse.ArgumentParser = parser("frontier.suggested")
    options.add_argument("--dataset", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    options.add_argument("--seed", nargs="+", type=int, default=[SEEDS[0]], choices=SEEDS)
    options.add_argument("--minutes", type=float, default=math.inf, help="start no cell after this many minutes")
    options.add_argument("--cache", type=Path, help="folder that keeps features between runs")
    options.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="where features are computed")
    chosen = options.parse_args(words)
    until = time.monotonic() + 60 * chosen.minutes
    results, searched = (open_results(name, quick=chosen.quick, revision=REVISION) for name in (BENCH, SEARCH))
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        rows = 300 if chosen.quick else None
        store, device = KeptFeatures(chosen.cache), pick_device(chosen.device)
        bench = Bench(results, searched, store, Path(scratch), until, rows, device)
        for cell in HELD_OUT if not chosen.quick else ():
            if cell.dataset in chosen.dataset:
                bench.choose(cell)
        trials = best_trials(read_lines(RESULTS / f"{SEARCH}.jsonl"))
        best = {cell: line for cell, line in trials.items() if cell.dataset in chosen.dataset}
        for seed in chosen.seed:
            # Cells of one data set share their features.
            for cell in sorted(best, key=lambda cell: (list(DATASETS).index(cell.dataset), cell.method)):
                if bench.out_of_time():
                    return
                measure(bench, cell, best[cell], seed)
                if chosen.quick:
                    return


if __name__ == "__main__":
    main()
