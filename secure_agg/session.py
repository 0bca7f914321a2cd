"""What a roster determines: the session id, every member's place, and the statements that members sign or from which
they derive keys.

Guarantees: the session id depends on every byte of every advertisement and of the context, so members that were shown
different rosters share no key, mask or statement. Both sides build their statements here, so they cannot disagree on an
encoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from secure_agg import merkle
from secure_agg.certificates import by_digest
from secure_agg.context import RoundContext
from secure_agg.graph import CompleteGraph, HararyGraph, ring_order, ring_seed
from secure_agg.groups import GroupsOf, drawn, likely_in_group
from secure_agg.identity import MemberId
from secure_agg.messages import (
    Advertisement,
    DealtShare,
    DigestAdvertisement,
    GroupRoster,
    Part,
    ReceivedDealing,
)
from secure_agg.packing import packed_digest
from secure_agg.sealing import (
    LOCK_OVERHEAD,
    PUBLIC_KEY_BYTES,
    SEAL_OVERHEAD,
    SECRET_KEY_BYTES,
    SYMMETRIC_KEY_BYTES,
    SecretKey,
    derive,
)
from secure_agg.shamir import SHARE_BYTES
from secure_agg.transcript import Purpose, digest, frame

__all__ = [
    "KEYS_BYTES",
    "LOCKED_BYTES",
    "NONCE_BYTES",
    "SEALED_BYTES",
    "Names",
    "Session",
    "SessionName",
    "advertisement_statement",
    "entries_root",
    "grouped_root",
    "ring_of",
    "roster_entry",
    "roster_root",
    "sealing_key_of",
    "seed_key",
    "seed_key_of",
    "vector_digest",
]

NONCE_BYTES = 32
KEYS_BYTES = 2 * PUBLIC_KEY_BYTES
# A key or a pair's seed, sealed; a pair of shares, encrypted.
SEALED_BYTES = SYMMETRIC_KEY_BYTES + SEAL_OVERHEAD
LOCKED_BYTES = 2 * SHARE_BYTES + LOCK_OVERHEAD
_DIGEST_BYTES = 32


def sealing_key_of(keys: bytes) -> bytes:
    """The key in an advertisement to which shares are sealed. Its secret key is never shared."""
    return keys[:PUBLIC_KEY_BYTES]


def seed_key_of(keys: bytes) -> bytes:
    """The key in an advertisement to which pairs' seeds are sealed. Its secret key follows from the member's root."""
    return keys[PUBLIC_KEY_BYTES:]


def seed_key(context: RoundContext, member: MemberId, root: bytes) -> SecretKey:
    """The secret seed key of a member. It is bound to the context alone, because the session id depends on its public
    key.
    """
    return SecretKey(derive(root, context.digest(), frame(Purpose.SEED_KEY, member), SECRET_KEY_BYTES))


def advertisement_statement(context: RoundContext, advertisement: Advertisement | DigestAdvertisement) -> bytes:
    """What a member signs in phase 0: its keys, nonce and certificate, for this attempt and context."""
    brief = _brief(advertisement)
    return frame(
        Purpose.ADVERTISEMENT,
        context.federation,
        context.job,
        context.round,
        context.attempt,
        context.digest(),
        brief.member,
        brief.certificate_digest,
        brief.keys_digest,
        brief.nonce,
    )


def roster_root(advertisements: Iterable[Advertisement | DigestAdvertisement]) -> bytes:
    """A digest of all entries in the order of names, 32 bytes. Certificates and keys enter by their digest."""
    return entries_root(tuple(sorted(map(_brief, advertisements), key=lambda entry: entry.member)))


# These are cached, because a member computes them when it asks for what it lacks of a roster, and again when it has
# that.
@lru_cache(maxsize=4)
def entries_root(entries: tuple[DigestAdvertisement, ...]) -> bytes:
    """The digest of `roster_root`, of entries that are sorted by name."""
    fields = tuple(
        (entry.member, entry.certificate_digest, entry.keys_digest, entry.nonce, entry.signature) for entry in entries
    )
    return digest(Purpose.ROSTER, fields)


@lru_cache(maxsize=4)
def ring_of(entries: tuple[DigestAdvertisement, ...]) -> tuple[MemberId, ...]:
    """The ring of a sparse graph over these entries, sorted by name."""
    seed = ring_seed(entries_root(entries), (entry.nonce for entry in entries))
    return ring_order(seed, (entry.member for entry in entries))


def roster_entry(advertisement: Advertisement | DigestAdvertisement) -> bytes:
    """A roster's entry as a leaf of its hash tree, 32 bytes. Certificates and keys enter by their digest."""
    entry = _brief(advertisement)
    return digest(
        Purpose.ROSTER_ENTRY,
        entry.member,
        entry.certificate_digest,
        entry.keys_digest,
        entry.nonce,
        entry.signature,
    )


