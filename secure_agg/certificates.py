"""Converts rosters to digests of certificates and keys.

Guarantees: an advertisement means the same whole and with the SHA-256 of its certificate and keys, because the signed
statement and the roster's root hold the digests in both cases. Certificates and keys are looked up by their digest. So
a supplier of them, including the coordinator, can at most leave one out.

Callers decide where certificates come from and which to keep (`CertificateOf`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from secure_agg.identity import CertificateOf
from secure_agg.messages import Advertisement, DigestAdvertisement, DigestRoster, Roster

__all__ = ["by_digest", "certificate_digest", "each_by_digest", "keys_digest", "known", "roster_by_digest"]


def certificate_digest(certificate: bytes) -> bytes:
    """SHA-256 of a certificate, 32 bytes."""
    return hashlib.sha256(certificate).digest()


def keys_digest(keys: bytes) -> bytes:
    """SHA-256 of a member's two public keys in an advertisement, 32 bytes."""
    return hashlib.sha256(keys).digest()


def by_digest(advertisement: Advertisement) -> DigestAdvertisement:
    """Replaces an advertisement's certificate and keys with their digests."""
    return DigestAdvertisement(
        advertisement.member,
        certificate_digest(advertisement.certificate),
        keys_digest(advertisement.keys),
        advertisement.nonce,
        advertisement.signature,
    )


def roster_by_digest(roster: Roster) -> DigestRoster:
    """Replaces a roster's certificates and keys with digests. The result has about an eighth of the size."""
    return DigestRoster(tuple(map(by_digest, roster.advertisements)))


def each_by_digest(items: Iterable[bytes]) -> dict[bytes, bytes]:
    """Certificates and keys under their digests. A digest never stands for one of each, because SHA-256 is collision
    resistant.
    """
    return {hashlib.sha256(item).digest(): item for item in items}


def known(digest: bytes, given: Mapping[bytes, bytes], certificate_of: CertificateOf | None) -> bytes | None:
    """The certificate with this digest; None if neither source has it."""
    found = given.get(digest)
    if found is None and certificate_of is not None:
        found = certificate_of(digest)
    # A certificate other than the requested one counts as no answer.
    return found if found is not None and certificate_digest(found) == digest else None
