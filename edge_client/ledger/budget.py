"""One data set's privacy budget, as a session spends it: policy, mechanism, ledger and receipts in one place.

The session makes these calls in order. Nothing of an update leaves before `charge` returns:

    reserve    before training          the ledger has room for the round's event
    charge     before a vector leaves   the event is on the disk, spent for good
    sending    before a vector leaves   the receipt of what is about to leave is signed and chained
    ended      when the end is known    the charge is settled, and a receipt says how
    release    instead of charge        the update is discarded, and nothing of it left

A job without noise costs nothing and promises nothing, but leaves receipts too. A refusal is a `PolicyRefusal`, whose
reason the coordinator is told.

Synchronous. A running member makes all calls that write, or that read more than a number, in one thread (`writer`).
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import structlog

import secure_agg
from edge_client.approval.statement import SignedStatement
from edge_client.identity.home import MemberIdentity
from edge_client.ledger import questions
from edge_client.ledger.chain import Purpose
from edge_client.ledger.ledger import (
    BudgetSpent,
    Ledger,
    LedgerError,
    LedgerRolledBack,
    LedgerUnwritable,
)
from edge_client.ledger.noise import NoiseLost, NoiseStore
from edge_client.ledger.outlook import may_measure, room_for_metrics
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import (
    NO_ATTEMPT,
    SENDING,
    CorpusReceipt,
    GroupNumbers,
    Party,
    Receipt,
    Segment,
    SparseNumbers,
    receipt_from,
)
from edge_client.ledger.replay import as_events
from edge_client.ledger.writer_thread import WriterThread
from edge_client.policy.policy import Policy, PolicyRefusal
from learning.accounting.events import Adjacency, PrivacyEvent, SampledGaussian, measuring, metrics_beside
from learning.accounting.gate import beside_what_is_spent, homogeneous, plan_of
from learning.accounting.spend import merged
from learning.mechanisms.correlated import CorrelatedSteps
from learning.mechanisms.protection import Protection, protection_of
from learning.survey.answer import Answering, event_of_answer
from tacit.attempt import AttemptId
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.mechanism import DpSgd, OwnDiscreteGaussian
from tacit.messages import Assignment, LedgerCounter, PrivacyReport
from tacit.question import Question
from tacit.reason import Reason
from tacit.vector import layout_of

if TYPE_CHECKING:
    from learning.accounting.filter import Limit

__all__ = ["Budget", "BudgetReservation", "CorpusReleased", "Figures", "Statement", "StepsHeld"]

log = structlog.get_logger("edge_client")


@dataclass(frozen=True)
class BudgetReservation:
    """The ledger's entry for one update. reservation: None if the update costs nothing."""

    job: JobDocument
    purpose: Purpose
    reservation: int | None
    # Whether a vector that is sent again is one more release.
    each_attempt: bool
    # Whether the event pays for a measurement of the version. If not, the metrics are noise alone.
    measured: bool = False
    # Where noise is correlated: the steps of this round, which training takes.
    steps: "StepsHeld | None" = None


@dataclass
class StepsHeld:
    """The steps of one round, in memory until something of them may leave.

    Args:
        correlated: what training takes steps with; its own copy.
        first: number of the round's first step.
        count: how many steps the round takes.
        committed: whether the file and the ledger say that they are over.
    """

    correlated: CorrelatedSteps
    first: int
    count: int
    committed: bool = False


@dataclass(frozen=True)
class Figures:
    """The figures in a member's own metrics.

    Args:
        epsilon: charged and reserved together, as the gate counts, at the limit's delta.
        limit: epsilon of the limit.
        share_left: share of the limit that is left, or of the month's limit if that is smaller.
    """

    epsilon: float
    limit: float
    share_left: float


