"""A cell of the benchmark of models that write: its recipes, its training and its figures.

The recipe of a cell is the one of `recipes_of` with the least loss on validation rows; of equals, the first. Without
noise, each is trained in full. With noise, each is rehearsed on validation rows alone, so an epsilon covers all that
members' rows decide. A cell with one recipe has what E2E's rows chose: a full training takes an hour of a core.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generation.data import DATASETS, Data, read_pairs
from benchmarks.generation.measuring import answers_of, exposure_of, extracted_of, token_figures_of
from benchmarks.generation.training import Method, Planned, Played, Recipe, Trained, start_of
from benchmarks.library.record import Figure, Results, device_name
from export.answer_figures import Estimate
from learning.accounting.planning import noise_to_signal
from secure_agg import packed_size
from tacit.mechanism import DpSgd
from tacit.vector import layout_of

__all__ = ["BENCH", "REVISION", "SEARCH", "SEED", "Bench", "Cell", "cells_of", "recipes_of"]

BENCH, SEARCH = "generation", "generation_search"
REVISION = 1
SEED = 0
# What E2E's validation rows chose, for MedQuAD.
_CHOSEN: dict[Method, float] = {"lora": 2e-3, "ffa-lora": 5e-3, "centralised": 1e-3}
# With noise: what E2E's rows choose from at epsilon 8, and what they chose, for all other cells. A rank of 1 has an
# eighth of the values that noise hits.
_NOISED = Recipe(0.4, rank=1, optimiser="sgd", rounds=4, steps=3)
_REHEARSED: dict[Method, list[Recipe]] = {
    "ffa-lora": [
        replace(_NOISED, learning_rate=2.0),
        *(replace(_NOISED, rank=8, learning_rate=rate) for rate in (3.0, 6.0, 10.0)),
    ],
    "lora": [replace(_NOISED, learning_rate=rate) for rate in (0.2, 0.4)],
    # The mean gradient of 30 rows for a prefix has norm 0.6. On 60 other validation rows a step of norm 2.3 lowers the
    # loss most, from 2.56 to 2.06 nats, and one of 9 raises it.
    "prompt": [replace(_NOISED, learning_rate=1.0)],
}
_CHOSEN_NOISED: dict[Method, Recipe] = {
    "ffa-lora": replace(_NOISED, rank=8, learning_rate=6.0),
    "lora": _NOISED,
    "prompt": replace(_NOISED, learning_rate=1.0),
}
# MedQuAD's members are smaller, so noise costs them more, and a row takes twice as long. With half the steps, the noise
# of all steps together is 0.0087 clips in place of 0.0145. E2E's members bear 0.0073.
_LONG_ROUNDS = 2
_REHEARSED_LONG = [
    replace(_CHOSEN_NOISED["ffa-lora"], rounds=_LONG_ROUNDS, learning_rate=rate) for rate in (3.0, 6.0, 10.0)
]
# Validation rows that a rehearsal trains on, all of them in each step. Its loss is that of the others.
REHEARSED = 32
# Validation rows of a trial. Fewer than test rows, since only differences of one model's recipes are looked at.
TRIED = 100


@dataclass(frozen=True)
class Cell:
    """One training. epsilon: None adds no noise. member: of a local cell, whose alone it is."""

    dataset: str
    method: Method
    epsilon: float | None = None
    member: str | None = None

    @property
    def case(self) -> dict[str, Any]:
        """The keys of the case in the results."""
        many = 1 if self.method in ("zero-shot", "local", "centralised") else len(read_pairs(self.dataset).members)
        return {
            "dataset": self.dataset,
            "method": self.method,
            "epsilon": "none" if self.epsilon is None else self.epsilon,
            "members": many,
            **({} if self.member is None else {"member": self.member}),
        }


def cells_of(datasets: Sequence[str], methods: Sequence[str], epsilons: Sequence[float | None]) -> list[Cell]:
    """Return the cells in the order in which they are measured: what a goal needs first, prompts and epsilon 3 last."""
    plain: list[tuple[Method, float | None]] = [
        ("zero-shot", None),
        ("local", None),
        ("lora", None),
        ("ffa-lora", None),
        ("ffa-lora", 8.0),
        ("centralised", None),
    ]
    last: list[tuple[Method, float | None]] = [
        ("ffa-lora", 3.0),
        ("lora", 8.0),
        ("prompt", None),
        ("prompt", 8.0),
        ("prompt", 3.0),
        ("lora", 3.0),
    ]
    found = [
        Cell(dataset, method, epsilon, member)
        for group in (plain, last)
        for dataset in datasets
        for method, epsilon in group
        if method in methods and epsilon in epsilons
        for member in (_alone(dataset) if method == "local" else [None])
    ]
    return found


def _alone(dataset: str) -> list[str | None]:
    """The members that train alone: one of equal ones, and each of unlike ones."""
    names: list[str | None] = list(read_pairs(dataset).members)
    return names[:1] if DATASETS[dataset].members else names


def recipes_of(cell: Cell) -> list[Recipe]:
    """Return the recipes that a cell chooses from. MedQuAD's rows are longer, so there are fewer of them."""
    long = cell.dataset == "medquad"
    if cell.method == "zero-shot":
        return []
    if cell.epsilon is None:
        base = Recipe(1e-3, rows=96 if long else 192)
        if long and cell.method in _CHOSEN:
            return [replace(base, learning_rate=_CHOSEN[cell.method])]
        rates = {"ffa-lora": (2e-3, 5e-3), "prompt": (5e-3, 2e-2), "centralised": (5e-4, 1e-3)}
        return [replace(base, learning_rate=rate) for rate in rates.get(cell.method, (1e-3, 2e-3))]
    if long and (cell.method, cell.epsilon) == ("ffa-lora", 8.0):
        return _REHEARSED_LONG
    if not long and cell.epsilon == 8.0:
        return _REHEARSED[cell.method]
    chosen = _CHOSEN_NOISED[cell.method]
    return [replace(chosen, rounds=_LONG_ROUNDS) if long else chosen]


