"""A running member's desk: asks the stewards about a job, takes up what they answer, and says whether they approved.

Guarantees:

- A statement counts once it is in the ledger. A withdrawal or a decline counts at once, also if the ledger cannot be
  written. So a full disk approves nothing.
- Time never runs backwards here: it is the latest of the clock, of the ledger's newest record, and of what this desk
  has seen. An approval that was found expired is recorded as lapsed, and counts no more, whatever the clock says.
- `check` reads the folder anew each time, so a decision that is on the disk before a call counts in it.

Synchronous but for `ask`, and for one thread: the ledger's. Left to others: the rules (`rules`), and calling `check`
before training, before an attempt is joined, and before a vector is charged.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import structlog

from edge_client.approval.folder import LONGEST_LINE, ApprovalFolder, ApprovalRequest
from edge_client.approval.rules import Heard, Question, Standing, Terms, standing_of
from edge_client.approval.statement import SignedStatement, StatementInvalid
from edge_client.ledger.store import LedgerError
from edge_client.policy.policy import Policy, PolicyRefusal
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.reason import Reason
from toolkit.text import clean

__all__ = ["Describe", "Desk", "Recorder"]

log = structlog.get_logger("edge_client")

# Describes a job beside the member's data, from its document, manifest and tokenizer: lines for people, and JSON.
Describe = Callable[[JobDocument, Manifest, bytes | None], tuple[list[str], dict[str, Any]]]


class Recorder(Protocol):
    """The ledger, as a desk uses it."""

    @property
    def now_ms(self) -> int:
        """The time, never before that of the newest record."""

    def heard(self) -> tuple[tuple[SignedStatement, bool], ...]:
        """The statements in order, each with whether its approval lapsed."""

    def hear(self, signed: SignedStatement) -> bool:
        """Records a statement. Raises LedgerError."""

    def lapse(self, signed: SignedStatement) -> None:
        """Records that an approval's time is over. Raises LedgerError."""


