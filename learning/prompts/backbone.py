"""A frozen pretrained language model: its config, its values, and the library's modules made from both.

Guarantees: no value of a backbone is a parameter or a buffer of any module, so manifests, optimisers, noise and
clipping see none of them. No value is ever written to, and all modules of a process share its memory on each device (a
network that computes in less than float32 temporarily has a copy). A config out of bounds, or a tensor that is missing,
not finite or of another shape, is refused before anything is built.

Families: BERT (including MiniLM), RoBERTa, DistilBERT and ELECTRA (its generator can answer; its discriminator has no
head), with or without their masked-language-model head; and T5, v1.0 (ReLU, one table for reading and answering) and
v1.1 (gated, two tables). The bounds of a config are those of `learning.models.transformer`. ELECTRA's are BERT's, but
its token vectors may be narrower than its states. T5's are checked here. Tensor names are the library's own, with or
without the model's prefix (bert., roberta., distilbert., electra.).
"""

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learning.backbones.paging import page_out
from learning.models.copied import copied
from learning.models.transformer import FAMILIES as ENCODERS
from learning.models.transformer import EncoderInvalid, bare_encoder, check_config
from learning.models.widened import freeze_products, is_matrix
from learning.prompts.attention import ATTENTION, register

__all__ = [
    "FAMILIES",
    "Backbone",
    "BackboneInvalid",
    "Frozen",
    "FrozenValues",
    "are_mapped",
    "check_backbone",
    "checked_tensors",
    "hollow",
    "library_module",
    "states_width_of",
    "tensor_shapes",
    "width_of",
]

# The names of each encoder's sizes.
FAMILIES = {**ENCODERS, "electra": ENCODERS["bert"]}

# Limits on what a job may make a member build, as in `learning.models.transformer`.
_MAX = {
    "d_model": 4096,
    "d_kv": 4096,
    "d_ff": 16384,
    "num_layers": 48,
    "num_decoder_layers": 48,
    "num_heads": 128,
    "relative_attention_num_buckets": 4096,
    "relative_attention_max_distance": 65536,
    "decoder_start_token_id": 1 << 22,
}
_MIN = {"decoder_start_token_id": 0, "relative_attention_num_buckets": 4}
_MAX_VALUES = 1 << 30
_FEED_FORWARD = ("relu", "gated-gelu")
# Positions that `check_examples_apart` and short texts need in addition to the prompt.
_MIN_ROOM = 16

# Names in the masked-language-model heads: (dense, norm, word bias).
_HEADS = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
}
_WORDS = "embeddings.word_embeddings.weight"
_T5_WORDS, _T5_ANSWERS = "shared.weight", "lm_head.weight"


class BackboneInvalid(ValueError):
    """The config or the tensors cannot make a backbone. The text says what is wrong and what to do."""


class FrozenValues:
    """float32 values by name, once on each device. Nobody writes to them.

    Args:
        values: On the CPU.
        mapped: Whether they are memory maps of a file, which can be read again.
    """

    def __init__(self, values: Mapping[str, Tensor], *, mapped: bool = False) -> None:
        self.mapped = mapped
        self._on: dict[str, Mapping[str, Tensor]] = {"cpu": values}
        self._lock = threading.Lock()

    def on(self, device: torch.device | str) -> Mapping[str, Tensor]:
        """The values on a device, by name; copied there once."""
        key = str(device)
        with self._lock:
            if key not in self._on:
                self._on[key] = {name: values.to(device) for name, values in self._on["cpu"].items()}
            return self._on[key]


