"""Trains a linear head on features that were computed before: rounds of seconds, whatever the backbone costs.

`train_head` runs the plain steps of `learning.training.local`. `train_private_head` is DP-SGD (`learning.training.
private` has the claim, its assumptions and what rounding costs) in closed form. With features x, probabilities p and
the label's indicator y, an example's gradient is outer(p - y, x) in the matrix and p - y in the bias. So

    |gradient|^2 = |p - y|^2 (|x|^2 + 1)        exactly, without a backward pass; |p - y|^2 |x|^2 if no bias is trained
    clipped sum  = W^T X, with rows w_b (p_b - y_b) of W and w_b = min(1, clip / |gradient_b|)

Guarantees: an example adds at most `clip` to the sum (L2, matrix and bias together). The sum is float64 until it is
rounded once to float32, so it is closer to that of real numbers than `ClippedGradients`' is. An example whose features
or gradient are not finite adds nothing. No example sees another: every row of the formulas has one example. So there is
no module to check on probe texts. Dropout has no part.

If persons are drawn, all this holds for a person in place of an example: its gradient G is the weighted sum of those of
its rows, made in float64, and G times min(1, clip / |G|) is what it adds.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learning.mechanisms.correlated import CorrelatedSteps
from learning.models.classifier import Dropout, TextClassifier
from learning.training.clipping import clip_factors
from learning.training.local import (
    Ids,
    Progress,
    TrainingCancelled,
    TrainingDiverged,
    TrainingResult,
    make_optimiser,
    rates_of,
    train,
)
from learning.training.persons import DrawnPersons, Persons
from learning.training.phases import Phase
from learning.training.private import add_noise, check_correlated, drawing
from secure_agg import RandomSource
from tacit.job import Training
from tacit.mechanism import DpSgd

__all__ = ["clipped_sums", "clipped_sums_of_persons", "train_head", "train_private_head"]

Features = NDArray[np.float32]

# Rows that are held in float64 at a time.
_BLOCK = 2048
# Values of persons' gradients that are held in float64 at a time.
_PERSONS_HELD = 1 << 22
# Bytes of features of which a copy in float64 is held for all steps.
_HELD = 1 << 27


class _OnFeatures(TextClassifier):
    """A head whose texts are rows of a table of features: ids (B, 1) are their numbers.

    Args:
        output: The head, which is trained in place.
        features: (N, width).
    """

    parts: ClassVar = {"output": "head"}

    def __init__(self, output: nn.Linear, features: Features) -> None:
        super().__init__()
        self.pad_id, self.min_tokens = len(features), 1
        # In place of an embedding, not a parameter: nothing trains it, counts it or sends it.
        with torch.device("meta"):
            self.embedding = nn.Embedding(len(features) + 1, features.shape[1])
        self.embedding._parameters.pop("weight")
        self.embedding.weight = torch.from_numpy(features)
        self.dropout = Dropout(0.0)
        self.output = output

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, labels) of rows (B, 1)."""
        logits: Tensor = self.output(self.embedding.weight[ids[:, 0].cpu()].to(ids.device))
        return logits

    @contextmanager
    def narrowed(self, ids: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Changes nothing: the table is exactly the rows."""
        yield ids


def train_head(
    output: nn.Linear,
    features: Features,
    labels: Ids,
    recipe: Training,
    *,
    seed: int,
    phases: tuple[Phase, ...] = (),
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains a head in place, as `learning.training.local.train` trains a whole module. It runs on the CPU.

    Args:
        output: The head.
        features: (N, width).
        labels: (N,) indices into the job's labels.
        recipe, seed, phases, progress, cancelled: As in `train`.

    Raises:
        TrainingCancelled, TrainingDiverged, ValueError: As in `train`.
    """
    rows = np.arange(len(features), dtype=np.int64)[:, None]
    # The frozen network's precision played its part when the features were computed.
    whole = recipe.model_copy(update={"precision": "float32"})
    return train(
        _OnFeatures(output, features),
        rows,
        labels,
        whole,
        seed=seed,
        phases=phases,
        progress=progress,
        cancelled=cancelled,
    )


def train_private_head(
    output: nn.Linear,
    features: Features,
    labels: Ids,
    recipe: Training,
    mechanism: DpSgd,
    *,
    random: RandomSource,
    rate: float,
    persons: Persons | None = None,
    ids: Ids | None = None,
    pad_id: int = 0,
    correlated: CorrelatedSteps | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains a head in place for `mechanism.steps` steps, on the CPU.

    Args:
        output: The head.
        features: (N, width). Without examples, every step is noise alone.
        labels: (N,) indices into the job's labels.
        recipe: Optimiser and learning rate.
        mechanism: Noise multiplier, clip, lot and steps.
        random: The source of all draws and noise.
        rate: The probability of drawing each example or person, in (0, 1].
        persons: Whose rows these are, if persons are drawn and clipped; None: each row stands for itself.
        ids: (N, S) the tokens that the features were computed from, and `pad_id` their padding. They decide an
            example's class where the noise is correlated, and nothing else.
        correlated: As in `train_private`.
        progress: Called after each step, as in `train_private`.
        cancelled: Asked before each step.

    Returns:
        The result, with loss_sum, correct and count zero: metrics have no noise of their own.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        TrainingDiverged: A weight is not finite.
        ValueError: features and labels do not fit each other, or as in `train_private`.
    """
    check_correlated(mechanism, correlated)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"expected features (N, width) and labels (N,), got {features.shape} and {labels.shape}")
    began = time.perf_counter()
    unit = mechanism.clip / mechanism.lot
    std = mechanism.noise_multiplier * unit
    trained = [parameter for parameter in output.parameters() if parameter.requires_grad]
    optimiser = make_optimiser(_OnFeatures(output, features), recipe)
    # Widened once, if there is room, and not in every step.
    table: NDArray[np.float32 | np.float64] = features.astype(np.float64) if features.nbytes <= _HELD else features
    if ids is None and correlated is not None:
        raise ValueError("correlated noise needs the tokens of each example, which decide its class")
    tokens = np.zeros((len(features), 0), dtype=np.int64) if ids is None else ids
    lengths = (tokens != pad_id).sum(axis=1)
    draw = drawing(tokens, lengths, labels, rate, correlated, random)
    try:
        for step in range(1, mechanism.steps + 1):
            if cancelled():
                raise TrainingCancelled(f"training was stopped after step {step - 1} of {mechanism.steps}")
            if persons is None:
                drawn = draw()
                weight, bias, loss_sum = clipped_sums(output, table, labels, drawn, mechanism.clip)
            else:
                found = persons.draw(rate, random)
                drawn = found.rows
                weight, bias, loss_sum = clipped_sums_of_persons(output, table, labels, found, mechanism.clip)
            # In units of the clip, as `add_noise` expects.
            output.weight.grad = weight.float()
            if output.bias.requires_grad:
                output.bias.grad = bias.float()
            add_noise(output, trained, unit, std, random, correlated)
            optimiser.step()
            mean = loss_sum / len(drawn) if len(drawn) else math.nan
            if len(drawn) and not math.isfinite(mean):
                mean = math.inf
            progress(Progress(step, mechanism.steps, 1, 1, mean))
        if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
            raise TrainingDiverged(
                f"a weight was not a finite number after {mechanism.steps} steps; lower {rates_of(recipe)} or raise "
                f"the mechanism's lot ({mechanism.lot}) in the job"
            )
    finally:
        output.zero_grad(set_to_none=True)
    return TrainingResult(mechanism.steps, 0.0, 0, 0, time.perf_counter() - began)


@torch.no_grad()
def clipped_sums(
    output: nn.Linear, features: NDArray[np.float32 | np.float64], labels: Ids, drawn: Ids, clip: float
) -> tuple[Tensor, Tensor, float]:
    """The sums of the drawn examples' clipped gradients, in units of the clip.

    Args:
        output: The head.
        features: (N, width).
        labels: (N,) indices into the job's labels.
        drawn: Places of the drawn examples, ascending and each once.
        clip: The largest L2 norm of an example's gradient.

    Returns:
        The matrix's sum (labels, width) and the bias's (labels,), float64, and the sum of the losses. The bias's means
        nothing if it is not trained.
    """
    matrix, bias = output.weight.double(), output.bias.double()
    weight_sum, bias_sum, loss_sum = torch.zeros_like(matrix), torch.zeros_like(bias), 0.0
    for first in range(0, len(drawn), _BLOCK):
        # A slice is no copy; full batches draw every row, in order.
        part = slice(first, first + _BLOCK)
        rows = part if len(drawn) == len(features) else drawn[part]
        x, y = torch.from_numpy(features[rows]).double(), torch.from_numpy(labels[rows])
        logs = (x @ matrix.T + bias).log_softmax(dim=1)
        losses = -logs[torch.arange(len(y)), y]
        g = logs.exp()
        g[torch.arange(len(y)), y] -= 1
        squared = g.square().sum(dim=1) * (torch.linalg.vecdot(x, x) + (1 if output.bias.requires_grad else 0))
        counts = torch.isfinite(squared)
        if not bool(counts.all()):
            # Left out instead of multiplied by zero, which would not make them finite.
            g, x, squared = g[counts], x[counts], squared[counts]
        g *= (clip_factors(squared, clip) / clip)[:, None]
        weight_sum += g.T @ x
        bias_sum += g.sum(dim=0)
        loss_sum += float(losses.sum())
    return weight_sum, bias_sum, loss_sum


@torch.no_grad()
def clipped_sums_of_persons(
    output: nn.Linear, features: NDArray[np.float32 | np.float64], labels: Ids, drawn: DrawnPersons, clip: float
) -> tuple[Tensor, Tensor, float]:
    """The sums of the drawn persons' clipped gradients, in units of the clip: as `clipped_sums`, for persons.

    A person whose gradient is not finite adds nothing.
    """
    matrix, bias = output.weight.double(), output.bias.double()
    weight_sum, bias_sum, loss_sum = torch.zeros_like(matrix), torch.zeros_like(bias), 0.0
    for part in drawn.pieces(max(1, min(_BLOCK, _PERSONS_HELD // matrix.numel()))):
        x, y = torch.from_numpy(features[part.rows]).double(), torch.from_numpy(labels[part.rows])
        logs = (x @ matrix.T + bias).log_softmax(dim=1)
        losses = -logs[torch.arange(len(y)), y]
        g = logs.exp()
        g[torch.arange(len(y)), y] -= 1
        g *= torch.from_numpy(part.weights)[:, None]
        # Side by side, (P, m, ...), so that one product makes the gradients of all persons.
        person = torch.from_numpy(part.person)
        counts = torch.bincount(person)
        place = torch.arange(len(y)) - (torch.cumsum(counts, 0) - counts)[person]
        most = int(counts.max())
        of_x, of_g = x.new_zeros(len(counts), most, x.shape[1]), g.new_zeros(len(counts), most, g.shape[1])
        of_x[person, place], of_g[person, place] = x, g
        gradients, biases = of_g.transpose(1, 2) @ of_x, of_g.sum(dim=1)
        squared = gradients.square().sum(dim=(1, 2))
        if output.bias.requires_grad:
            squared += biases.square().sum(dim=1)
        counted = torch.isfinite(squared)
        if not bool(counted.all()):
            gradients, biases, squared = gradients[counted], biases[counted], squared[counted]
        factors = clip_factors(squared, clip) / clip
        weight_sum += torch.tensordot(factors, gradients, dims=1)
        bias_sum += factors @ biases
        loss_sum += float(losses.sum())
    return weight_sum, bias_sum, loss_sum
