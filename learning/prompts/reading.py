"""Reads vectors with each family's layers, which are the library's over a backbone's frozen values.

    EncoderReader    BERT, RoBERTa, DistilBERT, ELECTRA: vectors to states
    T5Reader         vectors through the encoder; the decoder answers in one pass, from [start, sentinel]
    WordScores       the head that turns a state into words' scores

Guarantees: padding is never attended to, and what comes before the text always is. Every dropout is the one that the
caller passes in. Positions have a row for each example.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.models.adapters import Matrix, encoder_matrices, encoder_stack
from learning.models.classifier import Dropout
from learning.prompts.attention import Attending
from learning.prompts.backbone import FAMILIES, Backbone, Frozen, hollow, library_module

__all__ = ["EncoderReader", "Matrix", "Reader", "T5Reader", "WordScores", "clear_prefix", "prefix_shape", "reader_for"]


class Reader(Protocol):
    """What `learning.prompts.model` knows of a family."""

    # The library's layers, without their own values.
    layers: nn.Module
    # The attentions that take a prefix, one a layer; the matrices that LoRA can change; the layers that read a text.
    attentions: Sequence[nn.Module]
    matrices: Sequence[Matrix]
    stack: Sequence[nn.Module]

    def states(self, vectors: Tensor, visible: Tensor, types: Tensor | None = None) -> Tensor:
        """Turns vectors (B, T, width) into states (B, T, width of states).

        Args:
            vectors: (B, T, width).
            visible: (B, T) False at padding.
            types: (B, T) The number of a token's text in a pair; None if there is one text. Families without types
                ignore it.
        """

    def place_prefix(self, prefix: Tensor, length: int) -> None:
        """Puts keys and values (B, tokens, layers, 2, heads, size) before every layer's own, for texts of `length`
        positions.
        """


def prefix_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers, heads, size of a head) of the layers that read the text, for a checked config."""
    if config["model_type"] == "t5":
        return config["num_layers"], config["num_heads"], config["d_kv"]
    family = FAMILIES[config["model_type"]]
    return config[family.layers], config[family.heads], config[family.hidden] // config[family.heads]


def reader_for(backbone: Backbone, frozen: Frozen, dropout: Dropout) -> "EncoderReader | T5Reader":
    """The family's reader, whose layers refer to the values in `frozen`."""
    layers = library_module(backbone.config)
    hollow(frozen, layers)
    _replace_dropouts(layers, dropout)
    return (T5Reader if backbone.kind == "t5" else EncoderReader)(layers, backbone.config, dropout)


