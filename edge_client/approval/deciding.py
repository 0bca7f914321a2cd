"""A steward decides about a job, and a member's home takes the decision. Works offline; decides by files alone.

Left to others: when a decision counts (`rules`), and what a running member does about it (`desk`).
"""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge_client.approval.folder import ApprovalFolder, ApprovalRequest
from edge_client.approval.rules import MAX_SKEW_MS, Heard, Standing, standing_of
from edge_client.approval.statement import (
    LONGEST_REASON,
    ApprovalStatement,
    Choice,
    SignedStatement,
    StatementInvalid,
)
from edge_client.ledger.outlook import stored_state
from toolkit.text import clean

__all__ = ["DecisionRefused", "days_of", "decide", "heard_at", "put", "standing_at", "steward_named"]

_DAY_MS = 24 * 3600 * 1000


class DecisionRefused(Exception):
    """A decision cannot be made or taken. The sentence says why and what to do."""


def steward_named(request: ApprovalRequest, key: bytes) -> str:
    """The name that the request's policy gives a key.

    Raises:
        DecisionRefused: the key is not one of its stewards.
    """
    name = request.terms.stewards.get(key)
    if name is None:
        raise DecisionRefused(
            f"the key {key.hex()} is not one of the stewards in the policy of {request.member}, so its decision would "
            "not count; use another key, or have it written in `stewards`"
        )
    return name


def days_of(request: ApprovalRequest, days: float | None) -> float:
    """How long an approval is valid: the days given, else 30, or what the policy allows if that is less.

    Raises:
        DecisionRefused: the policy allows no approval for so long.
    """
    longest = request.policy.max_approval_days
    if days is not None and days > longest:
        raise DecisionRefused(
            f"the policy of {request.member} lets an approval be valid for {longest:g} days at most; give --days "
            f"{longest:g} or fewer"
        )
    return min(30.0, longest) if days is None else days


def decide(
    request: ApprovalRequest,
    choice: Choice,
    key: Ed25519PrivateKey,
    *,
    days: float | None = None,
    reason: str = "",
    known: Iterable[SignedStatement] = (),
    now_ms: int | None = None,
) -> SignedStatement:
    """Signs a decision about a request.

    Args:
        request: what was read.
        choice: the decision.
        key: the steward's key.
        days: how long an approval is valid (`days_of`).
        reason: why a job is declined; cleaned and cut to 300 characters.
        known: statements that were made before. This one is signed later than those of the same key, whatever the
            clock says.
        now_ms: the time, in milliseconds since 1970 UTC. None: that of the clock.

    Raises:
        DecisionRefused: the key is not one of the policy's stewards, the policy allows no approval for so long, or an
            earlier decision of the key is dated in the future.
    """
    public = key.public_key().public_bytes_raw()
    steward_named(request, public)
    lasts = days_of(request, days)
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    before = [each.statement.issued_ms for each in known if each.statement.steward == public]
    issued = max([now, *(at + 1 for at in before)])
    if issued > now + MAX_SKEW_MS:
        raise DecisionRefused(
            f"an earlier decision with this key is dated {_moment(max(before))} UTC, in the future: the clock was "
            "wrong when it was signed. Nothing newer counts until then; use another steward's key, or have the job "
            "changed"
        )
    question = request.question
    return SignedStatement.sign(
        ApprovalStatement(
            federation=question.federation,
            member=question.member,
            data=question.data,
            job=question.job,
            document=question.document,
            files=dict(question.files),
            policy=question.policy,
            decision=choice,
            issued_ms=issued,
            expires_ms=issued + int(lasts * _DAY_MS) if choice == "approve" else None,
            reason=clean(reason, LONGEST_REASON) if choice == "decline" else "",
            steward=public,
        ),
        key,
    )