@dataclass(frozen=True)
class Bench:
    """Where cells are measured.

    Args:
        base: the backbone's folder.
        folder: keeps jobs' backbones while cells are measured.
        versions: keeps trained versions: a chosen trial is not trained again, and answers can be measured later. A
            training that was stopped goes on after its last round.
        until: when to start no further training (monotonic seconds).
        rows: of test and validation at most, for a small case.
        quick: recipes in place of a cell's own, for a small case.
        device: where members train and losses are computed, from `pick_device`.
    """

    results: Results
    searched: Results
    base: Path
    folder: Path
    versions: Path
    until: float = math.inf
    rows: int | None = None
    quick: tuple[Recipe, ...] = ()
    device: str = "cpu"

    def out_of_time(self) -> bool:
        """Tell whether no further training may start."""
        return time.monotonic() > self.until

    def train(self, cell: Cell, recipe: Recipe) -> Trained:
        """Train a cell with a recipe, or read it if it was trained before."""
        words = json.dumps({**cell.case, **recipe.as_json(cell.method, cell.epsilon), "revision": REVISION})
        kept = self.versions / f"{_slug(cell)}-{hashlib.sha256(words.encode()).hexdigest()[:12]}.npz"
        planned = self._planned(cell, recipe, read_pairs(cell.dataset), cell.member)
        if kept.exists():
            with np.load(kept) as found:
                return planned.with_values(found["values"], found["norms"].tolist(), int(found["seconds"]))
        self.versions.mkdir(parents=True, exist_ok=True)
        rounds = kept.with_suffix(".rounds.npz")
        made = planned.trained(self.device, _begun(rounds), lambda played: _save(rounds, **vars(played)))
        _save(kept, values=made.values, norms=made.lengths, seconds=made.seconds)
        rounds.unlink(missing_ok=True)
        return made

    def rehearse(self, cell: Cell, recipe: Recipe) -> Trained:
        """Train on a few validation rows, with the noise that the mean of all members' updates would have."""
        data = read_pairs(cell.dataset)
        own = self._planned(cell, recipe, data).multipliers
        # Independent noises of members add up in squares. A multiplier counts in clips of one row of a lot.
        multiplier = REHEARSED / recipe.lot * math.sqrt(sum(each**2 for each in own)) / len(own)
        rows = replace(data, members={"validation": data.validation[:REHEARSED]}, canaries={})
        planned = self._planned(cell, replace(recipe, lot=REHEARSED), rows, "validation", multiplier)
        return planned.trained(self.device)

    def _planned(
        self, cell: Cell, recipe: Recipe, data: Data, member: str | None = None, multiplier: float | None = None
    ) -> Planned:
        words = (cell.dataset, data, cell.method, cell.epsilon, recipe, SEED)
        return Planned.of(*words, base=self.base, folder=self.folder, alone=member, multiplier=multiplier)

    def recipes(self, cell: Cell) -> list[Recipe]:
        """Return the recipes that a cell chooses from."""
        return list(self.quick) or recipes_of(cell)

    def choose(self, cell: Cell) -> Recipe | None:
        """Return the recipe of a cell, after trying those that are not tried yet; None if time ran out."""
        recipes = self.recipes(cell)
        if len(recipes) == 1:
            return recipes[0]
        found: dict[float, Recipe] = {}
        for recipe in recipes:
            loss = self.tried(cell, recipe)
            if loss is None:
                return None
            found.setdefault(loss, recipe)
        return found[min(found)]

    def is_tried(self, cell: Cell, recipe: Recipe) -> bool:
        """Tell whether a recipe was tried."""
        return bool(self.searched.done(_trial(cell, recipe), SEED))

    def tried(self, cell: Cell, recipe: Recipe) -> float | None:
        """Return the loss on validation rows of a trial, which is run if it was not yet; None if time ran out."""
        case = _trial(cell, recipe)
        if not self.is_tried(cell, recipe):
            if self.out_of_time():
                return None
            self.searched.open([SEED])
            rows = read_pairs(cell.dataset).validation
            if cell.epsilon is None:
                made, rows = self.train(cell, recipe), rows[:TRIED]
            else:
                made, rows = self.rehearse(cell, recipe), rows[REHEARSED:]
            loss = token_figures_of(made.bundle, made.values, rows, self.device).loss
            more = {"seconds": made.seconds, "device": device_name(self.device)}
            self.searched.add(case, [Figure("validation_loss", round(loss.value, 5), "nats", more)], seed=SEED)
        (line,) = self.searched.done(case, SEED)
        return float(line["value"])

    def measure(self, cell: Cell) -> None:
        """Measure a cell if it is not measured yet."""
        if self.results.done(cell.case, SEED) or self.out_of_time():
            return
        if cell.method == "zero-shot":
            recipe, made = None, start_of(cell.dataset, self.base, self.folder)
        else:
            recipe = self.choose(cell)
            if recipe is None or self.out_of_time():
                return
            made = self.train(cell, recipe)
        self.results.open([SEED])
        more: dict[str, Any] = {} if recipe is None else {"recipe": recipe.as_json(cell.method, cell.epsilon)}
        more |= {"trained_values": made.bundle.document.values, "rows": made.rows, "seconds": made.seconds}
        more |= {"device": device_name(self.device), **_noise(made)}
        self.results.add(cell.case, [*self._losses(cell, made, more), *self._remembered(cell, made)], seed=SEED)

    def answer(self, cell: Cell) -> None:
        """Let a measured cell's exported version answer, if it has not answered yet."""
        done = {line["figure"] for line in self.results.done(cell.case, SEED)}
        if "loss_per_token" not in done or "bleu" in done or self.out_of_time():
            return
        if cell.method == "zero-shot":
            made = start_of(cell.dataset, self.base, self.folder)
        else:
            recipe = self.choose(cell)
            if recipe is None:
                return
            made = self.train(cell, recipe)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            asked = read_pairs(cell.dataset).answered[: self.rows]
            found, speed = answers_of(made.bundle, made.values, asked, Path(scratch) / "model")
        more = {"answers": found.answers, "exact_match": found.exact_match.value}
        self.results.open([SEED])
        self.results.add(
            cell.case,
            [
                Figure("bleu", round(found.bleu.value, 3), more={**_interval(found.bleu), **more}),
                Figure("rouge_l", round(found.rouge_l.value, 5), more={**_interval(found.rouge_l), **more}),
                Figure("tokens_per_second", round(speed, 2), "1/s"),
            ],
            seed=SEED,
        )

    def _losses(self, cell: Cell, made: Trained, more: dict[str, Any]) -> list[Figure]:
        found = token_figures_of(made.bundle, made.values, read_pairs(cell.dataset).test[: self.rows], self.device)
        beside = {
            **_interval(found.loss),
            "perplexity": round(found.perplexity.value, 3),
            "token_accuracy": round(found.accuracy.value, 4),
            "test_rows": found.rows,
            "test_tokens": found.tokens,
            **more,
        }
        figures = [Figure("loss_per_token", round(found.loss.value, 5), "nats", beside)]
        if cell.method not in ("zero-shot", "local", "centralised"):
            layout = layout_of(made.bundle.document, cell.case["members"])
            size = packed_size(layout.values, layout.bits)
            figures.append(Figure("upload_bytes", size, "B", {"measured": False, "bits": layout.bits}))
        return figures

    def _remembered(self, cell: Cell, made: Trained) -> list[Figure]:
        planted = read_pairs(cell.dataset).canaries
        # A member alone has its own canary, or none.
        canaries = [each for name, each in planted.items() if cell.member in (None, name)]
        if not canaries:
            return []
        found = exposure_of(made.bundle, made.values, canaries, device=self.device)
        more = {
            "low": round(found.mean_low, 3),
            "high": round(found.mean_high, 3),
            "canaries": len(canaries),
            "each": [round(each, 2) for each in found.sampled.tolist()],
            "extrapolated": [round(each, 1) for each in found.extrapolated.tolist()],
            "fit": [round(each, 3) for each in found.fit.tolist()],
        }
        said = extracted_of(made.bundle, made.values, canaries, device=self.device)
        return [
            Figure("exposure", round(found.mean, 4), "bits", more),
            Figure("extracted", sum(said), more={"canaries": len(canaries), "each": [int(each) for each in said]}),
        ]


