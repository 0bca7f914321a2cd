"""The attention of frozen backbones: the library's, with optional keys and values before the text's own.

transformers calls the attention that is registered under the name in a config; ours is `ATTENTION`. What it needs
besides the call's tensors is stored on the calling module, as its `attending`. Two models share nothing, so two threads
may train at the same time.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.models.classifier import Dropout
from learning.models.widened import widens

__all__ = ["ATTENTION", "Attending", "register"]

ATTENTION = "tacit-prompted"


@dataclass(slots=True)
class Attending:
    """The state of one attention of one model.

    Attributes:
        dropout: Applied to the attention weights.
        keys, values: (B, heads, tokens, size) Placed before the text's own during a forward pass; None if there are
            none.
        bias: (1, heads, S, tokens) Added by relative positions to the scores of these keys.
    """

    dropout: Dropout
    keys: Tensor | None = None
    values: Tensor | None = None
    bias: Tensor | None = None


def register() -> None:
    """Registers `ATTENTION` with transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention (Vaswani et al. 2017).

    Args:
        module: The calling module, with its `attending`.
        query: (B, heads, S, size).
        key, value: (B, heads, T, size).
        attention_mask: (B or 1, 1, S or 1, T) Added to the scores. A prefix is never masked.
        scaling: Multiplies the query.
        position_bias: (1, heads, S, T) Added to the scores as well.
    """
    here = cast(Attending, module.attending)
    if here.keys is not None and here.values is not None:
        key, value = torch.cat([here.keys, key], dim=2), torch.cat([here.values, value], dim=2)
        attention_mask = functional.pad(attention_mask, (here.keys.shape[2], 0))
        if position_bias is not None and here.bias is not None:
            position_bias = torch.cat([here.bias, position_bias], dim=3)
    kind = query.dtype
    if widens(query):
        query, key, value = query.float(), key.float(), value.float()
    scores = (query * scaling) @ key.transpose(2, 3) + attention_mask
    if position_bias is not None:
        scores = scores + position_bias
    weights = here.dropout(scores.softmax(dim=-1))
    return (weights @ value).to(kind).transpose(1, 2).contiguous(), weights