class EncoderReader:
    """BERT, RoBERTa, DistilBERT and ELECTRA."""

    def __init__(self, layers: nn.Module, config: Mapping[str, Any], dropout: Dropout) -> None:
        family = FAMILIES[config["model_type"]]
        self.layers = layers
        self._has_types = family.types is not None
        # RoBERTa was trained with the first type alone, however many rows its table has.
        self._tells_apart = config["model_type"] != "roberta" and config.get("type_vocab_size", 1) > 1
        self._first_position = 0 if family.padding is None else int(config[family.padding]) + 1
        self.room: int = config["max_position_embeddings"] - self._first_position
        kind = config["model_type"]
        self.stack: Sequence[nn.Module] = encoder_stack(layers, kind)
        inside = "attention" if kind == "distilbert" else "attention.self"
        self.attentions: Sequence[nn.Module] = [layer.get_submodule(inside) for layer in self.stack]
        self.matrices: Sequence[Matrix] = encoder_matrices(layers, kind)
        for attention in self.attentions:
            cast(Any, attention).attending = Attending(dropout)

    def states(self, vectors: Tensor, visible: Tensor, types: Tensor | None = None) -> Tensor:
        """As in `Reader`."""
        batch, length = visible.shape
        # Repeated, not broadcast, for a row for each example.
        positions = torch.arange(length, device=visible.device).add(self._first_position).repeat(batch, 1)
        if types is None or not self._tells_apart:
            types = torch.zeros_like(positions)
        more = {"token_type_ids": types} if self._has_types else {}
        mask = _additive(visible, vectors.dtype)
        found = self.layers(inputs_embeds=vectors, attention_mask=mask, position_ids=positions, **more)
        return cast(Tensor, found.last_hidden_state)

    def layer_states(
        self, vectors: Tensor, visible: Tensor, types: Tensor | None, layers: Sequence[int]
    ) -> list[Tensor]:
        """The states (B, T, width of states) after each of these layers, in ascending order; layer 0 is what the first
        layer reads. Layers above the last of them are not computed. Arguments as for `states`.
        """
        batch, length = visible.shape
        # Repeated, not broadcast, for a row for each example.
        positions = torch.arange(length, device=visible.device).add(self._first_position).repeat(batch, 1)
        if types is None or not self._tells_apart:
            types = torch.zeros_like(positions)
        more = {"token_type_ids": types} if self._has_types else {}
        mask = _additive(visible, vectors.dtype)
        tree: Any = self.layers
        states: Any = tree.embeddings(input_ids=None, inputs_embeds=vectors, position_ids=positions, **more)
        if hasattr(tree, "embeddings_project"):
            states = tree.embeddings_project(states)
        found: list[Tensor] = [states] if layers[0] == 0 else []
        for number, layer in enumerate(self.stack[: layers[-1]], start=1):
            states = layer(states, mask)
            # Older layers of the library return a tuple.
            states = states[0] if isinstance(states, tuple) else states
            if number in layers:
                found.append(states)
        return found

    def place_prefix(self, prefix: Tensor, length: int) -> None:
        """As in `Reader`. A prefix has no positions of its own."""
        _place(self.attentions, prefix)


class T5Reader:
    """T5's encoder, and its decoder for one answer.

    A prefix goes into the encoder only, where the text is: the decoder has just two positions here. In relative
    positions, its keys come before the text's first.
    """

    def __init__(self, layers: nn.Module, config: Mapping[str, Any], dropout: Dropout) -> None:
        self.layers = layers
        tree: Any = layers
        self._tree = tree
        self.attentions: Sequence[nn.Module] = [block.layer[0].SelfAttention for block in tree.encoder.block]
        self.stack: Sequence[nn.Module] = list(tree.encoder.block)
        places: list[Matrix] = []
        stacks: list[tuple[Any, str]] = [(tree.encoder, "encoder"), (tree.decoder, "decoder")]
        for stack, short in stacks:
            for number, block in enumerate(stack.block):
                own = [("", block.layer[0].SelfAttention)]
                if short == "decoder":
                    own.append(("cross_", block.layer[1].EncDecAttention))
                for kind, attention in own:
                    attention.attending = Attending(dropout)
                    places += [
                        Matrix(
                            f"{short}{number}_{kind}{what}", what, number + 1, short == "decoder", attention, what[0]
                        )
                        for what in ("query", "key", "value", "output")
                    ]
        self.matrices: Sequence[Matrix] = places

    def states(self, vectors: Tensor, visible: Tensor, types: Tensor | None = None) -> Tensor:
        """As in `Reader`."""
        found = self._tree.encoder(
            inputs_embeds=vectors, attention_mask=_additive(visible, vectors.dtype), use_cache=False
        )
        return cast(Tensor, found.last_hidden_state)

    def answer(self, states: Tensor, visible: Tensor, begun: Tensor) -> Tensor:
        """The decoder's last state (B, width).

        Args:
            states: (B, S, width) The encoder's states.
            visible: (B, S) The states that are attended to.
            begun: (B, T, width) The decoder's input vectors.
        """
        size = begun.shape[1]
        onward = torch.ones(size, size, dtype=torch.bool, device=begun.device).tril()[None]
        found = self._tree.decoder(
            inputs_embeds=begun,
            attention_mask=torch.zeros_like(onward, dtype=begun.dtype).masked_fill(
                ~onward, torch.finfo(begun.dtype).min
            )[:, None],
            encoder_hidden_states=states,
            encoder_attention_mask=_additive(visible, begun.dtype),
            use_cache=False,
        )
        return cast(Tensor, found.last_hidden_state[:, -1])

    def place_prefix(self, prefix: Tensor, length: int) -> None:
        """As in `Reader`."""
        tokens = prefix.shape[1]
        first: Any = self.attentions[0]
        # Only the first layer has a table of positions; all use it.
        bias = first.compute_bias(length, tokens, device=prefix.device, past_seen_tokens=tokens)
        _place(self.attentions, prefix, bias)


