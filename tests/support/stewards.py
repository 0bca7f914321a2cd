"""Stewards, and statements that they sign about one question, for tests of approvals."""

from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge_client.approval.rules import Heard, Question, Terms
from edge_client.approval.statement import ApprovalStatement, Choice, SignedStatement

DAY_MS = 24 * 3600 * 1000
# A moment in 2026, in milliseconds since 1970.
NOW = 1_790_000_000_000

QUESTION = Question(
    federation=sha256(b"federation").digest(),
    member="north",
    data="data",
    job="desk",
    document=sha256(b"document").digest(),
    files={"weights.bin": sha256(b"weights").digest()},
    policy=sha256(b"policy").digest(),
)


@dataclass(frozen=True)
class Steward:
    """A person with a key. The same name has the same key."""

    name: str
    key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def named(cls, name: str) -> "Steward":
        return cls(name, Ed25519PrivateKey.from_private_bytes(sha256(name.encode()).digest()))

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    def says(
        self,
        decision: Choice,
        question: Question = QUESTION,
        *,
        at: int = NOW,
        days: float = 30,
        reason: str = "",
        **other: Any,
    ) -> SignedStatement:
        """Signs a decision at a time, in milliseconds. `other` replaces fields of the question."""
        question = replace(question, **other)
        statement = ApprovalStatement(
            federation=question.federation,
            member=question.member,
            data=question.data,
            job=question.job,
            document=question.document,
            files=dict(question.files),
            policy=question.policy,
            decision=decision,
            issued_ms=at,
            expires_ms=at + int(days * DAY_MS) if decision == "approve" else None,
            reason=reason,
            steward=self.public,
        )
        return SignedStatement.sign(statement, self.key)


MARY, JOHN = Steward.named("mary"), Steward.named("john")


def terms(*stewards: Steward, needed: int = 1, days: float = 90) -> Terms:
    """What a policy with these stewards asks."""
    return Terms({each.public: each.name for each in stewards}, needed, int(days * DAY_MS))


def heard(*signed: SignedStatement) -> list[Heard]:
    """Statements in the order in which they were recorded."""
    return [Heard(each) for each in signed]
