"""Where a member trains. Guarantees that the device named exists on this machine."""

from typing import Literal, cast

__all__ = ["DeviceName", "DeviceUnavailable", "pick_device"]

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


class DeviceUnavailable(RuntimeError):
    """The device asked for is not here; the text says what would do."""


def pick_device(name: DeviceName | str = "auto") -> Literal["cpu", "cuda", "mps"]:
    """The device to train on; `auto` is the fastest there is.

    Raises:
        DeviceUnavailable: not on this machine, or not a device's name.
    """
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, there in present.items() if there)
    if name not in present:
        raise DeviceUnavailable(f"no device is called {name!r}; choose auto, cpu, cuda or mps")
    if not present[name]:
        why = {
            "cuda": "torch sees no NVIDIA GPU here (driver missing, or torch installed without CUDA)",
            "mps": "torch sees no Apple GPU here",
        }[name]
        raise DeviceUnavailable(f"device {name!r} is not available: {why}; choose device = auto or cpu")
    return cast(Literal["cpu", "cuda", "mps"], name)