class WordScores(nn.Module):
    """Turns states at the mask (B, width of states) into scores of chosen words (B, words).

    It is the library's head for masked words, with only the words' rows of its last matrix; for T5, the rows alone.
    """

    def __init__(self, backbone: Backbone, frozen: Frozen, words: Sequence[int]) -> None:
        super().__init__()
        rows = torch.tensor(list(words), dtype=torch.int64)
        table = backbone.answers_name
        self.rows: Tensor
        self.bias: Tensor | None = None
        frozen.put(self, "rows", lambda values: values[table][rows.to(values[table].device)])
        self._divide = 1.0
        self._transformed = backbone.kind != "t5"
        if not self._transformed:
            if backbone.config["scale_decoder_outputs"]:
                self._divide = backbone.width**0.5
            return
        from transformers.activations import ACT2FN

        config, width = backbone.config, backbone.width
        dense, norm, bias = backbone.head_names
        family = FAMILIES[backbone.kind]
        with torch.device("meta"):
            self.dense = nn.Linear(backbone.states_width, width)
            # A constant in the library's DistilBERT, and a config key in the others.
            self.norm = nn.LayerNorm(width, eps=config[family.epsilon] if family.epsilon else 1e-12)
        hollow(frozen, self.dense, dense)
        hollow(frozen, self.norm, norm)
        frozen.put(self, "bias", lambda values: values[bias][rows.to(values[bias].device)])
        # RoBERTa's and ELECTRA's heads always have a GELU, whatever their layers have.
        always = backbone.kind in ("roberta", "electra")
        self.activation: nn.Module = ACT2FN["gelu" if always else config[family.activation]]

    def transformed(self, states: Tensor) -> Tensor:
        """(B, width) The vectors by which the words' rows are multiplied."""
        if self._transformed:
            return cast(Tensor, self.norm(self.activation(self.dense(states))))
        return states / self._divide

    def scored(self, transformed: Tensor) -> Tensor:
        """Scores (B, words) from the result of `transformed`, in the order of the words."""
        return functional.linear(transformed, self.rows, self.bias)


def _place(attentions: Sequence[nn.Module], prefix: Tensor, bias: Tensor | None = None) -> None:
    for number, attention in enumerate(attentions):
        keys, values = prefix[:, :, number].transpose(1, 3).unbind(dim=2)
        here = cast(Attending, attention.attending)
        here.keys, here.values, here.bias = keys, values, bias


def clear_prefix(attentions: Sequence[nn.Module]) -> None:
    """Removes the prefix from all attentions, and with it their hold on a graph."""
    for attention in attentions:
        here = cast(Attending, attention.attending)
        here.keys = here.values = here.bias = None


def _additive(visible: Tensor, kind: torch.dtype) -> Tensor:
    """(B, 1, 1, T) A mask to add to scores. It is not -inf, which would give nan for a text without tokens."""
    return torch.zeros_like(visible, dtype=kind).masked_fill(~visible, torch.finfo(kind).min)[:, None, None, :]


def _replace_dropouts(layers: nn.Module, dropout: Dropout) -> None:
    for layer in list(layers.modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(layer, name, dropout)
