"""Who masks with whom and who deals to whom.

Guarantees: neighbourhood is symmetric, and nobody is their own neighbour. On the complete graph everybody is
everybody's neighbour, and a member deals to itself as well, so that its own share counts (three members with
a threshold of three can open a sum). On the sparse graph, a Harary graph, everybody has exactly k neighbours: the
k/2 on either side on a ring. The order on the ring is a function of the roster, the same for whoever computes it,
and nobody who advertised knew it when choosing what to advertise: it hangs on everybody's nonce.

Groups, which are complete graphs side by side, stand in `secure_agg.groups`.

Source of the sparse graph: Bell et al. 2020, section 3.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable

from secure_agg.identity import MemberId
from secure_agg.transcript import Purpose, digest

__all__ = ["CompleteGraph", "HararyGraph", "ring_order", "ring_seed"]


class CompleteGraph:
    """Everybody with everybody. `members` are sorted."""

    __slots__ = ("_members",)

    def __init__(self, members: tuple[MemberId, ...]) -> None:
        self._members = members

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """The members that `member` shares a pairwise mask with, sorted."""
        return tuple(other for other in self._members if other != member)

    def receivers(self, dealer: MemberId) -> tuple[MemberId, ...]:
        """The members that `dealer` makes shares for, sorted: all, itself included."""
        return self._members

    def short(self, gone: Collection[MemberId], threshold: int) -> frozenset[MemberId]:
        """Nobody: on the complete graph one count of answers holds for every dealer, and the phases keep it."""
        return frozenset()


class HararyGraph:
    """Everybody with the k/2 next on either side of the ring. Neighbourhoods are worked out when asked for."""

    __slots__ = ("_half", "_known", "_places", "_ring", "_short")

    def __init__(self, ring: tuple[MemberId, ...], degree: int) -> None:
        """ring: the members in the order of the ring. Raises ValueError unless the degree is even and below their
        number.
        """
        if degree < 2 or degree % 2 or degree >= len(ring):
            raise ValueError(
                f"a ring of {len(ring)} members has no regular graph of degree {degree}; it is even and below"
            )
        self._half = degree // 2
        self._ring = ring
        self._places = {member: place for place, member in enumerate(ring)}
        self._known: dict[MemberId, tuple[MemberId, ...]] = {}
        self._short: tuple[frozenset[MemberId], int, frozenset[MemberId]] | None = None

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """The k members that `member` shares a pairwise mask with, sorted."""
        found = self._known.get(member)
        if found is None:
            place, ring, size = self._places[member], self._ring, len(self._ring)
            steps = (step for step in range(-self._half, self._half + 1) if step)
            found = tuple(sorted(ring[(place + step) % size] for step in steps))
            self._known[member] = found
        return found

    def receivers(self, dealer: MemberId) -> tuple[MemberId, ...]:
        """The members that `dealer` makes shares for, sorted: its neighbours."""
        return self.neighbours(dealer)

    def short(self, gone: Collection[MemberId], threshold: int) -> frozenset[MemberId]:
        """The members of whose neighbours fewer than `threshold` are left without those who are `gone`."""
        key = frozenset(gone)
        # Asked for after every message, changed by a loss only.
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


def ring_seed(root: bytes, nonces: Iterable[bytes]) -> bytes:
    """32 bytes from the roster root and all the members' nonces, in the order of names."""
    return digest(Purpose.RING, root, tuple(nonces))


def ring_order(seed: bytes, members: Iterable[MemberId]) -> tuple[MemberId, ...]:
    """The members in the order of HMAC-SHA256(seed, name as UTF-8)."""
    return tuple(sorted(members, key=lambda member: hmac.digest(seed, member.encode("utf-8"), "sha256")))
