"""The graphs that say who masks with whom and who deals to whom.

Guarantees: neighbourhood is symmetric, and no member is its own neighbour. On the complete graph every member is a
neighbour of every other, and a member also deals to itself, so that its own share counts (three members with a
threshold of three can open a sum). On the sparse graph, a Harary graph, every member has exactly k neighbours: k/2 on
each side on a ring. The order on the ring is a function of the roster, the same for everybody who computes it. It
depends on every member's nonce, so nobody can know it before the last nonce is chosen. `secure_agg.parameters` says
what a coordinator gains by choosing last.

One end of each pair chooses the seed of the pair's mask. Who it is follows from the graph alone, and every member
chooses for about half of its neighbours.

Groups, which are complete graphs side by side, are in `secure_agg.groups`.

Source of the sparse graph: Bell et al. 2020, section 3.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable

from secure_agg.identity import MemberId
from secure_agg.transcript import Purpose, digest

__all__ = ["CompleteGraph", "HararyGraph", "alternate", "ring_order", "ring_seed"]


class CompleteGraph:
    """A graph in which every member is a neighbour of every other. `members` are sorted."""

    __slots__ = ("_members", "_ranks")

    def __init__(self, members: tuple[MemberId, ...]) -> None:
        self._members = members
        self._ranks = {member: rank for rank, member in enumerate(members)}

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """The members with which `member` shares a pairwise mask, sorted."""
        return tuple(other for other in self._members if other != member)

    def receivers(self, dealer: MemberId) -> tuple[MemberId, ...]:
        """The members for which `dealer` makes shares, sorted: all, including itself."""
        return self._members

    def chooses(self, member: MemberId, other: MemberId) -> bool:
        """Whether `member` chooses the seed of its pair with `other`."""
        return alternate(self._ranks[member], self._ranks[other])

    def short(self, gone: Collection[MemberId], threshold: int) -> frozenset[MemberId]:
        """Nobody: on the complete graph one count of answers holds for every dealer, and the phases enforce it."""
        return frozenset()


class HararyGraph:
    """A ring on which a member's neighbours are the next k/2 on each side. Neighbourhoods are computed on demand."""

    __slots__ = ("_half", "_known", "_places", "_ring", "_short")

    def __init__(self, ring: tuple[MemberId, ...], degree: int) -> None:
        """Makes a graph.

        Args:
            ring: the members in the order of the ring.
            degree: k, even and below their number.

        Raises:
            ValueError: the degree is odd, below 2 or too large.
        """
        if degree < 2 or degree % 2 or degree >= len(ring):
            raise ValueError(
                f"a ring of {len(ring)} members has no graph of degree {degree}; choose an even degree from 2 up that "
                "is below the number of members"
            )
        self._half = degree // 2
        self._ring = ring
        self._places = {member: place for place, member in enumerate(ring)}
        self._known: dict[MemberId, tuple[MemberId, ...]] = {}
        self._short: tuple[frozenset[MemberId], int, frozenset[MemberId]] | None = None

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """The k members with which `member` shares a pairwise mask, sorted."""
        found = self._known.get(member)
        if found is None:
            place, ring, size = self._places[member], self._ring, len(self._ring)
            steps = (step for step in range(-self._half, self._half + 1) if step)
            found = tuple(sorted(ring[(place + step) % size] for step in steps))
            self._known[member] = found
        return found

    def receivers(self, dealer: MemberId) -> tuple[MemberId, ...]:
        """The members for which `dealer` makes shares, sorted: its neighbours."""
        return self.neighbours(dealer)

    def chooses(self, member: MemberId, other: MemberId) -> bool:
        """Whether `member` chooses the seed of its pair with `other`: it does for the next k/2 on the ring."""
        return 1 <= (self._places[other] - self._places[member]) % len(self._ring) <= self._half

    def short(self, gone: Collection[MemberId], threshold: int) -> frozenset[MemberId]:
        """The members with fewer than `threshold` neighbours left when those in `gone` are missing."""
        key = frozenset(gone)
        # Called after every message, but only a loss changes the result.
        if self._short is None or self._short[:2] != (key, threshold):
            self._short = (key, threshold, self._count_short(key, threshold))
        return self._short[2]

    def _count_short(self, gone: Iterable[MemberId], threshold: int) -> frozenset[MemberId]:
        lost: dict[MemberId, int] = {}
        for member in gone:
            if member in self._places:
                for other in self.neighbours(member):
                    lost[other] = lost.get(other, 0) + 1
        return frozenset(member for member, count in lost.items() if 2 * self._half - count < threshold)


def alternate(rank: int, other: int) -> bool:
    """Whether the member of one rank on a complete graph chooses the seed of its pair with that of another rank.

    Of two members whose ranks differ by an odd number the lower one chooses, otherwise the higher one. So each chooses
    for half of the others, rounded up or down.
    """
    return rank != other and ((other - rank) % 2 == 1) == (other > rank)


def ring_seed(root: bytes, nonces: Iterable[bytes]) -> bytes:
    """Derives 32 bytes from the roster root and all members' nonces, in the order of names."""
    return digest(Purpose.RING, root, tuple(nonces))


def ring_order(seed: bytes, members: Iterable[MemberId]) -> tuple[MemberId, ...]:
    """Sorts the members by HMAC-SHA256(seed, name as UTF-8)."""
    return tuple(sorted(members, key=lambda member: hmac.digest(seed, member.encode("utf-8"), "sha256")))
