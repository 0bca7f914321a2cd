"""Trained quality of FedPrompt: the cells, how each is trained, and what is written down of it.

Guarantees: a rate is chosen by `--search` on validation rows and nothing else is; the test rows are scored after every
round and nothing is chosen by what comes out; accuracies are those of the last round. What a cell trains is the
product's: `train_update` of every member, its protection and encoding, `next_version`. Two kinds are no job of its:

    centralised    `edge_client.training.local.train` on the pooled rows, as many steps in all as the members take
                   together, under one optimiser that never starts anew
    frozen         the linear head alone, on states of the frozen network that are worked out once; each member's head
                   trained by Adam, the heads' mean weighted by rows, in plain numbers and not in the ring

How members take `steps` local steps a round: `fedprompt_setup.portions`.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from benchmarks.fedprompt_setup import (
    BATCH,
    CACHE,
    LABELS,
    HeadRecipe,
    Partitioned,
    Sst2,
    accuracy,
    backbone_folder,
    dealt,
    head_facts,
    portion_rows,
    portions,
    prompted_bundle,
    sst2,
)
from benchmarks.record import RESULTS, Figure, Results, read_lines, spread
from benchmarks.simulation import Member, backbone_of, corpora_of, play_round
from benchmarks.virtual_members import SeededRandom
from edge_client.data import Example
from secure_agg import packed_size
from tacit.job import Aggregation, JobSpec, Precision, Rounds, Training, VocabularyFile
from tacit.mechanism import LaplaceUpdate
from tacit.model import PromptedModel, TransformerModel
from tacit.server_optimiser import FedAvgMServer
from tacit.vector import layout_of

if TYPE_CHECKING:
    from torch import Tensor

    from export.bundle import JobBundle

__all__ = [
    "BENCH",
    "MODULES",
    "PARTS",
    "SEARCH",
    "Cell",
    "Rate",
    "Recipe",
    "SearchUnfinished",
    "cells_of",
    "measure",
    "rate_of",
    "run",
    "search",
]

BENCH, SEARCH = "fedprompt", "fedprompt_search"
MODULES: tuple[str, ...] = (
    "fedprompt_quality.py",
    "fedprompt_setup.py",
    "simulation.py",
    "virtual_members.py",
    "partitions.py",
)
PARTS = ("head", "quality", "tokens", "steps", "laplace", "methods", "momentum")
SEEDS = (0, 1, 2)
# What prompts are to lie within of centralised prompt tuning.
POINTS = 0.03
DELTA = 1e-5

Vector = NDArray[np.float32]
Task = Literal["classification", "cloze"]
Injected = Literal["prompt-tuning", "p-tuning", "prefix-tuning", "lora"]
Method = Injected | Literal["fine-tuning", "frozen", "centralised"]
_INJECTED: Mapping[str, Injected] = {
    "prompt-tuning": "prompt-tuning",
    "p-tuning": "p-tuning",
    "prefix-tuning": "prefix-tuning",
    "lora": "lora",
}
# A version of what is trained, on the rows of this part: the share that is right.
Score = Callable[[Literal["validation", "test"]], float]

# SST-2 under BERT-base, per cent: tables I, II, IV, V and VI. Figure 6 (local steps) is a drawing without numbers.
_EQUAL, _DIRICHLET = 90.16, 89.45
_TOKENS = {1: 87.11, 5: 89.28, 10: 89.62, 20: _EQUAL}
_FINE_TUNING, _LAPLACE, _P_TUNING = 91.02, 85.73, 90.99

# The rates that `--search` tries; where it was not run, the first. The paper's for prompts is 0.3, all under Adam.
RATES: Mapping[Method, tuple[float, ...]] = {
    "prompt-tuning": (0.3, 0.1, 0.03, 0.01, 0.003),
    "centralised": (0.3, 0.1, 0.03, 0.01, 0.003),
    "p-tuning": (0.001, 0.01, 0.0001),
    "prefix-tuning": (0.03, 0.1, 0.01),
    "lora": (0.001, 0.003, 0.0003),
    "fine-tuning": (5e-5, 1e-4, 2e-5, 3e-4),
    "frozen": (0.01, 0.1, 0.001),
}
_LEAST_OF_CLOZE = 0.03
# Under `laplace-update` L1 bounds of a change, which are searched in place of the rate; and epsilons of one round.
BOUNDS = (100.0, 10.0, 1000.0)
EPSILONS = (1000.0, 100.0, 10.0)
# Under `fedavgm` the share of the last step that goes on, which is searched in place of the rate.
MOMENTA = (0.9, 0.7, 0.5)


@dataclass(frozen=True)
class Recipe:
    """What all cells have in common. rows, scored: of the training rows and of each part that is scored, at most.
    precision: of frozen networks while prompts are trained; a step takes half as long where there is AMX.
    """

    members: int = 10
    rounds: int = 15
    precision: Precision = "bfloat16"
    rows: int | None = None
    scored: int | None = None
    head: HeadRecipe = field(default_factory=HeadRecipe)
    cache: Path = CACHE


@dataclass(frozen=True)
class Cell:
    """One training. steps: of each member in each round. epsilon: of one round under `laplace-update`; None: no
    noise. server: what the coordinator makes of the mean change.
    """

    method: Method
    task: Task = "classification"
    partition: Partitioned | Literal["pooled"] = "equal"
    tokens: int | None = 20
    steps: int = 40
    epsilon: float | None = None
    server: Literal["fedavg", "fedavgm"] = "fedavg"

    @property
    def case(self) -> dict[str, Any]:
        """The keys that name it in the results."""
        found: dict[str, Any] = {"method": self.method, "backbone": "minilm", "task": self.task}
        found |= {"partition": self.partition, "tokens": self.tokens, "steps": self.steps}
        if self.server != "fedavg":
            found["server"] = self.server
        return found if self.epsilon is None else found | {"mechanism": "laplace-update", "epsilon": self.epsilon}

    @property
    def paper(self) -> float | None:
        """Its accuracy of SST-2 under BERT-base, per cent, where there is one."""
        if (self.task != "cloze" and self.method != "fine-tuning") or self.server != "fedavg":
            return None
        match self:
            case Cell(method="prompt-tuning", epsilon=float()):
                return _LAPLACE if self.partition == "equal" else None
            case Cell(method="prompt-tuning", partition="equal", steps=40):
                return _TOKENS.get(self.tokens or 0)
            case Cell(method="prompt-tuning", partition="dirichlet", steps=40, tokens=20):
                return _DIRICHLET
            case Cell(method="fine-tuning", partition="equal"):
                return _FINE_TUNING
            case Cell(method="p-tuning", partition="equal"):
                return _P_TUNING
            case _:
                return None

    @property
    def prompted(self) -> bool:
        """Whether a frozen network is trained through."""
        return self.method not in ("fine-tuning", "frozen")

    @property
    def beside(self) -> "Cell":
        """The centralised training that a federated prompt is measured against."""
        return Cell("centralised", self.task, "pooled", self.tokens, self.steps)


def cells_of(part: str) -> list[Cell]:
    """The cells of a part, what others are compared with first."""
    tasks: tuple[Task, ...] = ("classification", "cloze")
    prompts = [Cell("prompt-tuning", task) for task in tasks]
    match part:
        case "quality":
            found = [
                each for prompt in prompts for each in (prompt.beside, prompt, replace(prompt, partition="dirichlet"))
            ]
            others = [Cell("frozen", tokens=None), Cell("fine-tuning", tokens=None)]
            return found + [each for other in others for each in (other, replace(other, partition="dirichlet"))]
        case "tokens":
            return [replace(prompt, tokens=tokens) for prompt in prompts for tokens in (1, 5, 10, 20)]
        case "steps":
            return [replace(prompt, steps=steps) for prompt in prompts for steps in (10, 40, 100)]
        case "laplace":
            return [replace(prompt, epsilon=epsilon) for prompt in prompts for epsilon in EPSILONS]
        case "methods":
            return [
                Cell("p-tuning"),
                Cell("prefix-tuning"),
                Cell("lora", tokens=None),
                Cell("p-tuning", "cloze"),
            ]
        case "momentum":
            return [replace(prompts[1], partition=partition, server="fedavgm") for partition in get_args(Partitioned)]
        case _:
            return []


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """What is searched. adam: of each step. bound: of a change in L1 under `laplace-update`, None without; momentum:
    under `fedavgm`, None without. adam is then what the same training with neither was found to do best with. tried:
    how many were, of what a cell searches.
    """

    adam: float
    bound: float | None = None
    momentum: float | None = None
    tried: int = 0

    @property
    def stated(self) -> dict[str, float]:
        """As the results have it."""
        found = {"learning_rate": self.adam, "bound": self.bound, "momentum": self.momentum}
        return {key: value for key, value in found.items() if value is not None}


@dataclass
class Trained:
    """A cell's training. rounds: how it is scored after each, trained as they are asked for. values: that travel in a
    round. sent: bytes of a member's packed vector, None where there is no job. backbone: the frozen network's digest.
    promised: what its noise costs.
    """

    rounds: Iterator[Score]
    values: int
    sent: int | None = None
    backbone: str | None = None
    promised: Sequence[Figure] = ()


def begun(cell: Cell, recipe: Recipe, rate: Rate, seed: int, scratch: Path) -> Trained:
    """The cell's training, not a step of it taken yet. scratch: a folder that is there until the last round's score."""
    data = _shortened(sst2(seed), recipe)
    if cell.method == "frozen":
        return _frozen(cell, recipe, rate.adam, seed, data)
    bundle = (
        _fine_tuned(recipe, rate.adam, seed, scratch)
        if cell.method == "fine-tuning"
        else _prompted(cell, recipe, rate, seed)
    )
    held = {
        part: corpora_of(bundle, [Member(rows)])[0]
        for part, rows in (("validation", data.validation), ("test", data.test))
    }

    def score(values: Vector) -> Score:
        return lambda part: accuracy(bundle, values, held[part])

    rounds = _pooled if cell.method == "centralised" else _federated
    layout = layout_of(bundle.document, recipe.members)
    model = bundle.document.model
    backbone = model.backbone.hex()[:16] if isinstance(model, PromptedModel) and model.backbone is not None else None
    central = cell.method == "centralised"
    return Trained(
        (score(values) for values in rounds(cell, recipe, bundle, data, seed)),
        0 if central else bundle.document.values,
        None if central else packed_size(layout.values, layout.bits),
        backbone,
        _promised(cell, recipe, bundle, data, seed),
    )


def _shortened(data: Sst2, recipe: Recipe) -> Sst2:
    return Sst2(data.train[: recipe.rows], data.validation[: recipe.scored], data.test[: recipe.scored])


def _dealt(cell: Cell, recipe: Recipe, data: Sst2, seed: int) -> tuple[NDArray[np.int64], ...]:
    partition: Partitioned = "equal" if cell.partition == "pooled" else cell.partition
    return dealt(len(data.train), recipe.members, partition, seed)


def _prompted(cell: Cell, recipe: Recipe, rate: Rate, seed: int) -> "JobBundle":
    kind: Literal["plain", "mlm"] = "mlm" if cell.task == "cloze" else "plain"
    mechanism = None
    if cell.epsilon is not None and rate.bound is not None:
        mechanism = LaplaceUpdate(epsilon=cell.epsilon, bound=rate.bound)
    return prompted_bundle(
        backbone_folder(kind, recipe.cache, recipe.head),
        task=cell.task,
        injection=_INJECTED.get(cell.method, "prompt-tuning"),
        tokens=cell.tokens or 1,
        steps=cell.steps,
        rounds=recipe.rounds,
        members=recipe.members,
        learning_rate=rate.adam,
        mechanism=mechanism,
        precision=recipe.precision,
        server=None if rate.momentum is None else FedAvgMServer(momentum=rate.momentum),
        seed=seed,
    )


def _fine_tuned(recipe: Recipe, rate: float, seed: int, scratch: Path) -> "JobBundle":
    from export.bundle import make_job_bundle, read_job_bundle

    base = backbone_folder("plain", recipe.cache)
    spec = JobSpec(
        name="fine-tuning",
        labels=LABELS,
        model=TransformerModel(base=str(base.resolve()), max_tokens=64),
        vocabulary=VocabularyFile(kind="wordpiece", file=str((base / "vocab.txt").resolve())),
        training=Training(batch=BATCH, learning_rate=rate),
        rounds=Rounds(count=recipe.rounds, min_members=recipe.members, target_members=recipe.members),
        aggregation=Aggregation(max_weight=65_536),
        seed=seed,
    )
    make_job_bundle(spec, scratch, scratch / "bundle")
    return read_job_bundle(scratch / "bundle")


def _federated(cell: Cell, recipe: Recipe, bundle: "JobBundle", data: Sst2, seed: int) -> Iterator[Vector]:
    """The version after each round."""
    from coordinator.rounds.optimiser import StateVectors

    members = [Member([data.train[at] for at in rows]) for rows in _dealt(cell, recipe, data, seed)]
    corpora, values = corpora_of(bundle, members), bundle.manifest.decode(bundle.weights)
    server = bundle.document.server
    state = StateVectors(server, len(values))
    for number in range(1, recipe.rounds + 1):
        here = portions(corpora, number, cell.steps, seed)
        done = play_round(bundle, values, members, here, number, SeededRandom(f"{seed}/{number}"), state)
        values, state = done.values, StateVectors(server, len(values), state.after)
        yield values


def _pooled(cell: Cell, recipe: Recipe, bundle: "JobBundle", data: Sst2, seed: int) -> Iterator[Vector]:
    """What stands after each round's worth of steps of one training on all rows."""
    import torch

    from edge_client.models.assembly import assembled
    from edge_client.training.local import Progress, train

    torch.set_num_threads(1)
    (whole,) = corpora_of(bundle, [Member(data.train)])
    each = cell.steps * recipe.members
    read = portions([whole], 1, each * recipe.rounds, seed)[0].read()
    job, manifest = bundle.document, bundle.manifest
    module, division = assembled(job, whole, manifest, manifest.decode(bundle.weights), {}, backbone_of(bundle))
    found: list[Vector] = []

    def keep(at: Progress) -> None:
        if at.step % each == 0:
            found.append(manifest.flatten(division.shared(module)).copy())

    train(module, read.ids, read.labels, job.training, seed=seed, progress=keep)
    yield from found


