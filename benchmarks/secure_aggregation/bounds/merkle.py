"""A hash tree over columns: its root binds all of them, and some are opened with the hashes that the root needs."""

from collections.abc import Mapping, Sequence
from hashlib import sha256

__all__ = ["HASH_BYTES", "opening", "root_of", "tree"]

HASH_BYTES = 32

Tree = Sequence[Sequence[bytes]]


def _node(left: bytes, right: bytes) -> bytes:
    return sha256(b"node" + left + right).digest()


def tree(leaves: Sequence[bytes]) -> Tree:
    """Returns all levels, leaves first. The number of leaves is a power of two; the last level is the root."""
    if len(leaves) & (len(leaves) - 1) or not leaves:
        raise ValueError(f"a tree has 2^k leaves, got {len(leaves)}")
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        below = levels[-1]
        levels.append([_node(below[i], below[i + 1]) for i in range(0, len(below), 2)])
    return levels


def opening(levels: Tree, places: Sequence[int]) -> list[bytes]:
    """Returns the hashes, besides the leaves at `places`, that the root needs: bottom up, each level in order."""
    known, needed = set(places), []
    for level in levels[:-1]:
        needed += [level[place ^ 1] for place in sorted(known) if place ^ 1 not in known]
        known = {place // 2 for place in known}
    return needed


def root_of(leaves: Mapping[int, bytes], size: int, needed: Sequence[bytes]) -> bytes:
    """Returns the root that some leaves of a tree of `size` leaves lead to.

    Raises:
        ValueError: there are too few or too many hashes.
    """
    known, rest = dict(leaves), iter(needed)
    while size > 1:
        for place in sorted(known):
            if place ^ 1 not in known:
                sibling = next(rest, None)
                if sibling is None:
                    raise ValueError("the opening has too few hashes")
                known[place ^ 1] = sibling
        known = {place // 2: _node(known[place & ~1], known[place | 1]) for place in known}
        size //= 2
    if next(rest, None) is not None:
        raise ValueError("the opening has too many hashes")
    return known[0]
