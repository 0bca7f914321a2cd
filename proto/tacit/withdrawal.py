"""A member's withdrawal: what it signs, what the server answers, and who can check both.

The member signs a request with its certificate's key. The coordinator's journal keeps the request, the signature and
the certificate whole, so whoever has the journal can prove who asked. The server signs that it took the request, so the
member can prove that it was asked. Both are RSA-PSS over a prefix of its own and canonical JSON.

A request names one federation, member and job, and there is no way back. So a request that is sent again, by whomever,
changes nothing.
"""

from typing import Annotated, Final

from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import Field, StringConstraints

from tacit.authorities import Authorities
from tacit.documents import Digest, Document, Moment
from tacit.identity import CertificateInvalid, Role, sign, verify_signature

__all__ = [
    "WithdrawalRequest",
    "WithdrawalTaken",
    "check_request",
    "check_taken",
    "request_bytes",
    "sign_taken",
]

# Nothing else that a member's or a server's key signs begins like these.
_REQUEST: Final = b"tacit/withdrawal/v1\n"
_TAKEN: Final = b"tacit/withdrawal-taken/v1\n"

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class WithdrawalRequest(Document):
    """What a member signs.

    Args:
        federation: the federation's fingerprint.
        member: the member's name.
        job: the job that it withdraws from, with every job that starts from a version of it. None: every job, for good.
        asked_ms: when, by the member's clock; in milliseconds since 1970 UTC.
    """

    federation: Digest
    member: _Name
    job: _Name | None
    asked_ms: Moment


class WithdrawalTaken(Document):
    """What the server signs once the request is in the journal.

    Args:
        federation: the federation's fingerprint.
        request: SHA-256 of the request.
        taken_ms: when it was taken; in milliseconds since 1970 UTC.
        entry: number of the journal's entry that holds it.
        entry_hash: hash of that entry, which covers every entry before it.
    """

    federation: Digest
    request: Digest
    taken_ms: Moment
    entry: int = Field(ge=1)
    entry_hash: Digest


def request_bytes(request: WithdrawalRequest) -> bytes:
    """The bytes that the member signs."""
    return _REQUEST + request.canonical()


def check_request(request: WithdrawalRequest, signature: bytes, certificate: bytes, authorities: Authorities) -> None:
    """Checks that the member named in a request signed it. Looks at no clock: the certificate was valid then.

    Args:
        request: the request.
        signature: the signature on it.
        certificate: the signer's certificate, DER.
        authorities: all authorities that the federation has had.

    Raises:
        CertificateInvalid: the request is of another federation, the certificate is somebody else's, or its key did not
            sign this request.
    """
    if request.federation != authorities.federation:
        raise CertificateInvalid("the request is of another federation")
    signer = authorities.history.issued(certificate, (Role.MEMBER,))
    if signer.identity.name != request.member:
        raise CertificateInvalid(f"the certificate belongs to {signer.identity.name}, not to {request.member}")
    verify_signature(signer.key, request_bytes(request), signature)


def sign_taken(taken: WithdrawalTaken, key: rsa.RSAPrivateKey) -> bytes:
    """Signs as the server that a request was taken."""
    return sign(key, _TAKEN + taken.canonical())


def check_taken(
    taken: WithdrawalTaken,
    signature: bytes,
    certificate: bytes,
    request: WithdrawalRequest,
    authorities: Authorities,
) -> None:
    """Checks that a server of the federation signed that it took this request.

    Raises:
        CertificateInvalid: it is about another request, or no server of the federation signed it.
    """
    if (taken.federation, taken.request) != (authorities.federation, request.digest()):
        raise CertificateInvalid("it is about another request")
    signer = authorities.history.issued(certificate, (Role.SERVER,))
    verify_signature(signer.key, _TAKEN + taken.canonical(), signature)