def _frozen(cell: Cell, recipe: Recipe, rate: float, seed: int, data: Sst2) -> Trained:
    """A linear layer over the mean of the frozen network's states."""
    states = _states(recipe, seed, len(data.train), len(data.test))
    held = _dealt(cell, recipe, data, seed)
    labels = _places(data.train)

    def rounds() -> Iterator[Score]:
        import torch

        weight, bias = torch.zeros(len(LABELS), states["train"].shape[1]), torch.zeros(len(LABELS))
        for number in range(1, recipe.rounds + 1):
            start = weight, bias
            trained = [
                _head_steps(
                    states["train"], labels, rows[portion_rows(len(rows), place, number, cell.steps, seed)], start, rate
                )
                for place, rows in enumerate(held)
            ]
            shares = torch.tensor([len(rows) / len(data.train) for rows in held])
            weight, bias = (
                torch.tensordot(shares, torch.stack(list(each)), dims=1) for each in zip(*trained, strict=True)
            )
            yield _linear_score(states, {"validation": data.validation, "test": data.test}, weight, bias)

    return Trained(rounds(), (states["train"].shape[1] + 1) * len(LABELS))


def _places(rows: Sequence[Example]) -> "Tensor":
    """(N,): places of the labels."""
    import torch

    return torch.tensor([LABELS.index(each.label or "") for each in rows])


