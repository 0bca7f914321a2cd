"""Picks the device to train on, and keeps its products whole. Guarantees that the device exists on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

__all__ = ["DeviceName", "DeviceUnavailable", "pick_device", "whole_float32"]

# oneDNN reads either, once.
_ROUNDING = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")

# What torch calls products that round nothing.
_WHOLE = ("none", "ieee")

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


class DeviceUnavailable(RuntimeError):
    """The requested device does not exist here; the text says which to choose."""


def pick_device(name: DeviceName | str = "auto") -> Literal["cpu", "cuda", "mps"]:
    """The device to train on; `auto` picks the fastest on this machine.

    Raises:
        DeviceUnavailable: The device is not on this machine, `name` is not a device, or the environment lets oneDNN
            round the inputs of float32 products.
    """
    for variable in _ROUNDING:
        if os.environ.get(variable, "STRICT").upper() not in ("", "STRICT"):
            raise DeviceUnavailable(
                f"{variable}={os.environ[variable]} lets products of float32 round their inputs, and dp-sgd's bounds "
                "are for float32; unset it"
            )
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, there in present.items() if there)
    if name not in present:
        raise DeviceUnavailable(f"{name!r} is not a device; choose auto, cpu, cuda or mps")
    if not present[name]:
        why = {
            "cuda": "torch sees no NVIDIA GPU here (driver missing, or torch installed without CUDA)",
            "mps": "torch sees no Apple GPU here",
        }[name]
        raise DeviceUnavailable(f"device {name!r} is not available: {why}; choose device = auto or cpu")
    return cast(Literal["cpu", "cuda", "mps"], name)


@contextmanager
def whole_float32() -> Iterator[None]:
    """Inside the context no product of float32 rounds its inputs: TF32, and what oneDNN has like it, is off.

    The settings are the process's, so trainings must take turns.
    """
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    # Only where a program that uses this as a library has set it: older versions of torch have no such settings.
    cpu: Any = getattr(torch.backends.mkldnn, "matmul", None)
    rounding = getattr(cpu, "fp32_precision", "ieee")
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    if rounding not in _WHOLE:
        cpu.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        if rounding not in _WHOLE:
            cpu.fp32_precision = rounding
