"""Says where in a causal model the values that a job trained belong.

A job names LoRA's matrices by layer and kind (`lora.layer0_query.down.weight`). transformers names the layers; GPT-2
has queries, keys and values in one matrix, so a change there belongs to a third of its outputs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learning.causal.config import sizes_of

__all__ = ["Change", "Matrix", "lora_changes", "matrix_of", "stores_inwards"]

_TRAINED = re.compile(r"lora\.layer(\d+)_([a-z]+)\.(down|up)\.weight")
_GPT2 = {"output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
_LLAMA = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "gate": "mlp.gate_proj",
}
# The parts of GPT-2's matrix of attention, in their order.
_PARTS = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer, or a part of its outputs.

    Args:
        module: transformers' name of the module that owns it, without `.weight`.
        first: the part's first output.
        outputs: the number of outputs of the whole matrix.
    """

    module: str
    first: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Change:
    """What LoRA adds to a matrix: scale * (up @ down), from the output `first` on.

    Args:
        down: (rank, in).
        up: (out, rank).
        scale: alpha / rank.
        first: the first output that it changes.
    """

    down: NDArray[np.float32]
    up: NDArray[np.float32]
    scale: float
    first: int = 0


def stores_inwards(config: Mapping[str, Any]) -> bool:
    """Whether the layers' matrices are stored as (in, out)."""
    return bool(config["model_type"] == "gpt2")


def matrix_of(config: Mapping[str, Any], layer: int, kind: str) -> Matrix:
    """The matrix of that kind in a layer.

    Args:
        config: the backbone's config.
        layer: its number, from 0.
        kind: query, key, value, output, up, down or gate.

    Raises:
        KeyError: the family has no such matrix.
    """
    outputs = sizes_of(config).matrix(kind)[1]
    if not stores_inwards(config):
        return Matrix(f"model.layers.{layer}.{_LLAMA[kind]}", 0, outputs)
    if kind in _PARTS:
        return Matrix(f"transformer.h.{layer}.attn.c_attn", _PARTS.index(kind) * outputs, 3 * outputs)
    return Matrix(f"transformer.h.{layer}.{_GPT2[kind]}", 0, outputs)


def lora_changes(
    config: Mapping[str, Any], values: Mapping[str, NDArray[np.float32]], alpha: float
) -> dict[str, list[Change]]:
    """The changes of each matrix, by the name of its module, in the order of layers and outputs.

    Args:
        config: the backbone's config.
        values: the trained and frozen values by name. Others than LoRA's are left out.
        alpha: of the injection.

    Raises:
        KeyError: a matrix is of no layer, or lacks its other half.
    """
    found: dict[tuple[str, int], Change] = {}
    for name in values:
        parts = _TRAINED.fullmatch(name)
        if parts is None or parts[3] == "up":
            continue
        down, up = values[name], values[f"lora.layer{parts[1]}_{parts[2]}.up.weight"]
        matrix = matrix_of(config, int(parts[1]), parts[2])
        found[matrix.module, matrix.first] = Change(down, up, alpha / len(down), matrix.first)
    changes: dict[str, list[Change]] = {}
    for module, first in sorted(found):
        changes.setdefault(module, []).append(found[module, first])
    return changes
