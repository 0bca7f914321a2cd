"""Rosters that name certificates by digest, on the complete graph and on the sparse one."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from secure_agg import (
    DigestAdvertisement,
    DigestRoster,
    IdentityInvalid,
    Phase,
    Reason,
    Refusal,
    SystemRandom,
    advertise,
    by_digest,
    certificate_digest,
    keys_digest,
    roster_by_digest,
)
from secure_agg.sealing import SecretKey
from secure_agg.session import roster_root
from tests.support.sparse_fleet import SparseFleet
from tests.support.sum_fleet import Fleet, TestIdentity, key_of, names, verify

ME = "m1"


class Shelf:
    """The caller's cache: certificates that `verify` accepted, until `expires`."""

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[bytes, int]] = {}
        self.now = 0
        self.chains = 0

    def verify(self, certificate: bytes, message: bytes, signature: bytes) -> str:
        member = verify(certificate, message, signature)
        digest = certificate_digest(certificate)
        if digest not in self.known or self.known[digest][1] <= self.now:
            self.chains += 1
            self.known[digest] = (certificate, self.now + 10)
        return member

    def certificate_of(self, digest: bytes) -> bytes | None:
        certificate, expires = self.known.get(digest, (None, 0))
        return certificate if self.now < expires else None


def standing(shelf: Shelf | None, fleet: Fleet | None = None, member: str = ME) -> tuple:
    """A member that has advertised, and the roster by digest that names it."""
    fleet = fleet or Fleet(5)
    state, advertisement = advertise(
        fleet.context,
        fleet.identities[member],
        shelf.verify if shelf else verify,
        SystemRandom(),
        key_of=key_of,
        certificate_of=shelf.certificate_of if shelf else None,
    )
    for name in fleet.identities:
        message = advertisement if name == member else fleet.act(name, Phase.ADVERTISE)
        fleet.deliver(name, message)
    server, inbox, _ = fleet.server.close()
    fleet.server = server
    return fleet, state, roster_by_digest(inbox[member])


def certificates(fleet: Fleet) -> dict[bytes, bytes]:
    return {hashlib.sha256(i.certificate).digest(): i.certificate for i in fleet.identities.values()}


def parts(fleet: Fleet) -> dict[bytes, bytes]:
    """Certificates and keys by digest, as a coordinator serves them."""
    return certificates(fleet) | fleet.server.session.keys_by_digest


def neighbours(fleet: Fleet, member: str = ME) -> tuple[str, ...]:
    return fleet.server.session.neighbours(member)


@pytest.mark.parametrize("kind", [Fleet, SparseFleet])
def test_a_member_names_missing_certificates_and_accepts_them(kind) -> None:
    fleet, state, roster = standing(None, kind(24))
    own = certificate_digest(fleet.identities[ME].certificate)
    missing = state.missing(roster)
    lacking = tuple(e.certificate_digest for e in roster.advertisements if e.member != ME)
    assert set(lacking) == set(certificates(fleet)) - {own}
    keys = tuple(e.keys_digest for e in roster.advertisements if e.member in neighbours(fleet))
    assert missing == (*lacking, *keys)
    after, _ = state.on_roster(roster, [parts(fleet)[digest] for digest in reversed(missing)])
    session = after.seat.session
    assert session.id == fleet.server.session.id
    assert dict(session.entries) == dict(fleet.server.session.entries)
    assert session.certificates == fleet.server.session.certificates
    # A stranger's keys never get here.
    assert set(session.keys) == {ME, *neighbours(fleet)}


def test_a_verified_certificate_is_cached_until_it_expires() -> None:
    shelf = Shelf()
    fleet, state, roster = standing(shelf)
    state.on_roster(roster, parts(fleet).values())
    assert shelf.chains == 5
    fleet, state, roster = standing(shelf)
    keys = state.missing(roster)
    assert set(keys) == {e.keys_digest for e in roster.advertisements if e.member != ME}
    state.on_roster(roster, parts(fleet).values())
    assert shelf.chains == 5
    shelf.now = 10
    fleet, state, roster = standing(shelf)
    assert len(state.missing(roster)) == 4 + 4
    state.on_roster(roster, parts(fleet).values())
    assert shelf.chains == 10


