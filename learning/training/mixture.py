"""A member's own mixture of labels, beside the logits (Menon et al. 2021, "Long-tail learning via logit adjustment").

Where labels are dealt unevenly, a member's answers are p(y | x) ~ p(x | y) p_m(y), and p_m is another one with each
member: a model that learns it unlearns it at the next one, and the shared part swings with the cohort. With log p_m(y)
added while a member trains, the logits are left to learn what all members have in common, log p(x | y) up to a number
that is the same for all labels. Alone they answer as if every label were as frequent; a member's own model adds its own
log p_m again.

p_m is counted in the rows that are trained on: it is no input of its own, and whatever clips and noises the change that
they make covers it.

A member of one label alone has no two answers to tell apart: all it could teach is its mixture. It teaches nothing
(`training_mixture`).
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["log_mixture", "training_mixture"]


def log_mixture(labels: NDArray[np.int64], classes: int) -> NDArray[np.float32]:
    """(L,) logarithms of the labels' shares, float32. labels: (N,) places below `classes`. One of each is counted more
    than there is, so that a label that a member does not have is rare to it and not impossible.
    """
    counts = np.bincount(labels, minlength=classes) + 1.0
    found: NDArray[np.float32] = np.log(counts / counts.sum()).astype(np.float32)
    return found


def training_mixture(labels: NDArray[np.int64], classes: int) -> NDArray[np.float32]:
    """(L,) what stands beside the logits while a member trains on these labels, float32; shapes as in `log_mixture`.

    That of `log_mixture`; but where all labels are one, the others are impossible (minus infinity). The answer is sure
    then, loss and gradients are exactly zero, and no parameter moves. With others that are merely rare the loss would
    have no lowest point: its gradients are tiny and all point the same way, Adam makes whole steps of them, and the
    shared part forgets the other labels whenever such a member is in a round (docs/decisions/0034-logit-adjustment.md).
    """
    (held,) = np.nonzero(np.bincount(labels, minlength=classes))
    if len(held) != 1:
        return log_mixture(labels, classes)
    sure = np.full(classes, -np.inf, np.float32)
    sure[held] = 0
    return sure
