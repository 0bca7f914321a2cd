"""Writes an operator's folder, for `coordinator init` and `coordinator operator issue` on the coordinator's machine.

    operator.toml    which coordinator the folder belongs to
    key.pem          0600
    cert.pem         the certificate for this key, from the newest authority
    root.pem         the currently trusted authorities, to check the server's certificate

A certificate is written to the database before it is written to the folder, as the coordinator refuses certificates
that are not on record.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.authority import AuthorityBook
from coordinator.config import CoordinatorConfig, OperatorConfig, operator_toml
from coordinator.pki import key_pem, new_key, pem
from coordinator.storage import records
from coordinator.storage.database import Database
from tacit.certificates import certificate_from_pem
from tacit.identity import OPERATOR_ROLES, Identity, Role, own_key
from toolkit.durable import durable_file
from toolkit.private_files import check_keys

__all__ = ["Issued", "issue_operator"]


@dataclass(frozen=True, slots=True)
class Issued:
    """The result of issuing an operator's folder."""

    # The end of the new certificate.
    expires: datetime
    # Whether an existing key was replaced.
    replaced: bool


def issue_operator(
    folder: Path,
    name: str,
    role: Role,
    config: CoordinatorConfig,
    book: AuthorityBook,
    database: Database,
    *,
    now: datetime,
    by: str = "",
) -> Issued:
    """Creates or renews an operator's folder.

    An existing key is kept if the certificate beside it has this key, name and role, is on record, and is not revoked.
    So a stolen key that was revoked is never certified again, and a key is never raised to another role.

    Args:
        folder: The operator's folder.
        name: The operator's name.
        role: What the certificate allows, one of `OPERATOR_ROLES`.
        config: The coordinator's configuration, which names the address.
        book: The authorities; the newest one issues the certificate.
        database: Keeps the record of operators' certificates.
        now: The current time.
        by: Who issues it, for the journal.

    Raises:
        ValueError: the name is not valid, or the role is not an operator's.
        NameTaken: the name has a valid certificate with another role.
        LifetimeOutOfRange: the authority ends too soon.
        NotPrivate: the folder exists and is open to other users.
        OSError: a file cannot be written.
        StorageError: the database cannot be written.
    """
    if role not in OPERATOR_ROLES:
        raise ValueError(f"{role} is not a role of operators; use {', '.join(OPERATOR_ROLES)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_keys(folder)
    lying = _lying(folder, Identity(book.trust.federation, role, name), database)
    replaced = lying is None and (folder / "key.pem").exists()
    key = lying or new_key()
    certificate = book.issuing.issue(key.public_key(), role, name, now=now)
    der = certificate.public_bytes(serialization.Encoding.DER)
    expires_ms = int(certificate.not_valid_after_utc.timestamp() * 1000)
    database.run_now(
        lambda s: records.record_operator(
            s,
            name,
            role,
            hashlib.sha256(der).digest(),
            expires_ms=expires_ms,
            issuer=book.issuing.fingerprint,
            now_ms=int(now.timestamp() * 1000),
            by=by,
        )
    )
    if lying is None:
        durable_file(folder / "key.pem", key_pem(key))
    durable_file(folder / "root.pem", book.trust.pem)
    durable_file(folder / "cert.pem", pem(certificate))
    address = OperatorConfig(
        address=config.federation_address, other_addresses=config.other_addresses, federation=book.trust.federation
    )
    durable_file(folder / "operator.toml", operator_toml(address).encode())
    return Issued(certificate.not_valid_after_utc, replaced)


def _lying(folder: Path, who: Identity, database: Database) -> rsa.RSAPrivateKey | None:
    """Returns the folder's key if it may be certified again for this identity.

    Certificates are public, since a passport has one. So a copy of a viewer's key would be an administrator's as soon
    as the same key has that role.
    """
    try:
        key = own_key((folder / "key.pem").read_bytes())
        certificate = certificate_from_pem((folder / "cert.pem").read_bytes())
        earlier = Identity.of(certificate)
    except (FileNotFoundError, ValueError, TypeError):
        # The files are missing, truncated, or encrypted by somebody, and cannot be used as they are.
        return None
    if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != certificate.public_key() or earlier != who:
        return None
    fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()
    return key if database.run_now(lambda s: records.operator_key_is_good(s, fingerprint)) else None
