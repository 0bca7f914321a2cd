"""Builds the module that a plugin registers, and refuses one that does not keep to its contract.

The embedding is ours: drawn from the whole seed as for the other architectures, because a member's own embedding starts
from a secret (`learning.training.start`). The plugin's part starts under torch's generator, seeded from a hash.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from learning.models.classifier import Dropout, TextClassifier, TextModel
from learning.plugins.architecture import Architecture, Sizes
from learning.plugins.installed import PluginUnusable
from learning.plugins.loading import loaded
from tacit.documents import Part, sentence_of
from tacit.method import ModelPart
from tacit.plugin import PluginModel

__all__ = ["plugin_classifier", "plugin_values"]

_PARTS = get_args(ModelPart)
# What training and the examination read of a model, and the plugin's own part of that.
_GIVEN = frozenset(name for each in (TextModel, TextClassifier) for name in vars(each) if not name.startswith("__"))
_OWN = frozenset({"classify", "exportable"})


def plugin_values(model: PluginModel, vocabulary_size: int, labels: int) -> int:
    """The number of values, as the plugin counts them, with the embedding. No tensor is allocated.

    Raises:
        PluginUnusable: As in `loaded`, or the job's settings are none that the plugin takes.
    """
    architecture, settings = _registered(model)
    sizes = Sizes(vocabulary_size, model.embedding, labels, model.max_tokens)
    return vocabulary_size * model.embedding + _counted(model, architecture, settings, sizes)


def plugin_classifier(
    model: PluginModel, vocabulary_size: int, labels: int, pad_id: int, seed: int | None
) -> TextClassifier:
    """Builds the module. Without a seed all parameters are zero. With one, two builds must agree.

    Raises:
        PluginUnusable: As in `plugin_values`; or the plugin raises, or its module does not keep to the contract.
    """
    architecture, settings = _registered(model)
    sizes = Sizes(vocabulary_size, model.embedding, labels, model.max_tokens)
    module = _made(model, architecture, settings, sizes, seed)
    _check_module(model, module, _counted(model, architecture, settings, sizes))
    if seed is None:
        for parameter in module.parameters():
            parameter.data.zero_()
    else:
        _check_again(model, module, _made(model, architecture, settings, sizes, seed))
        if next(module.buffers(), None) is not None:
            _check_constants(model, module, _made(model, architecture, settings, sizes, None))
    # No text is padded beyond what the plugin has positions for, which under dp-sgd would be at a multiple of eight.
    module.pad_id, module.min_tokens, module.room = pad_id, model.min_tokens, model.max_tokens
    module.dropout = Dropout(model.dropout)
    module.embedding = _embedding(model, vocabulary_size, pad_id, seed)
    module.embedding.weight.requires_grad_(not model.freeze_embedding)
    return module


def _registered(model: PluginModel) -> tuple[Architecture[Any], Part]:
    """What the plugin registers, and the job's settings as the plugin reads them."""
    architecture = loaded(model)
    try:
        settings: Part = architecture.settings.model_validate(model.settings)
    except ValidationError as error:
        raise PluginUnusable(f"model.settings: {sentence_of(error)}") from error
    with _blaming(model, "reads its settings"):
        least = int(architecture.min_tokens(settings))
    for key, stated, registered in (
        ("min_tokens", model.min_tokens, least),
        ("frame", model.frame, architecture.frame),
    ):
        if stated != registered:
            said = str(registered).lower()
            raise PluginUnusable(
                f"model.{key}: {_named(model)} reads texts with {key} = {said}, and the job says "
                f"{str(stated).lower()}; write {key} = {said}"
            )
    return architecture, settings


def _counted(model: PluginModel, architecture: Architecture[Any], settings: Part, sizes: Sizes) -> int:
    with _blaming(model, "counts its values"):
        return int(architecture.values(settings, sizes))


def _made(
    model: PluginModel, architecture: Architecture[Any], settings: Part, sizes: Sizes, seed: int | None
) -> TextClassifier:
    """The plugin's module, in evaluation mode, without what is ours."""
    hashed = hashlib.sha256(b"tacit/plugin/start/v1/" + str(seed).encode()).digest()
    with torch.random.fork_rng(devices=[]), _blaming(model, "builds its module"):
        torch.default_generator.manual_seed(int.from_bytes(hashed[:7], "big"))
        made: object = architecture.module(settings, sizes)
    if not isinstance(made, TextClassifier):
        raise _wrong(model, f"builds a {type(made).__name__}, and a model is a TextClassifier")
    return made.eval()


