"""The member's own folder: who this machine is, and the key that proves it.

The folder is `--home`, else `TACIT_HOME`, else `~/.tacit`, with mode 0700. Nothing in it ever leaves the machine.
Enrolment keeps these files in it:

    identity/                 complete, or absent
      key.pem                 0600, made here
      cert.pem                this key's certificate by the federation's authority; replaced when it is renewed
      root.pem                the certificate of the federation's first authority, which names the federation
      authorities.json        later authorities, each signed by the one before; absent while there is only the first
      identity.json           `IdentityDocument`
    pending-TOKEN/            the same while the token of that id is being redeemed; key.pem comes first, so that an
                              interrupted enrolment is repeated with the same key
    renewal.lock              held while the certificate is renewed

Other packages keep their files beside these (ledger, private parameters, receipts). A folder or a key that others may
read is refused, not repaired: anyone who could read a key may have copied it.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import field_validator

from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.certificates import certificate_from_der, certificate_from_pem
from tacit.documents import Digest, Document, DocumentInvalid, Short
from tacit.identity import (
    CertificateInvalid,
    Role,
    Trust,
    federation_of,
    issued_by,
    key_pem,
    name_is_valid,
    own_key,
    sign,
)
from tacit.token import Address, Addresses
from toolkit.durable import durable_file
from toolkit.locks import held
from toolkit.private_files import NotPrivate, check_private

__all__ = [
    "Home",
    "HomeUnusable",
    "IdentityDocument",
    "IdentityFolder",
    "MemberIdentity",
    "NotEnrolled",
    "home_path",
]


class HomeUnusable(Exception):
    """The folder does not hold a usable identity. The sentence says what to do."""


class NotEnrolled(HomeUnusable):
    """There is no identity here yet."""


class IdentityDocument(Document):
    """The content of identity.json."""

    federation: Digest
    member: Short
    # host:port of the federation port.
    address: Address
    # The same of the federation's other coordinators, one of which may be the active one.
    other_addresses: Addresses = ()

    @field_validator("member")
    @classmethod
    def _member(cls, value: str) -> str:
        if not name_is_valid(value):
            raise ValueError("not a valid member name")
        return value


def home_path(option: Path | None = None) -> Path:
    """Returns the folder to use: the option, else `TACIT_HOME`, else `~/.tacit`."""
    if option is not None:
        return option
    return Path(os.environ.get("TACIT_HOME") or Path.home() / ".tacit")


@dataclass(frozen=True, slots=True)
class IdentityFolder:
    """The names of the files of one identity."""

    path: Path

    @property
    def document(self) -> Path:
        return self.path / "identity.json"

    @property
    def key(self) -> Path:
        return self.path / "key.pem"

    @property
    def certificate(self) -> Path:
        return self.path / "cert.pem"

    @property
    def root(self) -> Path:
        return self.path / "root.pem"

    @property
    def authorities(self) -> Path:
        return self.path / "authorities.json"


@dataclass(frozen=True, slots=True)
class Home:
    """A member's folder, and the one step that changes who the member is."""

    path: Path

    @property
    def identity(self) -> IdentityFolder:
        return IdentityFolder(self.path / "identity")

    def pending(self, token_id: str) -> IdentityFolder:
        """Returns where an enrolment with this token keeps its files until it is complete."""
        return IdentityFolder(self.path / f"{_PENDING}{token_id}")

    @property
    def lock(self) -> Path:
        return self.path / "identity.lock"

    @property
    def _old(self) -> Path:
        return self.path / "identity.old"

    def prepare(self) -> None:
        """Makes the folder with mode 0700, or checks the existing one.

        Raises:
            HomeUnusable: The folder cannot be made, or others may read it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise HomeUnusable(f"{self.path} cannot be made: {error.strerror}; choose another with --home") from error
        self.check_modes()

    def check_modes(self) -> None:
        """Raises HomeUnusable if anyone but the owner may read the folder, or read or write the key."""
        try:
            check_private(self.path)
            check_private(self.identity.path)
            check_private(self.identity.key)
        except NotPrivate as error:
            raise HomeUnusable(f"{error}. If somebody else uses this machine, enrol again") from error
        except OSError as error:
            raise HomeUnusable(
                f"{error.filename or self.path} cannot be read: {error.strerror}; check its permissions"
            ) from error

    def adopt(self, pending: IdentityFolder) -> None:
        """Makes a complete pending identity the member's own, replacing the present one if there is any."""
        with self.locked():
            if not pending.path.exists():
                return  # Another process has settled it in the meantime.
            if self.identity.path.exists():
                self.identity.path.rename(self._old)
            # A crash here leaves no identity; `settle` finishes the step.
            pending.path.rename(self.identity.path)
            self._clean()

    def replace_certificate(self, certificate: bytes) -> None:
        """Stores the next certificate (DER) for the present key, in one step. It is on the disk before this returns."""
        pem = certificate_from_der(certificate).public_bytes(serialization.Encoding.PEM)
        durable_file(self.identity.certificate, pem)

    def replace_key(self, key: rsa.RSAPrivateKey, certificate: bytes) -> None:
        """Stores the next certificate (DER) and its new key in one step, as an enrolment is adopted."""
        pending = self.pending("renewal")
        shutil.rmtree(pending.path, ignore_errors=True)
        pending.path.mkdir(mode=0o700)
        durable_file(pending.key, key_pem(key))
        pem = certificate_from_der(certificate).public_bytes(serialization.Encoding.PEM)
        durable_file(pending.certificate, pem)
        for kept, copy in (
            (self.identity.root, pending.root),
            (self.identity.authorities, pending.authorities),
            (self.identity.document, pending.document),
        ):
            # The document comes last, because a pending folder that holds it is complete.
            if kept.exists():
                durable_file(copy, kept.read_bytes())
        self.adopt(pending)

    def keep_authorities(self, authorities: Authorities) -> None:
        """Stores what is known of the federation's authorities from now on."""
        durable_file(self.identity.authorities, authorities.canonical())

    def settle(self) -> None:
        """Finishes an enrolment that was interrupted after everything was stored."""
        if self.identity.path.exists() or not self._interrupted():
            return
        with self.locked():
            left = self._interrupted()
            if left and not self.identity.path.exists():
                left[0].rename(self.identity.path)
                self._clean()

    def _interrupted(self) -> list[Path]:
        # The document is written last, and only then is an old identity put aside. So the newest complete one counts.
        documents = sorted(self.path.glob(f"{_PENDING}*/identity.json"), key=lambda path: -path.stat().st_mtime_ns)
        return [path.parent for path in documents] + ([self._old] if self._old.exists() else [])

    def _clean(self) -> None:
        for path in (self._old, *self.path.glob(f"{_PENDING}*")):
            shutil.rmtree(path, ignore_errors=True)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock under which the identity is replaced, or read by a process that must not see it half done."""
        with held(self.lock):
            yield


_PENDING = "pending-"


@dataclass(frozen=True, slots=True, repr=False)
class MemberIdentity:
    """A complete member: it can dial the coordinator and sign. Its `repr` shows no key."""

    home: Path
    document: IdentityDocument
    key: rsa.RSAPrivateKey
    # DER.
    certificate: bytes
    expires: datetime
    # The certificate of the federation's first authority.
    root: x509.Certificate
    begins: datetime | None = None
    # None: there has been only one authority.
    known_authorities: Authorities | None = None

    def __repr__(self) -> str:
        return f"MemberIdentity({self.document.member!r}, federation={self.document.federation.hex()[:16]}...)"

    @property
    def member(self) -> str:
        """The member's name in the federation."""
        return self.document.member

    @property
    def federation(self) -> bytes:
        """SHA-256 of the first root certificate, 32 bytes."""
        return self.document.federation

    @property
    def authorities(self) -> Authorities:
        """The federation's authorities, as far as this member knows them."""
        return self.known_authorities or Authorities.first(self.root)

    @property
    def trust(self) -> Trust:
        """The authorities whose certificates this member accepts."""
        return self.authorities.trust

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate, 32 bytes."""
        return hashlib.sha256(self.certificate).digest()

    @property
    def address(self) -> str:
        """host:port of the federation port."""
        return self.document.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """host:port of each of the federation's coordinators, in the order in which to dial them."""
        return (self.document.address, *self.document.other_addresses)

    def at(self, addresses: Sequence[str]) -> "MemberIdentity":
        """Returns the same member with other addresses of its coordinators. Nothing is stored.

        Raises:
            HomeUnusable: one is not host:port, or there are too many.
        """
        content = self.document.model_dump(mode="json", by_alias=True)
        content |= {"address": addresses[0], "other_addresses": list(addresses[1:])}
        try:
            document = IdentityDocument._from_content(content, "the coordinator's addresses")
        except DocumentInvalid as error:
            raise HomeUnusable(str(error)) from error
        return replace(self, document=document)

    @property
    def key_pem(self) -> bytes:
        """The private key for gRPC, PEM."""
        return key_pem(self.key)

    @property
    def certificate_pem(self) -> bytes:
        """The member's certificate for gRPC, PEM."""
        return certificate_from_der(self.certificate).public_bytes(serialization.Encoding.PEM)

    @property
    def root_pem(self) -> bytes:
        """The trusted roots for gRPC, PEM."""
        return self.trust.pem

    def issued_by_newest(self) -> bool:
        """Whether the newest authority that this member knows issued its certificate."""
        return issued_by(certificate_from_der(self.certificate), self.trust.roots[0])

    def issued_by_trusted(self) -> bool:
        """Whether an authority that is still trusted issued its certificate. Nobody accepts any other."""
        certificate = certificate_from_der(self.certificate)
        return any(issued_by(certificate, root) for root in self.trust.roots)

    def sign(self, message: bytes) -> bytes:
        """Signs a framed statement with RSA-PSS, as `tacit.identity` verifies it."""
        return sign(self.key, message)

    @classmethod
    def load(cls, home: Path, *, now: datetime | None = None) -> "MemberIdentity":
        """Reads and checks the whole identity. The result can be used at `now`, by default at this moment.

        Raises:
            NotEnrolled: There is no identity.
            HomeUnusable: A part is missing, open to others, of another federation, or has expired.
        """
        folder = Home(home)
        folder.settle()
        try:
            return cls._load(folder, now)
        except HomeUnusable:
            if not folder.lock.exists():
                raise
            # Another process may have been replacing the identity at this moment.
            with folder.locked():
                return cls._load(folder, now)

    @classmethod
    def _load(cls, folder: Home, now: datetime | None) -> "MemberIdentity":
        home, names = folder.path, folder.identity
        if not names.path.exists():
            raise NotEnrolled(f"{home} holds no identity; join a federation with `edge_client enrol`")
        folder.check_modes()
        try:
            document = IdentityDocument.from_file(names.document)
            key = own_key(names.key.read_bytes())
            certificate = certificate_from_pem(names.certificate.read_bytes())
            root = certificate_from_pem(names.root.read_bytes())
            listed = names.authorities.read_bytes() if names.authorities.exists() else None
        except OSError as error:
            raise HomeUnusable(f"{error.filename} cannot be read: {error.strerror}; {_AGAIN}") from error
        except DocumentInvalid as error:
            raise HomeUnusable(f"{error}; {_AGAIN}") from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise HomeUnusable(f"a certificate or the key in {home} cannot be read; {_AGAIN}") from error
        if federation_of(root) != document.federation:
            raise HomeUnusable(f"{names.root} is not the authority of the federation this member joined; {_AGAIN}")
        try:
            authorities = (
                Authorities.first(root)
                if listed is None
                else Authorities.read(listed, federation=document.federation, what=str(names.authorities))
            )
        except AuthoritiesInvalid as error:
            raise HomeUnusable(
                f"{error}; remove that file, and this member asks the coordinator for it again"
            ) from error
        der = certificate.public_bytes(serialization.Encoding.DER)
        present = now if now is not None else datetime.now(UTC)
        if present > certificate.not_valid_after_utc:
            raise HomeUnusable(
                f"{names.certificate}: the certificate expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} "
                f"UTC. `edge_client run` renews it in time while it runs, but this machine was off or without the "
                f"coordinator for too long. {_AGAIN[0].upper()}{_AGAIN[1:]}"
            )
        try:
            # A certificate of a retired authority passes as well, because it may be exchanged for a new one.
            verified = authorities.history.verify(der, role=Role.MEMBER, now=present)
        except CertificateInvalid as error:
            raise HomeUnusable(f"{names.certificate}: {error}; {_AGAIN}") from error
        if verified.identity.name != document.member:
            raise HomeUnusable(f"{names.certificate} belongs to {verified.identity.name}; {_AGAIN}")
        if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != verified.key:
            raise HomeUnusable(f"{names.key} is not the key of {names.certificate}; {_AGAIN}")
        known = None if listed is None else authorities
        return cls(home, document, key, der, verified.expires, root, verified.begins, known)


_AGAIN = "ask the operator for a new join token and run `edge_client enrol --force`"
