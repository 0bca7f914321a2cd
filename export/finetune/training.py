"""Trains a classifier on texts that need no protection, with early stopping on a validation split.

Guarantees: the same module, rows, recipe and seed give the same weights on the same machine; a text is never on both
sides of the validation split, however often it was generated; the weights returned are those of the epoch with the
lowest validation loss, or of the last epoch if there are no validation rows.

Left to others: a member's training, with its rounds, phases and noise (`learning.training`).
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
from learning.training.local import TrainingDiverged, check_examples, evaluate, make_optimiser, rows_at
from tacit.job import Training

__all__ = ["Epoch", "Fitted", "fit", "validation_rows", "with_two_layers"]

Ids = NDArray[np.int64]
# Share of each label's distinct texts that is validated on.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Epoch:
    """The figures of one epoch.

    Args:
        number: counted from 1.
        loss: mean training loss during the epoch.
        validation_loss: loss on the validation rows after it. None: there are none.
        validation_accuracy: accuracy on the validation rows after it. None: there are none.
    """

    number: int
    loss: float
    validation_loss: float | None
    validation_accuracy: float | None


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a training did. best: the epoch whose weights the module has. seconds: wall time."""

    epochs: tuple[Epoch, ...]
    best: Epoch
    seconds: float


def validation_rows(texts: Sequence[str], labels: Ids, seed: int, share: float = VALIDATION_SHARE) -> NDArray[np.bool_]:
    """Draws the rows to validate on from the seed: of each label's distinct texts the share, rounded down.

    All rows with the same text go together, whatever their labels.

    Returns:
        (N,), true for rows to validate on.
    """
    random = np.random.Generator(np.random.Philox(seed))
    held: set[str] = set()
    seen: set[str] = set()
    for label in np.unique(labels).tolist():
        # In the order of their first rows, so that the draw depends only on rows and seed.
        own = list(dict.fromkeys(text for text, at in zip(texts, labels, strict=True) if at == label))
        own = [text for text in own if text not in seen]
        seen |= set(own)
        held |= {own[at] for at in random.permutation(len(own))[: int(share * len(own))].tolist()}
    return np.array([text in held for text in texts], dtype=np.bool_)


def with_two_layers(module: TextClassifier, seed: int) -> None:
    """Replaces a transformer's head by that of DP-RVAE's classifier.

    The head is a linear layer as wide as its input, tanh, and another linear layer. Weights are N(0, 1 / width), biases
    zero.

    Raises:
        TypeError: the module's head is not one linear layer.
    """
    head = module.output
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the head of {type(module).__name__} is not a linear layer")
    random = np.random.Generator(np.random.Philox(seed))
    # Torch fills a linear layer from its global generator, whose state is restored here.
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

    Args:
        module: what to train.
        ids: (N, S), padded with the module's pad_id.
        labels: (N,), places in the model's labels.
        validation: (N,), true for rows that are not trained on.
        recipe: how to train; its epochs are the maximum.
        patience: training stops after this many epochs in a row without a lower validation loss.
        seed: of order and dropout.
        device: where to train.
        report: called after each epoch.

    Raises:
        TrainingDiverged: a loss is not finite.
        ValueError: there are no rows to train on, or the arrays do not fit.
    """
    check_examples(ids, labels)
    if validation.shape != labels.shape:
        raise ValueError(f"expected a mark for each of {len(labels)} rows, got shape {validation.shape}")
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
                    inputs, target = rows_at(module, small, labels, lengths=lengths, rows=rows, device=device)
                    loss = functional.cross_entropy(module(inputs), target)
                    # Checked before the step, which would spread it to the weights.
                    if not math.isfinite(loss.item()):
                        raise TrainingDiverged(
                            f"the loss was not finite in epoch {number}; lower --learning-rate (it is "
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
    """The validation loss; infinite if it is missing or NaN, so that it is never the lowest."""
    found = epoch.validation_loss
    return math.inf if found is None or math.isnan(found) else found
