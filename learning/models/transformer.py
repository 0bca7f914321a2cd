"""Encoders of the transformers library under one linear layer. A pretrained one is read by `learning.models.base`.

The encoder is built from its config (BERT, with MiniLM, DistilBERT, RoBERTa) and fed with vectors: the word embedding
is this module's own, so that it can stay private, be narrowed and have another vocabulary than the base. Pooler and
heads of pretraining are left out; every parameter that is there has a gradient.

Guarantees: padding is never attended to and never pooled; every dropout draws from the one source that `seed` or
`draw_from` starts (transformers' own draw from the process's); no example sees another, also not by a broadcast row of
positions, so that gradients can be told apart by example.

The head sees the mean over a text's tokens: sentence-transformers' MiniLM was trained with it, DistilBERT and RoBERTa
have no trained use of the first token, and it trains faster where texts are few (Reimers and Gurevych 2019).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from learning.models.classifier import Dropout, TextClassifier
from tacit.method import ModelPart
from tacit.model import TransformerModel

__all__ = [
    "FAMILIES",
    "EncoderDropout",
    "EncoderInvalid",
    "TransformerClassifier",
    "bare_encoder",
    "check_config",
    "encoder_size",
    "encoder_width",
    "first_position",
]

# Whoever writes a job chooses these numbers: they bound what a member builds of it. Values: of the layers' matrices.
_MAX = {"layers": 48, "hidden": 4096, "heads": 128, "inner": 16384, "positions": 65536, "types": 64}
_MAX_VALUES = 1 << 30
# The texts that `check_examples_apart` makes up have seven tokens.
_MIN_POSITIONS = 16
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


class EncoderInvalid(ValueError):
    """A config, or a folder, that no encoder can be made of. The text begins with the job's key that is to be changed,
    and says what is wrong and what to do.
    """


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model type calls its sizes (config.json's keys), and what it starts counting positions from."""

    hidden: str
    layers: str
    heads: str
    inner: str
    activation: str
    types: str | None
    epsilon: str | None
    # RoBERTa's positions begin behind its padding's id; that position is the padding's and never used.
    padding: str | None

    @property
    def keys(self) -> frozenset[str]:
        optional = {key for key in (self.types, self.epsilon, self.padding) if key is not None}
        sizes = {self.hidden, self.layers, self.heads, self.inner, self.activation}
        return frozenset({"model_type", "max_position_embeddings", "initializer_range"} | sizes | optional)


_BERT = _Family(
    hidden="hidden_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    inner="intermediate_size",
    activation="hidden_act",
    types="type_vocab_size",
    epsilon="layer_norm_eps",
    padding=None,
)
FAMILIES: dict[str, _Family] = {
    "bert": _BERT,
    "distilbert": _Family(
        hidden="dim",
        layers="n_layers",
        heads="n_heads",
        inner="hidden_dim",
        activation="activation",
        types=None,
        epsilon=None,
        padding=None,
    ),
    "roberta": replace(_BERT, padding="pad_token_id"),
}


