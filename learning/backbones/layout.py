"""Derives a backbone's tensors from its config: their names and shapes, and where each is in the canonical file.

A backbone is a frozen language model of transformers: BERT including MiniLM, RoBERTa, DistilBERT, ELECTRA, both
versions of T5, and the causal families of `learning.causal.config`. Its canonical file is a safetensors file of exactly
these tensors, under the names (with prefix) that transformers gives them, in float32, in the order of their names,
without metadata. So the file's length and header follow from the config, and two members that read the same values from
different files, types or shards have the same bytes.

Guarantees: the module is pure and uses only the standard library. A config that passes `checked_config` has sizes
within bounds, so nothing larger than `MAX_BYTES` is ever requested, mapped or built.

Left out, since frozen prompts never use them: poolers, next-sentence heads, copies of tied matrices, buffers.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learning.causal.config import FAMILIES as CAUSAL_FAMILIES
from learning.causal.config import CausalConfigInvalid, check_causal, tensor_shapes
from tacit.prompt import MAX_BACKBONE_BYTES

__all__ = [
    "CAUSAL_FAMILIES",
    "FAMILIES",
    "HEAD_FLAGS",
    "MAX_BYTES",
    "BackboneInvalid",
    "Layout",
    "Shape",
    "checked_config",
    "known_keys",
    "layout_of",
    "library_config",
]

MAX_BYTES = MAX_BACKBONE_BYTES

Shape = tuple[int, ...]


class BackboneInvalid(ValueError):
    """The config, folder or file is no backbone. The text says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of config.json: the bounds of a number, or the allowed words; `default` is transformers' own."""

    default: Any = None
    least: float = 1
    most: float = 0
    words: tuple[str, ...] = ()


_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
_HIDDEN, _LAYERS, _HEADS, _INNER = (_Key(None, 1, most) for most in (4096, 48, 128, 16384))
_ROWS, _ROW = _Key(None, 5, 1_000_000), _Key(0, 0, 1_000_000)
_POSITIONS, _RANGE, _EPSILON = _Key(512, 16, 65536), _Key(0.02, 0, 1), _Key(1e-12, 0, 1)

_BERT: dict[str, _Key] = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": _INNER,
    "hidden_act": _Key("gelu", words=_ACTIVATIONS),
    "vocab_size": _ROWS,
    "max_position_embeddings": _POSITIONS,
    "type_vocab_size": _Key(2, 1, 64),
    "layer_norm_eps": _EPSILON,
    "initializer_range": _RANGE,
}
_KEYS: dict[str, dict[str, _Key]] = {
    "bert": _BERT,
    # Its positions start after its padding's id.
    "roberta": {**_BERT, "pad_token_id": _Key(1, 0, 1_000_000)},
    "distilbert": {
        "dim": _HIDDEN,
        "n_layers": _LAYERS,
        "n_heads": _HEADS,
        "hidden_dim": _INNER,
        "activation": _Key("gelu", words=_ACTIVATIONS),
        "vocab_size": _ROWS,
        "max_position_embeddings": _POSITIONS,
        "initializer_range": _RANGE,
    },
    # Token vectors may be narrower than states.
    "electra": {**_BERT, "embedding_size": _HIDDEN},
    "t5": {
        "d_model": _HIDDEN,
        "d_kv": _Key(64, 1, 4096),
        "d_ff": _INNER,
        "num_layers": _LAYERS,
        "num_decoder_layers": _LAYERS,
        "num_heads": _HEADS,
        "feed_forward_proj": _Key("relu", words=("relu", "gated-gelu")),
        "vocab_size": _ROWS,
        "relative_attention_num_buckets": _Key(32, 2, 4096),
        "relative_attention_max_distance": _Key(128, 2, 65536),
        "layer_norm_epsilon": _Key(1e-6, 0, 1),
        "decoder_start_token_id": _ROW,
    },
}
# Whether the language model's head exists (for T5, as a separate matrix), which transformers' configs do not say; and
# whether T5 scales its input, which version 1.0 does.
HEAD_FLAGS = ("masked_lm", "lm_head")
_T5_SCALES = "scale_decoder_outputs"


FAMILIES = frozenset((*_KEYS, *CAUSAL_FAMILIES))


def _flags(kind: str) -> tuple[str, ...]:
    return ("lm_head", _T5_SCALES) if kind == "t5" else ("masked_lm",)


