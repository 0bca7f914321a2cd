"""The authorities that a federation has had, each signed by the one before it, and which of them are trusted now.

A federation is named by the SHA-256 of its first root, and keeps that name when the authority is replaced: jobs,
ledgers, receipts and join tokens name it. What proves that a later root speaks for it is this document:

- root N + 1 is signed by the key of root N (`succession`), so whoever knows one root can follow to the newest;
- the whole document is signed by the newest root's key: which roots are trusted still, and its number;
- a document follows another (`follows`) if it goes on from the same roots, takes nothing back, and has a higher number.
  So a member that has seen the next root takes no other one in its place, and a root that was retired stays retired.

It needs no protection on its way: whoever withholds it or sends an older one gains what a cut line gains. What it
cannot do: a thief of the present key can sign a next root of its own, for members that have not seen the true one.
Everything here is pure; what is stored where is the caller's.
"""

import base64
import binascii
from typing import Annotated, ClassVar, Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from tacit.documents import AtMost, Digest, Document, DocumentInvalid
from tacit.identity import CertificateInvalid, KeyUnfit, Trust, federation_of, fit_key, sign, verify_signature

__all__ = ["MAX_AUTHORITIES_BYTES", "MAX_ROOTS", "Authorities", "AuthoritiesInvalid"]

MAX_ROOTS = 16
# Sixteen certificates and signatures of the longest keys, in base64, and some.
MAX_AUTHORITIES_BYTES = 128 * 1024
# Nothing else that an authority signs begins so: a certificate's content begins with 0x30.
_SUCCESSION = b"tacit/authority/succession/1\x00"
_DOCUMENT = b"tacit/authority/document/1\x00"


class AuthoritiesInvalid(ValueError):
    """A document that proves nothing, or that does not follow the one that is known; the text says why."""


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


# A certificate or a signature, with the longest keys that are certified.
_Bytes = Annotated[bytes, PlainValidator(_bytes), Field(max_length=4096), PlainSerializer(_base64, return_type=str)]


