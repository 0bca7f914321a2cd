"""Configs of causal families: transformers' defaults and names, and everything else refused."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from learning.causal.backbone import CausalBackbone, library_config, rotary_frequencies
from learning.causal.config import (
    FAMILIES,
    CausalConfigInvalid,
    check_causal,
    flat_config,
    sizes_of,
    tensor_shapes,
)
from learning.causal.sizes import trained_values
from learning.prompts.backbone import BackboneInvalid
from learning.prompts.setting import LoRA
from tests.support.tiny_causal import CONFIGS, WORDS, backbone, values_of


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_have_transformers_defaults(family: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family)
    ours = check_causal({"model_type": family})
    assert ours.keys() >= {"model_type", "tie_word_embeddings"}
    for key, value in ours.items():
        if key == "n_inner":
            assert value == 4 * theirs.n_embd
        elif key == "head_dim":
            assert value == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        elif key.startswith("rope_"):
            assert value == theirs.rope_parameters.get(key)
        else:
            assert value == getattr(theirs, key), key
    assert check_causal(ours) == ours


@pytest.mark.parametrize("family", CONFIGS)
def test_names_and_shapes_are_those_of_transformers(family: str) -> None:
    from transformers import AutoModelForCausalLM

    config = check_causal(CONFIGS[family])
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(library_config(config, WORDS))
    assert tensor_shapes(config, WORDS) == {name: tuple(each.shape) for name, each in made.named_parameters()}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_written_config_reads_back(family: str) -> None:
    """transformers' config.json of a checked config is the same flat config."""
    config = check_causal(CONFIGS[family])
    assert check_causal(flat_config(library_config(config, WORDS).to_dict())) == config


def test_the_configs_of_well_known_models() -> None:
    smollm2 = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000,
        "tie_word_embeddings": True, "vocab_size": 49152, "bos_token_id": 1, "rope_scaling": None,
    }  # fmt: skip
    config = check_causal(flat_config(smollm2))
    assert sum(int(np.prod(shape)) for shape in tensor_shapes(config, 49152).values()) == 134_515_008
    assert trained_values(config, LoRA(8, 16.0)) == 460_800
    llama3 = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    config = check_causal(flat_config(llama3))
    assert sum(int(np.prod(shape)) for shape in tensor_shapes(config, 128256).values()) == 8_030_261_248
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(library_config({**config, "num_hidden_layers": 1}, 16))
    with torch.device("cpu"):
        theirs = type(made.model.rotary_emb)(library_config(config, 16)).inv_freq
    torch.testing.assert_close(rotary_frequencies(config), theirs, rtol=0, atol=0)


def test_mistral_has_room_for_one_window() -> None:
    assert sizes_of(check_causal({"model_type": "mistral"})).room == 4096
    assert sizes_of(check_causal({"model_type": "mistral", "sliding_window": None})).room == 131072


LLAMA = {"model_type": "llama"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma"}, "'gemma' is not a supported causal model"),
    ({}, "None is not a supported"),
    ({**LLAMA, "router": 1}, "keys that llama does not use here: router"),
    ({**LLAMA, "hidden_size": 0}, "must be from 1 to"),
    ({**LLAMA, "hidden_size": 1 << 20}, "must be from 1 to"),
    # No float holds these.
    ({**LLAMA, "hidden_size": 10**400}, r"= 10{39} must be from 1 to"),
    ({**LLAMA, "rope_theta": 10**400}, r"= 10{39} must be from 1 to"),
    ({**LLAMA, "hidden_size": 64.0}, "must be a whole number"),
    ({**LLAMA, "hidden_size": True}, "must be a whole number"),
    ({**LLAMA, "hidden_size": None}, "must be a whole number"),
    ({**LLAMA, "rms_norm_eps": 0.0}, "must be from"),
    ({**LLAMA, "rms_norm_eps": float("nan")}, "must be a number"),
    ({**LLAMA, "hidden_act": "exec"}, "is not supported; choose one of silu"),
    ({**LLAMA, "tie_word_embeddings": 1}, "must be true or false"),
    ({**LLAMA, "hidden_size": 65}, "must be a multiple of num_attention_heads"),
    ({**LLAMA, "num_key_value_heads": 5}, "must be a multiple of num_key_value_heads"),
    ({**LLAMA, "head_dim": 7}, "must be even"),
    ({**LLAMA, "rope_type": "yarn"}, "is not supported; choose one of default, llama3"),
    ({**LLAMA, "rope_type": "llama3"}, "rope_factor is missing"),
    ({**LLAMA, "rope_factor": 8.0}, "rope_factor has no effect"),
    ({**LLAMA, "max_position_embeddings": 8}, "it has 8 positions, fewer than the 16"),
    ({**LLAMA, "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 128}, "too many"),
    ({"model_type": "gpt2", "n_embd": 10}, "must be a multiple of n_head"),
]


@pytest.mark.parametrize(("config", "why"), REFUSED)
def test_what_is_out_of_bounds_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(CausalConfigInvalid, match=why):
        check_causal(config)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "beta_fast": 32}}, "with beta_fast are not supported"),
        ({**LLAMA, "rope_scaling": [1]}, "are not a table"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "no plain language model"),
    ],
)
def test_models_that_compute_otherwise_are_refused(raw: dict[str, Any], why: str) -> None:
    with pytest.raises(CausalConfigInvalid, match=why):
        flat_config(raw)


def test_room_that_a_job_needs_is_checked() -> None:
    assert check_causal(CONFIGS["llama"], 64)["max_position_embeddings"] == 64
    with pytest.raises(CausalConfigInvalid, match="fewer than the 65"):
        check_causal(CONFIGS["llama"], 65)
    for words in (0, 1 << 21):
        with pytest.raises(CausalConfigInvalid, match="its vocabulary has"):
            tensor_shapes(check_causal(CONFIGS["llama"]), words)


def test_tensors_that_do_not_fit_are_refused() -> None:
    values = values_of("llama")
    with pytest.raises(BackboneInvalid, match="no word embedding"):
        CausalBackbone(CONFIGS["llama"], {})
    with pytest.raises(BackboneInvalid, match=r"lacks the tensor lm_head\.weight"):
        CausalBackbone(CONFIGS["llama"], {name: each for name, each in values.items() if name != "lm_head.weight"})
    with pytest.raises(BackboneInvalid, match=r"model\.norm\.weight is float32 of shape"):
        CausalBackbone(CONFIGS["llama"], {**values, "model.norm.weight": np.zeros(3, dtype=np.float32)})
    spoilt = values["model.norm.weight"].copy()
    spoilt[1] = np.nan
    with pytest.raises(BackboneInvalid, match="not finite"):
        CausalBackbone(CONFIGS["llama"], {**values, "model.norm.weight": spoilt})


def test_values_are_used_where_they_are() -> None:
    """Two modules on one backbone hold its memory once, GPT-2's views included, and nobody writes to it."""
    from learning.causal.model import CausalModel

    for family in ("llama", "gpt2"):
        shared = backbone(family)
        memory = {each.untyped_storage().data_ptr() for each in shared.on("cpu").values()}
        for _ in range(2):
            module = CausalModel(shared, LoRA(2, 4.0), 0, 1)
            found = [value for layer in module.modules() for value in vars(layer).values() if torch.is_tensor(value)]
            assert found
            assert {each.untyped_storage().data_ptr() for each in found} == memory


def test_configs_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, learning.causal.sizes; print([each for each in ('torch', 'transformers') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