def _head_steps(
    states: "Tensor", labels: "Tensor", order: NDArray[np.int64], start: "tuple[Tensor, Tensor]", rate: float
) -> "tuple[Tensor, Tensor]":
    """A member's head after going over these rows once, in this order."""
    import torch
    from torch.nn import functional

    weight, bias = (each.clone().requires_grad_(True) for each in start)
    optimiser = torch.optim.Adam([weight, bias], lr=rate)
    for first in range(0, len(order), BATCH):
        here = torch.from_numpy(order[first : first + BATCH])
        optimiser.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(functional.linear(states[here], weight, bias), labels[here])
        torch.autograd.backward(loss)
        optimiser.step()
    return weight.detach(), bias.detach()


def _linear_score(
    states: "Mapping[str, Tensor]", rows: Mapping[str, Sequence[Example]], weight: "Tensor", bias: "Tensor"
) -> Score:
    def score(part: Literal["validation", "test"]) -> float:
        found = (states[part] @ weight.T + bias).argmax(dim=1)
        return float((found == _places(rows[part])).double().mean())

    return score


@lru_cache(maxsize=1)
def _states(recipe: Recipe, seed: int, rows: int, scored: int) -> "dict[str, Tensor]":
    """(N, width) of each part: the mean of the text's states, without a prompt, by the product's own module."""
    import torch

    from edge_client.models.assembly import assembled
    from edge_client.prompts.model import PromptedModel as Module

    torch.set_num_threads(1)
    bundle = prompted_bundle(
        backbone_folder("plain", recipe.cache), task="classification", tokens=1, learning_rate=0.1, seed=seed
    )
    data, found = _shortened(sst2(seed), recipe), {}
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    for part, examples in parts.items():
        (corpus,) = corpora_of(bundle, [Member(examples)])
        start = bundle.manifest.decode(bundle.weights)
        module, _ = assembled(bundle.document, corpus, bundle.manifest, start, {}, backbone_of(bundle))
        if not isinstance(module, Module):
            raise TypeError("a prompted job has a prompted module")
        ids = corpus.read().ids
        lengths = (ids != corpus.pad_id).sum(axis=1)
        order = np.argsort(lengths, kind="stable")
        states = torch.empty(len(ids), module.backbone.width)
        with torch.inference_mode():
            for first in range(0, len(ids), 64):
                here = order[first : first + 64]
                width = max(int(lengths[here].max()), module.min_tokens)
                states[torch.from_numpy(here)] = module.features(torch.from_numpy(ids[here, :width]), None)
        found[part] = states
    return found