class Backbone(FrozenValues):
    """One loaded backbone, on which any number of modules can be built.

    Args:
        config: As in the library's config.json, without keys that do not affect the computation.
        tensors: float32, by name. They may be read-only memory maps, which are never copied on the CPU. Tensors that
            are not needed (poolers, a tied table's second name) are ignored.

    Raises:
        BackboneInvalid: The config or the tensors do not fit.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self.config = check_backbone(config)
        self.kind: str = self.config["model_type"]
        named = {_plain_name(self.kind, name): values for name, values in tensors.items()}
        words = named.get(self.words_name)
        if words is None or words.ndim != 2:
            raise BackboneInvalid(
                f"the backbone has no word embedding, {self.words_name}; save it with its model again"
            )
        self.vocabulary_size = len(words)
        known = tensor_shapes(self.config, self.vocabulary_size)
        self.has_words_head = all(name in named for name in known.head)
        wanted = known.body | (known.head if self.has_words_head else {})
        wanted |= {name: shape for name, shape in known.optional.items() if name in named}
        super().__init__(checked_tensors(wanted, named), mapped=are_mapped(tensors))

    @property
    def words_name(self) -> str:
        """The name of the word embedding."""
        return _T5_WORDS if self.kind == "t5" else _WORDS

    @property
    def answers_name(self) -> str:
        """The name of the table whose rows score words: the word embedding itself if it is tied."""
        return _T5_ANSWERS if _T5_ANSWERS in self._on["cpu"] and self.kind == "t5" else self.words_name

    @property
    def width(self) -> int:
        """The width of a token's vector."""
        return width_of(self.config)

    @property
    def states_width(self) -> int:
        """The width of a token's state between layers."""
        return states_width_of(self.config)

    @property
    def head_names(self) -> tuple[str, str, str]:
        """Of an encoder's masked-language-model head: its dense layer, its normalisation, the words' bias."""
        return _HEADS[self.kind]


# ---- configs ---------------------------------------------------------------------------------------------------


def check_backbone(config: Mapping[str, Any], room: int = 0) -> dict[str, Any]:
    """Checks a config and fills in missing keys with transformers' defaults.

    Args:
        config: The config.
        room: Positions that prompt and text need together, if positions are learned vectors.

    Returns:
        The config with every key of its model type.

    Raises:
        BackboneInvalid: The model type is not supported, a key is unknown, or a value is out of bounds.
    """
    if config.get("model_type") == "t5":
        return _checked_t5(config)
    if config.get("model_type") not in FAMILIES:
        raise BackboneInvalid(
            f"model_type {config.get('model_type')!r} is not a supported backbone; choose one of "
            f"{', '.join(sorted([*FAMILIES, 't5']))} (MiniLM is bert)"
        )
    sizes = {key: value for key, value in config.items() if key != "vocab_size"}
    try:
        if config["model_type"] == "electra":
            return _checked_electra(sizes, max(room, _MIN_ROOM))
        return check_config(sizes, max(room, _MIN_ROOM), named="backbone")
    except EncoderInvalid as error:
        raise BackboneInvalid(str(error)) from None


def _checked_electra(sizes: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Checks an ELECTRA config. Raises BackboneInvalid or EncoderInvalid."""
    from transformers import AutoConfig

    known = FAMILIES["electra"].keys | {"embedding_size"}
    if surplus := sorted(sizes.keys() - known):
        raise BackboneInvalid(f"backbone: the config has keys that electra does not use here: {', '.join(surplus)}")
    defaults = AutoConfig.for_model("electra")
    whole = {key: sizes.get(key, getattr(defaults, key)) for key in sorted(known)}
    width = whole.pop("embedding_size")
    if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= _MAX["d_model"]:
        raise BackboneInvalid(
            f"backbone: embedding_size = {width!r} must be a whole number from 1 to {_MAX['d_model']}"
        )
    checked = check_config({**whole, "model_type": "bert"}, room, named="backbone")
    return {**checked, "model_type": "electra", "embedding_size": width}


def _checked_t5(config: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "model_type": "t5",
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "decoder_start_token_id": 0,
        # v1.0 divides states by sqrt(d_model) before scoring words; v1.1 does not. Checkpoints from before transformers
        # 5 express this by whether the tables are tied.
        "scale_decoder_outputs": config.get("tie_word_embeddings") is not False,
    }
    whole["num_decoder_layers"] = config.get("num_layers", whole["num_layers"])
    ignored = {"vocab_size", "tie_word_embeddings"}
    if surplus := sorted(config.keys() - whole.keys() - ignored):
        raise BackboneInvalid(f"backbone: the config has keys that t5 does not use here: {', '.join(surplus)}")
    whole |= {key: value for key, value in config.items() if key in whole and value is not None}
    for key, most in _MAX.items():
        value, least = whole[key], _MIN.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise BackboneInvalid(f"backbone: {key} = {value!r} must be a whole number from {least} to {most}")
    # Half of the decoder's buckets are for single steps, and the rest for larger distances up to the maximum.
    if whole["relative_attention_max_distance"] <= whole["relative_attention_num_buckets"] // 2:
        raise BackboneInvalid(
            "backbone: relative_attention_max_distance is too small for its number of buckets; use the model's own"
        )
    if whole["feed_forward_proj"] not in _FEED_FORWARD:
        raise BackboneInvalid(
            f"backbone: feed_forward_proj = {whole['feed_forward_proj']!r} is not supported; choose one of "
            f"{', '.join(_FEED_FORWARD)}"
        )
    epsilon = whole["layer_norm_epsilon"]
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon <= 1:
        raise BackboneInvalid(f"backbone: layer_norm_epsilon = {epsilon!r} must be a number above 0 and at most 1")
    if not isinstance(whole["scale_decoder_outputs"], bool):
        raise BackboneInvalid("backbone: scale_decoder_outputs must be true or false")
    inner = whole["num_heads"] * whole["d_kv"]
    layers = whole["num_layers"] + whole["num_decoder_layers"]
    if (values := layers * whole["d_model"] * (8 * inner + 3 * whole["d_ff"])) > 2 * _MAX_VALUES:
        raise BackboneInvalid(f"backbone: its layers have about {values:,} values, too many; choose a smaller one")
    return whole


# ---- tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a backbone's tensors by name.

    Attributes:
        body: Tensors that every backbone has.
        head: Tensors that a cloze needs in addition; empty for T5, whose body has them all.
        optional: A separate table for scoring words (T5 v1.1). Without it, the word embedding scores them.
    """

    body: dict[str, tuple[int, ...]]
    head: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]


