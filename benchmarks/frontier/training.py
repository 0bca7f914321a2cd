"""Trains one cell of the frontier by the product's members, at a true epsilon or without noise.

A member runs the product's `train_update` (of a head, under `dp-sgd`, the closed form of `learning.training.head`), its
protection and its encoding; the sums go through the ring and `next_version` (`simulation`). One member alone, the
centralised training, takes no part in a sum: its update is the product's, added to the version in plain numbers.

The noise multiplier is what `edge_client privacy plan` names for the gate: the smallest with which a member's empty
ledger admits all rounds. A head's lot is the largest member's part, so that each step reads all examples of everybody.
Where the encoder changes too, a step reads 256 of them, because each one passes through the encoder again. The noise is
a member's own, and no other member's noise counts. `distributed-gaussian` bounds only the whole update, so that one
example may turn it around; its noise is larger by about 2 N / clip, and no cell uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.frontier.setup import KeptFeatures, Start, module_of
from benchmarks.library.simulation import Member, alone, correlated_steps, play_round
from learning.accounting.banded_plan import bands_of, best_of, with_band
from learning.accounting.calibration import calibrate
from learning.accounting.costs import rate_of
from learning.accounting.events import PrivacyEvent, SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.planning import Setting, rows_of
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.text.persons import persons_of, population_of
from learning.training.head import LinearHead
from learning.training.kept import Kept
from learning.training.local import evaluate
from simulation.partitions import by_ratios
from simulation.suggestion import MAX_RATE
from simulation.virtual_members import SeededRandom
from tacit.job import Rounds, Training
from tacit.mechanism import DpSgd, NoMechanism, PersonRows
from tacit.model import PromptedModel as PromptedJob

if TYPE_CHECKING:
    from export.bundle import JobBundle

__all__ = [
    "DELTA",
    "LOT",
    "MAX_EXAMPLES",
    "START",
    "FrontierUnit",
    "Recipe",
    "Trained",
    "accuracy_of",
    "candidates",
    "inner_candidates",
    "lot_candidates",
    "multiplier_at",
    "short_candidates",
    "trained",
    "whole_candidates",
]

Vector = NDArray[np.float32]

FrontierUnit = Literal["example", "person"]

DELTA = 1e-5
# Rows of a person that a draw uses: all of nearly every abstract of CSAbstruct.
MAX_EXAMPLES = 16
# Examples of a step where lots are not full: an eighth of a member's part of TREC among three.
LOT = 225
_LOT_STEPS, _LOT_ROUNDS = 12, 10
# Steps of a round where they are short, beside the 6 of `Recipe`.
_SHORT_STEPS = 24
# Place among the candidates of the first that is tried.
START = 2


@dataclass(frozen=True)
class Recipe:
    """What is searched.

    Args:
        steps: of a member in a round, under dp-sgd. Without noise, epochs.
        clip: of dp-sgd; chosen in docs/heads.md.
    """

    start: Start = "labels"
    optimiser: str = "sgd"
    learning_rate: float = 30.0
    steps: int = 6
    rounds: int = 5
    clip: float = 0.3
    # Examples in a step under dp-sgd. None: all.
    lot: int | None = None
    batch: int = 256
    # Whether noise is correlated, with the bands from 2 on that `privacy plan` finds best.
    correlated: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the recipe as it is written in results."""
        # What a recipe does not say is what it says by default, so that a new field leaves measured cells as they are.
        new = {"lot", "batch", "correlated"}
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in new or getattr(self, each.name) != each.default
        }


@dataclass(frozen=True)
class Trained:
    """A trained cell: its accuracy, and the noise multiplier of its mechanism, None without noise."""

    accuracy: float
    noise_multiplier: float | None
    values: int
    band: int = 1


def lot_candidates(epsilon: float, *, correlated: bool) -> list[Recipe]:
    """Return the recipes of a head whose steps read LOT examples, by ascending rate: as far as with full lots."""
    steps = _LOT_STEPS * _LOT_ROUNDS
    return [
        replace(
            each,
            learning_rate=each.learning_rate * each.steps * each.rounds / steps,
            steps=_LOT_STEPS,
            rounds=_LOT_ROUNDS,
            lot=LOT,
            correlated=correlated,
        )
        for each in candidates(epsilon)
    ]


