"""Small random causal models for tests, and the library's own on the same values."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from learning.causal.backbone import CausalBackbone, library_config
from learning.causal.config import check_causal, tensor_shapes
from learning.causal.model import CausalModel
from learning.causal.sizes import IGNORED
from learning.prompts.setting import Injection, LoRA, PrefixTuning, PromptTuning

WORDS = 50

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "rope_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_max_position_embeddings": 16,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "llama3": {
        "model_type": "llama",
        **_SIZES,
        **_LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", **_SIZES},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 8},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
INJECTIONS: Mapping[str, Injection] = {
    "lora": LoRA(2, 4.0, ("query", "key", "value", "output", "up", "down")),
    "lora-up": LoRA(2, 4.0, train="up"),
    "lora-last": LoRA(2, 4.0, ("value", "down"), last_layers=1),
    "prompt": PromptTuning(3),
    "prefix": PrefixTuning(3),
    "prefix-mlp": PrefixTuning(3, 8),
}


def pairs(*injections: str) -> list[Any]:
    """Parameters: every family with every injection of these, or of all.

    Families differ in what LoRA changes, and Llama's and GPT-2's layers in everything else. The other pairs are a
    sweep.
    """

    def repeats(family: str, injection: str) -> bool:
        return family not in ("llama", "gpt2") and injection != "lora"

    return [
        pytest.param(family, each, marks=pytest.mark.long if repeats(family, each) else ())
        for family in CONFIGS
        for each in injections or INJECTIONS
    ]


def values_of(family: str) -> dict[str, NDArray[np.float32]]:
    """Random values under transformers' names."""
    random = np.random.default_rng(0)
    found = {}
    for name, shape in tensor_shapes(check_causal(CONFIGS[family]), WORDS).items():
        about = 1.0 if "norm" in name or ".ln_" in name else 0.0
        found[name] = (about + 0.3 * random.standard_normal(shape)).astype(np.float32)
    return found


def backbone(family: str) -> CausalBackbone:
    return CausalBackbone(CONFIGS[family], values_of(family))


def rounded_backbone(family: str) -> CausalBackbone:
    """The same backbone with its layers' matrices rounded to bfloat16, as float32 values."""
    values = values_of(family)
    for name, each in values.items():
        if each.ndim == 2 and not any(part in name for part in ("embed_tokens", "wte", "wpe", "lm_head")):
            values[name] = torch.from_numpy(each).bfloat16().float().numpy()
    return CausalBackbone(CONFIGS[family], values)


def causal(
    family: str,
    injection: str | Injection,
    *,
    dropout: float = 0.0,
    seed: int | None = 1,
    on: CausalBackbone | None = None,
) -> CausalModel:
    """A model whose trained values are all random, so that no gradient is zero by its start.

    Args:
        on: Its backbone, in place of the family's.
    """
    chosen = INJECTIONS[injection] if isinstance(injection, str) else injection
    module = CausalModel(backbone(family) if on is None else on, chosen, 0, seed, dropout).eval()
    random = np.random.default_rng(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("up.weight"):
                parameter.copy_(torch.from_numpy(0.3 * random.standard_normal(tuple(parameter.shape))))
    return module


def library_model(family: str) -> Any:
    """transformers' own model with the same values."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(library_config(check_causal(CONFIGS[family]), WORDS))
    values = {name: torch.from_numpy(each) for name, each in values_of(family).items()}
    _, surplus = model.load_state_dict(values, strict=False)
    assert not surplus
    model.tie_weights()
    return model.eval()


def rows(count: int = 5, length: int = 9) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids (N, S) of texts of different lengths, padded with 0, and targets on the words after the third."""
    random = np.random.default_rng(3)
    ids = random.integers(1, WORDS, (count, length))
    for number in range(count):
        ids[number, length - number % 5 :] = 0
    targets = np.full_like(ids, IGNORED)
    targets[:, 2:-1] = np.where(ids[:, 3:] != 0, ids[:, 3:], IGNORED)
    return ids, targets
