"""`verify`, `key_of` and `certificate_of` for the aggregation protocol, over this federation's certificates.

The protocol does not know certificates; both sides pass it these functions. Certificates found good are cached, because
checking a chain costs more than checking a signature. Validity is checked every time, so an outdated cache entry can
cause a refusal but never an acceptance.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from cryptography import x509

from secure_agg import IdentityInvalid, KeyOf, VerifyIdentity
from tacit.identity import (
    Certificate,
    CertificateInvalid,
    Role,
    Trust,
    verify_signature,
)
from tacit.limits import MAX_MEMBERS

__all__ = ["Verification", "verifiers"]

# Certificates of three jobs with the largest cohorts, about 1.2 KB each.
_REMEMBERED = 3 * MAX_MEMBERS


def _now() -> datetime:
    return datetime.now(UTC)


class Verification:
    """The three functions and their cache. Thread-safe."""

    def __init__(
        self, root: x509.Certificate | Trust, now: Callable[[], datetime] = _now, *, most: int = _REMEMBERED
    ) -> None:
        """Starts with an empty cache.

        Args:
            root: the federation's authority, or all that are trusted.
            now: returns the time, timezone-aware.
            most: number of certificates to cache by digest, the most recently used.
        """
        # Replaced as a whole when the federation's authority changes; every check reads it once.
        self.trust = root if isinstance(root, Trust) else Trust.in_root(root)
        self._now = now
        self._most = most
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def verify(self, der: bytes, message: bytes, signature: bytes) -> str:
        """Returns the name of the member that signed a message.

        Args:
            der: the member's certificate.
            message: what was signed.
            signature: RSA-PSS.

        Raises:
            IdentityInvalid: the certificate is not valid now, not issued by a trusted root, of another federation or
                without the member role, or the signature does not match.
        """
        certificate = self._certificate(der)
        try:
            verify_signature(certificate.key, message, signature)
        except CertificateInvalid as error:
            raise IdentityInvalid(str(error)) from error
        return certificate.identity.name

    def key_of(self, der: bytes) -> bytes:
        """The key in a certificate (SubjectPublicKeyInfo, DER).

        Raises:
            IdentityInvalid: the certificate is not valid now; see `verify`.
        """
        return self._certificate(der).public

    def certificate_of(self, digest: bytes) -> bytes | None:
        """The cached certificate with this SHA-256, or None. Callers that rely on it must verify it again."""
        with self._lock:
            found = self._known.get(digest)
            if found is not None:
                self._known.move_to_end(digest)
            return found

    def _certificate(self, der: bytes) -> Certificate:
        try:
            found = self.trust.verify(der, role=Role.MEMBER, now=self._now())
        except CertificateInvalid as error:
            raise IdentityInvalid(str(error)) from error
        digest = hashlib.sha256(der).digest()
        with self._lock:
            self._known[digest] = der
            self._known.move_to_end(digest)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return found


def verifiers(root: x509.Certificate | Trust, now: Callable[[], datetime] = _now) -> tuple[VerifyIdentity, KeyOf]:
    """Returns (verify, key_of) for members of the federation whose authority is `root`; see `Verification`."""
    verification = Verification(root, now)
    return verification.verify, verification.key_of
