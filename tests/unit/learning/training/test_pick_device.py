"""The device: one that exists is used, one that does not is refused."""

import pytest
import torch

from learning.training.device import DeviceUnavailable, pick_device, whole_float32


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


@pytest.mark.parametrize("variable", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_an_environment_that_rounds_products_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("", "strict"):
        monkeypatch.setenv(variable, word)
        assert pick_device("cpu") == "cpu"
    monkeypatch.setenv(variable, "BF16")
    with pytest.raises(DeviceUnavailable, match=f"{variable}=BF16 lets products of float32 round.*unset it"):
        pick_device("cpu")


@pytest.mark.parametrize("before", ["none", "ieee", "bf16", "tf32"])
def test_products_of_float32_are_whole_inside_and_as_before_outside(before: str) -> None:
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    start = cpu.fp32_precision
    cpu.fp32_precision = before
    try:
        with whole_float32():
            inside = cpu.fp32_precision, cuda.allow_tf32
        assert cpu.fp32_precision == before
    finally:
        cpu.fp32_precision = start
    assert inside == ("none" if before == "none" else "ieee", False)
