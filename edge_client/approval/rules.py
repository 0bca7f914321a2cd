"""Whether stewards' statements allow a member to train for a job. Pure: statements, policy and time in, standing out.

A statement is heard in the order in which the member's ledger recorded it. The rules:

1. Only a statement about exactly this question, signed by a key of the policy's stewards, is heard.
2. An approval stands while: its files and its policy are those of the question; it is valid now, was not signed more
   than five minutes in the future, and not for longer than the policy allows; the ledger has not recorded that it
   lapsed; and it is *newer* than every other decision of its key.
3. Newer means recorded later and signed later, both. So an approval that is shown again after a withdrawal never
   counts, and a steward whose clock is behind can still withdraw.
4. A job is declined while a decline stands that its key has not replaced by a newer statement, whoever else approved.
5. A job is approved if it is not declined and approvals of `needed` different keys stand.

Left to others: what time it is, and what was recorded (`desk`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_client.approval.statement import ApprovalStatement, SignedStatement, StatementInvalid
from edge_client.policy.document import PolicyDocument
from tacit.job import JobDocument

__all__ = ["MAX_SKEW_MS", "Heard", "Question", "Standing", "Terms", "standing_of"]

# How far in the future a statement may have been signed: clocks differ.
MAX_SKEW_MS = 5 * 60 * 1000
_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Question:
    """What a steward is asked about. Digests are 32 bytes."""

    federation: bytes
    member: str
    data: str
    job: str
    document: bytes
    files: Mapping[str, bytes]
    policy: bytes

    @classmethod
    def of(cls, job: JobDocument, policy: bytes, *, federation: bytes, member: str, data: str) -> "Question":
        """The question that a member asks about a job, under the policy with this digest."""
        return cls(federation, member, data, job.name, job.digest(), job.files, policy)

    def is_of(self, statement: ApprovalStatement) -> bool:
        """Whether a statement is about this member, data and job document."""
        mine = (self.federation, self.member, self.data, self.job, self.document)
        return mine == (statement.federation, statement.member, statement.data, statement.job, statement.document)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a policy asks of approvals. stewards: names by key (32 bytes)."""

    stewards: Mapping[bytes, str]
    needed: int
    longest_ms: int

    @classmethod
    def of(cls, policy: PolicyDocument) -> "Terms":
        """The terms of a policy."""
        stewards = {key: name for name, key in policy.stewards.items()}
        return cls(stewards, policy.min_approvals, int(policy.max_approval_days * _DAY_MS))


@dataclass(frozen=True, slots=True)
class Heard:
    """A statement, and whether it was recorded that its time is over."""

    signed: SignedStatement
    lapsed: bool = False

    @property
    def statement(self) -> ApprovalStatement:
        """What was signed."""
        return self.signed.statement


@dataclass(frozen=True)
class Standing:
    """What stewards have said about a question, as far as it counts now.

    Args:
        needed: how many approvals must stand.
        approved: the stewards whose approvals stand, sorted.
        declined: the stewards whose declines stand, and their reasons, sorted.
        until_ms: when the approvals no longer suffice by time alone. None: they do not suffice now.
        over: approvals whose time is over and that are not recorded as lapsed yet.
        unread: why stewards' statements about this job do not count, by steward, for people.
    """

    needed: int
    approved: tuple[str, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()
    until_ms: int | None = None
    over: tuple[SignedStatement, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def stage(self) -> Literal["approved", "declined", "awaited"]:
        """Whether the member may train."""
        if self.declined:
            return "declined"
        return "approved" if len(self.approved) >= self.needed else "awaited"


def standing_of(question: Question, terms: Terms, heard: Sequence[Heard], now_ms: int) -> Standing:
    """Decides by the rules above.

    Args:
        question: what is asked.
        terms: what the policy asks of approvals.
        heard: statements in the order in which they were recorded.
        now_ms: the time, in milliseconds since 1970 UTC.
    """
    approved: list[tuple[str, int]] = []
    declined: list[tuple[str, str]] = []
    over: list[SignedStatement] = []
    unread: list[tuple[str, str]] = []
    for key, name in sorted(terms.stewards.items(), key=lambda item: item[1]):
        said = [each for each in heard if each.statement.steward == key and question.is_of(each.statement)]
        said = [each for each in said if _is_signed(each.signed)]
        newest = [each for at, each in enumerate(said) if _is_newest(each, said[:at], said[at + 1 :])]
        if declines := [each for each in newest if each.statement.decision == "decline"]:
            declined.append((name, declines[-1].statement.reason))
        expiries: list[int] = []
        for each in newest:
            if each.statement.decision != "approve":
                continue
            why = _why_not(each, question, terms, now_ms)
            if why is None:
                expiries.append(each.statement.expires_ms or 0)
                continue
            unread.append((name, why))
            if not each.lapsed and now_ms >= (each.statement.expires_ms or 0):
                over.append(each.signed)
        if expiries:
            approved.append((name, max(expiries)))
            unread = [item for item in unread if item[0] != name]
    # The approvals suffice until fewer than `needed` are left.
    last = sorted((until for _, until in approved), reverse=True)
    until_ms = last[terms.needed - 1] if len(last) >= terms.needed and not declined else None
    return Standing(
        terms.needed, tuple(name for name, _ in approved), tuple(declined), until_ms, tuple(over), tuple(unread)
    )


def _is_signed(signed: SignedStatement) -> bool:
    try:
        signed.verify()
    except StatementInvalid:
        return False
    return True


def _is_newest(this: Heard, before: Iterable[Heard], after: Iterable[Heard]) -> bool:
    """Whether no other kind of decision of the same key takes the place of this one.

    Of two decisions, the one that is recorded later and signed later is the newer. If these disagree, the one that
    allows nothing wins: neither approval counts, and a decline stays.
    """
    mine = this.statement

    def replaces(other: ApprovalStatement, *, later: bool) -> bool:
        if other.decision == mine.decision:
            return False
        newer = later and other.issued_ms > mine.issued_ms
        if mine.decision == "approve":
            return later or other.issued_ms >= mine.issued_ms
        return newer

    return not (
        any(replaces(each.statement, later=False) for each in before)
        or any(replaces(each.statement, later=True) for each in after)
    )


def _why_not(heard: Heard, question: Question, terms: Terms, now_ms: int) -> str | None:
    """Why a newest approval does not stand, as a clause. None: it stands."""
    statement = heard.statement
    expires = statement.expires_ms or 0
    if statement.policy != question.policy:
        return "it was signed under another policy"
    if dict(statement.files) != dict(question.files):
        return "it names other files than the job"
    if expires - statement.issued_ms > terms.longest_ms:
        return "it was signed for longer than max_approval_days"
    if heard.lapsed or now_ms >= expires:
        return "it has expired"
    if statement.issued_ms > now_ms + MAX_SKEW_MS:
        return "it was signed in the future by this machine's clock"
    return None
