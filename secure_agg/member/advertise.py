"""Phase 0, advertise: fresh keys out, a checked roster in.

Guarantees: keys and nonce are fresh for this call and meet one roster only. A roster that is accepted holds
at least t (sparse: as many as its promise needs) and at most n entries, all distinct in member, key, nonce and
certificate, each signed for exactly this context by the member it names, and this member's own entry byte for byte.
From then on the session id stands; in a split
cohort this member's group does too, which it has drawn itself and which holds at least t members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from secure_agg.agreement import KEY_BYTES, KeyInvalid, SecretKey
from secure_agg.certificates import certificates_by_digest, unknown, whole
from secure_agg.context import Graph, RoundContext
from secure_agg.identity import CertificateOf, Identity, IdentityInvalid, KeyOf, VerifyIdentity
from secure_agg.member.seat import Seat
from secure_agg.member.share import AwaitingDealings, deal_shares
from secure_agg.messages import Advertisement, Dealing, DigestRoster, Roster
from secure_agg.randomness import RandomSource
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once
from secure_agg.session import NONCE_BYTES, Session, advertisement_statement

__all__ = ["AwaitingRoster", "advertise"]


def advertise(
    context: RoundContext,
    identity: Identity,
    verify: VerifyIdentity,
    random: RandomSource,
    *,
    key_of: KeyOf | None = None,
    certificate_of: CertificateOf | None = None,
) -> tuple[AwaitingRoster, Advertisement]:
    """Open an attempt: two fresh X25519 key pairs and a nonce, signed with the context.

    key_of: gives a certificate's public key, so that two certificates over one key are refused. Without it
    only equal certificates are seen here, and `verify` or the caller must see to the rest. certificate_of: gives a
    known certificate for its digest, for rosters by digest. A caller whose certificate the server knows may send
    `by_digest` of the message instead.
    """
    # Bonawitz, round 0: generate (c_PK, c_SK) for sealing and (s_PK, s_SK) for masking, sign both public
    # keys.
    masking, sealing = SecretKey(random.bytes(KEY_BYTES)), SecretKey(random.bytes(KEY_BYTES))
    unsigned = Advertisement(
        member=identity.member,
        certificate=identity.certificate,
        masking_key=masking.public,
        sealing_key=sealing.public,
        nonce=random.bytes(NONCE_BYTES),
        signature=b"",
    )
    signature = identity.sign(advertisement_statement(context, unsigned))
    advertisement = dataclasses.replace(unsigned, signature=signature)
    state = AwaitingRoster(
        context, identity, verify, key_of, random, advertisement, masking, sealing, _certificate_of=certificate_of
    )
    return state, advertisement


@dataclass(frozen=True, slots=True)
class AwaitingRoster:
    """Keys are advertised; the roster has not arrived."""

    context: RoundContext
    _identity: Identity = field(repr=False)
    _verify: VerifyIdentity = field(repr=False)
    _key_of: KeyOf | None = field(repr=False)
    _random: RandomSource = field(repr=False)
    advertisement: Advertisement
    _masking: SecretKey
    _sealing: SecretKey
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_ROSTER), repr=False)
    _certificate_of: CertificateOf | None = field(default=None, repr=False)

    def missing(self, roster: DigestRoster) -> tuple[bytes, ...]:
        """The digests of the certificates that must be handed to `on_roster` with this roster. Raises Refusal for a
        roster of a size that would be refused, before anything is fetched for it.
        """
        self._once.check()
        self._check_size(len(roster.advertisements))
        _check_digests(roster)
        return unknown(roster, self._own_certificate(), self._certificate_of)

    def on_roster(
        self, roster: Roster | DigestRoster, certificates: Iterable[bytes] = ()
    ) -> tuple[AwaitingDealings, Dealing]:
        """Check the roster, deal shares of both secrets to all neighbours on it. Raises Refusal.

        certificates: those that `missing` named, in any order; others are ignored.
        """
        self._once.check()
        self._check_size(len(roster.advertisements))
        if isinstance(roster, DigestRoster):
            _check_digests(roster)
            roster = self._whole(roster, certificates)
        self._check_roster(roster)
        session = Session.of(self.context, roster.advertisements)
        self._check_group(session)
        if self.context.graph is not Graph.COMPLETE:
            # The keys of members that this one never meets are their neighbours' to check: two agreements each add up.
            for neighbour in session.neighbours(self._identity.member):
                self._check_keys(session.entries[neighbour])
        seat = Seat(session, self._identity, self._verify)
        self._once.spend()
        return deal_shares(seat, self._masking, self._sealing, self._random)

    def forget(self) -> None:
        """Left here: both keys are overwritten, and nothing is answered any more."""
        self._once.close()
        self._masking.erase()
        self._sealing.erase()

    def _check_size(self, size: int) -> None:
        least, most = self.context.min_roster, self.context.cohort
        if size < least:
            raise Refusal(Reason.ROSTER_TOO_SMALL, detail=f"{size} members, at least {least} are needed")
        if size > most:
            raise Refusal(Reason.ROSTER_TOO_LARGE, detail=f"{size} members in a cohort of {most}")

    def _check_group(self, session: Session) -> None:
        # The member draws the groups itself, so the coordinator cannot have chosen this one; it may have left too few.
        if self.context.grouped is not None:
            size = len(session.receivers(self._identity.member))
            least = self.context.threshold
            if size < least:
                detail = f"the roster leaves this member's group {size} members, its sum needs {least}"
                raise Refusal(Reason.GROUP_TOO_SMALL, detail=detail)

    def _own_certificate(self) -> dict[bytes, bytes]:
        return certificates_by_digest([self.advertisement.certificate])

    def _whole(self, roster: DigestRoster, certificates: Iterable[bytes]) -> Roster:
        known = self._own_certificate() | certificates_by_digest(certificates)
        entries = []
        for entry in roster.advertisements:
            found = whole(entry, known, self._certificate_of)
            if found is None:
                digest = entry.certificate_digest.hex()
                detail = f"there is no certificate with the digest {digest}; ask for those that `missing` names"
                raise Refusal(Reason.ROSTER_CERTIFICATE_MISSING, entry.member, detail)
            entries.append(found)
        return Roster(tuple(entries))

    def _check_roster(self, roster: Roster) -> None:
        entries = roster.advertisements
        _check_distinct(entries)
        own = [entry for entry in entries if entry.member == self._identity.member]
        if not own:
            raise Refusal(Reason.ROSTER_OWN_ENTRY_MISSING)
        if own[0] != self.advertisement:
            raise Refusal(Reason.ROSTER_OWN_ENTRY_ALTERED, self._identity.member)
        for entry in entries:
            self._check_entry(entry)
        if self._key_of is not None:
            _check_certificate_keys(entries, self._key_of)

    def _check_entry(self, entry: Advertisement) -> None:
        if not entry.member or len(entry.nonce) != NONCE_BYTES:
            raise Refusal(Reason.ROSTER_MALFORMED, entry.member)
        if self.context.graph is Graph.COMPLETE:
            self._check_keys(entry)
        # The statement holds this member's own context digest: a peer that was shown another context fails
        # here.
        try:
            named = self._verify(entry.certificate, advertisement_statement(self.context, entry), entry.signature)
        except IdentityInvalid as error:
            raise Refusal(Reason.ROSTER_SIGNATURE_INVALID, entry.member, str(error)) from None
        if named != entry.member:
            raise Refusal(Reason.ROSTER_IDENTITY_MISMATCH, entry.member, f"the certificate names {named}")

    def _check_keys(self, entry: Advertisement) -> None:
        # The agreements that sealing and masking need are the test: a point of small order gives zero with any key.
        try:
            self._masking.agreed(entry.masking_key)
            self._sealing.agreed(entry.sealing_key)
        except KeyInvalid as error:
            raise Refusal(Reason.ROSTER_KEY_INVALID, entry.member, str(error)) from None


def _check_digests(roster: DigestRoster) -> None:
    # Before anything is fetched for them, or said about them.
    for entry in roster.advertisements:
        if len(entry.certificate_digest) != 32:
            raise Refusal(Reason.ROSTER_MALFORMED, entry.member, "the digest of a certificate has 32 bytes")


def _check_distinct(entries: tuple[Advertisement, ...]) -> None:
    members: set[str] = set()
    publics: set[bytes] = set()
    certificates: set[bytes] = set()
    for entry in entries:
        if entry.member in members:
            raise Refusal(Reason.ROSTER_MEMBER_DUPLICATE, entry.member)
        members.add(entry.member)
        # One set for all: a masking key that reappears as somebody's sealing key or nonce is a copy as well.
        for public in (entry.masking_key, entry.sealing_key, entry.nonce):
            if public in publics:
                raise Refusal(Reason.ROSTER_KEY_DUPLICATE, entry.member)
            publics.add(public)
        if entry.certificate in certificates:
            raise Refusal(Reason.ROSTER_CERTIFICATE_DUPLICATE, entry.member)
        certificates.add(entry.certificate)


def _check_certificate_keys(entries: tuple[Advertisement, ...], key_of: KeyOf) -> None:
    # Only certificates that `verify` has accepted are given to `key_of`.
    keys: set[bytes] = set()
    for entry in entries:
        try:
            key = key_of(entry.certificate)
        except IdentityInvalid as error:
            raise Refusal(Reason.ROSTER_SIGNATURE_INVALID, entry.member, str(error)) from None
        if key in keys:
            raise Refusal(Reason.ROSTER_CERTIFICATE_DUPLICATE, entry.member)
        keys.add(key)
