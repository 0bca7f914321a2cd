"""A conversion skips torch's decomposition pass only where that leaves the graph's operators and values alone."""

from collections import Counter
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch.onnx._internal.exporter import _fx_passes

from export import conversion
from export.conversion import converted
from tests.support import conversions

torch.set_num_threads(1)


class Names(torch.nn.Module):
    """Every operator that only names or casts its input, around operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.tensor([0.5, -1.0, 2.0, 0.25])
        made = (x.contiguous() @ self.weight.detach() + shift).to(torch.float32)
        positive = ((made > 0) & (made < 1)).to(torch.float32)
        return torch.ops.aten.alias(made.to(torch.int64).to(torch.float32)) + positive


class Squares(torch.nn.Module):
    """The operator that torch takes apart in the mean square of an encoder's states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(dim=1, keepdim=True)).square().mean(dim=1)


class Sums(torch.nn.Module):
    """Adds in place to a value that nothing else reads, and takes a minimum, as T5 does with its positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        made += torch.min(x, x * x)
        return made - 1


class SeenElsewhere(torch.nn.Module):
    """Adds in place to a value of which another name reads a part afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        part = made[:, :1]
        made += x
        return made * part


class Viewed(torch.nn.Module):
    """Adds in place to a part of a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        part = made[:, :2]
        part += x[:, 1:]
        return made - 1


class Wider(torch.nn.Module):
    """Adds in place a value of a wider type, which does not widen the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        made += x.to(torch.float64)
        return made - 1


class InPlace(torch.nn.Module):
    """Changes a copy of a constant: a graph without the pass would not be functional."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tensor([1.0, 2.0, 3.0])
        made.mul_(3)
        return x + made


class Untranslated(torch.nn.Module):
    """Uses an operator that torch translates only after taking it apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arctan(x)


class Named(torch.nn.Module):
    """Its output only names another value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.alias(x + 1)


class Branching(torch.nn.Module):
    """Holds two graphs of its own, of which the pass takes apart what is inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.cond(x.sum() > 0, torch.arctan, lambda y: y - 1, (x,))
        return found


def file_of(module: torch.nn.Module) -> bytes:
    dimensions = ({0: torch.export.Dim("batch")},)
    with conversions.anew():
        return converted(module.eval(), (torch.zeros(2, 3),), ["x"], "y", dimensions)


def answer(data: bytes, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])


def operators(data: bytes) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load_from_string(data).graph.node)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that were decomposed."""
    programs: list[Any] = []
    decompose = torch.export.ExportedProgram.run_decompositions

    def counting(program: Any, *more: Any) -> Any:
        programs.append(program)
        return decompose(program, *more)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counting)
    return programs


def test_without_the_pass_the_file_has_the_same_operators_and_answers(counted, monkeypatch) -> None:
    module, x = Names(), torch.linspace(-2, 2, 15).view(5, 3)
    light = file_of(module)
    assert counted == []
    monkeypatch.setattr(conversion, "_translatable", lambda *_: False)
    whole = file_of(module)
    assert len(counted) == 1
    assert operators(light) == operators(whole)
    torch.testing.assert_close(answer(light, x), module(x))
    torch.testing.assert_close(answer(light, x), answer(whole, x))


@pytest.mark.parametrize("module", [Squares(), Sums()], ids=lambda each: type(each).__name__)
def test_what_the_pass_would_only_rename_needs_none_and_its_answers_are_the_same(module, counted, monkeypatch) -> None:
    x = torch.linspace(-2, 2, 15).view(5, 3)
    light = file_of(module)
    assert counted == []
    monkeypatch.setattr(conversion, "_translatable", lambda *_: False)
    whole = file_of(module)
    assert len(counted) == 1
    torch.testing.assert_close(answer(light, x), module(x))
    torch.testing.assert_close(answer(light, x), answer(whole, x))


@pytest.mark.parametrize(
    "module",
    [InPlace(), SeenElsewhere(), Viewed(), Wider(), Untranslated(), Named(), Branching()],
    ids=lambda each: type(each).__name__,
)
def test_other_graphs_get_the_pass(counted, module) -> None:
    x = torch.linspace(-2, 2, 15).view(5, 3)
    data = file_of(module)
    assert len(counted) == 1
    for rows in (x, -x - 1):
        torch.testing.assert_close(answer(data, rows), module(rows))


def test_other_callers_of_torchs_exporter_get_its_pass(counted) -> None:
    file_of(Names())
    assert counted == []
    torch.onnx.export(Names().eval(), (torch.zeros(2, 3),), dynamo=True, verbose=False, opset_version=conversion.OPSET)
    assert len(counted) == 1


def test_the_pass_is_replaced_once() -> None:
    conversion._decompose_at_need()
    replaced = _fx_passes.decompose_with_registry
    conversion._decompose_at_need()
    assert _fx_passes.decompose_with_registry is replaced
    assert "_decompose_at_need" in replaced.__qualname__
