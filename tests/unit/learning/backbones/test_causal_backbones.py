"""Canonical files of causal families: from one file or shards, in any type, the values that the library uses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from learning.backbones.layout import MAX_BYTES, BackboneInvalid, checked_config, layout_of
from learning.backbones.stored import digest_of, folder_config, read_backbone, write_backbone
from learning.causal.config import FAMILIES
from tests.support.random_causal import random_causal


def canonical(folder: Path, into: Path) -> tuple[bytes, dict[str, Any]]:
    config = folder_config(folder)
    return write_backbone(folder, config, into), config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_canonical_file_has_the_library_s_values(family: str, tmp_path: Path) -> None:
    model = random_causal(family)
    model.save_pretrained(tmp_path / "whole")
    digest, config = canonical(tmp_path / "whole", tmp_path / "file")
    found = read_backbone(tmp_path / "file", config)
    wanted = dict(model.named_parameters())
    assert found.tensors.keys() == wanted.keys()
    for name, values in found.tensors.items():
        np.testing.assert_array_equal(values, wanted[name].detach().numpy(), err_msg=name)
    # Shards, and a model without its head, have the same values and so the same file.
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert canonical(tmp_path / "shards", tmp_path / "other") == (digest, config)
    assert digest_of(tmp_path / "other") == digest
    # A library model made from what is stored computes the same.
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "whole"))
    again.load_state_dict({name: torch.tensor(values) for name, values in found.tensors.items()}, strict=False)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_causal("llama").to(dtype)
    model.save_pretrained(tmp_path / "half", max_shard_size="100KB")
    _, config = canonical(tmp_path / "half", tmp_path / "file")
    found = read_backbone(tmp_path / "file", config).tensors
    for name, values in model.named_parameters():
        np.testing.assert_array_equal(found[name], values.detach().float().numpy(), err_msg=name)


def test_a_body_alone_is_a_backbone_if_its_table_is_tied(tmp_path: Path) -> None:
    """GPT-2 is often stored without its head, and then its names have no prefix."""
    model = random_causal("gpt2")
    model.save_pretrained(tmp_path / "whole")
    model.transformer.save_pretrained(tmp_path / "body")
    whole, config = canonical(tmp_path / "whole", tmp_path / "file")
    assert canonical(tmp_path / "body", tmp_path / "other") == (whole, config)


def test_eight_billion_values_fit_and_seventy_do_not() -> None:
    """Sizes of Llama 3. Only sizes are computed."""
    llama: dict[str, Any] = {"model_type": "llama", "vocab_size": 128_256, "num_attention_heads": 32}
    eight = checked_config({**llama, "intermediate_size": 14336, "num_key_value_heads": 8, "rope_theta": 500000.0})
    assert layout_of(eight).size // 4 == 8_030_261_248 + len(layout_of(eight).header) // 4
    assert 2**34 < layout_of(eight).size < MAX_BYTES == 2**36
    with pytest.raises(BackboneInvalid, match="choose a smaller one"):
        checked_config({**llama, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab_size": None}, "vocab_size = None must be a whole number"),
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn' is not supported"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    import json

    random_causal("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BackboneInvalid, match=sentence):
        folder_config(tmp_path)


def test_an_untied_table_that_is_missing_is_named(tmp_path: Path) -> None:
    import json

    random_causal("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(BackboneInvalid, match=r"lack 1 of the backbone's tensors, lm_head\.weight first"):
        canonical(tmp_path, tmp_path / "file")
