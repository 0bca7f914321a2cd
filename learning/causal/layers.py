"""Runs the layers of a causal language model, which are the library's over a backbone's frozen values.

Guarantees: a position sees itself, the positions before it, and a prefix, and nothing after it. So padding, which comes
after a text, is never attended to, whatever its id is. No example sees another. The frozen layers draw nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from learning.models.widened import FrozenLinear, widens
from learning.prompts.reading import Matrix

__all__ = ["ATTENTION", "CausalLayers", "again", "name_matrices", "register"]

ATTENTION = "tacit-causal"

# Where a layer has its matrices: (the module that calls one, its name there).
_OF_LLAMA = {
    "query": ("self_attn", "q_proj"),
    "key": ("self_attn", "k_proj"),
    "value": ("self_attn", "v_proj"),
    "output": ("self_attn", "o_proj"),
    "up": ("mlp", "up_proj"),
    "down": ("mlp", "down_proj"),
    "gate": ("mlp", "gate_proj"),
}
_OF_GPT2 = {
    "query": ("attn.c_attn", "query"),
    "key": ("attn.c_attn", "key"),
    "value": ("attn.c_attn", "value"),
    "output": ("attn", "c_proj"),
    "up": ("mlp", "c_fc"),
    "down": ("mlp", "c_proj"),
}


@dataclass(slots=True)
class _Before:
    """What one attention of one model sees before a text, and what it is asked to remember.

    Attributes:
        keys, values: (B, key heads, P, size) Before the text's own; None if there are none.
        seen: The keys and values of the latest call, if `remembers`.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    remembers: bool = False
    seen: tuple[Tensor, Tensor] | None = None


def register() -> None:
    """Registers `ATTENTION` with transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal scaled dot-product attention (Vaswani et al. 2017), with shared keys (Ainslie et al. 2023).

    Args:
        module: The calling module, with what is `before` a text.
        query: (B, heads, S, size).
        key, value: (B, key heads, S, size).
        attention_mask: None.
        scaling: Multiplies the query.
    """
    here = cast(_Before | None, module.before)
    mask = None
    if here is not None and here.remembers:
        here.seen = key, value
    if here is not None and here.keys is not None and here.values is not None:
        key, value = torch.cat([here.keys, key], dim=2), torch.cat([here.values, value], dim=2)
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(here.keys.shape[2])
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    kind = query.dtype
    if widens(query):
        query, key, value = query.float(), key.float(), value.float()
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return found.to(kind).transpose(1, 2).contiguous(), None


