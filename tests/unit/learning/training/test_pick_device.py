"""The device: one that exists is used, one that does not is refused."""

import pytest
import torch

from learning.training.device import DeviceUnavailable, pick_device


@pytest.mark.parametrize(("cuda", "mps", "expected"), [(1, 1, "cuda"), (0, 1, "mps"), (0, 0, "cpu")])
def test_auto_picks_the_fastest_device(monkeypatch: pytest.MonkeyPatch, cuda: int, mps: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps))
    assert pick_device("auto") == expected
    assert pick_device("cpu") == "cpu"


def test_a_missing_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cuda", "mps"):
        with pytest.raises(DeviceUnavailable, match=f"{name}.*not available.*choose device = auto or cpu"):
            pick_device(name)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="choose auto, cpu, cuda or mps"):
        pick_device("tpu")
