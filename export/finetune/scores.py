"""Scores a classifier on a test set: accuracy, figures for each label, and the accuracy of a constant answer."""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tacit.documents import AtMost, Part, Short
from tacit.limits import MAX_LABELS

__all__ = ["LabelScores", "TestScores", "scores_of"]

Share = Field(ge=0, le=1)


class LabelScores(Part):
    """One label's number of test rows, precision, recall and F1. A figure without rows to count is 0."""

    label: Short
    rows: int = Field(ge=0)
    precision: float = Share
    recall: float = Share
    f1: float = Share


class TestScores(Part):
    """Scores over a test set.

    Args:
        rows: number of rows.
        accuracy: in [0, 1].
        standard_error: binomial standard error of the accuracy.
        macro_f1: mean F1 over the labels that have rows.
        majority: accuracy of answering every row with the most frequent label.
        majority_label: that label.
        labels: figures for each label.
    """

    rows: int = Field(ge=1)
    accuracy: float = Share
    standard_error: float = Share
    macro_f1: float = Share
    majority: float = Share
    majority_label: Short
    labels: Annotated[tuple[LabelScores, ...], AtMost(MAX_LABELS)]


def scores_of(expected: NDArray[np.int64], predicted: NDArray[np.int64], labels: Sequence[str]) -> TestScores:
    """Computes scores.

    Args:
        expected: (N,), places in `labels`.
        predicted: (N,), places in `labels`.
        labels: the labels' names.

    Raises:
        ValueError: there are no rows, or the shapes differ.
    """
    if expected.ndim != 1 or expected.shape != predicted.shape or not len(expected):
        raise ValueError(
            f"expected one prediction for each row and at least one row, got {expected.shape} and {predicted.shape}"
        )
    rows = np.bincount(expected, minlength=len(labels))
    said = np.bincount(predicted, minlength=len(labels))
    right = np.bincount(expected[expected == predicted], minlength=len(labels))
    each = tuple(
        LabelScores(
            label=label,
            rows=int(rows[at]),
            precision=_share(right[at], said[at]),
            recall=_share(right[at], rows[at]),
            f1=_share(2 * right[at], said[at] + rows[at]),
        )
        for at, label in enumerate(labels)
    )
    accuracy = float(right.sum() / len(expected))
    return TestScores(
        rows=len(expected),
        accuracy=accuracy,
        standard_error=math.sqrt(accuracy * (1 - accuracy) / len(expected)),
        # A label without rows has no recall, but would weigh as much as any other.
        macro_f1=float(np.mean([score.f1 for score in each if score.rows])),
        majority=float(rows.max() / len(expected)),
        majority_label=labels[int(rows.argmax())],
        labels=each,
    )


def _share(part: np.int64, whole: np.int64) -> float:
    return float(part / whole) if whole else 0.0
