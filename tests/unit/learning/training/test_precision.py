"""A frozen network in bfloat16: nearly the same answers and gradients, and nothing else changes."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from learning.models import build, widened
from learning.models.division import shared_parameters
from learning.training.local import evaluate, train
from tacit.job import Training
from tacit.model import TextCNNModel
from tests.support.tiny_prompts import CLOZE, FAMILIES, LABELS, PAIRS, Head, prompted, texts  # type: ignore[attr-defined]

torch.set_num_threads(1)


def gradients(module, ids, labels) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad(set_to_none=True)
    logits = module(ids)
    functional.cross_entropy(logits, labels).backward()
    return logits.detach(), {name: each.grad.clone() for name, each in module.named_parameters()}


def network_of(module) -> list[Tensor]:
    """The tensors in the network's layers."""
    found = [value for layer in module.layers.modules() for value in vars(layer).values() if isinstance(value, Tensor)]
    assert found
    return found


# A job that trains biases inside the network may not name another precision (`tacit.job_checks`).
FROZEN_INSIDE = [(family, injection) for family, injection in PAIRS if "bitfit" not in injection]


@pytest.mark.parametrize("units", [True, False], ids=["units", "widened"])
@pytest.mark.parametrize(("family", "injection"), FROZEN_INSIDE)
def test_answers_and_gradients_match_float32_to_bfloat16s_rounding(family, injection, units, monkeypatch) -> None:
    monkeypatch.setattr(widened, "has_matrix_units", lambda: units)
    module = prompted(family, injection)
    ids, labels = texts(family)
    exact, wanted = gradients(module, ids, labels)
    with module.computing_in("bfloat16"):
        logits, found = gradients(module, ids, labels)
    assert logits.dtype == torch.float32
    # Less precise than float32, but not much.
    assert 0 < float((logits - exact).abs().max()) < 0.1 * float(exact.abs().max())
    for name, each in found.items():
        assert each.dtype == torch.float32
        assert float(functional.cosine_similarity(each.flatten(), wanted[name].flatten(), dim=0)) > 0.9, name
    again, _ = gradients(module, ids, labels)
    assert torch.equal(again, exact)


@pytest.mark.parametrize("task", [CLOZE, Head()], ids=["cloze", "head"])
def test_only_the_frozen_network_changes_precision_and_is_put_back(task):
    module = prompted("bert", task=task)
    table, before = module.embedding.weight, network_of(module)
    stored = {name: each.clone() for name, each in module.backbone.on("cpu").items()}
    with module.computing_in("bfloat16"):
        assert {each.dtype for each in network_of(module)} == {torch.bfloat16}
        assert module.embedding.weight is table
        assert {each.dtype for each in module.parameters()} == {torch.float32}
        if task is CLOZE:
            assert module.words.rows.dtype == module.words.dense.weight.dtype == torch.float32
    assert all(mine is first for mine, first in zip(network_of(module), before, strict=True))
    for name, each in module.backbone.on("cpu").items():
        assert torch.equal(each, stored[name])


def test_an_error_inside_restores_float32() -> None:
    module = prompted("bert")
    with pytest.raises(RuntimeError, match="here"), module.computing_in("bfloat16"):
        raise RuntimeError("here")
    assert {each.dtype for each in network_of(module)} == {torch.float32}


def test_a_module_that_moves_keeps_its_precision() -> None:
    """torch's meta device stands in for one that a test machine may not have."""
    module = prompted("bert")
    with module.computing_in("bfloat16"):
        module.to("meta")
        assert {each.dtype for each in network_of(module)} == {torch.bfloat16}
        assert {each.device.type for each in network_of(module)} == {"meta"}


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in ("bert", "t5") else pytest.mark.long) for each in FAMILIES]
)
def test_training_in_bfloat16_follows_training_in_float32(family) -> None:
    ids, _ = texts(family, batch=30)
    labels = (ids[:, 0] % LABELS).numpy()
    optimiser = "adafactor" if family.startswith("t5") else "adam"
    losses, moved = {}, {}
    start = shared_parameters(prompted(family))
    for precision in ("float32", "bfloat16"):
        module = prompted(family)
        recipe = Training(epochs=8, batch=10, optimiser=optimiser, learning_rate=0.1, precision=precision)
        train(module, ids.numpy(), labels, recipe, seed=3)
        losses[precision] = evaluate(module, ids.numpy(), labels).loss
        moved[precision] = np.concatenate(
            [(each - start[name]).ravel() for name, each in shared_parameters(module).items()]
        )
    assert abs(losses["bfloat16"] - losses["float32"]) < 0.05
    assert losses["bfloat16"] < evaluate(prompted(family), ids.numpy(), labels).loss - 0.05
    assert not np.array_equal(moved["bfloat16"], moved["float32"])
    assert np.corrcoef(moved["bfloat16"], moved["float32"])[0, 1] > 0.9


def test_bfloat16_is_refused_for_a_model_without_a_frozen_network() -> None:
    model = TextCNNModel(embedding=6, widths=(2,), maps=4, dropout=0.0, max_tokens=8)
    module = build(model, 12, 2, pad_id=0, seed=1)
    ids = np.random.default_rng(1).integers(1, 12, size=(6, 8))
    with pytest.raises(ValueError, match="bfloat16 is for the frozen network of a prompted model"):
        train(module, ids, np.arange(6) % 2, Training(precision="bfloat16"), seed=1)
    with pytest.raises(ValueError, match="only a model that writes keeps matrices in bfloat16"):
        module.keeping_in("bfloat16").__enter__()