def library_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checked config without our own keys, as the library and `learning.prompts` know it."""
    return {name: value for name, value in config.items() if name not in HEAD_FLAGS}


def known_keys(kind: str) -> frozenset[str]:
    """The keys that are read from config.json, for a supported model type that is not causal."""
    return frozenset({"model_type", *_KEYS[kind]} | ({_T5_SCALES} if kind == "t5" else set()))


def checked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a backbone's config.

    Returns:
        The complete config: `model_type`, sizes and flags, in the order of their names.

    Raises:
        BackboneInvalid: The model type is not supported, a key is missing or unknown, a value is out of bounds, or the
            file would be too large.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise BackboneInvalid(
            f"model_type {str(kind)[:40]!r} is not a supported backbone; choose one of {', '.join(sorted(FAMILIES))} "
            "(MiniLM is bert, SmolLM2 is llama)"
        )
    if kind in CAUSAL_FAMILIES:
        return _small_enough(_checked_causal(config))
    keys, flags = _KEYS[kind], _flags(kind)
    if surplus := sorted(config.keys() - keys.keys() - {"model_type", *flags}):
        raise BackboneInvalid(f"the config has keys that {kind} does not use here: {', '.join(surplus)[:200]}")
    whole: dict[str, Any] = {"model_type": kind}
    for name, key in keys.items():
        whole[name] = _checked(name, key, config.get(name, key.default))
    for name in flags:
        whole[name] = config.get(name)
        if not isinstance(whole[name], bool):
            raise BackboneInvalid(f"{name} = {whole[name]!r} must be true or false")
    _check_together(whole)
    return _small_enough(whole)


def _checked_causal(config: Mapping[str, Any]) -> dict[str, Any]:
    """The complete config of a causal family. It also has `vocab_size`, from which the word tables' sizes follow."""
    try:
        whole = check_causal(config)
        words = _checked("vocab_size", _ROWS, config.get("vocab_size"))
        tensor_shapes(whole, words)
    except CausalConfigInvalid as error:
        raise BackboneInvalid(str(error).removeprefix("backbone: ")) from None
    return whole | {"vocab_size": words}