def tensor_shapes(config: Mapping[str, Any], vocabulary_size: int) -> Shapes:
    """The tensors that `Backbone` needs, for a config from `check_backbone`. No tensor is allocated."""
    kind = config["model_type"]
    inside = {name: tuple(each.shape) for name, each in library_module(config).named_parameters()}
    if kind == "t5":
        table = (vocabulary_size, config["d_model"])
        return Shapes({_T5_WORDS: table} | inside, {}, {_T5_ANSWERS: table})
    width = width_of(config)
    dense, norm, bias = _HEADS[kind]
    head = {f"{dense}.weight": (width, states_width_of(config)), f"{dense}.bias": (width,)}
    head |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,), bias: (vocabulary_size,)}
    return Shapes({_WORDS: (vocabulary_size, width)} | inside, head, {})


def width_of(config: Mapping[str, Any]) -> int:
    """The width of a token's vector, for a config from `check_backbone`."""
    return int(config.get("embedding_size", states_width_of(config)))


def states_width_of(config: Mapping[str, Any]) -> int:
    """The width of a token's state, for a config from `check_backbone`. Only ELECTRA's differs from `width_of`."""
    kind = config["model_type"]
    return int(config["d_model" if kind == "t5" else FAMILIES[kind].hidden])


def library_module(config: Mapping[str, Any]) -> nn.Module:
    """The library's module for a config from `check_backbone`, on the meta device and with our attention.

    It has no word tables, no pooler and no buffers.
    """
    register()
    return bare_encoder(config, attention=ATTENTION) if config["model_type"] in ENCODERS else _bare_module(config)


@copied
def _bare_module(config: Mapping[str, Any]) -> nn.Module:
    kind = config["model_type"]
    from transformers import AutoConfig, AutoModel

    if kind == "electra":
        with torch.device("meta"):
            encoder: Any = AutoModel.from_config(
                AutoConfig.for_model(**{**config, "vocab_size": 1, "pad_token_id": 0}), attn_implementation=ATTENTION
            )
        encoder.embeddings.word_embeddings = None
        # Ready-made positions and types; each call passes its own.
        for name, _ in list(encoder.embeddings.named_buffers(recurse=False)):
            delattr(encoder.embeddings, name)
        hollowed: nn.Module = encoder
        return hollowed
    sizes = {key: value for key, value in config.items() if key not in ("model_type", "scale_decoder_outputs")}
    with torch.device("meta"):
        made: Any = AutoModel.from_config(
            AutoConfig.for_model("t5", vocab_size=8, **sizes), attn_implementation=ATTENTION
        )
    made.shared = made.encoder.embed_tokens = made.decoder.embed_tokens = None
    bare: nn.Module = made
    return bare


