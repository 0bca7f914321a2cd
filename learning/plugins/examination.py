"""Examines what a plugin's module computes, on probe texts and without data, before any training.

`examine` holds under every mechanism: a text's logits, its loss and its gradient are its own. So no other text of the
batch has a part in them, neither through values (a normalisation over the batch) nor through how far it is padded.
Under dp-sgd, `check_examples_apart` also compares clipping with one backward pass an example at the start of each
training, as for every model.

It builds modules of its own and moves all their parameters at random, so that a layer which starts at zero shows. So
its result depends on no version and no data. It cannot detect a module that behaves on these texts and not on others: a
plugin is code of somebody whom this machine's owner trusts (docs/own-models.md).
"""

import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from learning.models.classifier import TextClassifier
from learning.plugins.building import plugin_classifier, plugin_values
from learning.plugins.installed import PluginUnusable
from learning.training.clipping import probe_ids
from tacit.plugin import PluginModel

__all__ = ["examine"]

# Relative, and on the scale of the largest value: float32 rounds differently in batches of other sizes.
_TOLERANCE = 1e-3
_SCALE = 1e-4
# How much further the texts are padded.
_PADDING = 3
# Rows of the embedding that probe texts use.
_VOCABULARY = 64
_PAD = 0
# Rounding can decide a near tie (a maximum, a threshold) differently in another batch. So what is compared is a fault
# only if it is one on each of these draws, as a mistake in a module is.
_DRAWS = 3
# A factor on losses: gradients in training are larger than those of probe texts near the start.
_STEEP = 1e4
# Values of a module that is examined: 4 GiB. A job's settings could ask for more before any weights were seen.
_MAX_VALUES = 2**30
# Standard deviation of how far parameters are moved.
_MOVED = 0.05
_GRADIENT_DEPENDS = (
    "a text's gradient depends on the other texts of its batch, or on how far it is padded; use layers that treat each "
    "text alone, and mask by `seen`"
)

_passed: set[tuple[str, int, str]] = set()
_lock = threading.Lock()


class _Dependent(PluginUnusable):
    """A text's numbers are not its own, on one draw."""


def examine(model: PluginModel, labels: int, seed: int, device: str = "cpu") -> None:
    """Examines the module that a job's model table describes, once in each process.

    Args:
        model: The job's model table; admitted, as for `learning.plugins.loading.loaded`.
        labels: The number of labels.
        seed: Draws weights and probe texts. A seed that nobody else can know is best.
        device: Where it will train. What is compared is computed on the CPU; there it must only run.

    Raises:
        PluginUnusable: The plugin cannot be used, or its module does not keep to its contract; the text says in what.
    """
    key = model.model_dump_json(), labels, device
    with _lock:
        if key in _passed:
            return
        if (values := plugin_values(model, _VOCABULARY, labels)) > _MAX_VALUES:
            raise PluginUnusable(
                f"model.settings: {values:,} values are more than {_MAX_VALUES:,}; make the model smaller"
            )
        found: _Dependent | None = None
        for draw in range(_DRAWS):
            random = np.random.Generator(np.random.Philox(key=[seed, draw]))
            module = plugin_classifier(model, _VOCABULARY, labels, _PAD, int(random.integers(2**62)))
            try:
                _examine(module, labels, model.max_tokens, random, device)
            except _Dependent as error:
                found = error
            except PluginUnusable:
                raise
            except (Exception, SystemExit) as error:
                raise PluginUnusable(
                    f"the module of plugin {model.distribution} {model.version} raises {type(error).__name__} on probe "
                    "texts; the log of that machine says more",
                    private=f"{type(error).__name__}: {error}",
                ) from error
            else:
                _passed.add(key)
                return
        if found is not None:
            raise found


def _examine(module: TextClassifier, labels: int, max_tokens: int, random: np.random.Generator, device: str) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            moved = random.standard_normal(tuple(parameter.shape), dtype=np.float32) * np.float32(_MOVED)
            parameter.add_(torch.from_numpy(moved))
        module.embedding.weight[_PAD] = 0
    ids = probe_ids(module, random)[:, :max_tokens]
    _check_shapes(module, ids, labels, max_tokens)
    _check_draws(module, ids)
    # From here on nothing is drawn, so that the same text gives the same numbers in any batch.
    module.dropout.probability = 0.0
    for mode in (True, False):
        module.train(mode)
        _check_logits(module, ids, max_tokens)
    module.train()
    _check_gradients(module, ids, max_tokens)
    if device != "cpu":
        _check_device(module, ids, device)