def _small_enough(whole: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(sorted(whole.items()))
    if (size := layout_of(found).size) > MAX_BYTES:
        raise BackboneInvalid(f"the backbone has {size:,} bytes, and the limit is {MAX_BYTES:,}; choose a smaller one")
    return found


def _checked(name: str, key: _Key, value: Any) -> Any:
    if key.words:
        if value not in key.words:
            raise BackboneInvalid(
                f"{name} = {str(value)[:40]!r} is not supported; choose one of {', '.join(key.words)}"
            )
        return value
    whole = isinstance(key.default, int | None)
    right = isinstance(value, int) if whole else isinstance(value, int | float)
    if not right or isinstance(value, bool) or not (key.least <= value <= key.most if whole else 0 < value <= key.most):
        what = f"a whole number from {key.least:g} to {key.most:g}" if whole else f"above 0 and at most {key.most:g}"
        raise BackboneInvalid(f"{name} = {str(value)[:40]} must be {what}")
    return value


def _check_together(whole: Mapping[str, Any]) -> None:
    hidden, heads = {"t5": ("d_model", None), "distilbert": ("dim", "n_heads")}.get(
        whole["model_type"], ("hidden_size", "num_attention_heads")
    )
    if heads is not None and whole[hidden] % whole[heads]:
        raise BackboneInvalid(f"{hidden} = {whole[hidden]} must be a multiple of {heads} = {whole[heads]}")
    for name in ("pad_token_id", "decoder_start_token_id"):
        if whole.get(name, 0) >= whole["vocab_size"]:
            raise BackboneInvalid(f"{name} = {whole[name]} is not a row of a vocabulary of {whole['vocab_size']}")
    if (kind := whole["model_type"]) != "t5":
        first = whole["pad_token_id"] + 1 if kind == "roberta" else 0
        if whole["max_position_embeddings"] - first < 16:
            raise BackboneInvalid(
                f"the backbone has {whole['max_position_embeddings'] - first} positions, too few for a text; choose "
                "another"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """The canonical file of a config.

    Attributes:
        shapes: Shapes by name, in the file's order.
        header: The bytes before the values.
        places: Where each tensor's values start, in bytes from the start of the file.
        size: The file's size, in bytes.
    """

    shapes: Mapping[str, Shape]
    header: bytes
    places: Mapping[str, int]
    size: int


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout of a config that passed `checked_config`."""
    shapes = dict(sorted(_shapes(config).items()))
    entries: dict[str, dict[str, Any]] = {}
    begins, at = {}, 0
    for name, shape in shapes.items():
        begins[name], end = at, at + 4 * math.prod(shape)
        entries[name] = {"data_offsets": [at, end], "dtype": "F32", "shape": list(shape)}
        at = end
    text = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    # Spaces, which safetensors allows, make values start at a multiple of eight, so a memory map needs no copy.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: len(header) + begin for name, begin in begins.items()}
    return Layout(shapes, header, places, len(header) + at)


# ---- tensors by family -----------------------------------------------------------------------------------------


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    match config["model_type"]:
        case "t5":
            return _t5(config)
        case "distilbert":
            return _distilbert(config)
        case kind if kind in CAUSAL_FAMILIES:
            return tensor_shapes(config, config["vocab_size"])
        case _:
            return _bert(config)


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


# The heads for masked words: dense layer, normalisation, the words' bias.
_MASKED_LM = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
}


def _bert(config: Mapping[str, Any]) -> dict[str, Shape]:
    """The tensors of BERT (Devlin et al. 2019), RoBERTa and ELECTRA.

    They differ in the names of the head, and ELECTRA also before the first layer and after the last.
    """
    kind, hidden, inner, words = (
        config[key] for key in ("model_type", "hidden_size", "intermediate_size", "vocab_size")
    )
    width: int = config.get("embedding_size", hidden)
    found: dict[str, Shape] = {
        f"{kind}.embeddings.word_embeddings.weight": (words, width),
        f"{kind}.embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        f"{kind}.embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
        **_norm(f"{kind}.embeddings.LayerNorm", width),
    }
    if width != hidden:
        found |= _linear(f"{kind}.embeddings_project", hidden, width)
    for number in range(config["num_hidden_layers"]):
        layer = f"{kind}.encoder.layer.{number}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            found |= _linear(f"{layer}.attention.{name}", hidden, hidden)
        found |= _norm(f"{layer}.attention.output.LayerNorm", hidden)
        found |= _linear(f"{layer}.intermediate.dense", inner, hidden)
        found |= _linear(f"{layer}.output.dense", hidden, inner)
        found |= _norm(f"{layer}.output.LayerNorm", hidden)
    if config["masked_lm"]:
        dense, norm, bias = _MASKED_LM[kind]
        found |= {**_linear(dense, width, hidden), **_norm(norm, width), bias: (words,)}
    return found


def _distilbert(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, inner, words = (config[key] for key in ("dim", "hidden_dim", "vocab_size"))
    found: dict[str, Shape] = {
        "distilbert.embeddings.word_embeddings.weight": (words, hidden),
        "distilbert.embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        **_norm("distilbert.embeddings.LayerNorm", hidden),
    }
    for number in range(config["n_layers"]):
        layer = f"distilbert.transformer.layer.{number}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            found |= _linear(f"{layer}.attention.{name}", hidden, hidden)
        found |= _norm(f"{layer}.sa_layer_norm", hidden) | _norm(f"{layer}.output_layer_norm", hidden)
        found |= _linear(f"{layer}.ffn.lin1", inner, hidden) | _linear(f"{layer}.ffn.lin2", hidden, inner)
    if config["masked_lm"]:
        found |= _linear("vocab_transform", hidden, hidden) | _norm("vocab_layer_norm", hidden)
        found["vocab_projector.bias"] = (words,)
    return found


def _t5(config: Mapping[str, Any]) -> dict[str, Shape]:
    """The tensors of T5 (Raffel et al. 2020): no biases, and relative positions in the first layer of each stack."""
    hidden, inner, words = (config[key] for key in ("d_model", "d_ff", "vocab_size"))
    attended = config["num_heads"] * config["d_kv"]
    gated = config["feed_forward_proj"].startswith("gated-")

    def attention(name: str) -> dict[str, Shape]:
        within = {f"{name}.{each}.weight": (attended, hidden) for each in "qkv"}
        return within | {f"{name}.o.weight": (hidden, attended)}

    found: dict[str, Shape] = {"shared.weight": (words, hidden)}
    for stack, count, last in (("encoder", "num_layers", 1), ("decoder", "num_decoder_layers", 2)):
        for number in range(config[count]):
            block = f"{stack}.block.{number}.layer"
            found |= attention(f"{block}.0.SelfAttention")
            if last == 2:
                found |= attention(f"{block}.1.EncDecAttention")
            feed = f"{block}.{last}.DenseReluDense"
            found |= {f"{feed}.{name}.weight": (inner, hidden) for name in (("wi_0", "wi_1") if gated else ("wi",))}
            found[f"{feed}.wo.weight"] = (hidden, inner)
            found |= {f"{block}.{each}.layer_norm.weight": (hidden,) for each in range(last + 1)}
        relative = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[relative] = (config["relative_attention_num_buckets"], config["num_heads"])
        found[f"{stack}.final_layer_norm.weight"] = (hidden,)
    if config["lm_head"]:
        found["lm_head.weight"] = (words, hidden)
    return found
