"""The member's own folder: who this machine is, and the key that proves it.

`--home`, else `TACIT_HOME`, else `~/.tacit`; mode 0700. Nothing in it ever leaves the machine. Of enrolment
it holds

    identity/                 complete, or not there at all
      key.pem                 0600, made here
      cert.pem                what the federation's authority made of it
      root.pem                the authority's certificate; the only one this member trusts
      identity.json           `IdentityDocument`
    pending-TOKEN/            the same while the token of that id is being spent; key.pem comes first, so that
    an
                              enrolment that broke off is repeated with the same key

The other rooms keep their files beside these (ledger, private parameters, receipts). A folder or a key that
others may read is refused, not repaired: who could read a key may have copied it.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import field_validator

from tacit.documents import Digest, Document, DocumentInvalid
from tacit.identity import CertificateInvalid, Role, federation_of, key_pem, name_is_valid, sign, verify_certificate
from tacit.token import split_address

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
    """The folder does not hold a usable identity; the sentence says what to do."""


class NotEnrolled(HomeUnusable):
    """There is no identity here yet."""


class IdentityDocument(Document):
    """identity.json."""

    federation: Digest
    member: str
    # host:port of the federation port.
    address: str

    @field_validator("member")
    @classmethod
    def _member(cls, value: str) -> str:
        if not name_is_valid(value):
            raise ValueError("no member's name")
        return value

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value


def home_path(option: Path | None = None) -> Path:
    """The folder to use: the option, else `TACIT_HOME`, else `~/.tacit`."""
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


@dataclass(frozen=True, slots=True)
class Home:
    """A member's folder, and the one step that changes who the member is."""

    path: Path

    @property
    def identity(self) -> IdentityFolder:
        return IdentityFolder(self.path / "identity")

    def pending(self, token_id: str) -> IdentityFolder:
        """Where an enrolment with this token keeps what it has so far."""
        return IdentityFolder(self.path / f"{_PENDING}{token_id}")

    @property
    def _old(self) -> Path:
        return self.path / "identity.old"

    def prepare(self) -> None:
        """Makes the folder, 0700, or checks the one that is there.

        Raises:
            HomeUnusable: it cannot be made, or others may look into it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise HomeUnusable(f"{self.path} cannot be made: {error.strerror}; choose another with --home") from error
        self.check_modes()

    def check_modes(self) -> None:
        """Raises: HomeUnusable: others than the owner may look into the folder, or read or write the key."""
        _only_owner(self.path, "chmod 700")
        if self.identity.key.exists():
            _only_owner(self.identity.key, "chmod 600")

    def adopt(self, pending: IdentityFolder) -> None:
        """Makes a complete pending identity the member's own, in place of the present one if there is any."""
        with self._locked():
            if not pending.path.exists():
                return  # Another process has settled it meanwhile.
            if self.identity.path.exists():
                self.identity.path.rename(self._old)
            # A crash here leaves no identity; `settle` finishes the step.
            pending.path.rename(self.identity.path)
            self._clean()

    def settle(self) -> None:
        """Finishes an enrolment that was interrupted after everything was stored."""
        if self.identity.path.exists() or not self._interrupted():
            return
        with self._locked():
            left = self._interrupted()
            if left and not self.identity.path.exists():
                left[0].rename(self.identity.path)
                self._clean()

    def _interrupted(self) -> list[Path]:
        # The document is written last, and only then is an old identity put aside: the newest complete one
        # counts.
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
    def _locked(self) -> Iterator[None]:
        with (self.path / "identity.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


_PENDING = "pending-"


@dataclass(frozen=True, slots=True, repr=False)
class MemberIdentity:
    """A member, complete: it can dial the coordinator and sign. Its `repr` shows no key."""

    home: Path
    document: IdentityDocument
    key: rsa.RSAPrivateKey
    # DER.
    certificate: bytes
    expires: datetime
    root: x509.Certificate

    def __repr__(self) -> str:
        return f"MemberIdentity({self.document.member!r}, federation={self.document.federation.hex()[:16]}...)"

    @property
    def member(self) -> str:
        """The member's name in the federation."""
        return self.document.member

    @property
    def federation(self) -> bytes:
        """SHA-256 of the root certificate, 32 bytes."""
        return self.document.federation

    @property
    def address(self) -> str:
        """host:port of the federation port."""
        return self.document.address

    @property
    def key_pem(self) -> bytes:
        """The private key for gRPC, PEM."""
        return key_pem(self.key)

    @property
    def certificate_pem(self) -> bytes:
        """The member's certificate for gRPC, PEM."""
        return x509.load_der_x509_certificate(self.certificate).public_bytes(serialization.Encoding.PEM)

    @property
    def root_pem(self) -> bytes:
        """The root for gRPC, PEM."""
        return self.root.public_bytes(serialization.Encoding.PEM)

    def sign(self, message: bytes) -> bytes:
        """RSA-PSS over a framed statement, as `tacit.identity` verifies it."""
        return sign(self.key, message)

    @classmethod
    def load(cls, home: Path, *, now: datetime | None = None) -> "MemberIdentity":
        """Reads and checks the whole identity: what it returns can be used at `now` (by default, at this
        moment).

        Raises:
            NotEnrolled: there is none.
            HomeUnusable: a part is missing, open to others, belongs to another federation or has expired.
        """
        folder = Home(home)
        folder.settle()
        names = folder.identity
        if not names.path.exists():
            raise NotEnrolled(f"{home} holds no identity; join a federation with `edge_client enrol TOKEN`")
        folder.check_modes()
        try:
            document = IdentityDocument.from_json(names.document.read_bytes(), what=str(names.document))
            key = serialization.load_pem_private_key(names.key.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(names.certificate.read_bytes())
            root = x509.load_pem_x509_certificate(names.root.read_bytes())
        except OSError as error:
            raise HomeUnusable(f"{error.filename} cannot be read: {error.strerror}; {_AGAIN}") from error
        except DocumentInvalid as error:
            raise HomeUnusable(f"{error}; {_AGAIN}") from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise HomeUnusable(f"a certificate or the key in {home} cannot be read; {_AGAIN}") from error
        if federation_of(root) != document.federation:
            raise HomeUnusable(f"{names.root} is not the authority of the federation this member joined; {_AGAIN}")
        der = certificate.public_bytes(serialization.Encoding.DER)
        try:
            verified = verify_certificate(
                der,
                root,
                federation=document.federation,
                role=Role.MEMBER,
                now=now if now is not None else datetime.now(UTC),
            )
        except CertificateInvalid as error:
            raise HomeUnusable(f"{names.certificate}: {error}; {_AGAIN}") from error
        if verified.identity.name != document.member:
            raise HomeUnusable(f"{names.certificate} belongs to {verified.identity.name}; {_AGAIN}")
        if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != verified.key:
            raise HomeUnusable(f"{names.key} is not the key of {names.certificate}; {_AGAIN}")
        return cls(home, document, key, der, verified.expires, root)


_AGAIN = "ask the operator for a new join token and run `edge_client enrol TOKEN --force`"


def _only_owner(path: Path, command: str) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise HomeUnusable(f"{path} cannot be read: {error.strerror}") from error
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise HomeUnusable(f"{path} belongs to another user; run as that user, or choose another with --home")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise HomeUnusable(
            f"{path} may be used by others (mode {mode:04o}): if somebody else uses this machine, enrol "
            f"anew; else close it with `{command} {path}`"
        )
