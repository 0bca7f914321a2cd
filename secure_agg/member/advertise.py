"""Phase 0, advertise: send fresh keys, receive and check the roster.

Guarantees: root, keys and nonce are fresh for this call and are used with only one roster. An accepted roster holds at
least `min_roster` entries (t on the complete graph) and at most n. They are distinct in member, key, nonce and
certificate, each is signed for exactly this context by the member that it names, and this member's own entry is
unchanged. The session id is fixed from then on. With groups, so is this member's group, which it has drawn itself and
which has at least t members.

A roster by digest goes through the same checks. Of the keys, a member looks only at those that it seals to: its
neighbours'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from secure_agg.certificates import by_digest, each_by_digest, known, roster_by_digest
from secure_agg.context import RoundContext
from secure_agg.identity import CertificateOf, Identity, IdentityInvalid, KeyOf, MemberId, VerifyIdentity
from secure_agg.member.seat import Seat
from secure_agg.member.share import AwaitingDealings, PeerKeys, deal_shares
from secure_agg.messages import Advertisement, Dealing, DigestAdvertisement, DigestRoster, Roster
from secure_agg.randomness import RandomSource
from secure_agg.reasons import Reason, Refusal
from secure_agg.sealing import SECRET_KEY_BYTES, KeyInvalid, PublicKey, SecretKey
from secure_agg.secret import Once, Secret
from secure_agg.session import (
    KEYS_BYTES,
    NONCE_BYTES,
    Session,
    advertisement_statement,
    sealing_key_of,
    seed_key,
    seed_key_of,
)
from secure_agg.shamir import SECRET_BYTES

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
    """Opens an attempt: makes a root, two fresh hybrid key pairs and a nonce, and signs the public keys and the nonce
    with the context.

    Args:
        context: the attempt.
        identity: this member's.
        verify: checks a certificate and a signature.
        random: source of the root, the sealing key and the nonce.
        key_of: returns a certificate's public key, so that two certificates for one key are refused. Without it, only
            equal certificates are detected here, and `verify` or the caller must prevent the rest.
        certificate_of: returns a known certificate for its digest, for rosters by digest.
    """
    # Bonawitz, round 0: generate (c_PK, c_SK) for sealing and, in place of (s_PK, s_SK), the seed key. It follows from
    # the root, which is going to be shared. The sealing key must not follow from the root, which may become known.
    sealing, root = SecretKey(random.bytes(SECRET_KEY_BYTES)), Secret(random.bytes(SECRET_BYTES))
    seeds = seed_key(context, identity.member, root.reveal())
    unsigned = Advertisement(
        member=identity.member,
        certificate=identity.certificate,
        keys=sealing.public + seeds.public,
        nonce=random.bytes(NONCE_BYTES),
        signature=b"",
    )
    signature = identity.sign(advertisement_statement(context, unsigned))
    advertisement = dataclasses.replace(unsigned, signature=signature)
    state = AwaitingRoster(
        context, identity, verify, key_of, random, advertisement, root, seeds, sealing, _certificate_of=certificate_of
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
    _root: Secret
    _seeds: SecretKey
    _sealing: SecretKey
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_ROSTER), repr=False)
    _certificate_of: CertificateOf | None = field(default=None, repr=False)

    def missing(self, roster: DigestRoster) -> tuple[bytes, ...]:
        """The digests of the certificates and of the neighbours' keys that `on_roster` needs with this roster.

        Raises:
            Refusal: the roster's size or an entry is invalid, so nothing should be fetched for it.
        """
        self._once.check()
        self._check_entries(roster.advertisements)
        own = each_by_digest([self.advertisement.certificate])
        certificates = (entry.certificate_digest for entry in roster.advertisements)
        lacking = [each for each in certificates if known(each, own, self._certificate_of) is None]
        session = Session.by_digest(self.context, roster.advertisements, {}, {})
        neighbours = session.neighbours(self._identity.member)
        return (*lacking, *(session.entries[neighbour].keys_digest for neighbour in neighbours))

    def on_roster(
        self, roster: Roster | DigestRoster, fetched: Iterable[bytes] = ()
    ) -> tuple[AwaitingDealings, Dealing]:
        """Checks the roster and deals shares of both secrets, and seeds of its pairs, to all neighbours in it.

        Args:
            roster: U1.
            fetched: the certificates and keys that `missing` named, in any order; others are ignored.

        Raises:
            Refusal: the roster fails a check.
        """
        self._once.check()
        if isinstance(roster, Roster):
            # Before anything of a roster that may be too large is hashed.
            self._check_size(len(roster.advertisements))
            whole, roster = roster, roster_by_digest(roster)
            found = {}
            for entry, brief in zip(whole.advertisements, roster.advertisements, strict=True):
                found[brief.certificate_digest], found[brief.keys_digest] = entry.certificate, entry.keys
        else:
            found = each_by_digest([self.advertisement.certificate, self.advertisement.keys, *fetched])
        self._check_entries(roster.advertisements)
        certificates = self._certificates(roster, found)
        self._check_signatures(roster, certificates)
        keys = {entry.member: found[entry.keys_digest] for entry in roster.advertisements if entry.keys_digest in found}
        session = Session.by_digest(self.context, roster.advertisements, certificates, keys)
        self._check_group(session)
        peers = self._peers(session)
        seat = Seat(session, self._identity, self._verify)
        self._once.spend()
        return deal_shares(seat, self._root, self._seeds, self._sealing, peers, self._random)

    def forget(self) -> None:
        """Ends the attempt: root and keys are overwritten, and nothing is answered from now on."""
        self._once.close()
        for secret in (self._root, self._seeds, self._sealing):
            secret.erase()

    def _check_size(self, size: int) -> None:
        least, most = self.context.min_roster, self.context.cohort
        if size < least:
            raise Refusal(Reason.ROSTER_TOO_SMALL, detail=f"{size} members, at least {least} are needed")
        if size > most:
            raise Refusal(Reason.ROSTER_TOO_LARGE, detail=f"{size} members in a cohort of {most}")

    def _check_entries(self, entries: Sequence[DigestAdvertisement]) -> None:
        """What can be checked before anything is fetched for a roster or reported about it."""
        self._check_size(len(entries))
        for entry in entries:
            if len(entry.certificate_digest) != 32 or len(entry.keys_digest) != 32:
                detail = "the digests of a certificate and of keys have 32 bytes"
                raise Refusal(Reason.ROSTER_MALFORMED, entry.member, detail)
            if not entry.member or len(entry.nonce) != NONCE_BYTES:
                raise Refusal(Reason.ROSTER_MALFORMED, entry.member)
        _check_distinct(entries)
        own = [entry for entry in entries if entry.member == self._identity.member]
        if not own:
            raise Refusal(Reason.ROSTER_OWN_ENTRY_MISSING)
        if own[0] != by_digest(self.advertisement):
            raise Refusal(Reason.ROSTER_OWN_ENTRY_ALTERED, self._identity.member)

    def _check_group(self, session: Session) -> None:
        # The member draws the groups itself, so the coordinator cannot choose this one, but the roster may leave it too
        # few members.
        if self.context.grouped is not None:
            size = len(session.receivers(self._identity.member))
            least = self.context.threshold
            if size < least:
                detail = f"the roster leaves this member's group {size} members, but its sum needs {least}"
                raise Refusal(Reason.GROUP_TOO_SMALL, detail=detail)

    def _certificates(self, roster: DigestRoster, found: Mapping[bytes, bytes]) -> dict[MemberId, bytes]:
        certificates = {}
        for entry in roster.advertisements:
            certificate = known(entry.certificate_digest, found, self._certificate_of)
            if certificate is None:
                digest = entry.certificate_digest.hex()
                detail = f"there is no certificate with the digest {digest}; fetch those that `missing` names"
                raise Refusal(Reason.ROSTER_CERTIFICATE_MISSING, entry.member, detail)
            certificates[entry.member] = certificate
        return certificates

    def _check_signatures(self, roster: DigestRoster, certificates: Mapping[MemberId, bytes]) -> None:
        for entry in roster.advertisements:
            # The statement holds this member's own context digest, so a peer that was shown another context fails here.
            statement = advertisement_statement(self.context, entry)
            try:
                named = self._verify(certificates[entry.member], statement, entry.signature)
            except IdentityInvalid as error:
                raise Refusal(Reason.ROSTER_SIGNATURE_INVALID, entry.member, str(error)) from None
            if named != entry.member:
                raise Refusal(Reason.ROSTER_IDENTITY_MISMATCH, entry.member, f"the certificate names {named}")
        if self._key_of is not None:
            _check_certificate_keys(certificates, self._key_of)

    def _peers(self, session: Session) -> dict[MemberId, PeerKeys]:
        """The keys to which this member seals. The other keys are checked by those that seal to them."""
        me = self._identity.member
        publics = {sealing_key_of(self.advertisement.keys), seed_key_of(self.advertisement.keys)}
        peers = {}
        for neighbour in session.neighbours(me):
            keys = session.keys.get(neighbour)
            if keys is None:
                digest = session.entries[neighbour].keys_digest.hex()
                detail = f"there are no keys with the digest {digest}; fetch those that `missing` names"
                raise Refusal(Reason.ROSTER_KEYS_MISSING, neighbour, detail)
            if len(keys) != KEYS_BYTES:
                raise Refusal(Reason.ROSTER_MALFORMED, neighbour, f"its keys have {len(keys)} bytes, not {KEYS_BYTES}")
            for public in (sealing_key_of(keys), seed_key_of(keys)):
                if public in publics:
                    raise Refusal(Reason.ROSTER_KEY_DUPLICATE, neighbour)
                publics.add(public)
            try:
                seeds = PublicKey(seed_key_of(keys)) if session.chooses(me, neighbour) else None
                peers[neighbour] = PeerKeys(PublicKey(sealing_key_of(keys)), seeds)
            except KeyInvalid as error:
                raise Refusal(Reason.ROSTER_KEY_INVALID, neighbour, str(error)) from None
        return peers


def _check_distinct(entries: Sequence[DigestAdvertisement]) -> None:
    members: set[str] = set()
    publics: set[bytes] = set()
    certificates: set[bytes] = set()
    for entry in entries:
        if entry.member in members:
            raise Refusal(Reason.ROSTER_MEMBER_DUPLICATE, entry.member)
        members.add(entry.member)
        # One set for both, because keys that reappear as a nonce are a copy, too.
        for public in (entry.keys_digest, entry.nonce):
            if public in publics:
                raise Refusal(Reason.ROSTER_KEY_DUPLICATE, entry.member)
            publics.add(public)
        if entry.certificate_digest in certificates:
            raise Refusal(Reason.ROSTER_CERTIFICATE_DUPLICATE, entry.member)
        certificates.add(entry.certificate_digest)


def _check_certificate_keys(certificates: Mapping[MemberId, bytes], key_of: KeyOf) -> None:
    # `key_of` is only called with certificates that `verify` has accepted.
    keys: set[bytes] = set()
    for member, certificate in certificates.items():
        try:
            key = key_of(certificate)
        except IdentityInvalid as error:
            raise Refusal(Reason.ROSTER_SIGNATURE_INVALID, member, str(error)) from None
        if key in keys:
            raise Refusal(Reason.ROSTER_CERTIFICATE_DUPLICATE, member)
        keys.add(key)
