"""How good an exported model is, measured with nothing but the exported model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export.predictor import Predictor, log_softmax
from learning.text.data import DataInvalid, Example, label_ids, read_examples, text_rows

# `read_examples` and `text_rows` are here for commands that evaluate, as they may lean on this room but not on the
# member's.
__all__ = ["Evaluation", "evaluate_bundle", "read_examples", "text_rows"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """accuracy in [0, 1] and mean loss (cross entropy, nats) over so many examples."""

    accuracy: float
    loss: float
    examples: int


def evaluate_bundle(folder: Path, examples: Sequence[Example]) -> Evaluation:
    """Accuracy and loss of a model bundle over labelled examples.

    Raises:
        BundleInvalid: no model bundle, or a damaged one.
        DataInvalid: no examples, labels that the model does not know, or one text where it reads pairs.
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