def _promised(cell: Cell, recipe: Recipe, bundle: "JobBundle", data: Sst2, seed: int) -> list[Figure]:
    """What the noise of all rounds costs a member's ledger, and the one number that is told of it otherwise."""
    if cell.epsilon is None:
        return []
    from edge_client.privacy.accounting import epsilon_pld
    from edge_client.privacy.events import Laplace
    from edge_client.privacy.mechanisms import protection_of

    smallest = min(map(len, _dealt(cell, recipe, data, seed)))
    event = protection_of(bundle.document, smallest).event
    if not isinstance(event, Laplace):
        raise TypeError("laplace-update is a Laplace release")
    composed = epsilon_pld([event] * recipe.rounds, DELTA, "add-remove")
    more = {"rounds": recipe.rounds, "pld": None if composed is None else round(composed, 3), "delta": DELTA}
    return [
        Figure("epsilon_paper", cell.epsilon),
        Figure("epsilon_sound", cell.epsilon * recipe.rounds, more=more),
    ]


# ---- one cell -------------------------------------------------------------------------------------------------------


# Rounds at the end whose mean score stands beside the last one's: a federated version is a mean of ten, a centralised
# one a single point of a path that Adam's constant rate keeps shaking.
LATE = 5


def measure(cell: Cell, recipe: Recipe, rate: Rate, seed: int) -> list[Figure]:
    """Trains a cell and scores it after every round."""
    began, spent = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        trained = begun(cell, recipe, rate, seed, Path(scratch))
        curve: list[list[float]] = []
        for number, score in enumerate(trained.rounds, start=1):
            curve.append([number, round(score("test"), 5)])
        validation = score("validation")
    late = statistics.mean(score for _, score in curve[-LATE:])
    more: dict[str, Any] = {
        "validation": round(validation, 5),
        "late": round(late, 5),
        "recipe": {
            **rate.stated,
            "tried": rate.tried,
            "rounds": recipe.rounds,
            "members": recipe.members,
            "batch": BATCH,
            "precision": recipe.precision if cell.prompted else "float32",
        },
        "curve": curve,
    }
    if trained.backbone is not None:
        more["digest"] = trained.backbone
    if cell.paper is not None:
        more["paper"] = round(cell.paper / 100, 4)
    figures = [Figure("test_accuracy", curve[-1][1], more=more), Figure("values_per_round", trained.values)]
    if trained.sent is not None:
        figures.append(Figure("bytes_per_round", trained.sent, "B"))
    seconds = {"cpu": round(time.process_time() - spent, 1)}
    return [*figures, *trained.promised, Figure("seconds", round(time.monotonic() - began, 1), "s", more=seconds)]


