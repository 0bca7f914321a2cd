"""`verify` and `key_of` for the aggregation protocol, over this federation's certificates.

The protocol knows no certificates; both sides hand it these two functions. Which certificates were found good is
remembered for a while (verifying a chain costs more than a signature), but validity is looked at every time.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from secure_agg import IdentityInvalid, KeyOf, VerifyIdentity
from tacit.identity import (
    Certificate,
    CertificateInvalid,
    Role,
    federation_of,
    verify_certificate,
    verify_signature,
)

__all__ = ["verifiers"]

_REMEMBERED = 4096


def _now() -> datetime:
    return datetime.now(UTC)


def verifiers(root: x509.Certificate, now: Callable[[], datetime] = _now) -> tuple[VerifyIdentity, KeyOf]:
    """(verify, key_of) for members of the federation whose authority is `root`.

    `verify(certificate, message, signature)` returns the member's name or raises IdentityInvalid unless the certificate
    (DER) is valid now, issued by `root`, of this federation, with the member role, and the RSA-PSS signature is good.
    """
    federation = federation_of(root)
    known: dict[bytes, Certificate] = {}

    def certificate_of(der: bytes) -> Certificate:
        found = known.get(der)
        if found is not None and now() <= found.expires:
            return found
        try:
            found = verify_certificate(der, root, federation=federation, role=Role.MEMBER, now=now())
        except CertificateInvalid as error:
            raise IdentityInvalid(str(error)) from error
        if len(known) >= _REMEMBERED:
            known.clear()
        known[der] = found
        return found

    def verify(der: bytes, message: bytes, signature: bytes) -> str:
        certificate = certificate_of(der)
        try:
            verify_signature(certificate.key, message, signature)
        except CertificateInvalid as error:
            raise IdentityInvalid(str(error)) from error
        return certificate.identity.name

    def key_of(der: bytes) -> bytes:
        return certificate_of(der).key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    return verify, key_of
