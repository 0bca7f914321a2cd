"""Products of a frozen network in bfloat16, on processors that multiply bfloat16 slowly.

Matrix units multiply bfloat16 values, add in float32 and round the sum to bfloat16. Without such units the matrix
library takes many times as long as in float32 (docs/prompts.md, Precision). There a matrix is widened to float32 when
it is used, and the result is rounded, which gives the same numbers up to the order of sums. Attention's scores and
weights are rounded once less. A step takes little longer than in float32. Matrices keep bfloat16's size: one at a time
is in memory in float32, too.

Under dp-sgd nothing may be rounded on the way: matrices are kept in bfloat16, states are float32, and so is every
product, on all processors. That is a float32 network with other values, and whatever is claimed of float32 holds.
"""

import os
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FrozenLinear", "freeze_products", "has_matrix_units", "is_matrix", "let_go", "widens"]

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@cache
def has_matrix_units() -> bool:
    """Whether this processor has matrix units for bfloat16 (AMX), and its matrix library (oneDNN) may use them.

    Those of Arm do not count: nobody has measured them, and widened products are about as fast as float32's.
    """
    for limit in _LIMITS:
        most = os.environ.get(limit, "DEFAULT").upper()
        if most not in ("DEFAULT", "ALL") and "AMX" not in most:
            return False
    # Older versions of torch do not tell.
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("amx_bf16", False))


def widens(values: Tensor) -> bool:
    """Whether products of these values are computed in float32 and rounded to their own precision."""
    return values.dtype is torch.bfloat16 and values.device.type == "cpu" and not has_matrix_units()


_room = threading.local()


def _widened(matrix: Tensor) -> Tensor:
    """The matrix in float32, on a processor in memory that the next call of this thread overwrites.

    Memory that is taken and freed for each product leaves gaps between what the backward pass keeps.
    """
    if matrix.device.type != "cpu":
        return matrix.float()
    held: Tensor | None = getattr(_room, "values", None)
    if held is None or held.numel() < matrix.numel():
        held = _room.values = torch.empty(matrix.numel(), dtype=torch.float32)
    return held[: matrix.numel()].view(matrix.shape).copy_(matrix)


def let_go() -> None:
    """Frees what this thread widened its matrices in."""
    _room.values = None


class _Widened(torch.autograd.Function):
    """A product with a frozen matrix. It keeps the matrix as it is for the backward pass, and no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) to (..., out), for a weight (out, in)."""
        ctx.save_for_backward(weight)
        return functional.linear(x.float(), _widened(weight), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient at x."""
        (weight,) = ctx.saved_tensors
        return (gradient.float() @ _widened(weight)).to(gradient.dtype), None, None


class FrozenLinear(nn.Linear):
    """A linear layer whose matrix is a backbone's. If its bias is trained, it computes what nn.Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out) in x's precision."""
        # What a backbone has is no parameter, and the product below has a gradient at x alone.
        trained = any(each is not None for each in self._parameters.values())
        shorter = self.weight.dtype is torch.bfloat16 and x.dtype is torch.float32
        if trained or not (shorter or widens(x)):
            return super().forward(x)
        found: Tensor = _Widened.apply(x, self.weight, self.bias)
        return found


def is_matrix(owner: nn.Module, attribute: str) -> bool:
    """Whether the attribute is the matrix of a `FrozenLinear`."""
    return isinstance(owner, FrozenLinear) and attribute == "weight"


def freeze_products(module: nn.Module) -> None:
    """Makes every linear layer inside the module a `FrozenLinear`. They are on the meta device, without values."""
    for owner in list(module.modules()):
        for name, layer in list(owner.named_children()):
            if type(layer) is nn.Linear:
                with torch.device("meta"):
                    made = FrozenLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                setattr(owner, name, made)
