"""Trains a cell by the product's members, one after another, at a true epsilon or without noise.

A member runs the product's `train_update`, its protection and its encoding, and the sums go through the ring and the
coordinator's arithmetic (`library.simulation`). One member alone, and all rows in one place, take no part in a sum: the
update is the product's, added to the version in plain numbers.

Without noise a member trains once on the next `rows` of its rows in each round, since a cell has no time for all of
them. Centralised training has the same rows of all members in each round; one member alone has its own, as in the
federation. With noise a member draws lots from all of its rows, and the noise multiplier is what `edge_client privacy
plan` names for its gate at epsilon: the smallest with which an empty ledger admits all rounds. If members differ in
size, each has its own multiplier, as the product lets it.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.generation.data import COPIES, DATASETS, Data, Pair, shuffled
from benchmarks.library.simulation import Member, alone, corpora_of, play_round
from learning.accounting.planning import Setting, rows_of
from learning.mechanisms.protection import OwnNumbers
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.text.turns import Dialogue
from simulation.virtual_members import SeededRandom
from tacit.bundle import BACKBONE_FILE
from tacit.job import Aggregation, JobDocument, JobSpec, Rounds, Training
from tacit.mechanism import DpSgd, NoMechanism
from tacit.model import PromptedModel
from tacit.prompt import Generate, Injection, LoRA, PrefixTuning

if TYPE_CHECKING:
    from export.bundle import JobBundle

__all__ = [
    "DELTA",
    "METHODS",
    "Method",
    "Planned",
    "Played",
    "Recipe",
    "Trained",
    "job_of",
    "multiplier_at",
    "start_of",
]

Vector = NDArray[np.float32]
Method = Literal["zero-shot", "local", "lora", "ffa-lora", "prompt", "centralised"]
METHODS: tuple[Method, ...] = ("zero-shot", "local", "lora", "ffa-lora", "prompt", "centralised")

DELTA = 1e-5
# Rows of a lot that are in memory at once: some 6 GB of a GPU with MedQuAD's longest.
PIECE = 64


@dataclass(frozen=True)
class Recipe:
    """What is chosen on validation rows.

    Args:
        rank, last_layers: of LoRA on queries and values; None changes all layers.
        tokens: of a prefix.
        rows: of a member in a round, without noise. At most a member's rows divided by the rounds.
        lot, steps, clip: of dp-sgd.
    """

    learning_rate: float
    rank: int = 8
    last_layers: int | None = None
    tokens: int = 8
    optimiser: Literal["adamw", "sgd"] = "adamw"
    batch: int = 8
    rounds: int = 5
    rows: int = 192
    lot: int = 64
    steps: int = 4
    clip: float = 1.0

    def as_json(self, method: Method, epsilon: float | None) -> dict[str, Any]:
        """Return what of the recipe has a part in a cell."""
        left_out = {"rank", "last_layers"} if method == "prompt" else {"tokens"}
        left_out |= {"lot", "steps", "clip"} if epsilon is None else {"rows", "batch"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True)
class Trained:
    """A trained cell.

    Attributes:
        bundle: The job.
        values: The last version, (d,).
        sizes: The rows of each member, of which it trains on some in a round.
        multipliers: The noise multiplier of each member; empty without noise.
        rows: The rows of all members and rounds, counted as often as they were trained on. With noise, as expected.
        lengths: The mean norm of a member's update over its rounds: as trained, and as sent.
        seconds: Of its training, by the clock.
    """

    bundle: "JobBundle"
    values: Vector
    sizes: Sequence[int] = ()
    multipliers: Sequence[float] = ()
    rows: int = 0
    lengths: tuple[float, float] = (0.0, 0.0)
    seconds: int = 0


@dataclass(frozen=True)
class Played:
    """How far a training is.

    Attributes:
        rounds: How many are over.
        values: The version after them, (d,).
        lengths: Norms of each member's update in each round, as trained and as sent, (n, 2).
        seconds: That they took, by the clock.
    """

    rounds: int
    values: Vector
    lengths: Sequence[tuple[float, float]] = ()
    seconds: float = 0.0


@cache
def job_of(dataset: str, injection: Injection, base: Path, folder: Path) -> "JobBundle":
    """Make a job without a mechanism over the base, and read it, by the product's own code.

    Args:
        folder: must exist as long as the bundle is used. All jobs in it share the backbone's file.
    """
    from export.bundle import make_job_bundle, read_job_bundle

    known = DATASETS[dataset]
    spec = JobSpec(
        name="generation",
        model=PromptedModel(
            base=str(base.resolve()),
            injection=injection,
            task=Generate.model_validate({"template": "chatml", "max_new_tokens": known.max_new_tokens}),
            dropout=0.0,
            max_tokens=known.max_tokens,
        ),
        aggregation=Aggregation(),
    )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        make_job_bundle(spec, folder, Path(scratch) / "bundle")
        bundle = read_job_bundle(Path(scratch) / "bundle")
        if bundle.backbone is None:
            raise TypeError("a prompted job has a backbone")
        kept = folder / BACKBONE_FILE
        if not kept.exists():
            bundle.backbone.rename(kept)
    return replace(bundle, backbone=kept)


def injection_of(method: Method, recipe: Recipe) -> Injection:
    """Return what a method trains."""
    if method == "prompt":
        return PrefixTuning(tokens=recipe.tokens)
    return LoRA(rank=recipe.rank, last_layers=recipe.last_layers, train="up" if method == "ffa-lora" else "both")


def start_of(dataset: str, base: Path, folder: Path) -> Trained:
    """Return the base as it is: LoRA starts as no change."""
    bundle = job_of(dataset, LoRA(train="up"), base, folder)
    return Trained(bundle, bundle.manifest.decode(bundle.weights))


@cache
def multiplier_at(epsilon: float, lot: int, steps: int, rounds: int, examples: int) -> float:
    """Return the multiplier that `plan` names for a member's gate.

    Raises:
        ValueError: no noise is enough.
    """
    asked = DpSgd(noise_multiplier=1.0, clip=1.0, lot=lot, steps=steps)
    (row,) = rows_of(asked, Setting(examples, rounds, DELTA), [epsilon])
    if row.gate is None:
        raise ValueError(f"no noise is enough for epsilon {epsilon:g}; take fewer steps")
    return row.gate


@dataclass(frozen=True)
class Planned:
    """A cell that is ready to train: its job, and what each member trains on in each round."""

    bundle: "JobBundle"
    parts: Sequence[Sequence[Sequence[Example]]]
    multipliers: Sequence[float]
    recipe: Recipe
    seed: int

    @classmethod
    def of(
        cls,
        dataset: str,
        data: Data,
        method: Method,
        epsilon: float | None,
        recipe: Recipe,
        seed: int,
        *,
        base: Path,
        folder: Path,
        alone: str | None = None,
        multiplier: float | None = None,
    ) -> Self:
        """Plan a cell.

        Args:
            data: of the data set.
            epsilon: of each member's gate. None adds no noise.
            base: the backbone's folder.
            folder: keeps the job's backbone.
            alone: the member of a local cell.
            multiplier: of the noise, in place of what the gate at epsilon asks for.
        """
        bundle = job_of(dataset, injection_of(method, recipe), base, folder)
        names = list(data.members) if alone is None else [alone]
        parts = [_rounds_of(data, name, recipe, epsilon) for name in names]
        if method == "centralised":
            parts = [[[row for part in parts for row in part[at]] for at in range(recipe.rounds)]]
        sizes = [len(part[0]) for part in parts]
        multipliers = [] if epsilon is None else [multiplier or _multiplier(epsilon, recipe, size) for size in sizes]
        # One member alone is in no sum, and its job asks for three all the same, as every job does.
        many = max(len(parts), 3)
        training = {
            "optimiser": recipe.optimiser,
            "learning_rate": recipe.learning_rate,
            # Under dp-sgd it only bounds the rows in memory.
            "batch": recipe.batch if epsilon is None else PIECE,
            # A job with noise may keep its matrices in bfloat16; these cells were measured without.
            "precision": "bfloat16" if epsilon is None else "float32",
            "schedule": {"decay": "cosine"},
        }
        mechanism: NoMechanism | DpSgd = NoMechanism()
        if multipliers:
            lot = min(recipe.lot, *sizes)
            mechanism = DpSgd(noise_multiplier=min(multipliers), clip=recipe.clip, lot=lot, steps=recipe.steps)
        changes = {
            "training": Training.model_validate(training),
            "mechanism": mechanism,
            "rounds": Rounds(count=recipe.rounds, min_members=many, target_members=many),
            "seed": seed,
        }
        # Read once more, so that it is a job that a member would take.
        document = JobDocument.from_json(bundle.document.model_copy(update=changes).canonical(), what="the cell's job")
        return cls(replace(bundle, document=document), parts, multipliers, recipe, seed)

    def with_values(self, values: Vector, lengths: Sequence[float], seconds: int) -> Trained:
        """Return the cell as it was trained to these values."""
        rows = sum(len(each) for part in self.parts for each in part)
        if self.multipliers:
            rows = self.recipe.lot * self.recipe.steps * self.recipe.rounds * len(self.parts)
        trained, sent = lengths
        sizes = [len(part[0]) for part in self.parts]
        return Trained(self.bundle, values, sizes, self.multipliers, rows, (trained, sent), seconds)

    def trained(
        self, device: str = "cpu", begun: Played | None = None, keep: Callable[[Played], None] = lambda _: None
    ) -> Trained:
        """Train all rounds.

        Args:
            device: where members train, from `pick_device`.
            begun: the rounds that are over. The others draw and train as they would have without a break.
            keep: called after each round.
        """
        played = begun or Played(0, self.bundle.manifest.decode(self.bundle.weights))
        own: Sequence[float | None] = self.multipliers or [None] * len(self.parts)
        corpora: list[EncodedExamples] = []
        for number in range(played.rounds + 1, self.recipe.rounds + 1):
            began, values, lengths = time.monotonic(), played.values, list(played.lengths)
            members = [
                Member(part[number - 1], OwnNumbers(noise_multiplier=one))
                for part, one in zip(self.parts, own, strict=True)
            ]
            # With noise a member has the same rows in all rounds.
            if not (corpora and self.multipliers):
                corpora = corpora_of(self.bundle, members)
            random = SeededRandom(f"{self.seed}/{number}")
            if len(members) > 1:
                done = play_round(self.bundle, values, members, corpora, number, random, device=device)
                values = done.values
                lengths += [(each.trained, each.sent) for each in done.lengths]
            else:
                seed = self.seed + number
                values = alone(self.bundle, values, members[0], corpora[0], number, random, seed=seed, device=device)
            played = Played(number, values, lengths, played.seconds + time.monotonic() - began)
            keep(played)
        norms = np.array(played.lengths or [(0.0, 0.0)]).mean(axis=0)
        return self.with_values(played.values, norms.tolist(), round(played.seconds))


def _multiplier(epsilon: float, recipe: Recipe, size: int) -> float:
    return multiplier_at(epsilon, min(recipe.lot, size), recipe.steps, recipe.rounds, size)


def _rounds_of(data: Data, name: str, recipe: Recipe, epsilon: float | None) -> list[list[Example]]:
    """A member's rows in each round, its canary's among them: all of them with noise, else the next ones."""
    rows = data.members[name]
    if epsilon is not None:
        return [_dialogues([*rows, *data.planted(name)])] * recipe.rounds
    many = min(recipe.rows, len(rows) // recipe.rounds)
    copies = COPIES // recipe.rounds
    return [
        _dialogues(shuffled([*rows[at * many : (at + 1) * many], *data.planted(name, copies)], f"{name}/{at}"))
        for at in range(recipe.rounds)
    ]


def _dialogues(rows: Sequence[Pair]) -> list[Example]:
    return [
        Example(each.prompt, None, each.response, dialogue=Dialogue.of(each.prompt, each.response)) for each in rows
    ]
