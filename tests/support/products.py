"""Which precision products are computed in."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Multiplied"]

_PRODUCTS = ("mm", "linear", "scaled_dot_product", "conv")


class Multiplied(TorchDispatchMode):
    """While it is entered, `kinds` gets the precision of every tensor that is multiplied with another as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(word in str(func) for word in _PRODUCTS):
            self.kinds |= {each.dtype for each in args if isinstance(each, Tensor) and each.is_floating_point()}
        return func(*args, **(kwargs or {}))
