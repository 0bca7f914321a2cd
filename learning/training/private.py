"""DP-SGD: local training whose result depends little on any one example (Abadi et al. 2016, algorithm 1).

One step, exactly as it is accounted for (sampled Gaussian, `mechanism.noise_multiplier`, the rate, one of
`mechanism.steps`):

    draw      each of the N examples independently with the rate (by default min(1, lot / N)); an empty draw is still
              a step
    clip      each example's gradient, over all trained parameters together, to L2 norm `clip`
    noise     N(0, (noise_multiplier * clip)^2) on every coordinate of the sum, including coordinates that none of the
              member's texts use: an embedding row that did not move would say that its word is not in the data
    divide    by `lot`, which is public, never by the number of examples drawn
    round     to a public lattice: multiples of 2^k, k = floor(log2(std)) - 10, where std = noise_multiplier * clip /
              lot is the noise's standard deviation
    step      of an optimiser that starts new in each training

Where the job's noise is correlated, the draw is from the step's class and the noise is a row of C^-1 z
(`learning.mechanisms.correlated` has that claim). Given the rows before, a row is fresh noise of at least this standard
deviation plus a number that is fixed, so what is said of numbers below holds for it.

Claim and assumptions. What this training does to the module is (epsilon, delta)-differentially private as
`learning.accounting` computes it. Neighbours differ in one example, which is there in one of them and counts for
nothing in the other. N is the same in both: these are the zero-out neighbours of Kairouz et al. 2021, "Practical and
private (deep) learning without sampling or shuffling", with the numbers of add-remove. The claim rests on three things:

- The random source, for draws, noise and dropout's coins. The order of the coins shifts with the examples drawn, so an
  adversary that knew or guessed the coins would undo the claim; they come from `learning.models.draws.SecretDraws`.
- An architecture in which no example sees another (`check_examples_apart`).
- The following about numbers.

Numbers. In real numbers, the sum and the noise take every value, and whatever happens to the noisy sum afterwards costs
nothing. In floating point, the last bits of sum plus noise can betray what the noise was added to (Mironov 2012, "On
significance of the least significant bits for differential privacy"). So the two stay apart until they are added once,
in float64 (53 bits; the noise of `learning.mechanisms.noise` is float64 too), and the result is rounded to the lattice
at once. The lattice's step is a function of the mechanism alone: the same for all coordinates and all data. The
optimiser gets the lattice's values and nothing else. Their cast to float32, its steps and the weights are functions of
those values and of the public version: post-processing, the same for used and unused rows of the embedding.

    What rounding costs: it is post-processing itself, and adds a variance of at most 2^-20 / 12 of the noise's.
    What it buys: a cell of the lattice is at least 2^-11 standard deviations wide, and float64 moves its two edges by
    about 2^-52 of the larger of sum and noise. So a cell's probability differs from that of real numbers by a fraction
    of about 2^-40, times the sum in standard deviations where that exceeds one. All artefacts of the last bits lie
    inside a cell. float32 noise would not do: its own steps are a fraction 2^-12 of a cell, at each of millions of
    coordinates.
    Clipped gradients are added up exactly, so one example moves the sum by at most one clip, whatever the others are
    and however many (`learning.training.clipping` has the proof).
    What remains: an example's own gradient does not depend on its batch but for rounding, and that a version does not
    make this matter is assumed. It is padded to a length that follows from its own (`padded_lengths`), beside
    examples of that length alone. The author of a network can make numbers at padding that are not finite, and
    attention multiplies them by 0; a batch padded to its longest text would then lose all others if one long text
    is there. Kernels multiply in float32: TF32, which CUDA's convolutions use by default and which is exact to
    2^-11, is off while this trains (`whole_float32`). A model that writes may keep its frozen matrices in bfloat16.
    Each is widened before it is used, so this is a float32 network whose public values are rounded.

Persons. If the mechanism's unit is a person, read "person" for "example" above: persons are drawn, and a person's
gradient is the sum or mean of those of some of its rows (`learning.training.persons`), clipped once. Neighbours differ
in one person with all its rows, and N counts persons. docs/persons.md has the theorem.

The training returns nothing that depends on the data. No refusal or failure depends on the data, except through the
noised weights. `progress` and the wall time are for the member's own screen: they have no noise and must not leave.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import nn

from learning.mechanisms.correlated import CorrelatedSteps, check_correlated, drawing
from learning.mechanisms.noise import fill_gaussian, lattice_step
from learning.models.classifier import TextModel
from learning.training.clipping import (
    ClippedGradients,
    Groups,
    PerExampleGradientsUnavailable,
    check_examples_apart,
)
from learning.training.device import whole_float32
from learning.training.local import (
    Ids,
    Progress,
    TrainingCancelled,
    TrainingDiverged,
    TrainingResult,
    all_finite,
    check_examples,
    make_optimiser,
    rates_of,
    rows_at,
)
from learning.training.persons import DrawnPersons, Persons
from secure_agg import RandomSource
from tacit.job import Training
from tacit.mechanism import DpSgd

__all__ = ["PerExampleGradientsUnavailable", "add_noise", "equal_pieces", "padded_lengths", "train_private"]

# Values that are held in float64 at a time.
_BLOCK = 1 << 15
# Texts are padded to multiples of this. A GPU takes longer for more pieces than for more padding.
_STEP = 8
_STEP_ON_A_GPU = 32


def train_private(
    module: TextModel,
    ids: Ids,
    targets: Ids,
    recipe: Training,
    mechanism: DpSgd,
    *,
    random: RandomSource,
    seed: int,
    rate: float | None = None,
    population: int | None = None,
    persons: Persons | None = None,
    correlated: CorrelatedSteps | None = None,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains the module in place for `mechanism.steps` steps and leaves it on the CPU in evaluation mode.

    Args:
        module: The model to train.
        ids: (N, S), padded with the module's pad_id. Without examples, every step is noise alone.
        targets: (N,), or (N, S) for a model that writes, where an example's loss is the mean over its targets.
        recipe: Optimiser and learning rate. `microbatch`, or else `batch`, only bounds the examples in memory at a
            time; `epochs` is unused. `precision` is that of a writing model's frozen matrices in memory.
        mechanism: Noise multiplier, clip, lot and steps.
        random: The source of all randomness that privacy rests on. The probe texts are drawn from it too, since a
            module can be made to behave on texts that are known.
        seed: The job's public seed. Unused.
        rate: The probability of drawing each example or person, in (0, 1]; min(1, lot / N) if None.
        population: N, if not all of the member's examples or persons are here; None: they are. It decides the grid of
            the sums, so it must be the same for neighbours.
        persons: Whose rows these are, if persons are drawn and clipped; None: each row stands for itself. A piece of a
            draw then holds whole persons: at most that many rows, or one person's.
        correlated: The job's steps where the mechanism's noise is correlated, with a rate of their own. They go on by
            `mechanism.steps`.
        device: Where to train. An Apple GPU has no float64, which the sums need, so the CPU trains instead.
        progress: Called after each step, which counts in one epoch; the loss is the draw's mean without noise, nan for
            an empty draw, inf if it is not finite.
        cancelled: Asked before each step.

    Returns:
        The result, with loss_sum, correct and count zero: metrics have no noise of their own.

    Raises:
        PerExampleGradientsUnavailable: The module's gradients cannot be told apart by example.
        TrainingCancelled: `cancelled` returned True.
        TrainingDiverged: A weight is not finite.
        ValueError: ids and labels do not fit each other, the rate is outside (0, 1], correlated noise has no steps to
            go on from, or the module keeps nothing in the recipe's precision.
    """
    if ids.ndim != 2 or len(ids) or len(targets):
        check_examples(ids, targets)
    if population is None:
        population = len(ids) if persons is None else persons.count
    if rate is None:
        rate = min(1.0, mechanism.lot / population) if population else 1.0
    if not 0 < rate <= 1:
        raise ValueError(f"the sampling rate must lie in (0, 1], got {rate}; leave it out for lot / examples")
    check_correlated(mechanism, correlated)
    began = time.perf_counter()
    device = "cpu" if device == "mps" else device
    unit = mechanism.clip / mechanism.lot
    std = mechanism.noise_multiplier * unit
    lengths = module.lengths(ids, targets)
    padded = padded_lengths(module, lengths, _STEP_ON_A_GPU if device == "cuda" else _STEP)
    draw = drawing(ids, lengths, targets, rate, correlated, random)
    module.to(device).train()
    module.checkpointing = recipe.checkpointing
    try:
        with whole_float32(), module.keeping_in(recipe.precision):
            # TF32 would move a text's logits by more than the check of examples allows.
            probe = int.from_bytes(random.bytes(8), "little")
            module.seed(probe)
            check_examples_apart(module, probe)
            module.draw_from(random)
            with ClippedGradients(module, max(1, population)) as clipped:
                optimiser = make_optimiser(module, recipe)
                for step in range(1, mechanism.steps + 1):
                    if cancelled():
                        raise TrainingCancelled(f"training was stopped after step {step - 1} of {mechanism.steps}")
                    drawn, pieces = _drawn(draw, persons, rate, random, padded, recipe, device)
                    clipped.clear()
                    loss_sum = 0.0
                    for rows, groups in pieces:
                        inputs, target = rows_at(module, ids, targets, lengths=padded, rows=rows, device=device)
                        losses, _ = module.judged(inputs, target)
                        clipped.add(losses, mechanism.clip, groups)
                        loss_sum += float(losses.detach().sum())
                    add_noise(module, clipped.sums, unit, std, random, correlated)
                    optimiser.step()
                    # A loss that is not a number is no empty draw.
                    mean = loss_sum / len(drawn) if len(drawn) else math.nan
                    if len(drawn) and not math.isfinite(mean):
                        mean = math.inf
                    progress(Progress(step, mechanism.steps, 1, 1, mean))
        # This tells nobody more than the noised weights, which are what is released.
        if not all_finite(module):
            raise TrainingDiverged(
                f"a weight was not a finite number after {mechanism.steps} steps; lower {rates_of(recipe)} or raise "
                f"the mechanism's lot ({mechanism.lot}) in the job"
            )
    finally:
        module.zero_grad(set_to_none=True)
        module.unseed()
        module.checkpointing = False
        module.to("cpu").eval()
    return TrainingResult(mechanism.steps, 0.0, 0, 0, time.perf_counter() - began)


