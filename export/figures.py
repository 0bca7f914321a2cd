"""The figures of a classifier on labelled texts, from its logits and the true labels. Only numpy is used.

Definitions:

- A label counts in balanced accuracy if the file has it, and in macro F1 if the file has it or the model answers it.
- The interval is that of Wilson 1927 at 95 %. It holds for texts drawn independently, and for a version that was not
  chosen on the same file.
- The expected calibration error is that of Guo et al. 2017, with `CALIBRATION_BINS` bins of equal width over the
  probability of the answer: the mean over all texts of |accuracy - confidence| of their bin.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["CALIBRATION_BINS", "Figures", "figures_of", "log_softmax", "wilson"]

CALIBRATION_BINS = 15
# The 97.5 % quantile of the standard normal distribution, for an interval of 95 %.
_Z = 1.959963984540054


class EvaluationCut(RuntimeError):
    """An evaluation was cut off before it had figures to show."""


@dataclass(frozen=True, eq=False)
class Figures:
    """How a classifier does on a file of labelled texts.

    Attributes:
        labels: The L labels, in the order of the model's outputs.
        confusion: (L, L) Numbers of texts; a row is a true label, a column an answer.
        loss: Mean cross entropy, in nats.
        calibration_error: In [0, 1].
    """

    labels: tuple[str, ...]
    confusion: NDArray[np.int64]
    loss: float
    calibration_error: float

    @property
    def examples(self) -> int:
        """The number of texts."""
        return int(self.confusion.sum())

    @property
    def correct(self) -> int:
        """The number of texts whose answer is their label."""
        return int(np.trace(self.confusion))

    @property
    def accuracy(self) -> float:
        """The share of correct answers, in [0, 1]."""
        return self.correct / self.examples

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy."""
        return wilson(self.correct, self.examples)

    @property
    def held(self) -> tuple[str, ...]:
        """The labels that the file has."""
        counts = self.confusion.sum(axis=1)
        return tuple(label for label, count in zip(self.labels, counts, strict=True) if count)

    @property
    def majority_label(self) -> str:
        """The file's most frequent label; of several, the first."""
        return self.labels[int(self.confusion.sum(axis=1).argmax())]

    @property
    def majority_accuracy(self) -> float:
        """The accuracy of always answering `majority_label`."""
        return int(self.confusion.sum(axis=1).max()) / self.examples

    @property
    def beats_majority(self) -> Literal["no", "unclear", "yes"]:
        """Whether the model is better than always answering `majority_label`.

        "no" if its accuracy is not higher, "unclear" if the majority's lies in its interval.
        """
        if self.accuracy <= self.majority_accuracy:
            return "no"
        return "unclear" if self.majority_accuracy >= self.interval[0] else "yes"

    @property
    def balanced_accuracy(self) -> float:
        """The mean share of correct answers over the labels that the file has."""
        counts = self.confusion.sum(axis=1)
        held = counts > 0
        return float((np.diagonal(self.confusion)[held] / counts[held]).mean())

    @property
    def macro_f1(self) -> float:
        """The mean F1 over the labels that the file has or the model answers."""
        # True positives twice, false negatives and false positives: F1 = 2 TP / (2 TP + FN + FP).
        both = self.confusion.sum(axis=1) + self.confusion.sum(axis=0)
        met = both > 0
        return float((2 * np.diagonal(self.confusion)[met] / both[met]).mean())


def figures_of(logits: NDArray[np.float32], expected: NDArray[np.int64], labels: tuple[str, ...]) -> Figures:
    """Computes the figures of a classifier.

    Args:
        logits: (N, L)
        expected: (N,) The index of each text's true label.
        labels: The L labels.

    Raises:
        ValueError: There are no texts, or the shapes do not fit each other.
    """
    if not len(expected) or logits.shape != (len(expected), len(labels)):
        raise ValueError(f"expected logits of shape (N, {len(labels)}) for N labels, got {logits.shape}")
    scores = log_softmax(logits)
    answers = scores.argmax(axis=1)
    confusion = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion, (expected, answers), 1)
    rows = np.arange(len(expected))
    return Figures(
        labels=labels,
        confusion=confusion,
        loss=float(-scores[rows, expected].mean()),
        calibration_error=_calibration_error(np.exp(scores[rows, answers]), answers == expected),
    )


def _calibration_error(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """The expected calibration error. Bin m of M holds confidences in ((m - 1) / M, m / M]."""
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def wilson(correct: int, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson 1927, without continuity correction).

    Args:
        correct: How many succeeded.
        count: Out of how many; at least 1.

    Returns:
        Its two ends, in [0, 1].
    """
    share, square = correct / count, _Z**2 / count
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * sqrt(share * (1 - share) / count + square / (4 * count))
    # There the formulas give 0 and 1, but for rounding.
    return (middle - half if correct else 0.0), (middle + half if correct < count else 1.0)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities along the last axis, in float64, without overflow."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
