"""What synthetic texts are worth, and how near they come to real ones.

One classifier for everybody: a small BiLSTM over GloVe, whose table is frozen. It is trained on a union of made-up
texts in one place, on the real texts in one place (what there is to be had), or federatedly with DP-SGD
(`library.simulation`). Which epoch or round counts is chosen on validation rows, in all of them alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.simulation import Member, federate
from benchmarks.library.virtual_members import seed_of
from benchmarks.synthesis.setup import GLOVE, Task, multiplier_for
from learning.accounting.events import PrivacyEvent
from learning.mechanisms.protection import protection_of
from learning.synthesis.quality import canaries_reproduced, longest_verbatim, ngram_overlap
from learning.text.corpus import EncodedExamples
from learning.text.data import Example
from secure_agg import RandomSource
from tacit.job import Aggregation, JobSpec, Rounds, Training, VocabularyFile
from tacit.mechanism import DpSgd, Mechanism, NoMechanism
from tacit.model import BiLSTMModel

if TYPE_CHECKING:
    from export.bundle import JobBundle

__all__ = [
    "ClassifierRecipe",
    "Distance",
    "Fitted",
    "Judge",
    "classifier_bundle",
    "distance_of",
    "fit_centrally",
    "fit_federatedly",
    "majority_accuracy",
]

Vector = NDArray[np.float32]

_WIDTH = 50


@dataclass(frozen=True)
class ClassifierRecipe:
    """epochs, rate: in one place. rounds, steps, lot, clip, private_rate: federatedly under DP-SGD. plain_rounds:
    without noise, an epoch each, at `rate`.
    """

    hidden: int = 16
    pooling: Literal["max", "mean"] = "mean"
    max_tokens: int = 40
    epochs: int = 6
    batch: int = 32
    rate: float = 0.002
    rounds: int = 20
    steps: int = 5
    lot: int = 256
    clip: float = 0.5
    optimiser: Literal["adam", "sgd"] = "sgd"
    private_rate: float = 8.0
    plain_rounds: int = 20

    def as_json(self) -> dict[str, Any]:
        """As it stands in results: what was tried."""
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "lot": self.lot,
            "clip": self.clip,
            "optimiser": self.optimiser,
            "learning_rate": self.private_rate,
        }


@dataclass(frozen=True)
class Fitted:
    """A classifier at its best epoch or round by validation rows. values: (d,). curve: (epoch or round, validation,
    test). events: what a member's ledger was charged for it.
    """

    values: Vector
    best: int
    validation: float
    test: float
    curve: tuple[tuple[int, float, float], ...]
    events: tuple[PrivacyEvent, ...] = ()


def classifier_bundle(
    task: Task,
    recipe: ClassifierRecipe,
    seed: int,
    folder: Path,
    *,
    members: int,
    mechanism: Mechanism | None = None,
) -> "JobBundle":
    """The classifier as a job of so many members; in `folder`."""
    from export.bundle import make_job_bundle, read_job_bundle

    training = Training(batch=recipe.batch, learning_rate=recipe.rate)
    rounds = recipe.plain_rounds
    if mechanism is not None:
        rounds = recipe.rounds
        training = Training(batch=256, optimiser=recipe.optimiser, learning_rate=recipe.private_rate)
    spec = JobSpec(
        name=f"{task.name}-classifier",
        labels=task.labels,
        model=BiLSTMModel(
            embedding=_WIDTH,
            hidden=recipe.hidden,
            pooling=recipe.pooling,
            dropout=0.0 if mechanism else 0.5,
            freeze_embedding=True,
            max_tokens=recipe.max_tokens,
        ),
        training=training,
        mechanism=mechanism or NoMechanism(),
        rounds=Rounds(count=rounds, min_members=members, target_members=members),
        aggregation=Aggregation(max_weight=1000),
        vocabulary=VocabularyFile(kind="words", file=str(GLOVE), pretrained=str(GLOVE)),
        seed=seed,
    )
    make_job_bundle(spec, folder, folder / "bundle")
    return read_job_bundle(folder / "bundle")


class Judge:
    """A classifier's job, and the task's validation and test rows as it reads them."""

    def __init__(self, bundle: "JobBundle", task: Task) -> None:
        from learning.models import build_blank

        self.bundle, self._task = bundle, task
        self._read = {
            part: self.corpus(rows).read() for part, rows in (("validation", task.validation), ("test", task.test))
        }
        empty = self.corpus([])
        self.module = build_blank(bundle.document.model, empty.vocabulary_size, len(task.labels), empty.pad_id)

    def corpus(self, examples: Sequence[Example]) -> EncodedExamples:
        """These rows, as the job reads them."""
        return EncodedExamples(examples, self.bundle.document, self.bundle.public_tokenizer)

    def load(self, values: Vector) -> None:
        """Puts values, (d,), into the module."""
        from learning.models import load_shared

        load_shared(self.module, self.bundle.parameters(values))

    def values(self) -> Vector:
        """The module's shared ones, (d,)."""
        from learning.models import division_of

        division = division_of(self.bundle.document.method, self.module)
        return self.bundle.manifest.flatten(division.shared(self.module))

    def scores(self) -> tuple[float, float]:
        """Accuracy of the module as it stands, on validation and on test rows."""
        from learning.training.local import evaluate

        validation, test = (
            evaluate(self.module, read.ids, read.labels).accuracy
            for read in (self._read["validation"], self._read["test"])
        )
        return validation, test

    def agreement(self, values: Vector, examples: Sequence[Example]) -> float:
        """Share of these rows to which the classifier gives the label that stands beside them; nan without rows."""
        from learning.training.local import evaluate

        if not examples:
            return float("nan")
        self.load(values)
        read = self.corpus(examples).read()
        return evaluate(self.module, read.ids, read.labels).accuracy


