"""Writes small language models as GGUF files, with the package's own writer, as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.random_causal import random_causal

__all__ = ["tiny_gguf"]

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def _stored(name: str) -> str:
    owner, _, last = name.rpartition(".")
    if owner in _OUTSIDE:
        return f"{_OUTSIDE[owner]}.{last}"
    _, _, number, part = owner.split(".", 3)
    return f"blk.{number}.{_BLOCK[part]}.{last}"


def _paired(values: Any, heads: int) -> Any:
    """Rows as llama.cpp keeps them: the two that a rotation turns together are neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def tiny_gguf(
    path: Path, family: str, *, kind: gguf.GGMLQuantizationType | None = None, extra: str | None = None
) -> Any:
    """Writes a model of `random_causal` and returns it, with the values that the file keeps.

    Args:
        path: The file.
        family: llama, qwen2, qwen3 or gpt2.
        kind: The type of the matrices; None: float32.
        extra: The name of one more tensor.
    """
    import torch

    model = random_causal(family)
    config, writer = model.config, gguf.GGUFWriter(path, family)
    if family == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_block_count(config.n_layer)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
    writer.add_name(f"tiny {family}")
    _add_tokenizer(writer, config.vocab_size)
    with torch.no_grad():
        for name, values in model.named_parameters():
            data = values.numpy().copy()
            stored = _stored(name)
            if family == "llama" and stored.endswith(("attn_q.weight", "attn_k.weight")):
                heads = config.num_attention_heads if "attn_q" in stored else config.num_key_value_heads
                data = _paired(data, heads)
            if family == "gpt2" and stored.startswith("blk.") and data.ndim == 2:
                data = np.ascontiguousarray(data.T)
            if kind is None or data.ndim == 1:
                writer.add_tensor(stored, data)
                continue
            quantised = gguf.quantize(data, kind)
            writer.add_tensor(stored, quantised, raw_dtype=kind)
            kept = gguf.dequantize(quantised, kind)
            if family == "llama" and stored.endswith(("attn_q.weight", "attn_k.weight")):
                pairs = kept.reshape(heads, -1, 2, kept.shape[1])
                kept = pairs.swapaxes(1, 2).reshape(kept.shape)
            if family == "gpt2" and stored.startswith("blk."):
                kept = kept.T
            values.copy_(torch.tensor(np.ascontiguousarray(kept)))
    if extra is not None:
        writer.add_tensor(extra, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: gguf.GGUFWriter, words: int) -> None:
    """A byte-level BPE as GPT-2's: special tokens, the bytes' characters, and a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ a", "i n", "e r"]
    tokens = ["<unk>", "<s>", "</s>", *letters, *(each.replace(" ", "") for each in merges)]
    tokens += [f"<unused{number}>" for number in range(words - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
