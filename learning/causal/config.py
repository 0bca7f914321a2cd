"""The configs of causal language models: which keys, within which limits, and the tensors that follow from them.

Guarantees: the module is pure and uses only the standard library. A config that passes `check_causal` has every key of
its family and nothing else, so a model is built from numbers within limits and from words of a list. Nothing is
allocated.

A config is flat, as a job's document holds it (`tacit.prompt.EncoderConfig`). `flat_config` reads config.json, in which
the rotary positions are a table, and leaves out what does not affect the computation here: ids of special tokens,
dropouts, and how the model was initialised. Tensor names are transformers' own. Missing keys have transformers'
defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

__all__ = ["FAMILIES", "CausalConfigInvalid", "Sizes", "check_causal", "flat_config", "sizes_of", "tensor_shapes"]

# The families, and how each one's layers are called.
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

# Limits on what a job may make a member build.
_MAX_VALUES = 1 << 34
_MAX_VOCABULARY = 1 << 20
# Positions that `check_examples_apart` and short texts need besides the prompt.
_MIN_ROOM = 16
_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


class CausalConfigInvalid(ValueError):
    """The config cannot make a causal language model. The text says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class _Key:
    """A config's key: its type, its limits, and transformers' default."""

    kind: type
    default: Any
    least: float = 1
    most: float = 0
    optional: bool = False


_ROPE = {
    "rope_theta": _Key(float, 10_000.0, 1, 1e9),
    "rope_type": _Key(str, "default"),
    "rope_factor": _Key(float, None, 1, 1024, optional=True),
    "rope_low_freq_factor": _Key(float, None, 1e-3, 1024, optional=True),
    "rope_high_freq_factor": _Key(float, None, 1e-3, 1024, optional=True),
    "rope_original_max_position_embeddings": _Key(int, None, 1, 1 << 20, optional=True),
}
# The keys that only rope_type = "llama3" has.
_SCALED = tuple(key for key, each in _ROPE.items() if each.optional)


def _llama_like(positions: int, inner: int, heads: int | None) -> dict[str, _Key]:
    return {
        "hidden_size": _Key(int, 4096, 1, 16384),
        "intermediate_size": _Key(int, inner, 1, 65536),
        "num_hidden_layers": _Key(int, 32, 1, 128),
        "num_attention_heads": _Key(int, 32, 1, 256),
        # None: as many as there are heads.
        "num_key_value_heads": _Key(int, heads, 1, 256, optional=True),
        # None: hidden_size / num_attention_heads.
        "head_dim": _Key(int, None, 2, 1024, optional=True),
        "hidden_act": _Key(str, "silu"),
        "max_position_embeddings": _Key(int, positions, 1, 1 << 20),
        "rms_norm_eps": _Key(float, 1e-6, 0, 1),
        "tie_word_embeddings": _Key(bool, False),
        **_ROPE,
    }


