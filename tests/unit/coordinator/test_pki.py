"""The authority: what it puts into certificates, what it takes from requests, and which authorities are usable."""

from datetime import timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.pki import (
    LIFETIMES,
    Authority,
    AuthorityUnusable,
    LifetimeOutOfRange,
    RequestUnsuitable,
    certify_request,
    key_pem,
    pem,
)
from coordinator.services.credentials import refresh_server_certificate
from tacit.identity import CertificateInvalid, Identity, Role, verify_certificate
from tests.support import party
from toolkit.durable import durable_file

DER = serialization.Encoding.DER


def _san(certificate):
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _request(key, *extensions, subject="north"):
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(DER)


@pytest.mark.parametrize("role", [Role.MEMBER, Role.OPERATOR])
def test_a_certificate_holds_one_identity_and_no_more(authority, now, role):
    certificate = authority.issue(party.key(2).public_key(), role, "north", now=now)
    verified = verify_certificate(
        certificate.public_bytes(DER), authority.certificate, federation=authority.federation, role=role, now=now
    )
    assert verified.identity == Identity(authority.federation, role, "north")
    assert [name.value for name in _san(certificate)] == [f"tacit://{authority.federation.hex()}/{role}/north"]
    extensions = certificate.extensions
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.digital_signature
    assert not usage.value.key_cert_sign
    purposes = list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert purposes == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert certificate.not_valid_before_utc == (now - timedelta(minutes=5)).replace(microsecond=0)
    assert certificate.not_valid_after_utc == (now + LIFETIMES[role].default).replace(microsecond=0)
    # A member may be called coordinator.example.org, and its common name must not pass for a host name.
    assert " " in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value


def test_a_server_certificate_names_its_hosts(authority, now):
    hosts = ("federation.example.org", "10.0.0.1", "2001:db8::1")
    certificate = authority.issue(party.key(1).public_key(), Role.SERVER, "coordinator", host_names=hosts, now=now)
    names = _san(certificate)
    assert names.get_values_for_type(x509.DNSName) == ["federation.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("10.0.0.1"), ip_address("2001:db8::1")]
    purposes = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert purposes == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_serial_numbers_differ(authority, now):
    serials = {
        authority.issue(party.key(2).public_key(), Role.MEMBER, "north", now=now).serial_number for _ in range(5)
    }
    assert len(serials) == 5


@pytest.mark.parametrize(
    ("role", "name", "hosts"),
    [
        (Role.MEMBER, "North", ()),
        (Role.MEMBER, "a/b", ()),
        (Role.MEMBER, "", ()),
        (Role.MEMBER, "north", ("localhost",)),
        (Role.SERVER, "coordinator", ()),
    ],
)
def test_invalid_names_are_refused(authority, now, role, name, hosts):
    with pytest.raises(ValueError, match="name"):
        authority.issue(party.key(2).public_key(), role, name, host_names=hosts, now=now)


@pytest.mark.parametrize("role", list(Role))
def test_lifetimes_are_bounded(authority, now, role):
    hosts = ("localhost",) if role is Role.SERVER else ()
    bounds = LIFETIMES[role]
    for lifetime in (bounds.minimum, bounds.maximum):
        authority.issue(party.key(2).public_key(), role, "north", lifetime, host_names=hosts, now=now)
    for lifetime in (bounds.minimum - timedelta(seconds=1), bounds.maximum + timedelta(seconds=1)):
        with pytest.raises(LifetimeOutOfRange, match="must be valid for"):
            authority.issue(party.key(2).public_key(), role, "north", lifetime, host_names=hosts, now=now)
    assert LIFETIMES[Role.MEMBER].default == timedelta(days=14)


def test_nothing_outlives_the_authority(authority, now):
    end = authority.certificate.not_valid_after_utc
    near = end - timedelta(days=3)
    certificate = authority.issue(party.key(2).public_key(), Role.MEMBER, "north", now=near)
    assert certificate.not_valid_after_utc == end
    with pytest.raises(LifetimeOutOfRange, match="too soon"):
        authority.issue(party.key(2).public_key(), Role.MEMBER, "north", now=end - timedelta(minutes=10))


# ---- requests ------------------------------------------------------------------------------------------------


def test_a_request_yields_its_key_and_nothing_else(authority, now):
    forged = x509.SubjectAlternativeName(
        [
            x509.UniformResourceIdentifier(f"tacit://{authority.federation.hex()}/operator/root"),
            x509.DNSName("coordinator.example.org"),
        ]
    )
    der = _request(party.key(2), forged, x509.BasicConstraints(ca=True, path_length=None), subject="operator")
    key = certify_request(der)
    assert key == party.key(2).public_key()
    certificate = authority.issue(key, Role.MEMBER, "north", now=now)
    assert "operator" not in certificate.subject.rfc4514_string()
    assert [name.value for name in _san(certificate)] == [f"tacit://{authority.federation.hex()}/member/north"]


def test_a_request_must_be_signed_by_its_own_key():
    der = bytearray(_request(party.key(2)))
    der[-1] ^= 1
    with pytest.raises(RequestUnsuitable, match="not signed with the key"):
        certify_request(bytes(der))


@pytest.mark.parametrize("der", [b"", b"nonsense", b"\x30\x03\x02\x01\x01"])
def test_a_malformed_request_is_refused(der):
    with pytest.raises(RequestUnsuitable, match="cannot be read"):
        certify_request(der)


def test_short_and_foreign_keys_are_refused():
    with pytest.raises(RequestUnsuitable, match="2048 bits"):
        certify_request(_request(rsa.generate_private_key(65537, 2048)))
    with pytest.raises(RequestUnsuitable, match="not RSA"):
        certify_request(_request(ec.generate_private_key(ec.SECP256R1())))


def test_very_long_keys_are_refused(monkeypatch):
    # A key of 16384 bits would cost every other member too much to verify. The test lowers the bound instead of
    # generating such a key.
    monkeypatch.setattr("tacit.identity.MIN_RSA_BITS", 2048)
    monkeypatch.setattr("tacit.identity.MAX_RSA_BITS", 3000)
    with pytest.raises(RequestUnsuitable, match="at most 3000"):
        certify_request(_request(party.key(2)))


# ---- an institution's own authority ------------------------------------------------------------------------------


def _written(tmp_path, certificate, key):
    paths = tmp_path / "ca.pem", tmp_path / "ca.key"
    paths[0].write_bytes(pem(certificate))
    durable_file(paths[1], key_pem(key))
    return paths


def _certificate(key, now, *extensions, issuer=None, days=365, signer=None):
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "St. Example's own CA")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=400))
        .not_valid_after(now + timedelta(days=days))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(signer or key, hashes.SHA256())


