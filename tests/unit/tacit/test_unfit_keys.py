"""Keys whose signatures cost every other party a hundred times more to verify get no certificate and verify nothing.

Each key works: without the check, the request proves possession and the signature verifies under the certificate.
"""

import asyncio

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.pki import Authority, AuthorityUnusable, RequestUnsuitable, certify_request, key_pem, pem
from edge_client.identity import enrolment as edge
from secure_agg import IdentityInvalid
from tacit import verification
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.identity import MAX_RSA_BITS, CertificateInvalid, Role, Trust, fit_key, sign, verify_signature
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2
from tacit.verification import Verification
from tests.support import party, unfit_keys
from tests.support.housed import housed
from toolkit.durable import durable_file

DER = serialization.Encoding.DER
MESSAGE = b"a statement"


def request(key: rsa.RSAPrivateKey) -> bytes:
    """A certificate request signed with the key itself."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "north")])
    return x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256()).public_bytes(DER)


@pytest.mark.parametrize("bits", [2, 64, 3070])
def test_a_request_for_another_exponent_is_refused(bits):
    key = unfit_keys.odd_exponent(bits)
    assert x509.load_der_x509_csr(request(key)).is_signature_valid
    with pytest.raises(RequestUnsuitable, match="that is not 65537; create a key that is RSA of 3072 to 8192 bits"):
        certify_request(request(key))


@pytest.mark.parametrize("public", [unfit_keys.odd_exponent().public_key, unfit_keys.giant], ids=["exponent", "bits"])
def test_the_authority_issues_nothing_for_an_unfit_key(public):
    with pytest.raises(ValueError, match=r"65537|at most 8192"):
        party.authority().issue(public(), Role.MEMBER, "north", now=party.present())


def test_a_member_computes_nothing_with_a_peers_unfit_key(monkeypatch):
    key = unfit_keys.odd_exponent()
    der, signature = unfit_keys.certificate(key.public_key()).public_bytes(DER), sign(key, MESSAGE)
    # The signature is valid: checking it succeeds, at a hundred times the cost.
    verify_signature(key.public_key(), MESSAGE, signature)
    verified = []
    monkeypatch.setattr(verification, "verify_signature", lambda *parts: verified.append(parts))
    peers = Verification(party.authority().certificate)
    with pytest.raises(IdentityInvalid, match="a public exponent of 3070 bits that is not 65537"):
        peers.verify(der, MESSAGE, signature)
    with pytest.raises(IdentityInvalid, match="65537"):
        peers.key_of(der)
    assert verified == []


def test_a_member_refuses_a_peers_oversized_modulus():
    der = unfit_keys.certificate(unfit_keys.giant(MAX_RSA_BITS + 8)).public_bytes(DER)
    with pytest.raises(IdentityInvalid, match="8200 bits; at most 8192"):
        Verification(party.authority().certificate).key_of(der)


def authority_of(key: rsa.RSAPrivateKey) -> Authority:
    return Authority.create(now=party.present(), key=key)


def test_an_authority_with_another_exponent_vouches_for_nobody(tmp_path):
    hostile = authority_of(unfit_keys.odd_exponent())
    der = unfit_keys.certificate(party.key(3).public_key(), of=hostile).public_bytes(DER)
    with pytest.raises(CertificateInvalid, match="the authority's key has a public exponent"):
        Trust.in_root(hostile.certificate).verify(der, role=Role.MEMBER, now=party.present())
    (tmp_path / "ca.pem").write_bytes(pem(hostile.certificate))
    durable_file(tmp_path / "ca.key", key_pem(hostile.key))
    with pytest.raises(AuthorityUnusable, match="that is not 65537; use an authority with RSA"):
        Authority.load(tmp_path / "ca.pem", tmp_path / "ca.key", now=party.present())
    document = Authorities.first(hostile.certificate).canonical()
    with pytest.raises(AuthoritiesInvalid, match="an authority's key has a public exponent"):
        Authorities.read(document, federation=hostile.federation, what="the list")


def test_the_usual_keys_are_fit():
    for key in (party.key(2).public_key(), unfit_keys.giant(MAX_RSA_BITS)):
        assert fit_key(key) == key


def test_enrolment_and_renewal_refuse_another_exponent(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            member = await house.enrol("north", 2, monkeypatch)
            monkeypatch.setattr(edge, "new_key", unfit_keys.odd_exponent)
            token = (await house.invite("south")).format()
            with pytest.raises(edge.EnrolmentFailed, match="65537") as enrolled:
                await edge.enrol(tmp_path / "south", token)
            assert enrolled.value.reason == Reason.REASON_KEY_UNSUITABLE
            async with house.stub(member) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as renewed:
                    await stub.Renew(
                        federation_pb2.RenewRequest(certificate_request=request(unfit_keys.odd_exponent()))
                    )
            return renewed.value

    reason, sentence = reason_of(asyncio.run(scenario()))[:2]
    assert reason == Reason.REASON_KEY_UNSUITABLE
    assert "65537" in sentence