class Authorities(Document):
    """One state of a federation's authorities. Made by `first` and its `succeeded_by` and `without`; read by `read`."""

    max_bytes: ClassVar[int] = MAX_AUTHORITIES_BYTES

    kind: Literal["tacit-authorities"] = "tacit-authorities"
    federation: Digest
    # DER, the first one first.
    roots: Annotated[tuple[_Bytes, ...], AtMost(MAX_ROOTS)] = Field(min_length=1)
    # Of each root but the first: by the one before it.
    successions: Annotated[tuple[_Bytes, ...], AtMost(MAX_ROOTS - 1)] = ()
    # The first of `roots` that is trusted still.
    oldest: Annotated[int, Field(ge=0)] = 0
    # Grows with every change.
    number: Annotated[int, Field(ge=0)] = 0
    # By the newest root, over everything else.
    signature: _Bytes = b""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.successions) != len(self.roots) - 1:
            raise ValueError("every root but the first is signed by the one before it")
        if self.oldest >= len(self.roots):
            raise ValueError("one root is trusted at least")
        return self

    # ---- what it says --------------------------------------------------------------------------------------------

    @property
    def certificates(self) -> tuple[x509.Certificate, ...]:
        """All roots, the newest first: also those that are retired."""
        return tuple(x509.load_der_x509_certificate(root) for root in reversed(self.roots))

    @property
    def trust(self) -> Trust:
        """Whose certificates count now."""
        return Trust(self.federation, self.certificates[: len(self.roots) - self.oldest])

    @property
    def history(self) -> Trust:
        """Whose certificates ever counted: for what was signed then."""
        return Trust(self.federation, self.certificates)

    @property
    def newest(self) -> bytes:
        """SHA-256 of the root that issues now, 32 bytes."""
        return federation_of(self.certificates[0])

    # ---- how it changes ------------------------------------------------------------------------------------------

    @classmethod
    def first(cls, root: x509.Certificate) -> Self:
        """Of a federation that has had one authority. Nobody signed it, and it needs no signature."""
        return cls(federation=federation_of(root), roots=(_der(root),))

    def succeeded_by(self, root: x509.Certificate, *, old: rsa.RSAPrivateKey, new: rsa.RSAPrivateKey) -> Self:
        """With one root more. old, new: the keys of the newest root so far and of the next one.

        Raises:
            ValueError: there are `MAX_ROOTS` already, or one of them had this key.
        """
        if len(self.roots) >= MAX_ROOTS:
            raise ValueError(f"a federation has at most {MAX_ROOTS} authorities")
        if root.public_key() in [each.public_key() for each in self.certificates]:
            raise ValueError(
                "an authority of this federation has had its key, and one that was retired would be trusted again; "
                "make a key that is new"
            )
        signature = sign(old, self._succession(len(self.roots), _der(root)))
        changed = {
            "roots": (*self.roots, _der(root)),
            "successions": (*self.successions, signature),
            "number": self.number + 1,
        }
        return self._signed(changed, new)

    def without(self, oldest: int, *, key: rsa.RSAPrivateKey) -> Self:
        """With the roots before `oldest` retired. key: of the newest root."""
        return self._signed({"oldest": oldest, "number": self.number + 1}, key)

    def _signed(self, changed: dict[str, object], key: rsa.RSAPrivateKey) -> Self:
        unsigned = self.model_validate({**self.model_dump(), **changed, "signature": b""})
        return unsigned.model_copy(update={"signature": sign(key, _DOCUMENT + unsigned.canonical())})

    def _succession(self, generation: int, root: bytes) -> bytes:
        # Every field has a fixed length but the last.
        return _SUCCESSION + self.federation + generation.to_bytes(4, "big") + root

    # ---- whether it holds ----------------------------------------------------------------------------------------

    @classmethod
    def read(cls, data: bytes, *, federation: bytes, what: str = "the list of authorities") -> Self:
        """A document that proves itself to whoever knows the federation's name.

        Raises:
            AuthoritiesInvalid: too long, no such document, of another federation, or a signature does not match.
        """
        try:
            found = cls.from_json(data, what=what)
        except DocumentInvalid as error:
            raise AuthoritiesInvalid(str(error)) from error
        found._check(federation, what)
        return found

    def _check(self, federation: bytes, what: str) -> None:
        try:
            certificates = [x509.load_der_x509_certificate(root) for root in self.roots]
        except ValueError as error:
            raise AuthoritiesInvalid(f"{what} holds a root that is no certificate") from error
        if self.federation != federation or federation_of(certificates[0]) != federation:
            raise AuthoritiesInvalid(f"{what} belongs to another federation")
        keys = [_key_of(certificate, what) for certificate in certificates]
        # A retired key under another certificate would be trusted again.
        if len({key.public_numbers() for key in keys}) != len(keys):
            raise AuthoritiesInvalid(f"{what} names one root's key twice")
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
            return
        try:
            unsigned = self.model_copy(update={"signature": b""})
            verify_signature(keys[-1], _DOCUMENT + unsigned.canonical(), self.signature)
        except CertificateInvalid as error:
            raise AuthoritiesInvalid(f"{what} is not signed by the newest authority in it") from error

    def follows(self, known: "Authorities") -> bool:
        """Whether this is newer than what is known; the same again is not.

        Raises:
            AuthoritiesInvalid: it contradicts what is known: another next root, a retired one that is back.
        """
        if self.roots[: len(known.roots)] != known.roots:
            if known.roots[: len(self.roots)] == self.roots:
                return False  # Older: somebody was asleep.
            raise AuthoritiesInvalid(
                "the federation is said to have another authority than the one that this machine knows: somebody has, "
                "or had, the key of an earlier one; tell the operator and the other members by other means"
            )
        if self.number <= known.number:
            if self.number == known.number and self != known:
                raise AuthoritiesInvalid(
                    f"two different lists of authorities have the number {self.number}; tell the operator"
                )
            return False
        if self.oldest < known.oldest:
            raise AuthoritiesInvalid("an authority that was retired is said to be trusted again; tell the operator")
        return True


def _der(root: x509.Certificate) -> bytes:
    return root.public_bytes(serialization.Encoding.DER)


def _key_of(certificate: x509.Certificate, what: str) -> rsa.RSAPublicKey:
    try:
        return fit_key(certificate.public_key())
    except KeyUnfit as error:
        raise AuthoritiesInvalid(f"{what}: an authority's key {error}") from error