class TransformerClassifier(TextClassifier):
    """ids (B, S) to logits (B, labels), S at most the job's max_tokens.

    With a seed, as BERT begins: embeddings and matrices N(0, initializer_range), biases zero, normalisations the
    identity; without one everything is zero. A frozen embedding has no gradient, and so neither steps nor noise.
    The one dropout probability is that of embeddings, attention, layers and the head.

    Raises:
        EncoderInvalid: a config of another model type, or with sizes that are none.
    """

    parts: ClassVar[Mapping[str, ModelPart]] = {"embedding": "embedding", "encoder": "encoder", "output": "head"}

    def __init__(
        self, model: TransformerModel, vocabulary_size: int, labels: int, pad_id: int, seed: int | None
    ) -> None:
        super().__init__()
        if model.config is None:
            raise EncoderInvalid(
                "model.config: the model has a base and no config yet; make a job bundle of it (coordinator job "
                "bundle), which has"
            )
        config = check_config(model.config, model.max_tokens)
        family = FAMILIES[config["model_type"]]
        hidden: int = config[family.hidden]
        self.pad_id, self.min_tokens = pad_id, model.min_tokens
        self._first_position = first_position(config)
        self._has_types = family.types is not None
        self.dropout = EncoderDropout(model.dropout)
        self.embedding = nn.Embedding(
            vocabulary_size, hidden, padding_idx=pad_id, _weight=torch.zeros(vocabulary_size, hidden)
        )
        self.embedding.weight.requires_grad_(not model.freeze_embedding)
        self.encoder = bare_encoder(config).to_empty(device="cpu")
        for layer in list(self.encoder.modules()):
            for name, child in list(layer.named_children()):
                if isinstance(child, nn.Dropout):
                    setattr(layer, name, self.dropout)
        with torch.device("meta"):
            output = nn.Linear(hidden, labels)
        self.output = output.to_empty(device="cpu")
        random = None if seed is None else np.random.Generator(np.random.Philox(seed))
        for layer in self.modules():
            _start(layer, random, config["initializer_range"])
        with torch.no_grad():
            self.embedding.weight[pad_id] = 0

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """As `TextClassifier` has it."""
        batch, length = seen.shape
        # Repeated, not broadcast: a row for each example, whose gradient is its own.
        positions = torch.arange(length, device=seen.device).add(self._first_position).repeat(batch, 1)
        more = {"token_type_ids": torch.zeros_like(positions)} if self._has_types else {}
        # Added to attention's scores. Not -inf: of a text without any token there would be no number left.
        mask = torch.zeros_like(seen, dtype=vectors.dtype).masked_fill(~seen, torch.finfo(vectors.dtype).min)
        found = self.encoder(
            inputs_embeds=vectors, attention_mask=mask[:, None, None, :], position_ids=positions, **more
        )
        states = found.last_hidden_state.masked_fill(~seen[:, :, None], 0)
        mean = states.sum(dim=1) / seen.sum(dim=1, keepdim=True).clamp(min=1)
        logits: Tensor = self.output(self.dropout(mean))
        return logits


def check_config(config: Mapping[str, Any], max_tokens: int, *, named: str = "model.config") -> dict[str, Any]:
    """The config with every key that its model type has here; what is left out is as transformers has it.

    named: what the reader of an error would change, and each begins with.

    Raises:
        EncoderInvalid: another model type, a key that is unknown, or a value that is out of bounds.
    """
    try:
        return _checked(config, max_tokens)
    except _ConfigInvalid as error:
        raise EncoderInvalid(f"{named}: {error}") from None


class _ConfigInvalid(ValueError):
    """What is wrong with a config, wherever it was found."""