def _drawn(
    draw: Callable[[], Ids],
    persons: Persons | None,
    rate: float,
    random: RandomSource,
    padded: Ids,
    recipe: Training,
    device: str,
) -> tuple[Ids, Iterator[tuple[Ids, Groups | None]]]:
    """The rows of a draw, and the same in pieces, each with whose its rows are if persons were drawn."""
    most = recipe.microbatch or recipe.batch
    if persons is None:
        drawn = draw()
        return drawn, ((each, None) for each in equal_pieces(drawn, padded, most))
    found = persons.draw(rate, random)
    return found.rows, ((each.rows, _groups(each, device)) for each in found.pieces(most, padded[found.rows]))


def padded_lengths(module: TextModel, lengths: Ids, step: int = _STEP) -> Ids:
    """(N,) How many positions each row is read with. It follows from the row's own length (N,) and public numbers."""
    found: Ids = np.minimum(-(-np.maximum(lengths, module.min_tokens) // step) * step, module.room)
    return found


def equal_pieces(drawn: Ids, padded: Ids, most: int) -> Iterator[Ids]:
    """The drawn rows in pieces of at most `most`, each of rows with the same padded length (N,)."""
    of_drawn = padded[drawn]
    for length in np.unique(of_drawn):
        rows = drawn[of_drawn == length]
        for first in range(0, len(rows), most):
            yield rows[first : first + most]


def _groups(drawn: DrawnPersons, device: str) -> Groups:
    return Groups(torch.from_numpy(drawn.person).to(device), torch.from_numpy(drawn.weights).to(device))


def add_noise(
    module: nn.Module,
    sums: Mapping[str, torch.Tensor],
    unit: float,
    std: float,
    random: RandomSource,
    correlated: CorrelatedSteps | None = None,
) -> None:
    """Sets each trained .grad to sum * unit + noise on the lattice; the padding's row stays 0.

    All coordinates are treated alike, whatever the texts are. It works block by block.

    Args:
        module: The module.
        sums: The sum of each trained parameter, by its name in the module: float64, in units of `unit`.
        unit: The unit.
        std: Standard deviation of the noise on each coordinate.
        random: Source of the noise.
        correlated: The job's steps, if its noise is correlated.

    Raises:
        ValueError: The rows of correlated noise have another length than what is trained.
    """
    step, place = lattice_step(std), 0
    if correlated is not None and correlated.rows.shape[1] != sum(each.numel() for each in sums.values()):
        raise ValueError("the noise has another length than what is trained; the job's document states its values")
    for name, whole in sums.items():
        parameter = module.get_parameter(name)
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        noised, flat = parameter.grad.view(-1), whole.view(-1)
        block = torch.empty(min(_BLOCK, len(flat)), dtype=torch.float64, device=flat.device)
        for first in range(0, len(flat), _BLOCK):
            part = flat[first : first + _BLOCK]
            values = block[: len(part)]
            # In steps of the lattice, a power of two, so converting there and back rounds nothing.
            if correlated is None:
                fill_gaussian(values, std / step, random)
            else:
                fill_gaussian(values, 1.0, random)
                # On a CPU this is the same memory.
                row = values.cpu()
                correlated.correlate(row.numpy(), place + first)
                values.copy_(row).mul_(std / step)
            noised[first : first + _BLOCK] = values.add_(part, alpha=unit / step).round_().mul_(step)
        place += len(flat)
    if correlated is not None:
        correlated.taken()
    for layer in module.modules():
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None and layer.weight.grad is not None:
            layer.weight.grad[layer.padding_idx] = 0