@lru_cache(maxsize=4)
def grouped_root(names: tuple[MemberId, ...], tree: bytes) -> bytes:
    """A digest of a roster that is split into groups, 32 bytes: of all names, and the root of the tree over all entries
    in the order of names. So one entry can be proven without the others.
    """
    return digest(Purpose.ROSTER, names, tree)


def _brief(advertisement: Advertisement | DigestAdvertisement) -> DigestAdvertisement:
    return by_digest(advertisement) if isinstance(advertisement, Advertisement) else advertisement


def vector_digest(vector: NDArray[np.uint32], bits: int) -> bytes:
    """SHA-256 of a ring vector's packed bytes, the form in which it travels. It allocates no second vector.

    Args:
        vector: numbers below 2^bits, little-endian uint32, contiguous.
        bits: width of the ring.

    Raises:
        ValueError: the vector is of another kind.
    """
    return packed_digest(vector, bits)


class Names:
    """What is bound to a session by its id alone, so that it can be checked without the roster."""

    @property
    def id(self) -> bytes:
        """The session id, 32 bytes."""
        raise NotImplementedError

    # What a seal or a lock is bound to: HPKE's info, and the header of the encrypted shares.

    def share_key_info(self, dealer: MemberId, receiver: MemberId) -> bytes:
        return frame(Purpose.SHARE_KEY_SEAL, self.id, dealer, receiver)

    def pair_seed_info(self, chooser: MemberId, receiver: MemberId) -> bytes:
        return frame(Purpose.PAIR_SEED_SEAL, self.id, chooser, receiver)

    def shares_header(self, dealer: MemberId, receiver: MemberId) -> bytes:
        return frame(Purpose.SHARES_HEADER, self.id, dealer, receiver)

    # Commitments. Keys, secrets and shares are uniform and have at least 32 bytes, so a plain hash hides them.

    def seed_commitment(self, dealer: MemberId, seed: bytes) -> bytes:
        return digest(Purpose.SEED_COMMITMENT, self.id, dealer, seed)

    def share_key_commitment(self, dealer: MemberId, receiver: MemberId, key: bytes) -> bytes:
        return digest(Purpose.SHARE_KEY_COMMITMENT, self.id, dealer, receiver, key)

    def pair_seed_commitment(self, chooser: MemberId, receiver: MemberId, seed: bytes) -> bytes:
        return digest(Purpose.PAIR_SEED_COMMITMENT, self.id, chooser, receiver, seed)

    def root_share_commitment(self, dealer: MemberId, receiver: MemberId, share: bytes) -> bytes:
        return digest(Purpose.ROOT_SHARE_COMMITMENT, self.id, dealer, receiver, share)

    def seed_share_commitment(self, dealer: MemberId, receiver: MemberId, share: bytes) -> bytes:
        return digest(Purpose.SEED_SHARE_COMMITMENT, self.id, dealer, receiver, share)

    def dealing_leaf(self, dealer: MemberId, share: DealtShare) -> bytes:
        """All that a dealer made for one receiver, as a leaf of its hash tree. Ciphertexts enter by their SHA-256."""
        return digest(
            Purpose.DEALING_LEAF,
            self.id,
            dealer,
            share.receiver,
            hashlib.sha256(share.sealed_key).digest(),
            hashlib.sha256(share.locked_shares).digest(),
            share.key_commitment,
            share.root_commitment,
            share.seed_commitment,
            hashlib.sha256(share.sealed_pair_seed).digest(),
            share.pair_seed_commitment,
        )

    # Statements about dealings that members sign.

    def dealing_statement(self, dealer: MemberId, seed_commitment: bytes, root: bytes) -> bytes:
        return frame(Purpose.DEALING, self.id, dealer, seed_commitment, root)

    def complaint_statement(self, complainant: MemberId, dealer: MemberId, part: Part, leaf: bytes) -> bytes:
        return frame(Purpose.COMPLAINT, self.id, complainant, dealer, part.value, leaf)

    def opening_statement(
        self, complainant: MemberId, dealer: MemberId, part: Part, leaf: bytes, secret: bytes
    ) -> bytes:
        return frame(Purpose.OPENING, self.id, complainant, dealer, part.value, leaf, secret)


