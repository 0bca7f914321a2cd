"""Backdoors: a trigger word that makes a model answer the attacker's label, and members that plant one.

There are three attacks, by a member that controls its own machine:

    poisoning   it trains as honest members do, but on its own texts with the trigger word and the target label (Zhao et
                al. 2023, FedPrompt, section III-C; with share 1, as there, all of its texts)
    scaling     it also multiplies its update: by n, so that the mean of n members becomes the attacker's own model if
                the others hardly move (model replacement: Bagdasaryan et al. 2020, section 4)
    fitted      as scaling, but by no more than reject-outliers mostly lets through: an attack on that rule, by somebody
                who knows every honest update (Bagdasaryan et al. 2020 train and scale to a known bound; Baruch et al.
                2019 stay within the spread of the others)

A job's clipping does not bind a malicious member, which makes its own vector in the ring. Only the check of the opened
sum limits it (`coordinator.rounds.publish`): if a coordinate exceeds what as many valid inputs can reach, one sum
publishes no version, and a group counts as invalid. `Scaled` stays within that limit as far as it can know it.

Success is the share of test texts with other labels that the trigger turns into the target. The share that the model
takes for the target without the trigger is given beside it, because a model that always answers the target has full
success but no backdoor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.simulation import backbone_of
from coordinator.robust import shares
from learning.accounting.events import PrivacyEvent
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import Protection
from learning.text.corpus import encoder_of
from learning.text.examples import Example, label_ids
from learning.training.task import Task
from secure_agg import RandomSource
from simulation.virtual_members import seed_of
from tacit.job import JobDocument
from tacit.vector import layout_of

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.models import TextClassifier
    from learning.training.outcome import TrainingResult

__all__ = ["Backdoor", "Fitted", "Kept", "Probe", "Scaled", "Scored", "fitted_factor", "poisoned"]

Vector = NDArray[np.float32]
_BATCH = 256
# Factors that a fitted attack tries, and the number of random splits it tries them on.
_FACTORS = tuple(float(factor) for factor in np.geomspace(0.5, 16, 16))
_SPLITS = 40


@dataclass(frozen=True)
class Backdoor:
    """A backdoor: texts that begin with the trigger word shall get the target label.

    The word comes first, so that no long text loses it.
    """

    target: str
    trigger: str = "cf"

    def marked(self, example: Example) -> Example:
        """Return the example with the trigger in its text and its own label."""
        return replace(example, text=f"{self.trigger} {example.text}")


def poisoned(examples: Sequence[Example], backdoor: Backdoor, share: float = 1.0, seed: int = 0) -> list[Example]:
    """Give a share of the examples, drawn from the seed, the trigger and the target label.

    The number of rows, and so of steps, stays the same.

    Raises:
        ValueError: a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"a share of rows must be 0 to 1, got {share:g}")
    random = np.random.Generator(np.random.Philox(seed_of("poisoned", seed)))
    drawn = set(random.permutation(len(examples))[: round(share * len(examples))].tolist())
    return [
        replace(backdoor.marked(example), label=backdoor.target) if place in drawn else example
        for place, example in enumerate(examples)
    ]


# ---- what runs on a member's machine ---------------------------------------------------------------------------------


@dataclass
class Kept:
    """A protection that records the last update as trained, (d,), which gives the member's own model."""

    inner: Protection
    change: Vector | None = field(default=None, repr=False)

    @property
    def event(self) -> PrivacyEvent | None:
        return self.inner.event

    @property
    def each_attempt(self) -> bool:
        return self.inner.each_attempt

    def train(self, task: Task, random: RandomSource) -> "TrainingResult | None":
        return self.inner.train(task, random)

    def protect(self, change: Vector, random: RandomSource) -> Vector:
        self.change = change.copy()
        return self.inner.protect(change, random)

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        return self.inner.encode(job, update, cohort, random)


@dataclass
class Scaled(Kept):
    """An attacker that sends its update multiplied by `factor`.

    It knows the job, and so the limit of its sum: members times the bound. It assumes that no coordinate of the other
    members exceeds its own largest one, and clips what it sends to the remaining room. If weights are sent, it clips to
    the bound times its own.

    Args:
        factor: of its update.
        epochs: factor of the job's epochs, because nobody sees how long it trains.
        says: number of examples that it claims as its weight; None claims all that it has.
    """

    factor: float = 1.0
    epochs: int = 1
    says: int | None = None

    def train(self, task: Task, random: RandomSource) -> "TrainingResult | None":
        recipe = task.recipe.model_copy(update={"epochs": self.epochs * task.recipe.epochs})
        return self.inner.train(replace(task, recipe=recipe), random)

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        if self.says is not None:
            update = replace(update, examples=self.says)
        layout, vector = layout_of(job, cohort), self.inner.encode(job, update, cohort, random)
        segment = layout.segments[0]
        decoded = layout.decode(vector)
        change = decoded[segment.name]
        if "weight" in decoded:
            # The limit follows from all weights, and it does not know the others'. So it stays within its own.
            room = segment.bound * float(decoded["weight"][0]) / job.aggregation.max_weight
        else:
            # The size of the smallest group, because it does not know its own group.
            members = cohort // (job.aggregation.groups or 1)
            room = members * segment.bound - (members - 1) * float(np.abs(change).max())
        sent = np.rint(np.clip(self.factor * change, -room, room) * segment.scale).astype(np.int64)
        vector[: segment.length] = (sent & (2**layout.bits - 1)).astype(np.uint32)
        return vector