def _checked(config: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise _ConfigInvalid(
            f"model_type {kind!r} is no encoder that is known here; take one of {', '.join(sorted(FAMILIES))} "
            "(MiniLM is bert)"
        )
    family = FAMILIES[kind]
    if surplus := sorted(config.keys() - family.keys):
        raise _ConfigInvalid(f"the encoder's config has keys that {kind} does not use here: {', '.join(surplus)}")
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(kind)
    whole = {key: config.get(key, getattr(defaults, key)) for key in sorted(family.keys)}
    sizes = {"layers": family.layers, "hidden": family.hidden, "heads": family.heads, "inner": family.inner}
    sizes |= {"positions": "max_position_embeddings"} | ({"types": family.types} if family.types else {})
    for what, key in sizes.items():
        _whole_number(key, whole[key], 1, _MAX[what])
    if family.padding is not None:
        _whole_number(family.padding, whole[family.padding], 0, _MAX["positions"])
    if whole[family.hidden] % whole[family.heads]:
        raise _ConfigInvalid(
            f"{family.hidden} = {whole[family.hidden]} must be a multiple of {family.heads} = {whole[family.heads]}"
        )
    if whole[family.activation] not in _ACTIVATIONS:
        raise _ConfigInvalid(
            f"{family.activation} = {whole[family.activation]!r} is not known; take one of {', '.join(_ACTIVATIONS)}"
        )
    for key in filter(None, ("initializer_range", family.epsilon)):
        if isinstance(whole[key], bool) or not isinstance(whole[key], int | float) or not 0 < whole[key] <= 1:
            raise _ConfigInvalid(f"{key} = {whole[key]!r} must be a number above 0 and at most 1")
    hidden = whole[family.hidden]
    if (values := whole[family.layers] * hidden * (4 * hidden + 2 * whole[family.inner])) > _MAX_VALUES:
        raise _ConfigInvalid(f"the encoder's layers have {values:,} values, more than {_MAX_VALUES:,}; take a smaller")
    usable = whole["max_position_embeddings"] - first_position(whole)
    if usable < max(max_tokens, _MIN_POSITIONS):
        raise _ConfigInvalid(
            f"the encoder has {usable} positions, fewer than max_tokens = {max_tokens} (and at least "
            f"{_MIN_POSITIONS}); lower model.max_tokens or take another base"
        )
    return whole


def _whole_number(key: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _ConfigInvalid(f"{key} = {value!r} must be a whole number from {least} to {most}")


def first_position(config: Mapping[str, Any]) -> int:
    """What the encoder of a checked config starts counting positions from."""
    padding = FAMILIES[config["model_type"]].padding
    return 0 if padding is None else int(config[padding]) + 1


# ---- the library's encoder, and what is changed in it --------------------------------------------------------


class EncoderDropout(Dropout):
    """With the name that the library's attention asks a dropout for."""

    @property
    def p(self) -> float:
        return self.probability


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Scaled dot products (Vaswani et al. 2017) of query, key and value (B, heads, S, size); mask (B, 1, 1, S) is added
    to the scores. The library's own differ in whose randomness they drop with; this one exports, and has second
    derivatives.
    """
    scores = (query * scaling) @ key.transpose(2, 3) + attention_mask
    weights = module.get_submodule("dropout")(scores.softmax(dim=-1))
    return (weights @ value).transpose(1, 2).contiguous(), weights


def encoder_size(model: TransformerModel) -> tuple[int, int]:
    """How many values the encoder has without its word embedding, and how wide that is. Raises: EncoderInvalid."""
    config = _config_of(model)
    return sum(each.numel() for each in bare_encoder(config).parameters()), _width_of(config)


def encoder_width(model: TransformerModel) -> int:
    """How wide its word embedding is. Nothing is built. Raises: EncoderInvalid."""
    return _width_of(_config_of(model))


def _config_of(model: TransformerModel) -> dict[str, Any]:
    if model.config is None:
        raise EncoderInvalid("model.config: the model has a base and no config yet; make a job bundle of it")
    return check_config(model.config, model.max_tokens)


def _width_of(config: Mapping[str, Any]) -> int:
    width: int = config[FAMILIES[config["model_type"]].hidden]
    return width


def bare_encoder(config: Mapping[str, Any], attention: str = "tacit") -> nn.Module:
    """The library's encoder without word embedding, pooler and buffers, on the meta device: no number is drawn.

    attention: what the library knows the encoder's attention by; this module's own, if no other is registered.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModel

    AttentionInterface.register("tacit", _attention)
    # The table of words that is left out again must have a row for its padding.
    first = first_position(config)
    words = {"vocab_size": max(first, 1), "pad_token_id": max(first - 1, 0), "bos_token_id": None, "eos_token_id": None}
    made = AutoConfig.for_model(**{**config, **words})
    with torch.device("meta"):
        encoder: Any = AutoModel.from_config(made, attn_implementation=attention)
    encoder.embeddings.word_embeddings = None
    if hasattr(encoder, "pooler"):
        encoder.pooler = None
    # Ready-made positions and types, of which each call is given its own.
    for name, _ in list(encoder.embeddings.named_buffers(recurse=False)):
        delattr(encoder.embeddings, name)
    bare: nn.Module = encoder
    return bare


@torch.no_grad()
def _start(layer: nn.Module, random: np.random.Generator | None, std: float) -> None:
    """Starting weights of the layer's own parameters; zero without randomness."""
    for name, parameter in layer.named_parameters(recurse=False):
        if random is None or name == "bias":
            parameter.zero_()
        elif isinstance(layer, nn.LayerNorm):
            parameter.fill_(1)
        else:
            # Into the parameter's own memory: an embedding is large.
            values = parameter.detach().numpy()
            random.standard_normal(dtype=np.float32, out=values)
            values *= np.float32(std)