class _Fused(nn.Module):
    """GPT-2's three matrices side by side, each with a name of its own."""

    def __init__(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) to (B, S, 3 width)."""
        return torch.cat([self.query(x), self.key(x), self.value(x)], dim=2)


Put = Callable[[nn.Module, str, Callable[[Mapping[str, Tensor]], Tensor]], None]


def name_matrices(layers: nn.Module, width: int, put: Put) -> None:
    """Replaces GPT-2's transposed and fused matrices by linear layers on views of the same values.

    Args:
        layers: GPT-2's model on the meta device.
        width: Of a state.
        put: Binds an attribute to a function of the backbone's values, as `learning.prompts.backbone.Frozen.put`.
    """
    for name, layer in list(layers.named_modules()):
        if type(layer).__name__ != "Conv1D":
            continue
        owner, _, attribute = name.rpartition(".")
        full = f"transformer.{name}"
        if attribute == "c_attn":
            parts = [_view(put, full, width, slice(place * width, (place + 1) * width)) for place in range(3)]
            made: nn.Module = _Fused(*parts)
        else:
            made = _view(put, full, int(cast(Any, layer).weight.shape[0]), slice(0, int(cast(Any, layer).nf)))
        setattr(layers.get_submodule(owner), attribute, made)


def _view(put: Put, full: str, inputs: int, columns: slice) -> nn.Linear:
    with torch.device("meta"):
        layer = FrozenLinear(inputs, columns.stop - columns.start)
    put(layer, "weight", lambda values: values[f"{full}.weight"][:, columns].T)
    put(layer, "bias", lambda values: values[f"{full}.bias"][columns])
    return layer


class CausalLayers:
    """The layers of one model.

    Args:
        tree: The library's model, whose values are bound (`learning.causal.backbone.library_layers`).
        frequencies: (head / 2,) of rotary positions; None for GPT-2, which has learned vectors.
    """

    def __init__(self, tree: nn.Module, frequencies: Tensor | None) -> None:
        self.tree, self._frequencies = tree, frequencies
        found: Any = tree
        gpt2 = frequencies is None
        self.stack: Sequence[nn.Module] = list(found.h if gpt2 else found.layers)
        self._last: nn.Module = found.ln_f if gpt2 else found.norm
        self.attentions: Sequence[Any] = [layer.get_submodule("attn" if gpt2 else "self_attn") for layer in self.stack]
        self.matrices: Sequence[Matrix] = [
            Matrix(f"layer{number - 1}_{kind}", kind, number, False, layer.get_submodule(owner), name)
            for number, layer in enumerate(self.stack, start=1)
            for kind, (owner, name) in (_OF_GPT2 if gpt2 else _OF_LLAMA).items()
        ]
        for attention in self.attentions:
            attention.before = None

    def states(
        self,
        vectors: Tensor,
        first: int,
        prefix: Tensor | None = None,
        run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Turns vectors (B, S, width) into normalised states (B, S, width).

        Args:
            vectors: (B, S, width).
            first: The position of the first vector.
            prefix: (B, P, layers, 2, key heads, size) Keys and values before every layer's own; None if there are none.
            run: Runs a layer on states; None: directly.
        """
        before: list[_Before | None] = [None] * len(self.stack)
        if prefix is not None:
            each = (prefix[:, :, number].transpose(1, 3).unbind(dim=2) for number in range(len(self.stack)))
            before = [_Before(keys, values) for keys, values in each]
        return self._states(vectors, first, before, run)

    @torch.no_grad()
    def keys_and_values(self, vectors: Tensor) -> Tensor:
        """(B, S, layers, 2, key heads, size) The keys and values of vectors at the first positions."""
        before = [_Before(remembers=True) for _ in self.stack]
        self._states(vectors, 0, before, None)
        # (layers, 2, B, key heads, S, size)
        return torch.stack([torch.stack(each.seen or ()) for each in before]).permute(2, 4, 0, 1, 3, 5)

    def _states(
        self,
        vectors: Tensor,
        first: int,
        before: Sequence[_Before | None],
        run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] | None,
    ) -> Tensor:
        positions = torch.arange(first, first + vectors.shape[1], device=vectors.device)[None]
        more: dict[str, Any] = {}
        if self._frequencies is None:
            vectors = vectors + cast(Any, self.tree).wpe(positions)
        else:
            angles = positions[..., None].float() * self._frequencies.to(vectors.device)
            both = torch.cat([angles, angles], dim=-1)
            more["position_embeddings"] = both.cos().to(vectors.dtype), both.sin().to(vectors.dtype)
        for layer, attention, here in zip(self.stack, self.attentions, before, strict=True):
            call = _Call(layer, attention, here, more)
            vectors = call(vectors) if run is None else run(call, vectors)
        return cast(Tensor, self._last(vectors))


class _Call:
    """A layer with all that it reads besides states, so that a second call does the same as the first."""

    def __init__(self, layer: nn.Module, attention: Any, before: _Before | None, more: Mapping[str, Any]) -> None:
        self._layer, self._attention, self._before, self._more = layer, attention, before, more

    def __call__(self, states: Tensor) -> Tensor:
        self._attention.before = self._before
        try:
            found = self._layer(states, attention_mask=None, **self._more)
        finally:
            # It would hold on to a graph.
            self._attention.before = None
        return cast(Tensor, found[0] if isinstance(found, tuple) else found)


def again(call: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Runs a layer without keeping what its gradient needs; the backward pass runs it again (Chen et al. 2016)."""
    return cast(Tensor, checkpoint(call, states, use_reentrant=False, preserve_rng_state=False))
