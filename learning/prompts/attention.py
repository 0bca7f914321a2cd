"""The attention of frozen backbones: as the library's, with keys and values that may stand in front of the text's own.

transformers calls whatever is registered under a config's name for attention; `ATTENTION` is ours. What it needs beside
the call's own tensors lies with the module that calls, as its `attending`: nothing is shared between two models, so
that two threads may train beside each other.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from learning.models.classifier import Dropout

__all__ = ["ATTENTION", "Attending", "register"]

ATTENTION = "tacit-prompted"


@dataclass(slots=True)
class Attending:
    """What one attention of one model works with.

    keys, values: (B, heads, tokens, size), in front of the text's own during a forward pass; None: nothing stands
    there. bias: (1, heads, S, tokens), what relative positions add to the scores of these keys.
    """

    dropout: Dropout
    keys: Tensor | None = None
    values: Tensor | None = None
    bias: Tensor | None = None


def register() -> None:
    """Makes `ATTENTION` known to transformers. Doing it again changes nothing."""
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
    """Scaled dot products (Vaswani et al. 2017) of query (B, heads, S, size) and key, value (B, heads, T, size).

    attention_mask: added to the scores, (B or 1, 1, S or 1, T); what stands in front is never masked. position_bias:
    (1, heads, S, T), added as well.
    """
    here = cast(Attending, module.attending)
    if here.keys is not None and here.values is not None:
        key, value = torch.cat([here.keys, key], dim=2), torch.cat([here.values, value], dim=2)
        attention_mask = functional.pad(attention_mask, (here.keys.shape[2], 0))
        if position_bias is not None and here.bias is not None:
            position_bias = torch.cat([here.bias, position_bias], dim=3)
    scores = (query * scaling) @ key.transpose(2, 3) + attention_mask
    if position_bias is not None:
        scores = scores + position_bias
    weights = here.dropout(scores.softmax(dim=-1))
    return (weights @ value).transpose(1, 2).contiguous(), weights