@dataclass(frozen=True)
class Statement:
    """What was spent up to one moment. Computing its epsilons takes up to seconds: do so in a thread."""

    limit: "Limit"
    # Epsilon of a calendar month; None: there is no such limit.
    monthly: float | None
    events: tuple[PrivacyEvent, ...]
    of_month: tuple[PrivacyEvent, ...]
    of_job: tuple[PrivacyEvent, ...]

    def figures(self) -> Figures:
        """The figures of the whole ledger."""
        epsilon = self._counted(self.events)
        left = 1 - epsilon / self.limit.epsilon
        if self.monthly is not None:
            left = min(left, 1 - self._counted(self.of_month) / self.monthly)
        return Figures(epsilon, self.limit.epsilon, max(0.0, left))

    def report(self) -> PrivacyReport | None:
        """What the job spent. None: nothing."""
        return PrivacyReport(self._counted(self.of_job), self.limit.delta) if self.of_job else None

    def _counted(self, events: tuple[PrivacyEvent, ...]) -> float:
        from learning.accounting.gate import epsilon_counted

        return epsilon_counted(events, self.limit)


@dataclass(frozen=True)
class CorpusReleased:
    """A file of synthetic text that leaves, as its receipt describes it. Digests are SHA-256, 32 bytes.

    Args:
        trained: the reservation of the training behind it. None: it cost nothing.
        histogram: the reservation of the histogram of its labels. None: it has none.
    """

    job: str
    round: int
    job_document: bytes
    version: bytes
    mechanism: str
    trained: int | None
    histogram: int | None
    corpus: bytes
    size: int
    rows: int
    statement: bytes


@dataclass(frozen=True)
class _Sent:
    """What is about to leave, or has left, in one attempt."""

    attempt: AttemptId
    reserved: BudgetReservation
    reservation: int | None
    session: secure_agg.Session
    masked: secure_agg.MaskedInput


# Certificates whose attempts may still be running: attempts take minutes, renewals come days apart.
_SIGNERS = 4


