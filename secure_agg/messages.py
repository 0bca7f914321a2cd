"""All messages of the protocol, as plain frozen records of text, numbers, bytes and tuples.

Guarantees: a message has no behaviour and holds no secret of its sender. Two messages are equal only if every byte is,
so repeats can be recognised. Nothing is checked here: the phase that receives a message checks it.

Lists are in the order of member names, sorted as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from secure_agg.identity import MemberId

__all__ = [
    "Advertisement",
    "Complaint",
    "Complaints",
    "Confirmation",
    "Confirmations",
    "Dealing",
    "DealtShare",
    "DigestAdvertisement",
    "DigestRoster",
    "GroupRoster",
    "MaskedInput",
    "Opening",
    "Openings",
    "Part",
    "ReceivedDealing",
    "ReceivedDealings",
    "RevealedShare",
    "Roster",
    "Survivors",
    "Unmasking",
]


@dataclass(frozen=True, slots=True)
class Advertisement:
    """Phase 0, member to server: two fresh hybrid public keys and a nonce, signed.

    Args:
        member: its name.
        certificate: the certificate of its signing key.
        keys: the sealing key, then the seed key, 1216 bytes each.
        nonce: 32 bytes.
        signature: over the digests of certificate and keys, and the rest.
    """

    member: MemberId
    certificate: bytes
    keys: bytes
    nonce: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Roster:
    """Phase 0, server to all of U1: every advertisement, the same for every member."""

    advertisements: tuple[Advertisement, ...]


@dataclass(frozen=True, slots=True)
class DigestAdvertisement:
    """An `Advertisement` with the SHA-256 of its certificate and of its keys (32 bytes each) in their place. The
    signature is the same, because it covers the digests.
    """

    member: MemberId
    certificate_digest: bytes
    keys_digest: bytes
    nonce: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class DigestRoster:
    """Phase 0, server to all of U1: a `Roster` for members that fetch the certificates that they do not have, and the
    keys of their neighbours.
    """

    advertisements: tuple[DigestAdvertisement, ...]


@dataclass(frozen=True, slots=True)
class GroupRoster:
    """Phase 0, server to the members of one group: what they need of the roster of a large cohort that is split into
    groups, and nothing more.

    Args:
        names: all of U1.
        advertisements: those of the group's members.
        paths: for each of these advertisements, the siblings (32 bytes each) that lead from its leaf in the roster's
            hash tree to the root.
    """

    names: tuple[MemberId, ...]
    advertisements: tuple[DigestAdvertisement, ...]
    paths: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True)
class DealtShare:
    """What one dealer made for one receiver. The dealer's signature covers every field.

    The dealer's own two shares stay with it, so in its own entry only the commitments to them are not empty. The pair's
    seed is empty unless the dealer chooses it.

    Args:
        receiver: its name.
        sealed_key: the key of the locked shares, sealed to the receiver's sealing key, 1168 bytes.
        locked_shares: both shares, encrypted under that key, 82 bytes.
        key_commitment: commitment to that key, 32 bytes.
        root_commitment: commitment to the share of the root, 32 bytes.
        seed_commitment: commitment to the share of the self-mask seed, 32 bytes.
        sealed_pair_seed: the pair's seed, sealed to the receiver's seed key, 1168 bytes.
        pair_seed_commitment: commitment to the pair's seed, 32 bytes.
    """

    receiver: MemberId
    sealed_key: bytes
    locked_shares: bytes
    key_commitment: bytes
    root_commitment: bytes
    seed_commitment: bytes
    sealed_pair_seed: bytes
    pair_seed_commitment: bytes


@dataclass(frozen=True, slots=True)
class Dealing:
    """Phase 1, member to server: one entry for each receiver.

    Args:
        dealer: its name.
        seed_commitment: commitment to the self-mask seed, 32 bytes.
        shares: in the order of receivers; on the complete graph they include the dealer itself.
        signature: over the seed commitment and the root of the hash tree over all shares.
    """

    dealer: MemberId
    seed_commitment: bytes
    shares: tuple[DealtShare, ...]
    signature: bytes


@dataclass(frozen=True, slots=True)
class ReceivedDealing:
    """What one dealer dealt to the receiver of this message, with everything needed to check the dealer's signature.

    `path` holds the siblings (32 bytes each) that lead from this receiver's leaf to the signed root.
    """

    dealer: MemberId
    share: DealtShare
    seed_commitment: bytes
    path: tuple[bytes, ...]
    signature: bytes


@dataclass(frozen=True, slots=True)
class ReceivedDealings:
    """Phase 1, server to a member of U2: what the other members of U2 dealt to it."""

    dealings: tuple[ReceivedDealing, ...]


class Part(StrEnum):
    """A secret that a dealer sealed for one receiver and committed to."""

    SHARES = "shares"  # the key of the locked shares
    PAIR_SEED = "pair seed"


@dataclass(frozen=True, slots=True)
class Complaint:
    """One secret that a dealer signed for this receiver does not open, or is not what the dealer committed to.

    Args:
        complainant: the receiver.
        dealer: the dealer.
        part: which secret.
        leaf: digest of what the dealer signed for this receiver, 32 bytes.
        signature: the receiver's, over the session and all of this.
    """

    complainant: MemberId
    dealer: MemberId
    part: Part
    leaf: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Complaints:
    """Phase 2, member to server, before its masked vector: everything that does not open."""

    complaints: tuple[Complaint, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """Phase 2, dealer to server: the secret that a complaint is about.

    Args:
        complainant: the receiver.
        dealer: the dealer.
        part: which secret.
        leaf: digest of what the dealer signed for the receiver, 32 bytes.
        secret: the key of the locked shares, or the pair's seed, 32 bytes.
        signature: the dealer's, over the session and all of this.
    """

    complainant: MemberId
    dealer: MemberId
    part: Part
    leaf: bytes
    secret: bytes = field(repr=False)
    signature: bytes


@dataclass(frozen=True, slots=True)
class Openings:
    """Phase 2, server to a member that complained: one opening for each of its complaints, in their order."""

    openings: tuple[Opening, ...]


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """Phase 2, member to server: the signed SHA-256 of the masked vector's packed bytes (`secure_agg.packing`).

    `length` is the number of values. The vector itself travels separately, packed.
    """

    member: MemberId
    digest: bytes
    length: int
    signature: bytes


@dataclass(frozen=True, slots=True)
class Survivors:
    """Phase 2, server to all of U3: who they are."""

    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Phase 3, member to server: a signature over (session, U3, model digest, context digest)."""

    member: MemberId
    signature: bytes


@dataclass(frozen=True, slots=True)
class Confirmations:
    """Phase 3, server to all of U4: the signatures that arrived. This is also the request to unmask."""

    confirmations: tuple[Confirmation, ...]


@dataclass(frozen=True, slots=True)
class RevealedShare:
    """One share (33 bytes) of one dealer's secret."""

    dealer: MemberId
    share: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Unmasking:
    """Phase 4, member to server: a seed share for each dealer in U3, a root share for each in U2 but not in U3."""

    member: MemberId
    seed_shares: tuple[RevealedShare, ...]
    root_shares: tuple[RevealedShare, ...]
