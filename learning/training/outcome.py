"""What a training reports: its steps, its result, how it can fail, and what its loss says. Nothing here needs torch.

`LossWatch` reads the loss, which depends on the data, so what it finds stays on the member's own screen and log.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tacit.job import JobDocument, Training
from tacit.mechanism import DpSgd, NoMechanism
from tacit.model import RvaeModel
from tacit.prompt import writes

__all__ = [
    "DIVERGED_BEYOND",
    "EXPLODED_BEYOND",
    "LossWatch",
    "ModelUnsuitable",
    "PerExampleGradientsUnavailable",
    "Progress",
    "TrainingCancelled",
    "TrainingDiverged",
    "TrainingLost",
    "TrainingResult",
    "VersionDiverged",
    "check_spread",
    "losing",
    "rates_of",
    "recipe_of",
]

# Nats. A larger mean loss, or logits further apart on every probe text, is divergence. Softmax in float32 gives exactly
# 0 beyond 104, so most examples have no gradient any more. Models that train well stay far below.
DIVERGED_BEYOND = 256.0

# A loss this many times what guessing costs has exploded. Training that works ends below 1; under noise, below 3.
EXPLODED_BEYOND = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The state after a step. `step` counts from 1 to `steps` over all epochs; `loss` is the batch's mean."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a training did.

    Attributes:
        steps: Steps taken.
        loss_sum, correct: Sums over the member's examples in the last epoch (with dropout, while the weights still
            move), so the sums of several members add up.
        count: Examples in the last epoch.
        seconds: Wall time.
    """

    steps: int
    loss_sum: float
    correct: int
    count: int
    seconds: float


class PerExampleGradientsUnavailable(ValueError):
    """DP-SGD cannot clip the gradients of this module: they cannot be told apart by example. The text says why."""


class ModelUnsuitable(PerExampleGradientsUnavailable):
    """The same, found by the self-check on probe texts: it says nothing about the member's data."""


class TrainingCancelled(Exception):
    """Training was asked to stop. The module is half trained: discard it."""


class TrainingDiverged(Exception):
    """The loss or a weight is not finite, or the loss has exploded. The module is spoilt: discard it."""


class VersionDiverged(TrainingDiverged):
    """The version that a round starts from has diverged. Every member finds the same."""


class TrainingLost(RuntimeError):
    """The training failed after it had read the data, so the failure itself may depend on the data."""


@contextmanager
def losing(job: JobDocument, *, public: bool) -> Iterator[None]:
    """Turns whatever fails after the first look at the data into `TrainingLost`, apart from what tells nothing of it.

    Args:
        job: The job.
        public: Whether the model's shape depends on no data. Then it may be blamed.
    """
    try:
        yield
    except TrainingCancelled:
        raise
    except ModelUnsuitable as error:
        if public:
            raise
        raise TrainingLost(str(error)) from error
    except TrainingDiverged as error:
        if isinstance(job.mechanism, NoMechanism):
            raise
        raise TrainingLost(str(error)) from error
    except Exception as error:
        raise TrainingLost(str(error)) from error


def recipe_of(job: JobDocument, round: int | None) -> Training:
    """What a member does in a round, from 1, with the rates of the job's schedule. None: with the whole rates."""
    if round is None or job.training.schedule is None:
        return job.training
    return job.training.in_round(round, job.rounds.count)


def rates_of(recipe: Training) -> str:
    """The learning rates of a recipe, as an error about a divergence names them."""
    said = f"training.learning_rate (it is {recipe.learning_rate:g})"
    own = recipe.embedding_learning_rate
    return said if own is None else f"{said} or training.embedding_learning_rate ({own:g})"


def check_spread(spread: float, recipe: Training) -> None:
    """Raises VersionDiverged if logits on probe texts are not finite, or saturate softmax on every one of them.

    Args:
        spread: The least difference, over the probe texts, of a text's largest and smallest logit.
        recipe: Its learning rates are named in the error.
    """
    # Written so that nan fails too.
    if not spread <= DIVERGED_BEYOND:
        raise VersionDiverged(
            f"the version has diverged: its logits on probe texts are {spread:.3g} apart, so most examples have no "
            f"gradient. Abort the job and start a new one with a lower {rates_of(recipe)}"
        )


class LossWatch:
    """Notices a loss that has exploded by the end of a training, and a training that failed unseen.

    It compares the mean of the last quarter of the steps, since a single batch may be hard. A classifier is compared
    with guessing, ln(labels) nats: its first loss may have exploded in an earlier round. A model that generates or
    writes text is compared with its own first loss.
    """

    def __init__(self, job: JobDocument) -> None:
        self._recipe = job.training
        by_steps = isinstance(job.mechanism, NoMechanism | DpSgd)
        # Noise on whole updates can spoil a version by itself, and a lower rate does not help then.
        self._noise = "" if by_steps else ", or with a smaller clip, fewer shared parameters or more members"
        generates = isinstance(job.model, RvaeModel) or writes(job.model)
        self._usual = None if generates else math.log(max(2, len(job.labels)))
        self._losses: list[float] = []
        self._first = math.nan
        self._failed: Exception | None = None

    def step(self, step: int, steps: int, loss: float) -> None:
        """Takes the loss of a step; nan if no example was drawn."""
        if math.isnan(loss):
            return
        if math.isnan(self._first):
            self._first = loss
        if step > steps - max(1, steps // 4):
            self._losses.append(loss)

    def failed(self, error: Exception) -> None:
        """Takes the error of a training whose update is sent nevertheless."""
        self._failed = error

    def warning(self) -> str | None:
        """What went wrong and what to do; None if nothing has."""
        sent = "The update is sent all the same, clipped and with noise. If every round ends like this, "
        if isinstance(self._failed, TrainingDiverged):
            lower = f"a lower {rates_of(self._recipe)}{self._noise}"
            return f"{self._failed}. {sent}ask the operator for a new job with {lower}"
        if self._failed is not None:
            # No rate helps against too little memory, a plugin's fault or ours.
            what = f"{type(self._failed).__name__}: {self._failed}".removesuffix(": ")
            return f"training failed ({what}). {sent}stop this member, which pays for each, and tell the operator why"
        if not self._losses:
            return None
        loss = sum(self._losses) / len(self._losses)
        usual = self._first if self._usual is None else self._usual
        if loss <= EXPLODED_BEYOND * usual:
            return None
        than = "it was at first" if self._usual is None else "guessing costs"
        return (
            f"training is exploding: the loss ended at {loss:.3g}, and {than} {usual:.3g}. Ask the operator to compare "
            f"this version with earlier ones, and for a new job with a lower {rates_of(self._recipe)}{self._noise}"
        )
