"""Measures accuracy over epsilon of heads, LoRA, BitFit and prompts in a frozen encoder.

Beside them, without noise, of the whole encoder's training (`fine-tuning`).

A cell is a data set, a number of equal members (3, 10, or 1: centralised), an epsilon of each member's gate, and a
method. Its recipe is the best on validation rows of those that a climb along `training.candidates` tries with one seed,
until the accuracy falls on both sides; the first of equal ones counts. Then it is trained with three
seeds and tested. The search itself is not accounted for: the epsilon is that of each training, as is usual in this
field.

`majority` is the accuracy of the most common training label.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.frontier.setup import DATASETS, METHODS, KeptFeatures, job_of, read_data
from benchmarks.frontier.training import (
    START,
    FrontierUnit,
    Recipe,
    Trained,
    candidates,
    inner_candidates,
    lot_candidates,
    short_candidates,
    trained,
    whole_candidates,
)
from benchmarks.library.processes import count, run_in_processes
from benchmarks.library.record import RESULTS, Figure, Results, device_name, open_results, parser, summarise
from learning.training.device import pick_device

__all__ = ["EPSILONS", "GOALS", "SEEDS", "Cell", "cells_of", "main", "run"]

# Full lots, lots of `training.LOT` examples, or the same lots with noise that is correlated over all steps.
Mechanism = Literal["dp-sgd", "dp-sgd, lots", "dp-sgd, correlated"]

BENCH, SEARCH = "frontier", "frontier_search"
SEEDS = (0, 1, 2)
# Raised when the gate came to ask for less noise (decision 45), and the search no longer ended at its best recipe.
REVISION = 3
EPSILONS: tuple[float | None, ...] = (1.0, 2.0, 4.0, None, 0.5, 8.0)
MEMBERS = (3, 10, 1)

# Goals set before the first run, by data set and members. None: without noise.
GOALS: dict[tuple[str, int], dict[float | None, float]] = {
    ("trec", 3): {1.0: 0.85, 2.0: 0.88, 4.0: 0.90, None: 0.95},
    ("sst2", 10): {1.0: 0.82, 2.0: 0.84, 4.0: 0.85, None: 0.90},
    ("banking77", 3): {1.0: 0.72, 2.0: 0.79, 4.0: 0.82, None: 0.91},
}


@dataclass(frozen=True)
class Cell:
    """One training. epsilon: None adds no noise."""

    dataset: str
    members: int
    epsilon: float | None
    method: str
    # What dp-sgd protects: a row, or all rows of a person (an abstract of CSAbstruct).
    unit: FrontierUnit = "example"
    mechanism: Mechanism = "dp-sgd"

    @property
    def case(self) -> dict[str, Any]:
        """The keys of the case in the results."""
        return {
            "dataset": self.dataset,
            "members": self.members,
            "epsilon": "none" if self.epsilon is None else self.epsilon,
            "method": self.method,
            "mechanism": "none" if self.epsilon is None else self.mechanism,
            # Left out by row, so that cells measured before persons were units keep their names.
            **({} if self.unit == "example" else {"unit": self.unit}),
        }

    @property
    def goal(self) -> dict[str, float]:
        """The goal as a field of the cell's lines, if it has one."""
        plain = self.unit == "example" and self.mechanism == "dp-sgd"
        goals = GOALS.get((self.dataset, self.members), {}) if plain else {}
        return {"goal": goals[self.epsilon]} if self.epsilon in goals else {}


def cells_of(
    datasets: Sequence[str],
    members: Sequence[int],
    epsilons: Sequence[float | None],
    methods: Sequence[str],
    units: Sequence[FrontierUnit] = ("example",),
    mechanisms: Sequence[Mechanism] = ("dp-sgd",),
) -> list[Cell]:
    """Return the cells, those with a goal first.

    The whole encoder is trained without noise alone. A cell by person has noise and full lots, and a data set that
    names persons. Lots are for heads over features that are kept, and need noise.
    """
    found = [
        Cell(dataset, count, epsilon, method, unit, mechanism)
        for dataset, count, epsilon, method, unit, mechanism in product(
            datasets, members, epsilons, methods, units, mechanisms
        )
        if unit == "example" or (epsilon is not None and DATASETS[dataset].person is not None and mechanism == "dp-sgd")
        if mechanism == "dp-sgd" or (epsilon is not None and METHODS[method].cached and not METHODS[method].short)
        if epsilon is not None or not METHODS[method].short
        if epsilon is None or not METHODS[method].whole
    ]
    return sorted(found, key=lambda cell: not cell.goal)


