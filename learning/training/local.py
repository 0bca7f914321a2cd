"""Local training of one member in one round, on its own data, in the phases of the job's method.

Guarantees:

- The same module, data, recipe and seed give the same weights on the same machine, whatever else draws random numbers
  in the process.
- Every phase has a new optimiser; neither its state nor a gradient outlives the phase.
- Parameters that a phase does not name stay the same to the bit.
- Trained parameters, their gradients and the loss are float32, whatever a frozen network computes in. A GPU multiplies
  in float32 too, not in TF32.
- A diverged training raises and returns nothing.
- Nothing is logged; the module sees neither texts nor label names.

Leaves to others: the update (trained weights minus the version), clipping, noise, and torch's number of threads.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from learning.models import TextClassifier
from learning.models.classifier import TextModel
from learning.models.division import EMBEDDING
from learning.text.dialogue import IGNORED
from learning.training.device import whole_float32
from learning.training.mixture import training_mixture
from learning.training.outcome import (
    DIVERGED_BEYOND,
    Progress,
    TrainingCancelled,
    TrainingDiverged,
    TrainingResult,
    rates_of,
)
from learning.training.phases import Phase
from tacit.job import Training

__all__ = [
    "DIVERGED_BEYOND",
    "Progress",
    "Scores",
    "TrainingCancelled",
    "TrainingDiverged",
    "TrainingResult",
    "all_finite",
    "check_examples",
    "evaluate",
    "logits_of",
    "make_optimiser",
    "pieces_of",
    "rates_of",
    "rows_at",
    "train",
]

Ids = NDArray[np.int64]

# A batch goes through the model in at most this many pieces of similar length, each padded to its own longest text. The
# gradient is the sum of the pieces' gradients, so the step is the same with much less padding.
PIECES = 3


@dataclass(frozen=True, slots=True)
class Scores:
    """Accuracy in [0, 1] and mean loss (cross entropy, nats) over `count` examples."""

    accuracy: float
    loss: float
    count: int


def train(
    module: TextModel,
    ids: Ids,
    targets: Ids,
    recipe: Training,
    *,
    seed: int,
    phases: Sequence[Phase] = (),
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains the module in place and leaves it on the CPU in evaluation mode.

    The loss is the batch's mean cross entropy; a row of a model that writes counts with the mean over its targets. With
    `logit_adjustment`, the log shares of all labels are added to the logits first.

    Args:
        module: The model to train.
        ids: (N, S), padded with the module's pad_id.
        targets: (N,) indices into the job's labels; (N, S) the ids to predict, for a model that writes.
        recipe: Epochs, batch, optimiser, learning rate and precision. Every epoch goes over all examples of its phase
            once, in an order drawn from the seed. `microbatch` bounds the rows in memory at a time, and changes the
            step by rounding alone. With `checkpointing`, a model that writes computes activations again.
        seed: Orders batches and seeds the module's dropout.
        phases: What to train, in order; by default everything, for the recipe's epochs.
        device: A device from `pick_device`.
        progress: Called after each step.
        cancelled: Asked before each step.

    Returns:
        The result; its sums are those of the last epoch.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        TrainingDiverged: A loss or weight is not finite, or the last epoch's mean loss exceeds `DIVERGED_BEYOND`.
        ValueError: There are no examples, ids and labels do not fit each other, or the module lacks the precision.
    """
    check_examples(ids, targets)
    began = time.perf_counter()
    everything = frozenset(name for name, _ in module.named_parameters())
    run = _Run(ids, targets, recipe, phases or (Phase(recipe.epochs, everything),), device, progress, cancelled)
    shuffle = np.random.Generator(np.random.Philox(seed))
    used = np.unique(np.append(ids, module.pad_id))
    module.to(device).train()
    module.checkpointing = recipe.checkpointing
    module.seed(int(shuffle.integers(2**63)))
    try:
        # Adafactor's moments are means over a whole matrix, which fewer rows would change. Decay moves every row.
        whole = recipe.optimiser == "adafactor" or bool(recipe.weight_decay)
        narrowed = nullcontext(ids) if whole else module.narrowed(ids)
        with whole_float32(), module.computing_in(recipe.precision), narrowed as small_ids:
            # Where the training began, for the phases that stay near it.
            near = any(phase.mu for phase in run.phases)
            anchors = {name: each.detach().clone() for name, each in module.named_parameters()} if near else {}
            for place, phase in enumerate(run.phases):
                with module.training_only(phase.names):
                    at = slice(None) if whole else used
                    rows = None if phase.rows is None else torch.from_numpy(phase.rows[at]).to(device)
                    run.phase(module, small_ids, place, shuffle, anchors, rows)
        if not all_finite(module):
            raise run.diverged("a weight was not a finite number")
        if run.count and run.loss_sum / run.count > DIVERGED_BEYOND:
            raise run.diverged(f"the mean loss was {run.loss_sum / run.count:.3g} nats")
    finally:
        # Gradients depend on the data as much as an optimiser's moments do.
        module.zero_grad(set_to_none=True)
        module.unseed()
        module.checkpointing = False
        module.to("cpu").eval()
    return TrainingResult(run.step, run.loss_sum, run.correct, run.count, time.perf_counter() - began)


