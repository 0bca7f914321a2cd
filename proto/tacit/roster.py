"""The roster log: what an entry, a signed head and a cosignature say, and whether they hold.

The coordinator logs every certificate of a member that a federation issues or revokes. The tree is that of
`secure_agg.transparency`; the statements are framed by `secure_agg.transcript`. A head is signed by the server's key
and comes with its certificate, so two heads that contradict each other prove that somebody with that key, or the
authority's, showed two logs. A witness signs with an Ed25519 key that members pin, a member with its certificate's key.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from secure_agg.transcript import Purpose, digest, frame
from secure_agg.transparency import leaf_hash
from tacit.identity import CertificateInvalid, Role, Trust, name_is_valid, sign, verify_signature
from tacit.limits import LAST_MS

__all__ = [
    "MAX_COSIGNATURE_AGE",
    "MAX_ENTRIES",
    "MAX_HEAD_AGE",
    "MAX_SKEW",
    "Cosignature",
    "Entry",
    "Head",
    "HeadInvalid",
    "Kind",
    "SignedHead",
    "signer_id",
]

# Entries that a member keeps at most: 40 renewals a year of 10,000 members for ten years.
MAX_ENTRIES = 4_000_000
# How old the head of a new attempt may be, and how far in the future: clocks differ.
MAX_HEAD_AGE = timedelta(hours=1)
MAX_SKEW = timedelta(minutes=5)
# A cosignature counts for this long. A witness signs every head that it sees, and at least once an hour.
MAX_COSIGNATURE_AGE = timedelta(days=1)

_DIGEST = 32


class HeadInvalid(ValueError):
    """A head or a cosignature does not hold. The text is a clause that says why."""


class Kind(StrEnum):
    """What happened to a certificate."""

    ISSUED = "issued"
    RENEWED = "renewed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log.

    Args:
        certificate: SHA-256 of the certificate, 32 bytes.
        key: SHA-256 of its public key (SubjectPublicKeyInfo, DER), 32 bytes: what `peers` pins.
        name: the holder's name.
        role: the holder's role, which is member.
        kind: what happened.
        at_ms: when the coordinator says that it did, in milliseconds since 1970.
    """

    certificate: bytes
    key: bytes
    name: str
    role: Role
    kind: Kind
    at_ms: int

    def __post_init__(self) -> None:
        if len(self.certificate) != _DIGEST or len(self.key) != _DIGEST:
            raise ValueError("an entry names certificate and key by 32 bytes each")
        if not name_is_valid(self.name):
            raise ValueError("an entry names no valid member")
        if self.role is not Role.MEMBER:
            raise ValueError(f"an entry has the role {self.role.value}, and the log has members alone")
        if not 0 <= self.at_ms <= LAST_MS:
            raise ValueError("an entry has an impossible time")

    @property
    def leaf(self) -> bytes:
        """The entry's leaf hash, 32 bytes."""
        return leaf_hash(
            frame(
                Purpose.LOG_ENTRY, self.certificate, self.key, self.name, self.role.value, self.kind.value, self.at_ms
            )
        )


