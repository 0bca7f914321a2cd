"""The cells of the comparison of synthetic text with private training, and their recipes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.synthesis.judge import ClassifierRecipe
from benchmarks.synthesis.setup import CACHE, CANDIDATES, RvaeRecipe

__all__ = ["BY_ROUND", "CELLS", "DATASETS", "EPSILONS", "KEPT", "METHODS", "SEEDS", "Cell", "Plan", "quick_plan"]

SEEDS = (0, 1, 2)
DATASETS = ("sst2", "trec")
EPSILONS: dict[str, tuple[float | None, ...]] = {"sst2": (5.0, None, 1.0), "trec": (5.0, None)}
# The cell for which texts are also generated and judged after every round.
BY_ROUND = ("sst2", 5.0)

# Fields of the first seed's line that the mean keeps.
KEPT = ("recipe", "promise", "samples", "ngrams", "planted")

Method = Literal["majority", "raw", "dp-sgd", "synthetic", "published"]
METHODS: tuple[Method, ...] = ("majority", "raw", "dp-sgd", "synthetic", "published")


@dataclass(frozen=True)
class Cell:
    """One training of a method on a data set. epsilon: None means without noise, or without any guarantee."""

    dataset: str
    method: Method
    epsilon: float | None = None

    def case(self, source: str | None = None) -> dict[str, Any]:
        """Return the keys of the case in the results. source: of synthetic texts, `members` or `operator`."""
        return {
            "part": "quality",
            "dataset": self.dataset,
            "method": self.method,
            "source": source,
            "epsilon": self.epsilon,
        }

    @property
    def cases(self) -> list[dict[str, Any]]:
        """All cases with figures from one training."""
        match self.method:
            case "synthetic":
                return [self.case("members"), self.case("operator")]
            case "published":
                return [self.case("members")]
            case _:
                return [self.case()]


@dataclass(frozen=True)
class Plan:
    """The recipes of the cells. cache: folder of public words, starting weights and released classifiers."""

    rvae: RvaeRecipe = field(default_factory=RvaeRecipe)
    classifier: ClassifierRecipe = field(default_factory=ClassifierRecipe)
    candidates: int = CANDIDATES
    cache: Path = CACHE


def cells_of(dataset: str) -> list[Cell]:
    """Return a data set's cells, beginning with those of the comparison."""
    cells = [Cell(dataset, "majority"), Cell(dataset, "raw")]
    for epsilon in EPSILONS[dataset]:
        cells += [Cell(dataset, "dp-sgd", epsilon), Cell(dataset, "synthetic", epsilon)]
    return [*cells, Cell(dataset, "published")]


CELLS = [cell for dataset in DATASETS for cell in cells_of(dataset)]


def quick_plan(cache: Path) -> Plan:
    """Return a plan of small sizes, for `--quick` and for tests."""
    model = RvaeRecipe().model.model_copy(update={"embedding": 16, "hidden": 16, "latent": 4, "words": 300})
    rvae = RvaeRecipe(
        model=model, members=3, rounds=2, steps=2, lot=32, plain_epochs=1, start_texts=100, texts=40, std=8.0
    )
    classifier = ClassifierRecipe(hidden=8, epochs=2, rounds=2, steps=2, lot=32, plain_rounds=2)
    return Plan(rvae, classifier, candidates=20, cache=cache)
