"""A member's label distribution as logit adjustment (Menon et al. 2021, "Long-tail learning via logit adjustment").

If labels are spread unevenly, a member's answers are p(y | x) ~ p(x | y) p_m(y), where p_m differs between members. A
model that learns one member's p_m unlearns it at the next, and the shared part swings with the cohort. With log p_m(y)
added while a member trains, the logits learn only what all members have in common: log p(x | y), up to a number that is
the same for all labels. By themselves they answer as if all labels were equally frequent; a member's own model adds its
log p_m again.

p_m is counted in the rows that are trained on. It is no separate input, so the clip and noise on the resulting change
cover it.

A member with a single label has no two answers to tell apart: it could teach nothing but its label distribution. So it
teaches nothing (`training_mixture`).
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["log_mixture", "training_mixture"]


def log_mixture(labels: NDArray[np.int64], classes: int) -> NDArray[np.float32]:
    """The logarithms of the labels' shares.

    One more of each label is counted, so a label that the member does not have is rare and not impossible.

    Args:
        labels: (N,) label indices below `classes`.
        classes: L, the job's labels.

    Returns:
        (L,) float32.
    """
    counts = np.bincount(labels, minlength=classes) + 1.0
    found: NDArray[np.float32] = np.log(counts / counts.sum()).astype(np.float32)
    return found


def training_mixture(labels: NDArray[np.int64], classes: int) -> NDArray[np.float32]:
    """What is added to the logits while a member trains on these labels; shapes as in `log_mixture`.

    It is `log_mixture`, unless all labels are the same. Then the other labels are impossible (minus infinity): the
    answer is certain, loss and gradients are exactly zero, and no parameter moves. If the others were merely rare, the
    loss would have no minimum. Its gradients would be tiny and all in one direction, Adam would turn them into whole
    steps, and the shared part would forget the other labels whenever such a member is in a round
    (docs/decisions/0034-logit-adjustment.md).
    """
    (held,) = np.nonzero(np.bincount(labels, minlength=classes))
    if len(held) != 1:
        return log_mixture(labels, classes)
    sure = np.full(classes, -np.inf, np.float32)
    sure[held] = 0
    return sure
