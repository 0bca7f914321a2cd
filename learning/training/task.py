"""A local training as data: the module, the examples, the recipe and the method. Mechanisms run it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from learning.mechanisms.correlated import CorrelatedSteps
from learning.methods import Setting, phases_of
from learning.models.classifier import TextModel
from learning.models.division import EVERYTHING_SHARED, Division
from learning.training.head import HeadTraining
from learning.training.local import Progress, TrainingResult, train
from learning.training.phases import Phase
from tacit.job import Training
from tacit.method import FedAvg, Method

__all__ = ["LocalTraining", "Task"]


@dataclass(frozen=True)
class LocalTraining:
    """A module, and what and how to train it."""

    module: TextModel
    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    recipe: Training
    seed: int
    device: str
    progress: Callable[[Progress], None]
    cancelled: Callable[[], bool]
    # `population` is N, all of the member's examples, or its persons if these are drawn; `usable` are the examples in
    # `ids`. The others have labels that are not the job's. Draws are from all N, so the charge for N holds whatever the
    # labels are.
    population: int
    usable: NDArray[np.int64]
    method: Method = field(default_factory=FedAvg)
    # None means that everything is shared.
    division: Division | None = None
    # Whether private parameters are trained.
    trains_private: bool = False
    # Called with the error of a training whose update is sent nevertheless. It stays on this machine.
    failed: Callable[[Exception], None] = lambda _: None
    # (U,) The person of each row of `ids`, 0 to population - 1, if the mechanism's unit is a person.
    persons: NDArray[np.int64] | None = None
    # The job's steps on this machine, if its noise is correlated.
    correlated: CorrelatedSteps | None = None

    @classmethod
    def of_all(
        cls,
        module: TextModel,
        ids: NDArray[np.int64],
        labels: NDArray[np.int64],
        recipe: Training,
        seed: int,
        device: str,
        progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
    ) -> "LocalTraining":
        """A training in which every example has a label of the job."""
        usable = np.arange(len(ids))
        return cls(module, ids, labels, recipe, seed, device, progress, cancelled, len(ids), usable)

    def rows_of(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of `ids` for examples drawn from all N. Drawn examples that are not usable are left out."""
        place = np.full(self.population, -1, dtype=np.int64)
        place[self.usable] = np.arange(len(self.usable))
        rows = place[drawn]
        return rows[rows >= 0]

    def plain(self, rows: NDArray[np.int64] | None = None) -> TrainingResult:
        """Runs plain local steps on these rows of `ids`, by default on all."""
        here = slice(None) if rows is None else rows
        ids = self.ids[here]
        return train(
            self.module,
            ids,
            self.labels[here],
            self.recipe,
            seed=self.seed,
            phases=self.phases(len(ids)),
            device=self.device,
            progress=self.progress,
            cancelled=self.cancelled,
        )

    def phases(self, examples: int) -> tuple[Phase, ...]:
        """The phases of the job's method for this many examples, in order."""
        names = frozenset(name for name, each in self.module.named_parameters() if each.requires_grad)
        rows = self.module.embedding.num_embeddings
        division = EVERYTHING_SHARED if self.division is None else self.division
        setting = Setting(names, division, examples, self.recipe.epochs, rows, self.trains_private, self.seed)
        return phases_of(self.method, setting)


# What a mechanism trains.
Task = LocalTraining | HeadTraining
