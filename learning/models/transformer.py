"""Encoders of the transformers library under one linear layer. `learning.models.base` reads pretrained ones.

The encoder is built from its config (BERT including MiniLM, DistilBERT, RoBERTa) and fed with vectors. The word
embedding is this module's own, so it can stay private, be narrowed, and have another vocabulary than the base. Pooler
and pretraining heads are left out. Without an injection, every parameter that remains has a gradient. With one, the
encoder is frozen, and at most low-rank changes of its matrices (`lora`) are trained.

Guarantees: padding is never attended to and never pooled. Every dropout draws from the single source that `seed` or
`draw_from` starts (transformers' own would draw from the process's). No example sees another, not even through a
broadcast row of positions, so gradients can be told apart by example.

The head sees the mean over a text's tokens. sentence-transformers' MiniLM was trained with it, DistilBERT and RoBERTa
have no trained use of the first token, and it trains faster if texts are few (Reimers and Gurevych 2019).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from learning.models.adapters import LowRank, Matrix, encoder_matrices
from learning.models.classifier import Dropout, TextClassifier
from learning.models.copied import copied
from tacit.method import ModelPart
from tacit.model import TransformerModel
from tacit.prompt import LoRA

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

# Limits on a job's numbers, which bound the model that a member builds; values are those of the layers' matrices.
_MAX = {"layers": 48, "hidden": 4096, "heads": 128, "inner": 16384, "positions": 65536, "types": 64}
_MAX_VALUES = 1 << 30
# The probe texts of `check_examples_apart` have seven tokens.
_MIN_POSITIONS = 16
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


class EncoderInvalid(ValueError):
    """The config or the folder cannot make an encoder.

    The text starts with the job's key to change, and says what is wrong and what to do.
    """


@dataclass(frozen=True, slots=True)
class _Family:
    """A model type's names of its sizes (the keys of config.json), and where its positions start."""

    hidden: str
    layers: str
    heads: str
    inner: str
    activation: str
    types: str | None
    epsilon: str | None
    # RoBERTa's positions start after its padding's id, whose position is the padding's and never used.
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
    """Maps ids (B, S) to logits (B, labels), with S at most the job's max_tokens.

    With a seed it starts like BERT: embeddings and matrices N(0, initializer_range), biases zero, normalisations the
    identity. Without one everything is zero. A frozen embedding has no gradient, and so gets neither steps nor noise.
    Embeddings, attention, layers and the head share one dropout probability.

    Raises:
        EncoderInvalid: The config is of another model type, or has invalid sizes.
    """

    parts: ClassVar[Mapping[str, ModelPart]] = {
        "embedding": "embedding",
        "encoder": "encoder",
        "lora": "encoder",
        "output": "head",
    }

    def __init__(
        self, model: TransformerModel, vocabulary_size: int, labels: int, pad_id: int, seed: int | None
    ) -> None:
        super().__init__()
        if model.config is None:
            raise EncoderInvalid(
                "model.config: the model has a base and no config yet; make a job bundle of it (`coordinator job "
                "bundle`)"
            )
        config = check_config(model.config, model.max_tokens)
        family = FAMILIES[config["model_type"]]
        hidden: int = config[family.hidden]
        self.pad_id, self.min_tokens, self.room = pad_id, model.min_tokens, model.max_tokens
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
        if model.injection is not None:
            self.encoder.requires_grad_(False)
        if isinstance(model.injection, LoRA):
            self.lora = nn.ModuleDict()
            for matrix in _changed(self.encoder, config["model_type"], model.injection):
                frozen = cast(nn.Linear, getattr(matrix.owner, matrix.attribute))
                layer = LowRank(frozen, model.injection.rank, model.injection.alpha)
                if random is not None:
                    layer.start(random)
                layer.change["down"].requires_grad_(model.injection.train != "up")
                setattr(matrix.owner, matrix.attribute, layer)
                self.lora[matrix.name] = layer.change

    def merge(self) -> None:
        """Adds low-rank changes to the encoder's matrices. The module computes the same, and has no `lora` any more."""
        for layer in self.encoder.modules():
            if isinstance(layer, LowRank):
                layer.merge()
        self._modules.pop("lora", None)

    def classify(self, vectors: Tensor, seen: Tensor) -> Tensor:
        """As in `TextClassifier`."""
        batch, length = seen.shape
        # Repeated, not broadcast, so each example has a row with its own gradient.
        positions = torch.arange(length, device=seen.device).add(self._first_position).repeat(batch, 1)
        more = {"token_type_ids": torch.zeros_like(positions)} if self._has_types else {}
        # Added to attention's scores. It is not -inf, which would give nan for a text without tokens.
        mask = torch.zeros_like(seen, dtype=vectors.dtype).masked_fill(~seen, torch.finfo(vectors.dtype).min)
        found = self.encoder(
            inputs_embeds=vectors, attention_mask=mask[:, None, None, :], position_ids=positions, **more
        )
        states = found.last_hidden_state.masked_fill(~seen[:, :, None], 0)
        mean = states.sum(dim=1) / seen.sum(dim=1, keepdim=True).clamp(min=1)
        logits: Tensor = self.output(self.dropout(mean))
        return logits


