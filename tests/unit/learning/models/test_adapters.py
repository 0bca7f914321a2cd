"""Low-rank changes of a frozen encoder: what is trained, what is frozen, and that merging changes nothing."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from learning.models import build, division_of, shared_parameters, values_of
from learning.models.adapters import LowRank, encoder_matrices
from learning.models.transformer import EncoderInvalid, TransformerClassifier
from tacit.method import FedAvg, FedVocab, LgFedAvg
from tacit.model import TransformerModel
from tests.support.plain_merging import looped

torch.set_num_threads(1)
VOCABULARY, LABELS, PAD = 30, 4, 0
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **SIZES},
    "roberta": {"model_type": "roberta", **SIZES},
    "distilbert": {
        **{"model_type": "distilbert", "dim": 16, "n_layers": 3, "n_heads": 4, "hidden_dim": 24},
        **{"max_position_embeddings": 40, "initializer_range": 0.2},
    },
}
of_each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
ALL = ["query", "key", "value", "output", "up", "down"]
IDS = torch.tensor([[2, 5, 9, 4, 3], [2, 7, 3, 0, 0]])


def model_of(config: dict[str, Any], injection: object) -> TransformerModel:
    return TransformerModel.model_validate({"config": config, "dropout": 0.0, "max_tokens": 20, "injection": injection})


def made(config: dict[str, Any], injection: object = "lora", *, moved: bool = False) -> TransformerClassifier:
    module = build(model_of(config, injection), VOCABULARY, LABELS, PAD, seed=1)
    assert isinstance(module, TransformerClassifier)
    if moved:
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.startswith("lora."):
                    parameter.add_(torch.randn_like(parameter))
    return module


@of_each
@torch.no_grad()
def test_it_starts_as_the_encoder_itself(config) -> None:
    whole, changed = made(config, None), made(config, {"name": "lora", "matrices": ALL})
    assert torch.equal(whole(IDS), changed(IDS))
    own, before = shared_parameters(changed), shared_parameters(whole)
    assert all(np.array_equal(own[name], values) for name, values in before.items())
    assert all(values.any() == (".down." in name) for name, values in own.items() if name.startswith("lora."))
    assert len([name for name in own if name.startswith("lora.")]) == 3 * 6 * 2


@of_each
def test_only_the_changes_the_embedding_and_the_head_have_gradients(config) -> None:
    module = made(config, {"name": "lora", "matrices": ALL}, moved=True)
    functional.cross_entropy(module(IDS), torch.tensor([0, 1])).backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == name.startswith("encoder."), name
        assert name.startswith("encoder.") or parameter.grad.any(), name


@of_each
@torch.no_grad()
def test_a_change_is_alpha_over_rank_times_up_of_down(config) -> None:
    module = made(config, {"name": "lora", "rank": 2, "alpha": 6.0, "matrices": ["value"]}, moved=True)
    plain = made(config, None)
    matrices = {each.name: each for each in encoder_matrices(plain.encoder, config["model_type"])}
    for name, change in module.lora.items():
        layer = matrices[name].owner.get_submodule(matrices[name].attribute)
        layer.weight.add_(3.0 * change["up"].weight @ change["down"].weight)
    torch.testing.assert_close(module(IDS), plain(IDS), rtol=0, atol=1e-5)
    assert not torch.allclose(module(IDS), made(config, None)(IDS), atol=1e-2)


@torch.no_grad()
def test_merging_adds_the_bytes_of_a_plain_loop() -> None:
    torch.manual_seed(1)
    layer = LowRank(torch.nn.Linear(96, 40), rank=8, alpha=24.0)
    for each in layer.change.values():
        each.weight.normal_()
    up, down = (layer.change[name].weight.numpy().copy() for name in ("up", "down"))
    expected = looped(layer.weight.numpy(), up, down, 3.0)
    layer.merge()
    assert layer.weight.numpy().tobytes() == expected.tobytes()


@of_each
@torch.no_grad()
def test_a_merged_module_computes_the_same_without_changes(config) -> None:
    module = made(config, {"name": "lora", "matrices": ALL}, moved=True)
    before, other = module(IDS), copy.deepcopy(module)
    module.merge()
    torch.testing.assert_close(module(IDS), before, rtol=0, atol=1e-5)
    assert [name for name, _ in module.named_parameters()] == [
        name for name, _ in made(config, None).named_parameters()
    ]
    module.merge()
    torch.testing.assert_close(module(IDS), before, rtol=0, atol=1e-5)
    # A copy has changes of its own.
    assert torch.equal(other(IDS), before)
    for change in other.lora.values():
        change["up"].weight.zero_()
    torch.testing.assert_close(other(IDS), made(config, None)(IDS), rtol=0, atol=1e-5)
    torch.testing.assert_close(module(IDS), before, rtol=0, atol=1e-5)


@of_each
@pytest.mark.parametrize(
    "injection", [None, "none", "lora", {"name": "lora", "matrices": ["up", "down"], "last_layers": 2}], ids=str
)
def test_values_are_counted_without_building_the_model(config, injection) -> None:
    values = sum(parameter.numel() for parameter in made(config, injection).parameters())
    assert values_of(model_of(config, injection), VOCABULARY, LABELS) == values


def test_last_layers_are_counted_from_the_top() -> None:
    injection = {"name": "lora", "matrices": ["query"], "last_layers": 2}
    assert list(made(CONFIGS["bert"], injection).lora) == ["layer1_query", "layer2_query"]
    assert len(made(CONFIGS["bert"], injection | {"last_layers": 9}).lora) == 3
    with pytest.raises(EncoderInvalid, match=r"^model\.injection\.matrices: a bert has no gate"):
        made(CONFIGS["bert"], {"name": "lora", "matrices": ["gate", "query"]})


def parts(method: Any, injection: object) -> tuple[set[str], set[str], set[str]]:
    """The first components of the names that are shared, private and frozen."""
    module = made(CONFIGS["bert"], injection)
    division = division_of(method, module)
    found = division.shared(module), division.private(module), division.frozen_values(module)
    assert sum(len(each) for each in found) == len(list(module.parameters()))
    shared, private, frozen = ({name.split(".")[0] for name in each} for each in found)
    return shared, private, frozen


def test_the_frozen_encoder_is_nobodys_own() -> None:
    up = {"name": "lora", "train": "up"}
    assert parts(FedVocab(), "lora") == ({"lora", "output"}, {"embedding"}, {"encoder"})
    assert parts(FedVocab(), "none") == ({"output"}, {"embedding"}, {"encoder"})
    assert parts(FedVocab(), up) == ({"lora", "output"}, {"embedding"}, {"encoder", "lora"})
    assert parts(FedAvg(), "lora") == ({"embedding", "lora", "output"}, set(), {"encoder"})
    assert parts(LgFedAvg(), "lora") == ({"output"}, {"embedding", "lora"}, {"encoder"})
    assert parts(FedVocab(), None) == ({"encoder", "output"}, {"embedding"}, set())
