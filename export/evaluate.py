"""Measures an exported model on labelled texts with nothing but the exported model."""

from collections.abc import Sequence
from pathlib import Path

from export.figures import Figures, figures_of
from export.predictor import Predictor
from learning.text.data import DataInvalid, Example, label_ids, read_data, read_examples, text_rows

# The readers and `text_rows` are re-exported for commands that evaluate, which may import from this package only.
__all__ = ["evaluate_bundle", "read_data", "read_examples", "text_rows"]


def evaluate_bundle(folder: Path, examples: Sequence[Example]) -> Figures:
    """The figures of a model bundle over labelled examples.

    Raises:
        BundleInvalid: the folder is not a model bundle, or is damaged.
        DataInvalid: there are no examples, a label is unknown to the model, or an example is one text but the model
            reads pairs.
    """
    if not examples:
        raise DataInvalid("no examples to evaluate on; give at least one")
    predictor = Predictor.load(folder)
    expected = label_ids(examples, predictor.labels)
    return figures_of(predictor.logits(text_rows(examples, pairs=predictor.pairs)), expected, predictor.labels)
