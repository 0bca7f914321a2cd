"""Measures an exported model's accuracy and loss with nothing but the exported model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export.predictor import Predictor, log_softmax
from learning.text.data import DataInvalid, Example, label_ids, read_examples, text_rows

# `read_examples` and `text_rows` are re-exported for commands that evaluate, which may import from this package only.
__all__ = ["Evaluation", "evaluate_bundle", "read_examples", "text_rows"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy in [0, 1] and mean loss (cross entropy, nats) over a number of examples."""

    accuracy: float
    loss: float
    examples: int


def evaluate_bundle(folder: Path, examples: Sequence[Example]) -> Evaluation:
    """Accuracy and loss of a model bundle over labelled examples.

    Raises:
        BundleInvalid: the folder is not a model bundle, or is damaged.
        DataInvalid: there are no examples, a label is unknown to the model, or an example is one text but the model
            reads pairs.
    """
    if not examples:
        raise DataInvalid("no examples to evaluate on; give at least one")
    predictor = Predictor.load(folder)
    expected = label_ids(examples, predictor.labels)
    scores = log_softmax(predictor.logits(text_rows(examples, pairs=predictor.pairs)))
    return Evaluation(
        accuracy=float((scores.argmax(axis=1) == expected).mean()),
        loss=float(-scores[range(len(expected)), expected].mean()),
        examples=len(examples),
    )