def _check_shapes(module: TextClassifier, ids: Tensor, labels: int, max_tokens: int) -> None:
    module.eval()
    longest = ids[:1].repeat(2, max_tokens // ids.shape[1] + 1)[:, :max_tokens]
    shortest = ids[:, : module.min_tokens]
    empty = torch.full_like(shortest, module.pad_id)
    with torch.no_grad():
        for given in (ids, longest, shortest, ids[:1], empty):
            logits = module(given)
            if not isinstance(logits, Tensor) or logits.shape != (len(given), labels) or logits.dtype != torch.float32:
                what = (
                    f"{logits.dtype} of shape {list(logits.shape)}"
                    if isinstance(logits, Tensor)
                    else f"a {type(logits).__name__}"
                )
                raise PluginUnusable(
                    f"the plugin's module gives {what} for {len(given)} texts of {given.shape[1]} tokens, and a model "
                    f"gives float32 of shape [{len(given)}, {labels}]"
                )
            if not bool(torch.isfinite(logits).all()):
                raise PluginUnusable("the plugin's module gives logits that are not finite, on weights near its start")


def _check_draws(module: TextClassifier, ids: Tensor) -> None:
    """Checks that a seed determines every draw in training, and that a forward pass keeps and changes nothing."""
    module.train()
    before = {name: (each._version, each.detach().clone()) for name, each in _state(module)}
    found = []
    with torch.no_grad():
        for _ in range(2):
            module.seed(1)
            found.append(module(ids))
    if not torch.equal(*found):
        raise PluginUnusable(
            "the plugin's module gives other logits for the same texts and the same seed; draw through self.dropout "
            "alone, and keep nothing between calls"
        )
    for name, each in _state(module):
        # A write that changes nothing on these weights, such as a bound on a norm, counts as well.
        if name not in before or before[name][0] != each._version or not torch.equal(each, before[name][1]):
            raise PluginUnusable(
                f"the plugin's module changes {name} in training, so it would keep data without noise; use a layer "
                "without running statistics, and write to no parameter"
            )


def _state(module: TextClassifier) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_device(module: TextClassifier, ids: Tensor, device: str) -> None:
    """Takes a step there. A module that holds tensors outside parameters and buffers leaves them on the CPU."""
    try:
        module.to(device)
        _, losses = module.probed(ids.to(device))
        losses.sum().backward()
    except RuntimeError as error:
        raise PluginUnusable(
            f"the plugin's module does not run on {device}; register its constants as buffers",
            private=f"{type(error).__name__}: {error}",
        ) from error


def _others(module: TextClassifier, ids: Tensor, max_tokens: int) -> list[Tensor]:
    """The same first text of `ids` (1, S), padded to several lengths, the longest of the job among them."""
    length = max(module.min_tokens, int((ids != module.pad_id).sum()))
    lengths = {length, ids.shape[1], min(max_tokens, ids.shape[1] + _PADDING), max_tokens}
    padded = torch.full((1, max(lengths)), module.pad_id, dtype=ids.dtype)
    padded[:, : ids.shape[1]] = ids
    return [padded[:, :each] for each in sorted(lengths)]


def _check_logits(module: TextClassifier, ids: Tensor, max_tokens: int) -> None:
    with torch.no_grad():
        together = module(ids)
        for number in range(len(ids)):
            for alone in _others(module, ids[number : number + 1], max_tokens):
                difference = (module(alone) - together[number]).abs()
                scale = float(together[number].abs().max().clamp(min=1.0))
                if not bool((difference <= _TOLERANCE * together[number].abs() + _SCALE * scale).all()):
                    raise _Dependent(
                        "a text's logits depend on the other texts of its batch, or on how far it is padded; use "
                        "layers that treat each text alone, and mask by `seen`"
                    )


def _check_gradients(module: TextClassifier, ids: Tensor, max_tokens: int) -> None:
    """Compares each text's gradient in the batch with that of the text alone. Equal values may hide other gradients."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def gradient(given: Tensor, number: int | None, steep: float = 1.0) -> Tensor:
        _, losses = module.probed(given)
        loss = losses.sum() if number is None else losses[number]
        found = torch.autograd.grad(steep * loss, trained, allow_unused=True)
        return torch.cat(
            [
                (torch.zeros_like(parameter) if each is None else each).flatten()
                for parameter, each in zip(trained, found, strict=True)
            ]
        ).double()

    together = [gradient(ids, number) for number in range(len(ids))]
    largest = max(float(each.norm()) for each in together)
    for number, expected in enumerate(together):
        for alone in _others(module, ids[number : number + 1], max_tokens):
            difference = float((gradient(alone, 0) - expected).norm())
            if not difference <= _TOLERANCE * max(float(expected.norm()), 1e-3 * largest):
                raise _Dependent(_GRADIENT_DEPENDS)
    # A backward pass of its own may treat texts together only where several have a gradient, or a large one.
    for steep in (1.0, _STEEP):
        apart = [gradient(ids[number : number + 1], 0, steep) for number in range(len(ids))]
        # By parameter: a bound makes the gradients below it small beside the others.
        sizes = [parameter.numel() for parameter in trained]
        error = (gradient(ids, None, steep) - torch.stack(apart).sum(dim=0)).split(sizes)
        norms = torch.tensor([[float(part.norm()) for part in each.split(sizes)] for each in apart]).sum(dim=0)
        for part, norm in zip(error, norms.tolist(), strict=True):
            if not float(part.norm()) <= _TOLERANCE * max(norm, 1e-5 * float(norms.max())):
                raise _Dependent(_GRADIENT_DEPENDS)
