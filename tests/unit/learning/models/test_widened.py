"""Products in bfloat16 without matrix units: computed in float32, rounded as matrix units round, and nothing kept."""

import pytest
import torch
from torch import nn

from learning.models import widened
from learning.models.widened import FrozenLinear, freeze_products, has_matrix_units, widens
from tests.support.products import Multiplied
from tests.support.tiny_prompts import FAMILIES, prompted, texts

torch.set_num_threads(1)


@pytest.fixture
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "has_matrix_units", lambda: request.param)


def bound(bias: bool = True) -> FrozenLinear:
    """A layer of a bfloat16 backbone: its values are no parameters."""
    with torch.device("meta"):
        layer = FrozenLinear(40, 30, bias=bias)
    random = torch.Generator().manual_seed(1)
    del layer.weight
    if bias:
        del layer.bias
    layer.weight = torch.randn(30, 40, generator=random).bfloat16()
    if bias:
        layer.bias = torch.randn(30, generator=random).bfloat16()  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_a_widened_product_is_what_matrix_units_compute(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, found = bound(bias), {}
    start = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    for units in (True, False):
        monkeypatch.setattr(widened, "has_matrix_units", lambda units=units: units)
        x = start.clone().requires_grad_()
        result = layer(x)
        result.float().square().sum().backward()
        assert result.dtype == torch.bfloat16
        assert x.grad is not None
        found[units] = result.detach().float(), x.grad.float()
    for native, wide in zip(found[True], found[False], strict=True):
        # One place of bfloat16's eight bits, on the scale of the largest result: sums are in another order.
        assert float((native - wide).abs().max()) <= 2**-8 * float(native.abs().max())
    exact = start.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(found[False][0].double(), exact, rtol=2**-8, atol=1e-6)


def test_nothing_in_float32_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "has_matrix_units", lambda: False)
    layer, kept = bound(), []
    x = torch.randn(5, 40).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        layer(x)
    assert [each.data_ptr() for each in kept] == [layer.weight.data_ptr()]


def test_matrices_are_widened_in_one_place_until_the_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of all sizes take turns in it, and a product that was made does not change when the next one is."""
    monkeypatch.setattr(widened, "has_matrix_units", lambda: False)
    widened.let_go()
    module, (ids, _) = prompted("bert", "lora"), texts("bert")
    with module.computing_in("bfloat16"):
        first = module(ids)
        kept = first.clone()
        place = widened._room.values.data_ptr()
        assert torch.equal(module(ids), kept)
        assert torch.equal(first, kept)
        assert widened._room.values.data_ptr() == place
        largest = max(each.weight.numel() for each in module.modules() if isinstance(each, FrozenLinear))
        assert widened._room.values.numel() == largest
    assert widened._room.values is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("injection", ["prompt", "lora", "prefix"])
def test_without_matrix_units_no_product_is_in_bfloat16(
    family: str, injection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = texts(family)
    kinds = {}
    for units in (True, False):
        monkeypatch.setattr(widened, "has_matrix_units", lambda units=units: units)
        module = prompted(family, injection)
        with module.computing_in("bfloat16"), Multiplied() as seen:
            module(ids).square().sum().backward()
        kinds[units] = seen.kinds
    assert torch.bfloat16 in kinds[True]
    assert kinds[False] == {torch.float32}


@pytest.mark.parametrize("units", [False], indirect=True)
@pytest.mark.usefixtures("units")
def test_a_bias_that_is_trained_gets_its_gradient() -> None:
    layer = bound()
    del layer.bias
    layer.register_parameter("bias", nn.Parameter(torch.zeros(30, dtype=torch.bfloat16)))
    layer(torch.ones(2, 40).bfloat16()).float().sum().backward()
    assert layer.bias.grad is not None
    assert set(layer.bias.grad.tolist()) == {2.0}


@pytest.mark.parametrize("units", [False], indirect=True)
@pytest.mark.usefixtures("units")
def test_only_bfloat16_on_a_processor_is_widened() -> None:
    assert widens(torch.zeros(1, dtype=torch.bfloat16))
    assert not widens(torch.zeros(1))
    assert not widens(torch.zeros(1, dtype=torch.bfloat16, device="meta"))


def test_a_torch_that_does_not_tell_has_no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    has_matrix_units.cache_clear()
    try:
        assert has_matrix_units() is False
    finally:
        has_matrix_units.cache_clear()


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("limit", "capabilities", "known"),
    [
        (None, {"amx_bf16": True}, True),
        (None, {"bf16": True, "neon": True}, False),
        (None, {"avx512_bf16": True, "amx_bf16": False}, False),
        (None, {}, False),
        ("AVX512_CORE_BF16", {"amx_bf16": True}, False),
        ("avx512_core_amx", {"amx_bf16": True}, True),
        ("DEFAULT", {"amx_bf16": True}, True),
        ("AVX512_CORE_AMX", {"amx_bf16": False}, False),
    ],
)
def test_matrix_units_are_those_that_the_matrix_library_may_use(
    variable: str, limit: str | None, capabilities: dict[str, bool], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(each, raising=False)
    if limit is not None:
        monkeypatch.setenv(variable, limit)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    has_matrix_units.cache_clear()
    try:
        assert has_matrix_units() is known
    finally:
        has_matrix_units.cache_clear()


def test_every_linear_layer_of_a_tree_is_replaced_and_no_other() -> None:
    class Subclass(nn.Linear):
        pass

    tree = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4, bias=False), Subclass(4, 4)), nn.LayerNorm(4))
    freeze_products(tree)
    kinds = [type(each) for each in tree.modules() if isinstance(each, nn.Linear | nn.LayerNorm)]
    assert kinds == [FrozenLinear, FrozenLinear, Subclass, nn.LayerNorm]
    assert [tuple(each.shape) for each in tree.parameters()][:3] == [(3, 2), (3,), (4, 3)]
