"""Judges synthetic texts by a classifier trained on them, and measures their distance from real texts.

All methods use the same classifier, a small BiLSTM over a frozen GloVe table. It is trained centrally on all synthetic
texts, centrally on the real texts (the ceiling), or federatedly with DP-SGD (`library.simulation`). Validation rows
choose the epoch or round that counts, in all of them alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.simulation import Member, federate
from benchmarks.synthesis.setup import GLOVE, Task, multiplier_for
from learning.accounting.events import PrivacyEvent
from learning.mechanisms.protection import protection_of
from learning.synthesis.quality import canaries_reproduced, longest_verbatim, ngram_overlap
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from secure_agg import RandomSource
from simulation.virtual_members import seed_of
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
    """The classifier's options.

    Args:
        epochs, rate: of central training.
        rounds, steps, lot, clip, optimiser, private_rate: of federated training under DP-SGD.
        plain_rounds: of federated training without noise, with one epoch each at `rate`.
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
        """Return the searched options as they are written in results."""
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
    """A classifier at its best epoch or round by validation rows.

    Args:
        values: (d,).
        best: the epoch or round.
        validation, test: accuracies.
        curve: (epoch or round, validation, test) of all.
        events: charges of a member's ledger.
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
    """Make the classifier's job for these members in `folder`."""
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
    """A classifier's job, with the task's validation and test rows as the job reads them."""

    def __init__(self, bundle: "JobBundle", task: Task) -> None:
        from learning.models import build_blank

        self.bundle, self._task = bundle, task
        self._read = {
            part: self.corpus(rows).read() for part, rows in (("validation", task.validation), ("test", task.test))
        }
        empty = self.corpus([])
        self.module = build_blank(bundle.document.model, empty.vocabulary_size, len(task.labels), empty.pad_id)

    def corpus(self, examples: Sequence[Example]) -> EncodedExamples:
        """Return these rows as the job reads them."""
        return EncodedExamples(examples, self.bundle.document, self.bundle.public_tokenizer)

    def load(self, values: Vector) -> None:
        """Load values, (d,), into the module."""
        from learning.models import load_shared

        load_shared(self.module, self.bundle.parameters(values))

    def values(self) -> Vector:
        """Return the module's shared values, (d,)."""
        from learning.models import division_of

        division = division_of(self.bundle.document.method, self.module)
        return self.bundle.manifest.flatten(division.shared(self.module))

    def scores(self) -> tuple[float, float]:
        """Return the accuracy of the present module on validation rows and on test rows."""
        from learning.training.local import evaluate

        validation, test = (
            evaluate(self.module, read.ids, read.labels).accuracy
            for read in (self._read["validation"], self._read["test"])
        )
        return validation, test

    def agreement(self, values: Vector, examples: Sequence[Example]) -> float:
        """Return the share of these rows whose own label the classifier answers; nan without rows."""
        from learning.training.local import evaluate

        if not examples:
            return float("nan")
        self.load(values)
        read = self.corpus(examples).read()
        return evaluate(self.module, read.ids, read.labels).accuracy


def fit_centrally(judge: Judge, examples: Sequence[Example], recipe: ClassifierRecipe, seed: int) -> Fitted:
    """Train the bundle's classifier on these rows, centrally and without noise.

    Raises:
        ValueError: there are no rows.
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
    """Train the same classifier by members with these rows.

    Args:
        epsilon: of each member, at DELTA; None adds no noise.

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
    """Return the first of the best by validation. The test is read only for the chosen one, and chooses nothing."""
    at = max(range(len(curve)), key=lambda place: curve[place][1])
    number, validation, test = curve[at]
    return Fitted(values[at], number, validation, test, tuple(curve), events)


def majority_accuracy(task: Task) -> float:
    """Return the test accuracy of always answering the training rows' most common label."""
    label = task.labels[int(task.counts(task.train).argmax())]
    return sum(each.label == label for each in task.test) / len(task.test)


# ---- distance from real texts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """The distance of synthetic texts from the training texts.

    Args:
        overlap: shares of runs of one to four words that occur in the training texts.
        longest: number of words of the longest such run.
        planted: number of synthetic texts that contain a planted one.
        verbatim: share of synthetic texts that are a training text.
    """

    overlap: tuple[float, ...]
    longest: int
    planted: int
    verbatim: float


def distance_of(made: Sequence[str], training: Sequence[str], planted: Sequence[str]) -> Distance:
    """Measure how near synthetic texts are to these training texts (`learning.synthesis.quality`)."""
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
    """Return each member's rows and one planted text more, with a label by the member's place."""
    return [
        [*part, Example(text, labels[place % len(labels)])]
        for place, (part, text) in enumerate(zip(parts, planted, strict=True))
    ]


def shortened(task: Task, rows: int) -> Task:
    """Return the task with only the first rows of each part."""
    return replace(task, train=task.train[:rows], validation=task.validation[:rows], test=task.test[:rows])