@dataclass(frozen=True, slots=True)
class SessionName(Names):
    """A session of which only the id is known."""

    session: bytes

    @property
    def id(self) -> bytes:
        return self.session


@dataclass(frozen=True)
class Session(Names):
    """A context and the roster U1 that was checked against it.

    Args:
        context: the attempt.
        entries: the roster, by member, sorted.
        certificates: every member's certificate.
        keys: the public keys of every member or, on the side of a member in a large cohort, of its neighbours.
        proven: all names and the root of a roster of which the rest covers one group alone. None: it covers everybody.
    """

    context: RoundContext
    entries: MappingProxyType[MemberId, DigestAdvertisement]
    certificates: Mapping[MemberId, bytes] = field(repr=False)
    keys: Mapping[MemberId, bytes] = field(repr=False)
    proven: tuple[tuple[MemberId, ...], bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, context: RoundContext, advertisements: Iterable[Advertisement]) -> Session:
        """Makes a session from checked advertisements of distinct members, in any order."""
        whole = tuple(advertisements)
        return cls.by_digest(
            context,
            map(by_digest, whole),
            {entry.member: entry.certificate for entry in whole},
            {entry.member: entry.keys for entry in whole},
        )

    @classmethod
    def by_digest(
        cls,
        context: RoundContext,
        advertisements: Iterable[DigestAdvertisement],
        certificates: Mapping[MemberId, bytes],
        keys: Mapping[MemberId, bytes],
        proven: tuple[tuple[MemberId, ...], bytes] | None = None,
    ) -> Session:
        """Makes a session from checked advertisements of distinct members, in any order, with what the caller has of
        certificates and keys.

        Args:
            proven: all names, sorted, and the roster root, if these are the advertisements of one group alone.
        """
        ordered = sorted(advertisements, key=lambda entry: entry.member)
        entries = MappingProxyType({entry.member: entry for entry in ordered})
        return cls(context, entries, certificates, keys, proven)

    @cached_property
    def members(self) -> tuple[MemberId, ...]:
        """U1, sorted."""
        return tuple(self.entries) if self.proven is None else self.proven[0]

    @property
    def max_doubtful(self) -> int:
        """How many members of `entries` a member accepts that it has no reason to trust: n_C or, if these are one
        group's, what n_C of all members make likely in it (`likely_in_group`).
        """
        context = self.context
        if self.proven is None or context.grouped is None:
            return context.assumed_corrupt
        return likely_in_group(context.cohort, context.assumed_corrupt, context.grouped)

    @property
    def least_groups(self) -> int:
        """How many groups must be opened: the context's number, or 1 if there is one, or one alone is known."""
        return 1 if self.proven is not None or self.context.grouped is None else self.context.grouped.least

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
    def keys_by_digest(self) -> dict[bytes, bytes]:
        """The known public keys, by their SHA-256."""
        return {self.entries[member].keys_digest: keys for member, keys in self.keys.items()}

    @cached_property
    def root(self) -> bytes:
        """The roster root, 32 bytes."""
        if self.proven is not None:
            return self.proven[1]
        if self.context.grouped is not None:
            return grouped_root(self.members, self.tree.root)
        return roster_root(self.entries.values())

    @cached_property
    def tree(self) -> merkle.Tree:
        """The hash tree over all entries of a roster that is split into groups, in the order of names."""
        return merkle.Tree(tuple(map(roster_entry, self.entries.values())), Purpose.ROSTER_NODE)

    def roster_of(self, group: int) -> GroupRoster:
        """What the members of a group are sent of this roster."""
        members = self.groups[group]
        paths = tuple(self.tree.path(self.rank(member)) for member in members)
        return GroupRoster(self.members, tuple(self.entries[member] for member in members), paths)

    @cached_property
    def context_digest(self) -> bytes:
        """The context's digest, computed once."""
        return self.context.digest()

    @cached_property
    def graph(self) -> CompleteGraph | HararyGraph | GroupsOf:
        """Who masks with whom: a function of the context and the roster alone."""
        sparse, grouped = self.context.sparse, self.context.grouped
        if grouped is not None:
            return drawn(self.root, self.members, grouped.groups)
        if sparse is None:
            return CompleteGraph(self.members)
        return HararyGraph(ring_of(tuple(self.entries.values())), sparse.degree)

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

    def chooses(self, member: MemberId, other: MemberId) -> bool:
        """Whether `member` chooses the seed of the pair that it forms with its neighbour `other`."""
        return self.graph.chooses(member, other)

    def chosen_by(self, member: MemberId) -> tuple[MemberId, ...]:
        """The neighbours with which `member` chooses the pair's seed, sorted: about half of them. With the others,
        they choose it.
        """
        return tuple(other for other in self.neighbours(member) if self.chooses(member, other))

    def pair_seed(self, chooser: MemberId, other: MemberId, root: bytes) -> bytes:
        """The seed of a pair's mask, 32 bytes, which follows from the chooser's root."""
        return derive(root, self.id, frame(Purpose.PAIR_SEED, chooser, other))

    def well_formed(self, dealer: MemberId, share: DealtShare) -> bool:
        """Whether every field of a dealt share has its length, and whether it holds a pair's seed exactly if the dealer
        chooses it.
        """
        own = share.receiver == dealer
        chosen = self.chooses(dealer, share.receiver)
        return (
            len(share.sealed_key) == (0 if own else SEALED_BYTES)
            and len(share.locked_shares) == (0 if own else LOCKED_BYTES)
            and len(share.key_commitment) == (0 if own else _DIGEST_BYTES)
            and len(share.root_commitment) == len(share.seed_commitment) == _DIGEST_BYTES
            and len(share.sealed_pair_seed) == (SEALED_BYTES if chosen else 0)
            and len(share.pair_seed_commitment) == (_DIGEST_BYTES if chosen else 0)
        )

    def dealing_leaves(self, dealer: MemberId, shares: Sequence[DealtShare]) -> tuple[bytes, ...]:
        return tuple(self.dealing_leaf(dealer, share) for share in shares)

    def received_root(self, receiver: MemberId, dealing: ReceivedDealing) -> bytes | None:
        """The root to which a received dealing's path leads; None if the path has the wrong length."""
        order = self.receivers(dealing.dealer)
        leaf = self.dealing_leaf(dealing.dealer, dealing.share)
        return merkle.root_from_path(leaf, order.index(receiver), len(order), dealing.path)

    # Statements that members sign.

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
        """The same for both members of a pair: its chooser, the other, then everything on which the two must agree."""
        chooser, receiver = (one, other) if self.chooses(one, other) else (other, one)
        context = self.context
        return frame(
            Purpose.PAIR_MASK, chooser, receiver, context.model, self.context_digest, context.values, context.bits
        )

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
