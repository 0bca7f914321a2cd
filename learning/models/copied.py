"""Modules that are made once for each config, and then copied: transformers takes five times as long to make one."""

import copy
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

from torch import nn

__all__ = ["copied"]

P = ParamSpec("P")
# Members of a simulation and tests use a few. A module on the meta device has no values, only its layers.
_KEPT = 8


def copied(
    make: Callable[Concatenate[Mapping[str, Any], P], nn.Module],
) -> Callable[Concatenate[Mapping[str, Any], P], nn.Module]:
    """Decorates a function that makes a module on the meta device from a config of JSON's values.

    Each call returns a module of its own.
    """

    def from_text(config: str, *given: Any, **named: Any) -> nn.Module:
        return make(json.loads(config), *given, **named)

    made: Callable[..., nn.Module] = functools.lru_cache(maxsize=_KEPT)(from_text)

    @functools.wraps(make)
    def copy_of(config: Mapping[str, Any], /, *given: P.args, **named: P.kwargs) -> nn.Module:
        return copy.deepcopy(made(json.dumps(dict(config), sort_keys=True), *given, **named))

    return copy_of