@dataclass(frozen=True, slots=True)
class Head:
    """The state of a federation's log at a time: the number of its entries and the root over them."""

    federation: bytes
    size: int
    root: bytes
    at_ms: int

    def __post_init__(self) -> None:
        if len(self.federation) != _DIGEST or len(self.root) != _DIGEST:
            raise HeadInvalid("the head names federation and root by 32 bytes each")
        if not (0 <= self.size < 2**62 and 0 <= self.at_ms <= LAST_MS):
            raise HeadInvalid("the head has an impossible size or time")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the statement, 32 bytes: what an attempt's context holds."""
        return digest(Purpose.LOG_HEAD, *self._fields)

    @property
    def statement(self) -> bytes:
        """What the coordinator signs."""
        return frame(Purpose.LOG_HEAD, *self._fields)

    @property
    def _fields(self) -> tuple[bytes, int, bytes, int]:
        return (self.federation, self.size, self.root, self.at_ms)

    @property
    def at(self) -> datetime:
        """When it was signed, by the coordinator's clock."""
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A head, signed by the server.

    Args:
        head: what is signed.
        signature: RSA-PSS.
        certificate: the server's certificate, DER.
    """

    head: Head
    signature: bytes
    certificate: bytes

    @classmethod
    def made(cls, head: Head, key: rsa.RSAPrivateKey, certificate: bytes) -> "SignedHead":
        """Signs a head."""
        return cls(head, sign(key, head.statement), certificate)

    def check(self, trust: Trust) -> None:
        """Checks who signed. The server's certificate need not be valid now: it was when it signed.

        Raises:
            HeadInvalid: another federation's, not signed by a server of it, or at a time when its certificate was not
                valid.
        """
        if self.head.federation != trust.federation:
            raise HeadInvalid("it is the head of another federation's log")
        try:
            found = trust.issued(self.certificate, (Role.SERVER,))
            verify_signature(found.key, self.head.statement, self.signature)
        except CertificateInvalid as error:
            raise HeadInvalid(f"no server of this federation signed it: {error}") from error
        if not found.begins <= self.head.at <= found.expires:
            raise HeadInvalid("its time is not within the validity of the server's certificate")

    def check_time(self, now: datetime) -> None:
        """Checks that the head was signed lately.

        Raises:
            HeadInvalid: it is from the future, or too old for an attempt that opens now.
        """
        if self.head.at > now + MAX_SKEW:
            raise HeadInvalid(
                f"it is from the future: it says {_time(self.head.at)}, and this machine's clock {_time(now)}"
            )
        if self.head.at < now - MAX_HEAD_AGE:
            raise HeadInvalid(
                f"it is out of date: it says {_time(self.head.at)}, and this machine's clock {_time(now)}"
            )


@dataclass(frozen=True, slots=True)
class Cosignature:
    """Somebody else's signature: I have seen this head, and my earlier heads begin its log.

    Args:
        signer: a witness's Ed25519 key (32 bytes), or a member's certificate (DER).
        size: number of entries of the head.
        root: its root.
        at_ms: when it was cosigned, by the signer's clock.
        signature: Ed25519, or RSA-PSS.
    """

    signer: bytes
    size: int
    root: bytes
    at_ms: int
    signature: bytes

    @property
    def is_witness(self) -> bool:
        """Whether a witness signed, and not a member."""
        return len(self.signer) == _DIGEST

    @staticmethod
    def statement(federation: bytes, signer: bytes, size: int, root: bytes, at_ms: int) -> bytes:
        """What is signed."""
        return frame(Purpose.LOG_COSIGNATURE, federation, signer, size, root, at_ms)

    @classmethod
    def by_witness(cls, head: Head, key: Ed25519PrivateKey, at_ms: int) -> "Cosignature":
        """A witness signs."""
        signer = key.public_key().public_bytes_raw()
        signed = cls.statement(head.federation, signer, head.size, head.root, at_ms)
        return cls(signer, head.size, head.root, at_ms, key.sign(signed))

    @classmethod
    def by_member(cls, head: Head, key: rsa.RSAPrivateKey, certificate: bytes, at_ms: int) -> "Cosignature":
        """A member signs with the key of its certificate."""
        signed = cls.statement(head.federation, certificate, head.size, head.root, at_ms)
        return cls(certificate, head.size, head.root, at_ms, sign(key, signed))

    def check(self, trust: Trust) -> str:
        """Checks the signature. Whether the signer counts is the caller's decision.

        Returns:
            The member's name; empty for a witness.

        Raises:
            HeadInvalid: the signature does not match, or no member of this federation made it.
        """
        signed = self.statement(trust.federation, self.signer, self.size, self.root, self.at_ms)
        if self.is_witness:
            try:
                Ed25519PublicKey.from_public_bytes(self.signer).verify(self.signature, signed)
            except (InvalidSignature, ValueError) as error:
                raise HeadInvalid("the witness's signature does not match") from error
            return ""
        try:
            found = trust.issued(self.signer, (Role.MEMBER,))
            verify_signature(found.key, signed, self.signature)
        except CertificateInvalid as error:
            raise HeadInvalid(f"no member of this federation signed it: {error}") from error
        return found.identity.name


def signer_id(signer: bytes) -> bytes:
    """Names a signer: SHA-256 of a witness's key or of a member's certificate."""
    return hashlib.sha256(signer).digest()


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
