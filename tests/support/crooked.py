"""Dealers that lie: they deal something else than the protocol says, and sign it.

The signature of a dealing covers everything that is dealt. So what a dealer sends wrongly, it has signed, and what
arrives differently is the coordinator's doing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from secure_agg import Complaint, Dealing, DealtShare, Opening, Part, merkle
from secure_agg.sealing import PublicKey, SecretKey, lock, unlock
from secure_agg.session import Session, sealing_key_of, seed_key, seed_key_of

__all__ = ["complaint_by", "opened", "opened_by", "resealed", "reseeded", "resigned", "seed_of_pair"]

_KEY = b"k" * 32


def resigned(
    session: Session, identity: Any, dealing: Dealing, receiver: str, change: Callable[[DealtShare], DealtShare]
) -> Dealing:
    """A dealing with another entry for `receiver`, signed again by its dealer."""
    shares = tuple(change(share) if share.receiver == receiver else share for share in dealing.shares)
    root = merkle.root_of(session.dealing_leaves(dealing.dealer, shares))
    statement = session.dealing_statement(dealing.dealer, dealing.seed_commitment, root)
    return dataclasses.replace(dealing, shares=shares, signature=identity.sign(statement))


def opened(session: Session, dealer: str, share: DealtShare, sealing: SecretKey) -> bytes:
    """The two shares dealt, opened with the receiver's secret sealing key."""
    key = sealing.open(session.share_key_info(dealer, share.receiver), share.sealed_key)
    return unlock(key, session.shares_header(dealer, share.receiver), share.locked_shares)


def resealed(session: Session, dealer: str, share: DealtShare, pair: bytes, *, commit: bool = False) -> DealtShare:
    """An entry that holds another pair of shares, under another key. With `commit`, it commits to these shares."""
    to = share.receiver
    public = PublicKey(sealing_key_of(session.keys[to]))
    changed = dataclasses.replace(
        share,
        sealed_key=public.seal(session.share_key_info(dealer, to), _KEY),
        locked_shares=lock(_KEY, session.shares_header(dealer, to), pair),
        key_commitment=session.share_key_commitment(dealer, to, _KEY),
    )
    if not commit:
        return changed
    return dataclasses.replace(
        changed,
        root_commitment=session.root_share_commitment(dealer, to, pair[:33]),
        seed_commitment=session.seed_share_commitment(dealer, to, pair[33:]),
    )


def reseeded(session: Session, chooser: str, share: DealtShare, seed: bytes, *, commit: bool = False) -> DealtShare:
    """An entry that seals another seed for the pair. With `commit`, it commits to this seed."""
    to = share.receiver
    public = PublicKey(seed_key_of(session.keys[to]))
    changed = dataclasses.replace(share, sealed_pair_seed=public.seal(session.pair_seed_info(chooser, to), seed))
    if not commit:
        return changed
    return dataclasses.replace(changed, pair_seed_commitment=session.pair_seed_commitment(chooser, to, seed))


def opened_by(session: Session, identity: Any, complaint: Complaint, secret: bytes) -> Opening:
    """A dealer's answer to a complaint, signed, whatever it opens."""
    about = (complaint.complainant, complaint.dealer, complaint.part, complaint.leaf)
    return Opening(*about, secret, identity.sign(session.opening_statement(*about, secret)))


def complaint_by(session: Session, identity: Any, dealer: str, part: Part, leaf: bytes) -> Complaint:
    """A receiver's complaint, signed, whether it has reason to complain or not."""
    statement = session.complaint_statement(identity.member, dealer, part, leaf)
    return Complaint(identity.member, dealer, part, leaf, identity.sign(statement))


def seed_of_pair(session: Session, root: bytes, owner: str, other: str, dealings: Mapping[str, Dealing]) -> bytes:
    """The seed of the pair of `owner` and `other`, computed from the root of `owner` and the traffic."""
    if session.chooses(owner, other):
        return session.pair_seed(owner, other, root)
    share = next(each for each in dealings[other].shares if each.receiver == owner)
    return seed_key(session.context, owner, root).open(session.pair_seed_info(other, owner), share.sealed_pair_seed)