def _plain_name(kind: str, name: str) -> str:
    """The name without the model's prefix. Old checkpoints call a normalisation's weight and bias gamma and beta."""
    plain = name.removeprefix(f"{kind}.")
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if plain.endswith(old):
            plain = plain.removesuffix(old) + new
    return plain


def are_mapped(tensors: Mapping[str, NDArray[np.float32]]) -> bool:
    """Whether all values are memory maps of a file, which are read-only."""
    return not any(each.flags.writeable for each in tensors.values())


def checked_tensors(
    wanted: Mapping[str, tuple[int, ...]], named: Mapping[str, NDArray[np.float32]]
) -> dict[str, Tensor]:
    """The wanted tensors in the memory that they are in. Raises BackboneInvalid if one does not fit."""
    found = {}
    for name, shape in wanted.items():
        if name not in named:
            raise BackboneInvalid(f"the backbone lacks the tensor {name}; use a config and tensors of one model")
        values = named[name]
        if values.shape != shape or values.dtype != np.float32:
            raise BackboneInvalid(
                f"the backbone's {name} is {values.dtype} of shape {values.shape}, and its config needs float32 of "
                f"{shape}; use a config and tensors of one model"
            )
        if not np.isfinite(values).all():
            raise BackboneInvalid(f"the backbone's {name} has values that are not finite; fetch it again")
        with warnings.catch_warnings():
            # A memory map cannot be written to, and nothing here writes.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            found[name] = torch.from_numpy(values)
    return found


# ---- modules that refer to a backbone's values -----------------------------------------------------------------


class Frozen:
    """The attributes of one model's modules that refer to a backbone's values."""

    def __init__(self, backbone: FrozenValues) -> None:
        self._backbone = backbone
        self._places: list[tuple[nn.Module, str, Callable[[Mapping[str, Tensor]], Tensor]]] = []

    def put(self, owner: nn.Module, attribute: str, fetch: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
        """Makes `owner.attribute` what `fetch` returns from the backbone's values, at every later binding."""
        owner._parameters.pop(attribute, None)
        self._places.append((owner, attribute, fetch))

    def train(self, module: nn.Module, attribute: str) -> None:
        """Makes the attribute of every layer in the module a parameter of its own, zero, instead of the backbone's."""
        inside = set(module.modules())
        for owner, name, fetch in list(self._places):
            if owner in inside and name == attribute:
                self._places.remove((owner, name, fetch))
                shape = fetch(self._backbone.on("cpu")).shape
                owner.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def bind(self, device: torch.device, kind: torch.dtype = torch.float32, *, matrices: bool = False) -> None:
        """Binds all attributes to the values on this device.

        They use the backbone's own memory, or in another dtype copies, which the next binding drops.

        Args:
            device: Where.
            kind: Of the values.
            matrices: The matrices of `FrozenLinear` alone are of this kind, and everything else float32.
        """
        values, copied = self._backbone.on(device), {}
        for owner, attribute, fetch in self._places:
            found = fetch(values)
            here = kind if not matrices or is_matrix(owner, attribute) else found.dtype
            # A plain attribute, neither parameter nor buffer; a layer finds it just the same.
            setattr(owner, attribute, found.to(here))
            if here != found.dtype and self._backbone.mapped and found.device.type == "cpu":
                memory = found.untyped_storage()
                copied[memory.data_ptr()] = memory.nbytes()
                # At once, so that the file and its copy are never both in memory as a whole.
                page_out(memory.data_ptr(), memory.nbytes())
        # And at the end, since reading a page maps those around it too.
        for address, size in copied.items():
            page_out(address, size)


def hollow(frozen: Frozen, module: nn.Module, prefix: str = "") -> None:
    """Replaces every parameter of the module by the backbone's value of the same name, after `prefix`."""
    freeze_products(module)
    for name, layer in module.named_modules():
        for attribute in [each for each, _ in layer.named_parameters(recurse=False)]:
            full = ".".join(filter(None, (prefix, name, attribute)))
            # `full` is bound now, as the loop goes on.
            frozen.put(layer, attribute, lambda values, full=full: values[full])  # type: ignore[misc]