class _Run:
    """One training: its phases, and how far it is."""

    def __init__(
        self,
        ids: Ids,
        targets: Ids,
        recipe: Training,
        phases: Sequence[Phase],
        device: str,
        progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self.targets, self.recipe, self.phases, self.device = targets, recipe, tuple(phases), device
        self._progress, self._cancelled = progress, cancelled
        self._mixture: torch.Tensor | None = None
        self._examples = [np.arange(len(ids)) if phase.examples is None else phase.examples for phase in self.phases]
        each = [math.ceil(len(examples) / recipe.batch) for examples in self._examples]
        self.steps = sum(phase.epochs * steps for phase, steps in zip(self.phases, each, strict=True))
        self.epochs = sum(phase.epochs for phase in self.phases)
        self.step, self.epoch, self.loss_sum, self.correct, self.count = 0, 0, 0.0, 0, 0

    def phase(
        self,
        module: TextModel,
        ids: Ids,
        place: int,
        shuffle: np.random.Generator,
        anchors: dict[str, torch.Tensor],
        kept: torch.Tensor | None,
    ) -> None:
        """Runs one phase over the narrowed ids. `kept`: the narrowed embedding's rows that move; None means all."""
        phase, examples, recipe = self.phases[place], self._examples[place], self.recipe
        lengths = module.lengths(ids, self.targets)
        adjusted = self._answers if recipe.logit_adjustment else None
        moving = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        optimiser = make_optimiser(module, recipe)
        fixed = None if kept is None else (~kept, module.embedding.weight.detach()[~kept])
        for _ in range(phase.epochs):
            self.epoch += 1
            self.loss_sum, self.correct, self.count = 0.0, 0, len(examples)
            order = examples[shuffle.permutation(len(examples))]
            for first in range(0, len(order), recipe.batch):
                if self._cancelled():
                    raise TrainingCancelled(f"training was stopped after step {self.step} of {self.steps}")
                batch = order[first : first + recipe.batch]
                optimiser.zero_grad(set_to_none=True)
                batch_loss = 0.0
                for rows in pieces_of(batch, lengths, recipe, self.device, least=module.piece_positions):
                    inputs, target = rows_at(module, ids, self.targets, lengths=lengths, rows=rows, device=self.device)
                    losses, right = module.judged(inputs, target, adjusted)
                    loss = losses.sum()
                    # The gradients of the pieces add up to that of the batch's mean.
                    torch.autograd.backward(loss / len(batch))
                    batch_loss += loss.item()
                    self.correct += int(right.sum())
                self.step += 1
                # Checked before the step, which would spread it to the weights.
                if not math.isfinite(batch_loss):
                    raise self.diverged("the loss was not a finite number")
                for name, parameter in moving:
                    _bend(parameter, anchors.get(name), phase.mu, kept if name == EMBEDDING else None)
                optimiser.step()
                if fixed is not None:
                    # A row without a gradient still decays.
                    with torch.no_grad():
                        module.embedding.weight[fixed[0]] = fixed[1]
                self.loss_sum += batch_loss
                self._progress(Progress(self.step, self.steps, self.epoch, self.epochs, batch_loss / len(batch)))

    def _answers(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, L) The logits that loss and accuracy use: with the member's label distribution if the job adjusts them.

        Examples that a phase leaves out count too: the distribution is the member's, not the phase's.
        """
        if self._mixture is None:
            self._mixture = torch.from_numpy(training_mixture(self.targets, logits.shape[1])).to(logits.device)
        return logits + self._mixture

    def diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"training diverged: {what} at step {self.step} of {self.steps}; lower {rates_of(self.recipe)} in the job"
        )


def _bend(parameter: torch.Tensor, anchor: torch.Tensor | None, mu: float, rows: torch.Tensor | None) -> None:
    """Adds the proximal term's gradient, and zeroes the gradient of rows that do not move."""
    if parameter.grad is None:
        return
    with torch.no_grad():
        if mu and anchor is not None:
            parameter.grad.add_(parameter - anchor, alpha=mu)
        if rows is not None:
            # Adafactor's moments are means over rows, which those of others must not change.
            parameter.grad[~rows] = 0


def evaluate(module: TextClassifier, ids: Ids, labels: Ids, *, batch: int = 256, device: str = "cpu") -> Scores:
    """Accuracy and mean loss of the module, without dropout; shapes as in `train`.

    Raises:
        ValueError: There are no examples, or ids and labels do not fit each other.
    """
    check_examples(ids, labels)
    logits, target = torch.from_numpy(logits_of(module, ids, batch=batch, device=device)), torch.from_numpy(labels)
    correct = int((logits.argmax(dim=1) == target).sum())
    return Scores(correct / len(ids), functional.cross_entropy(logits, target).item(), len(ids))


@torch.no_grad()
def logits_of(module: TextClassifier, ids: Ids, *, batch: int = 256, device: str = "cpu") -> NDArray[np.float32]:
    """The module's logits, (N, L), without dropout. ids: (N, S), padded."""
    module.to(device).eval()
    lengths, found = (ids != module.pad_id).sum(axis=1), []
    # By length, for little padding; a text's logits do not depend on its batch.
    by_length = np.argsort(lengths, kind="stable")
    try:
        with whole_float32():
            for first in range(0, len(ids), batch):
                inputs = _inputs(module, ids, lengths=lengths, rows=by_length[first : first + batch], device=device)
                found.append(module(inputs).float().cpu().numpy())
    finally:
        module.to("cpu")
    logits: NDArray[np.float32] = np.concatenate(found)[np.argsort(by_length, kind="stable")]
    return logits


def check_examples(ids: Ids, targets: Ids) -> None:
    """Raises ValueError if there are no examples, or ids and targets do not fit each other."""
    if ids.ndim != 2 or targets.shape not in (ids.shape[:1], ids.shape):
        raise ValueError(
            f"expected ids of shape (N, S) and targets of shape (N,) or (N, S), got {ids.shape} and {targets.shape}"
        )
    if not len(ids):
        raise ValueError("there are no examples; a member needs at least one to take part")


def make_optimiser(module: TextModel, recipe: Training) -> torch.optim.Optimizer:
    """A new optimiser of the recipe over all parameters that have gradients, with the embedding's own rate if given."""
    moving = _with_rates(module, recipe)
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(moving, lr=recipe.learning_rate)
    if recipe.optimiser == "adafactor":
        # From transformers, since a job states its learning rate: torch's Adafactor scales it by each parameter's size
        # and lets it fall. Lester et al. 2021 tune prompts with a rate that does neither.
        from transformers.optimization import Adafactor

        made: torch.optim.Optimizer = Adafactor(
            moving, lr=recipe.learning_rate, scale_parameter=False, relative_step=False
        )
        return made
    if recipe.optimiser == "adamw":
        # Loshchilov and Hutter 2019.
        return torch.optim.AdamW(moving, lr=recipe.learning_rate, weight_decay=recipe.weight_decay or 0.0, fused=True)
    # Kingma and Ba 2015 with the paper's defaults. Fused is the same step in one pass over memory.
    return torch.optim.Adam(moving, lr=recipe.learning_rate, fused=True)


def _with_rates(module: TextModel, recipe: Training) -> list[dict[str, Any]]:
    """All parameters that have gradients, grouped by rate."""
    own = recipe.embedding_learning_rate
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            rate = recipe.learning_rate if own is None or name != EMBEDDING else own
            groups.setdefault(rate, []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


@torch.no_grad()
def all_finite(module: torch.nn.Module) -> bool:
    """Whether every parameter is finite."""
    # The terms of a finite sum are finite, which is the usual case and found ten times faster.
    return all(bool(each.sum().isfinite()) or bool(each.isfinite().all()) for each in module.parameters())


def pieces_of(chosen: Ids, lengths: Ids, recipe: Training, device: str, *, least: int = 1) -> Iterator[Ids]:
    """The chosen rows by length, for much less padding, in pieces of at most `microbatch` rows (`batch` without it).

    Args:
        chosen: (B,) places of rows.
        lengths: (N,) positions of all rows that are no padding.
        recipe: bounds the rows of a piece.
        device: where they are trained. A GPU takes longer for more pieces than for more padding.
        least: positions of a piece, without padding, that are worth a pass. No piece has fewer on average because of
            padding alone.
    """
    by_length = chosen[np.argsort(lengths[chosen], kind="stable")]
    worth = 1 if device == "cuda" else min(PIECES, max(1, int(lengths[chosen].sum()) // least))
    count = max(worth, math.ceil(len(chosen) / (recipe.microbatch or recipe.batch)))
    yield from (piece for piece in np.array_split(by_length, count) if len(piece))


def rows_at(
    module: TextModel, ids: Ids, targets: Ids, *, lengths: Ids, rows: Ids, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets of these rows, padded to the longest of them by `lengths`, which may exceed S."""
    inputs = _inputs(module, ids, lengths=lengths, rows=rows, device=device)
    wanted = targets[rows] if targets.ndim == 1 else _wide(targets[rows, : inputs.shape[1]], inputs.shape[1], IGNORED)
    return inputs, torch.from_numpy(np.ascontiguousarray(wanted)).to(device)


def _inputs(module: TextModel, ids: Ids, *, lengths: Ids, rows: Ids, device: str) -> torch.Tensor:
    width = max(int(lengths[rows].max()), module.min_tokens)
    return torch.from_numpy(np.ascontiguousarray(_wide(ids[rows, :width], width, module.pad_id))).to(device)


def _wide(rows: Ids, width: int, padding: int) -> Ids:
    """Rows (B, S) with `width` columns, of which the new ones hold `padding`."""
    lacking = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, lacking)), constant_values=padding) if lacking > 0 else rows