class Budget:
    """The budget of one data set in one federation."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        identity: MemberIdentity,
        receipts: ReceiptBook,
        data: bytes,
        noise: NoiseStore | None = None,
        writer: WriterThread | None = None,
    ) -> None:
        """Joins the parts.

        Args:
            data: SHA-256 (32 bytes) that names the data used; it never leaves this machine.
            noise: where correlated noise is kept; None: jobs that need it are refused.
            writer: the thread for the calls of a running member; the caller closes it. None: a new one.
        """
        self.writer = WriterThread() if writer is None else writer
        self._noise = noise
        # The rounds that use a reservation which is not charged yet: the last one that lets go releases it.
        self._users: dict[int, list[StepsHeld]] = {}
        self._ledger = ledger
        self._policy = policy
        self._identity = identity
        # By certificate: an attempt's receipts are signed with the certificate that the member joined it with.
        self._signers: OrderedDict[bytes, MemberIdentity] = OrderedDict()
        self._receipts = receipts
        self._data = data
        # For each attempt whose vector may have left: the reservation that it was charged to.
        self._charged: dict[AttemptId, int | None] = {}
        self._sent: dict[AttemptId, _Sent] = {}

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def counter(self) -> LedgerCounter:
        """The number that the coordinator is told, so that an older copy of the ledger is noticed."""
        return LedgerCounter(self._ledger.id, self._ledger.sequence)

    def check_reported(self, sequence: int) -> None:
        """Checks the highest record number that the coordinator heard of this ledger.

        Raises:
            PolicyRefusal: the ledger is behind that number.
        """
        try:
            self._ledger.check_reported(sequence)
        except LedgerRolledBack as error:
            raise PolicyRefusal(Reason.REASON_LEDGER_ROLLED_BACK, str(error)) from error

    def statement(self, job: str) -> Statement:
        """What was charged and reserved so far: by all jobs, and by one job of this federation."""
        everything: Counter[PrivacyEvent] = Counter()
        of_job: Counter[PrivacyEvent] = Counter()
        ours = (self._identity.federation, job)
        for each in self._ledger.reservations():
            if each.released is None:
                everything[each.event] += 1
                if (each.purpose.federation, each.purpose.job) == ours:
                    of_job[each.event] += 1
        return Statement(
            self._ledger.limit,
            self._ledger.monthly,
            tuple(as_events(everything.items())),
            self._ledger.spent_this_month(),
            tuple(as_events(of_job.items())),
        )

    @property
    def reports(self) -> bool:
        """Whether the policy tells the coordinator what was spent."""
        return self._policy.report_epsilon

    def renewed(self, identity: MemberIdentity) -> None:
        """Replaces the identity that this member signs with. Attempts that it has joined keep theirs."""
        for each in (self._identity, identity):
            self._signers[each.fingerprint] = each
        self._identity = identity
        while len(self._signers) > _SIGNERS:
            self._signers.popitem(last=False)

    def signer_of(self, receipt: Receipt) -> MemberIdentity:
        """The identity that signs a receipt: this member's, with the certificate that it joined the attempt with."""
        return self._signers.get(receipt.certificate or b"", self._identity)

    # ---- stewards' statements ------------------------------------------------------------------------------------

    def heard(self) -> tuple[tuple[SignedStatement, bool], ...]:
        """The stewards' statements in the ledger, in order, each with whether its approval lapsed."""
        return self._ledger.approvals()

    def hear(self, signed: SignedStatement) -> bool:
        """Records a steward's statement. Returns whether it is new.

        Raises:
            LedgerError: it could not be recorded.
        """
        return self._ledger.approval(signed)

    def lapse(self, signed: SignedStatement) -> None:
        """Records that an approval's time is over.

        Raises:
            LedgerError: it could not be recorded.
        """
        self._ledger.lapse(signed)

    @property
    def now_ms(self) -> int:
        """The ledger's time, which never runs backwards: milliseconds since 1970 UTC."""
        return self._ledger.now_ms

    # ---- a round -------------------------------------------------------------------------------------------------

    def protection(self, job: JobDocument, examples: int) -> Protection:
        """The job's mechanism on this machine, with the member's own numbers.

        Raises:
            PolicyRefusal: the job does not allow the member's own numbers.
        """
        measures = may_measure(self._policy, job, tuple(self._ledger.reservations()), self._identity.federation)
        try:
            return protection_of(
                job,
                examples,
                own=self._policy.own(),
                trust_central_noise=self._policy.trust_central_noise,
                metrics=self._ledger.limit.adjacency if measures else None,
            )
        except ValueError as error:
            raise PolicyRefusal(Reason.REASON_POLICY_NOISE, str(error)) from error

    def reserve(self, assignment: Assignment, job: JobDocument, protection: Protection) -> BudgetReservation:
        """Reserves budget for one round's event, before anything is trained.

        Raises:
            PolicyRefusal: the budget of the data set, the month or the job is spent; the event has no formula under
                this ledger's adjacency or unit; the ledger cannot be written; or the noise of earlier steps is lost.
        """
        purpose = Purpose(
            federation=self._identity.federation,
            job=job.name,
            round=assignment.round,
            version=assignment.version,
            document=assignment.job_document,
            mechanism=job.mechanism.name,
            data=self._data,
        )
        event = protection.event
        if event is None:
            return BudgetReservation(job, purpose, None, protection.each_attempt)
        if isinstance(job.mechanism, DpSgd) and job.mechanism.band > 1:
            return self._reserve_steps(event, job, job.mechanism, purpose)
        measured = self._measures(event, job, assignment.round)
        spent = [each.event for each in self._ledger.reservations() if each.released is None]
        event = beside_what_is_spent(measuring(event, int(measured)), spent)
        return BudgetReservation(job, purpose, self._reserve(event, purpose), protection.each_attempt, measured)

    def answering(self, job: JobDocument, question: Question) -> Answering:
        """How the job's question is answered on this machine, and what that costs.

        Raises:
            PolicyRefusal: the job has another mechanism.
        """
        if not isinstance(job.mechanism, OwnDiscreteGaussian):
            raise PolicyRefusal(Reason.REASON_PRIVACY_UNACCOUNTABLE, "the job asks without noise on the answers")
        return Answering(event_of_answer(question, job.mechanism, self._ledger.limit.adjacency))

    def reserve_answer(self, assignment: Assignment, job: JobDocument, answering: Answering) -> BudgetReservation:
        """Reserves budget for one answer, before anything is counted.

        Raises:
            PolicyRefusal: as in `reserve`, or the limit for such questions is spent.
        """
        question = job.question
        if question is None:
            raise TypeError(f"job {job.name} asks no question")
        spent = questions.spent(question, self._ledger.reservations())
        if (why := questions.refusal(self._policy, question, spent, answering.event)) is not None:
            log.warning("budget_spent", job=job.name, detail=why)
            spenders = questions.allowance_for(self._policy, question).spenders
            raise PolicyRefusal(Reason.REASON_BUDGET_SPENT, f"the answer would pass this member's limit for {spenders}")
        return self.reserve(assignment, job, answering)

    def held_answer(self, job: JobDocument, reservation: int) -> BudgetReservation | None:
        """The reservation of an answer that this member holds on the disk. None: it may not be sent again.

        Only an answer that was charged for exactly this job may be. It then costs nothing more.
        """
        if not self.paid(reservation, job.name, job.digest(), job.mechanism.name):
            return None
        self._ledger.hold(reservation)
        return BudgetReservation(job, self._ledger.reservation(reservation).purpose, reservation, False)

    def charge(self, attempt: AttemptId, reserved: BudgetReservation) -> None:
        """Charges the event for good, on the disk, before anything of the update is encoded for an attempt.

        Charging the same attempt again changes nothing.

        Raises:
            PolicyRefusal: a further release would pass the limit, or the ledger cannot be written. Nothing may leave.
        """
        if attempt in self._charged:
            if reserved.steps is not None and not reserved.steps.committed:
                raise PolicyRefusal(Reason.REASON_VECTOR_INVALID, "this attempt was charged for other steps")
            return
        number = reserved.reservation
        if number is not None:
            held = self._ledger.reservation(number)
            again = held.charged and held.attempt(attempt.attempt) is None
            if again and reserved.each_attempt:
                # The metrics are the same vector again, with the same noise.
                number = self._reserve(measuring(held.event, 0), reserved.purpose)
            try:
                if reserved.steps is not None:
                    self._commit(number, reserved, reserved.steps)
                self._ledger.charge(number, attempt.attempt)
            except LedgerError as error:
                if number != reserved.reservation:
                    self._release(number, "it could not be charged")
                raise self._failing(error) from error
        self._charged[attempt] = number

    def charged_to(self, attempt: AttemptId) -> int | None:
        """The reservation that an attempt was charged to. None: its mechanism costs nothing.

        Raises:
            KeyError: the attempt was not charged.
        """
        return self._charged[attempt]

    def sending(
        self,
        attempt: AttemptId,
        reserved: BudgetReservation,
        session: secure_agg.Session,
        message: secure_agg.MaskedInput,
    ) -> None:
        """Writes the receipt of what is about to leave.

        Raises:
            PolicyRefusal: the receipt cannot be stored. Nothing may leave.
        """
        sent = _Sent(attempt, reserved, self._charged[attempt], session, message)
        try:
            self._write_receipt(sent, SENDING, b"", None)
        except LedgerError as error:
            raise self._failing(error) from error
        self._sent[attempt] = sent

    def ended(self, attempt: AttemptId, outcome: str, result: bytes, survivors: Collection[str] | None) -> None:
        """Records how an attempt ended, as far as this member was told. A failed write is logged; it stays spent."""
        charged, sent = self._charged.pop(attempt, None), self._sent.pop(attempt, None)
        try:
            if charged is not None:
                self._ledger.settle(charged, attempt.attempt, outcome, result)
            if sent is not None:
                self._write_receipt(sent, outcome, result, survivors)
        except (LedgerError, ValueError) as error:
            log.error("ledger_failing", attempt=str(attempt), error=str(error))

    def release(self, reserved: BudgetReservation, why: str) -> None:
        """Frees the reservation of an update that is discarded, if it was never charged."""
        if reserved.reservation is None:
            return
        if reserved.steps is not None:
            users = self._users.get(reserved.reservation, [])
            users[:] = [each for each in users if each is not reserved.steps]
            if users:
                # A later round of the same job has the same reservation.
                return
        self._release(reserved.reservation, why)

    def lost_steps(self, reserved: BudgetReservation) -> CorrelatedSteps | None:
        """Where the steps of a failed training stand, for `forfeit` to go on from. None: there is nothing to skip.

        The caller skips `reserved.steps.count` of them in a thread, since making their rows takes long.
        """
        if reserved.reservation is None or reserved.steps is None or reserved.steps.committed:
            return None
        try:
            return self._steps(reserved.reservation, reserved.job)
        except PolicyRefusal:
            # `forfeit` meets it again, and says so.
            return None

    def forfeit(self, reserved: BudgetReservation, skipped: CorrelatedSteps | None = None) -> None:
        """Charges a failed training, although no update is sent.

        Args:
            reserved: what the training was for.
            skipped: its `lost_steps`, skipped; None: this makes their rows.

        The coordinator is told that the training failed, and that may depend on the data. The event's epsilon does not
        bound what this reveals, since the message has no noise; but asking again costs as much as training.
        """
        number = reserved.reservation
        if number is None:
            return
        try:
            if reserved.steps is not None and not reserved.steps.committed:
                # The job is charged as a whole, so this round's steps are the price.
                steps = self._steps(number, reserved.job)
                if skipped is not None and skipped.step == steps.step + reserved.steps.count:
                    steps = skipped
                else:
                    steps.skip(reserved.steps.count, secure_agg.SystemRandom())
                reserved.steps.correlated = steps
                try:
                    self._commit(number, reserved, reserved.steps)
                except PolicyRefusal:
                    # Without its file the job is over here, but its steps are paid all the same.
                    if self._ledger.reservation(number).steps < steps.step:
                        self._ledger.step(number, steps.band, steps.step)
            self._ledger.charge(number, NO_ATTEMPT)
            self._ledger.settle(number, NO_ATTEMPT, "training_failed", b"")
        except (LedgerError, PolicyRefusal) as error:
            log.error("ledger_failing", job=reserved.job.name, error=str(error))

    # ---- correlated noise ----------------------------------------------------------------------------------------

    def _reserve_steps(
        self, event: PrivacyEvent, job: JobDocument, mechanism: DpSgd, purpose: Purpose
    ) -> BudgetReservation:
        """The reservation of the whole job, made before its first round, and the steps of this round.

        Its numbers hold for the whole job, whatever changes: rate and multiplier are read from the ledger.
        """
        held = self._held_for(job)
        number = self._reserve(event, purpose) if held is None else held
        if self._ledger.reservation(number).charged:
            self._ledger.hold(number)
        try:
            correlated = self._steps(number, job)
            # Steps that were skipped leave fewer. The last class may have room that the job's own steps do not use.
            if -(-(correlated.step + mechanism.steps) // mechanism.band) > self._ledger.reservation(number).event.steps:
                log.warning("budget_spent", job=job.name, detail="all steps of the job are over on this machine")
                raise PolicyRefusal(Reason.REASON_BUDGET_SPENT, "this member has taken all of its steps in the job")
        except PolicyRefusal:
            if held is None:
                self._release(number, "its noise cannot be kept")
            raise
        steps = StepsHeld(correlated, correlated.step, mechanism.steps)
        if not self._ledger.reservation(number).charged:
            self._users.setdefault(number, []).append(steps)
        return BudgetReservation(job, purpose, number, each_attempt=False, steps=steps)

    def _held_for(self, job: JobDocument) -> int | None:
        """The number of the reservation for this whole job; None if there is none."""
        ours = (self._identity.federation, job.name, job.digest(), job.mechanism.name)
        for each in self._ledger.reservations():
            purpose = each.purpose
            if each.released is None and (purpose.federation, purpose.job, purpose.document, purpose.mechanism) == ours:
                return each.number
        return None

    def _steps(self, number: int, job: JobDocument) -> CorrelatedSteps:
        """The steps of a job from where they stand.

        Raises:
            PolicyRefusal: the noise of steps that may have left is gone, or older than the ledger.
        """
        held, mechanism = self._ledger.reservation(number), job.mechanism
        event = held.as_reserved
        if self._noise is None or not isinstance(mechanism, DpSgd) or not isinstance(event, SampledGaussian):
            raise PolicyRefusal(Reason.REASON_PRIVACY_UNACCOUNTABLE, "this member keeps no correlated noise")
        multiplier, rate = event.multiplier, event.rate
        try:
            found = self._noise.load(job.name, job.digest(), number, mechanism.coefficients, multiplier, rate)
            if (0 if found is None else found.step) < held.steps:
                raise NoiseLost(
                    f"the noise of job {job.name} is missing or older than the ledger, which says that {held.steps} "
                    "steps are over; put back the newest copy of the whole home, or leave the job"
                )
        except NoiseLost as error:
            log.error("noise_lost", job=job.name, detail=str(error))
            lost = "this member's noise of earlier steps is lost, so it takes no more of them"
            raise PolicyRefusal(Reason.REASON_LEDGER_ROLLED_BACK, lost) from error
        if found is None:
            return self._noise.begun(mechanism.coefficients, multiplier, rate, job.values)
        return found

    def _commit(self, number: int, reserved: BudgetReservation, steps: StepsHeld) -> None:
        """Says for good that a round's steps are over: first the file from which the next ones go on, then the ledger.

        Raises:
            PolicyRefusal: other steps were taken since, the training did not take all of these, or the disk is full.
            LedgerError: the ledger cannot be written.
        """
        if steps.committed:
            return
        job, correlated = reserved.job, steps.correlated
        assert self._noise is not None  # noqa: S101  there would be no steps
        try:
            stands = self._noise.step(job.name, job.digest(), number)
            if stands != steps.first or correlated.step != steps.first + steps.count:
                raise PolicyRefusal(Reason.REASON_VECTOR_INVALID, "other steps of this job were taken since")
            self._noise.keep(job.name, job.digest(), number, correlated)
        except NoiseLost as error:
            raise PolicyRefusal(Reason.REASON_LEDGER_ROLLED_BACK, "this member's noise is lost") from error
        except OSError as error:
            raise self._failing(error) from error
        self._ledger.step(number, correlated.band, correlated.step)
        steps.committed = True
        # From now on nobody releases it, and the rows of other rounds need no memory.
        self._users.pop(number, None)

    def job_over(self, job: str) -> None:
        """Deletes the noise of a job that is over."""
        if self._noise is not None:
            self._noise.forget(job)

    # ---- synthetic text ------------------------------------------------------------------------------------------

    @property
    def adjacency(self) -> Adjacency:
        """The ledger's adjacency."""
        return self._ledger.limit.adjacency

    @property
    def ledger(self) -> bytes:
        """The ledger's id, 16 bytes."""
        return self._ledger.id

    @property
    def data_name(self) -> str:
        """The member's own name for the data."""
        return self._ledger.name

    def paid(self, reservation: int, job: str, document: bytes, mechanism: str) -> bool:
        """Whether the ledger holds this reservation, charged, for this job (SHA-256 of its document) and mechanism."""
        try:
            held = self._ledger.reservation(reservation)
        except LedgerError:
            return False
        purpose = held.purpose
        ours = (self._identity.federation, job, document, mechanism)
        return held.charged and (purpose.federation, purpose.job, purpose.document, purpose.mechanism) == ours

    def charge_beside(
        self, event: PrivacyEvent, job: JobDocument, *, round: int, version: bytes, mechanism: str
    ) -> int:
        """Charges an event that belongs to no attempt. Nothing of it may be drawn before this returns.

        Args:
            event: what is about to be released.
            job: the job that it belongs to.
            round: round of the model that it goes with.
            version: version of that model.
            mechanism: its name in the ledger.

        Returns:
            The number of its reservation.

        Raises:
            PolicyRefusal: a limit would be passed, there is no formula, or the ledger cannot be written.
        """
        purpose = Purpose(
            federation=self._identity.federation,
            job=job.name,
            round=round,
            version=version,
            document=job.digest(),
            mechanism=mechanism,
            data=self._data,
        )
        number = self._reserve(event, purpose)
        try:
            self._ledger.charge(number, NO_ATTEMPT)
        except LedgerError as error:
            self._release(number, "it could not be charged")
            raise self._failing(error) from error
        try:
            self._ledger.settle(number, NO_ATTEMPT, "made", b"")
        except LedgerError as error:
            # The event is charged, so nothing is lost but the note that it was made.
            log.error("ledger_failing", reservation=number, error=str(error))
        return number

    def corpus_sent(self, job: str, corpus: bytes) -> CorpusReleased | None:
        """Finds what the receipt of a file said before its first byte left. None: there is no receipt.

        Serves files that are called back, whose statement may be gone. corpus: SHA-256 of the file.
        """
        for path in self._receipts.files():
            if path.parent.name != job:
                continue
            try:
                found = receipt_from(path.read_bytes())
            except (OSError, DocumentInvalid):
                # `ledger verify` names the damaged file.
                continue
            if isinstance(found, CorpusReceipt) and (found.outcome, found.corpus) == (SENDING, corpus):
                return CorpusReleased(
                    job=found.job,
                    round=found.round,
                    job_document=found.job_document,
                    version=found.version,
                    mechanism=found.mechanism,
                    trained=found.trained,
                    histogram=found.reservation,
                    corpus=found.corpus,
                    size=found.bytes,
                    rows=found.rows,
                    statement=found.statement,
                )
        return None

    def corpus_receipt(self, given: CorpusReleased, outcome: str) -> None:
        """Writes the receipt of a file of synthetic text: `SENDING` before its first byte leaves, then how that ended.

        Raises:
            PolicyRefusal: the receipt cannot be stored. Nothing may leave.
        """
        event = None if given.histogram is None else self._ledger.reservation(given.histogram).as_reserved
        receipt = CorpusReceipt(
            at_ms=time.time_ns() // 1_000_000,
            federation=self._identity.federation,
            member=self._identity.member,
            certificate=self._identity.fingerprint,
            job=given.job,
            round=given.round,
            job_document=given.job_document,
            version=given.version,
            mechanism=given.mechanism,
            trained=given.trained,
            event=event,
            reservation=given.histogram,
            corpus=given.corpus,
            bytes=given.size,
            rows=given.rows,
            statement=given.statement,
            outcome=outcome,
            ledger=self._ledger.id.hex(),
            previous=self._ledger.last_receipt,
        )
        try:
            self._receipts.write(receipt, self._identity, self._ledger, self._identity.known_authorities)
        except LedgerError as error:
            raise self._failing(error) from error

    # ---- inside --------------------------------------------------------------------------------------------------

    def _release(self, number: int, why: str) -> None:
        if not self._ledger.reservation(number).outstanding:
            return
        try:
            self._ledger.release(number, why)
        except LedgerUnwritable as error:
            # The reservation counts as spent until the next start releases it.
            log.error("ledger_failing", reservation=number, error=str(error))

    def _write_receipt(self, sent: _Sent, outcome: str, result: bytes, survivors: Collection[str] | None) -> None:
        context, purpose = sent.session.context, sent.reserved.purpose
        layout = layout_of(sent.reserved.job, context.cohort)
        event = None if sent.reservation is None else self._ledger.reservation(sent.reservation).as_reserved
        receipt = Receipt(
            at_ms=time.time_ns() // 1_000_000,
            federation=purpose.federation,
            member=self._identity.member,
            job=purpose.job,
            round=sent.attempt.round,
            attempt=sent.attempt.attempt,
            job_document=purpose.document,
            version=purpose.version,
            mechanism=sent.reserved.job.mechanism,
            event=event,
            reservation=sent.reservation,
            vector=sent.masked.digest,
            vector_bytes=secure_agg.packed_size(sent.masked.length, context.bits),
            bits=context.bits,
            segments=tuple(Segment(name=each.name, values=each.length) for each in layout.segments),
            cohort=tuple(
                Party(member=entry.member, certificate=entry.certificate_digest)
                for entry in sent.session.entries.values()
            ),
            cohort_size=context.cohort,
            assumed_corrupt=context.assumed_corrupt,
            threshold=context.threshold,
            honest=context.honest,
            sparse_graph=None if context.sparse is None else SparseNumbers(**asdict(context.sparse)),
            groups=None if context.grouped is None else GroupNumbers(**asdict(context.grouped)),
            survivors=None if survivors is None else tuple(sorted(survivors)),
            outcome=outcome,
            result=result or None,
            ledger=self._ledger.id.hex(),
            previous=self._ledger.last_receipt,
        )
        self._receipts.write(receipt, self.signer_of(receipt), self._ledger, self._identity.known_authorities)

    def _measures(self, event: PrivacyEvent, job: JobDocument, round: int) -> bool:
        """Whether this round's event pays for a measurement. Nobody but this member learns the answer.

        Raises:
            PolicyRefusal: the event has no formula under this ledger's adjacency or unit.
        """
        beside = metrics_beside(event)
        if beside is None or job.metrics is None or not job.metrics.measured(round) or not self._policy.measures:
            return False
        from learning.accounting.renyi import EventUnaccountable

        spent = [each.event for each in self._ledger.reservations() if each.released is None]
        try:
            if not room_for_metrics(self._policy, job, spent):
                log.info("metrics_spent", job=job.name, metrics_epsilon=self._policy.metrics_epsilon)
                return False
            if not _has_steps_for(event, spent):
                return False
            self._check_job_limit(event, job.name)
            return not self._ledger.exhausted(event)
        except BudgetSpent:
            # The training alone may still have room.
            return False
        except EventUnaccountable as error:
            raise PolicyRefusal(Reason.REASON_PRIVACY_UNACCOUNTABLE, str(error)) from error

    def _reserve(self, event: PrivacyEvent, purpose: Purpose) -> int:
        from learning.accounting.renyi import EventUnaccountable

        try:
            self._check_job_limit(event, purpose.job)
            return self._ledger.reserve(event, purpose).number
        except EventUnaccountable as error:
            raise PolicyRefusal(Reason.REASON_PRIVACY_UNACCOUNTABLE, str(error)) from error
        except BudgetSpent as error:
            # The coordinator is not told how much was spent; the member's own log is.
            log.warning("budget_spent", job=purpose.job, detail=str(error))
            raise PolicyRefusal(
                Reason.REASON_BUDGET_SPENT, "the next release would pass this member's limit for its data"
            ) from error
        except LedgerError as error:
            raise self._failing(error) from error

    def _check_job_limit(self, event: PrivacyEvent, job: str) -> None:
        """Applies the ledger's gate to one job's events.

        Raises:
            BudgetSpent: the event would pass `epsilon_a_job`.
            EventUnaccountable: the event has no formula.
        """
        most = self._policy.epsilon_a_job
        if most is None:
            return
        from learning.accounting.filter import Limit
        from learning.accounting.gate import PrivacyFilter

        limit = Limit(most, self._policy.delta, self._policy.adjacency, self._policy.unit)
        if not PrivacyFilter(limit).admits([*self.statement(job).of_job, event]):
            raise BudgetSpent(f"epsilon_a_job: job {job} would pass epsilon {most:g} at delta {limit.delta:g}")

    def _failing(self, error: Exception) -> PolicyRefusal:
        log.error("ledger_failing", error=str(error))
        return PolicyRefusal(Reason.REASON_LEDGER_FAILING, "this member cannot write its privacy ledger")


def _has_steps_for(event: PrivacyEvent, spent: Sequence[PrivacyEvent]) -> bool:
    """Whether the steps in the ledger have room for one more measurement beside them.

    If not (the member measured before a restart, or missed the rounds in between), a measurement would count as further
    steps of training. Then it is left out.
    """
    alike = [each for each in merged(spent) if homogeneous([each, event]) is not None]
    whole = homogeneous([*alike, event])
    return whole is not None and plan_of(whole).steps == whole.steps