def _check_module(model: PluginModel, module: TextClassifier, values: int) -> None:
    """Checks everything that can be read off the module. `examine` checks what it computes."""
    for name in sorted(_GIVEN - _OWN):
        owner = next(each for each in type(module).__mro__ if name in vars(each))
        if owner not in (TextModel, TextClassifier) or name in vars(module):
            raise _wrong(model, f"changes {name}, which every model is given; put it into classify")
    parts = getattr(type(module), "parts", {})
    if any(hasattr(module, name) for name in ("embedding", "dropout")):
        raise _wrong(model, "builds an embedding or a dropout of its own; every model is given both")
    if parts.get("embedding") != "embedding" or not all(part in _PARTS for part in parts.values()):
        raise _wrong(model, f'must name its parts: "embedding" is the embedding, the others are {" or ".join(_PARTS)}')
    for name, each in module.named_modules():
        if getattr(each, "running_mean", None) is not None or getattr(each, "track_running_stats", False):
            raise _wrong(
                model,
                f"keeps statistics of batches in {name}, which would hold data without noise; use a layer that treats "
                "each text alone",
            )
        if isinstance(each, _BatchNorm):
            raise _wrong(model, f"normalises over the batch in {name}; use a layer that treats each text alone")
        if isinstance(each, _DropoutNd | Dropout):
            raise _wrong(model, f"has a dropout {name}, whose draws nobody seeds; use self.dropout and model.dropout")
    shared: set[int] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.partition(".")[0] not in parts:
            raise _wrong(model, f"says of no part that it has {name}; name it in parts")
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise _wrong(model, f"builds {name} as {parameter.dtype} on {parameter.device}; build float32 on the CPU")
        if not bool(torch.isfinite(parameter).all()):
            raise _wrong(model, f"starts {name} with values that are not finite")
        if id(parameter) in shared:
            raise _wrong(model, f"uses {name} under two names; a parameter has one")
        shared.add(id(parameter))
    found = sum(parameter.numel() for parameter in module.parameters())
    if found != values:
        raise _wrong(model, f"builds {found:,} values above the embedding, and counts {values:,} beforehand")


def _check_again(model: PluginModel, module: TextClassifier, again: TextClassifier) -> None:
    """Checks that the plugin's module starts the same whenever it is built from one seed."""
    first, second = module.state_dict(), again.state_dict()
    if first.keys() != second.keys() or any(not torch.equal(first[name], second[name]) for name in first):
        raise _wrong(
            model,
            "starts with other values when it is built again from the same seed; draw from torch's generator alone",
        )


def _check_constants(model: PluginModel, module: TextClassifier, other: TextClassifier) -> None:
    """Checks that what is no parameter, and so in no version, is the same from any seed."""
    found = dict(other.named_buffers())
    for name, buffer in module.named_buffers():
        if name not in found or not torch.equal(buffer, found[name]):
            raise _wrong(model, f"draws {name}, which no version holds; make it a parameter, or a constant")


def _embedding(model: PluginModel, rows: int, pad_id: int, seed: int | None) -> nn.Embedding:
    table = np.zeros((rows, model.embedding), dtype=np.float32)
    if seed is not None:
        np.random.Generator(np.random.Philox(seed)).standard_normal(dtype=np.float32, out=table)
        table *= np.float32(model.embedding_std)
        table[pad_id] = 0
    # The embedding shares the table's memory.
    return nn.Embedding(rows, model.embedding, padding_idx=pad_id, _weight=torch.from_numpy(table))


def _named(model: PluginModel) -> str:
    return f"plugin {model.distribution} {model.version}"


def _wrong(model: PluginModel, what: str) -> PluginUnusable:
    return PluginUnusable(f"{_named(model)} {what}")


@contextmanager
def _blaming(model: PluginModel, doing: str) -> Iterator[None]:
    """Turns whatever the plugin raises inside into `PluginUnusable`."""
    try:
        yield
    except PluginUnusable:
        raise
    except (Exception, SystemExit) as error:
        raise PluginUnusable(
            f"{_named(model)} raises {type(error).__name__} when it {doing}; the log of that machine says more",
            private=f"{type(error).__name__}: {error}",
        ) from error
