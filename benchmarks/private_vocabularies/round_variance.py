"""Measures how much FedAvg's accuracy moves from round to round.

Members, recipe and start are those of `quality`, on SST-2, where the swings are largest. It reads 2,000 of the members'
validation rows and no test. Members train once as usual and once with `training.logit_adjustment`.

After each round it records four values: the `accuracy`; the accuracy `at_the_threshold` at which the model answers each
label as often as the rows have it, which shows what the model knows apart from its label bias; the share of the first
label among the round's rows; and the number of the round's members with a single label. `swing` is the mean difference
from one round to the next, over the last 30.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.masked_rounds import play_round
from benchmarks.library.record import Figure, Results, open_results, parser
from benchmarks.private_vocabularies.quality import SEEDS, Cell, Data, Recipe, read_data, recipe_of, world_of
from learning.text.examples import Example
from learning.training.local import logits_of
from simulation.virtual_members import Crew, World, cohort_of, crew_of, seed_of
from tacit.method import FedAvg

__all__ = ["Reader", "Round", "main", "measure", "read_rounds", "threshold_accuracies"]

BENCH = "round_variance"
ROWS = 2000
# In earlier rounds the model still learns, and its steps are not swings.
SETTLED = 20


@dataclass(frozen=True)
class Round:
    """A version's accuracies, and its members.

    Args:
        first: share of the first label among their rows.
        of_one_label: number of members with a single label.
    """

    accuracy: float
    at_the_threshold: float
    first: float
    of_one_label: int


def read_rounds(crew: Crew, recipe: Recipe, seed: int, rows: Sequence[Example]) -> list[Round]:
    """Train all rounds, and read each version on these rows.

    Raises:
        ValueError: the job has more or fewer than two labels.
    """
    bundle = crew.world.bundle
    if len(bundle.document.labels) != 2:
        raise ValueError(f"a threshold is between two labels, but the job has {len(bundle.document.labels)}")
    reader = Reader(crew.world, rows)
    values, found = bundle.manifest.decode(bundle.weights), []
    for number in range(1, recipe.rounds + 1):
        places = cohort_of(recipe.members, recipe.cohort, seed, number)
        values = play_round(crew, values, number, places)
        held = [[example.label for example in crew.world.members[place].train] for place in places]
        all_labels = [label for labels in held for label in labels]
        first = all_labels.count(bundle.document.labels[0]) / len(all_labels)
        found.append(Round(*reader.accuracies(values), first, sum(len(set(labels)) == 1 for labels in held)))
    return found


class Reader:
    """Reads versions without private values, always on the same rows."""

    def __init__(self, world: World, rows: Sequence[Example]) -> None:
        from learning.models import build_blank
        from learning.text.corpus import EncodedExamples

        self._bundle = world.bundle
        job = world.bundle.document
        corpus = EncodedExamples(rows, job, world.bundle.public_tokenizer)
        self._read = corpus.read()
        self._module = build_blank(job.model, corpus.vocabulary_size, len(job.labels), corpus.pad_id)

    def accuracies(self, values: NDArray[np.float32]) -> tuple[float, float]:
        """Return the accuracy of the model's answers, and that at the threshold of the rows' own label shares."""
        from learning.models import EVERYTHING_SHARED

        EVERYTHING_SHARED.load_shared(self._module, self._bundle.manifest.unflatten(values))
        logits = logits_of(self._module, self._read.ids)
        return threshold_accuracies(logits[:, 1] - logits[:, 0], self._read.labels)


def threshold_accuracies(leads: NDArray[np.floating[Any]], labels: NDArray[np.int64]) -> tuple[float, float]:
    """Return the accuracies at two thresholds.

    At the first, a lead above zero answers the second label. At the second, as many of the highest leads answer it as
    rows have it.

    Args:
        leads: logit of the second label minus that of the first, (N,).
        labels: 0 or 1, (N,).
    """
    second = np.zeros(len(leads), bool)
    second[np.argsort(leads, kind="stable")[len(leads) - int(labels.sum()) :]] = True
    return float(np.mean((leads > 0) == labels)), float(np.mean(second == labels))


def measure(cell: Cell, data: Data, recipe: Recipe, seed: int, folder: Path, workers: int) -> list[Figure]:
    """Measure both swings of one training; the first has the values of each round in further fields."""
    recipe = cell.recipe(recipe)
    with crew_of(world_of(cell, data, recipe, seed, folder), workers) as crew:
        validation = [example for held in crew.world.members for example in held.validation]
        order = np.random.Generator(np.random.Philox(seed_of(BENCH, data.name, seed))).permutation(len(validation))
        rounds = read_rounds(crew, recipe, seed, [validation[at] for at in np.sort(order[:ROWS])])
    figures = []
    for name, key in (("swing", "accuracy"), ("swing_at_the_threshold", "at_the_threshold")):
        curve = [round(getattr(each, key), 4) for each in rounds]
        settled = curve[min(SETTLED, recipe.rounds - 2) :]
        more = {"lowest": min(settled), "highest": max(settled), "curve": curve}
        figures.append(Figure(name, round(float(np.abs(np.diff(settled)).mean()), 5), more=more))
    figures[0] = Figure(
        figures[0].name,
        figures[0].value,
        more={
            **figures[0].more,
            "first_label": [round(each.first, 4) for each in rounds],
            "of_one_label": [each.of_one_label for each in rounds],
        },
    )
    return figures


def run(results: Results, data: Data, recipe: Recipe, seeds: Sequence[int], workers: int = 1) -> None:
    """Measure the trainings that are not measured yet."""
    for seed in seeds:
        for adjusted in (False, True):
            cell = Cell(data.name, FedAvg(), adjusted=adjusted)
            if results.done(cell.case, seed):
                continue
            results.open(seeds)
            with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
                results.add(cell.case, measure(cell, data, recipe, seed, Path(scratch), workers), seed=seed)


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options = parser("private_vocabularies.round_variance")
    options.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), choices=SEEDS)
    options.add_argument("--workers", type=int, default=1, help="number of processes; figures do not depend on it")
    chosen = options.parse_args(words)
    results = open_results(BENCH, quick=chosen.quick)
    data, recipe = read_data("sst2"), recipe_of("sst2")
    if chosen.quick:
        data = Data(data.name, data.train[:600], data.common)
        run(results, data, Recipe(members=10, cohort=3, rounds=4, hidden=20), (0,))
        return
    run(results, data, recipe, chosen.seeds, chosen.workers)


if __name__ == "__main__":
    main()
