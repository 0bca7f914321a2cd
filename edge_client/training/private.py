"""DP-SGD: local training that differs little whichever one example is there (Abadi et al. 2016, algorithm 1).

A step, exactly as it is accounted for (sampled Gaussian, `mechanism.noise_multiplier`, rate min(1, lot / N), one of
`mechanism.steps`):

    draw      each of the N examples independently with probability min(1, lot / N); none is a draw too
    clip      each one's gradient, over all trained parameters together, to L2 norm `clip`
    noise     N(0, (noise_multiplier * clip)^2) on every coordinate of the sum, also where no text of this member uses
              it: a row of the embedding that stayed as it was would say that its word is not in the data
    divide    by `lot`, which everybody knows, never by how many were drawn
    step      of an optimiser that starts new in each training

Claim and assumptions. What this training does to the module is (epsilon, delta)-differentially private as
`edge_client.privacy` computes it, for neighbours that differ in one example being there or counting for nothing (its N
is the same: zero-out neighbours of Kairouz et al. 2021, "Practical and private (deep) learning without sampling or
shuffling", with the numbers of add-remove). It rests on: the random source (draws, noise, and the coins of dropout,
whose order shifts with who is drawn, so that a seed that others know would undo the claim); an architecture in which
no example sees another (`check_examples_apart`); and exact arithmetic, from which float32 differs in the last bits,
also in the sums of examples that are the same on both sides (`edge_client.privacy.noise` says what that leans on).

Nothing that depends on the data is returned, and no refusal or failure is a function of it but through the noised
weights. `progress` and the wall time are for the member's own screen: neither has noise, neither may leave.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edge_client.models import TextClassifier
from edge_client.privacy.noise import draw_poisson, fill_gaussian, gaussian_like
from edge_client.training.clipping import (
    ClippedGradients,
    PerExampleGradientsUnavailable,
    check_examples_apart,
)
from edge_client.training.local import (
    PIECES,
    Ids,
    Progress,
    TrainingCancelled,
    TrainingDiverged,
    TrainingResult,
    check_examples,
    forward_rows,
    make_optimiser,
)
from secure_agg import RandomSource
from tacit.job import Training
from tacit.mechanism import DpSgd

__all__ = ["PerExampleGradientsUnavailable", "train_private"]


def train_private(
    module: TextClassifier,
    ids: Ids,
    labels: Ids,
    recipe: Training,
    mechanism: DpSgd,
    *,
    random: RandomSource,
    seed: int,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains the module in place, `mechanism.steps` steps, and leaves it on the CPU in evaluation mode.

    ids: (N, S) padded with the module's pad_id; labels: (N,). recipe: optimiser and learning rate; `batch` bounds how
    many examples are in memory at a time and changes nothing else, `epochs` has no meaning. random: all that privacy
    rests on. seed: which made-up texts the module is tried on; it may be known to anybody. Progress counts steps of one
    epoch; its loss is the draw's mean without noise, nan for an empty one.

    The result's loss_sum, correct and count are zero: metrics have no noise of their own.

    Raises:
        PerExampleGradientsUnavailable: the module's gradients cannot be told apart by example.
        TrainingCancelled: `cancelled` said so.
        TrainingDiverged: a weight that is not finite.
        ValueError: no examples, or ids and labels that do not belong together.
    """
    check_examples(ids, labels)
    began = time.perf_counter()
    rate = min(1.0, mechanism.lot / len(ids))
    # The sum is never made without its divisor: both of its parts are made as small as that.
    scale = 1.0 / mechanism.lot
    deviation = mechanism.noise_multiplier * mechanism.clip * scale
    lengths = (ids != module.pad_id).sum(axis=1)
    module.to(device).train()
    try:
        module.seed(seed)
        check_examples_apart(module, seed)
        module.seed(int.from_bytes(random.bytes(8), "little"))
        with _rows_in_step(module, ids, recipe, mechanism, random) as inputs, ClippedGradients(module) as clipped:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            optimiser = make_optimiser(module, recipe)
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            for step in range(1, mechanism.steps + 1):
                if cancelled():
                    raise TrainingCancelled(f"training was stopped after step {step - 1} of {mechanism.steps}")
                drawn = draw_poisson(len(ids), rate, random)
                _fill_with_noise(module, trained, deviation, random)
                loss_sum = 0.0
                for rows in _pieces(drawn, lengths, recipe.batch, 1 if device == "cuda" else PIECES):
                    logits, target = forward_rows(module, inputs, labels, lengths=lengths, rows=rows, device=device)
                    losses = functional.cross_entropy(logits, target, reduction="none")
                    clipped.add(losses, mechanism.clip, scale)
                    loss_sum += float(losses.detach().sum())
                optimiser.step()
                mean = loss_sum / len(drawn) if len(drawn) else math.nan
                progress(Progress(step, mechanism.steps, 1, 1, mean))
        # The noised weights are what is released, so that this tells nobody more than they do.
        if not all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()):
            raise TrainingDiverged(
                f"a weight was not a finite number after {mechanism.steps} steps; lower training.learning_rate (it is "
                f"{recipe.learning_rate:g}) or raise the mechanism's lot ({mechanism.lot}) in the job"
            )
    finally:
        module.zero_grad(set_to_none=True)
        module.unseed()
        module.to("cpu").eval()
    return TrainingResult(mechanism.steps, 0.0, 0, 0, time.perf_counter() - began)


@contextmanager
def _rows_in_step(
    module: TextClassifier, ids: Ids, recipe: Training, mechanism: DpSgd, random: RandomSource
) -> Iterator[NDArray[np.int64]]:
    """The ids to train with, and the embedding with the rows that must be there at every step.

    Adam needs all of them: how far a row goes depends on the noise of all its steps. Plain SGD does not. A row that no
    text uses has no gradient, and no forward pass reads it, so after T steps it has moved by

        -(rate / lot) * (z_1 + ... + z_T),   z_t ~ N(0, (sigma C)^2) independent of each other and of all else,

    and a sum of independent Gaussians is N(0, T (sigma C)^2). Drawing that once at the end gives the same joint
    distribution of all weights as drawing T times: what the accountant knows nothing of has not changed. It saves the
    noise and the steps of most of a vocabulary's rows.
    """
    if recipe.optimiser != "sgd" or not module.embedding.weight.requires_grad:
        yield ids
        return
    with module.narrowed(ids) as small:
        yield small
    weight = module.embedding.weight
    moved = recipe.learning_rate * mechanism.noise_multiplier * mechanism.clip / mechanism.lot
    noise = gaussian_like(weight, moved * math.sqrt(mechanism.steps), random)
    noise[torch.from_numpy(np.unique(np.append(ids, module.pad_id))).to(noise.device)] = 0
    with torch.no_grad():
        weight.add_(noise)


def _fill_with_noise(
    module: TextClassifier, trained: list[nn.Parameter], deviation: float, random: RandomSource
) -> None:
    """Noise in place of the last step's gradients; the step's own are added to it. The padding's row is fixed."""
    for parameter in trained:
        if parameter.grad is not None:
            fill_gaussian(parameter.grad, deviation, random)
    for layer in module.modules():
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None and layer.weight.grad is not None:
            layer.weight.grad[layer.padding_idx] = 0


def _pieces(drawn: Ids, lengths: Ids, most: int, pieces: int) -> Iterator[Ids]:
    """The drawn examples by length, at most so many at a time, in some pieces at least: much less padding."""
    by_length = drawn[np.argsort(lengths[drawn], kind="stable")]
    count = max(pieces, math.ceil(len(drawn) / most))
    yield from (piece for piece in np.array_split(by_length, count) if len(piece))
