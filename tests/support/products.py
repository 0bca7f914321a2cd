"""Which precision products, and all other operations, are computed in."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Multiplied"]

_PRODUCTS = ("mm", "linear", "scaled_dot_product", "conv")
# They compute nothing.
_MOVES = ("_to_copy", "copy_", "detach", "alias", "view", "transpose", "aten.t.", "slice", "empty", "clone", "expand")


class Multiplied(TorchDispatchMode):
    """While it is entered, `kinds` gets the precision of every tensor that is multiplied with another as a matrix.

    `made` gets that of every result, but for what is moved, looked at or cast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()
        self.made: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(word in str(func) for word in _PRODUCTS):
            self.kinds |= {each.dtype for each in args if isinstance(each, Tensor) and each.is_floating_point()}
        found = func(*args, **(kwargs or {}))
        if not any(word in str(func) for word in _MOVES):
            several = found if isinstance(found, tuple | list) else (found,)
            self.made |= {each.dtype for each in several if isinstance(each, Tensor) and each.is_floating_point()}
        return found
