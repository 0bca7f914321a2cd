"""Local training: one member, its own data, one round, in the phases that the job's method lays out.

Guarantees: the same module, data, recipe and seed give the same weights on the same machine, whatever else
draws random numbers in the process; an optimiser starts new in every phase, and neither its state nor a gradient
outlives it; what a phase does not name stays as it is, to the bit; what is trained, its gradients and the loss are
float32, whatever a frozen network computes in; a diverged training raises and returns nothing. It logs nothing and
knows neither text nor labels' names.

Leaves to others: the update (new minus base), clipping, noise, and how many threads torch may use.
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
from learning.models.division import EMBEDDING
from learning.training.mixture import training_mixture
from learning.training.phases import Phase
from tacit.job import Training

__all__ = [
    "DIVERGED_BEYOND",
    "Progress",
    "Scores",
    "TrainingCancelled",
    "TrainingDiverged",
    "TrainingResult",
    "check_examples",
    "evaluate",
    "forward_rows",
    "make_optimiser",
    "rates_of",
    "train",
]

Ids = NDArray[np.int64]

# A batch goes through the model in this many pieces of similar length, each padded to its own longest text.
# The gradient is the sum of the pieces', so this is the same step, with much less padding.
PIECES = 3

# Nats. A mean loss beyond this, or logits further apart on every made-up text, is divergence. Softmax in float32 gives
# exactly 0 beyond 104, so that most examples have no gradient any more; models that train well stay far below.
DIVERGED_BEYOND = 256.0


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
    """The loss or a weight is not a finite number, or the loss has exploded. The module is spoilt: discard it."""


def train(
    module: TextClassifier,
    ids: Ids,
    labels: Ids,
    recipe: Training,
    *,
    seed: int,
    phases: Sequence[Phase] = (),
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains the module in place and leaves it on the CPU in evaluation mode.

    ids: (N, S) padded with the module's pad_id; labels: (N,) places in the job's labels. recipe: epochs,
    batch, optimiser, learning rate, precision; every epoch goes over all examples of its phase once, in an order drawn
    from the seed. phases: what to train, in this order; none: everything, for the recipe's epochs. The loss is the
    batch's mean cross entropy, with `logit_adjustment` that of the logits beside the mixture of all `labels`. device:
    what `pick_device` gave. `cancelled` is asked before each step. The result's sums are those of the last epoch.

    Raises:
        TrainingCancelled: `cancelled` said so.
        TrainingDiverged: a loss or weight that is not finite, or a last epoch's mean loss beyond `DIVERGED_BEYOND`.
        ValueError: no examples, ids and labels that do not belong together, or a precision that the module lacks.
    """
    check_examples(ids, labels)
    began = time.perf_counter()
    everything = frozenset(name for name, _ in module.named_parameters())
    run = _Run(ids, labels, recipe, phases or (Phase(recipe.epochs, everything),), device, progress, cancelled)
    shuffle = np.random.Generator(np.random.Philox(seed))
    used = np.unique(np.append(ids, module.pad_id))
    module.to(device).train()
    module.seed(int(shuffle.integers(2**63)))
    try:
        # Adafactor's moments are means over a whole matrix, which fewer rows would change.
        whole = recipe.optimiser == "adafactor"
        with module.computing_in(recipe.precision), nullcontext(ids) if whole else module.narrowed(ids) as small_ids:
            # Where the training began, for the phases that stay near it.
            near = any(phase.mu for phase in run.phases)
            anchors = {name: each.detach().clone() for name, each in module.named_parameters()} if near else {}
            for place, phase in enumerate(run.phases):
                with module.training_only(phase.names):
                    at = slice(None) if whole else used
                    rows = None if phase.rows is None else torch.from_numpy(phase.rows[at]).to(device)
                    run.phase(module, small_ids, place, shuffle, anchors, rows)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()):
            raise run.diverged("a weight was not a finite number")
        if run.count and run.loss_sum / run.count > DIVERGED_BEYOND:
            raise run.diverged(f"the mean loss was {run.loss_sum / run.count:.3g} nats")
    finally:
        # Gradients are of the data as much as an optimiser's moments are.
        module.zero_grad(set_to_none=True)
        module.unseed()
        module.to("cpu").eval()
    return TrainingResult(run.step, run.loss_sum, run.correct, run.count, time.perf_counter() - began)


