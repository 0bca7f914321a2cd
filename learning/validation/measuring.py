"""Measures a version on rows of validation data: each row's loss and answer, and the sums that a member sends of them.

Guarantee: a row's loss and answer are a function of the version and of that row alone. So each row passes through the
model by itself, padded to its own length. In a batch, the last bits of its loss could depend on the other rows, and
after rounding to steps one row would move the contribution of another. A row that cannot be computed (for lack of
memory) counts as the largest loss and a wrong answer.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from learning.models.classifier import TextClassifier
from learning.text.corpus import EncodedArrays
from learning.training.local import TrainingCancelled, logits_of
from learning.validation.contribution import by_label, metrics_of
from secure_agg import RandomSource

__all__ = ["ValidationData", "measure"]

# Rows that are measured, one after another, before the next look at whether to stop.
_ROWS = 8


@dataclass(frozen=True)
class ValidationData:
    """The rows that a member measures.

    Attributes:
        measured: (N,) Which of all its rows.
        units: The unit of each of all its rows.
    """

    measured: NDArray[np.bool_]
    units: Sequence[Hashable]


def measure(
    module: TextClassifier,
    rows: EncodedArrays,
    units: Sequence[Hashable],
    loss_bound: float,
    random: RandomSource,
    *,
    device: str,
    cancelled: Callable[[], bool],
    labels: int | None = None,
) -> NDArray[np.int64]:
    """The sums over the units of some rows, without noise. They must not leave the member.

    Args:
        module: The version. It is left on the CPU in evaluation mode.
        rows: The rows.
        units: The unit of each of the member's rows; `rows.usable` are indices into it.
        loss_bound: A row's loss is clipped to this, in nats.
        random: Source of the rounding's randomness.
        device: Where to compute.
        cancelled: Asked before every few rows.
        labels: The number of labels, for a breakdown: the rows of each label are summed apart. None: all rows are
            summed together.

    Returns:
        (3,) whole numbers, in steps; (3 labels,) of a breakdown, label after label.

    Raises:
        TrainingCancelled: `cancelled` returned True.
    """
    losses, correct = np.full(len(rows.ids), np.inf), np.zeros(len(rows.ids), dtype=np.bool_)
    # Subnormal products take a processor many times longer. A version could be made so that only a chosen word has
    # them, and the time until READY would tell whether a row holds it.
    flushes = torch.set_flush_denormal(True)
    try:
        _measure_into(losses, correct, module, rows, device, cancelled)
    finally:
        if flushes:
            # The thread goes on to train, whose updates must not depend on what was measured before.
            torch.set_flush_denormal(False)
    of_rows = [units[at] for at in rows.usable.tolist()]
    if labels is None:
        return metrics_of(losses, correct, of_rows, loss_bound, random)
    return by_label(losses, correct, rows.labels, labels, of_rows, loss_bound, random)


def _measure_into(
    losses: NDArray[np.float64],
    correct: NDArray[np.bool_],
    module: TextClassifier,
    rows: EncodedArrays,
    device: str,
    cancelled: Callable[[], bool],
) -> None:
    for first in range(0, len(rows.ids), _ROWS):
        if cancelled():
            raise TrainingCancelled(f"measuring was stopped after {first} of {len(rows.ids)} rows")
        here = slice(first, first + _ROWS)
        losses[here], correct[here] = _measured(module, rows.ids[here], rows.labels[here], device)


def _measured(
    module: TextClassifier, ids: NDArray[np.int64], labels: NDArray[np.int64], device: str
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Losses and answers of a few rows."""
    try:
        logits = logits_of(module, ids, batch=1, device=device).astype(np.float64)
    except (RuntimeError, MemoryError):
        if len(ids) == 1:
            return np.array([np.inf]), np.array([False])
        each = [_measured(module, ids[at : at + 1], labels[at : at + 1], device) for at in range(len(ids))]
        return np.concatenate([losses for losses, _ in each]), np.concatenate([correct for _, correct in each])
    losses = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(ids)), labels]
    return losses, np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == labels)