CA = x509.BasicConstraints(ca=True, path_length=None)


def test_an_institutions_authority_is_accepted(tmp_path, now):
    paths = _written(tmp_path, _certificate(party.key(3), now, CA), party.key(3))
    authority = Authority.load(*paths, now=now)
    certificate = authority.issue(party.key(2).public_key(), Role.MEMBER, "north", now=now)
    verify_certificate(
        certificate.public_bytes(DER),
        authority.certificate,
        federation=authority.federation,
        role=Role.MEMBER,
        now=now,
    )


def test_a_subordinate_authority_names_the_federation(tmp_path, authority, now):
    certificate = _certificate(party.key(3), now, CA, issuer=authority.certificate, signer=authority.key)
    subordinate = Authority.load(*_written(tmp_path, certificate, party.key(3)), now=now)
    assert subordinate.federation == certificate.fingerprint(hashes.SHA256())
    assert subordinate.federation != authority.federation


def _usage(**used):
    names = [
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    ]
    return x509.KeyUsage(**{name: used.get(name, False) for name in names})


@pytest.mark.parametrize(
    ("extensions", "days", "sentence"),
    [
        ((), 365, "it lacks CA:TRUE"),
        ((x509.BasicConstraints(ca=False, path_length=None),), 365, "it lacks CA:TRUE"),
        ((CA, _usage(digital_signature=True)), 365, "lacks keyCertSign"),
        (
            (CA, x509.NameConstraints([x509.DNSName("example.org")], None)),
            365,
            "has name constraints",
        ),
        ((CA,), -1, "expired on"),
    ],
)
def test_a_certificate_that_cannot_sign_members_is_refused(tmp_path, now, extensions, days, sentence):
    paths = _written(tmp_path, _certificate(party.key(3), now, *extensions, days=days), party.key(3))
    with pytest.raises(AuthorityUnusable, match=sentence):
        Authority.load(*paths, now=now)


def test_an_authority_from_the_future_is_refused(tmp_path, now):
    paths = _written(tmp_path, _certificate(party.key(3), now, CA), party.key(3))
    with pytest.raises(AuthorityUnusable, match="set the clock"):
        Authority.load(*paths, now=now - timedelta(days=500))


