"""DP-SGD: local training that differs little whichever one example is there (Abadi et al. 2016, algorithm 1).

A step, exactly as it is accounted for (sampled Gaussian, `mechanism.noise_multiplier`, the rate, one of
`mechanism.steps`):

    draw      each of the N examples independently with the rate, min(1, lot / N) if none is given; none is a draw too
    clip      each one's gradient, over all trained parameters together, to L2 norm `clip`
    noise     N(0, (noise_multiplier * clip)^2) on every coordinate of the sum, also where no text of this member uses
              it: a row of the embedding that stayed as it was would say that its word is not in the data
    divide    by `lot`, which everybody knows, never by how many were drawn
    round     to a lattice that everybody knows: multiples of 2^k, k = floor(log2(deviation)) - 10, of the noise's
              deviation noise_multiplier * clip / lot
    step      of an optimiser that starts new in each training

Claim and assumptions. What this training does to the module is (epsilon, delta)-differentially private as
`edge_client.privacy` computes it, for neighbours that differ in one example being there or counting for nothing (its N
is the same: zero-out neighbours of Kairouz et al. 2021, "Practical and private (deep) learning without sampling or
shuffling", with the numbers of add-remove). It rests on: the random source (draws, noise, and the coins of dropout,
whose order shifts with who is drawn, so that whoever knew or guessed them would undo the claim: they are of
`learning.models.draws.SecretDraws`); an architecture in which
no example sees another (`check_examples_apart`); and what follows about numbers.

Numbers. In real numbers the sum and the noise have every value, and what is done to the noisy sum afterwards costs
nothing. In floating point the last bits of sum plus noise can betray what the noise was added to (Mironov 2012, "On
significance of the least significant bits for differential privacy"). So the two are kept apart until they are added
once, in float64 (53 bits, noise of `learning.mechanisms.noise` in float64 too), and that sum is rounded to the lattice
at once. The lattice's step is a function of the mechanism alone: the same for all coordinates and all data. The
optimiser is given the lattice's values and nothing else; their cast to float32, its steps and the weights are functions
of them and of the public version: post-processing, the same for used and unused rows of the embedding.

    What rounding costs: it is post-processing itself, and adds a variance of at most 2^-20 / 12 of the noise's.
    What it buys: a cell of the lattice is at least 2^-11 deviations wide, and float64 moves its two edges by some 2^-52
    of the larger of sum and noise. So a cell's probability is that of real numbers but for a fraction of about 2^-40,
    times the sum in deviations where that is more than one. All artefacts of the last bits lie inside a cell.
    Noise of float32 would not do: its own steps are a fraction of 2^-12 of a cell, at each of millions of coordinates.
    What remains: clipped gradients are added up in float32, in units of the clip, so that the sum is that of real
    numbers but for about 2^-24 of it (`learning.training.clipping` bounds an example's part for any model), also in
    the sums of examples that are the same on both sides. It is assumed that an example's own gradient does not depend
    on its batch. Kernels multiply in float32 as they add in it: TF32, which CUDA's convolutions have by default and
    which is right to 2^-11, is off while this trains (`_whole_float32`). These are the sensitivity's last bits; nothing
    that is rounded away here mends them.

Nothing that depends on the data is returned, and no refusal or failure is a function of it but through the noised
weights. `progress` and the wall time are for the member's own screen: neither has noise, neither may leave.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from learning.mechanisms.noise import (
    draw_poisson,
    fill_gaussian,
    lattice_step,
)
from learning.models import TextClassifier
from learning.training.clipping import (
    ClippedGradients,
    PerExampleGradientsUnavailable,
    check_examples_apart,
)
from learning.training.local import (
    PIECES,
    Ids,
    Progress,
    TrainingCancelled,
    TrainingDiverged,
    TrainingResult,
    check_examples,
    forward_rows,
    make_optimiser,
    rates_of,
)
from secure_agg import RandomSource
from tacit.job import Training
from tacit.mechanism import DpSgd

__all__ = ["PerExampleGradientsUnavailable", "train_private"]

# Values that are float64 at a time.
_BLOCK = 1 << 15


def train_private(
    module: TextClassifier,
    ids: Ids,
    labels: Ids,
    recipe: Training,
    mechanism: DpSgd,
    *,
    random: RandomSource,
    seed: int,
    rate: float | None = None,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains the module in place, `mechanism.steps` steps, and leaves it on the CPU in evaluation mode.

    ids: (N, S) padded with the module's pad_id; labels: (N,). Without examples every step is noise alone. recipe:
    optimiser and learning rate; `batch` bounds how many examples are in memory at a time and changes nothing else,
    `epochs` has no meaning. random: all that privacy rests on; the made-up texts the module is tried on are drawn from
    it too, for a module can be made for texts that are known. seed: the job's, known to anybody; nothing follows from
    it. rate: the probability of drawing each example, in (0, 1]; min(1, lot / N) if None. Progress counts steps of one
    epoch; its loss is the draw's mean without noise, nan for an empty one. An Apple GPU has no float64, which clipping
    needs: where it is the device, the CPU trains.

    The result's loss_sum, correct and count are zero: metrics have no noise of their own.

    Raises:
        PerExampleGradientsUnavailable: the module's gradients cannot be told apart by example.
        TrainingCancelled: `cancelled` said so.
        TrainingDiverged: a weight that is not finite.
        ValueError: ids and labels that do not belong together, or a rate outside (0, 1].
    """
    if ids.ndim != 2 or ids.shape[:1] != (0,) or labels.shape != (0,):
        check_examples(ids, labels)
    if rate is None:
        rate = min(1.0, mechanism.lot / len(ids)) if len(ids) else 1.0
    if not 0 < rate <= 1:
        raise ValueError(f"a sampling rate lies in (0, 1], got {rate}; leave it out for lot / examples")
    began = time.perf_counter()
    device = "cpu" if device == "mps" else device
    unit = mechanism.clip / mechanism.lot
    std = mechanism.noise_multiplier * unit
    lengths = (ids != module.pad_id).sum(axis=1)
    module.to(device).train()
    try:
        probe = int.from_bytes(random.bytes(8), "little")
        module.seed(probe)
        check_examples_apart(module, probe)
        module.draw_from(random)
        with _whole_float32(), ClippedGradients(module) as clipped:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            optimiser = make_optimiser(module, recipe)
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            for step in range(1, mechanism.steps + 1):
                if cancelled():
                    raise TrainingCancelled(f"training was stopped after step {step - 1} of {mechanism.steps}")
                drawn = draw_poisson(len(ids), rate, random)
                optimiser.zero_grad(set_to_none=False)
                loss_sum = 0.0
                for rows in _pieces(drawn, lengths, recipe.batch, 1 if device == "cuda" else PIECES):
                    logits, target = forward_rows(module, ids, labels, lengths=lengths, rows=rows, device=device)
                    losses = functional.cross_entropy(logits, target, reduction="none")
                    # In units of the clip, so that no clip and no lot is too small for float32.
                    clipped.add(losses, mechanism.clip, 1 / mechanism.clip)
                    loss_sum += float(losses.detach().sum())
                _add_noise(module, trained, unit, std, random)
                optimiser.step()
                mean = loss_sum / len(drawn) if len(drawn) else math.nan
                progress(Progress(step, mechanism.steps, 1, 1, mean))
        # The noised weights are what is released, so that this tells nobody more than they do.
        if not all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()):
            raise TrainingDiverged(
                f"a weight was not a finite number after {mechanism.steps} steps; lower {rates_of(recipe)} or raise "
                f"the mechanism's lot ({mechanism.lot}) in the job"
            )
    finally:
        module.zero_grad(set_to_none=True)
        module.unseed()
        module.to("cpu").eval()
    return TrainingResult(mechanism.steps, 0.0, 0, 0, time.perf_counter() - began)


