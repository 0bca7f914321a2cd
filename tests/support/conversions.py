"""Converts each module to ONNX once in a test process: many tests export the same small model in other surroundings.

Two conversions are the same if all that a conversion reads is the same: the code and state of the module, its values,
the example, the names and the dynamic axes. A module whose state cannot be written down is converted each time. Tests
of the conversion itself use `anew`.
"""

import contextlib
import hashlib
import io
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["anew", "light", "shared"]

Converted = Callable[..., bytes]

_known: dict[bytes, bytes] = {}
_off: list[None] = []


class _Pickler(pickle.Pickler):
    """Writes tensors as their values, locks without a state, modules as their names, and local functions and classes
    as what they hold.
    """

    def reducer_override(self, thing: Any) -> Any:
        import torch

        if isinstance(thing, torch.Tensor) and thing.is_meta:
            return (str, (f"meta {thing.dtype} {[*thing.shape]}",))
        if isinstance(thing, torch.Tensor):
            values = thing.detach().cpu().contiguous()
            digest = hashlib.sha256(values.view(torch.uint8).numpy() if values.ndim else values.numpy()).hexdigest()
            return (str, (f"{type(thing).__name__} {values.dtype} {[*values.shape]} {digest}",))
        if isinstance(thing, types.ModuleType):
            # A function's own import is among what it holds.
            return (str, (f"module {thing.__name__}",))
        if isinstance(thing, type(threading.Lock())):
            return (str, ("lock",))
        if isinstance(thing, types.FunctionType) and "<locals>" in thing.__qualname__:
            code = thing.__code__
            held = [cell.cell_contents for cell in thing.__closure__ or ()], thing.__defaults__, thing.__kwdefaults__
            return (tuple, ((thing.__module__, thing.__qualname__, code.co_code, repr(code.co_consts), held),))
        if isinstance(thing, type) and "<locals>" in thing.__qualname__:
            # Its functions are written once, beside the module.
            return (str, (f"{thing.__module__} {thing.__qualname__}",))
        return NotImplemented


def _key(
    module: Any, example: tuple[Any, ...], inputs: list[str], output: str, dimensions: tuple[dict[int, Any], ...]
) -> bytes | None:
    axes = [{axis: (dim.__name__, dim.min, dim.max) for axis, dim in each.items()} for each in dimensions]
    # A wrapper's class is local to the function that makes it, and its functions may close over values.
    code = [each for each in vars(type(module)).values() if isinstance(each, types.FunctionType)]
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump((type(module), code, vars(module), example, inputs, output, axes))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return hashlib.sha256(stream.getvalue()).digest()


def _once(converted: Converted) -> Converted:
    def shared(*given: Any) -> bytes:
        key = None if _off else _key(*given)
        if key is None:
            return converted(*given)
        if key not in _known:
            _known[key] = converted(*given)
        return _known[key]

    return shared


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Shares the conversions of all callers until the block ends."""
    import export.device_backbone
    import export.onnx
    import export.prompted

    with pytest.MonkeyPatch.context() as patch:
        for module in (export.device_backbone, export.onnx, export.prompted):
            patch.setattr(module, "converted", _once(module.converted))
        yield


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Converts anew until the block ends."""
    _off.append(None)
    try:
        yield
    finally:
        _off.pop()


@contextlib.contextmanager
def light() -> Iterator[None]:
    """Checks that conversions until the block ends need no decomposition pass, which takes half of each."""

    def decomposed(program: Any, *_: Any) -> None:
        raise AssertionError(f"this graph is traced twice more: {program.graph}")

    import torch

    with pytest.MonkeyPatch.context() as patch, anew():
        patch.setattr(torch.export.ExportedProgram, "run_decompositions", decomposed)
        yield