def fit_centrally(judge: Judge, examples: Sequence[Example], recipe: ClassifierRecipe, seed: int) -> Fitted:
    """Plain training of the bundle's classifier on these rows, in one place.

    Raises:
        ValueError: no rows.
    """
    from learning.training.local import train

    judge.load(judge.bundle.manifest.decode(judge.bundle.weights))
    read = judge.corpus(examples).read()
    once = Training(batch=recipe.batch, learning_rate=recipe.rate)
    curve, values = [], []
    for epoch in range(1, recipe.epochs + 1):
        train(judge.module, read.ids, read.labels, once, seed=seed_of("central", seed, epoch))
        curve.append((epoch, *judge.scores()))
        values.append(judge.values())
    return _best(curve, values, ())


def fit_federatedly(
    task: Task,
    parts: Sequence[Sequence[Example]],
    recipe: ClassifierRecipe,
    epsilon: float | None,
    seed: int,
    folder: Path,
    random: RandomSource | None = None,
) -> tuple[Fitted, Judge]:
    """The same classifier by members with these rows. epsilon: of each of them, at DELTA; None: without noise.

    Raises:
        NotAffordable: no noise is enough for this epsilon.
    """
    smallest = min(map(len, parts))
    mechanism = None
    if epsilon is not None:
        lot = min(recipe.lot, smallest)
        multiplier = multiplier_for(epsilon, lot, recipe.rounds * recipe.steps, smallest)
        mechanism = DpSgd(noise_multiplier=multiplier, clip=recipe.clip, lot=lot, steps=recipe.steps)
    bundle = classifier_bundle(task, recipe, seed, folder, members=len(parts), mechanism=mechanism)
    judge = Judge(bundle, task)
    job = bundle.document
    curve, values = [], []
    for done in federate(bundle, [Member(part) for part in parts], job.rounds.count, random):
        judge.load(done.values)
        curve.append((done.number, *judge.scores()))
        values.append(done.values)
    event = protection_of(job, smallest).event
    events = () if event is None else (event.model_copy(update={"steps": event.steps * job.rounds.count}),)
    return _best(curve, values, events), judge


def _best(
    curve: Sequence[tuple[int, float, float]], values: Sequence[Vector], events: tuple[PrivacyEvent, ...]
) -> Fitted:
    """The first of the best by validation: the test is looked at for what was chosen, and chooses nothing."""
    at = max(range(len(curve)), key=lambda place: curve[place][1])
    number, validation, test = curve[at]
    return Fitted(values[at], number, validation, test, tuple(curve), events)


def majority_accuracy(task: Task) -> float:
    """Of naming the training rows' commonest label everywhere, on test rows."""
    label = task.labels[int(task.counts(task.train).argmax())]
    return sum(each.label == label for each in task.test) / len(task.test)


# ---- how near made-up texts come to real ones -----------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """overlap: share of runs of one to four words that stand in the training texts. longest: words of the longest such
    run. planted: made-up texts with a planted one in them. verbatim: share of made-up texts that are a training text.
    """

    overlap: tuple[float, ...]
    longest: int
    planted: int
    verbatim: float


def distance_of(made: Sequence[str], training: Sequence[str], planted: Sequence[str]) -> Distance:
    """Signs of what made-up texts owe to these training texts (`learning.synthesis.quality`)."""
    from learning.synthesis.quality import words_of

    known = {words_of(text) for text in training}
    return Distance(
        tuple(ngram_overlap(made, training, n) for n in (1, 2, 3, 4)),
        longest_verbatim(made, training).words,
        sum(canaries_reproduced(made, planted)),
        float(np.mean([words_of(text) in known for text in made])) if made else float("nan"),
    )


def with_planted(
    parts: Sequence[Sequence[Example]], planted: Sequence[str], labels: Sequence[str]
) -> list[list[Example]]:
    """Each member's rows, and one planted text more, under a label of its place."""
    return [
        [*part, Example(text, labels[place % len(labels)])]
        for place, (part, text) in enumerate(zip(parts, planted, strict=True))
    ]


def shortened(task: Task, rows: int) -> Task:
    """The same task with the first rows alone."""
    return replace(task, train=task.train[:rows], validation=task.validation[:rows], test=task.test[:rows])
