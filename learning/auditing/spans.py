"""What the gradient of a first layer says of the texts: the span of its inputs, and which rows of a table are in it.

A layer's weight gradient is the sum over positions of outer(g_t, x_t), so its rows span the inputs x_t. Under attention
an input depends only on a token and its position, so an attacker with a table of vectors can ask of each token, at each
position, whether its input is in the span (DAGER: Petrov et al. 2024, section 4). Neither labels nor an optimisation is
needed. `benchmarks.reconstruction` has further attacks and defences.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from learning.models import TextClassifier

__all__ = ["Distance", "NoSpan", "attention_inputs", "projections", "rows_at_positions", "span_of"]

# A float32 gradient has rounding noise of about 1e-7 of its largest part. Weaker directions cannot be told from noise.
RANK_TOLERANCE = 1e-6
# Rows of a table that pass through a model at a time.
CHUNK = 512


class NoSpan(ValueError):
    """The model has no layer whose gradient this attack can read."""


def span_of(gradients: Sequence[Tensor], most: int) -> tuple[Tensor, int]:
    """Return an orthonormal basis (D, r) of the span of the gradients' rows (R, D), and r, at most `most`.

    Directions below RANK_TOLERANCE of the strongest are rounding noise. A span of the whole space would reveal nothing,
    so it loses its weakest direction, which one or two tokens too many do not fill.
    """
    stacked = torch.cat(list(gradients)).to(torch.float64)
    _, strengths, directions = torch.linalg.svd(stacked, full_matrices=False)
    rank: int = int((strengths > strengths[0] * RANK_TOLERANCE).sum())
    rank = max(1, min(rank, most, stacked.shape[1] - 1))
    basis: Tensor = directions[:rank].T.to(torch.float32)
    return basis, rank


def _complement(basis: Tensor) -> Tensor:
    """Return an orthonormal basis, (D, D - r), of the orthogonal complement of `basis`, (D, r)."""
    whole, _ = torch.linalg.qr(basis.to(torch.float64), mode="complete")
    rest: Tensor = whole[:, basis.shape[1] :].to(torch.float32)
    return rest


class Distance:
    """The share of a vector outside a span: 0 if it is inside, near sqrt(1 - r / D) if it is unrelated.

    It projects onto the smaller of the span and its complement.
    """

    def __init__(self, basis: Tensor) -> None:
        width, rank = basis.shape
        self._inside = rank <= width - rank
        self._basis = basis if self._inside else _complement(basis)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return distances of shape (...) for vectors of shape (..., D)."""
        lengths = vectors.square().sum(dim=-1).clamp(min=1e-30)
        share = (vectors @ self._basis).square().sum(dim=-1) / lengths
        return (1 - share if self._inside else share).clamp(min=0).sqrt()


class _Reached(Exception):
    """The first attention's input is known, so the rest of the model need not run."""


def projections(module: TextClassifier) -> list[tuple[str, nn.Linear]]:
    """Return the first attention's query, key and value layers, with their names.

    Raises:
        NoSpan: the model has no attention.
    """
    found: dict[str, tuple[str, nn.Linear]] = {}
    for name, layer in module.named_modules():
        match = re.search(r"(?:^|\.)(query|key|value|[qkv]_lin|[qkv]_proj)$", name)
        if match and isinstance(layer, nn.Linear):
            found.setdefault(match.group(1)[0], (name, layer))
    if found.keys() != {"q", "k", "v"}:
        raise NoSpan("the model has no attention over its words; use the attack for the model's architecture")
    return list(found.values())


@torch.no_grad()
def attention_inputs(module: TextClassifier, rows: Tensor, positions: int) -> Iterator[Tensor]:
    """Yield the first attention's input for each row at each position, in chunks of (rows, positions, D)."""
    _, layer = projections(module)[0]
    caught: list[Tensor] = []

    def catch(_: nn.Module, given: tuple[Any, ...]) -> None:
        caught.append(given[0])
        raise _Reached

    handle = layer.register_forward_pre_hook(catch)
    try:
        for chunk in rows.split(CHUNK):
            vectors = chunk[:, None, :].expand(-1, positions, -1).contiguous()
            try:
                module.classify(vectors, torch.ones(vectors.shape[:2], dtype=torch.bool))
            except _Reached:
                yield caught.pop()
    finally:
        handle.remove()


def rows_at_positions(
    module: TextClassifier, weights: Sequence[Tensor], rows: Tensor, lengths: Sequence[int]
) -> list[int]:
    """Recover a transformer's tokens by the span of the first attention's inputs, position by position.

    At each position it finds at most as many tokens as there are texts of that length.

    Args:
        module: used only for its shared parameters and layers, not for its embedding.
        weights: (R, D) each, gradients whose rows are in the span of the first attention's inputs.
        rows: (V, D), the attacker's table.
        lengths: of the texts; they include [CLS] and [SEP].

    Returns:
        Places in the table, the surest first.

    Raises:
        NoSpan: the model has no attention.
    """
    # [CLS] has the same vector in every text.
    basis, rank = span_of(weights, sum(length - 1 for length in lengths) + 1)
    distance, positions = Distance(basis), max(lengths)
    module.eval()
    inputs = attention_inputs(module, rows, positions)
    distances = torch.cat([distance(chunk) for chunk in inputs])  # (V, positions)
    found: list[tuple[float, int]] = []
    for position in range(1, positions):
        texts = sum(length > position for length in lengths)
        nearest = distances[:, position].topk(min(texts, len(distances)), largest=False)
        found += zip(nearest.values.tolist(), nearest.indices.tolist(), strict=True)
    found.sort()
    # One dimension belongs to [CLS].
    return [place for _, place in found[: max(1, rank - 1)]]
