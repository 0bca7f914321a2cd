"""Phase 0, advertise: send fresh keys, receive and check the roster.

Guarantees: keys and nonce are fresh for this call and are used with only one roster. An accepted roster holds at least
`min_roster` entries (t on the complete graph) and at most n. They are distinct in member, key, nonce and certificate,
each is signed for exactly this context by the member that it names, and this member's own entry is unchanged. The
session id is fixed from then on. With groups, so is this member's group, which it has drawn itself and which has at
least t members.
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
    """Opens an attempt: makes two fresh X25519 key pairs and a nonce, and signs them with the context.

    A caller whose certificate the server knows may send `by_digest` of the message instead.

    Args:
        context: the attempt.
        identity: this member's.
        verify: checks a certificate and a signature.
        random: source of the keys and the nonce.
        key_of: returns a certificate's public key, so that two certificates for one key are refused. Without it, only
            equal certificates are detected here, and `verify` or the caller must prevent the rest.
        certificate_of: returns a known certificate for its digest, for rosters by digest.
    """
    # Bonawitz, round 0: generate (c_PK, c_SK) for sealing and (s_PK, s_SK) for masking, sign both public keys.
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
    """Keys are advertised; waiting for the roster."""

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
        """The digests of the certificates that `on_roster` needs with this roster.

        Raises:
            Refusal: the roster's size or a digest is invalid, so nothing should be fetched for it.
        """
        self._once.check()
        self._check_size(len(roster.advertisements))
        _check_digests(roster)
        return unknown(roster, self._own_certificate(), self._certificate_of)

    def on_roster(
        self, roster: Roster | DigestRoster, certificates: Iterable[bytes] = ()
    ) -> tuple[AwaitingDealings, Dealing]:
        """Checks the roster and deals shares of both secrets to all neighbours in it.

        Args:
            roster: U1.
            certificates: those that `missing` named, in any order; others are ignored.

        Raises:
            Refusal: the roster fails a check.
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
            # Only neighbours' keys are checked, because each costs two agreements. Other keys are checked by their own
            # neighbours.
            for neighbour in session.neighbours(self._identity.member):
                self._check_keys(session.entries[neighbour])
        seat = Seat(session, self._identity, self._verify)
        self._once.spend()
        return deal_shares(seat, self._masking, self._sealing, self._random)

    def forget(self) -> None:
        """Ends the attempt: both keys are overwritten, and nothing is answered from now on."""
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
        # The member draws the groups itself, so the coordinator cannot choose this one, but the roster may leave it too
        # few members.
        if self.context.grouped is not None:
            size = len(session.receivers(self._identity.member))
            least = self.context.threshold
            if size < least:
                detail = f"the roster leaves this member's group {size} members, but its sum needs {least}"
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
                detail = f"there is no certificate with the digest {digest}; fetch those that `missing` names"
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
        # The statement holds this member's own context digest, so a peer that was shown another context fails here.
        try:
            named = self._verify(entry.certificate, advertisement_statement(self.context, entry), entry.signature)
        except IdentityInvalid as error:
            raise Refusal(Reason.ROSTER_SIGNATURE_INVALID, entry.member, str(error)) from None
        if named != entry.member:
            raise Refusal(Reason.ROSTER_IDENTITY_MISMATCH, entry.member, f"the certificate names {named}")

    def _check_keys(self, entry: Advertisement) -> None:
        # The agreements needed for sealing and masking are the test: a point of small order gives zero with any key.
        try:
            self._masking.agreed(entry.masking_key)
            self._sealing.agreed(entry.sealing_key)
        except KeyInvalid as error:
            raise Refusal(Reason.ROSTER_KEY_INVALID, entry.member, str(error)) from None


def _check_digests(roster: DigestRoster) -> None:
    # Checked before anything is fetched for them or reported about them.
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
        # One set for all, because a masking key that reappears as a sealing key or nonce is a copy, too.
        for public in (entry.masking_key, entry.sealing_key, entry.nonce):
            if public in publics:
                raise Refusal(Reason.ROSTER_KEY_DUPLICATE, entry.member)
            publics.add(public)
        if entry.certificate in certificates:
            raise Refusal(Reason.ROSTER_CERTIFICATE_DUPLICATE, entry.member)
        certificates.add(entry.certificate)


def _check_certificate_keys(entries: tuple[Advertisement, ...], key_of: KeyOf) -> None:
    # `key_of` is only called with certificates that `verify` has accepted.
    keys: set[bytes] = set()
    for entry in entries:
        try:
            key = key_of(entry.certificate)
        except IdentityInvalid as error:
            raise Refusal(Reason.ROSTER_SIGNATURE_INVALID, entry.member, str(error)) from None
        if key in keys:
            raise Refusal(Reason.ROSTER_CERTIFICATE_DUPLICATE, entry.member)
        keys.add(key)
