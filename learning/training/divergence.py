"""Checks whether a version has diverged, before any training and without data, and watches a training's own loss.

The check runs the version on probe texts from a public seed. Its result is a function of the version alone, so a member
may tell the coordinator under any mechanism, and that costs no privacy. The loss depends on the data, so what
`LossWatch` finds stays on the member's own screen and log.
"""

import math

import numpy as np
import torch

from learning.models import TextClassifier
from learning.training.clipping import probe_ids
from learning.training.local import DIVERGED_BEYOND, TrainingDiverged, rates_of
from tacit.job import JobDocument, Training
from tacit.mechanism import DpSgd, NoMechanism
from tacit.model import RvaeModel

__all__ = ["EXPLODED_BEYOND", "LossWatch", "VersionDiverged", "check_not_diverged"]

# A loss this many times what guessing costs has exploded. Training that works ends below 1; under noise, below 3.
EXPLODED_BEYOND = 10.0


class VersionDiverged(TrainingDiverged):
    """The version that a round starts from has diverged. Every member finds the same."""


def check_not_diverged(module: TextClassifier, recipe: Training, seed: int) -> None:
    """Raises if the module's logits on probe texts are not finite, or saturate softmax on every one of them.

    Args:
        module: The version, in any mode, on the CPU. It is left as it was.
        recipe: Its learning rates are named in the error.
        seed: Draws the probe texts; it may be public.

    Raises:
        VersionDiverged: The version has diverged; the text says what to do.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            logits = module(probe_ids(module, np.random.Generator(np.random.Philox(seed))))
    finally:
        module.train(training)
    spread = float((logits.amax(dim=1) - logits.amin(dim=1)).min())
    # Written so that nan fails too.
    if not spread <= DIVERGED_BEYOND:
        raise VersionDiverged(
            f"the version has diverged: its logits on probe texts are {spread:.3g} apart, so most examples have no "
            f"gradient. Abort the job and start a new one with a lower {rates_of(recipe)}"
        )


class LossWatch:
    """Notices a loss that has exploded by the end of a training, and a training that failed unseen.

    It compares the mean of the last quarter of the steps, since a single batch may be hard. A classifier is compared
    with guessing, ln(labels) nats: its first loss may have exploded in an earlier round. A model that generates text is
    compared with its own first loss.
    """

    def __init__(self, job: JobDocument) -> None:
        self._recipe = job.training
        by_steps = isinstance(job.mechanism, NoMechanism | DpSgd)
        # Noise on whole updates can spoil a version by itself, and a lower rate does not help then.
        self._noise = "" if by_steps else ", or with a smaller clip, fewer shared parameters or more members"
        generates = isinstance(job.model, RvaeModel)
        self._usual = None if generates else math.log(max(2, len(job.labels)))
        self._losses: list[float] = []
        self._first = math.nan
        self._failed = ""

    def step(self, step: int, steps: int, loss: float) -> None:
        """Takes the loss of a step; nan if no example was drawn."""
        if math.isnan(loss):
            return
        if math.isnan(self._first):
            self._first = loss
        if step > steps - max(1, steps // 4):
            self._losses.append(loss)

    def failed(self, error: str) -> None:
        """Takes the error of a training whose update is sent nevertheless."""
        self._failed = error

    def warning(self) -> str | None:
        """What went wrong and what to do; None if nothing has."""
        if self._failed:
            return (
                f"{self._failed}. The update is sent all the same, clipped and with noise. If every round ends like "
                f"this, ask the operator for a new job with a lower {rates_of(self._recipe)}{self._noise}"
            )
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
