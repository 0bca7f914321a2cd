"""Measures how far private embeddings diverge, and what it costs.

Members, recipe, start and tests are those of `quality`. After the last round the same shared parameters are read behind
four tables of word vectors: each member's `own`, as it left it; the common `start`; the `mean` of all members' tables,
which nobody in a federation can compute, because tables never leave their members; and `another's`, the next member's.

`moved` is the distance of a member's table from the start, relative to the size of the start (root mean square over
members). `in_common` is the share of that squared movement which the mean of all tables makes too: 1 if all moved
alike, 0.01 if each of a hundred moved on its own.

The tables of `quality` have `fedavg`, whose table is the mean of ten members' in every round, and `fedvocab` with a
frozen one.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.record import Figure, Results, open_results, parser
from benchmarks.private_vocabularies.quality import (
    CORE,
    DATASETS,
    SEEDS,
    Best,
    Cell,
    Data,
    Recipe,
    Scores,
    federate,
    read_data,
    recipe_of,
    standing,
    validated,
    world_of,
)
from simulation.virtual_members import COMMON, Crew, States, World, crew_of
from tacit.method import FedVocab

__all__ = ["Behind", "main", "measure", "movement", "tables"]

BENCH = "embedding_divergence"
Behind = Literal["own", "start", "mean", "another's"]
Table = NDArray[np.float32]


def tables(world: World) -> tuple[Table, list[Table]]:
    """Return the common start, and each member's own table, (V, width) each. Members must share their word list.

    Raises:
        ValueError: members have their own word lists, so rows belong to different words.
    """
    private = world.bundle.private
    if private is None:
        raise ValueError("members do not start from a common table; use a world with one public word list")
    manifest, data = private
    ((name, start),) = manifest.unflatten(manifest.decode(data)).items()
    states, found = States(world.states), []
    for place in range(len(world.members)):
        held = states.load(place)
        found.append(start if held is None else held[1][name])
    return start, found


def movement(start: Table, found: Sequence[Table]) -> tuple[float, float]:
    """Measure how far the tables moved.

    Returns:
        The distance from the start relative to its size (root mean square over members), and the share of that square
        which the mean of the tables makes too (0 if nothing moved).
    """
    moves = [np.asarray(each, np.float64) - start for each in found]
    each = float(np.mean([np.square(move).sum() for move in moves]))
    together = float(np.square(np.mean(moves, axis=0)).sum())
    return float(np.sqrt(each / np.square(start, dtype=np.float64).sum())), together / each if each else 0.0


def measure(
    cell: Cell, data: Data, recipe: Recipe, seed: int, folder: Path, workers: int
) -> list[tuple[dict[str, Any], list[Figure]]]:
    """Train a cell, and read its shared part behind all four tables.

    Returns:
        (case, figures) for each table, and last those of the movement.
    """
    recipe = cell.recipe(recipe)
    with crew_of(world_of(cell, data, recipe, seed, folder), workers) as crew:
        version, _, _ = federate(cell, crew, recipe, seed, Best(folder / "best"))
        start, found = tables(crew.world)
        mean: Table = np.asarray(np.mean(found, axis=0, dtype=np.float64), np.float32)
        behind: dict[Behind, Sequence[Table]] = {
            "own": found,
            "start": [start] * len(found),
            "mean": [mean] * len(found),
            "another's": [*found[1:], found[0]],
        }
        cells = []
        for name, each in behind.items():
            states = _written(crew.world, folder / "behind" / name, each)
            if name == "another's":
                # On the common test set these are the same models as with members' own tables, in another order.
                alone = crew.score(version, ("left",), ("test",), states=states)
                figures = [Figure("local_accuracy", round(validated(alone, "left", "test"), 5))]
            else:
                read = standing(_scores(crew, version, states, one=name in ("start", "mean")), "left")
                figures = [
                    Figure("global_accuracy", round(read.common, 5)),
                    Figure("local_accuracy", round(read.local, 5)),
                ]
            cells.append(({**cell.case, "behind": name}, figures))
    moved, in_common = movement(start, found)
    return [*cells, (cell.case, [Figure("moved", round(moved, 4)), Figure("in_common", round(in_common, 4))])]


def _scores(crew: Crew, version: bytes, states: Path, *, one: bool) -> Scores:
    """Score all members on the common test set and their own rows. one: all have the same table."""
    if not one:
        return crew.score(version, ("left",), (COMMON, "test"), states=states)
    (common,) = crew.score(version, ("left",), (COMMON,), places=[0], states=states)
    return [{**common, **own} for own in crew.score(version, ("left",), ("test",), states=states)]


def _written(world: World, folder: Path, found: Sequence[Table]) -> Path:
    """Write states in which each member has its table of `found`, and return their folder."""
    assert world.bundle.private is not None  # noqa: S101  `tables` has asked
    manifest, _ = world.bundle.private
    states = States(folder)
    for place, table in enumerate(found):
        states.save(place, None, manifest.unflatten(table.ravel()))
    return folder


def run(results: Results, data: Data, recipe: Recipe, seeds: Sequence[int], workers: int = 1) -> None:
    """Measure the trainings that are not measured yet."""
    for seed in seeds:
        for method in (FedVocab(), FedVocab(adaptive=False)):
            cell = Cell(data.name, method)
            if results.done(cell.case, seed):
                continue
            results.open(seeds)
            with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
                # The cell's own line comes last, so it marks a complete training.
                for case, figures in measure(cell, data, recipe, seed, Path(scratch), workers):
                    results.add(case, figures, seed=seed)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options = parser("private_vocabularies.embedding_divergence")
    options.add_argument("--dataset", nargs="*", default=list(CORE), choices=DATASETS)
    options.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), choices=SEEDS)
    options.add_argument("--workers", type=int, default=1, help="number of processes; figures do not depend on it")
    chosen = options.parse_args(words)
    results = open_results(BENCH, quick=chosen.quick)
    if chosen.quick:
        whole = read_data("trec")
        data = Data("trec", whole.train[:540], whole.common[:100])
        run(results, data, Recipe(members=10, cohort=3, rounds=4, hidden=20), (0,))
        return
    for dataset in chosen.dataset:
        run(results, read_data(dataset), recipe_of(dataset), chosen.seeds, chosen.workers)


if __name__ == "__main__":
    main()
