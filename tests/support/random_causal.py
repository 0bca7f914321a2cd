"""Small random causal language models of each family, as transformers builds them."""

from typing import Any

import torch

__all__ = ["WORDS", "random_causal"]

WORDS = 300


def random_causal(family: str, *, words: int = WORDS, seed: int = 0) -> Any:
    """A model of two layers in evaluation mode, its table tied except for mistral's and qwen3's.

    Args:
        family: One of `learning.causal.config.FAMILIES`.
        words: Rows of its table.
        seed: Of its values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    else:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "tie_word_embeddings": family not in ("mistral", "qwen3"),
        }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=words, **sizes, **special))
    with torch.no_grad():
        # The library starts biases at zero and norms at one, which would hide a swapped name.
        for values in model.parameters():
            values.add_(0.02 * torch.randn_like(values))
    return model.eval()
