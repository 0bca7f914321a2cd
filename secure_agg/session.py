"""What a roster determines: the session id, every member's place, and the statements that members sign or from which
they derive keys.

Guarantees: the session id depends on every byte of every advertisement and of the context, so members that were shown
different rosters share no key, mask or statement. Both sides build their statements here, so they cannot disagree on an
encoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from secure_agg import merkle
from secure_agg.agreement import SEAL_OVERHEAD
from secure_agg.context import RoundContext
from secure_agg.graph import CompleteGraph, HararyGraph, ring_order, ring_seed
from secure_agg.groups import GroupsOf, draw_groups
from secure_agg.identity import MemberId
from secure_agg.messages import Advertisement, DealtShare, ReceivedDealing
from secure_agg.packing import packed_digest
from secure_agg.shamir import SHARE_BYTES
from secure_agg.transcript import Purpose, digest, frame

__all__ = [
    "NONCE_BYTES",
    "SEALED_BYTES",
    "Session",
    "advertisement_statement",
    "roster_root",
    "vector_digest",
]

NONCE_BYTES = 32
SEALED_BYTES = 2 * SHARE_BYTES + SEAL_OVERHEAD


def advertisement_statement(context: RoundContext, advertisement: Advertisement) -> bytes:
    """What a member signs in phase 0: its keys, nonce and certificate, for this attempt and context."""
    return frame(
        Purpose.ADVERTISEMENT,
        context.federation,
        context.job,
        context.round,
        context.attempt,
        context.digest(),
        advertisement.member,
        hashlib.sha256(advertisement.certificate).digest(),
        advertisement.masking_key,
        advertisement.sealing_key,
        advertisement.nonce,
    )


def roster_root(advertisements: Iterable[Advertisement]) -> bytes:
    """A digest of all entries in the order of names, 32 bytes. A certificate enters by its digest."""
    entries = tuple(
        (
            entry.member,
            hashlib.sha256(entry.certificate).digest(),
            entry.masking_key,
            entry.sealing_key,
            entry.nonce,
            entry.signature,
        )
        for entry in sorted(advertisements, key=lambda entry: entry.member)
    )
    return digest(Purpose.ROSTER, entries)


def vector_digest(vector: NDArray[np.uint32], bits: int) -> bytes:
    """SHA-256 of a ring vector's packed bytes, the form in which it travels. It allocates no second vector.

    Args:
        vector: numbers below 2^bits, little-endian uint32, contiguous.
        bits: width of the ring.

    Raises:
        ValueError: the vector is of another kind.
    """
    return packed_digest(vector, bits)


@dataclass(frozen=True)
class Session:
    """A context and the roster U1 that was checked against it."""

    context: RoundContext
    entries: MappingProxyType[MemberId, Advertisement]

    @classmethod
    def of(cls, context: RoundContext, advertisements: Iterable[Advertisement]) -> Session:
        """Makes a session from checked advertisements of distinct members, in any order."""
        ordered = sorted(advertisements, key=lambda entry: entry.member)
        return cls(context, MappingProxyType({entry.member: entry for entry in ordered}))

    @cached_property
    def members(self) -> tuple[MemberId, ...]:
        """U1, sorted."""
        return tuple(self.entries)

    @cached_property
    def id(self) -> bytes:
        """The session id, 32 bytes."""
        context = self.context
        return digest(
            Purpose.SESSION,
            context.federation,
            context.job,
            context.round,
            context.attempt,
            self.root,
            self.context_digest,
        )

    @cached_property
    def root(self) -> bytes:
        """The roster root, 32 bytes."""
        return roster_root(self.entries.values())

    @cached_property
    def context_digest(self) -> bytes:
        """The context's digest, computed once."""
        return self.context.digest()

    @cached_property
    def graph(self) -> CompleteGraph | HararyGraph | GroupsOf:
        """Who masks with whom: a function of the context and the roster alone."""
        sparse, grouped = self.context.sparse, self.context.grouped
        if grouped is not None:
            nonces = (entry.nonce for entry in self.entries.values())
            return GroupsOf(draw_groups(self.root, nonces, self.members, grouped.groups))
        if sparse is None:
            return CompleteGraph(self.members)
        seed = ring_seed(self.root, (entry.nonce for entry in self.entries.values()))
        return HararyGraph(ring_order(seed, self.members), sparse.degree)

    @property
    def groups(self) -> tuple[tuple[MemberId, ...], ...]:
        """The groups of members that are summed together, each sorted; a single one without a split."""
        return self.graph.groups if isinstance(self.graph, GroupsOf) else (self.members,)

    def group_of(self, member: MemberId) -> int:
        """The number of a member's group in `groups`."""
        return self.graph.number(member) if isinstance(self.graph, GroupsOf) else 0

    @cached_property
    def _ranks(self) -> dict[MemberId, int]:
        return {member: rank for rank, member in enumerate(self.members)}

    def rank(self, member: MemberId) -> int:
        """A member's position in the sorted roster, from 0."""
        return self._ranks[member]

    def point(self, member: MemberId) -> int:
        """A member's Shamir point, from 1."""
        return self._ranks[member] + 1

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """The members that share a pairwise mask with `member`, sorted."""
        return self.graph.neighbours(member)

    def receivers(self, dealer: MemberId) -> tuple[MemberId, ...]:
        """The members for which `dealer` makes shares, sorted."""
        return self.graph.receivers(dealer)

    def dealers_to(self, receiver: MemberId) -> tuple[MemberId, ...]:
        """The members whose shares `receiver` may hold, sorted. Neighbourhood is symmetric, so it deals to the same."""
        return self.graph.receivers(receiver)

    # Commitments. Secrets and shares are uniform and have at least 32 bytes, so a plain hash hides them.

    def seed_commitment(self, dealer: MemberId, seed: bytes) -> bytes:
        return digest(Purpose.SEED_COMMITMENT, self.id, dealer, seed)

    def masking_share_commitment(self, dealer: MemberId, receiver: MemberId, share: bytes) -> bytes:
        return digest(Purpose.MASKING_SHARE_COMMITMENT, self.id, dealer, receiver, share)

    def seed_share_commitment(self, dealer: MemberId, receiver: MemberId, share: bytes) -> bytes:
        return digest(Purpose.SEED_SHARE_COMMITMENT, self.id, dealer, receiver, share)

    def dealing_leaf(self, dealer: MemberId, receiver: MemberId, masking: bytes, seed: bytes) -> bytes:
        """One receiver's two commitments, as a leaf of the dealer's hash tree."""
        return digest(Purpose.DEALING_LEAF, self.id, dealer, receiver, masking, seed)

    def dealing_leaves(self, dealer: MemberId, shares: Sequence[DealtShare]) -> tuple[bytes, ...]:
        return tuple(
            self.dealing_leaf(dealer, share.receiver, share.masking_commitment, share.seed_commitment)
            for share in shares
        )

    def received_root(self, receiver: MemberId, dealing: ReceivedDealing) -> bytes | None:
        """The root to which a received dealing's path leads; None if the path has the wrong length."""
        order = self.receivers(dealing.dealer)
        leaf = self.dealing_leaf(
            dealing.dealer, receiver, dealing.masking_share_commitment, dealing.seed_share_commitment
        )
        return merkle.root_from_path(leaf, order.index(receiver), len(order), dealing.path)

    # Statements that members sign.

    def dealing_statement(self, dealer: MemberId, seed_commitment: bytes, root: bytes) -> bytes:
        return frame(Purpose.DEALING, self.id, dealer, seed_commitment, root)

    def masked_input_statement(self, member: MemberId, vector: bytes, length: int) -> bytes:
        return frame(Purpose.MASKED_INPUT, self.id, member, vector, length)

    def survivors_digest(self, survivors: Iterable[MemberId]) -> bytes:
        """A digest of (session, U3, model digest, context digest), 32 bytes, on which all of U3 must agree."""
        context = self.context
        return digest(Purpose.SURVIVORS, self.id, tuple(sorted(survivors)), context.model, self.context_digest)

    def confirmation_statement(self, member: MemberId, survivors_digest: bytes) -> bytes:
        """What `member` signs in phase 3."""
        return frame(Purpose.CONFIRMATION, self.id, survivors_digest, member)

    # What masks are derived from.

    def pair_mask_info(self, one: MemberId, other: MemberId) -> bytes:
        """The same for both members of a pair: names in order, then everything on which the two must agree."""
        low, high = sorted((one, other))
        context = self.context
        return frame(Purpose.PAIR_MASK, low, high, context.model, self.context_digest, context.values, context.bits)

    def self_mask_info(self, member: MemberId) -> bytes:
        context = self.context
        return frame(Purpose.SELF_MASK, member, context.model, self.context_digest, context.values, context.bits)

    def result_digest(self, survivors: Iterable[MemberId], total: NDArray[np.uint32]) -> bytes:
        """A digest that names an opened sum, 32 bytes: session, U3 and the sum itself."""
        survivors_in_order = tuple(sorted(survivors))
        return digest(Purpose.RESULT, self.id, survivors_in_order, vector_digest(total, self.context.bits))

    def results_digest(self, results: Sequence[bytes]) -> bytes:
        """A digest of the digests of several groups' opened sums, in the order of the groups: 32 bytes."""
        return digest(Purpose.RESULTS, self.id, tuple(results))
