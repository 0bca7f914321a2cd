"""Architectures, built from a job's model table, and what of them is shared.

Guarantees: the same table and seed give the same weights, whatever else draws random numbers in the process;
shared parameters come out under stable names in a stable order, as copies; nothing is loaded into a module
whose names or shapes differ.

An architecture is a `TextClassifier` in a file of its own and a line in `_ARCHITECTURES`.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from edge_client.models.classifier import TextClassifier
from edge_client.models.textcnn import TextCNN
from tacit.job import TextCNNModel

__all__ = [
    "ParametersDiffer",
    "TextClassifier",
    "build",
    "build_blank",
    "load_shared",
    "min_tokens",
    "shared_parameters",
]

_ARCHITECTURES: dict[str, Callable[[TextCNNModel, int, int, int, int | None], TextClassifier]] = {"textcnn": TextCNN}


class ParametersDiffer(ValueError):
    """Named arrays that are not this module's."""


def build(model: TextCNNModel, vocabulary_size: int, labels: int, pad_id: int, *, seed: int = 0) -> TextClassifier:
    """A module with the weights that this seed gives, on the CPU, in evaluation mode.

    vocabulary_size: rows of the embedding. labels: how many. pad_id: the row that is zero and stays zero.
    """
    return _ARCHITECTURES[model.architecture](model, vocabulary_size, labels, pad_id, seed).eval()


def build_blank(model: TextCNNModel, vocabulary_size: int, labels: int, pad_id: int) -> TextClassifier:
    """As `build`, every weight zero: for weights that are loaded next. Drawing those of a large embedding takes longer
    than a local step.
    """
    return _ARCHITECTURES[model.architecture](model, vocabulary_size, labels, pad_id, None).eval()


def min_tokens(model: TextCNNModel) -> int:
    """The shortest sequence that a model takes: its widest filter."""
    return max(model.widths)


def shared_parameters(module: torch.nn.Module) -> dict[str, NDArray[np.float32]]:
    """Copies of the parameters that federate, by name, in the order of the manifest."""
    return {
        name: parameter.detach().to("cpu", torch.float32).numpy().copy()
        for name, parameter in module.named_parameters()
    }


def load_shared(module: torch.nn.Module, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Puts shared parameters into a module, all of them or (on error) none.

    Raises:
        ParametersDiffer: a name missing or too many, or a shape that differs.
    """
    parameters = dict(module.named_parameters())
    if parameters.keys() != tensors.keys():
        missing, surplus = (
            sorted(parameters.keys() - tensors.keys()),
            sorted(tensors.keys() - parameters.keys()),
        )
        raise ParametersDiffer(f"these weights are another model's: missing {missing}, surplus {surplus}")
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != tensors[name].shape:
            raise ParametersDiffer(
                f"these weights are another model's: {name} has shape {list(tensors[name].shape)}, "
                f"the job's model {list(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            # A copy, since a view into a version's bytes is read-only.
            parameter.copy_(torch.from_numpy(np.array(tensors[name], dtype=np.float32)))
