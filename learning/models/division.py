"""Decides, by parameter name, what of a model is shared, what stays on the member's machine, and what never moves. No
other module does.

Guarantees: every value of a model is shared, private or frozen, and only one of them. Private and frozen values are in
no array that `shared` returns, so no update, version or server optimiser holds them. A job's manifest lists the shared
names; a manifest that lists others does not load. The member's policy (`shared_parameters`) can refuse more, but cannot
release what is private here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from learning.models.classifier import TextModel
from tacit.method import FedRecon, Method, private_parts

__all__ = [
    "EVERYTHING_SHARED",
    "Division",
    "ParametersDiffer",
    "division_of",
    "load_shared",
    "private_tokens",
    "shared_parameters",
]

Arrays = dict[str, NDArray[np.float32]]

EMBEDDING = "embedding.weight"


class ParametersDiffer(ValueError):
    """The named arrays are not those of this module."""


@dataclass(frozen=True)
class Division:
    """The lines between a model's shared, private and frozen values.

    Attributes:
        names: Parameters that are private as a whole.
        rows: Private rows of the embedding (ascending ids) if it is not in `names`. Its other rows, in order, are
            shared.
        frozen: Parameters that are public and that nobody trains, such as a frozen embedding.
    """

    names: frozenset[str] = frozenset()
    rows: NDArray[np.int64] | None = None
    frozen: frozenset[str] = frozenset()

    def shared(self, module: torch.nn.Module) -> Arrays:
        """Copies of the shared values, by name, in the order of the manifest."""
        return self.shared_of(module.named_parameters())

    def shared_of(self, named: Iterable[tuple[str, torch.Tensor]]) -> Arrays:
        """The same of tensors with the names and shapes of a module's parameters, such as their gradients."""
        return {
            name: _copy(each, self._shared_rows(name, each))
            for name, each in named
            if name not in self.names | self.frozen
        }

    def frozen_values(self, module: torch.nn.Module) -> Arrays:
        """Copies of the frozen values, by name."""
        return {name: _copy(each, None) for name, each in module.named_parameters() if name in self.frozen}

    def private(self, module: torch.nn.Module) -> Arrays:
        """Copies of the private values, by name."""
        found = {}
        for name, parameter in module.named_parameters():
            if name in self.names:
                found[name] = _copy(parameter, None)
            elif self.rows is not None and name == EMBEDDING:
                found[name] = _copy(parameter, self.rows)
        return found

    def load_shared(self, module: torch.nn.Module, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Loads shared values into a module: all of them or, on error, none. Raises ParametersDiffer."""
        places = {
            name: (parameter, self._shared_rows(name, parameter))
            for name, parameter in module.named_parameters()
            if name not in self.names | self.frozen
        }
        _load(places, tensors)

    def load_frozen(self, module: torch.nn.Module, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Loads frozen values into a module: all of them or, on error, none. Raises ParametersDiffer."""
        _load({name: (each, None) for name, each in module.named_parameters() if name in self.frozen}, tensors)

    def load_private(self, module: torch.nn.Module, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Loads private values into a module: all of them or, on error, none. Raises ParametersDiffer."""
        places: dict[str, tuple[torch.nn.Parameter, NDArray[np.int64] | None]] = {}
        for name, parameter in module.named_parameters():
            if name in self.names:
                places[name] = (parameter, None)
            elif self.rows is not None and name == EMBEDDING:
                places[name] = (parameter, self.rows)
        _load(places, tensors)

    def _shared_rows(self, name: str, parameter: torch.Tensor) -> NDArray[np.int64] | None:
        """The shared rows of the embedding; None means all of a parameter."""
        if self.rows is None or name != EMBEDDING:
            return None
        return np.setdiff1d(np.arange(len(parameter)), self.rows)


EVERYTHING_SHARED = Division()


def division_of(method: Method, module: TextModel, words: Sequence[str | None] = ()) -> Division:
    """The lines that a method draws through a module.

    What the module itself does not train (`requires_grad` is False, as it is built) is frozen, and nobody's own.

    Args:
        method: The job's method.
        module: As it was built, in no phase of training.
        words: The tokens by id, which `fedrecon` needs.

    Raises:
        ValueError: Under `fedrecon`, no token of the vocabulary is private.
    """
    parts = private_parts(method)
    frozen = frozenset(name for name, each in module.named_parameters() if not each.requires_grad)
    names = frozenset(name for name, _ in module.named_parameters() if module.part_of(name) in parts) - frozen
    if not isinstance(method, FedRecon):
        return Division(names, frozen=frozen)
    rows = private_tokens(method, words)
    if not len(rows):
        raise ValueError("method.tokens: the vocabulary has none of the private tokens; name others, or use fedavg")
    return Division(names, rows, frozen)


def private_tokens(method: FedRecon, words: Sequence[str | None]) -> NDArray[np.int64]:
    """The ids of the tokens whose embedding is private, ascending."""
    if method.tokens == "digits":
        found = [at for at, word in enumerate(words) if word and any(character.isdigit() for character in word)]
    else:
        wanted = set(method.tokens)
        found = [at for at, word in enumerate(words) if word in wanted]
    return np.array(found, dtype=np.int64)


def shared_parameters(module: torch.nn.Module) -> Arrays:
    """Copies of all parameters by name, frozen ones too."""
    return EVERYTHING_SHARED.shared(module)


def load_shared(module: torch.nn.Module, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Loads all parameters into a module, frozen ones too. Raises ParametersDiffer."""
    EVERYTHING_SHARED.load_shared(module, tensors)


def _copy(parameter: torch.Tensor, rows: NDArray[np.int64] | None) -> NDArray[np.float32]:
    whole = parameter.detach().to("cpu", torch.float32)
    found: NDArray[np.float32] = (whole.clone() if rows is None else whole[torch.from_numpy(rows)]).numpy()
    return found


def _load(
    places: Mapping[str, tuple[torch.nn.Parameter, NDArray[np.int64] | None]],
    tensors: Mapping[str, NDArray[np.float32]],
) -> None:
    if places.keys() != tensors.keys():
        missing, surplus = sorted(places.keys() - tensors.keys()), sorted(tensors.keys() - places.keys())
        raise ParametersDiffer(f"these weights are from another model: missing {missing}, surplus {surplus}")
    for name, (parameter, rows) in places.items():
        shape = tuple(parameter.shape) if rows is None else (len(rows), *parameter.shape[1:])
        if shape != tensors[name].shape:
            raise ParametersDiffer(
                f"these weights are from another model: {name} has shape {list(tensors[name].shape)}, "
                f"and the job's model {list(shape)}"
            )
    with torch.no_grad():
        for name, (parameter, rows) in places.items():
            # A copy, since a view into a version's bytes is read-only.
            values = torch.from_numpy(np.array(tensors[name], dtype=np.float32)).to(parameter.device)
            if rows is None:
                parameter.copy_(values)
            else:
                parameter[torch.from_numpy(rows).to(parameter.device)] = values
