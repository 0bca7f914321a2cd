"""Trains a cell of FedPrompt's trained quality, version after version, each trained and scored on demand.

A cell trains with the product: `train_update` of every member, its protection and encoding, and `next_version`. Two
kinds are not jobs of the product:

    centralised    `learning.training.local.train` on the pooled rows, with as many steps as all members make together,
                   by one optimiser that is never reset
    frozen         only the linear head, on states of the frozen network that are computed once; each member's head is
                   trained by Adam, and the heads' mean is weighted by rows, in plain numbers instead of the ring

`setup.portions` gives members their `steps` local steps a round.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.record import Figure
from benchmarks.library.simulation import Member, backbone_of, corpora_of, play_round
from benchmarks.prompts.cells import SERVER_RATE, Cell, Injected, Rate, Recipe
from benchmarks.prompts.setup import (
    BATCH,
    LABELS,
    Partitioned,
    Sst2,
    accuracy,
    backbone_folder,
    dealt,
    portion_rows,
    portions,
    prompted_bundle,
    sst2,
)
from learning.text.examples import Example
from secure_agg import packed_size
from simulation.virtual_members import SeededRandom
from tacit.job import Aggregation, JobSpec, Rounds, Training, VocabularyFile
from tacit.mechanism import LaplaceUpdate
from tacit.model import PromptedModel, TransformerModel
from tacit.server_optimiser import FedAvgMServer
from tacit.vector import layout_of

if TYPE_CHECKING:
    from torch import Tensor

    from export.bundle import JobBundle

__all__ = ["Score", "Trained", "begun"]

DELTA = 1e-5

Vector = NDArray[np.float32]
# Returns the accuracy of a version on the rows of a part.
Score = Callable[[Literal["validation", "test"]], float]
_INJECTED: Mapping[str, Injected] = {
    "prompt-tuning": "prompt-tuning",
    "p-tuning": "p-tuning",
    "prefix-tuning": "prefix-tuning",
    "lora": "lora",
}


@dataclass
class Trained:
    """A cell's training.

    Args:
        rounds: yields a scorer after each round, which is trained on demand.
        values: number of values sent in a round.
        sent: bytes of a member's packed vector; None without a job.
        backbone: digest of the frozen network.
        promised: figures of the privacy cost.
    """

    rounds: Iterator[Score]
    values: int
    sent: int | None = None
    backbone: str | None = None
    promised: Sequence[Figure] = ()


def begun(cell: Cell, recipe: Recipe, rate: Rate, seed: int, scratch: Path) -> Trained:
    """Return the cell's training, before its first step. scratch: a folder that must exist until the last score."""
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
        server=None if rate.momentum is None else FedAvgMServer(learning_rate=SERVER_RATE, momentum=rate.momentum),
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
    """Yield the version after each round."""
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
    """Train once on all rows, and yield the values after each round's number of steps."""
    import torch

    from learning.models.assembly import assembled
    from learning.training.local import Progress, train

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
    """Train a linear layer over the mean of the frozen network's states."""
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
    """Return the indices of the labels, (N,)."""
    import torch

    return torch.tensor([LABELS.index(each.label or "") for each in rows])


def _head_steps(
    states: "Tensor", labels: "Tensor", order: NDArray[np.int64], start: "tuple[Tensor, Tensor]", rate: float
) -> "tuple[Tensor, Tensor]":
    """Return a member's head after training once on these rows, in this order."""
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
    """Return the mean of each text's states without a prompt, (N, width) for each part, by the product's module."""
    import torch

    from learning.models.assembly import assembled
    from learning.prompts.model import PromptedModel as Module

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
    """Return the epsilon of all rounds in a member's ledger, and the epsilon of one round that the paper would name."""
    if cell.epsilon is None:
        return []
    from learning.accounting.events import Laplace
    from learning.accounting.spend import epsilon_pld
    from learning.mechanisms.protection import protection_of

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