def rate_of(cell: Cell, tried: Sequence[Mapping[str, Any]]) -> Rate:
    """The rate (or the bound or the momentum, and the rate of the same without either) with the highest validation
    accuracy of those that `--search` tried for such a cell, the first of equal ones; the first of RATES where it tried
    none.

    Raises:
        SearchUnfinished: it tried some and not all.
    """
    wanted = searched_as(cell).case
    found = [line for line in tried if {**line["case"], "rate": None} == {**wanted, "rate": None}]
    choices = choices_of(cell)
    if found and {float(line["case"]["rate"]) for line in found} < set(choices):
        raise SearchUnfinished(f"{len(found)} of {len(choices)} rates are tried for {wanted}; run --search to its end")
    best = float(max(found, key=lambda line: float(line["value"]))["case"]["rate"]) if found else choices[0]
    return _with(cell, best, tried, len(found))


def _with(cell: Cell, chosen: float, tried: Sequence[Mapping[str, Any]], number: int = 0) -> Rate:
    """The rate of a cell for which `chosen`, one of `choices_of` it, was chosen among so many."""
    if cell.epsilon is None and cell.server == "fedavg":
        return Rate(chosen, tried=number)
    adam = rate_of(replace(cell, epsilon=None, server="fedavg"), tried).adam
    if cell.epsilon is None:
        return Rate(adam, momentum=chosen, tried=number)
    return Rate(adam, bound=chosen, tried=number)


