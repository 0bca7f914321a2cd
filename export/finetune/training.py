"""Training a classifier on texts that nobody need protect, until texts it does not train on say that it is enough.

Guarantees: the same module, rows, recipe and seed give the same weights on the same machine; a text never stands on
both sides of the validation split, however often it was made up; what comes back is the epoch with the least validation
loss, or without validation rows the last one.

Leaves to others: a member's training, with its rounds, phases and noise (`learning.training`).
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from learning.models import TextClassifier
from learning.training.local import TrainingDiverged, check_examples, evaluate, forward_rows, make_optimiser
from tacit.job import Training

__all__ = ["Epoch", "Fitted", "fit", "validation_rows", "with_two_layers"]

Ids = NDArray[np.int64]
# A row in ten of each label tells when to stop.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Epoch:
    """After an epoch, counted from 1: the mean training loss while it went, and loss and accuracy on the validation
    rows; None where there are none.
    """

    number: int
    loss: float
    validation_loss: float | None
    validation_accuracy: float | None


@dataclass(frozen=True, slots=True)
class Fitted:
    """epochs: all that were trained. best: the one whose weights the module has. seconds: wall time."""

    epochs: tuple[Epoch, ...]
    best: Epoch
    seconds: float


def validation_rows(texts: Sequence[str], labels: Ids, seed: int, share: float = VALIDATION_SHARE) -> NDArray[np.bool_]:
    """(N,), true for rows to validate on: of each label's distinct texts the share, rounded down, drawn from the seed.

    A text that stands in several rows, under whatever labels, goes with all of them.
    """
    random = np.random.Generator(np.random.Philox(seed))
    held: set[str] = set()
    seen: set[str] = set()
    for label in np.unique(labels).tolist():
        # In the order of their first row, so that the draw depends on nothing but rows and seed.
        own = list(dict.fromkeys(text for text, at in zip(texts, labels, strict=True) if at == label))
        own = [text for text in own if text not in seen]
        seen |= set(own)
        held |= {own[at] for at in random.permutation(len(own))[: int(share * len(own))].tolist()}
    return np.array([text in held for text in texts], dtype=np.bool_)


def with_two_layers(module: TextClassifier, seed: int) -> None:
    """Puts the head of DP-RVAE's classifier on a transformer: a linear layer as wide as its input, tanh, and another.

    Weights are N(0, 1 / width), biases zero.

    Raises:
        TypeError: a module whose head is not one linear layer.
    """
    head = module.output
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the head of {type(module).__name__} is no linear layer")
    random = np.random.Generator(np.random.Philox(seed))
    # Torch fills a linear layer from its global generator: put that back.
    with torch.random.fork_rng(devices=[]):
        layers = [nn.Linear(head.in_features, head.in_features), nn.Linear(head.in_features, head.out_features)]
    with torch.no_grad():
        for layer in layers:
            drawn = random.standard_normal(tuple(layer.weight.shape), dtype=np.float32)
            layer.weight.copy_(torch.from_numpy(drawn / np.float32(math.sqrt(head.in_features))))
            layer.bias.zero_()
    module.output = nn.Sequential(layers[0], nn.Tanh(), layers[1])


def fit(
    module: TextClassifier,
    ids: Ids,
    labels: Ids,
    validation: NDArray[np.bool_],
    recipe: Training,
    *,
    patience: int,
    seed: int,
    device: str = "cpu",
    report: Callable[[Epoch], None] = lambda _: None,
) -> Fitted:
    """Trains the module in place and leaves it on the CPU in evaluation mode, with the best epoch's weights.

    ids: (N, S), padded with the module's pad_id. labels: (N,), places in the model's labels. validation: (N,), rows
    that are not trained on. recipe: its epochs are the most there are. patience: epochs in a row without a lower
    validation loss after which it stops.

    Raises:
        TrainingDiverged: a loss that is not finite. ValueError: no rows to train on, or arrays that do not fit.
    """
    check_examples(ids, labels)
    if validation.shape != labels.shape:
        raise ValueError(f"a mark for each of {len(labels)} rows, got shape {validation.shape}")
    training = np.flatnonzero(~validation)
    check_examples(ids[training], labels[training])
    began = time.perf_counter()
    shuffle = np.random.Generator(np.random.Philox(seed))
    lengths = (ids != module.pad_id).sum(axis=1)
    epochs: list[Epoch] = []
    best = 0
    module.to(device)
    module.seed(int(shuffle.integers(2**63)))
    try:
        with module.narrowed(ids) as small:
            optimiser = make_optimiser(module, recipe)
            kept: dict[str, torch.Tensor] = {}
            for number in range(1, recipe.epochs + 1):
                module.to(device).train()
                loss_sum = 0.0
                order = training[shuffle.permutation(len(training))]
                for first in range(0, len(order), recipe.batch):
                    rows = order[first : first + recipe.batch]
                    optimiser.zero_grad(set_to_none=True)
                    logits, target = forward_rows(module, small, labels, lengths=lengths, rows=rows, device=device)
                    loss = functional.cross_entropy(logits, target)
                    # Before the step, which would spread it to the weights.
                    if not math.isfinite(loss.item()):
                        raise TrainingDiverged(
                            f"the loss was not a finite number in epoch {number}; lower --learning-rate (it is "
                            f"{recipe.learning_rate:g})"
                        )
                    torch.autograd.backward(loss)
                    optimiser.step()
                    loss_sum += loss.item() * len(rows)
                epochs.append(_epoch(number, loss_sum / len(order), module, small, labels, validation, device))
                report(epochs[-1])
                last = epochs[-1].validation_loss is None
                if not kept or last or _loss(epochs[-1]) < _loss(epochs[best]):
                    best, kept = number - 1, copy.deepcopy(module.state_dict())
                elif number - 1 - best >= patience:
                    break
            module.load_state_dict(kept)
    finally:
        module.zero_grad(set_to_none=True)
        module.unseed()
        module.to("cpu").eval()
    return Fitted(tuple(epochs), epochs[best], time.perf_counter() - began)


def _epoch(
    number: int,
    loss: float,
    module: TextClassifier,
    ids: Ids,
    labels: Ids,
    validation: NDArray[np.bool_],
    device: str,
) -> Epoch:
    if not validation.any():
        return Epoch(number, loss, None, None)
    scores = evaluate(module, ids[validation], labels[validation], device=device)
    return Epoch(number, loss, scores.loss, scores.accuracy)


def _loss(epoch: Epoch) -> float:
    """A loss that is no number is never the least."""
    found = epoch.validation_loss
    return math.inf if found is None or math.isnan(found) else found
