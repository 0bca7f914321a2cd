"""Local training: one member, its own data, one round. Read it from top to bottom.

Guarantees: the same module, data, recipe and seed give the same weights on the same machine, whatever else
draws random numbers in the process; an optimiser starts new every round (no state that saw the data outlives
it); a diverged training raises and returns nothing. It logs nothing and knows neither text nor labels' names.

Leaves to others: the update (new minus base), clipping, noise, and how many threads torch may use.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from edge_client.models import TextClassifier
from tacit.job import Training

__all__ = [
    "Progress",
    "Scores",
    "TrainingCancelled",
    "TrainingDiverged",
    "TrainingResult",
    "check_examples",
    "evaluate",
    "forward_rows",
    "make_optimiser",
    "train",
]

Ids = NDArray[np.int64]

# A batch goes through the model in this many pieces of similar length, each padded to its own longest text.
# The gradient is the sum of the pieces', so this is the same step, with much less padding.
PIECES = 3


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step. step counts from 1 to steps over all epochs; loss is the batch's mean."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a training did.

    loss_sum, correct, count: over the member's own examples, as they were met in the last epoch (with
    dropout, the weights still moving): sums, so that members' add up. count is the number of examples.
    seconds: wall time.
    """

    steps: int
    loss_sum: float
    correct: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Scores:
    """accuracy in [0, 1] and mean loss (cross entropy, nats) over count examples."""

    accuracy: float
    loss: float
    count: int


class TrainingCancelled(Exception):
    """Training was asked to stop. The module holds a half-trained state: discard it."""


class TrainingDiverged(Exception):
    """The loss or a weight is no longer a finite number. The module is spoilt: discard it."""


def train(
    module: TextClassifier,
    ids: Ids,
    labels: Ids,
    recipe: Training,
    *,
    seed: int,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains the module in place and leaves it on the CPU in evaluation mode.

    ids: (N, S) padded with the module's pad_id; labels: (N,) places in the job's labels. recipe: epochs,
    batch, optimiser, learning rate; every epoch goes over all examples once, in an order drawn from the seed.
    The loss is the batch's mean cross entropy. device: what `pick_device` gave. `cancelled` is asked before
    each step.

    Raises:
        TrainingCancelled: `cancelled` said so.
        TrainingDiverged: a loss or weight that is not finite.
        ValueError: no examples, or ids and labels that do not belong together.
    """
    check_examples(ids, labels)
    began = time.perf_counter()
    count = len(ids)
    steps = recipe.epochs * math.ceil(count / recipe.batch)
    shuffle = np.random.Generator(np.random.Philox(seed))
    lengths = (ids != module.pad_id).sum(axis=1)
    module.to(device).train()
    module.seed(int(shuffle.integers(2**63)))
    step, loss_sum, correct = 0, 0.0, 0
    try:
        with module.narrowed(ids) as small_ids:
            optimiser = make_optimiser(module, recipe)
            for epoch in range(1, recipe.epochs + 1):
                loss_sum, correct = 0.0, 0
                order = shuffle.permutation(count)
                for first in range(0, count, recipe.batch):
                    if cancelled():
                        raise TrainingCancelled(f"training was stopped after step {step} of {steps}")
                    batch = order[first : first + recipe.batch]
                    optimiser.zero_grad(set_to_none=True)
                    batch_loss = 0.0
                    for piece in _pieces(batch, lengths, 1 if device == "cuda" else PIECES):
                        logits, target = forward_rows(
                            module, small_ids, labels, lengths=lengths, rows=piece, device=device
                        )
                        loss = functional.cross_entropy(logits, target, reduction="sum")
                        torch.autograd.backward(loss / len(batch))
                        batch_loss += loss.item()
                        correct += int((logits.argmax(dim=1) == target).sum())
                    step += 1
                    # Before the step, which would spread it to the weights.
                    if not math.isfinite(batch_loss):
                        raise _diverged("the loss", step, steps, recipe)
                    optimiser.step()
                    loss_sum += batch_loss
                    progress(Progress(step, steps, epoch, recipe.epochs, batch_loss / len(batch)))
        if not all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()):
            raise _diverged("a weight", step, steps, recipe)
    finally:
        # Gradients are of the data as much as an optimiser's moments are.
        module.zero_grad(set_to_none=True)
        module.unseed()
        module.to("cpu").eval()
    return TrainingResult(step, loss_sum, correct, count, time.perf_counter() - began)


@torch.no_grad()
def evaluate(module: TextClassifier, ids: Ids, labels: Ids, *, batch: int = 256, device: str = "cpu") -> Scores:
    """Accuracy and mean loss of the module as it is, without dropout; shapes as in `train`.

    Raises:
        ValueError: no examples, or ids and labels that do not belong together.
    """
    check_examples(ids, labels)
    module.to(device).eval()
    lengths = (ids != module.pad_id).sum(axis=1)
    loss_sum, correct = 0.0, 0
    try:
        # By length, so that little is padded; a text's logits do not depend on its batch.
        by_length = np.argsort(lengths, kind="stable")
        for first in range(0, len(ids), batch):
            rows = by_length[first : first + batch]
            logits, target = forward_rows(module, ids, labels, lengths=lengths, rows=rows, device=device)
            loss_sum += functional.cross_entropy(logits, target, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == target).sum())
    finally:
        module.to("cpu")
    return Scores(correct / len(ids), loss_sum / len(ids), len(ids))


def check_examples(ids: Ids, labels: Ids) -> None:
    """Raises ValueError: no examples, or ids and labels that do not belong together."""
    if ids.ndim != 2 or labels.shape != ids.shape[:1]:
        raise ValueError(f"ids of shape (N, S) and labels of shape (N,), got {ids.shape} and {labels.shape}")
    if not len(ids):
        raise ValueError("no examples; a member needs at least one to take part")


def make_optimiser(module: TextClassifier, recipe: Training) -> torch.optim.Optimizer:
    """The recipe's optimiser over all parameters, without any state."""
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(module.parameters(), lr=recipe.learning_rate)
    # Kingma and Ba 2015 with its own defaults; fused is the same step in one pass over memory.
    return torch.optim.Adam(module.parameters(), lr=recipe.learning_rate, fused=True)


def _pieces(batch: Ids, lengths: Ids, pieces: int) -> Iterator[Ids]:
    """The rows of a batch, by length, in at most so many pieces."""
    by_length = batch[np.argsort(lengths[batch], kind="stable")]
    yield from (piece for piece in np.array_split(by_length, pieces) if len(piece))


def forward_rows(
    module: TextClassifier, ids: Ids, labels: Ids, *, lengths: Ids, rows: Ids, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets of these rows, padded no further than their longest needs."""
    width = max(int(lengths[rows].max()), module.min_tokens)
    inputs = torch.from_numpy(np.ascontiguousarray(ids[rows, :width])).to(device)
    return module(inputs), torch.from_numpy(labels[rows]).to(device)


def _diverged(what: str, step: int, steps: int, recipe: Training) -> TrainingDiverged:
    return TrainingDiverged(
        f"{what} was not a finite number at step {step} of {steps}; "
        f"lower training.learning_rate (it is {recipe.learning_rate:g}) in the job"
    )
