"""What a steward signs about one job, and the signature.

A statement is about one member of one federation, one data set of it, one job document with the files that it names,
and the policy under which it was read. So it counts for nothing else, and a job that was changed asks again.

The signature is Ed25519 over a prefix of its own and the statement's canonical JSON (sorted keys, no white space).
Every field stands there under its name, so no two statements have the same bytes.

Left to others: whether statements suffice (`rules`), and the steward's key (`steward`).
"""

import json
from typing import Annotated, Literal, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator, StringConstraints, model_validator

from tacit.documents import AtMost, Digest, Document, Moment, Part, Short
from toolkit.text import is_clean

__all__ = ["LONGEST_REASON", "ApprovalStatement", "Choice", "SignedStatement", "StatementInvalid"]

Choice = Literal["approve", "decline", "withdraw"]

# Characters of a steward's reason.
LONGEST_REASON = 300
_PREFIX = b"tacit/approval/v1\n"
# Files that a job document names.
_MAX_FILES = 16

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


def _shown_safely(text: str) -> str:
    if not is_clean(text):
        raise ValueError("holds a control or formatting character; remove it")
    return text


class StatementInvalid(ValueError):
    """A statement does not hold. The text is a clause that says why."""


class ApprovalStatement(Part):
    """One decision of one steward. Times are in milliseconds since 1970 UTC; digests are SHA-256.

    Args:
        federation: the federation's fingerprint.
        member: the member's name.
        data: the member's own name for the data.
        job: the job's name.
        document: digest of the job document.
        files: digests of the files that it names (weights, tokenizer, backbone, ...), by the file's name in the bundle.
        policy: digest of the policy that the steward read the job under.
        decision: what the steward decided. `withdraw` takes back whatever the same steward said before.
        issued_ms: when it was signed, by the steward's clock.
        expires_ms: until when an approval is valid. None for the other decisions, which do not expire.
        reason: why a job is declined. The coordinator reads it.
        steward: the steward's Ed25519 key, 32 bytes.
    """

    federation: Digest
    member: _Name
    data: _Name
    job: _Name
    document: Digest
    files: Annotated[dict[Short, Digest], AtMost(_MAX_FILES)]
    policy: Digest
    decision: Choice
    issued_ms: Moment
    expires_ms: Moment | None
    reason: Annotated[str, StringConstraints(max_length=LONGEST_REASON), AfterValidator(_shown_safely)]
    steward: Digest

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.decision == "approve") != (self.expires_ms is not None):
            raise ValueError("expires_ms: an approval has one, and no other decision does")
        if self.expires_ms is not None and self.expires_ms <= self.issued_ms:
            raise ValueError("expires_ms: is not after issued_ms")
        if self.reason and self.decision != "decline":
            raise ValueError("reason: only a job that is declined has one")
        return self

    @property
    def signed_bytes(self) -> bytes:
        """What is signed."""
        content = self.model_dump(mode="json")
        return _PREFIX + json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class SignedStatement(Document):
    """A statement with its signature, as it lies in a file: 64 bytes, 128 hexadecimal digits."""

    statement: ApprovalStatement
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]

    @classmethod
    def sign(cls, statement: ApprovalStatement, key: Ed25519PrivateKey) -> Self:
        """Signs a statement.

        Raises:
            StatementInvalid: the statement names another steward's key.
        """
        if statement.steward != key.public_key().public_bytes_raw():
            raise StatementInvalid("it names another steward's key")
        return cls(statement=statement, signature=key.sign(statement.signed_bytes).hex())

    def verify(self) -> None:
        """Checks the signature against the key that the statement names. Whose key that is, the policy says.

        Raises:
            StatementInvalid: the signature is not that key's over this statement.
        """
        try:
            key = Ed25519PublicKey.from_public_bytes(self.statement.steward)
            key.verify(bytes.fromhex(self.signature), self.statement.signed_bytes)
        except (InvalidSignature, ValueError) as error:
            raise StatementInvalid("its signature is not that of the key that it names") from error
