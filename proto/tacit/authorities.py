"""The authorities that a federation has had, each signed by the one before it, and which of them are trusted now.

A federation is named by the SHA-256 of its first root and keeps that name when the authority is replaced: jobs,
ledgers, receipts and join tokens name it. This document proves that a later root speaks for the federation:

- The key of root N signs root N + 1 (`_succession`), so anyone who knows one root can follow the chain to the newest.
- The newest root's key signs the whole document, including its number and which roots are still trusted.
- A document follows another (`follows`) if it continues the same roots, reinstates none that was retired, and has a
  higher number. So a member that has seen the next root accepts no other in its place, and a retired root stays
  retired.

The document needs no protection in transit: withholding it, or sending an older one, achieves no more than cutting the
connection. One attack remains: a thief of the current key can sign a next root of its own and present it to members
that have not seen the true one. This module is pure; callers decide what is stored where.
"""

import base64
import binascii
from typing import Annotated, ClassVar, Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from tacit.certificates import certificate_from_der
from tacit.documents import AtMost, Digest, Document, DocumentInvalid
from tacit.identity import CertificateInvalid, KeyUnfit, Trust, federation_of, key_in, sign, verify_signature

__all__ = ["MAX_AUTHORITIES_BYTES", "MAX_ROOTS", "Authorities", "AuthoritiesInvalid"]

MAX_ROOTS = 16
# Room for sixteen certificates and signatures of the longest keys, in base64.
MAX_AUTHORITIES_BYTES = 128 * 1024
# Nothing else that an authority signs begins like this: a certificate's content begins with 0x30.
_SUCCESSION = b"tacit/authority/succession/1\x00"
_DOCUMENT = b"tacit/authority/document/1\x00"


class AuthoritiesInvalid(ValueError):
    """A document proves nothing, or contradicts the one that is known; the text says why."""


def _bytes(value: object) -> bytes:
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError("it is not base64") from error
    if not isinstance(value, bytes):
        raise ValueError("it is not base64")
    return value


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


# A certificate or a signature. The limit fits the longest keys that are certified.
_Bytes = Annotated[bytes, PlainValidator(_bytes), Field(max_length=4096), PlainSerializer(_base64, return_type=str)]


