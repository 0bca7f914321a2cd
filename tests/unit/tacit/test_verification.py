"""Members' certificates and signatures: a chain is checked once, its validity every time."""

from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from secure_agg import IdentityInvalid, certificate_digest
from tacit import identity
from tacit.identity import CertificateInvalid, Role, sign
from tacit.verification import Verification
from tests.support import party

MESSAGE = b"a statement"


class Clock:
    def __init__(self):
        self.now = party.present()

    def __call__(self):
        return self.now


def issued(name="north", number=2, role=Role.MEMBER, of=None):
    """A certificate (DER) and a signature made with its key."""
    of = of or party.authority()
    certificate = of.issue(party.key(number).public_key(), role, name, now=party.present())
    return certificate.public_bytes(serialization.Encoding.DER), sign(party.key(number), MESSAGE)


@pytest.fixture
def chains(monkeypatch):
    """Counts how often a chain was checked."""
    checked = []
    signed_by = identity._signed_by

    def counting(certificate, issuer):
        checked.append(certificate.serial_number)
        signed_by(certificate, issuer)

    monkeypatch.setattr(identity, "_signed_by", counting)
    identity._issued.cache_clear()
    return checked


def test_a_chain_is_checked_once_and_a_signature_every_time(chains):
    verification = Verification(party.authority().certificate)
    der, signature = issued()
    for _ in range(5):
        # A fresh copy of the bytes, as from the wire.
        assert verification.verify(bytes(bytearray(der)), MESSAGE, signature) == "north"
    assert len(chains) == 1
    with pytest.raises(IdentityInvalid, match="signature does not match"):
        verification.verify(der, b"another statement", signature)
    assert verification.key_of(der) == party.key(2).public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert len(chains) == 1


def test_validity_is_checked_every_time_at_both_ends(chains):
    clock = Clock()
    verification = Verification(party.authority().certificate, clock)
    der, signature = issued()
    begins = party.present() - timedelta(days=1)
    assert verification.verify(der, MESSAGE, signature) == "north"
    for moment, says in ((begins, "valid from"), (party.present() + timedelta(days=400), "expired on")):
        clock.now = moment
        with pytest.raises(IdentityInvalid, match=says):
            verification.verify(der, MESSAGE, signature)
        with pytest.raises(IdentityInvalid, match=says):
            verification.key_of(der)
        # It is still cached, but that does not make it valid.
        assert verification.certificate_of(certificate_digest(der)) == der
    clock.now = party.present()
    assert verification.verify(der, MESSAGE, signature) == "north"
    assert len(chains) == 1


def test_a_cached_certificate_is_refused_in_another_role_or_federation():
    verification = Verification(party.authority().certificate)
    other = Verification(party.authority(1).certificate)
    der, signature = issued(role=Role.OPERATOR)
    with pytest.raises(IdentityInvalid, match="has the role operator"):
        verification.verify(der, MESSAGE, signature)
    der, signature = issued()
    assert verification.verify(der, MESSAGE, signature) == "north"
    with pytest.raises(IdentityInvalid, match="not issued by this federation"):
        other.verify(der, MESSAGE, signature)


def test_a_refused_certificate_is_not_cached(chains):
    verification = Verification(party.authority().certificate)
    der, signature = issued(of=party.authority(1))
    for _ in range(2):
        with pytest.raises(IdentityInvalid):
            verification.verify(der, MESSAGE, signature)
    assert len(chains) == 2
    assert verification.certificate_of(certificate_digest(der)) is None


def test_the_most_recently_used_certificates_are_known_by_digest():
    verification = Verification(party.authority().certificate, most=2)
    made = [issued(name, number) for name, number in (("north", 2), ("south", 3), ("east", 4))]
    digests = [certificate_digest(der) for der, _ in made]
    for der, signature in made[:2]:
        verification.verify(der, MESSAGE, signature)
    assert verification.certificate_of(digests[0]) == made[0][0]
    verification.verify(made[2][0], MESSAGE, made[2][1])
    assert [verification.certificate_of(digest) is not None for digest in digests] == [True, False, True]
    assert verification.certificate_of(bytes(32)) is None


def test_a_certificate_that_outlives_its_authority_is_refused():
    """What the finder of an expired authority's key could make. No authority issues such a certificate."""
    der, _ = issued()
    honest = x509.load_der_x509_certificate(der)
    end = party.authority().certificate.not_valid_after_utc
    until = party.expired(honest, party.authority(), shift=end - honest.not_valid_after_utc)
    beyond = party.expired(honest, party.authority(), shift=end - honest.not_valid_after_utc + timedelta(seconds=1))
    verification = Verification(party.authority().certificate)
    trust, now = verification.trust, end - timedelta(hours=1)
    assert trust.verify(until.public_bytes(serialization.Encoding.DER), role=Role.MEMBER, now=now)
    with pytest.raises(CertificateInvalid, match="longer than the authority"):
        trust.verify(beyond.public_bytes(serialization.Encoding.DER), role=Role.MEMBER, now=now)