class SearchUnfinished(Exception):
    """A choice among some of the rates would be one for good: what is measured is not measured again."""


def choices_of(cell: Cell) -> tuple[float, ...]:
    """What `--search` tries for it. A cloze's prompts begin on a plateau, which small rates do not leave in a trial."""
    if cell.epsilon is not None:
        return BOUNDS
    if cell.server != "fedavg":
        return MOMENTA
    rates = RATES[cell.method]
    return tuple(rate for rate in rates if rate >= _LEAST_OF_CLOZE) if _is_plain_cloze(cell) else rates


def _is_plain_cloze(cell: Cell) -> bool:
    return cell.task == "cloze" and cell.method in ("prompt-tuning", "centralised")


def searched_as(cell: Cell) -> Cell:
    """The cell whose search is its own: equal members, 40 steps, and 20 tokens or none. A bound is searched for each
    epsilon.
    """
    tokens = None if cell.tokens is None else 20
    return replace(cell, partition="pooled" if cell.partition == "pooled" else "equal", tokens=tokens, steps=40)


# ---- running --------------------------------------------------------------------------------------------------------


def run(
    results: Results,
    *,
    seeds: Sequence[int],
    quick: bool,
    until: float | None,
    parts: Sequence[str] = ("quality",),
    workers: int = 1,
    wanted: Callable[[Cell], bool] = lambda _: True,
) -> None:
    """The cells of these parts that this code has not measured, all of a seed before the next.

    until: of `time.monotonic()`; no cell begins after it. workers: processes, each of which has a cell of its own.
    wanted: which cells of these parts.
    """
    tried = [] if quick else searched()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        recipe = _quick(Path(scratch)) if quick else Recipe()
        if "head" in parts:
            fit(results, recipe)
        found = (cell for part in parts if part != "head" for cell in (_QUICK if quick else cells_of(part)))
        cells = list(dict.fromkeys(filter(wanted, found)))
        # What several would else make at once.
        if any(cell.task == "cloze" for cell in cells):
            backbone_folder("mlm", recipe.cache, recipe.head)
        backbone_folder("plain", recipe.cache)
        for seed in seeds:
            left = [cell for cell in cells if not results.done(cell.case, seed)]
            for cell, figures in _measured(left, recipe, tried, seed, until, workers):
                results.open(seeds)
                results.add(cell.case, [_against(results, cell, each, seed) for each in figures], seed=seed)
            for cell in cells:
                summarise(results, cell)


