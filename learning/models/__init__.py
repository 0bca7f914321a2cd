"""Builds architectures from a job's model table, and moves named arrays in and out of them.

Guarantees: the same table and seed give the same weights, whatever else draws random numbers in the process. Parameters
come out as copies, under stable names in a stable order. Nothing is loaded into a module whose names or shapes differ.
`learning.models.division` says which parameters are shared and which private.

An architecture is a `TextClassifier` in its own file and a line in `_ARCHITECTURES`. Those of installed distributions
are in `learning.plugins`, behind the line `plugin`.
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
from tacit.model import Model, NoModel, PluginModel, PromptedModel, TransformerModel

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

# Loaded on demand, since a process mostly trains just one of them.
_ARCHITECTURES = {
    "textcnn": ("learning.models.textcnn", "TextCNN"),
    "bilstm": ("learning.models.bilstm", "BiLSTM"),
    "transformer": ("learning.models.transformer", "TransformerClassifier"),
    "rvae": ("learning.synthesis.model", "rvae"),
    "plugin": ("learning.plugins.building", "plugin_classifier"),
}


def build(model: Model, vocabulary_size: int, labels: int, pad_id: int, *, seed: int = 0) -> TextClassifier:
    """Builds a module on the CPU, in evaluation mode, with the weights of a seed.

    Args:
        model: The job's model table.
        vocabulary_size: Rows of the embedding.
        labels: The number of labels.
        pad_id: The row that is zero and stays zero.
        seed: Seeds the weights.
    """
    return _architecture(model)(model, vocabulary_size, labels, pad_id, seed).eval()


def values_of(model: Model, vocabulary_size: int, labels: int) -> int:
    """The number of values of a model, including its embedding. No tensor of that size is allocated.

    Raises:
        ValueError: The model is impossible, or prompted; `learning.prompts.assembly` counts the values of those.
        PluginUnusable: As in `learning.plugins.loading.loaded`, for a plugin's model.
    """
    if isinstance(model, PromptedModel):
        raise ValueError("a prompted model has only its trained values, whatever its vocabulary; use prompted_values")
    if isinstance(model, TransformerModel):
        from learning.models.transformer import encoder_size

        encoder, width = encoder_size(model)
        return vocabulary_size * width + encoder + (width + 1) * labels
    if isinstance(model, PluginModel):
        from learning.plugins.building import plugin_values

        return plugin_values(model, vocabulary_size, labels)
    if isinstance(model, NoModel):
        return 0
    return model.values(vocabulary_size, labels)


def embedding_width(model: Model) -> int:
    """The width of the embedding.

    Raises:
        ValueError: The model is impossible, or prompted: a prompted model has its base's embedding.
    """
    if isinstance(model, PromptedModel):
        raise ValueError("a prompted model has its base's embedding; read the width from the base's config")
    if isinstance(model, TransformerModel):
        from learning.models.transformer import encoder_width

        return encoder_width(model)
    if isinstance(model, NoModel):
        raise ValueError("a job that asks a question has no model, so no embedding")
    return model.embedding


def build_blank(model: Model, vocabulary_size: int, labels: int, pad_id: int) -> TextClassifier:
    """Like `build`, with every weight zero, for weights that are loaded next.

    Drawing the weights of a large embedding takes longer than a local step.
    """
    return _architecture(model)(model, vocabulary_size, labels, pad_id, None).eval()


def _architecture(model: Model) -> Callable[[Any, int, int, int, int | None], TextClassifier]:
    module, name = _ARCHITECTURES[model.architecture]
    found: Callable[[Any, int, int, int, int | None], TextClassifier] = getattr(import_module(module), name)
    return found
