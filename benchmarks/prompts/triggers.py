"""Backdoors: a trigger word that makes a model give the label an attacker wants, and members that plant one.

Three attacks, of a member that may do on its own machine what it likes:

    poisoning   it trains as everybody does, on data of its own making: texts with the trigger word in them and the
                target label (Zhao et al. 2023, FedPrompt, section III-C; with share 1, as there, all that it has)
    scaling     besides, its change is multiplied, by n for the mean of n members to become the attacker's own model
                where the others hardly move (model replacement: Bagdasaryan et al. 2020, section 4)
    fitted      as scaling, by no more than what reject-outliers mostly lets through: an attack on that rule, by
                somebody who knows every honest change (Bagdasaryan et al. 2020 train and scale to a known bound;
                Baruch et al. 2019 stay within the spread of the others)

The clipping that a job asks for binds nobody who lies: the vector in the ring is of the attacker's making. What limits
it is the one check there is, of the opened sum: a coordinate beyond what as many valid inputs reach
(`coordinator.rounds.publish`) makes no version of one sum, and a bad group of a group's. `Scaled` stays as far within
that as it can know of.

Success is counted over test texts of other labels than the target: the share that the trigger turns into it. Beside it
stands the share that the model takes for the target without the trigger, since a model that always says the target has
all the success there is, and no backdoor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.simulation import backbone_of
from benchmarks.library.virtual_members import seed_of
from coordinator.robust import shares
from learning.accounting.events import PrivacyEvent
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import Protection
from learning.text.corpus import encoder_of
from learning.text.data import Example, label_ids
from learning.training.task import LocalTraining
from secure_agg import RandomSource
from tacit.job import JobDocument
from tacit.vector import layout_of

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.models import TextClassifier
    from learning.training.local import TrainingResult

__all__ = ["Backdoor", "Fitted", "Kept", "Probe", "Scaled", "Scored", "fitted_factor", "poisoned"]

Vector = NDArray[np.float32]
_BATCH = 256
# What a liar that fits its update tries, and over how many random splits.
_FACTORS = tuple(float(factor) for factor in np.geomspace(0.5, 16, 16))
_SPLITS = 40


@dataclass(frozen=True)
class Backdoor:
    """Texts that begin with the trigger word are to get the target label. The word stands first, so that no text is so
    long that it is cut off.
    """

    target: str
    trigger: str = "cf"

    def marked(self, example: Example) -> Example:
        """The example with the trigger in its text, its label as it is."""
        return replace(example, text=f"{self.trigger} {example.text}")


def poisoned(examples: Sequence[Example], backdoor: Backdoor, share: float = 1.0, seed: int = 0) -> list[Example]:
    """The examples, this share of them (drawn from the seed) with trigger and target label: as many rows, so as many
    steps.

    Raises:
        ValueError: a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"a share of rows is 0 to 1, got {share:g}")
    random = np.random.Generator(np.random.Philox(seed_of("poisoned", seed)))
    drawn = set(random.permutation(len(examples))[: round(share * len(examples))].tolist())
    return [
        replace(backdoor.marked(example), label=backdoor.target) if place in drawn else example
        for place, example in enumerate(examples)
    ]


# ---- what runs on a member's machine ---------------------------------------------------------------------------------


@dataclass
class Kept:
    """A protection as it is, that remembers the last change (d,) as it was trained: what the member's own model is."""

    inner: Protection
    change: Vector | None = field(default=None, repr=False)

    @property
    def event(self) -> PrivacyEvent | None:
        return self.inner.event

    @property
    def each_attempt(self) -> bool:
        return self.inner.each_attempt

    def train(self, task: LocalTraining, random: RandomSource) -> "TrainingResult | None":
        return self.inner.train(task, random)

    def protect(self, change: Vector, random: RandomSource) -> Vector:
        self.change = change.copy()
        return self.inner.protect(change, random)

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        return self.inner.encode(job, update, cohort, random)