def test_a_key_of_another_certificate_is_refused(tmp_path, now):
    paths = _written(tmp_path, _certificate(party.key(3), now, CA), party.key(2))
    with pytest.raises(AuthorityUnusable, match="is not the key of"):
        Authority.load(*paths, now=now)


def test_a_short_authority_key_is_refused(tmp_path, now):
    short = rsa.generate_private_key(65537, 2048)
    paths = _written(tmp_path, _certificate(short, now, CA), short)
    with pytest.raises(AuthorityUnusable, match="the key has 2048 bits"):
        Authority.load(*paths, now=now)


def test_an_elliptic_authority_is_refused(tmp_path, now):
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(key, now, CA)
    paths = tmp_path / "ca.pem", tmp_path / "ca.key"
    paths[0].write_bytes(pem(certificate))
    durable_file(
        paths[1],
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    with pytest.raises(AuthorityUnusable, match="not an RSA key"):
        Authority.load(*paths, now=now)


def test_files_without_an_authority_are_refused(tmp_path, now):
    certificate, key = _written(tmp_path, _certificate(party.key(3), now, CA), party.key(3))
    with pytest.raises(AuthorityUnusable, match="cannot be read"):
        Authority.load(tmp_path / "nothing.pem", key, now=now)
    with pytest.raises(AuthorityUnusable, match="holds no PEM certificate"):
        Authority.load(key, key, now=now)
    certificate.chmod(0o600)
    with pytest.raises(AuthorityUnusable, match="holds no PEM private key"):
        Authority.load(certificate, certificate, now=now)
    two = tmp_path / "two.pem"
    two.write_bytes(certificate.read_bytes() * 2)
    with pytest.raises(AuthorityUnusable, match="2 certificates"):
        Authority.load(two, key, now=now)
    locked = tmp_path / "locked.key"
    durable_file(
        locked,
        party.key(3).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        ),
    )
    with pytest.raises(AuthorityUnusable, match="is encrypted"):
        Authority.load(certificate, locked, now=now)


def test_the_authority_never_prints_its_key(authority):
    assert "key" not in repr(authority).lower()


def test_only_the_owner_may_read_the_authoritys_key(folder):
    assert folder.authority_key.stat().st_mode & 0o777 == 0o600


# ---- what verification refuses ------------------------------------------------------------------------------------


def test_verification_refuses_the_wrong_role_federation_issuer_and_time(authority, stranger, now):
    certificate = authority.issue(party.key(2).public_key(), Role.MEMBER, "north", now=now)
    der = certificate.public_bytes(DER)
    good = {"federation": authority.federation, "role": Role.MEMBER, "now": now}
    verify_certificate(der, authority.certificate, **good)
    for root, changes in (
        (authority.certificate, {"role": Role.OPERATOR}),
        (authority.certificate, {"federation": stranger.federation}),
        (stranger.certificate, {}),
        (authority.certificate, {"now": now + timedelta(days=91)}),
        (authority.certificate, {"now": now - timedelta(minutes=6)}),
    ):
        with pytest.raises(CertificateInvalid):
            verify_certificate(der, root, **(good | changes))
    with pytest.raises(CertificateInvalid, match="authority"):
        verify_certificate(authority.certificate.public_bytes(DER), authority.certificate, **good)


# ---- the server's own certificate ---------------------------------------------------------------------------------


def test_the_server_certificate_is_made_once_and_renewed_when_due(folder, authority, now, monkeypatch):
    from coordinator.config import load_config

    monkeypatch.setattr("coordinator.services.credentials.new_key", lambda: party.key(4))
    config = load_config(folder.path, {})
    assert not refresh_server_certificate(folder, config, authority, now)
    # A third of the lifetime is left.
    assert not refresh_server_certificate(folder, config, authority, now + timedelta(days=264))
    assert refresh_server_certificate(folder, config, authority, now + timedelta(days=266))
    assert folder.server_key.stat().st_mode & 0o777 == 0o600
    # Members dial another name.
    more = config.model_copy(update={"advertise": ("localhost", "127.0.0.1", "new.example.org")})
    assert refresh_server_certificate(folder, more, authority, now)
    assert not refresh_server_certificate(folder, more, authority, now)
    # A crash between key and certificate, and no files at all.
    durable_file(folder.server_key, key_pem(party.key(5)))
    assert refresh_server_certificate(folder, more, authority, now)
    folder.server_certificate.unlink()
    assert refresh_server_certificate(folder, more, authority, now)
    chain = x509.load_pem_x509_certificates(folder.server_certificate.read_bytes())
    assert chain[-1] == authority.certificate