def candidates(epsilon: float | None) -> list[Recipe]:
    """Return the recipes that may be tried at an epsilon, from the shortest way that a head may go to the longest.

    Under full lots, the noise that adds up depends on rate times clip times steps and on nothing else, and so does how
    far a head gets. So that product is searched, by the rate. A larger epsilon pays for a longer way.
    """
    if epsilon is None:
        return [Recipe(optimiser="adam", learning_rate=0.03, steps=epochs, rounds=2) for epochs in (15, 40, 100, 250)]
    shortest = 15.0 * epsilon
    rates = (shortest * times for times in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0))
    return [Recipe(learning_rate=rate) for rate in rates if rate <= MAX_RATE]


def short_candidates(epsilon: float) -> list[Recipe]:
    """Return the recipes of a head with four times as many steps, from half the way of `candidates` on.

    Where labels overlap, gradients do not vanish near the optimum, and long steps over all rows swing around it. A way
    costs the same noise in any number of steps.
    """
    shortest = 15.0 / 8 * epsilon
    rates = (shortest * times for times in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0))
    return [Recipe(learning_rate=rate, steps=_SHORT_STEPS) for rate in rates if rate <= MAX_RATE]


def inner_candidates(epsilon: float | None) -> list[Recipe]:
    """Return the recipes that may be tried where something inside the encoder is trained, by ascending rate."""
    rates = (0.0003, 0.001, 0.003, 0.01, 0.03)
    if epsilon is None:
        return [_inner(rate, steps=1, rounds=4, batch=32) for rate in rates]
    return [_inner(rate, steps=10, rounds=4, lot=256) for rate in rates]


def whole_candidates() -> list[Recipe]:
    """Return the recipes of the whole encoder's training without noise, by ascending rate."""
    return [_inner(rate, steps=1, rounds=4, batch=32) for rate in (2e-5, 5e-5, 1e-4, 2e-4, 5e-4)]


def _inner(rate: float, *, steps: int, rounds: int, lot: int | None = None, batch: int = 256) -> Recipe:
    return Recipe("labels", "adam", rate, steps, rounds, clip=1.0, lot=lot, batch=batch)


