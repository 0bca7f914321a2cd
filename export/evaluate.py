"""Measures an exported model on labelled texts with nothing but the exported model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from export.figures import EvaluationCut, Figures, figures_of
from export.predictor import Predictor
from learning.text.data import read_data, read_examples
from learning.text.examples import DataInvalid, Example, label_ids, text_rows

# The readers and `text_rows` are re-exported for commands that evaluate, which may import from this package only.
__all__ = ["evaluate_bundle", "read_data", "read_examples", "text_rows"]

# Texts that go through the model between two looks at whether the evaluation is cut off.
_BATCH = 64


def evaluate_bundle(
    folder: Path, examples: Sequence[Example], *, cancelled: Callable[[], bool] = lambda: False
) -> Figures:
    """The figures of a model bundle over labelled examples.

    Args:
        folder: The bundle.
        examples: Labelled examples.
        cancelled: Asked before every batch of texts; True cuts the evaluation off.

    Raises:
        EvaluationCut: `cancelled` returned True.
        BundleInvalid: the folder is not a model bundle, or is damaged, or its model's logits are not numbers.
        DataInvalid: there are no examples, a label is unknown to the model, or an example is one text but the model
            reads pairs.
    """
    if not examples:
        raise DataInvalid("no examples to evaluate on; give at least one")
    predictor = Predictor.load(folder)
    expected = label_ids(examples, predictor.labels)
    texts = text_rows(examples, pairs=predictor.pairs)
    found = []
    for first in range(0, len(texts), _BATCH):
        if cancelled():
            raise EvaluationCut("the evaluation was cut off")
        found.append(predictor.logits(texts[first : first + _BATCH]))
    return figures_of(np.concatenate(found), expected, predictor.labels)