_KEYS: dict[str, dict[str, _Key]] = {
    "llama": {
        **_llama_like(2048, 11008, None),
        "attention_bias": _Key(bool, False),
        "mlp_bias": _Key(bool, False),
    },
    "mistral": {**_llama_like(131072, 14336, 8), "sliding_window": _Key(int, 4096, 1, 1 << 20, optional=True)},
    "qwen2": _llama_like(32768, 22016, 32),
    "qwen3": {
        **_llama_like(32768, 22016, 32),
        "head_dim": _Key(int, 128, 2, 1024, optional=True),
        "attention_bias": _Key(bool, False),
    },
    "gpt2": {
        "n_embd": _Key(int, 768, 1, 16384),
        "n_layer": _Key(int, 12, 1, 128),
        "n_head": _Key(int, 12, 1, 256),
        # None: four times n_embd.
        "n_inner": _Key(int, None, 1, 65536, optional=True),
        "n_positions": _Key(int, 1024, 1, 1 << 20),
        "activation_function": _Key(str, "gelu_new"),
        "layer_norm_epsilon": _Key(float, 1e-5, 0, 1),
        "scale_attn_weights": _Key(bool, True),
        "scale_attn_by_inverse_layer_idx": _Key(bool, False),
        "tie_word_embeddings": _Key(bool, True),
    },
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all families share, from a checked config.

    Attributes:
        layers: The number of layers.
        width: Of a token's vector and state.
        heads: Heads of the queries.
        key_heads: Heads of the keys and values.
        head: The width of a head.
        inner: The width inside the feed-forward network.
        room: Positions of prompt and text together.
        gated: Whether the feed-forward network has a gate.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    head: int
    inner: int
    room: int
    gated: bool

    def matrix(self, kind: str) -> tuple[int, int]:
        """(in, out) of a layer's matrix by its kind in `learning.prompts.setting.MATRICES`."""
        queries, keys = self.heads * self.head, self.key_heads * self.head
        return {
            "query": (self.width, queries),
            "key": (self.width, keys),
            "value": (self.width, keys),
            "output": (queries, self.width),
            "up": (self.width, self.inner),
            "gate": (self.width, self.inner),
            "down": (self.inner, self.width),
        }[kind]


def flat_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what is in a model's config.json as a flat config.

    Raises:
        CausalConfigInvalid: The model type is not supported, or the model computes in a way that is not known here.
    """
    keys = _keys_of(raw)
    kind = raw["model_type"]
    flat: dict[str, Any] = {"model_type": kind}
    flat |= {key: raw[key] for key in keys if key in raw and not key.startswith("rope_")}
    if kind == "gpt2":
        if raw.get("add_cross_attention"):
            raise CausalConfigInvalid("backbone: add_cross_attention makes no plain language model; choose another")
        return flat
    # transformers 5 writes rope_parameters; older versions rope_theta next to rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CausalConfigInvalid("backbone: its rotary positions are not a table; save the model again")
    rope = {"rope_theta": raw.get("rope_theta", _ROPE["rope_theta"].default), **rope}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    for key, value in rope.items():
        named = key if key.startswith("rope_") else f"rope_{key}"
        if named not in keys:
            raise CausalConfigInvalid(f"backbone: rotary positions with {key} are not supported; choose another model")
        flat[named] = value
    # Qwen names a window and, next to it, whether some of the layers use it.
    if kind in ("qwen2", "qwen3") and raw.get("use_sliding_window"):
        raise CausalConfigInvalid("backbone: use_sliding_window in some layers is not supported; choose another model")
    return flat


def check_causal(config: Mapping[str, Any], room: int = 0) -> dict[str, Any]:
    """Checks a flat config and fills in missing keys with transformers' defaults.

    Args:
        config: The config. `vocab_size` is ignored: the word embedding says it.
        room: Positions that prompt and text need together.

    Returns:
        The config with every key of its family. Keys that have no value (a window, a scaling) are None.

    Raises:
        CausalConfigInvalid: The model type is not supported, a key is unknown, or a value is out of bounds.
    """
    keys = _keys_of(config)
    kind: str = config["model_type"]
    if surplus := sorted(config.keys() - keys.keys() - {"model_type", "vocab_size"}):
        raise CausalConfigInvalid(f"backbone: the config has keys that {kind} does not use here: {', '.join(surplus)}")
    whole: dict[str, Any] = {"model_type": kind}
    whole |= {name: _checked(name, key, config.get(name, key.default)) for name, key in keys.items()}
    if kind == "gpt2":
        whole["n_inner"] = whole["n_inner"] or 4 * whole["n_embd"]
        _multiple("n_embd", whole["n_embd"], "n_head", whole["n_head"])
    else:
        heads = whole["num_attention_heads"]
        if whole["head_dim"] is None:
            _multiple("hidden_size", whole["hidden_size"], "num_attention_heads", heads)
            whole["head_dim"] = whole["hidden_size"] // heads
        if whole["head_dim"] % 2:
            raise CausalConfigInvalid(f"backbone: head_dim = {whole['head_dim']} must be even, for rotary positions")
        whole["num_key_value_heads"] = whole["num_key_value_heads"] or heads
        _multiple("num_attention_heads", heads, "num_key_value_heads", whole["num_key_value_heads"])
        _check_rope(whole)
    sizes = sizes_of(whole)
    if (values := sizes.layers * sum(a * b for a, b in map(sizes.matrix, _matrices(sizes)))) > _MAX_VALUES:
        raise CausalConfigInvalid(f"backbone: its layers have {values:,} values, too many; choose a smaller one")
    if sizes.room < (needed := max(room, _MIN_ROOM)):
        raise CausalConfigInvalid(
            f"backbone: it has {sizes.room} positions, fewer than the {needed} that prompt and text need; lower "
            "model.max_tokens or choose another base"
        )
    return whole


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """The sizes of a config from `check_causal`."""
    if config["model_type"] == "gpt2":
        width, heads = config["n_embd"], config["n_head"]
        return Sizes(
            config["n_layer"], width, heads, heads, width // heads, config["n_inner"], config["n_positions"], False
        )
    # Within one window, attention with a window is attention without one.
    positions = min(config["max_position_embeddings"], config.get("sliding_window") or 1 << 30)
    return Sizes(
        config["num_hidden_layers"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"],
        positions,
        True,
    )


def tensor_shapes(config: Mapping[str, Any], vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a config from `check_causal` by name: the word tables, the layers in order, the last norm.

    Raises:
        CausalConfigInvalid: The vocabulary is empty or too large.
    """
    if not 1 <= vocabulary_size <= _MAX_VOCABULARY:
        raise CausalConfigInvalid(
            f"backbone: its vocabulary has {vocabulary_size:,} words and must have 1 to {_MAX_VOCABULARY:,}"
        )
    table = (vocabulary_size, sizes_of(config).width)
    inside = _gpt2_shapes(config, table) if config["model_type"] == "gpt2" else _llama_shapes(config, table)
    return inside if config["tie_word_embeddings"] else inside | {"lm_head.weight": table}


def _llama_shapes(config: Mapping[str, Any], table: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    sizes = sizes_of(config)
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    inner = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    biased = set(attention if config.get("attention_bias") else ()) | set(inner if config.get("mlp_bias") else ())
    if config["model_type"] == "qwen2":
        biased = {"query", "key", "value"}
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for number in range(sizes.layers):
        layer = f"model.layers.{number}"
        for owner, places in (("self_attn", attention), ("mlp", inner)):
            for kind, name in places.items():
                inputs, outputs = sizes.matrix(kind)
                found[f"{layer}.{owner}.{name}.weight"] = (outputs, inputs)
                if kind in biased:
                    found[f"{layer}.{owner}.{name}.bias"] = (outputs,)
        if config["model_type"] == "qwen3":
            found |= {f"{layer}.self_attn.{name}_norm.weight": (sizes.head,) for name in "qk"}
        found |= {f"{layer}.{name}_layernorm.weight": (sizes.width,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (sizes.width,)}


def _gpt2_shapes(config: Mapping[str, Any], table: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    sizes = sizes_of(config)
    width, inner = sizes.width, sizes.inner
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": table,
        "transformer.wpe.weight": (config["n_positions"], width),
    }
    # Its matrices are (in, out).
    layers = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for number in range(sizes.layers):
        for name, shape in layers.items():
            found[f"transformer.h.{number}.{name}.weight"] = shape
            found[f"transformer.h.{number}.{name}.bias"] = shape[1:]
        for name in ("ln_1", "ln_2"):
            found |= {f"transformer.h.{number}.{name}.{each}": (width,) for each in ("weight", "bias")}
    return found | {f"transformer.ln_f.{each}": (width,) for each in ("weight", "bias")}


def _keys_of(config: Mapping[str, Any]) -> dict[str, _Key]:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise CausalConfigInvalid(
            f"backbone: model_type {kind!r} is not a supported causal model; choose one of {', '.join(FAMILIES)} "
            "(SmolLM2 is llama)"
        )
    return _KEYS[kind]


def _checked(name: str, key: _Key, value: Any) -> Any:
    if value is None and key.optional:
        return None
    # A number of thousands of digits is an answer, too.
    shown = repr(value)[:40]
    if key.kind is bool:
        if not isinstance(value, bool):
            raise CausalConfigInvalid(f"backbone: {name} = {shown} must be true or false")
        return value
    if key.kind is str:
        allowed = ("default", "llama3") if name == "rope_type" else _ACTIVATIONS
        if value not in allowed:
            raise CausalConfigInvalid(
                f"backbone: {name} = {shown} is not supported; choose one of {', '.join(allowed)}"
            )
        return value
    numbers = (int,) if key.kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, numbers) or (isinstance(value, float) and not isfinite(value)):
        raise CausalConfigInvalid(f"backbone: {name} = {shown} must be a {'whole ' * (key.kind is int)}number")
    if not key.least <= value <= key.most or (key.kind is float and not value):
        raise CausalConfigInvalid(f"backbone: {name} = {shown} must be from {key.least:g} to {key.most:,g}")
    return value if key.kind is int else float(value)


def _check_rope(whole: Mapping[str, Any]) -> None:
    scaled = whole["rope_type"] == "llama3"
    for key in _SCALED:
        if (whole[key] is None) == scaled:
            raise CausalConfigInvalid(
                f"backbone: {key} {'is missing' if scaled else 'has no effect'} with rope_type = "
                f'"{whole["rope_type"]}"; use the model\'s own config'
            )
    if scaled and whole["rope_low_freq_factor"] >= whole["rope_high_freq_factor"]:
        raise CausalConfigInvalid("backbone: rope_low_freq_factor must be below rope_high_freq_factor")


def _multiple(name: str, value: int, of: str, other: int) -> None:
    if value % other:
        raise CausalConfigInvalid(f"backbone: {name} = {value} must be a multiple of {of} = {other}")


def _matrices(sizes: Sizes) -> tuple[str, ...]:
    return ("query", "key", "value", "output", "up", "down", *(("gate",) if sizes.gated else ()))