def _begun(path: Path) -> Played | None:
    if not path.exists():
        return None
    with np.load(path) as found:
        lengths = [(trained, sent) for trained, sent in found["lengths"].tolist()]
        return Played(int(found["rounds"]), found["values"], lengths, float(found["seconds"]))


def _save(path: Path, **arrays: Any) -> None:
    half = path.with_suffix(".part.npz")
    np.savez(half, **arrays)
    half.replace(path)


def _noise(made: Trained) -> dict[str, Any]:
    """The noise of a cell, and its ratio to the signal in the mean of a round's updates."""
    mechanism = made.bundle.document.mechanism
    if not isinstance(mechanism, DpSgd):
        return {}
    many = len(made.multipliers)
    found = [
        noise_to_signal(mechanism.model_copy(update={"noise_multiplier": each}), made.bundle.document.values, rows)
        for each, rows in zip(made.multipliers, made.sizes, strict=True)
    ]
    return {
        "noise_multiplier": [round(min(made.multipliers), 4), round(max(made.multipliers), 4)],
        # Independent noises of members add up in squares.
        "noise_to_signal": round(math.sqrt(sum(each**2 for each in found)) / many, 4),
        "update_norm": round(made.lengths[0], 5),
        "sent_norm": round(made.lengths[1], 5),
    }


def _interval(found: Estimate) -> dict[str, Any]:
    return {"low": round(found.low, 5), "high": round(found.high, 5)}


def _trial(cell: Cell, recipe: Recipe) -> dict[str, Any]:
    return {**cell.case, "recipe": recipe.as_json(cell.method, cell.epsilon)}


def _slug(cell: Cell) -> str:
    return "-".join(str(each) for each in cell.case.values()).replace(" ", "_")