def check_config(config: Mapping[str, Any], max_tokens: int, *, named: str = "model.config") -> dict[str, Any]:
    """Checks a config and fills in missing keys with transformers' defaults.

    Args:
        config: The config.
        max_tokens: Tokens that the encoder must have positions for.
        named: The key that an error tells its reader to change, and with which it starts.

    Returns:
        The config with every key of its model type.

    Raises:
        EncoderInvalid: The model type is not supported, a key is unknown, or a value is out of bounds.
    """
    try:
        return _checked(config, max_tokens)
    except _ConfigInvalid as error:
        raise EncoderInvalid(f"{named}: {error}") from None


class _ConfigInvalid(ValueError):
    """What is wrong with a config, wherever it comes from."""


def _checked(config: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise _ConfigInvalid(
            f"model_type {kind!r} is not a supported encoder; choose one of {', '.join(sorted(FAMILIES))} "
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
            f"{family.activation} = {whole[family.activation]!r} is not supported; choose one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    for key in filter(None, ("initializer_range", family.epsilon)):
        if isinstance(whole[key], bool) or not isinstance(whole[key], int | float) or not 0 < whole[key] <= 1:
            raise _ConfigInvalid(f"{key} = {whole[key]!r} must be a number above 0 and at most 1")
    hidden = whole[family.hidden]
    if (values := whole[family.layers] * hidden * (4 * hidden + 2 * whole[family.inner])) > _MAX_VALUES:
        raise _ConfigInvalid(
            f"the encoder's layers have {values:,} values, more than {_MAX_VALUES:,}; choose a smaller one"
        )
    usable = whole["max_position_embeddings"] - first_position(whole)
    if usable < max(max_tokens, _MIN_POSITIONS):
        raise _ConfigInvalid(
            f"the encoder has {usable} positions, fewer than max_tokens = {max_tokens} (and at least "
            f"{_MIN_POSITIONS}); lower model.max_tokens or choose another base"
        )
    return whole


def _whole_number(key: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _ConfigInvalid(f"{key} = {value!r} must be a whole number from {least} to {most}")


def first_position(config: Mapping[str, Any]) -> int:
    """The first position of the encoder of a checked config."""
    padding = FAMILIES[config["model_type"]].padding
    return 0 if padding is None else int(config[padding]) + 1


# ---- the library's encoder, and what is changed in it --------------------------------------------------------


class EncoderDropout(Dropout):
    """A dropout with the attribute that the library's attention reads."""

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
    """Scaled dot-product attention (Vaswani et al. 2017) of query, key and value (B, heads, S, size).

    The mask (B, 1, 1, S) is added to the scores. Unlike the library's own attentions, it drops with the module's
    randomness, can be exported, and has second derivatives.
    """
    scores = (query * scaling) @ key.transpose(2, 3) + attention_mask
    weights = module.get_submodule("dropout")(scores.softmax(dim=-1))
    return (weights @ value).transpose(1, 2).contiguous(), weights


def encoder_size(model: TransformerModel) -> tuple[int, int]:
    """The number of the encoder's values without its word embedding, and that one's width. Raises EncoderInvalid.

    Low-rank changes count too.
    """
    config = _config_of(model)
    encoder = bare_encoder(config)
    values = sum(each.numel() for each in encoder.parameters())
    if isinstance(model.injection, LoRA):
        for matrix in _changed(encoder, config["model_type"], model.injection):
            layer = cast(nn.Linear, getattr(matrix.owner, matrix.attribute))
            values += model.injection.rank * (layer.in_features + layer.out_features)
    return values, _width_of(config)


def _changed(encoder: nn.Module, kind: str, injection: LoRA) -> list[Matrix]:
    """The matrices that an injection changes. Raises EncoderInvalid if the encoder lacks one."""
    matrices = encoder_matrices(encoder, kind)
    if missing := sorted(set(injection.matrices) - {each.kind for each in matrices}):
        raise EncoderInvalid(f"model.injection.matrices: a {kind} has no {missing[0]}; leave it out")
    layers = max(each.layer for each in matrices)
    first = 1 if injection.last_layers is None else layers - injection.last_layers + 1
    return [each for each in matrices if each.kind in injection.matrices and each.layer >= first]


def encoder_width(model: TransformerModel) -> int:
    """The width of the word embedding. Nothing is built. Raises EncoderInvalid."""
    return _width_of(_config_of(model))


def _config_of(model: TransformerModel) -> dict[str, Any]:
    if model.config is None:
        raise EncoderInvalid("model.config: the model has a base and no config yet; make a job bundle of it")
    return check_config(model.config, model.max_tokens)


def _width_of(config: Mapping[str, Any]) -> int:
    width: int = config[FAMILIES[config["model_type"]].hidden]
    return width


@copied
def bare_encoder(config: Mapping[str, Any], attention: str = "tacit") -> nn.Module:
    """The library's encoder without word embedding, pooler and buffers, on the meta device, so nothing is drawn.

    `attention` is the name of a registered attention; the default is this module's own.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModel

    AttentionInterface.register("tacit", _attention)
    # The word embedding, which is removed below, must have a row for its padding.
    first = first_position(config)
    words = {"vocab_size": max(first, 1), "pad_token_id": max(first - 1, 0), "bos_token_id": None, "eos_token_id": None}
    made = AutoConfig.for_model(**{**config, **words})
    with torch.device("meta"):
        encoder: Any = AutoModel.from_config(made, attn_implementation=attention)
    encoder.embeddings.word_embeddings = None
    if hasattr(encoder, "pooler"):
        encoder.pooler = None
    # Ready-made positions and types; each call passes its own.
    for name, _ in list(encoder.embeddings.named_buffers(recurse=False)):
        delattr(encoder.embeddings, name)
    bare: nn.Module = encoder
    return bare


@torch.no_grad()
def _start(layer: nn.Module, random: np.random.Generator | None, std: float) -> None:
    """Sets the starting weights of the layer's own parameters; zero without randomness."""
    for name, parameter in layer.named_parameters(recurse=False):
        if random is None or name == "bias":
            parameter.zero_()
        elif isinstance(layer, nn.LayerNorm):
            parameter.fill_(1)
        else:
            # Drawn into the parameter's own memory, since an embedding is large.
            values = parameter.detach().numpy()
            random.standard_normal(dtype=np.float32, out=values)
            values *= np.float32(std)
