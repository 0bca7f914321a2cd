"""Reads certificates and certificate requests that anybody may have made.

Guarantees: bytes that cannot be read are a ValueError, whatever is wrong with them. The library has exceptions of other
kinds for an unknown version, an extension that occurs twice, and a key or a name of an unknown kind.

Leaves to others: whether a certificate is to be believed (`tacit.identity`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

__all__ = [
    "Extension",
    "certificate_from_der",
    "certificate_from_pem",
    "certificates_from_pem",
    "extension_of",
    "public_key_of",
    "reading",
    "request_from_der",
]

Extension = TypeVar("Extension", bound=x509.ExtensionType)


def certificate_from_der(data: bytes) -> x509.Certificate:
    """Reads a certificate. Raises ValueError if it is none."""
    with reading():
        return x509.load_der_x509_certificate(data)


def certificate_from_pem(data: bytes) -> x509.Certificate:
    """Reads the first certificate of a PEM file. Raises ValueError if there is none."""
    with reading():
        return x509.load_pem_x509_certificate(data)


def certificates_from_pem(data: bytes) -> list[x509.Certificate]:
    """Reads all certificates of a PEM file, at least one. Raises ValueError if one cannot be read."""
    with reading():
        return x509.load_pem_x509_certificates(data)


def request_from_der(data: bytes) -> x509.CertificateSigningRequest:
    """Reads a certificate request (PKCS#10). Raises ValueError if it is none."""
    with reading():
        return x509.load_der_x509_csr(data)


def public_key_of(read: x509.Certificate | x509.CertificateSigningRequest) -> CertificatePublicKeyTypes:
    """The key in a certificate or a request. Raises ValueError if it cannot be read, or is of an unknown kind."""
    with reading():
        return read.public_key()


def extension_of(certificate: x509.Certificate, kind: type[Extension]) -> Extension | None:
    """An extension of a certificate; None if it has none of this kind.

    Raises:
        ValueError: One of its extensions cannot be read, or occurs twice.
    """
    with reading():
        try:
            return certificate.extensions.get_extension_for_class(kind).value
        except x509.ExtensionNotFound:
            return None


@contextmanager
def reading() -> Iterator[None]:
    """Inside the context, what the library raises for bytes that it cannot read is a ValueError."""
    try:
        yield
    except (
        TypeError,
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise ValueError(str(error)) from error
