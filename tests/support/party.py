"""A federation's authority and its parties, with the keys of a test run."""

import functools
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from coordinator.config import CoordinatorConfig, CoordinatorFolder, write_config
from coordinator.pki import Authority, key_pem, pem
from coordinator.services.credentials import SERVER_NAME
from coordinator.storage import records
from coordinator.storage.database import Database
from edge_client.identity.home import Home, IdentityDocument, MemberIdentity
from tacit.identity import Role
from tests.support.keys import key
from toolkit.durable import durable_file

__all__ = ["authority", "coordinator_folder", "expired", "key", "member_home", "present"]


@functools.cache
def present() -> datetime:
    """One moment for all certificates of a test run. It is near the machine's clock, which gRPC uses."""
    return datetime.now(UTC)


@functools.cache
def authority(number: int = 0) -> Authority:
    """The authority with this number: 0 or 1."""
    return Authority.create(now=present(), key=key(100 + number))


def coordinator_folder(
    path: Path, *, of: Authority | None = None, hosts=("localhost", "127.0.0.1")
) -> CoordinatorFolder:
    """The parts of `coordinator init`'s folder that serving needs, without making new keys."""
    of = of or authority()
    folder = CoordinatorFolder(path)
    for made in (path, folder.authority_certificate.parent, folder.server_key.parent):
        made.mkdir(mode=0o700, exist_ok=True)
    of.store(folder.authority_certificate, folder.authority_key)
    certificate = of.issue(key(1).public_key(), Role.SERVER, SERVER_NAME, host_names=hosts, now=present())
    durable_file(folder.server_key, key_pem(key(1)))
    folder.server_certificate.write_bytes(pem(certificate, of.certificate))
    write_config(
        folder.config_toml,
        CoordinatorConfig(
            advertise=hosts, listen_host="127.0.0.1", enrolment_port=0, federation_port=0, metrics_port=0
        ),
    )
    return folder


def operator_on_record(database: Database, role: Role = Role.ADMINISTRATOR, name: str = "op") -> x509.Certificate:
    """Records a certificate of an operator with key 3, as `coordinator operator issue` does."""
    made = authority().issue(key(3).public_key(), role, name, now=present())
    expires_ms = int(made.not_valid_after_utc.timestamp() * 1000)
    now_ms = int(present().timestamp() * 1000)
    database.run_now(
        lambda s: records.record_operator(
            s,
            name,
            role,
            made.fingerprint(hashes.SHA256()),
            expires_ms=expires_ms,
            issuer=authority().fingerprint,
            now_ms=now_ms,
        )
    )
    return made


def expired(certificate: x509.Certificate, of: Authority, *, shift: timedelta) -> x509.Certificate:
    """The same certificate with a shifted validity, which an honest `Authority` would not issue."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(certificate.subject)
        .issuer_name(certificate.issuer)
        .public_key(certificate.public_key())
        .serial_number(certificate.serial_number)
        .not_valid_before(certificate.not_valid_before_utc + shift)
        .not_valid_after(certificate.not_valid_after_utc + shift)
    )
    for extension in certificate.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(of.key, hashes.SHA256())


def member_home(
    path: Path,
    address: str,
    *,
    name: str = "north",
    of: Authority | None = None,
    number: int = 2,
    certificate: x509.Certificate | None = None,
    root: x509.Certificate | None = None,
) -> Path:
    """Makes a member's folder as enrolment leaves it."""
    of = of or authority()
    certificate = certificate or of.issue(key(number).public_key(), Role.MEMBER, name, now=present())
    home = Home(path)
    home.prepare()
    folder = home.identity
    folder.path.mkdir(mode=0o700)
    durable_file(folder.key, key_pem(key(number)))
    folder.key.chmod(0o600)
    folder.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    folder.root.write_bytes(pem(root or of.certificate))
    folder.document.write_bytes(IdentityDocument(federation=of.federation, member=name, address=address).canonical())
    return path


def member(path: Path, address: str, **how: object) -> MemberIdentity:
    """Makes a member's folder and loads its identity."""
    return MemberIdentity.load(member_home(path, address, **how))