class Desk:
    """The desk of one member with one data set, for one policy that asks."""

    def __init__(
        self,
        home: Path,
        policy: Policy,
        recorder: Recorder,
        *,
        federation: bytes,
        member: str,
        data: str,
        describe: Describe | None = None,
    ) -> None:
        """Opens the desk.

        Args:
            home: The member's folder.
            policy: The member's policy, which names the stewards.
            recorder: The ledger of the data.
            federation: The federation's fingerprint, 32 bytes.
            member: The member's name.
            data: The member's own name for the data.
            describe: Makes the dry run that stewards read; without one, they read the job document's numbers alone.
        """
        self._home = home
        self._policy = policy
        self._digest = policy.digest()
        self._terms = Terms.of(policy)
        self._recorder = recorder
        self._federation = federation
        self._member = member
        self._data = data
        self._describe = describe
        self._latest_ms = 0
        # Files that were refused, by job and name: each is logged once.
        self._refused: set[tuple[str, str]] = set()

    def check(self, job: JobDocument) -> int:
        """Checks that the stewards approve of a job now.

        Returns:
            How many approvals stand.

        Raises:
            PolicyRefusal: too few approvals stand, or a steward declined. The coordinator reads the text.
        """
        standing = self.standing(job)
        match standing.stage:
            case "approved":
                return len(standing.approved)
            case "declined":
                reason = standing.declined[0][1]
                raise PolicyRefusal(
                    Reason.REASON_APPROVAL_DECLINED, f"a steward declined the job{f': {reason}' if reason else ''}"
                )
            case "awaited":
                stand, needed = len(standing.approved), standing.needed
                raise PolicyRefusal(
                    Reason.REASON_APPROVAL_AWAITED,
                    f"this member's stewards have given {stand} of the {needed} "
                    f"{'approval' if needed == 1 else 'approvals'} that its policy asks for",
                )

    def standing(self, job: JobDocument) -> Standing:
        """What the stewards have said about a job, after taking up what is new in the folder."""
        question = self._question(job)
        heard = self._heard(question)
        self._latest_ms = max(self._latest_ms, self._recorder.now_ms)
        standing = standing_of(question, self._terms, heard, self._latest_ms)
        for signed in standing.over:
            try:
                self._recorder.lapse(signed)
                log.warning("approval_lapsed", job=job.name, steward=self._terms.stewards[signed.statement.steward])
            except LedgerError as error:
                log.error("ledger_failing", job=job.name, error=str(error))
        return standing

    async def ask(self, job: JobDocument, manifest: Manifest, tokenizer: bytes | None) -> None:
        """Writes the request that stewards read, unless the one on the disk asks the same. Failures are logged."""
        folder, question = self._folder(job.name), self._question(job)
        known = folder.request()
        if known is not None and known.question == question:
            return
        plan: dict[str, Any] = {}
        lines = ["this machine could not describe the job beside its data; its log says why"]
        if self._describe is not None:
            try:
                lines, plan = await asyncio.to_thread(self._describe, job, manifest, tokenizer)
            except Exception as error:
                # The document alone can be approved, too, and the steward sees that no more is known.
                log.error("request_incomplete", job=job.name, error=str(error), exc_info=error)
        try:
            folder.ask(self._request(job, lines, plan))
        except (OSError, ValueError) as error:
            log.error("request_not_written", job=job.name, error=str(error))
            return
        log.warning(
            "approval_asked", job=job.name, digest=question.document.hex(), next=f"edge_client job show {job.name}"
        )

    # ---- inside --------------------------------------------------------------------------------------------------

    def _question(self, job: JobDocument) -> Question:
        return Question.of(job, self._digest, federation=self._federation, member=self._member, data=self._data)

    def _folder(self, job: str) -> ApprovalFolder:
        return ApprovalFolder(self._home, self._data, job)

    def _request(self, job: JobDocument, lines: list[str], plan: dict[str, Any]) -> ApprovalRequest:
        return ApprovalRequest(
            federation=self._federation,
            member=self._member,
            data=self._data,
            document=job,
            policy=self._policy,
            lines=tuple(clean(line, LONGEST_LINE) for line in lines),
            plan=json.dumps(plan, sort_keys=True, default=str),
            asked_ms=time.time_ns() // 1_000_000,
        )

    def _heard(self, question: Question) -> list[Heard]:
        """The statements that count: those of the ledger, and declines and withdrawals that it could not take."""
        folder = self._folder(question.job)
        recorded = {signed.digest() for signed, _ in self._recorder.heard()}
        left = []
        for signed in folder.statements(recorded):
            if signed.digest() in recorded or not self._holds(question, signed):
                continue
            try:
                self._recorder.hear(signed)
            except LedgerError as error:
                log.error("ledger_failing", job=question.job, error=str(error))
                if signed.statement.decision != "approve":
                    left.append(Heard(signed))
                continue
            said = signed.statement
            log.info(
                "approval_heard",
                job=said.job,
                decision=said.decision,
                steward=self._terms.stewards[said.steward],
                digest=said.document.hex(),
            )
        return [*(Heard(signed, lapsed) for signed, lapsed in self._recorder.heard()), *left]

    def _holds(self, question: Question, signed: SignedStatement) -> bool:
        """Whether a statement in the folder is a steward's about this job. Logs once why not."""
        why = None
        if signed.statement.steward not in self._terms.stewards:
            why = "its key is not one of the policy's stewards"
        elif not question.is_of(signed.statement):
            why = "it is about another member, data set or job document"
        else:
            try:
                signed.verify()
            except StatementInvalid as error:
                why = str(error)
        known = (question.job, signed.digest().hex())
        if why is not None and known not in self._refused:
            self._refused.add(known)
            log.warning("approval_refused", job=question.job, file=f"{known[1]}.json", why=why)
        return why is None
