"""Converts rosters to certificate digests and back to whole certificates.

Guarantees: an advertisement means the same with its certificate and with the certificate's SHA-256, because the signed
statement and the roster's root hold the digest in both cases. A certificate replaces a digest only if it has that
digest. So a supplier of certificates, including the coordinator, can at most leave one out.

Callers decide where certificates come from and which to keep (`CertificateOf`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from secure_agg.identity import CertificateOf
from secure_agg.messages import Advertisement, DigestAdvertisement, DigestRoster, Roster

__all__ = ["by_digest", "certificate_digest", "certificates_by_digest", "roster_by_digest", "unknown", "whole"]


def certificate_digest(certificate: bytes) -> bytes:
    """SHA-256 of a certificate, 32 bytes."""
    return hashlib.sha256(certificate).digest()


def by_digest(advertisement: Advertisement) -> DigestAdvertisement:
    """Replaces an advertisement's certificate with its digest."""
    return DigestAdvertisement(
        advertisement.member,
        certificate_digest(advertisement.certificate),
        advertisement.masking_key,
        advertisement.sealing_key,
        advertisement.nonce,
        advertisement.signature,
    )


def roster_by_digest(roster: Roster) -> DigestRoster:
    """Replaces a roster's certificates with digests. The result has at most a quarter of the size."""
    return DigestRoster(tuple(map(by_digest, roster.advertisements)))


def certificates_by_digest(certificates: Iterable[bytes]) -> dict[bytes, bytes]:
    return {certificate_digest(certificate): certificate for certificate in certificates}


def unknown(
    roster: DigestRoster, known: Mapping[bytes, bytes], certificate_of: CertificateOf | None
) -> tuple[bytes, ...]:
    """The digests in a roster for which neither source has a certificate, each once, in the order of the roster."""
    digests = dict.fromkeys(entry.certificate_digest for entry in roster.advertisements)
    return tuple(digest for digest in digests if _find(digest, known, certificate_of) is None)


def whole(
    entry: DigestAdvertisement, known: Mapping[bytes, bytes], certificate_of: CertificateOf | None
) -> Advertisement | None:
    """The advertisement with its certificate; None if neither source has it."""
    certificate = _find(entry.certificate_digest, known, certificate_of)
    if certificate is None:
        return None
    return Advertisement(entry.member, certificate, entry.masking_key, entry.sealing_key, entry.nonce, entry.signature)


def _find(digest: bytes, known: Mapping[bytes, bytes], certificate_of: CertificateOf | None) -> bytes | None:
    found = known.get(digest)
    if found is None and certificate_of is not None:
        found = certificate_of(digest)
    # A certificate other than the requested one counts as no answer.
    return found if found is not None and certificate_digest(found) == digest else None
