"""The Merkle tree of an append-only log: its root, and proofs that an entry is in it and that it only grew.

Hashes and proofs are those of RFC 9162, section 2.1, with SHA-256. A leaf is hashed after a zero byte and a node after
a one, so neither passes for the other.

Guarantees, while SHA-256 is collision-resistant:

- Two lists of entries of one length with the same root are equal.
- `root_of_inclusion` gives the tree's root only for the entry that the tree has at that index.
- `is_consistent` holds only if the smaller tree's entries are the larger one's first entries.

`Tree` makes proofs and holds every hash. `Frontier` holds the logarithm of that, and only grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["EMPTY_ROOT", "Frontier", "Tree", "is_consistent", "leaf_hash", "root_of_inclusion"]

_SIZE = 32
# The root of a log without entries.
EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    """The hash of an entry as a leaf, 32 bytes."""
    return hashlib.sha256(b"\x00" + entry).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _split(size: int) -> int:
    """The largest power of two below `size`, where `size` is at least 2."""
    return 1 << ((size - 1).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Frontier:
    """What a log's root depends on: for each bit of its size, the root of a full subtree, the largest first."""

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0 or len(self.peaks) != self.size.bit_count() or any(len(each) != _SIZE for each in self.peaks):
            raise ValueError(f"a log of {self.size} entries has {self.size.bit_count()} peaks of 32 bytes")

    def grown(self, leaves: Iterable[bytes]) -> Frontier:
        """The frontier after these leaf hashes were appended."""
        size, peaks = self.size, list(self.peaks)
        for leaf in leaves:
            node, rest = leaf, size
            # As in binary addition: each trailing one of the size is a full subtree to the left of the new one.
            while rest & 1:
                node = _node(peaks.pop(), node)
                rest >>= 1
            peaks.append(node)
            size += 1
        return Frontier(size, tuple(peaks))

    @property
    def root(self) -> bytes:
        """The log's root, 32 bytes."""
        if not self.peaks:
            return EMPTY_ROOT
        *left, root = self.peaks
        for peak in reversed(left):
            root = _node(peak, root)
        return root


class Tree:
    """A log's tree. It takes 64 bytes for each entry."""

    __slots__ = ("_levels",)

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        # Level h holds, one after the other, the roots of the full subtrees of 2^h leaves.
        self._levels = [bytearray()]
        self.extend(leaves)

    def __len__(self) -> int:
        return len(self._levels[0]) // _SIZE

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Appends leaf hashes."""
        for leaf in leaves:
            if len(leaf) != _SIZE:
                raise ValueError("a leaf hash has 32 bytes")
            node, height = leaf, 0
            while True:
                level = self._levels[height]
                level += node
                if len(level) // _SIZE % 2:
                    break
                node = _node(bytes(level[-2 * _SIZE : -_SIZE]), bytes(level[-_SIZE:]))
                height += 1
                if height == len(self._levels):
                    self._levels.append(bytearray())

    @property
    def frontier(self) -> Frontier:
        """What the root depends on, to try what more entries would make of it."""
        size, at, peaks = len(self), 0, list[bytes]()
        for height in reversed(range(size.bit_length())):
            if size >> height & 1:
                peaks.append(self._range(at, at + (1 << height)))
                at += 1 << height
        return Frontier(size, tuple(peaks))

    def root(self, size: int | None = None) -> bytes:
        """The root of the first `size` entries; of all by default."""
        size = self._checked(len(self) if size is None else size)
        return self._range(0, size) if size else EMPTY_ROOT

    def inclusion(self, index: int, size: int) -> tuple[bytes, ...]:
        """The proof that the entry at `index` (from 0) is among the first `size`: siblings, from the bottom up."""
        if not 0 <= index < self._checked(size):
            raise ValueError(f"a log of {size} entries has none at {index}")
        low, high, path = 0, size, list[bytes]()
        while high - low > 1:
            middle = low + _split(high - low)
            if index < middle:
                path.append(self._range(middle, high))
                high = middle
            else:
                path.append(self._range(low, middle))
                low = middle
        return tuple(reversed(path))

    def consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """The proof that the first `old` entries begin the first `new`. Empty if `old` is 0 or `new`."""
        if not 0 <= old <= self._checked(new):
            raise ValueError(f"a log of {new} entries cannot continue one of {old}")
        if old in (0, new):
            return ()
        low, high, path = 0, new, list[bytes]()
        while high != old:
            middle = low + _split(high - low)
            if old <= middle:
                path.append(self._range(middle, high))
                high = middle
            else:
                path.append(self._range(low, middle))
                low = middle
        # The verifier knows the old root, so the subtree is left out if it is the whole old tree.
        if low:
            path.append(self._range(low, high))
        return tuple(reversed(path))

    def _checked(self, size: int) -> int:
        if not 0 <= size <= len(self):
            raise ValueError(f"the log has {len(self)} entries, not {size}")
        return size

    def _range(self, low: int, high: int) -> bytes:
        """The root over entries `low` to `high`, where `low` is a multiple of a power of two not below their number."""
        size = high - low
        if size & (size - 1) == 0:
            at = low // size * _SIZE
            return bytes(self._levels[size.bit_length() - 1][at : at + _SIZE])
        middle = low + _split(size)
        return _node(self._range(low, middle), self._range(middle, high))


def root_of_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes]) -> bytes | None:
    """The root to which an inclusion proof leads; None if the proof has the wrong length.

    Args:
        leaf: the entry's leaf hash, 32 bytes.
        index: the entry's index, from 0.
        size: number of entries.
        proof: siblings, from the bottom up.

    Source: RFC 9162, section 2.1.3.2.
    """
    if not 0 <= index < size or any(len(each) != _SIZE for each in (leaf, *proof)):
        return None
    node, last, root = index, size - 1, leaf
    for sibling in proof:
        if not last:
            return None
        if node & 1 or node == last:
            root = _node(sibling, root)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            root = _node(root, sibling)
        node, last = node >> 1, last >> 1
    return None if last else root


def is_consistent(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether a consistency proof shows that the log of `new` entries begins with the log of `old` entries.

    Args:
        old: number of entries of the smaller log.
        old_root: its root, 32 bytes.
        new: number of entries of the larger log.
        new_root: its root, 32 bytes.
        proof: what `Tree.consistency` returned.

    Source: RFC 9162, section 2.1.4.2.
    """
    if not 0 <= old <= new or any(len(each) != _SIZE for each in (old_root, new_root, *proof)):
        return False
    if old == 0:
        return old_root == EMPTY_ROOT and not proof and (new > 0 or new_root == EMPTY_ROOT)
    if old == new:
        return old_root == new_root and not proof
    path = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    if not path:
        return False
    node, last = old - 1, new - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    first = second = path[0]
    for sibling in path[1:]:
        if not last:
            return False
        if node & 1 or node == last:
            first, second = _node(sibling, first), _node(sibling, second)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            second = _node(second, sibling)
        node, last = node >> 1, last >> 1
    return not last and first == old_root and second == new_root