def test_a_cached_certificate_is_verified_with_every_signature() -> None:
    """An outdated cache causes a refusal, never an acceptance."""
    shelf = Shelf()
    fleet, state, roster = standing(shelf)
    state.on_roster(roster, parts(fleet).values())
    fleet, state, roster = standing(shelf)

    def revoked(certificate: bytes, message: bytes, signature: bytes) -> str:
        if certificate == fleet.identities["m3"].certificate:
            raise IdentityInvalid("not valid any more")
        return verify(certificate, message, signature)

    with pytest.raises(Refusal) as caught:
        dataclasses.replace(state, _verify=revoked).on_roster(roster, parts(fleet).values())
    assert (caught.value.reason, caught.value.member) == (Reason.ROSTER_SIGNATURE_INVALID, "m3")


def test_a_missing_certificate_is_refused_and_the_state_stays() -> None:
    fleet, state, roster = standing(None)
    handed = {d: c for d, c in parts(fleet).items() if c != fleet.identities["m3"].certificate}
    with pytest.raises(Refusal) as caught:
        state.on_roster(roster, handed.values())
    assert (caught.value.reason, caught.value.member) == (Reason.ROSTER_CERTIFICATE_MISSING, "m3")
    assert certificate_digest(fleet.identities["m3"].certificate).hex() in caught.value.detail
    state.on_roster(roster, parts(fleet).values())


@pytest.mark.parametrize("kind", [Fleet, SparseFleet])
def test_missing_keys_of_a_neighbour_are_refused_and_the_state_stays(kind) -> None:
    fleet, state, roster = standing(None, kind(24))
    around = neighbours(fleet)
    keys = fleet.server.session.keys
    for swapped in (None, keys["m0"][:-1], keys["m0"] + b"\0"):
        handed = [*certificates(fleet).values(), *(keys[each] for each in around[1:])]
        with pytest.raises(Refusal) as caught:
            state.on_roster(roster, handed if swapped is None else [*handed, swapped])
        assert (caught.value.reason, caught.value.member) == (Reason.ROSTER_KEYS_MISSING, around[0])
        assert keys_digest(keys[around[0]]).hex() in caught.value.detail
    state.on_roster(roster, [*handed, keys[around[0]]])


def test_keys_altered_in_transit_are_refused() -> None:
    """The signature covers the digest, so a digest of other keys is the coordinator's, and refused."""
    fleet, state, roster = standing(None)
    other = SecretKey(b"\x07" * 96).public + SecretKey(b"\x08" * 96).public
    entries = tuple(
        dataclasses.replace(entry, keys_digest=keys_digest(other)) if entry.member == "m3" else entry
        for entry in roster.advertisements
    )
    with pytest.raises(Refusal) as caught:
        state.on_roster(DigestRoster(entries), [*parts(fleet).values(), other])
    assert (caught.value.reason, caught.value.member) == (Reason.ROSTER_SIGNATURE_INVALID, "m3")


def test_a_stranger_whose_keys_are_rubbish_is_its_neighbours_business() -> None:
    """The server has checked everybody's keys; a member checks those that it seals to."""
    fleet, state, roster = standing(None, SparseFleet(24))
    handed = {digest: each for digest, each in parts(fleet).items() if digest in state.missing(roster)}
    assert len(handed) == 23 + 8
    state.on_roster(roster, handed.values())


def test_a_certificate_with_another_digest_is_ignored() -> None:
    """Neither a supplied certificate nor a cached one can replace another."""
    fleet, state, roster = standing(None)
    m3, m4 = fleet.identities["m3"].certificate, fleet.identities["m4"].certificate
    swapped = {**certificates(fleet), certificate_digest(m3): m4}
    liar = dataclasses.replace(state, _certificate_of=swapped.get)
    assert liar.missing(roster)[:-4] == (certificate_digest(m3),)
    with pytest.raises(Refusal, match="no certificate with the digest"):
        liar.on_roster(roster)


def test_a_digest_altered_in_transit_is_refused() -> None:
    fleet, state, roster = standing(None)
    other = TestIdentity("m3", key_from="somebody else's key")
    entries = tuple(
        dataclasses.replace(entry, certificate_digest=certificate_digest(other.certificate))
        if entry.member == "m3"
        else entry
        for entry in roster.advertisements
    )
    with pytest.raises(Refusal) as caught:
        state.on_roster(DigestRoster(entries), [*parts(fleet).values(), other.certificate])
    assert (caught.value.reason, caught.value.member) == (Reason.ROSTER_SIGNATURE_INVALID, "m3")
    own = tuple(
        dataclasses.replace(entry, certificate_digest=entries[3].certificate_digest) if entry.member == ME else entry
        for entry in roster.advertisements
    )
    with pytest.raises(Refusal) as caught:
        state.on_roster(DigestRoster(own), [*parts(fleet).values(), other.certificate])
    assert caught.value.reason is Reason.ROSTER_OWN_ENTRY_ALTERED


