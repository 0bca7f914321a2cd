"""Certificates and requests that nobody can read are refused in the words of who reads them, whatever is wrong.

`cryptography` says some of it with exceptions that are no ValueError, and each of these once passed through every check
of a certificate: anybody could send one.
"""

import base64
import socket
import threading

import pytest
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL, crypto

from coordinator.pki import RequestUnsuitable, certify_request
from edge_client.identity.handshake import HandshakeFailed, Step, shake_hands
from secure_agg import IdentityInvalid
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_der, certificate_from_pem, certificates_from_pem, request_from_der
from tacit.identity import CertificateInvalid, Identity, KeyUnfit, Role, federation_of, key_in, verify_certificate
from tacit.verification import Verification
from tests.support import party

VERSION = bytes.fromhex("a003020102")
USAGE, ALTERNATIVES = bytes.fromhex("0603551d0f"), bytes.fromhex("0603551d11")
RSA = bytes.fromhex("06092a864886f70d010101")


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


@pytest.fixture(scope="module")
def member() -> bytes:
    issued = party.authority().issue(party.key(1).public_key(), Role.MEMBER, "north", now=party.present())
    return issued.public_bytes(Encoding.DER)


@pytest.fixture(scope="module")
def odd_version(member) -> bytes:
    odd = changed(member, VERSION, VERSION[:-1] + b"\x22")
    with pytest.raises(x509.InvalidVersion):
        x509.load_der_x509_certificate(odd)
    return odd


def test_a_certificate_of_an_unknown_version_is_none(odd_version):
    root = party.authority().certificate
    pem = b"-----BEGIN CERTIFICATE-----\n%s-----END CERTIFICATE-----\n" % base64.encodebytes(odd_version)
    for read in (
        lambda: certificate_from_der(odd_version),
        lambda: certificate_from_pem(pem),
        lambda: certificates_from_pem(pem),
    ):
        with pytest.raises(ValueError, match="34 is not a valid X509 version"):
            read()
    with pytest.raises(CertificateInvalid, match="not a certificate"):
        verify_certificate(odd_version, root, federation=federation_of(root), role=Role.MEMBER, now=party.present())
    # What a member or the coordinator does with an advertisement.
    with pytest.raises(IdentityInvalid, match="not a certificate"):
        Verification(root).verify(odd_version, b"message", b"signature")


def test_a_root_of_an_unknown_version_is_none(odd_version):
    known = Authorities.first(party.authority().certificate)
    sent = known.model_copy(update={"roots": (odd_version,)}).canonical()
    with pytest.raises(AuthoritiesInvalid, match="a root that is not a certificate"):
        Authorities.read(sent, federation=known.federation, what="the list")


def test_a_request_of_an_unknown_version_is_none():
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(party.key(1), hashes.SHA256())
    whole = made.public_bytes(Encoding.DER)
    assert certify_request(whole)
    at = whole.index(bytes.fromhex("020100"))
    odd = whole[: at + 2] + b"\x05" + whole[at + 3 :]
    with pytest.raises(x509.InvalidVersion):
        x509.load_der_x509_csr(odd)
    with pytest.raises(ValueError, match="5 is not a valid CSR version"):
        request_from_der(odd)
    with pytest.raises(RequestUnsuitable, match="cannot be read"):
        certify_request(odd)


def test_an_extension_that_occurs_twice_names_nobody(member):
    odd = certificate_from_der(changed(member, USAGE, ALTERNATIVES))
    with pytest.raises(x509.DuplicateExtension):
        _ = odd.extensions
    with pytest.raises(CertificateInvalid, match="extensions cannot be read"):
        Identity.of(odd)


def test_a_key_of_an_unknown_kind_is_unfit(member):
    odd = certificate_from_der(changed(member, RSA, RSA[:-1] + b"\x63"))
    with pytest.raises(UnsupportedAlgorithm):
        odd.public_key()
    with pytest.raises(KeyUnfit, match="cannot be read"):
        key_in(odd)


# Only its deprecated functions make a certificate of an unknown version.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_server_that_shows_a_certificate_of_an_unknown_version_is_no_coordinator():
    """A member that enrols, or asks `doctor`, reads what any server shows before it trusts it."""
    key = crypto.PKey.from_cryptography_key(party.key(1))
    shown = crypto.X509()
    shown.set_version(33)
    shown.set_pubkey(key)
    shown.gmtime_adj_notBefore(0)
    shown.gmtime_adj_notAfter(3600)
    shown.sign(key, "sha256")
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.use_privatekey(key)
    context.use_certificate(shown)
    context.set_alpn_select_callback(lambda _connection, _offered: b"h2")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            connection = SSL.Connection(context, peer)
            connection.set_accept_state()
            connection.do_handshake()
            peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HandshakeFailed, match="a certificate that cannot be read") as failed:
            shake_hands(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert failed.value.step is Step.CERTIFICATE
