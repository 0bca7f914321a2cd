"""Proofs of whose a certificate or statement is, even if certificates or authorities have expired since."""

import functools
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives import serialization

from coordinator.pki import AUTHORITY_LIFETIME, Authority
from tacit.authorities import Authorities
from tacit.corpus import signed_bytes
from tacit.corpus_proof import verify_member, verify_statement
from tacit.identity import CertificateInvalid, CertificateOutOfDate, Role, sign
from tests.support import party
from tests.support.ordered_corpora import corpus_file, ordering_job, statement_of

FIRST, NEXT = party.authority(), party.authority(1)
LONG_AGO = party.present() - 2 * AUTHORITY_LIFETIME


def issued(authority=FIRST, *, role=Role.MEMBER, name="north", now=None):
    made = authority.issue(party.key(2).public_key(), role, name, now=now or party.present())
    return made.public_bytes(serialization.Encoding.DER)


@functools.cache
def ended() -> Authority:
    """An authority that has expired after its ten years."""
    return Authority.create(now=LONG_AGO, key=party.key(70))


def retired() -> Authorities:
    """The first authority, retired, and its successor, which alone is trusted."""
    both = Authorities.first(FIRST.certificate).succeeded_by(NEXT.certificate, old=FIRST.key, new=NEXT.key)
    return both.without(1, key=NEXT.key)


def test_a_certificate_proves_the_same_after_it_expires():
    north = issued()
    found = verify_member(north, Authorities.first(FIRST.certificate), "north")
    assert (found.identity.name, found.der) == ("north", north)
    # Its authority has been retired since.
    assert FIRST.certificate not in retired().trust.roots
    assert verify_member(north, retired(), "north") == found
    # It has expired, and so has its authority.
    authorities, old = Authorities.first(ended().certificate), issued(ended(), now=LONG_AGO)
    with pytest.raises(CertificateOutOfDate):
        authorities.history.verify(old, role=Role.MEMBER, now=party.present())
    assert verify_member(old, authorities, "north").expires < party.present() - timedelta(days=365)


@pytest.mark.parametrize(
    ("certificate", "says"),
    [
        (lambda: issued(name="south"), "belongs to somebody else: south"),
        (lambda: issued(role=Role.OPERATOR), "has the role operator, not member"),
        (lambda: issued(ended(), now=LONG_AGO), "not issued by this federation's authority"),
        # Issued with the federation's own root, in another federation's name.
        (lambda: issued(Authority(FIRST.certificate, FIRST.key, bytes(32))), "belongs to another federation"),
        (lambda: b"no certificate", "not a certificate"),
    ],
)
def test_a_certificate_that_is_not_the_members_is_refused(certificate, says):
    with pytest.raises(CertificateInvalid, match=says):
        verify_member(certificate(), Authorities.first(FIRST.certificate), "north")


def test_a_statement_counts_only_in_the_federation_it_names():
    data, authorities = corpus_file([("a good day", "a")]), retired()

    def verified(federation):
        said = statement_of(data, ordering_job(), federation=federation, member="north")
        verify_statement(said, sign(party.key(2), signed_bytes(said)), issued(), authorities)

    verified(FIRST.federation)
    # North has signed those, too, but they do not belong to this federation, not even under the next authority's name.
    for other in (bytes(32), NEXT.fingerprint):
        with pytest.raises(CertificateInvalid, match="belong to different federations"):
            verified(other)