def put(home: Path, signed: SignedStatement, *, now_ms: int | None = None) -> Path:
    """Puts a statement into a member's home, where `edge_client run` sees it within seconds.

    Args:
        home: the member's.
        signed: the statement.
        now_ms: the time, in milliseconds since 1970 UTC. None: that of the clock.

    Returns:
        The file.

    Raises:
        DecisionRefused: the home asked about no such job, or the statement would not count.
        LedgerError: the ledger cannot be read.
        OSError: the file cannot be written.
    """
    said = signed.statement
    folder = ApprovalFolder(home, said.data, said.job)
    request = folder.request()
    if request is None:
        raise DecisionRefused(
            f"{home} has asked nobody about job {said.job} with the data {said.data}; `edge_client run` asks when the "
            "coordinator offers the job. If you gave another --home, give the member's"
        )
    steward_named(request, said.steward)
    try:
        signed.verify()
    except StatementInvalid as error:
        raise DecisionRefused(f"the statement does not hold: {error}; have it signed again") from error
    if not request.question.is_of(said):
        raise DecisionRefused(_about_another(request, said))
    if said.decision == "approve" and not request.about(said):
        raise DecisionRefused(
            "the approval was signed under another policy, or names other files than the job; export the request again "
            f"with `edge_client job show {said.job} --out FILE`, and have that one signed"
        )
    heard, at_ms = heard_at(home, request)
    now = max(time.time_ns() // 1_000_000 if now_ms is None else now_ms, at_ms)
    if said.issued_ms > now + MAX_SKEW_MS:
        raise DecisionRefused(
            f"the decision is dated {_moment(said.issued_ms)} UTC, and here it is {_moment(now)}; set the clock of the "
            "machine that signs, and sign again"
        )
    if said.decision == "approve":
        _check_counts(request, signed, heard, now)
    return folder.put(signed)


def _about_another(request: ApprovalRequest, said: ApprovalStatement) -> str:
    """The first thing in which a statement differs from what is asked, as a sentence."""
    question = request.question
    for what, asked, signed in (
        ("federation", question.federation.hex()[:16], said.federation.hex()[:16]),
        ("member", question.member, said.member),
    ):
        if asked != signed:
            return f"the statement is about {what} {signed}, and this home is of {what} {asked}; give the other --home"
    return (
        f"the statement is about another document of job {said.job} ({said.document.hex()[:16]}, not "
        f"{question.document.hex()[:16]}): the job was changed, and asks again"
    )


def _check_counts(request: ApprovalRequest, signed: SignedStatement, heard: Sequence[Heard], now_ms: int) -> None:
    """Raises DecisionRefused if an approval would not count beside what was heard."""
    if signed.digest() not in {each.signed.digest() for each in heard}:
        heard = [*heard, Heard(signed)]
    standing = standing_of(request.question, request.terms, heard, now_ms)
    name = steward_named(request, signed.statement.steward)
    if name not in standing.approved:
        why = dict(standing.unread).get(name, "this key has decided otherwise since")
        raise DecisionRefused(f"the approval of {name} would not count: {why}. Read the job again, and sign a new one")


def _moment(ms: int) -> str:
    """A time in UTC, for people."""
    return datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%d %H:%M")


def heard_at(home: Path, request: ApprovalRequest) -> tuple[Sequence[Heard], int]:
    """What was said about a job: in the ledger, then in the folder; and the ledger's time, in milliseconds.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    state = stored_state(home, request.data)
    heard = [] if state is None else [Heard(kept.signed, at in state.lapsed) for at, kept in state.approvals.items()]
    recorded = {each.signed.digest() for each in heard}
    folder = ApprovalFolder(home, request.data, request.document.name)
    heard += [Heard(signed) for signed in folder.statements(recorded) if signed.digest() not in recorded]
    return heard, 0 if state is None else state.at_ms


def standing_at(home: Path, request: ApprovalRequest) -> Standing:
    """What stewards have said about a request, as a member that started now would count it.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    heard, at_ms = heard_at(home, request)
    return standing_of(request.question, request.terms, heard, max(time.time_ns() // 1_000_000, at_ms))
