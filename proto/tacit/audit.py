"""What a member states about its audit of a published version: the file that may leave its machine.

It holds the verdict, which the member chooses to tell, and the result of the planted canaries: random texts, random
coins, and a version that was published with noise. So apart from the verdict it depends on the member's data only
through that version, whose epsilon was charged. Nothing else of an audit may leave (docs/audits.md).
"""

import base64
import binascii
from typing import Annotated, ClassVar, Final, Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import Field, PlainSerializer, PlainValidator, StringConstraints, model_validator

from tacit.authorities import Authorities
from tacit.certificates import certificate_from_der, certificate_from_pem
from tacit.documents import Digest, Document, Moment, Short
from tacit.identity import CertificateInvalid, Role, sign, verify_signature
from tacit.job_parts import MAX_CANARIES

__all__ = ["AuditStatement", "SignedAudit", "sign_audit", "verify_audit"]

# Nothing else that a member's key signs begins like this.
_DOMAIN: Final = b"tacit/audit/v1\n"

_Epsilon = Annotated[float, Field(ge=0, le=1e6)]
_Count = Annotated[int, Field(ge=0, le=MAX_CANARIES)]


class AuditStatement(Document):
    """What is signed."""

    federation: Digest
    member: Short
    job: Short
    # SHA-256 of the job document.
    document: Digest
    number: int = Field(ge=0, le=10**9)
    version: Digest
    # cannot-tell: the canaries are too few to refute the claim, whatever they had shown.
    verdict: Literal["sound", "above-claim", "cannot-tell"]
    # Epsilon that the member was charged for the job, rounded up to one digit, and the lower bound that its canaries
    # prove, both at this delta; and the bound that they would have proved with all guesses right.
    claim: _Epsilon
    lower_bound: _Epsilon
    possible: _Epsilon
    delta: float = Field(gt=0, lt=0.01)
    # Of all bounds of the audit together, and the number of tests that each is corrected for: a fixed one, because how
    # many were made depends on how many rows the member has.
    confidence: float = Field(gt=0.5, lt=1)
    tests: int = Field(ge=1, le=100)
    canaries: _Count
    guesses: _Count
    correct: _Count
    made_ms: Moment

    @model_validator(mode="after")
    def _consistent(self) -> "AuditStatement":
        if not self.correct <= self.guesses <= self.canaries:
            raise ValueError("its right guesses are more than its guesses, or these more than its canaries")
        if self.lower_bound > self.possible:
            raise ValueError("lower_bound is above possible, the bound of guesses that are all right")
        if self.verdict != "above-claim" and self.lower_bound > self.claim:
            raise ValueError(f"its verdict is {self.verdict}, and its lower bound is above its claim")
        if self.verdict == "sound" and self.possible <= self.claim:
            raise ValueError("its verdict is sound, and its canaries could not have refuted its claim")
        return self


def _signature(value: object) -> bytes:
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError("it is not base64") from error
    if not isinstance(value, bytes):
        raise ValueError("it is not base64")
    return value


class SignedAudit(Document):
    """The file. `statement` is the exact text that was signed."""

    max_bytes: ClassVar[int] = 64 * 1024

    statement: Annotated[str, StringConstraints(max_length=4096)]
    signature: Annotated[
        bytes,
        PlainValidator(_signature),
        Field(max_length=1024),
        PlainSerializer(lambda value: base64.b64encode(value).decode(), return_type=str),
    ]
    # PEM.
    certificate: Annotated[str, StringConstraints(max_length=8192)]


def sign_audit(statement: AuditStatement, key: rsa.RSAPrivateKey, certificate: bytes) -> SignedAudit:
    """Signs a statement with the member's key. `certificate` is DER."""
    text = statement.canonical()
    pem = certificate_from_der(certificate).public_bytes(serialization.Encoding.PEM).decode()
    return SignedAudit(statement=text.decode(), signature=sign(key, _DOMAIN + text), certificate=pem)


def verify_audit(signed: SignedAudit, authorities: Authorities) -> AuditStatement:
    """Verifies that the member that the statement names signed it.

    Raises:
        CertificateInvalid: somebody else did, or nobody of this federation.
        DocumentInvalid: it is no statement.
    """
    statement = AuditStatement.from_json(signed.statement.encode(), what="the audit's statement")
    try:
        certificate = certificate_from_pem(signed.certificate.encode())
    except ValueError as error:
        raise CertificateInvalid("the audit has no certificate in PEM") from error
    der = certificate.public_bytes(serialization.Encoding.DER)
    signer = authorities.history.issued(der, (Role.MEMBER,))
    if statement.federation != authorities.federation or signer.identity.name != statement.member:
        raise CertificateInvalid("the audit is of another federation or member than its certificate")
    verify_signature(signer.key, _DOMAIN + signed.statement.encode(), signed.signature)
    return statement
