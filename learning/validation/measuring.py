"""Measures a version on rows of validation data: each row's loss and answer, and the sums that a member sends of them.

Guarantee: a row's loss and answer are a function of the version and of that row alone. So each row passes through the
model by itself, padded to its own length. In a batch, the last bits of its loss could depend on the other rows, and
after rounding to steps one row would move the contribution of another. A row that cannot be computed (for lack of
memory, or because it fails a check in a plugin's module) counts as the largest loss and a wrong answer.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from learning.backbones.subnormals import flushed
from learning.text.corpus import EncodedArrays, EncodedExamples
from learning.training.flushing import flushed_with_torch
from learning.training.outcome import TrainingCancelled
from learning.validation.contribution import by_label, metrics_of, noised
from secure_agg import RandomSource
from tacit.job import JobDocument
from tacit.mechanism import NoMechanism

if TYPE_CHECKING:
    from learning.models.classifier import TextClassifier

__all__ = ["AnswersRows", "ValidationData", "measure", "measured_metrics"]

# Rows that are measured, one after another, before the next look at whether to stop.
_ROWS = 8


@runtime_checkable
class AnswersRows(Protocol):
    """A model without torch that reads each row by itself."""

    def open(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the network in memory inside the context; `row_logits` alone loads it for each call."""

    def row_logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits (B, L) of rows of ids (B, S), padded."""


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
    module: "TextClassifier | AnswersRows",
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
    # Products of subnormal numbers take a processor many times longer. A version could be made so that only a chosen
    # word has them, and the time until READY would tell whether a row holds it.
    with flushed() if isinstance(module, AnswersRows) else flushed_with_torch():
        _measure_into(losses, correct, module, rows, device, cancelled)
    of_rows = [units[at] for at in rows.usable.tolist()]
    if labels is None:
        return metrics_of(losses, correct, of_rows, loss_bound, random)
    return by_label(losses, correct, rows.labels, labels, of_rows, loss_bound, random)


def _measure_into(
    losses: NDArray[np.float64],
    correct: NDArray[np.bool_],
    module: "TextClassifier | AnswersRows",
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
    module: "TextClassifier | AnswersRows", ids: NDArray[np.int64], labels: NDArray[np.int64], device: str
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Losses and answers of a few rows."""
    try:
        logits = _logits(module, ids, device).astype(np.float64)
    except Exception:  # noqa: BLE001
        # Whatever it is: a version can be made in which a chosen text leads to it, and a failed answer would tell.
        if len(ids) == 1:
            return np.array([np.inf]), np.array([False])
        each = [_measured(module, ids[at : at + 1], labels[at : at + 1], device) for at in range(len(ids))]
        return np.concatenate([losses for losses, _ in each]), np.concatenate([correct for _, correct in each])
    losses = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(ids)), labels]
    return losses, np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == labels)


def _logits(module: "TextClassifier | AnswersRows", ids: NDArray[np.int64], device: str) -> NDArray[np.float32]:
    if isinstance(module, AnswersRows):
        return module.row_logits(ids)
    from learning.training.local import logits_of

    return logits_of(module, ids, batch=1, device=device)


def measured_metrics(
    job: JobDocument,
    module: "TextClassifier | AnswersRows",
    corpus: EncodedExamples,
    validation: ValidationData | None,
    random: RandomSource,
    device: str,
    cancelled: Callable[[], bool],
) -> NDArray[np.int64] | None:
    """The version's metrics with this member's noise, drawn once: every attempt sends them. None if the job has none.

    The member is one unit if the mechanism protects it as a whole.
    """
    if job.metrics is None or isinstance(job.mechanism, NoMechanism):
        return None
    found = None
    if validation is not None:
        rows = corpus.read_validation(validation.measured)
        units = ["all"] * corpus.population if job.mechanism.unit == "member" else validation.units
        found = measure(module, rows, units, job.metrics.loss_bound, random, device=device, cancelled=cancelled)
    return noised(found, job.metrics.noise, random)
