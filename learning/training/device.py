"""Picks the device to train on, and keeps its products whole. Guarantees that the device exists on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast

__all__ = ["DeviceName", "DeviceUnavailable", "pick_device", "whole_float32"]

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


class DeviceUnavailable(RuntimeError):
    """The requested device does not exist here; the text says which to choose."""


def pick_device(name: DeviceName | str = "auto") -> Literal["cpu", "cuda", "mps"]:
    """The device to train on; `auto` picks the fastest on this machine.

    Raises:
        DeviceUnavailable: The device is not on this machine, or `name` is not a device.
    """
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
    """Turns TF32 off for a GPU's products inside the context.

    The setting is the process's, so trainings must take turns.
    """
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
