"""What the protocol knows of identities: a name, a certificate it cannot read, and two operations.

Certificates, chains, roles, revocation and clocks belong to the caller. `VerifyIdentity` must answer for all
of them: it returns the member's name only if the certificate is valid now, chains to the caller's own trust
store, belongs to this federation and carries the member role, and the signature over the message is good
under the certificate's key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["CertificateOf", "Identity", "IdentityInvalid", "KeyOf", "MemberId", "VerifyIdentity"]

MemberId = str


class IdentityInvalid(Exception):
    """A certificate or a signature under it is not acceptable. The text says what is wrong with it."""


class Identity(Protocol):
    """A member's own long-lived identity: the key may live in a file, a smart card or a phone's key store."""

    @property
    def member(self) -> MemberId:
        """The name inside the certificate."""

    @property
    def certificate(self) -> bytes:
        """The certificate, with its chain if there is one, in whatever encoding `verify` expects."""

    def sign(self, message: bytes) -> bytes:
        """Sign a message. The protocol only ever asks for signatures over bytes it framed itself."""


VerifyIdentity = Callable[[bytes, bytes, bytes], MemberId]
"""verify(certificate, message, signature) -> member, or raises IdentityInvalid."""

KeyOf = Callable[[bytes], bytes]
"""key_of(certificate) -> its public key in one encoding, so that a key in two certificates is seen.

It is only asked about certificates that `verify` has accepted; it may raise IdentityInvalid.
"""

CertificateOf = Callable[[bytes], bytes | None]
"""certificate_of(digest) -> the certificate with this SHA-256, from among those that the caller's `verify` accepted
before and that the caller still keeps; None for any other.

It is how a roster of digests is read. What it costs to check a chain is paid in `verify`, which sees every certificate
before it is relied on: a caller remembers there, under the digest, the certificate with its name and key, for as long
as it likes. A certificate found here goes through `verify` again, with the signature it is to check, so an entry that
was kept too long makes a refusal, never an acceptance.
"""
