"""Who is at fault when a receiver cannot open what was dealt to it: complaints, openings and evidence.

A receiver signs a complaint about one secret that a dealer sealed for it. The dealer opens exactly that secret, which
its signed commitment fixes, and signs the opening. So anybody can see what was dealt: good shares or a good seed, with
which the receiver continues, or a contradiction between two statements of the dealer, which is `Evidence`.

Guarantees: `convicts` is true only if the dealer signed both a dealing and an opening that contradict each other. An
honest dealer never does that, whatever receivers and coordinator say, unless its key is used by somebody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from secure_agg import merkle
from secure_agg.identity import IdentityInvalid, MemberId, VerifyIdentity
from secure_agg.messages import DealtShare, Opening, Part, ReceivedDealing
from secure_agg.sealing import SYMMETRIC_KEY_BYTES, SealBroken, unlock
from secure_agg.session import Names, SessionName
from secure_agg.shamir import SHARE_BYTES, ShareInvalid, read_share

__all__ = ["BadlyDealt", "Evidence", "check_opened", "convicts", "seed_dealt", "shares_dealt", "statement_of"]


class BadlyDealt(ValueError):
    """What a dealer dealt to a receiver is not what it committed to. The text says what is wrong."""


def shares_dealt(names: Names, dealer: MemberId, share: DealtShare, key: bytes) -> tuple[bytes, bytes]:
    """Unlocks a receiver's shares (root, self-mask seed), 33 bytes each, and checks them against their commitments.

    Args:
        names: the session.
        dealer: who dealt.
        share: what it signed for the receiver.
        key: the key of the locked shares.

    Raises:
        BadlyDealt: the key or a share is not what the dealer committed to.
    """
    receiver = share.receiver
    if len(key) != SYMMETRIC_KEY_BYTES or names.share_key_commitment(dealer, receiver, key) != share.key_commitment:
        raise BadlyDealt("the key of the shares is not the one it committed to")
    try:
        pair = unlock(key, names.shares_header(dealer, receiver), share.locked_shares)
    except SealBroken as error:
        raise BadlyDealt(str(error)) from None
    of_root, of_seed = pair[:SHARE_BYTES], pair[SHARE_BYTES:]
    if (
        names.root_share_commitment(dealer, receiver, of_root) != share.root_commitment
        or names.seed_share_commitment(dealer, receiver, of_seed) != share.seed_commitment
    ):
        raise BadlyDealt("a share is not the one it committed to")
    try:
        read_share(of_root)
        read_share(of_seed)
    except ShareInvalid as error:
        raise BadlyDealt(str(error)) from None
    return of_root, of_seed


def seed_dealt(names: Names, dealer: MemberId, share: DealtShare, seed: bytes) -> bytes:
    """Checks a pair's seed against its chooser's commitment, and returns it.

    Raises:
        BadlyDealt: it is another one.
    """
    committed = share.pair_seed_commitment
    if len(seed) != SYMMETRIC_KEY_BYTES or names.pair_seed_commitment(dealer, share.receiver, seed) != committed:
        raise BadlyDealt("the pair's seed is not the one it committed to")
    return seed


def check_opened(names: Names, share: DealtShare, opening: Opening) -> None:
    """Checks what a dealer opened against what it signed for the receiver.

    Raises:
        BadlyDealt: they contradict each other.
    """
    check = shares_dealt if opening.part is Part.SHARES else seed_dealt
    check(names, opening.dealer, share, opening.secret)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that anybody with the dealer's certificate needs to convict it.

    Args:
        session: the session id, 32 bytes.
        dealing: what the dealer signed for the receiver, with the path to the signed root.
        index: the receiver's place among the dealer's receivers.
        count: the number of those.
        opening: what the dealer opened and signed.
    """

    session: bytes
    dealing: ReceivedDealing
    index: int
    count: int
    opening: Opening


def convicts(evidence: Evidence, certificate: bytes, verify: VerifyIdentity) -> bool:
    """Whether the evidence proves that the certificate's holder dealt a secret or shares that it had not committed to.

    Args:
        evidence: the dealer's two statements. Nothing about it is trusted.
        certificate: the dealer's.
        verify: checks a certificate and a signature.
    """
    names, dealing, opening = SessionName(evidence.session), evidence.dealing, evidence.opening
    dealer, share = dealing.dealer, dealing.share
    leaf = names.dealing_leaf(dealer, share)
    root = merkle.root_from_path(leaf, evidence.index, evidence.count, dealing.path)
    if (
        root is None
        or (opening.dealer, opening.complainant, opening.leaf) != (dealer, share.receiver, leaf)
        or dealer == share.receiver
    ):
        return False
    dealt = names.dealing_statement(dealer, dealing.seed_commitment, root)
    try:
        signers = {
            verify(certificate, dealt, dealing.signature),
            verify(certificate, statement_of(names, opening), opening.signature),
        }
    except IdentityInvalid:
        return False
    if signers != {dealer}:
        return False
    try:
        check_opened(names, share, opening)
    except BadlyDealt:
        return True
    return False


def statement_of(names: Names, opening: Opening) -> bytes:
    """What the dealer signs."""
    return names.opening_statement(opening.complainant, opening.dealer, opening.part, opening.leaf, opening.secret)
