"""Hash trees: over a dealer's commitments, so that each receiver gets only its own and a short path, and over a roster.

Guarantees: a path for (leaf, index, count) leads to exactly one root. A leaf cannot be passed off as a node, or moved
to another index (its framing also names the receiver or the member). Leaves are padded with zeros to a power of two,
and the count is framed with the root, so padding is never taken for a leaf. Nodes are framed for the kind of tree, so
no node of one kind is a node of the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from secure_agg.transcript import Purpose, digest

__all__ = ["Tree", "paths_of", "root_from_path", "root_of"]

_PADDING = bytes(32)


class Tree:
    """The tree over at least one leaf digest. `kind` frames its nodes."""

    __slots__ = ("_count", "_kind", "_levels")

    def __init__(self, leaves: Sequence[bytes], kind: Purpose = Purpose.DEALING_NODE) -> None:
        self._count, self._kind = len(leaves), kind
        self._levels = _levels(leaves, kind)

    @property
    def root(self) -> bytes:
        return _sealed_root(self._levels[-1][0], self._count, self._kind)

    @property
    def paths(self) -> tuple[tuple[bytes, ...], ...]:
        """For each leaf, its siblings, from the bottom up."""
        return tuple(map(self.path, range(self._count)))

    def path(self, index: int) -> tuple[bytes, ...]:
        """The siblings of the leaf at `index`, from the bottom up."""
        return tuple(level[(index >> height) ^ 1] for height, level in enumerate(self._levels[:-1]))


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The root of the tree over at least one leaf digest."""
    return Tree(leaves).root


def paths_of(leaves: Sequence[bytes]) -> tuple[tuple[bytes, ...], ...]:
    """For each leaf, its siblings, from the bottom up."""
    return Tree(leaves).paths


def root_from_path(
    leaf: bytes, index: int, count: int, path: Sequence[bytes], kind: Purpose = Purpose.DEALING_NODE
) -> bytes | None:
    """The root to which `path` leads from `leaf` at `index`; None if the path has the wrong length."""
    if not 0 <= index < count or len(path) != (count - 1).bit_length():
        return None
    node = leaf
    for height, sibling in enumerate(path):
        left, right = (sibling, node) if (index >> height) & 1 else (node, sibling)
        node = digest(kind, left, right)
    return _sealed_root(node, count, kind)


def _levels(leaves: Sequence[bytes], kind: Purpose) -> list[list[bytes]]:
    width = 1 << (len(leaves) - 1).bit_length()
    level = [*leaves, *([_PADDING] * (width - len(leaves)))]
    levels = [level]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [digest(kind, left, right) for left, right in pairs]
        levels.append(level)
    return levels


def _sealed_root(node: bytes, count: int, kind: Purpose) -> bytes:
    return digest(kind, node, count)
