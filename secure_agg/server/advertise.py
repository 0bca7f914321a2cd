"""Phase 0, advertise: collect keys from the cohort U0; the members whose keys arrive form U1 and the roster.

Guarantees: the roster holds only advertisements that an honest member accepts: each is signed for this context by the
member that it names, with usable keys, and no key, nonce or certificate occurs twice. The later sender of a copy is
dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from secure_agg.context import ContextInvalid, RoundContext
from secure_agg.identity import IdentityInvalid, KeyOf, MemberId, VerifyIdentity
from secure_agg.messages import Advertisement, Roster
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.sealing import KeyInvalid, PublicKey
from secure_agg.server.collecting import Collecting
from secure_agg.server.share import CollectingDealings
from secure_agg.session import (
    KEYS_BYTES,
    NONCE_BYTES,
    Session,
    advertisement_statement,
    sealing_key_of,
    seed_key_of,
)

__all__ = ["CollectingAdvertisements", "open_attempt"]


def open_attempt(
    context: RoundContext,
    cohort: Collection[MemberId],
    verify: VerifyIdentity,
    *,
    key_of: KeyOf | None = None,
) -> CollectingAdvertisements:
    """Starts collecting from U0.

    A driver that sends `roster_by_digest` of the roster must answer requests with the session's certificates and keys.

    Args:
        context: the attempt.
        cohort: U0.
        verify: checks a certificate and a signature.
        key_of: returns a certificate's public key, so that a shared key is detected, as in the member's `advertise`.

    Raises:
        ContextInvalid: the cohort does not consist of `context.cohort` distinct members.
    """
    members = frozenset(cohort)
    if len(members) != len(cohort) or len(members) != context.cohort:
        raise ContextInvalid(f"the context requires {context.cohort} members, got {len(members)} distinct ones")
    return CollectingAdvertisements(context, verify, members, {}, {}, (), {}, {}, key_of)


@dataclass(frozen=True)
class CollectingAdvertisements(Collecting[Advertisement]):
    """Waiting for keys. `holders` has whose certificate, and with `key_of` whose certificate's key, has a digest;
    `publics` has whose public key or nonce something is. A member that was dropped holds nothing any longer.
    """

    holders: Mapping[bytes, MemberId]
    publics: Mapping[bytes, MemberId]
    key_of: KeyOf | None

    phase = Phase.ADVERTISE
    withdraws_on_drop = True

    @property
    def least(self) -> int:
        return self.context.min_roster

    def receive(self, member: MemberId, message: object) -> CollectingAdvertisements | Dropped:
        """Checks an advertisement and adds it, or says why not."""
        fresh = self._screen(member, message, Advertisement)
        if not isinstance(fresh, Advertisement):
            return fresh
        fault = self._fault(member, fresh)
        if fault is not None:
            return fault
        holders = {**self.holders, **dict.fromkeys(self._holders_of(fresh), member)}
        publics = {**self.publics, **dict.fromkeys(_publics_of(fresh), member)}
        return replace(self._accept(member, fresh), holders=holders, publics=publics)

    def close(self) -> tuple[CollectingDealings, dict[MemberId, Roster], tuple[Dropped, ...]] | Abandoned:
        """Fixes U1 and returns the roster for its members."""
        late = self._late()
        abandoned = self._abandoned(late)
        if abandoned is not None:
            return abandoned
        session = Session.of(self.context, self.answers.values())
        roster = Roster(tuple(self.answers[member] for member in session.members))
        seated, small = _by_size_of_group(session)
        late = (*late, *small)
        state = CollectingDealings(
            self.context,
            self.verify,
            frozenset(seated),
            {},
            self._lost_with(late),
            (*self.earlier, self.answers),
            session,
        )
        return state, dict.fromkeys(seated, roster), late

    def _fault(self, member: MemberId, message: Advertisement) -> Dropped | None:
        if message.member != member or not member:
            return Dropped(member, Reason.MESSAGE_MALFORMED, "it names another member")
        if len(message.keys) != KEYS_BYTES or len(message.nonce) != NONCE_BYTES:
            detail = f"two public keys have {KEYS_BYTES} bytes, a nonce has {NONCE_BYTES}"
            return Dropped(member, Reason.MESSAGE_MALFORMED, detail)
        try:
            PublicKey(sealing_key_of(message.keys))
            PublicKey(seed_key_of(message.keys))
        except KeyInvalid as error:
            return Dropped(member, Reason.ADVERTISEMENT_KEY_INVALID, str(error))
        try:
            statement = advertisement_statement(self.context, message)
            named = self.verify(message.certificate, statement, message.signature)
            holders = self._holders_of(message)
        except IdentityInvalid as error:
            return Dropped(member, Reason.ADVERTISEMENT_SIGNATURE_INVALID, str(error))
        if named != member:
            return Dropped(member, Reason.ADVERTISEMENT_IDENTITY_MISMATCH, f"the certificate names {named}")
        if any(self.holders.get(digest) in self.answers for digest in holders):
            return Dropped(member, Reason.ADVERTISEMENT_CERTIFICATE_DUPLICATE)
        publics = _publics_of(message)
        if len(set(publics)) != len(publics) or any(self.publics.get(each) in self.answers for each in publics):
            return Dropped(member, Reason.ADVERTISEMENT_KEY_DUPLICATE)
        return None

    def _holders_of(self, message: Advertisement) -> frozenset[bytes]:
        holders = {hashlib.sha256(message.certificate).digest()}
        if self.key_of is not None:
            holders.add(hashlib.sha256(b"key" + self.key_of(message.certificate)).digest())
        return frozenset(holders)


def _publics_of(message: Advertisement) -> tuple[bytes, bytes, bytes]:
    return sealing_key_of(message.keys), seed_key_of(message.keys), message.nonce


def _by_size_of_group(session: Session) -> tuple[tuple[MemberId, ...], tuple[Dropped, ...]]:
    """Returns who continues, and who is lost because the draw left its group fewer members than its sum needs. The
    split's numbers ensure that enough groups are whole for every valid roster.
    """
    least = session.context.threshold
    if session.context.grouped is None:
        return session.members, ()
    small = {member for group in session.groups if len(group) < least for member in group}
    return tuple(member for member in session.members if member not in small), tuple(
        Dropped(member, Reason.GROUP_TOO_SMALL, f"the roster leaves its group fewer than {least} members")
        for member in sorted(small)
    )
