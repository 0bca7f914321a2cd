"""Phase 0, advertise: send fresh keys, receive and check the roster.

Guarantees: root, keys and nonce are fresh for this call and are used with only one roster. An accepted roster holds at
least `min_roster` entries (t on the complete graph) and at most n. They are distinct in member, key, nonce and
certificate, each is signed for exactly this context by the member that it names, and this member's own entry is
unchanged. The session id is fixed from then on. With groups, so is this member's group, which it has drawn itself and
which has at least t members.

A roster by digest goes through the same checks. Of the keys, a member looks only at those that it seals to: its
neighbours'.

A roster of one's own group has the names of all of U1 and the entries of the group, each proven to be in the roster
whose root makes the draw. This member's entry is one of them, so the draw depends on its nonce. The names are distinct,
and the entries are those of exactly the members that it draws for its group. Entries of other groups are checked by
their own members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from secure_agg import merkle
from secure_agg.certificates import by_digest, each_by_digest, known, roster_by_digest
from secure_agg.context import RoundContext
from secure_agg.identity import CertificateOf, Identity, IdentityInvalid, KeyOf, MemberId, VerifyIdentity
from secure_agg.member.seat import Seat
from secure_agg.member.share import AwaitingDealings, PeerKeys, deal_shares
from secure_agg.messages import Advertisement, Dealing, DigestAdvertisement, DigestRoster, GroupRoster, Roster
from secure_agg.randomness import RandomSource
from secure_agg.reasons import Reason, Refusal
from secure_agg.sealing import SECRET_KEY_BYTES, KeyInvalid, PublicKey, SecretKey
from secure_agg.secret import Once, Secret
from secure_agg.session import (
    KEYS_BYTES,
    NONCE_BYTES,
    Session,
    advertisement_statement,
    grouped_root,
    roster_entry,
    sealing_key_of,
    seed_key,
    seed_key_of,
)
from secure_agg.shamir import SECRET_BYTES
from secure_agg.transcript import Purpose

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

    def missing(self, roster: DigestRoster | GroupRoster) -> tuple[bytes, ...]:
        """The digests of the certificates and of the neighbours' keys that `on_roster` needs with this roster.

        Raises:
            Refusal: the roster's size or an entry is invalid, so nothing should be fetched for it.
        """
        self._once.check()
        session = self._session(roster, {}, {})
        own = each_by_digest([self.advertisement.certificate])
        certificates = (entry.certificate_digest for entry in roster.advertisements)
        lacking = [each for each in certificates if known(each, own, self._certificate_of) is None]
        neighbours = session.neighbours(self._identity.member)
        return (*lacking, *(session.entries[neighbour].keys_digest for neighbour in neighbours))

    def on_roster(
        self, roster: Roster | DigestRoster | GroupRoster, fetched: Iterable[bytes] = ()
    ) -> tuple[AwaitingDealings, Dealing]:
        """Checks the roster and deals shares of both secrets, and seeds of its pairs, to all neighbours in it.

        Args:
            roster: U1, or what a member of a group needs of it.
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
        entries = roster.advertisements
        keys = {entry.member: found[entry.keys_digest] for entry in entries if entry.keys_digest in found}
        certificates: dict[MemberId, bytes] = {}
        session = self._session(roster, certificates, keys)
        certificates |= self._certificates(entries, found)
        self._check_signatures(entries, certificates)
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

    def _session(
        self,
        roster: DigestRoster | GroupRoster,
        certificates: Mapping[MemberId, bytes],
        keys: Mapping[MemberId, bytes],
    ) -> Session:
        """The session of a roster, after what can be checked before anything is fetched for it or reported about it."""
        if isinstance(roster, DigestRoster):
            self._check_size(len(roster.advertisements))
            self._check_entries(roster.advertisements)
            return Session.by_digest(self.context, roster.advertisements, certificates, keys)
        self._check_names(roster.names)
        self._check_entries(roster.advertisements)
        proven = roster.names, self._proven_root(roster)
        session = Session.by_digest(self.context, roster.advertisements, certificates, keys, proven)
        self._check_group(session)
        if tuple(session.entries) != session.receivers(self._identity.member):
            detail = "its entries are not those of the group that the roster draws for this member"
            raise Refusal(Reason.ROSTER_MALFORMED, detail=detail)
        return session

    def _check_names(self, names: Sequence[MemberId]) -> None:
        if self.context.grouped is None:
            raise Refusal(Reason.ROSTER_MALFORMED, detail="it is one of a group, but the attempt has one sum")
        self._check_size(len(names))
        # Each member is on the roster once. Otherwise a few corrupt members could be most of every group.
        if not names[0] or any(before >= after for before, after in pairwise(names)):
            raise Refusal(Reason.ROSTER_MALFORMED, detail="its names are distinct, sorted, and not empty")
        if self._identity.member not in names:
            raise Refusal(Reason.ROSTER_OWN_ENTRY_MISSING)

    def _proven_root(self, roster: GroupRoster) -> bytes:
        """The root that every entry leads to from its member's place."""
        if len(roster.paths) != len(roster.advertisements):
            raise Refusal(Reason.ROSTER_MALFORMED, detail="it has one path for each entry")
        places = {name: place for place, name in enumerate(roster.names)}
        count, roots = len(places), set()
        for entry, path in zip(roster.advertisements, roster.paths, strict=True):
            place = places.get(entry.member, count)
            roots.add(merkle.root_from_path(roster_entry(entry), place, count, path, Purpose.ROSTER_NODE))
            if None in roots or len(roots) > 1:
                detail = "its entry is not at its place in the roster's hash tree"
                raise Refusal(Reason.ROSTER_MALFORMED, entry.member, detail)
        (tree,) = roots
        assert tree is not None  # noqa: S101  for the type checker: refused above
        return grouped_root(roster.names, tree)

    def _check_entries(self, entries: Sequence[DigestAdvertisement]) -> None:
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

    def _certificates(
        self, entries: Sequence[DigestAdvertisement], found: Mapping[bytes, bytes]
    ) -> dict[MemberId, bytes]:
        certificates = {}
        for entry in entries:
            certificate = known(entry.certificate_digest, found, self._certificate_of)
            if certificate is None:
                digest = entry.certificate_digest.hex()
                detail = f"there is no certificate with the digest {digest}; fetch those that `missing` names"
                raise Refusal(Reason.ROSTER_CERTIFICATE_MISSING, entry.member, detail)
            certificates[entry.member] = certificate
        return certificates

    def _check_signatures(self, entries: Sequence[DigestAdvertisement], certificates: Mapping[MemberId, bytes]) -> None:
        for entry in entries:
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
