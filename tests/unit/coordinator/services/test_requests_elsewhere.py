"""A renewal while the authority's key is on another machine: it waits, and keeps its ground."""

import asyncio
import hashlib
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from coordinator.authority import Anchors, AuthorityBook
from coordinator.pki import Authority
from coordinator.services.acts import Acts
from coordinator.services.renewal import RenewalRefused, Renewals
from coordinator.storage import records
from coordinator.storage.members import record_certificate, spend_token
from coordinator.storage.requests import AnswerUnfit, answer, asked
from coordinator.storage.roster import entries
from tacit.identity import Role
from tacit.reason import Reason
from tacit.roster import Kind
from tests.support.databases import empty_database
from tests.support.party import authority, key, present

DER = serialization.Encoding.DER
SECRET = b"s" * 32
LATER = present() + timedelta(days=10)


def fingerprint(number):
    public = key(number).public_key().public_bytes(DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).digest()


def certified(number, when):
    return authority().issue(key(number).public_key(), Role.MEMBER, "north", timedelta(days=14), now=when)


def request(number):
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "north")])
    return (
        x509.CertificateSigningRequestBuilder().subject_name(name).sign(key(number), hashes.SHA256()).public_bytes(DER)
    )


@pytest.fixture
def database(tmp_path):
    """A database in which north is enrolled with key 2."""
    made = empty_database(tmp_path)
    now_ms = int(present().timestamp() * 1000)
    made.run_now(lambda s: records.invite(s, "north", "0" * 24, SECRET, now_ms + 1000, now_ms))
    made.run_now(lambda s: spend_token(s, "0" * 24, SECRET, fingerprint(2), present()))
    first = certified(2, present())
    chain = (first.public_bytes(DER), authority().certificate.public_bytes(DER))
    made.run_now(
        lambda s: record_certificate(s, "0" * 24, "north", chain, first.not_valid_after_utc, "0.1.0", present())
    )
    yield made
    made.close()


def renewals(database):
    away = Authority(authority().certificate, None)
    anchors, lifetime = Anchors(AuthorityBook.of(away)), timedelta(days=14)
    return Renewals(anchors, database, acts=Acts(), member_lifetime=lifetime, clock=lambda: LATER)


def renew(database, number=2):
    served = database.run_now(lambda s: records.served(s, "north"))
    caller = Anchors(AuthorityBook.of(authority())).trust.verify(served.certificate, role=Role.MEMBER, now=LATER)
    return asyncio.run(renewals(database).renew(caller, request(number), "0.1.0"))


def import_(database, number=2):
    made = certified(number, LATER)
    chain = (made.public_bytes(DER), authority().certificate.public_bytes(DER))
    database.run_now(lambda s: answer(s, "north", chain, fingerprint(number), made.not_valid_after_utc, LATER))
    return chain


def test_a_renewal_waits_is_imported_once_and_is_then_handed_out(database):
    for _ in range(2):
        with pytest.raises(RenewalRefused) as caught:
            renew(database)
        assert caught.value.reason == Reason.REASON_CERTIFICATE_AWAITED
    (waiting,) = database.run_now(asked)
    assert (waiting.member, waiting.key, waiting.token) == ("north", fingerprint(2), None)
    chain = import_(database)
    assert renew(database) == chain
    assert database.run_now(asked) == []
    assert [entry.kind for entry in database.run_now(lambda s: entries(s, 0))] == [Kind.ISSUED, Kind.RENEWED]
    with pytest.raises(AnswerUnfit, match="no open request"):
        import_(database)


def test_a_renewal_with_a_new_key_cannot_wait(database):
    with pytest.raises(RenewalRefused, match="keeps its key"):
        renew(database, 3)
    assert database.run_now(asked) == []


@pytest.mark.parametrize("act", ["revoke", "invite"])
def test_a_member_that_was_revoked_or_invited_anew_gets_nothing_from_the_batch(database, act):
    with pytest.raises(RenewalRefused):
        renew(database)
    now_ms = int(LATER.timestamp() * 1000)
    database.run_now(lambda s: records.revoke_member(s, "north", now_ms))
    if act == "invite":
        database.run_now(lambda s: records.invite(s, "north", "1" * 24, SECRET, now_ms + 1000, now_ms))
    with pytest.raises(AnswerUnfit, match="no open request"):
        import_(database)


def test_the_answer_must_be_for_the_key_that_asked(database):
    with pytest.raises(RenewalRefused):
        renew(database)
    with pytest.raises(AnswerUnfit, match="for this key"):
        import_(database, 3)
    assert len(database.run_now(asked)) == 1