def _measured(
    cells: Sequence[Cell],
    recipe: Recipe,
    tried: Sequence[Mapping[str, Any]],
    seed: int,
    until: float | None,
    workers: int,
) -> Iterator[tuple[Cell, list[Figure]]]:
    """Each as soon as it is measured; one that fails is raised once all others are."""
    limit = math.inf if until is None else until
    if workers == 1:
        for cell in cells:
            if time.monotonic() > limit:
                return
            yield cell, measure(cell, recipe, rate_of(cell, tried), seed)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(_unless_late, cell, recipe, rate_of(cell, tried), seed, limit): cell for cell in cells}
        failed: list[BaseException] = []
        for job in as_completed(jobs):
            if (error := job.exception()) is not None:
                # The others' hours are not to be lost with it.
                print(f"failed: {jobs[job]}: {error!r}", flush=True)
                failed.append(error)
            elif (figures := job.result()) is not None:
                yield jobs[job], figures
        if failed:
            raise failed[0]


def _unless_late(cell: Cell, recipe: Recipe, rate: Rate, seed: int, until: float) -> list[Figure] | None:
    return None if time.monotonic() > until else measure(cell, recipe, rate, seed)


def _against(results: Results, cell: Cell, figure: Figure, seed: int) -> Figure:
    """With the centralised accuracy of the same seed beside it, where that was measured, and what is to be reached.
    By the same code if there is one (it may be another process' cell), else by the last that measured it.
    """
    if figure.name != "test_accuracy" or cell.method != "prompt-tuning" or cell.epsilon is not None:
        return figure
    lines = results.lines if results.path is None else read_lines(results.path)
    wanted = {"case": cell.beside.case, "seed": seed, "figure": "test_accuracy"}
    found = [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]
    if not found:
        return figure
    found.sort(key=lambda line: line["code"] == results.code)
    value, late = found[-1]["value"], found[-1]["late"]
    beside = {"centralised": value, "centralised_late": late, "target": round(max(value, late) - POINTS, 5)}
    return replace(figure, more={**figure.more, **beside})


def summarise(results: Results, cell: Cell) -> None:
    """The mean of each figure over the seeds, once all of them are there."""
    by_seed = [{line["figure"]: line for line in results.done(cell.case, seed)} for seed in SEEDS]
    if results.done(cell.case) or not all(by_seed):
        return
    figures = []
    for name, first in by_seed[0].items():
        lines = [found[name] for found in by_seed]
        more: dict[str, Any] = {
            key: first[key] for key in ("paper", "recipe", "rounds", "pld", "delta") if key in first
        }
        for key in ("validation", "late", "centralised", "centralised_late", "target", "cpu"):
            if all(key in line for line in lines):
                more[key] = round(statistics.mean(line[key] for line in lines), 5)
        values = [line["value"] for line in lines]
        figures.append(Figure(name, round(statistics.mean(values), 5), first["unit"], more={**more, **spread(values)}))
    results.add(cell.case, figures)


def fit(results: Results, recipe: Recipe) -> None:
    """The head for masked words: fitted if it is not there, and what it was worth when it was."""
    case = {"method": "head", "backbone": "minilm"}
    if results.done(case, recipe.head.seed):
        return
    facts = head_facts(backbone_folder("mlm", recipe.cache, recipe.head))
    results.open([recipe.head.seed])
    more = {key: facts[key] for key in ("masked_loss", "commonest_word", "steps", "curve", "places", "recipe")}
    figures = [
        Figure("masked_accuracy", facts["masked_accuracy"], more=more),
        Figure("seconds", facts["seconds"], "s", more={"cpu": facts["cpu_seconds"]}),
    ]
    results.add(case, figures, seed=recipe.head.seed)


# ---- what was chosen, and by what -----------------------------------------------------------------------------------