@dataclass(frozen=True)
class Bench:
    """Where cells are measured: results, features, the folder of bundles, and when to stop (monotonic seconds).

    Args:
        device: where members train, from `pick_device`.
    """

    results: Results
    searched: Results
    store: KeptFeatures
    folder: Path
    until: float = math.inf
    rows: int | None = None
    device: str = "cpu"

    def train(self, cell: Cell, recipe: Recipe, seed: int, *, trial: bool) -> Trained:
        """Train a recipe, and score it on validation rows (a trial) or on test rows."""
        data = read_data(cell.dataset)
        train = data.held_in if trial else data.train
        scored = data.validation if trial else data.test
        return trained(
            job_of(cell.dataset, cell.method, recipe.start, self.folder),
            train[: self.rows],
            scored[: self.rows],
            cell.members,
            cell.epsilon,
            recipe,
            seed,
            self.store,
            self.device,
            cell.unit,
        )

    def out_of_time(self) -> bool:
        """Tell whether no further training may start."""
        return time.monotonic() > self.until

    def choose(self, cell: Cell) -> Recipe | None:
        """Return the recipe of a cell, after trying those that are not tried yet; None if time ran out.

        Candidates go further and further. The climb begins at START, for short steps at the place before, and
        turns round once if the next is no better.
        """
        ladder, scores = _ladder(cell), dict[Recipe, float]()
        at = begin = 1 if METHODS[cell.method].short else START
        for step in (0, 1, -1):
            while 0 <= at + step < len(ladder):
                recipe = ladder[at + step]
                score = self.score(cell, recipe)
                if score is None:
                    return None
                better = score > max(scores.values(), default=-1.0)
                scores[recipe] = score
                if not better or not step:
                    break
                at += step
            if at > begin:
                break
        return max(scores, key=lambda recipe: scores[recipe])

    def score(self, cell: Cell, recipe: Recipe) -> float | None:
        """Return the accuracy of a trial, which is run if it was not yet; None if time ran out."""
        case = {**cell.case, "recipe": recipe.as_json()}
        if not self.searched.done(case, SEEDS[0]):
            if self.out_of_time():
                return None
            self.searched.open(SEEDS[:1])
            found = self.train(cell, recipe, SEEDS[0], trial=True)
            self.searched.add(case, [self._figure("validation_accuracy", found)], seed=SEEDS[0])
        (line,) = self.searched.done(case, SEEDS[0])
        return float(line["value"])

    def measure(self, cell: Cell, seeds: Sequence[int]) -> None:
        """Measure a cell's seeds that are not measured yet, and their mean."""
        if not all(self.results.done(cell.case, seed) for seed in seeds):
            recipe = self.choose(cell)
            for seed in seeds if recipe is not None else ():
                if recipe is None or self.out_of_time() or self.results.done(cell.case, seed):
                    continue
                self.results.open(seeds)
                began = time.process_time()
                found = self.train(cell, recipe, seed, trial=False)
                more = {**cell.goal, "recipe": recipe.as_json(), "noise_multiplier": found.noise_multiplier}
                if found.band > 1:
                    more["band"] = found.band
                more |= {"trained_values": found.values, "cpu_seconds": round(time.process_time() - began, 1)}
                self.results.add(cell.case, [self._figure("test_accuracy", found, more)], seed=seed)
        summarise(self.results, cell.case, SEEDS, keep=("goal", "recipe", "noise_multiplier", "device"))

    def _figure(self, name: str, found: Trained, more: Mapping[str, Any] | None = None) -> Figure:
        return Figure(name, round(found.accuracy, 5), more={**(more or {}), "device": device_name(self.device)})


