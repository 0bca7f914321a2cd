"""An operator's folder: made by `coordinator init` and `coordinator operator issue`, on the coordinator's machine.

    operator.toml    which coordinator it is for
    key.pem          0600
    cert.pem         what the newest authority made of it
    root.pem         the authorities that are trusted now: what the server's certificate is checked with

A certificate is written into the database before it is written into the folder: who comes with one that is not there is
refused.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.authority import AuthorityBook
from coordinator.config import CoordinatorConfig, OperatorConfig, operator_toml
from coordinator.pki import key_pem, new_key, pem
from coordinator.storage import records
from coordinator.storage.database import Database
from tacit.identity import Role
from toolkit.durable import durable_file
from toolkit.private_files import check_keys

__all__ = ["Issued", "issue_operator"]


@dataclass(frozen=True, slots=True)
class Issued:
    """What an operator's folder now holds."""

    expires: datetime
    # Whether the key that lay there was replaced.
    replaced: bool


def issue_operator(
    folder: Path,
    name: str,
    config: CoordinatorConfig,
    book: AuthorityBook,
    database: Database,
    *,
    now: datetime,
    by: str = "",
) -> Issued:
    """Makes, or makes anew, an operator's folder. A key that lies there stays if the certificate beside it is of this
    key, on record, and not revoked: one that was cut off as stolen is never certified again. by: who does it, for the
    journal.

    Raises:
        ValueError: no operator's name. LifetimeOutOfRange: the authority ends too soon. NotPrivate: the folder is
            there, and open to others. OSError, StorageError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_keys(folder)
    lying = _lying(folder, database)
    replaced = lying is None and (folder / "key.pem").exists()
    key = lying or _new(folder / "key.pem")
    certificate = book.issuing.issue(key.public_key(), Role.OPERATOR, name, now=now)
    der = certificate.public_bytes(serialization.Encoding.DER)
    expires_ms = int(certificate.not_valid_after_utc.timestamp() * 1000)
    database.run_now(
        lambda s: records.record_operator(
            s,
            name,
            hashlib.sha256(der).digest(),
            expires_ms=expires_ms,
            issuer=book.issuing.fingerprint,
            now_ms=int(now.timestamp() * 1000),
            by=by,
        )
    )
    durable_file(folder / "root.pem", book.trust.pem)
    durable_file(folder / "cert.pem", pem(certificate))
    address = OperatorConfig(address=config.federation_address, federation=book.trust.federation)
    durable_file(folder / "operator.toml", operator_toml(address).encode())
    return Issued(certificate.not_valid_after_utc, replaced)


def _lying(folder: Path, database: Database) -> rsa.RSAPrivateKey | None:
    """The folder's key, if it may be certified again."""
    try:
        key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    except (FileNotFoundError, ValueError, TypeError):
        # Not there, cut short, or encrypted by somebody: nothing here can be used as it is.
        return None
    if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != certificate.public_key():
        return None
    fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()
    return key if database.run_now(lambda s: records.operator_key_is_good(s, fingerprint)) else None


def _new(path: Path) -> rsa.RSAPrivateKey:
    key = new_key()
    durable_file(path, key_pem(key))
    return key