@contextmanager
def _whole_float32() -> Iterator[None]:
    """No product of a GPU in TF32 meanwhile, whatever was set before. It is the process's setting: trainings take
    turns.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _add_noise(
    module: TextClassifier, trained: list[nn.Parameter], unit: float, std: float, random: RandomSource
) -> None:
    """Each .grad, a sum in units of `unit`, becomes sum * unit + noise on the lattice. The padding's row is fixed.

    All coordinates the same way, whichever texts there are: block by block, so that no more than that is float64.
    """
    step = lattice_step(std)
    for parameter in trained:
        if parameter.grad is None:
            continue
        sums = parameter.grad.view(-1)
        block = torch.empty(min(_BLOCK, len(sums)), dtype=torch.float64, device=sums.device)
        for first in range(0, len(sums), _BLOCK):
            part = sums[first : first + _BLOCK]
            values = block[: len(part)]
            # In steps of the lattice, which are a power of two: nothing is rounded by going there and back.
            fill_gaussian(values, std / step, random)
            part.copy_(values.add_(part.double(), alpha=unit / step).round_().mul_(step))
    for layer in module.modules():
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None and layer.weight.grad is not None:
            layer.weight.grad[layer.padding_idx] = 0


def _pieces(drawn: Ids, lengths: Ids, most: int, pieces: int) -> Iterator[Ids]:
    """The drawn examples by length, at most so many at a time, in some pieces at least: much less padding."""
    by_length = drawn[np.argsort(lengths[drawn], kind="stable")]
    count = max(pieces, math.ceil(len(drawn) / most))
    yield from (piece for piece in np.array_split(by_length, count) if len(piece))
