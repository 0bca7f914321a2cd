"""Low-rank changes of an encoder's matrices (LoRA), and where the library's encoders have these matrices.

Guarantees: a changed layer keeps the names of its own values, which are frozen, so a base's tensors load into it. The
two matrices of a change are linear layers of their own, which DP-SGD can clip. A merged layer computes the same as
before, from one matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from learning.models.merging import add_change

__all__ = ["LowRank", "Matrix", "encoder_matrices", "encoder_stack"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer, which LoRA can change.

    Attributes:
        name: Of its place, unique in a model.
        kind: One of `learning.prompts.setting.MATRICES`.
        layer: The layer's number in its stack, from 1.
        decodes: Whether the stack is T5's decoder.
        owner, attribute: The module that calls it, and its name there.
    """

    name: str
    kind: str
    layer: int
    decodes: bool
    owner: nn.Module
    attribute: str


# Where a layer has its matrices: (the module that calls one, its name there).
_OF_BERT = {
    "query": ("attention.self", "query"),
    "key": ("attention.self", "key"),
    "value": ("attention.self", "value"),
    "output": ("attention.output", "dense"),
    "up": ("intermediate", "dense"),
    "down": ("output", "dense"),
}
_OF_DISTILBERT = {
    "query": ("attention", "q_lin"),
    "key": ("attention", "k_lin"),
    "value": ("attention", "v_lin"),
    "output": ("attention", "out_lin"),
    "up": ("ffn", "lin1"),
    "down": ("ffn", "lin2"),
}


def encoder_stack(encoder: nn.Module, kind: str) -> Sequence[nn.Module]:
    """The layers of the library's encoder of this model type, in order."""
    found: Any = encoder
    return list(found.transformer.layer if kind == "distilbert" else found.encoder.layer)


def encoder_matrices(encoder: nn.Module, kind: str) -> Sequence[Matrix]:
    """The matrices of the library's encoder of this model type, by layer."""
    places = _OF_DISTILBERT if kind == "distilbert" else _OF_BERT
    return [
        Matrix(f"layer{number - 1}_{what}", what, number, False, layer.get_submodule(owner), name)
        for number, layer in enumerate(encoder_stack(encoder, kind), start=1)
        for what, (owner, name) in places.items()
    ]


class LowRank(nn.Linear):
    """A linear layer with frozen values, plus alpha / rank * up(down(x)) (Hu et al. 2022).

    `down` and `up` belong to whoever made them, so they are no parameters of this layer.

    Args:
        frozen: The layer whose values it takes over.
        rank, alpha: As above.
    """

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        with torch.device("meta"):
            super().__init__(frozen.in_features, frozen.out_features, bias=frozen.bias is not None)
        self.weight, self.bias = frozen.weight, frozen.bias
        down, up = (
            _zeros(inputs, outputs) for inputs, outputs in ((self.in_features, rank), (rank, self.out_features))
        )
        # In a tuple, so that torch does not register them here.
        self._change: tuple[nn.Linear, nn.Linear] | None = (down, up)
        self._scale = alpha / rank

    @property
    def change(self) -> nn.ModuleDict:
        """`down` and `up`, to be registered elsewhere. Raises ValueError once the layer is merged."""
        if self._change is None:
            raise ValueError("the layer is merged, and has no change of its own any more")
        return nn.ModuleDict(dict(zip(("down", "up"), self._change, strict=True)))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        found = super().forward(input)
        if self._change is None:
            return found
        down, up = self._change
        change: Tensor = self._scale * up(down(input))
        return found + change

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the change to the layer's own matrix."""
        if self._change is not None:
            down, up = self._change
            add_change(self.weight.numpy(), up.weight.numpy(), down.weight.numpy(), self._scale)
            self._change = None

    def start(self, random: np.random.Generator) -> None:
        """Sets `down` uniform within 1 / sqrt(in); `up` stays zero."""
        down = self.change["down"].get_parameter("weight")
        drawn = (2 * random.random(tuple(down.shape), dtype=np.float32) - 1) / np.float32(math.sqrt(self.in_features))
        with torch.no_grad():
            down.copy_(torch.from_numpy(drawn))


def _zeros(inputs: int, outputs: int) -> nn.Linear:
    # On the meta device first, since torch would fill a layer from its global generator.
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias=False)
    layer = layer.to_empty(device="cpu")
    layer.weight.data.zero_()
    return layer