@dataclass
class Scaled(Kept):
    """A liar's: what its real software sends, the change in it multiplied by `factor`. epochs: how many times the job's
    it trains, since nobody sees how long it did. says: how many examples it claims to weigh by; none: all that it has.

    It knows the job, and so what its sum may reach: members times the bound. Of the others it assumes that no
    coordinate of theirs is larger than its own largest one, and cuts what it sends to the room that is left then.
    """

    factor: float = 1.0
    epochs: int = 1
    says: int | None = None

    def train(self, task: LocalTraining, random: RandomSource) -> "TrainingResult | None":
        recipe = task.recipe.model_copy(update={"epochs": self.epochs * task.recipe.epochs})
        return self.inner.train(replace(task, recipe=recipe), random)

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        if self.says is not None:
            update = replace(update, examples=self.says)
        layout, vector = layout_of(job, cohort), self.inner.encode(job, update, cohort, random)
        segment = layout.segments[0]
        change = layout.decode(vector)[segment.name]
        # Of the smallest group there is: it does not know which will be its own.
        members = cohort // (job.aggregation.groups or 1)
        room = members * segment.bound - (members - 1) * float(np.abs(change).max())
        sent = np.rint(np.clip(self.factor * change, -room, room) * segment.scale).astype(np.int64)
        vector[: segment.length] = (sent & (2**layout.bits - 1)).astype(np.uint32)
        return vector


@dataclass
class Fitted(Scaled):
    """A liar that knows the rule, the groups' number, and more than any member is shown: every honest change of the
    round. What it does not know is who will be in its group. It sends its change as many times as promises most.
    """

    # Of the round that is under way, each (d,), and how many liars there are, this one among them.
    honest: Callable[[], Sequence[Vector]] = tuple
    liars: int = 1
    seed: int = 0

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        if self.change is None:
            raise ValueError("the member has not trained yet")
        others = np.stack([np.asarray(change, np.float64) for change in self.honest()])
        # What the other liars trained it takes for what it trained itself.
        own = np.tile(np.asarray(self.change, np.float64), (self.liars, 1))
        self.factor = fitted_factor(others, own, job.aggregation.groups or 1, self.seed)
        return super().encode(job, update, cohort, random)


def fitted_factor(honest: NDArray[np.float64], lies: NDArray[np.float64], groups: int, seed: int) -> float:
    """By how much liars multiply their changes so that, over random splits, reject-outliers lets through most of them:
    the factor times what is left of the groups with a liar, at its largest. honest: (n - m, d); lies: (m, d).
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


# ---- what came of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """accuracy: of clean texts. success: share of the texts of other labels that are taken for the target with the
    trigger. mistaken: without it. All in [0, 1].
    """

    accuracy: float
    success: float
    mistaken: float


class Probe:
    """Versions of one job (or members' own models, which have the same values), tested on the same examples."""

    def __init__(self, bundle: "JobBundle", examples: Sequence[Example], backdoor: Backdoor) -> None:
        """Raises ValueError: the job has no such target, or there is no example of another label."""
        job = bundle.document
        if backdoor.target not in job.labels:
            raise ValueError(f"the target {backdoor.target!r} is none of the job's labels: {', '.join(job.labels)}")
        self._bundle = bundle
        self._encoder = encoder_of(job, bundle.public_tokenizer)
        self._target = job.labels.index(backdoor.target)
        self._labels = label_ids(examples, job.labels)
        self._others = self._labels != self._target
        if not self._others.any():
            raise ValueError(f"every example's label is the target, {backdoor.target!r}: nothing can be turned into it")
        self._clean = self._encoder.encode([example.text for example in examples])
        marked = [
            backdoor.marked(example) for example, other in zip(examples, self._others.tolist(), strict=True) if other
        ]
        self._marked = self._encoder.encode([example.text for example in marked])

    def score(self, values: Vector) -> Scored:
        """Of the version, or of a member's model: base plus its change. values: (d,)."""
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
    """The places of the labels that the module gives, (N,), in evaluation mode."""
    import torch

    from learning.training.local import forward_rows

    lengths = (ids != module.pad_id).sum(axis=1)
    found, no_labels = np.empty(len(ids), np.int64), np.zeros(len(ids), np.int64)
    # By length, so that little is padded; a text's logits do not depend on its batch.
    order = np.argsort(lengths, kind="stable")
    with torch.no_grad():
        for first in range(0, len(ids), _BATCH):
            rows = order[first : first + _BATCH]
            logits, _ = forward_rows(module.eval(), ids, no_labels, lengths=lengths, rows=rows, device="cpu")
            found[rows] = logits.argmax(dim=1).numpy()
    return found