def test_two_entries_with_one_certificate_are_refused() -> None:
    fleet, state, roster = standing(None)
    first = roster.advertisements[3]
    entries = tuple(
        dataclasses.replace(entry, certificate_digest=first.certificate_digest) if entry.member == "m4" else entry
        for entry in roster.advertisements
    )
    with pytest.raises(Refusal) as caught:
        state.on_roster(DigestRoster(entries), parts(fleet).values())
    assert caught.value.reason is Reason.ROSTER_CERTIFICATE_DUPLICATE


@pytest.mark.parametrize(("copies", "reason"), [(0, Reason.ROSTER_TOO_SMALL), (2, Reason.ROSTER_TOO_LARGE)])
def test_nothing_is_fetched_for_a_roster_of_another_size(copies: int, reason: Reason) -> None:
    _, state, roster = standing(None)
    with pytest.raises(Refusal) as caught:
        state.missing(DigestRoster(roster.advertisements * copies))
    assert caught.value.reason is reason


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33), bytes(1_000_000)], ids=len)
@pytest.mark.parametrize("field", ["certificate_digest", "keys_digest"])
def test_a_digest_of_wrong_length_is_refused_before_anything_is_fetched(digest: bytes, field: str) -> None:
    fleet, state, roster = standing(None)
    entries = tuple(
        dataclasses.replace(entry, **{field: digest}) if entry.member == "m3" else entry
        for entry in roster.advertisements
    )
    for act in (state.missing, lambda bent: state.on_roster(bent, parts(fleet).values())):
        with pytest.raises(Refusal) as caught:
            act(DigestRoster(entries))
        assert (caught.value.reason, caught.value.member) == (Reason.ROSTER_MALFORMED, "m3")
        assert len(caught.value.detail) <= 100
    state.on_roster(roster, parts(fleet).values())


def test_both_forms_of_a_roster_have_one_root_and_use_the_keys_once() -> None:
    fleet, state, roster = standing(None)
    after, _ = state.on_roster(roster, parts(fleet).values())
    assert roster_root(after.seat.session.entries.values()) == roster_root(fleet.server.session.entries.values())
    with pytest.raises(Refusal, match="second_roster"):
        state.missing(roster)
    with pytest.raises(Refusal, match="second_roster"):
        state.on_roster(roster)


# ---- the server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Fleet, SparseFleet])
def test_an_attempt_with_a_roster_by_digest_gives_the_same_sum(kind) -> None:
    fleet = kind(24).until(Phase.SHARE)
    served = parts(fleet)
    for member in names(24):
        roster, state = roster_by_digest(fleet.inbox[member]), fleet.states[member]
        fleet.states[member], message = state.on_roster(roster, [served[digest] for digest in state.missing(roster)])
        fleet.deliver(member, message)
    fleet.server, fleet.inbox, _ = fleet.server.close()
    for _ in range(3):
        assert fleet.play() is None
    fleet.server.unmask(fleet.sum.total)
    np.testing.assert_array_equal(fleet.sum.total, fleet.plain_sum(names(24)))


def test_the_server_serves_keys_by_digest() -> None:
    fleet = SparseFleet(24).until(Phase.SHARE)
    session = fleet.server.session
    assert session.keys_by_digest == {
        hashlib.sha256(each.keys).digest(): each.keys for each in fleet.sent[Phase.ADVERTISE].values()
    }


def test_the_two_forms_differ_only_in_certificate_and_keys() -> None:
    message = Fleet(5).act(ME, Phase.ADVERTISE)
    brief = by_digest(message)
    assert isinstance(brief, DigestAdvertisement)
    assert brief.certificate_digest == hashlib.sha256(message.certificate).digest()
    assert brief.keys_digest == keys_digest(message.keys) == hashlib.sha256(message.keys).digest()
    shared = {"member", "nonce", "signature"}
    assert all(getattr(brief, name) == getattr(message, name) for name in shared)
