"""All messages of the protocol, as plain frozen records of text, numbers, bytes and tuples.

Guarantees: a message has no behaviour and holds no secret of its sender. Two messages are equal only if every byte is,
so repeats can be recognised. Nothing is checked here: the phase that receives a message checks it.

Lists are in the order of member names, sorted as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from secure_agg.identity import MemberId

__all__ = [
    "Advertisement",
    "Confirmation",
    "Confirmations",
    "Dealing",
    "DealtShare",
    "DigestAdvertisement",
    "DigestRoster",
    "MaskedInput",
    "ReceivedDealing",
    "ReceivedDealings",
    "RevealedShare",
    "Roster",
    "Survivors",
    "Unmasking",
]


@dataclass(frozen=True, slots=True)
class Advertisement:
    """Phase 0, member to server: two fresh X25519 keys and a nonce, 32 bytes each, signed."""

    member: MemberId
    certificate: bytes
    masking_key: bytes
    sealing_key: bytes
    nonce: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Roster:
    """Phase 0, server to all of U1: every advertisement, the same for every member."""

    advertisements: tuple[Advertisement, ...]


@dataclass(frozen=True, slots=True)
class DigestAdvertisement:
    """An `Advertisement` with the SHA-256 of its certificate (32 bytes) instead of the certificate. The signature is
    the same, because it covers the digest.
    """

    member: MemberId
    certificate_digest: bytes
    masking_key: bytes
    sealing_key: bytes
    nonce: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class DigestRoster:
    """Phase 0, server to all of U1: a `Roster` for members that fetch the certificates that they do not have."""

    advertisements: tuple[DigestAdvertisement, ...]


@dataclass(frozen=True, slots=True)
class DealtShare:
    """What one dealer made for one receiver.

    Args:
        receiver: its name.
        sealed: the two shares, encrypted under the pair's sealing key, 82 bytes. Empty for the dealer's own pair, which
            stays with it.
        masking_commitment: commitment to the share of the masking secret key, 32 bytes.
        seed_commitment: commitment to the share of the seed, 32 bytes.
    """

    receiver: MemberId
    sealed: bytes
    masking_commitment: bytes
    seed_commitment: bytes


@dataclass(frozen=True, slots=True)
class Dealing:
    """Phase 1, member to server: one entry for each receiver.

    Args:
        dealer: its name.
        seed_commitment: commitment to the self-mask seed, 32 bytes.
        shares: in the order of receivers; on the complete graph they include the dealer itself.
        signature: over the seed commitment and the root of the hash tree of all share commitments.
    """

    dealer: MemberId
    seed_commitment: bytes
    shares: tuple[DealtShare, ...]
    signature: bytes


@dataclass(frozen=True, slots=True)
class ReceivedDealing:
    """What one dealer dealt to the receiver of this message, with everything needed to check the dealer's signature.

    `path` holds the siblings (32 bytes each) that lead from this receiver's commitments to the signed root.
    """

    dealer: MemberId
    sealed: bytes
    masking_share_commitment: bytes
    seed_share_commitment: bytes
    seed_commitment: bytes
    path: tuple[bytes, ...]
    signature: bytes


@dataclass(frozen=True, slots=True)
class ReceivedDealings:
    """Phase 1, server to a member of U2: what the other members of U2 dealt to it."""

    dealings: tuple[ReceivedDealing, ...]


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
    """Phase 4, member to server: a seed share for each dealer in U3, a key share for each in U2 but not in U3."""

    member: MemberId
    seed_shares: tuple[RevealedShare, ...]
    masking_shares: tuple[RevealedShare, ...]
