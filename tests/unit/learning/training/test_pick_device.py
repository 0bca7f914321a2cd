"""The device: what is here is used, what is not is said."""

import pytest
import torch

from learning.training.device import DeviceUnavailable, pick_device


@pytest.mark.parametrize(("cuda", "mps", "expected"), [(1, 1, "cuda"), (0, 1, "mps"), (0, 0, "cpu")])
def test_auto_is_the_fastest_there_is(monkeypatch: pytest.MonkeyPatch, cuda: int, mps: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps))
    assert pick_device("auto") == expected
    assert pick_device("cpu") == "cpu"


def test_a_device_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cuda", "mps"):
        with pytest.raises(DeviceUnavailable, match=f"{name}.*not available.*choose device = auto or cpu"):
            pick_device(name)


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="choose auto, cpu, cuda or mps"):
        pick_device("tpu")
