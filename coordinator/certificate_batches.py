"""The two files that take certificate requests to the machine with the authority's key, and certificates back.

`coordinator authority requests`, `sign` and `import` write and read them. Neither holds a secret.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from tacit.documents import AtMost, Digest, Document, Part

__all__ = ["MAX_REQUESTS", "CertificateBatch", "RequestBatch", "WaitingRequest"]

# Requests in one file, and bytes of a request or a certificate: 2.4 KB with the longest key.
MAX_REQUESTS = 10_000
_Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2}){1,2900}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class WaitingRequest(Part):
    """One request of a member."""

    member: _Name
    kind: Literal["enrol", "renew"]
    # PKCS#10, DER.
    request: _Hex
    asked_ms: int = Field(ge=0)


class RequestBatch(Document):
    """What `requests` writes and `sign` reads."""

    max_bytes: ClassVar[int] = 64 * 1024 * 1024

    kind: Literal["tacit-certificate-requests"] = "tacit-certificate-requests"
    federation: Digest
    # SHA-256 of the authority's certificate that must sign.
    authority: Digest
    requests: Annotated[tuple[WaitingRequest, ...], AtMost(MAX_REQUESTS)]


class CertificateBatch(Document):
    """What `sign` writes and `import` reads."""

    max_bytes: ClassVar[int] = 64 * 1024 * 1024

    kind: Literal["tacit-certificates"] = "tacit-certificates"
    federation: Digest
    # DER.
    certificates: Annotated[tuple[_Hex, ...], AtMost(MAX_REQUESTS)]