def _ladder(cell: Cell) -> list[Recipe]:
    if METHODS[cell.method].whole:
        return whole_candidates()
    if cell.epsilon is not None and cell.mechanism != "dp-sgd":
        return lot_candidates(cell.epsilon, correlated=cell.mechanism == "dp-sgd, correlated")
    if cell.epsilon is not None and METHODS[cell.method].short:
        return short_candidates(cell.epsilon)
    return (candidates if METHODS[cell.method].cached else inner_candidates)(cell.epsilon)


def record_majority(results: Results, datasets: Sequence[str]) -> None:
    """Record the accuracy of each data set's most common label."""
    for name in datasets:
        case = {"dataset": name, "method": "majority"}
        if not results.done(case):
            results.open(SEEDS)
            results.add(case, [Figure("test_accuracy", round(read_data(name).majority, 5))])


def run(bench: Bench, cells: Sequence[Cell], seeds: Sequence[int] = SEEDS) -> None:
    """Measure the cells one after another."""
    for cell in cells:
        if bench.out_of_time():
            return
        bench.measure(cell, seeds)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options: argparse.ArgumentParser = parser("frontier.accuracy")
    options.add_argument("--dataset", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    options.add_argument("--members", nargs="+", type=int, default=list(MEMBERS), choices=MEMBERS)
    options.add_argument("--epsilon", nargs="+", type=_epsilon, default=list(EPSILONS), help="numbers, or none")
    options.add_argument("--method", nargs="+", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--unit", nargs="+", default=["example"], choices=["example", "person"])
    options.add_argument(
        "--mechanism", nargs="+", default=["dp-sgd"], choices=get_args(Mechanism), help="full lots, lots, or bands"
    )
    options.add_argument("--minutes", type=float, default=math.inf, help="start no training after this many minutes")
    options.add_argument(
        "--cache", type=Path, help="folder that keeps features between runs (2 GB for all cells, in each process)"
    )
    options.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="where members train")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines")
    options.add_argument(
        "--processes", type=count, default=1, help="measure so many cells at a time, which may share a GPU"
    )
    chosen = options.parse_args(words)
    cells = cells_of(chosen.dataset, chosen.members, chosen.epsilon, chosen.method, chosen.unit, chosen.mechanism)
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        bench = _made(chosen, Path(scratch))
        if chosen.quick:
            run(bench, [Cell("trec", 3, 4.0, "head-layers")], SEEDS[:1])
            return
        record_majority(bench.results, chosen.dataset)
        if chosen.processes == 1:
            run(bench, cells)
            return
        failed = run_in_processes(
            cells, _act, chosen.processes, begin=_begin, given=(chosen, bench.folder, bench.until), until=bench.until
        )
        if failed:
            raise SystemExit(f"{len(failed)} cells failed; the others are recorded")


def _made(chosen: argparse.Namespace, folder: Path) -> Bench:
    results, searched = (
        open_results(name, quick=chosen.quick, revision=REVISION, folder=chosen.results) for name in (BENCH, SEARCH)
    )
    rows, until = 300 if chosen.quick else None, time.monotonic() + 60 * chosen.minutes
    return Bench(results, searched, KeptFeatures(chosen.cache), folder, until, rows, pick_device(chosen.device))


# One for each process.
_bench: Bench | None = None


def _begin(chosen: argparse.Namespace, folder: Path, until: float) -> None:
    """Make a process's own bench. Each computes the features that it needs, or reads all that are kept."""
    import torch

    global _bench  # noqa: PLW0603  one for each process
    torch.set_num_threads(1)
    _bench = replace(_made(chosen, Path(tempfile.mkdtemp(dir=folder))), until=until)


def _act(cell: Cell) -> list[Cell]:
    if _bench is None:
        raise RuntimeError("a process has no bench")
    _bench.measure(cell, SEEDS)
    return []


def _epsilon(word: str) -> float | None:
    return None if word == "none" else float(word)


if __name__ == "__main__":
    # By its module's name: other processes know its classes by that.
    import_module("benchmarks.frontier.accuracy").main()