# A fraction of a cell: what is compared is how a rate begins. A cloze begins on a plateau of a hundred steps and more,
# whatever the rate: longer, with fewer members.
_TRIAL = Recipe(members=4, rounds=3)
_CLOZE_TRIAL = Recipe(members=3, rounds=6)
# Momentum works over rounds: six of them would tell how it begins, and not where it goes.
_MOMENTUM_TRIAL = Recipe(members=3)
_TEMPLATES = ("{text} It was {mask}.", "{text} is {mask}.")
_WORDS = (("terrible", "great"), ("bad", "good"))


def searched() -> list[dict[str, Any]]:
    """What was tried, with whatever code: a choice that was made stays made. To choose anew, delete the file."""
    lines = read_lines(RESULTS / f"{SEARCH}.jsonl")
    return [line for line in lines if line.get("figure") == "validation_accuracy" and "rate" in line["case"]]


def earlier_search(code: str) -> Results:
    """The file of `search`, whatever code its lines are of."""
    path = RESULTS / f"{SEARCH}.jsonl"
    return Results(SEARCH, code, path, [line for line in read_lines(path) if "figure" in line])


def search(
    results: Results, parts: Sequence[str], *, until: float | None, wanted: Callable[[Cell], bool] = lambda _: True
) -> None:
    """Validation accuracies of other rates, and of other words before any training; nothing of it sees a test row."""
    limit = math.inf if until is None else until
    cells = list(dict.fromkeys(searched_as(cell) for part in parts for cell in cells_of(part) if wanted(cell)))
    if any(cell.task == "cloze" for cell in cells):
        _search_words(results)
    for cell in cells:
        for rate in choices_of(cell):
            case = {**cell.case, "rate": rate}
            if results.done(case, 0):
                continue
            if time.monotonic() > limit:
                return
            results.open([0])
            # Raises SearchUnfinished: the rate of the same without noise or momentum comes first.
            results.add(case, [_trial(cell, _recipe_of_trial(cell), _with(cell, rate, searched()))], seed=0)


def _recipe_of_trial(cell: Cell) -> Recipe:
    if cell.server != "fedavg":
        return _MOMENTUM_TRIAL
    return _CLOZE_TRIAL if cell.task == "cloze" else _TRIAL


def _trial(cell: Cell, recipe: Recipe, rate: Rate) -> Figure:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        *_, score = begun(cell, recipe, rate, 0, Path(scratch)).rounds
        value = score("validation")
    more = {"rounds": recipe.rounds, "members": recipe.members, "seconds": round(time.monotonic() - began, 1)}
    return Figure("validation_accuracy", round(value, 5), more=more)


def _search_words(results: Results) -> None:
    """How a cloze answers with the prompt that every job starts from."""
    backbone = backbone_folder("mlm")
    for template in _TEMPLATES:
        for words in _WORDS:
            case = {"method": "untrained", "task": "cloze", "template": template, "words": list(words)}
            if results.done(case, 0):
                continue
            spoken = {label: (word,) for label, word in zip(LABELS, words, strict=True)}
            bundle = prompted_bundle(backbone, task="cloze", learning_rate=0.3, template=template, words=spoken)
            (corpus,) = corpora_of(bundle, [Member(sst2(0).validation)])
            value = accuracy(bundle, bundle.manifest.decode(bundle.weights), corpus)
            results.open([0])
            results.add(case, [Figure("validation_accuracy", round(value, 5))], seed=0)


# ---- a small case ---------------------------------------------------------------------------------------------------

_SMALL: Mapping[str, Any] = {"tokens": 4, "steps": 2}
_QUICK = (
    Cell("centralised", partition="pooled", **_SMALL),
    Cell("prompt-tuning", partition="dirichlet", **_SMALL),
    Cell("prompt-tuning", "cloze", epsilon=1000.0, **_SMALL),
    Cell("frozen", tokens=None, steps=2),
    Cell("fine-tuning", tokens=None, steps=2),
)


def _quick(folder: Path) -> Recipe:
    """Four members of few rows; a head that has seen next to nothing."""
    head = HeadRecipe(rows=40, held=8, batch=32, steps=4, look=2)
    return Recipe(members=4, rounds=2, rows=400, scored=48, head=head, cache=folder)
