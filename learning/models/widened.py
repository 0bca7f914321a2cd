"""Products of a frozen network in bfloat16, on processors that multiply bfloat16 slowly.

Matrix units multiply bfloat16 values, add in float32 and round the sum to bfloat16. Without such units the matrix
library takes many times as long as in float32 (docs/prompts.md, Precision). There a matrix is widened to float32 when
it is used, and the result is rounded. So the network has the same numbers on every processor, up to the order of sums,
takes about as long as in float32, and keeps bfloat16's size: one matrix at a time is in memory in float32.

Under dp-sgd nothing may be rounded on the way: matrices are kept in bfloat16, states are float32, and so is every
product, on all processors. That is a float32 network with other values, and whatever is claimed of float32 holds.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FrozenLinear", "freeze_products", "has_matrix_units", "is_matrix", "widens"]

# Capabilities that torch names: Intel's AMX, and the bfloat16 products of 64-bit Arm.
_UNITS = ("amx_bf16", "bf16")


@cache
def has_matrix_units() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32, and its matrix library (oneDNN) may do so."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    if most not in ("DEFAULT", "ALL") and "AMX" not in most:
        return False
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in _UNITS)


def widens(values: Tensor) -> bool:
    """Whether products of these values are computed in float32 and rounded to their own precision."""
    return values.dtype is torch.bfloat16 and values.device.type == "cpu" and not has_matrix_units()


class _Widened(torch.autograd.Function):
    """A product with a frozen matrix. It keeps the matrix as it is for the backward pass, and no input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) to (..., out), for a weight (out, in)."""
        ctx.save_for_backward(weight)
        return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient at x."""
        (weight,) = ctx.saved_tensors
        return (gradient.float() @ weight.float()).to(gradient.dtype), None, None


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
