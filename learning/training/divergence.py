"""Checks whether a version has diverged, before any training and without data.

The check runs the version on probe texts from a public seed. Its result is a function of the version alone, so a member
may tell the coordinator under any mechanism, and that costs no privacy.
"""

import numpy as np
import torch

from learning.models.classifier import TextModel
from learning.training.clipping import probe_ids
from learning.training.outcome import check_spread
from tacit.job import Training

__all__ = ["check_not_diverged"]


def check_not_diverged(module: TextModel, recipe: Training, seed: int) -> None:
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
    spread = float((logits.amax(dim=-1) - logits.amin(dim=-1)).min())
    check_spread(spread, recipe)
