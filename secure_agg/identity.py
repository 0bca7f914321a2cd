"""What the protocol knows about identities: a name, a certificate that it cannot read, and two operations.

The caller handles certificates, chains, roles, revocation and clocks. `VerifyIdentity` is responsible for all of them:
it returns the member's name only if the certificate is valid now, chains to the caller's own trust store, belongs to
this federation and has the member role, and the signature over the message verifies under the certificate's key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["CertificateOf", "Identity", "IdentityInvalid", "KeyOf", "MemberId", "VerifyIdentity"]

MemberId = str


class IdentityInvalid(Exception):
    """A certificate, or a signature made with its key, is not acceptable. The text says what is wrong."""


class Identity(Protocol):
    """A member's own long-lived identity. Its key may be in a file, a smart card or a phone's key store."""

    @property
    def member(self) -> MemberId:
        """The name in the certificate."""

    @property
    def certificate(self) -> bytes:
        """The certificate, with its chain if there is one, in the encoding that `verify` expects."""

    def sign(self, message: bytes) -> bytes:
        """Signs a message. The protocol only asks for signatures over bytes that it framed itself."""


VerifyIdentity = Callable[[bytes, bytes, bytes], MemberId]
"""verify(certificate, message, signature) -> member, or raises IdentityInvalid."""

KeyOf = Callable[[bytes], bytes]
"""key_of(certificate) -> its public key in a unique encoding, so that a key in two certificates is noticed.

It is only called with certificates that `verify` has accepted. It may raise IdentityInvalid.
"""

CertificateOf = Callable[[bytes], bytes | None]
"""certificate_of(digest) -> the certificate with this SHA-256, if the caller's `verify` has accepted it before and the
caller still has it; None otherwise.

It resolves the digests in a roster. `verify` sees every certificate before anything relies on it and pays the cost of
checking its chain. There a caller can cache the certificate with its name and key, under its digest, as long as it
likes. A certificate found here goes through `verify` again, with the signature to check, so an outdated entry can cause
a refusal but never an acceptance.
"""