@cache
def banded_at(epsilon: float, recipe: Recipe, examples: int, lot: int) -> DpSgd:
    """Return the mechanism with correlated noise of least error, of those with two bands or more.

    Raises:
        ValueError: the lot leaves no room for two bands.
    """
    asked = DpSgd(noise_multiplier=1.0, clip=recipe.clip, lot=lot, steps=recipe.steps)
    # No round of a simulation fails.
    rows = bands_of(asked, examples, recipe.rounds, Limit(epsilon, DELTA), spare=0)[1:]
    if not rows:
        raise ValueError(f"lots of {lot} leave no room for two bands among {examples} examples")
    banded = with_band(asked, best_of(rows).band, recipe.rounds, spare=0)

    def event(multiplier: float) -> PrivacyEvent:
        drawn = -(-recipe.steps * recipe.rounds // banded.band)
        return SampledGaussian(multiplier=multiplier, rate=rate_of(banded, examples), steps=drawn)

    return banded.model_copy(update={"noise_multiplier": calibrate(event, 1, Limit(epsilon, DELTA))})


@cache
def multiplier_at(epsilon: float, recipe: Recipe, examples: int, lot: int) -> float:
    """Return the multiplier that `plan` names for a member's gate. The learning rate does not change it.

    Raises:
        ValueError: no noise is enough.
    """
    asked = DpSgd(noise_multiplier=1.0, clip=recipe.clip, lot=lot, steps=recipe.steps)
    (row,) = rows_of(asked, Setting(examples, recipe.rounds, DELTA), [epsilon])
    if row.gate is None:
        raise ValueError(f"no noise is enough for epsilon {epsilon:g}; take fewer steps")
    return row.gate


def trained(
    bundle: "JobBundle",
    train: Sequence[Example],
    scored: Sequence[Example],
    members: int,
    epsilon: float | None,
    recipe: Recipe,
    seed: int,
    store: KeptFeatures,
    device: str = "cpu",
    unit: FrontierUnit = "example",
) -> Trained:
    """Train a recipe with equal members, and score the last version.

    Args:
        bundle: of the recipe's start.
        members: 1 is centralised training.
        epsilon: of a member's gate. None adds no noise.
        seed: deals the rows, and seeds draws and noise.
        device: where members train and the version is scored, from `pick_device`.
        unit: what dp-sgd protects. Persons are dealt whole, so that none is in two members' data.
    """
    people = persons_of(train) if unit == "person" else np.arange(len(train))
    dealt = by_ratios(int(people.max()) + 1, [1.0] * members, seed).members
    parts = [Member([train[at] for at in np.flatnonzero(np.isin(people, whose)).tolist()]) for whose in dealt]
    sizes = [population_of(part.examples, unit) for part in parts]
    asked = {"optimiser": recipe.optimiser, "learning_rate": recipe.learning_rate, "batch": recipe.batch}
    mechanism: DpSgd | NoMechanism = NoMechanism()
    if epsilon is None:
        asked["epochs"] = recipe.steps
    else:
        lot = min(recipe.lot or max(sizes), max(sizes))
        rows = PersonRows(max_examples=MAX_EXAMPLES) if unit == "person" else None
        if recipe.correlated:
            mechanism = banded_at(epsilon, recipe, min(sizes), lot)
        else:
            multiplier = multiplier_at(epsilon, replace(recipe, learning_rate=1.0), min(sizes), lot)
            mechanism = DpSgd(
                noise_multiplier=multiplier, clip=recipe.clip, lot=lot, steps=recipe.steps, unit=unit, person=rows
            )
        if device == "cuda" and recipe.lot:
            # `batch` only bounds the examples in memory. A GPU takes as long for a part of a lot as for all of it.
            asked["batch"] = 2 * recipe.lot
    many = max(members, 2)
    changes = {
        "training": Training.model_validate(asked),
        "mechanism": mechanism,
        "rounds": Rounds(count=recipe.rounds, min_members=many, target_members=many),
        "seed": seed,
    }
    here = replace(bundle, document=bundle.document.model_copy(update=changes))
    corpora = [store.corpus(here, part.examples) for part in parts]
    if isinstance(here.document.model, PromptedJob) and here.document.model.caches_features:
        for corpus in corpora:
            store.of(here, corpus, device)
    values = _rounds(here, parts, corpora, seed, device)
    noise, band = (mechanism.noise_multiplier, mechanism.band) if isinstance(mechanism, DpSgd) else (None, 1)
    return Trained(accuracy_of(here, values, scored, store, device), noise, here.document.values, band)


def _rounds(
    bundle: "JobBundle", parts: Sequence[Member], corpora: Sequence[EncodedExamples], seed: int, device: str
) -> Vector:
    values = bundle.manifest.decode(bundle.weights)
    keys = SeededRandom(f"{seed}/classes")
    steps = [correlated_steps(bundle.document, len(part.examples), keys) for part in parts]
    # A head is trained without a module around it that nothing would use.
    kept = Kept()
    for number in range(1, bundle.document.rounds.count + 1):
        random = SeededRandom(f"{seed}/{number}")
        if len(parts) > 1:
            done = play_round(bundle, values, parts, corpora, number, random, device=device, steps=steps, kept=kept)
            values = done.values
        else:
            values = alone(
                bundle,
                values,
                parts[0],
                corpora[0],
                number,
                random,
                seed=seed,
                device=device,
                correlated=steps[0],
                kept=kept,
            )
    return values


def _head_of(bundle: "JobBundle", values: Vector) -> LinearHead:
    """Return the head of a version, in memory of its own. Next to centred features no bias is trained."""
    named = {**bundle.manifest.unflatten(values), **bundle.frozen}
    trains_bias = "output.bias" not in bundle.frozen
    return LinearHead(named["output.weight"].copy(), named["output.bias"].copy(), trains_bias)


def accuracy_of(
    bundle: "JobBundle", values: Vector, scored: Sequence[Example], store: KeptFeatures, device: str = "cpu"
) -> float:
    """Return the accuracy of a version on rows, whose features are read from `store`."""
    job, corpus = bundle.document.model, store.corpus(bundle, scored)
    read = corpus.read()
    if isinstance(job, PromptedJob) and job.caches_features:
        found = _head_of(bundle, values).logits(store.of(bundle, corpus, device)).argmax(axis=1)
        return float((found == read.labels).mean())
    return evaluate(module_of(bundle, values), read.ids, read.labels, device=device).accuracy