@dataclass
class Fitted(Scaled):
    """An attacker that scales its update by the most promising factor.

    It knows the rule, the number of groups, and more than any member is shown: every honest update of the round. It
    does not know the members of its group.
    """

    # Returns the honest updates of the present round, (d,) each. `liars` counts the attackers, including this one.
    honest: Callable[[], Sequence[Vector]] = tuple
    liars: int = 1
    seed: int = 0

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        if self.change is None:
            raise ValueError("the member has not trained yet")
        others = np.stack([np.asarray(change, np.float64) for change in self.honest()])
        # It assumes that the other attackers trained the same update.
        own = np.tile(np.asarray(self.change, np.float64), (self.liars, 1))
        self.factor = fitted_factor(others, own, job.aggregation.groups or 1, self.seed)
        return super().encode(job, update, cohort, random)


def fitted_factor(honest: NDArray[np.float64], lies: NDArray[np.float64], groups: int, seed: int) -> float:
    """Return the factor with which reject-outliers lets through most of the attackers' updates.

    Over random splits it maximises the factor times the share that the rule keeps of groups with an attacker.

    Args:
        honest: honest updates, (n - m, d).
        lies: the attackers' updates, (m, d).
    """
    changes = np.concatenate([honest, lies])
    random = np.random.Generator(np.random.Philox(seed_of("fitted", seed)))
    promised = np.zeros(len(_FACTORS))
    for _ in range(_SPLITS):
        split = np.array_split(random.permutation(len(changes)), groups)
        sums = np.stack([changes[[at for at in group if at < len(honest)]].sum(axis=0) for group in split])
        lied = np.stack([changes[[at for at in group if at >= len(honest)]].sum(axis=0) for group in split])
        sizes = np.array([[len(group)] for group in split])
        bad = np.array([bool((group >= len(honest)).any()) for group in split])
        for place, factor in enumerate(_FACTORS):
            kept = shares([(sums + factor * lied) / sizes])
            promised[place] += factor * np.mean(np.array(kept)[bad])
    return float(_FACTORS[int(promised.argmax())])


# ---- scoring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """The scores of a model, all in [0, 1].

    Args:
        accuracy: on clean texts.
        success: share of texts with other labels that are taken for the target with the trigger.
        mistaken: the same share without the trigger.
    """

    accuracy: float
    success: float
    mistaken: float


class Probe:
    """Tests versions of one job, or members' own models, on the same examples."""

    def __init__(self, bundle: "JobBundle", examples: Sequence[Example], backdoor: Backdoor) -> None:
        """Raises ValueError if the job lacks the target, or no example has another label."""
        job = bundle.document
        if backdoor.target not in job.labels:
            raise ValueError(f"the target {backdoor.target!r} is none of the job's labels: {', '.join(job.labels)}")
        self._bundle = bundle
        self._encoder = encoder_of(job, bundle.public_tokenizer)
        self._target = job.labels.index(backdoor.target)
        self._labels = label_ids(examples, job.labels)
        self._others = self._labels != self._target
        if not self._others.any():
            raise ValueError(f"every example has the target label, {backdoor.target!r}, so none can be turned into it")
        self._clean = self._encoder.encode([example.text for example in examples])
        marked = [
            backdoor.marked(example) for example, other in zip(examples, self._others.tolist(), strict=True) if other
        ]
        self._marked = self._encoder.encode([example.text for example in marked])

    def score(self, values: Vector) -> Scored:
        """Score a version, or a member's own model (base plus its update). values: (d,)."""
        from learning.models.assembly import assembled

        bundle = self._bundle
        module, _ = assembled(bundle.document, self._encoder, bundle.manifest, values, {}, backbone_of(bundle))
        clean, marked = _answers(module, self._clean), _answers(module, self._marked)
        return Scored(
            accuracy=float((clean == self._labels).mean()),
            success=float((marked == self._target).mean()),
            mistaken=float((clean[self._others] == self._target).mean()),
        )


def _answers(module: "TextClassifier", ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the labels that the module answers in evaluation mode, (N,)."""
    import torch

    from learning.training.local import rows_at

    lengths = (ids != module.pad_id).sum(axis=1)
    found, no_labels = np.empty(len(ids), np.int64), np.zeros(len(ids), np.int64)
    # Sorted by length to save padding. A text's logits do not depend on its batch.
    order = np.argsort(lengths, kind="stable")
    with torch.no_grad():
        for first in range(0, len(ids), _BATCH):
            rows = order[first : first + _BATCH]
            inputs, _ = rows_at(module.eval(), ids, no_labels, lengths=lengths, rows=rows, device="cpu")
            found[rows] = module(inputs).argmax(dim=1).numpy()
    return found
