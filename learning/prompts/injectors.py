"""The trained values: soft prompts, their encoders, prefixes and LoRA's matrices, in layers that DP-SGD can clip.

Guarantees: a prompt is looked up, and goes through its encoder, once for every example, with `(B, tokens)` ids and
never one broadcast row. So each layer's input, and the gradient at its output, have a row for every example, and
`learning.training.clipping` tells examples apart. If one prompt were made and repeated, a batch would silently be
clipped as a single example. Without gradients, one look-up serves all examples. The same seed gives the same weights;
without a seed, every weight is zero.
"""

import math
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from learning.models.classifier import Dropout
from learning.models.lstm import LSTM
from learning.models.merging import add_change
from learning.prompts.setting import Injection, LoRA, PrefixTuning, PromptTuning, PTuning

__all__ = ["Adapted", "Prompt", "prompt_for"]

Random = np.random.Generator


class Prompt(nn.Module):
    """`tokens` rows of values, which are trained vectors or, in a subclass, an encoder's output from them."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.vectors = _embedding(tokens, width)

    def forward(self, batch: int) -> Tensor:
        """(batch, tokens, values): one row for each example, with its own graph if gradients are enabled."""
        rows = batch if torch.is_grad_enabled() else 1
        # Repeated, not broadcast, so an example's gradient is that of its own row.
        ids = torch.arange(self.tokens, device=self.vectors.weight.device).repeat(rows, 1)
        return self._encoded(self.vectors(ids)).expand(batch, -1, -1)

    def _encoded(self, vectors: Tensor) -> Tensor:
        return vectors

    def start(self, random: Random, words: NDArray[np.float32] | None) -> None:
        """Sets starting weights. `words` are vectors (tokens, width) from which a prompt may start, or None."""
        _fill(self.vectors.weight, random.standard_normal(tuple(self.vectors.weight.shape), dtype=np.float32))
        if words is not None:
            _fill(self.vectors.weight, words)


class _MLPPrompt(Prompt):
    """A prompt through an MLP of three layers."""

    def __init__(self, tokens: int, width: int, hidden: int) -> None:
        super().__init__(tokens, width)
        self.first, self.second, self.third = _linear(width, hidden), _linear(hidden, hidden), _linear(hidden, width)

    def _encoded(self, vectors: Tensor) -> Tensor:
        between = functional.relu(self.second(functional.relu(self.first(vectors))))
        return cast(Tensor, self.third(between))

    def start(self, random: Random, words: NDArray[np.float32] | None) -> None:
        super().start(random, None)
        for layer in (self.first, self.second, self.third):
            _start_linear(layer, random)


class _LSTMPrompt(Prompt):
    """A prompt through a bidirectional LSTM of two layers and an MLP of two layers (Liu et al. 2021, section 2.2)."""

    def __init__(self, tokens: int, width: int, hidden: int) -> None:
        super().__init__(tokens, width)
        self.onward = nn.ModuleList([LSTM(width, hidden), LSTM(2 * hidden, hidden)])
        self.backward = nn.ModuleList([LSTM(width, hidden), LSTM(2 * hidden, hidden)])
        self.first, self.second = _linear(2 * hidden, hidden), _linear(hidden, width)

    def _encoded(self, vectors: Tensor) -> Tensor:
        for onward, backward in zip(self.onward, self.backward, strict=True):
            vectors = torch.cat([onward(vectors), backward(vectors.flip(1)).flip(1)], dim=2)
        return cast(Tensor, self.second(functional.relu(self.first(vectors))))

    def start(self, random: Random, words: NDArray[np.float32] | None) -> None:
        super().start(random, None)
        for layer in (*self.onward, *self.backward):
            for parameter in layer.parameters():
                _fill(parameter, _uniform(random, tuple(parameter.shape), cast(LSTM, layer).hidden))
        for linear in (self.first, self.second):
            _start_linear(linear, random)


class _MLPPrefix(Prompt):
    """A prefix through one hidden layer with tanh (Li and Liang 2021, section 4.3)."""

    def __init__(self, tokens: int, width: int, hidden: int, values: int) -> None:
        super().__init__(tokens, width)
        self.first, self.second = _linear(width, hidden), _linear(hidden, values)

    def _encoded(self, vectors: Tensor) -> Tensor:
        return cast(Tensor, self.second(self.first(vectors).tanh()))

    def start(self, random: Random, words: NDArray[np.float32] | None) -> None:
        super().start(random, None)
        _start_linear(self.first, random)
        _start_linear(self.second, random)


def prompt_for(injection: Injection, width: int, prefix_values: int) -> Prompt | None:
    """The prompt of an injection with all weights zero; None if it has none.

    Args:
        injection: The injection.
        width: The width of a token's vector.
        prefix_values: The number of values in a position's keys and values, in all layers together.
    """
    match injection:
        case PromptTuning(tokens):
            return Prompt(tokens, width)
        case PTuning(tokens, "mlp", hidden):
            return _MLPPrompt(tokens, width, hidden)
        case PTuning(tokens, _, hidden):
            return _LSTMPrompt(tokens, width, hidden)
        case PrefixTuning(tokens, None):
            return Prompt(tokens, prefix_values)
        case PrefixTuning(tokens, int() as hidden):
            return _MLPPrefix(tokens, width, hidden, prefix_values)
        case _:
            return None


class Adapted(nn.Module):
    """A frozen linear layer plus alpha / rank * up(down(x)) (Hu et al. 2022). It starts equal to the frozen layer.

    With a dropout, the matrices read what it leaves of x.
    """

    def __init__(self, frozen: nn.Linear, injection: LoRA, dropout: Dropout | None = None) -> None:
        super().__init__()
        self.down = _linear(frozen.in_features, injection.rank, bias=False)
        self.up = _linear(injection.rank, frozen.out_features, bias=False)
        self.down.weight.requires_grad_(injection.train == "both")
        self.frozen, self._scale, self._dropout = frozen, injection.alpha / injection.rank, dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, in) to (B, S, out) in the frozen layer's precision; the trained matrices multiply in their own."""
        found: Tensor = self.frozen(x)
        x = x.to(self.down.weight.dtype)
        if self._dropout is not None:
            x = self._dropout(x)
        change: Tensor = self._scale * self.up(self.down(x))
        return found + change.to(found.dtype)

    def merged(self) -> NDArray[np.float32]:
        """(out, in) The frozen matrix with the change added."""
        found = self.frozen.weight.numpy(force=True).copy()
        add_change(found, self.up.weight.numpy(force=True), self.down.weight.numpy(force=True), self._scale)
        return found

    def start(self, random: Random) -> None:
        """Sets `down` uniform within 1 / sqrt(in); `up` stays zero."""
        _start_linear(self.down, random)


# ---- layers of zeros, and numbers for them -------------------------------------------------------------------


def _embedding(rows: int, width: int) -> nn.Embedding:
    return nn.Embedding(rows, width, _weight=torch.zeros(rows, width))


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    # On the meta device first, since torch would fill a layer from its global generator.
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=bias)
    layer = layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.zero_()
    return layer


def _start_linear(layer: nn.Linear, random: Random) -> None:
    """Sets the matrix uniform within 1 / sqrt(in); the bias stays zero."""
    _fill(layer.weight, _uniform(random, tuple(layer.weight.shape), layer.in_features))


def _uniform(random: Random, shape: tuple[int, ...], fan_in: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = (2 * random.random(shape, dtype=np.float32) - 1) * np.float32(1 / math.sqrt(fan_in))
    return values


def _fill(parameter: Tensor, values: NDArray[np.float32]) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values))
