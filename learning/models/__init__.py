"""Architectures, built from a job's model table, and named arrays in and out of them.

Guarantees: the same table and seed give the same weights, whatever else draws random numbers in the process;
parameters come out under stable names in a stable order, as copies; nothing is loaded into a module whose names or
shapes differ. What of a model is shared and what private: `learning.models.division`.

An architecture is a `TextClassifier` in a file of its own and a line in `_ARCHITECTURES`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from learning.models.classifier import TextClassifier
from learning.models.division import (
    EVERYTHING_SHARED,
    Division,
    ParametersDiffer,
    division_of,
    load_shared,
    shared_parameters,
)
from tacit.model import Model, PromptedModel, TransformerModel

__all__ = [
    "EVERYTHING_SHARED",
    "Division",
    "ParametersDiffer",
    "TextClassifier",
    "build",
    "build_blank",
    "division_of",
    "embedding_width",
    "load_shared",
    "shared_parameters",
    "values_of",
]

# Loaded when asked for: a process trains one of them, mostly.
_ARCHITECTURES = {
    "textcnn": ("learning.models.textcnn", "TextCNN"),
    "bilstm": ("learning.models.bilstm", "BiLSTM"),
    "transformer": ("learning.models.transformer", "TransformerClassifier"),
    "rvae": ("learning.synthesis.model", "rvae"),
}


def build(model: Model, vocabulary_size: int, labels: int, pad_id: int, *, seed: int = 0) -> TextClassifier:
    """A module with the weights that this seed gives, on the CPU, in evaluation mode.

    vocabulary_size: rows of the embedding. labels: how many. pad_id: the row that is zero and stays zero.
    """
    return _architecture(model)(model, vocabulary_size, labels, pad_id, seed).eval()


def values_of(model: Model, vocabulary_size: int, labels: int) -> int:
    """How many values a model has, embedding included. Nothing of that size is made.

    Raises:
        ValueError: a model that there cannot be, or a prompted one, of which `learning.prompts.assembly` counts.
    """
    if isinstance(model, PromptedModel):
        raise ValueError("a prompted model's values are those of what is trained, whatever its vocabulary; count these")
    if isinstance(model, TransformerModel):
        from learning.models.transformer import encoder_size

        encoder, width = encoder_size(model)
        return vocabulary_size * width + encoder + (width + 1) * labels
    return model.values(vocabulary_size, labels)


def embedding_width(model: Model) -> int:
    """How many numbers a row of the embedding has.

    Raises:
        ValueError: a model that there cannot be, or a prompted one, whose embedding is its base's.
    """
    if isinstance(model, PromptedModel):
        raise ValueError("a prompted model has its base's embedding, whose width its config says")
    if isinstance(model, TransformerModel):
        from learning.models.transformer import encoder_width

        return encoder_width(model)
    return model.embedding


def build_blank(model: Model, vocabulary_size: int, labels: int, pad_id: int) -> TextClassifier:
    """As `build`, every weight zero: for weights that are loaded next. Drawing those of a large embedding takes longer
    than a local step.
    """
    return _architecture(model)(model, vocabulary_size, labels, pad_id, None).eval()


def _architecture(model: Model) -> Callable[[Any, int, int, int, int | None], TextClassifier]:
    module, name = _ARCHITECTURES[model.architecture]
    found: Callable[[Any, int, int, int, int | None], TextClassifier] = getattr(import_module(module), name)
    return found