class Authorities(Document):
    """One state of a federation's authorities. `first`, `succeeded_by` and `without` make one; `read` reads one."""

    max_bytes: ClassVar[int] = MAX_AUTHORITIES_BYTES

    kind: Literal["tacit-authorities"] = "tacit-authorities"
    federation: Digest
    # Certificates, DER, oldest first.
    roots: Annotated[tuple[_Bytes, ...], AtMost(MAX_ROOTS)] = Field(min_length=1)
    # For each root except the first, the signature by the one before it.
    successions: Annotated[tuple[_Bytes, ...], AtMost(MAX_ROOTS - 1)] = ()
    # Index in `roots` of the oldest one that is still trusted.
    oldest: Annotated[int, Field(ge=0)] = 0
    # Grows with every change.
    number: Annotated[int, Field(ge=0)] = 0
    # Signature by the newest root over everything else.
    signature: _Bytes = b""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.successions) != len(self.roots) - 1:
            raise ValueError("every root but the first is signed by the one before it")
        if self.oldest >= len(self.roots):
            raise ValueError("at least one root is trusted")
        return self

    # ---- what it says --------------------------------------------------------------------------------------------

    @property
    def certificates(self) -> tuple[x509.Certificate, ...]:
        """All roots, including retired ones, newest first."""
        return tuple(certificate_from_der(root) for root in reversed(self.roots))

    @property
    def trust(self) -> Trust:
        """The roots whose certificates count now."""
        return Trust(self.federation, self.certificates[: len(self.roots) - self.oldest])

    @property
    def history(self) -> Trust:
        """The roots whose certificates ever counted, to check what was signed at that time."""
        return Trust(self.federation, self.certificates)

    @property
    def newest(self) -> bytes:
        """SHA-256 of the root that issues certificates now, 32 bytes."""
        return federation_of(self.certificates[0])

    # ---- how it changes ------------------------------------------------------------------------------------------

    @classmethod
    def first(cls, root: x509.Certificate) -> Self:
        """The list of a federation that has had one authority. It needs no signature and has none."""
        return cls(federation=federation_of(root), roots=(_der(root),))

    def succeeded_by(self, root: x509.Certificate, *, old: rsa.RSAPrivateKey, new: rsa.RSAPrivateKey) -> Self:
        """Adds a root.

        Args:
            root: the next root.
            old: key of the newest root so far.
            new: key of the next root.

        Raises:
            ValueError: there are already `MAX_ROOTS`, or one of them had this key.
        """
        if len(self.roots) >= MAX_ROOTS:
            raise ValueError(f"a federation has at most {MAX_ROOTS} authorities")
        if root.public_key() in [each.public_key() for each in self.certificates]:
            raise ValueError(
                "an authority of this federation has had its key already, so a retired one could be trusted again; "
                "make a new key"
            )
        signature = sign(old, self._succession(len(self.roots), _der(root)))
        changed = {
            "roots": (*self.roots, _der(root)),
            "successions": (*self.successions, signature),
            "number": self.number + 1,
        }
        return self._signed(changed, new)

    def without(self, oldest: int, *, key: rsa.RSAPrivateKey) -> Self:
        """Retires the roots before `oldest`.

        Args:
            oldest: index of the oldest root that stays trusted.
            key: key of the newest root.
        """
        return self._signed({"oldest": oldest, "number": self.number + 1}, key)

    def _signed(self, changed: dict[str, object], key: rsa.RSAPrivateKey) -> Self:
        unsigned = self.model_validate({**self.model_dump(), **changed, "signature": b""})
        return unsigned.model_copy(update={"signature": sign(key, _DOCUMENT + unsigned.canonical())})

    def _succession(self, generation: int, root: bytes) -> bytes:
        # Every field except the last has a fixed length.
        return _SUCCESSION + self.federation + generation.to_bytes(4, "big") + root

    # ---- whether it holds ----------------------------------------------------------------------------------------

    @classmethod
    def read(cls, data: bytes, *, federation: bytes, what: str = "the list of authorities") -> Self:
        """Reads a document and verifies it. Knowing the federation's name is enough to verify it.

        Args:
            data: canonical JSON.
            federation: SHA-256 of its first root, 32 bytes.
            what: how an error names the document.

        Raises:
            AuthoritiesInvalid: too long, not such a document, of another federation, or a signature does not match.
        """
        try:
            found = cls.from_json(data, what=what)
        except DocumentInvalid as error:
            raise AuthoritiesInvalid(str(error)) from error
        found._check(federation, what)
        return found

    def _check(self, federation: bytes, what: str) -> None:
        try:
            certificates = [certificate_from_der(root) for root in self.roots]
        except ValueError as error:
            raise AuthoritiesInvalid(f"{what} holds a root that is not a certificate") from error
        if self.federation != federation or federation_of(certificates[0]) != federation:
            raise AuthoritiesInvalid(f"{what} belongs to another federation")
        keys = [_key_of(certificate, what) for certificate in certificates]
        # Otherwise a retired key could become trusted again under another certificate.
        if len({key.public_numbers() for key in keys}) != len(keys):
            raise AuthoritiesInvalid(f"{what} holds two roots with the same key")
        for generation, signature in enumerate(self.successions, start=1):
            try:
                verify_signature(keys[generation - 1], self._succession(generation, self.roots[generation]), signature)
            except CertificateInvalid as error:
                raise AuthoritiesInvalid(
                    f"{what}: authority {generation + 1} is not signed by the one before it"
                ) from error
        if self.number == 0:
            if len(self.roots) != 1:
                raise AuthoritiesInvalid(f"{what} is not signed")
            # Nobody verifies it, so anybody could make a second first list, which would contradict the true one.
            if self.signature:
                raise AuthoritiesInvalid(f"{what} is the first one and carries a signature; the first one has none")
            return
        try:
            unsigned = self.model_copy(update={"signature": b""})
            verify_signature(keys[-1], _DOCUMENT + unsigned.canonical(), self.signature)
        except CertificateInvalid as error:
            raise AuthoritiesInvalid(f"{what} is not signed by the newest authority in it") from error

    def follows(self, known: "Authorities") -> bool:
        """Whether this document is newer than the known one. An equal one is not.

        Raises:
            AuthoritiesInvalid: it contradicts the known one: it has another next root, or reinstates a retired one.
        """
        if self.roots[: len(known.roots)] != known.roots:
            if known.roots[: len(self.roots)] == self.roots:
                return False  # An older document.
            raise AuthoritiesInvalid(
                "the list of authorities contradicts the one that this machine knows: somebody has, or had, the key of "
                "an earlier authority; tell the operator and the other members over another channel"
            )
        if self.number <= known.number:
            if self.number == known.number and self != known:
                raise AuthoritiesInvalid(
                    f"two different lists of authorities have the number {self.number}; tell the operator"
                )
            return False
        if self.oldest < known.oldest:
            raise AuthoritiesInvalid("the list of authorities trusts a retired authority again; tell the operator")
        return True


def _der(root: x509.Certificate) -> bytes:
    return root.public_bytes(serialization.Encoding.DER)


def _key_of(certificate: x509.Certificate, what: str) -> rsa.RSAPublicKey:
    try:
        return key_in(certificate)
    except KeyUnfit as error:
        raise AuthoritiesInvalid(f"{what}: an authority's key {error}") from error