class _Run:
    """One training: what it goes over, and how far it is."""

    def __init__(
        self,
        ids: Ids,
        labels: Ids,
        recipe: Training,
        phases: Sequence[Phase],
        device: str,
        progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self.labels, self.recipe, self.phases, self.device = labels, recipe, tuple(phases), device
        self._progress, self._cancelled = progress, cancelled
        self._mixture: torch.Tensor | None = None
        self._examples = [np.arange(len(ids)) if phase.examples is None else phase.examples for phase in self.phases]
        each = [math.ceil(len(examples) / recipe.batch) for examples in self._examples]
        self.steps = sum(phase.epochs * steps for phase, steps in zip(self.phases, each, strict=True))
        self.epochs = sum(phase.epochs for phase in self.phases)
        self.step, self.epoch, self.loss_sum, self.correct, self.count = 0, 0, 0.0, 0, 0

    def phase(
        self,
        module: TextClassifier,
        ids: Ids,
        place: int,
        shuffle: np.random.Generator,
        anchors: dict[str, torch.Tensor],
        rows: torch.Tensor | None,
    ) -> None:
        """One phase over the narrowed ids. rows: which rows of the narrowed embedding move; None: all."""
        phase, examples, recipe = self.phases[place], self._examples[place], self.recipe
        lengths = (ids != module.pad_id).sum(axis=1)
        moving = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        optimiser = make_optimiser(module, recipe)
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
                for piece in _pieces(batch, lengths, 1 if self.device == "cuda" else PIECES):
                    logits, target = forward_rows(
                        module, ids, self.labels, lengths=lengths, rows=piece, device=self.device
                    )
                    logits = self._answers(logits)
                    loss = functional.cross_entropy(logits, target, reduction="sum")
                    torch.autograd.backward(loss / len(batch))
                    batch_loss += loss.item()
                    self.correct += int((logits.argmax(dim=1) == target).sum())
                self.step += 1
                # Before the step, which would spread it to the weights.
                if not math.isfinite(batch_loss):
                    raise self.diverged("the loss was not a finite number")
                for name, parameter in moving:
                    _bend(parameter, anchors.get(name), phase.mu, rows if name == EMBEDDING else None)
                optimiser.step()
                self.loss_sum += batch_loss
                self._progress(Progress(self.step, self.steps, self.epoch, self.epochs, batch_loss / len(batch)))

    def _answers(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, L) what the loss and the accuracy are of: the logits, beside the mixture of labels where the job adjusts
        them. What a phase leaves out counts in it: the mixture is the member's, and not the phase's.
        """
        if not self.recipe.logit_adjustment:
            return logits
        if self._mixture is None:
            self._mixture = torch.from_numpy(training_mixture(self.labels, logits.shape[1])).to(logits.device)
        return logits + self._mixture

    def diverged(self, what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"training diverged: {what} at step {self.step} of {self.steps}; lower {rates_of(self.recipe)} in the job"
        )


def _bend(parameter: torch.Tensor, anchor: torch.Tensor | None, mu: float, rows: torch.Tensor | None) -> None:
    """The proximal term's gradient, and none where a row does not move."""
    if parameter.grad is None:
        return
    with torch.no_grad():
        if mu and anchor is not None:
            parameter.grad.add_(parameter - anchor, alpha=mu)
        if rows is not None:
            # Plain SGD, Adam from moments of zero and Adafactor leave a row without a gradient where it is.
            parameter.grad[~rows] = 0


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
    """The recipe's optimiser over all parameters that have gradients, without any state; the embedding by a rate of its
    own where the recipe has one.
    """
    moving = _with_rates(module, recipe)
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(moving, lr=recipe.learning_rate)
    if recipe.optimiser == "adafactor":
        # transformers' own, since a job states its learning rate: torch's makes it relative to each parameter's size
        # and lets it fall. Lester et al. 2021 tune prompts with a rate that does neither.
        from transformers.optimization import Adafactor

        made: torch.optim.Optimizer = Adafactor(
            moving, lr=recipe.learning_rate, scale_parameter=False, relative_step=False
        )
        return made
    # Fused is the same step in one pass over memory.
    # Kingma and Ba 2015 with its own defaults.
    return torch.optim.Adam(moving, lr=recipe.learning_rate, fused=True)


def rates_of(recipe: Training) -> str:
    """The rates of a recipe, as a sentence about one that diverged names them."""
    said = f"training.learning_rate (it is {recipe.learning_rate:g})"
    own = recipe.embedding_learning_rate
    return said if own is None else f"{said} or training.embedding_learning_rate ({own:g})"


def _with_rates(module: TextClassifier, recipe: Training) -> list[dict[str, Any]]:
    """All parameters that have gradients, in groups of one rate each."""
    own = recipe.embedding_learning_rate
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            rate = recipe.learning_rate if own is None or name != EMBEDDING else own
            groups.setdefault(rate, []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


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
