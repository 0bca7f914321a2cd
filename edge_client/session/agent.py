"""The agent takes messages from the connection (`link`) and carries out what the member's state machine decides.

Trained updates and the secrets of an attempt stay in memory while there is no session. When it is back, the coordinator
says where each job is.
"""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Protocol

import grpc
import grpc.aio
import numpy as np
import structlog
from numpy.typing import NDArray

import secure_agg
from edge_client.approval.desk import Desk
from edge_client.corpus_release.models import TrainedModel
from edge_client.corpus_release.releaser import Releaser
from edge_client.downloads.cache import CertificateCache
from edge_client.identity.connection import CALL_BROKEN, raise_if_told_to_stop
from edge_client.identity.home import MemberIdentity
from edge_client.identity.renewal import Renewer
from edge_client.ledger.budget import Budget, BudgetReservation, Figures, Statement
from edge_client.policy.policy import PolicyRefusal
from edge_client.roster.following import Follower
from edge_client.session import states as m
from edge_client.session.fetching import Fetcher
from edge_client.session.idle import Idle
from edge_client.session.journal import Journal
from edge_client.session.keeping import Keeper
from edge_client.session.link import AgentStopped, Link
from edge_client.session.machine import transition
from edge_client.session.preparation import ApprovalMissing, Preparation, PreparationRefused, Preparer
from edge_client.withdrawal.folder import KeptWithdrawal, WithdrawalFolder, WithdrawalsUnreadable
from edge_client.withdrawal.sending import AnswerUnfit, RequestRefused, send
from learning.mechanisms.contribution import Update, update_digest
from learning.mechanisms.protection import Protection
from tacit import __version__, wire
from tacit.attempt import AttemptId
from tacit.blobs import STALL_SECONDS
from tacit.job import JobDocument
from tacit.limits import UPLOAD_MESSAGE
from tacit.mechanism import NoMechanism
from tacit.messages import (
    Assignment,
    AttemptEnded,
    AttemptMessage,
    AttemptOpened,
    AttemptRefusal,
    CoordinatorPayload,
    Decline,
    FromMember,
    Hello,
    JobEnded,
    PrivacyReport,
    Welcome,
)
from tacit.protocol import PROTOCOL_VERSION
from tacit.reason import FINISHED, Reason, of_protocol, sentence, word
from tacit.roster import SignedHead
from tacit.v1 import federation_pb2 as pb

__all__ = ["CHUNK", "WITHDREW_FOR_GOOD", "Agent", "JobsUnfinished", "Observer"]

log = structlog.get_logger("edge_client")

# Bytes of a masked vector in one message.
CHUNK = UPLOAD_MESSAGE
# Messages whose signatures and shares take long to check. A thread handles them, so that the session stays alive.
_TAKE_A_WHILE = (
    secure_agg.Roster,
    secure_agg.DigestRoster,
    secure_agg.GroupRoster,
    secure_agg.ReceivedDealings,
    secure_agg.Confirmations,
)
# Maximum messages of the coordinator that are read and not handled yet. A roster has up to 13 MiB.
_MESSAGES_AHEAD = 16
# Seconds between two looks at what the stewards have decided, and at what this member withdrew from.
_LOOK_SECONDS = 1.0
# Ends of a job after which this member hears no more of it.
OVER = (*FINISHED, Reason.REASON_JOB_ABORTED, Reason.REASON_MEMBER_WITHDREW)
# Why a job paused itself, in words for a member's owner. The reasons' own sentences speak to the operator.
_STALLED = {
    Reason.REASON_MEMBERS_DECLINED: "too many members declined it for good",
    Reason.REASON_ROUNDS_FAILING: "too many of its rounds in a row failed",
    Reason.REASON_INTERNAL: "the coordinator failed at it",
}

WITHDREW_FOR_GOOD = (
    "This member withdrew from all jobs, for good, and the coordinator has taken that: nothing is left to do. "
    "`edge_client withdraw` shows what it said."
)


def _takes_a_while(event: m.Event) -> bool:
    if isinstance(event, m.CertificatesFetched):
        return True
    return (
        isinstance(event, m.Received)
        and isinstance(event.message, AttemptMessage)
        and isinstance(event.message.payload, _TAKE_A_WHILE)
    )


def _asks_stewards(event: m.Event) -> bool:
    return (
        isinstance(event, m.Received)
        and isinstance(event.message, AttemptMessage)
        and isinstance(event.message.payload, AttemptOpened)
    )


def _attempt_of(event: m.Event) -> AttemptId | None:
    """Returns the attempt of an event if the coordinator waits for the answer."""
    if isinstance(event, m.CertificatesFetched):
        return event.attempt
    if isinstance(event, m.Received) and isinstance(event.message, AttemptMessage):
        return event.message.attempt
    return None


def _digest_of(preparation: Preparation) -> bytes | None:
    """Returns the digest of the update if the job adds no noise."""
    if not isinstance(preparation.job.mechanism, NoMechanism):
        return None
    return update_digest(preparation.job, preparation.update)


def _of_stewards(desk: Desk, phase: m.Phase) -> m.Event | None:
    """Returns what the stewards' decisions change for a job now."""
    match phase:
        case m.Awaiting(assignment=assignment, job=job, decline=told):
            try:
                desk.check(job)
            except PolicyRefusal as refusal:
                if (refusal.reason, refusal.detail) == (told.reason, told.detail):
                    return None
                return m.ApprovalAwaited(assignment, job, refusal.reason, refusal.detail)
            return m.Approved(assignment)
        case m.Holding(assignment=assignment, job=job):
            try:
                desk.check(job)
            except PolicyRefusal as refusal:
                return m.ApprovalAwaited(assignment, job, refusal.reason, refusal.detail)
            return None
        case _:
            return None


def _document_of(phase: m.Phase) -> JobDocument | None:
    match phase:
        case m.Awaiting(job=job) | m.Holding(job=job) | m.InAttempt(holding=m.Holding(job=job)):
            return job
        case _:
            return None


def _readable(folder: WithdrawalFolder) -> tuple[KeptWithdrawal, ...]:
    """The withdrawals, or none if they cannot be read: then the member takes part in nothing, and says so elsewhere."""
    try:
        return folder.all()
    except WithdrawalsUnreadable:
        return ()


class Observer(Protocol):
    """Watches a member: a terminal, a log. Threads call `training`, `reading`, `privacy` and `encoded`."""

    def connected(self, federation: str) -> None:
        """Called when a session is open."""

    def disconnected(self, sentence: str, seconds: float) -> None:
        """Called when a session broke or could not be opened. `seconds` is the time to the next try."""

    def assigned(self, assignment: Assignment) -> None:
        """Called when a round begins."""

    def training(self, job: str, round: int, step: int, steps: int, loss: float) -> None:
        """Called after each step of local training."""

    def reading(self, job: str, round: int, done: int, rows: int) -> None:
        """Called while a frozen backbone computes features of rows: how many, of how many that were missing."""

    def training_failing(self, job: str, round: int, why: str) -> None:
        """Called if the training went wrong and its update is sent nevertheless."""

    def ready(self, job: str, round: int, update: Update) -> None:
        """Called when the update is trained."""

    def declined(self, job: str, reason: Reason) -> None:
        """Called when the coordinator is told that this member does not train for the job's round, or for the job."""

    def privacy(self, figures: Figures) -> None:
        """Called with what the ledger says now."""

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """Called before the vector is masked in place. An observer that keeps it must copy it."""

    def uploading(self, attempt: AttemptId, sent: int, total: int) -> None:
        """Called with the bytes of the masked vector that the network has taken."""

    def attempt_ended(self, attempt: AttemptId, ended: AttemptEnded) -> None:
        """Called when an attempt ended."""

    def job_over(self, ended: JobEnded) -> None:
        """Called when a job is finished, paused or aborted."""


@dataclass(frozen=True)
class _Held:
    """What the agent holds for a job."""

    assignment: Assignment
    update: Update
    protection: Protection
    reserved: BudgetReservation
    # The token under which private parameters were staged with the update.
    staged: str | None = None
    # What this member makes synthetic text from, if the job orders some.
    model: TrainedModel | None = None


class JobsUnfinished(Exception):
    """Every job is over, and at least one is not finished. The sentence says why and what to do."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class Agent:
    """One member's process. With `until_finished`, `run` returns when every job that it took part in is over."""

    def __init__(
        self,
        identity: MemberIdentity,
        environment: m.Environment,
        journal: Journal,
        preparer: Preparer,
        budget: Budget,
        observer: Observer,
        keeper: Keeper,
        *,
        admits: tuple[str, ...] = (),
        until_finished: bool = False,
        renewer: Renewer | None = None,
        releaser: Releaser | None = None,
        follower: Follower | None = None,
        desk: Desk | None = None,
        withdrawals: WithdrawalFolder | None = None,
        idle: Idle | None = None,
    ) -> None:
        """Starts from what the journal remembers.

        Args:
            identity: Who the member is.
            environment: What the state machine uses besides its state.
            journal: What the member must remember of attempts.
            preparer: Trains updates.
            budget: The ledger that pays for rounds.
            observer: Watches the member.
            keeper: The private states of jobs.
            admits: Patterns of job names to take part in; empty: all jobs.
            until_finished: Lets `run` return when every job is over, or has paused itself.
            renewer: Keeps the identity's certificate valid; without one, it is used as long as it is valid.
            follower: Follows the roster log; without one, attempts are not checked against it.
            releaser: Makes and releases the synthetic text that jobs order; without one, the member makes none.
            desk: Knows which jobs the stewards approve of; without one, none is asked about.
            withdrawals: What this member withdrew from; without it, nothing.
            idle: Says when this member is connected; without it, always.
        """
        self._link = Link(
            identity,
            renewer,
            hello=self._hello,
            on_welcome=self._welcomed,
            on_message=self._received,
            on_break=self._disconnected,
            idle=idle,
        )
        cache = CertificateCache(identity.home / "certificates") if identity is not None else None
        self._fetcher = Fetcher(self._link, cache)
        self._environment = environment
        self._journal = journal
        self._preparer = preparer
        self._budget = budget
        self._observer = observer
        self._keeper = keeper
        self._admits = admits
        self._until_finished = until_finished
        self._renewer = renewer
        self._releaser = releaser
        self._follower = follower
        self._desk = desk
        self._withdrawals = withdrawals
        self._idle = idle
        if renewer is not None:
            renewer.listeners.append(self._take_identity)
        self._process = os.urandom(16)
        self._state = m.MemberState(journal.memory())
        self._events: asyncio.Queue[m.Event] = asyncio.Queue()
        self._room = asyncio.Semaphore(_MESSAGES_AHEAD)
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, _Held] = {}
        # Uploads of masked vectors, by attempt.
        self._uploads: dict[AttemptId, asyncio.Task[None]] = {}
        # By attempt: the token of the private parameters that were staged with the vector that was sent.
        self._sent_with: dict[AttemptId, str] = {}
        # Fetches of certificates, by attempt; and writes of certificates to the disk.
        self._rosters: dict[AttemptId, asyncio.Task[None]] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        self._taken: set[str] = set()
        self._over: set[str] = set()
        # Why a job that this member took part in paused itself, and why this member declined a job, by job.
        self._stalled: dict[str, Reason] = {}
        self._declined: dict[str, str] = {}
        self._finished = asyncio.Event()
        self._reporting = asyncio.Lock()

    async def run(self) -> None:
        """Runs until cancelled or, with `until_finished`, until every job is over.

        Raises:
            AgentStopped: The coordinator refuses this member for good.
            JobsUnfinished: Every job is over or has paused itself, and one has paused itself.
        """
        tasks = [
            asyncio.create_task(self._link.run()),
            asyncio.create_task(self._work_events()),
            asyncio.create_task(self._finished.wait()),
        ]
        if self._renewer is not None:
            tasks.append(asyncio.create_task(self._renewer.run(self._link.channel, self._link.move)))
        if self._desk is not None:
            tasks.append(asyncio.create_task(self._follow_stewards(self._desk)))
        if self._withdrawals is not None:
            tasks.append(asyncio.create_task(self._follow_withdrawals(self._withdrawals)))
            tasks.append(asyncio.create_task(self._tell_withdrawals(self._withdrawals)))
        if self._idle is not None:
            tasks.append(asyncio.create_task(self._follow_idle(self._idle)))
        if self._releaser is not None:
            tasks.append(
                asyncio.create_task(
                    self._releaser.run(
                        self._link.stub, self._link.pause_after_failure, self._end_if_over, self._link.up
                    )
                )
            )
        # Not one of the tasks whose end ends the member.
        figures = asyncio.create_task(self._show_figures())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            figures.cancel()
            # An effect that is under way ends first, and may begin a task: a charge, an upload.
            while tasks:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                begun = (*self._preparing.values(), *self._uploads.values(), *self._rosters.values(), *self._keeping)
                tasks = [task for task in begun if not task.done()]
            await asyncio.gather(figures, return_exceptions=True)
        if self._stalled:
            raise JobsUnfinished(" ".join(self._unfinished(job) for job in sorted(self._stalled)))

    def _unfinished(self, job: str) -> str:
        own = f" This member declined: {self._declined[job]}." if job in self._declined else ""
        reason = self._stalled[job]
        why = _STALLED.get(reason) or sentence(reason).rstrip(".")
        return (
            f"Job {job} stopped before it was finished: {why}.{own} Ask its operator, and run this again once the job "
            "continues."
        )

    # ---- the link ---------------------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, __version__, self._process, self._admits, ledger=self._budget.counter)

    def _welcomed(self, welcome: Welcome) -> None:
        try:
            self._budget.check_reported(welcome.ledger_sequence)
        except PolicyRefusal as refusal:
            raise AgentStopped(refusal.reason, refusal.detail) from refusal
        if self._releaser is not None:
            self._releaser.connected()
        self._observer.connected(welcome.federation)

    def _disconnected(self, sentence: str, seconds: float) -> None:
        self._observer.disconnected(sentence, seconds)

    async def _received(self, message: Assignment | JobEnded | AttemptMessage[CoordinatorPayload]) -> None:
        """Queues a message for the state machine. If too many wait, the link reads no further messages.

        The roster log is followed to the head of an attempt before the state machine hears of the attempt.
        """
        if isinstance(message, AttemptMessage) and isinstance(message.payload, AttemptOpened):
            await self._follow(message.payload.log_head)
        await self._room.acquire()
        self._events.put_nowait(m.Received(message))

    async def _follow(self, head: SignedHead | str | None) -> None:
        """Follows the roster log to an attempt's head, with a second try if the first call failed.

        In between, the link takes up a certificate that another process of this home has renewed.
        """
        if self._follower is None or not isinstance(head, SignedHead):
            return
        for _ in range(2):
            stub = await self._link.stub()
            if await self._follower.to_attempt(stub, head):
                return
            await self._link.pause_after_failure(stub)

    def _take_identity(self, identity: MemberIdentity) -> None:
        """Connects, joins and signs with this identity from now on. Attempts already joined keep the one they have."""
        if identity.certificate != self._link.identity.certificate:
            self._budget.renewed(identity)
            if self._releaser is not None:
                self._releaser.renewed(identity)
        if self._follower is not None:
            self._follower.identity = identity
        self._link.identity = identity
        self._environment = replace(self._environment, identity=identity)

    # ---- events and effects ---------------------------------------------------------------------------------------

    async def _work_events(self) -> None:
        while True:
            event = await self._events.get()
            try:
                await self._work(event)
            finally:
                if isinstance(event, m.Received):
                    self._room.release()

    async def _work(self, event: m.Event) -> None:
        try:
            if _takes_a_while(event):
                # The loop assigns the state, and handles no other event before that.
                worked = await asyncio.to_thread(transition, self._environment, self._state, event)
                self._state, effects = worked
            elif _asks_stewards(event):
                # What the stewards decided is taken up in the ledger.
                worked = await self._budget.writer.run(transition, self._environment, self._state, event)
                self._state, effects = worked
            else:
                self._state, effects = transition(self._environment, self._state, event)
        except Exception as error:
            log.error("message_failed", kind=type(event).__name__, error=str(error), exc_info=error)
            if (attempt := _attempt_of(event)) is not None:
                refusal = AttemptRefusal(Reason.REASON_INTERNAL, "the member's own log says more")
                await self._carry_out(m.Say(AttemptMessage(attempt, refusal)))
            return
        for effect in effects:
            try:
                await self._carry_out(effect)
            except (sqlite3.Error, OSError) as error:
                log.error("journal_failing", error=str(error))
                if isinstance(effect, m.Joined | m.VectorLeaving | m.Signed):
                    # The effects that follow must not happen without the record that could not be written. The member
                    # leaves the attempt before the next message, which it would otherwise answer as if it had one.
                    detail = "this member cannot write its journal"
                    await self._work(m.MaskingFailed(effect.attempt, Reason.REASON_LEDGER_FAILING, detail))
                    return

    async def _carry_out(self, effect: m.Effect) -> None:
        """Carries out one effect. What it writes is on the disk when this returns, before the next effect."""
        match effect:
            case m.Say():
                self._say(effect.message)
            case m.Joined():
                joined = self._journal.joined
                await self._budget.writer.run(joined, effect.attempt, effect.version, effect.document)
            case m.Signed():
                await self._sign(effect)
            case m.VectorLeaving():
                await self._budget.writer.run(self._journal.opened, effect.attempt, effect.update)
            case m.Prepare():
                self._taken.add(effect.assignment.job)
                self._over.discard(effect.assignment.job)
                self._stalled.pop(effect.assignment.job, None)
                self._declined.pop(effect.assignment.job, None)
                self._observer.assigned(effect.assignment)
                job = effect.assignment.job
                if (older := self._preparing.pop(job, None)) is not None:
                    older.cancel()
                self._preparing[job] = asyncio.create_task(self._prepare(effect.assignment))
            case m.StopPreparing():
                if (task := self._preparing.pop(effect.job, None)) is not None:
                    task.cancel()
            case m.MaskAndUpload():
                await self._send(effect)
            case m.FetchCertificates():
                self._rosters[effect.attempt] = asyncio.create_task(self._fetch_certificates(effect))
            case m.KeepCertificates():
                task = asyncio.create_task(asyncio.to_thread(self._fetcher.keep, effect.certificates))
                self._keeping.add(task)
                task.add_done_callback(self._keeping.discard)
            case m.StopUpload():
                if (fetching := self._rosters.pop(effect.attempt, None)) is not None:
                    fetching.cancel()
                if (upload := self._uploads.pop(effect.attempt, None)) is not None:
                    upload.cancel()
            case m.Discard():
                await self._let_go(effect.job, self._held.pop(effect.job, None))
            case m.EndedAttempt():
                await self._end(effect)
            case m.JobOver():
                await self._job_over(effect.ended)
            case m.Note():
                (log.warning if effect.warning else log.info)(effect.what, **effect.fields)

    async def _job_over(self, ended: JobEnded) -> None:
        # A member that connects again hears again of every job that is over.
        if ended.job not in self._over or ended.job in self._stalled:
            self._observer.job_over(ended)
        if ended.reason in OVER:
            self._over.add(ended.job)
            self._stalled.pop(ended.job, None)
            await self._preparer.job_over(ended.job)
            if self._releaser is not None:
                (self._releaser.finished if ended.reason in FINISHED else self._releaser.aborted)(ended.job)
            self._end_if_over()
        # An operator who pauses a job means to let it go on. A job that paused itself goes on only if somebody changes
        # something first. One that stood still before this member came is none of its own.
        elif ended.reason != Reason.REASON_JOB_PAUSED and ended.job in self._taken:
            self._over.add(ended.job)
            self._stalled[ended.job] = ended.reason
            self._end_if_over()

    def _say(self, message: FromMember) -> None:
        if isinstance(message, Decline):
            # The member also waits for the end of a job that it declines, even if it prepared nothing for it.
            self._taken.add(message.job)
            if message.reason != Reason.REASON_APPROVAL_AWAITED:
                self._declined[message.job] = message.detail.rstrip(".")
            self._observer.declined(message.job, message.reason)
        self._link.say(message)

    def _end_if_over(self) -> None:
        """Ends `run` once every job that the member took part in is over, and no ordered text is left to do.

        Text is done when it is released, given up, or waits for its owner. That may be all there was to do since the
        start.
        """
        if not self._until_finished or (self._releaser is not None and self._releaser.busy):
            return
        gave = self._releaser is not None and self._releaser.handled
        if (self._taken or gave) and self._taken <= self._over:
            self._finished.set()

    # ---- stewards -------------------------------------------------------------------------------------------------

    async def _follow_idle(self, idle: Idle) -> None:
        """Ends the session between rounds once the member's command says so."""
        while True:
            await asyncio.sleep(idle.seconds)
            await self._link.stub()
            if not self._busy and not await idle.goes() and not self._busy:
                self._link.hang_up()

    @property
    def _busy(self) -> bool:
        """Whether this member trains, holds an update for a round, or sends one, or has heard what may begin one."""
        tasks = (*self._preparing.values(), *self._uploads.values())
        return bool(self._held) or not self._events.empty() or any(not task.done() for task in tasks)

    async def _follow_stewards(self, desk: Desk) -> None:
        """Looks again and again whether the stewards approve of the jobs that wait for them, and still of the others.

        An attempt also asks when it is joined and before its vector is charged.
        """
        while True:
            for phase in tuple(self._state.jobs.values()):
                event = await self._budget.writer.run(_of_stewards, desk, phase)
                if event is not None:
                    self._events.put_nowait(event)
            await asyncio.sleep(_LOOK_SECONDS)

    # ---- withdrawals ----------------------------------------------------------------------------------------------

    async def _follow_withdrawals(self, folder: WithdrawalFolder) -> None:
        """Looks again and again whether this member withdrew from a job that it takes part in."""
        while True:
            for job, phase in tuple(self._state.jobs.items()):
                if isinstance(phase, m.Waiting):
                    continue
                try:
                    folder.check(job, _document_of(phase))
                except PolicyRefusal as refusal:
                    self._events.put_nowait(m.Withdrew(job, refusal.reason, refusal.detail))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _tell_withdrawals(self, folder: WithdrawalFolder) -> None:
        """Tells the coordinator of each withdrawal once in this process: it may have lost what it knew.

        Raises:
            AgentStopped: The coordinator has taken a withdrawal from all jobs, so nothing is left to do.
        """
        told: set[bytes] = set()
        while True:
            for kept in _readable(folder):
                if kept.request.digest() in told:
                    continue
                stub = await self._link.stub()
                try:
                    kept, _ = await send(stub, self._link.identity, folder, kept)  # noqa: PLW2901  as it is now
                    log.info("withdrawal_taken", scope=kept.request.job or "all")
                    told.add(kept.request.digest())
                    if kept.request.job is None:
                        raise AgentStopped(Reason.REASON_MEMBER_WITHDREW, WITHDREW_FOR_GOOD)
                except (RequestRefused, AnswerUnfit) as error:
                    log.error("withdrawal_not_taken", scope=kept.request.job or "all", why=str(error))
                    told.add(kept.request.digest())
                except OSError as error:
                    log.error("withdrawal_failing", error=str(error))
                except CALL_BROKEN as error:
                    raise_if_told_to_stop(error)
                    await self._link.pause_after_failure(stub)
            await asyncio.sleep(_LOOK_SECONDS)

    # ---- preparing ------------------------------------------------------------------------------------------------

    async def _prepare(self, assignment: Assignment) -> None:
        try:
            preparation = await self._preparer.prepare(assignment, self._fetcher.blob)
        except ApprovalMissing as missing:
            self._events.put_nowait(m.ApprovalAwaited(assignment, missing.job, missing.reason, missing.detail))
            return
        except PreparationRefused as refused:
            if refused.private:
                log.error("preparation_refused", job=assignment.job, why=refused.private)
            self._events.put_nowait(m.PreparationFailed(assignment, refused.reason, refused.detail))
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("preparation_failed", job=assignment.job, error=str(error), exc_info=error)
            detail = f"preparing failed ({type(error).__name__}); the member's own log says why"
            self._events.put_nowait(m.PreparationFailed(assignment, Reason.REASON_TRAINING_FAILED, detail))
            return
        write = self._budget.writer.run
        try:
            report = await self._report(assignment.job)
            update = await asyncio.to_thread(_digest_of, preparation)
            standing = None if self._desk is None else await write(self._desk.standing, preparation.job)
            # The writer's thread completes a call before a cancellation takes effect, which is here.
            await asyncio.sleep(0)
        except BaseException as error:
            try:
                await write(self._budget.release, preparation.reserved, "the update was not held")
                if preparation.staged is not None:
                    self._keeper.discard(assignment.job, preparation.staged)
            except Exception as failing:
                # The next start gives the reservation back.
                log.error("preparation_failed", job=assignment.job, error=str(failing), exc_info=failing)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, secure_agg.EncodingInvalid):
                detail = "training ended with values that are not finite; a smaller learning rate may help"
            else:
                # Nobody awaits this task, so it must report its own errors.
                log.error("preparation_failed", job=assignment.job, error=str(error), exc_info=error)
                detail = f"preparing failed ({type(error).__name__}); the member's own log says why"
            self._events.put_nowait(m.PreparationFailed(assignment, Reason.REASON_TRAINING_FAILED, detail))
            return
        # Nothing is awaited from here to the event: no update is held that the state machine never hears of.
        older = self._held.pop(assignment.job, None)
        self._held[assignment.job] = _Held(
            assignment,
            preparation.update,
            preparation.protection,
            preparation.reserved,
            preparation.staged,
            preparation.model,
        )
        self._observer.ready(assignment.job, assignment.round, preparation.update)
        approvals = 0 if standing is None else len(standing.approved)
        self._events.put_nowait(
            m.Prepared(assignment, preparation.job, report, self._budget.counter, update, approvals)
        )
        await self._let_go(assignment.job, older)

    async def _show_figures(self) -> None:
        """Shows the member's figures once, so that they are there before its first round."""
        try:
            await self._report("")
        except Exception as error:
            log.error("report_failed", error=str(error), exc_info=error)

    async def _report(self, job: str) -> PrivacyReport | None:
        # One after another, so that no older figures are shown after newer ones.
        async with self._reporting:
            statement = await self._budget.writer.run(self._budget.statement, job)
            return await asyncio.to_thread(self._read, statement)

    def _read(self, statement: Statement) -> PrivacyReport | None:
        """Shows the member's figures, and returns what the coordinator is told of them. Runs in a thread."""
        try:
            self._observer.privacy(statement.figures())
            return statement.report() if self._budget.reports else None
        except Exception as error:
            # The report decides nothing, so the round continues without it.
            log.error("report_failed", error=str(error), exc_info=error)
            return None

    async def _fetch_certificates(self, effect: m.FetchCertificates) -> None:
        found = await self._fetcher.certificates(effect.attempt, effect.digests)
        self._rosters.pop(effect.attempt, None)
        self._events.put_nowait(m.CertificatesFetched(effect.attempt, found))

    # ---- masking and sending --------------------------------------------------------------------------------------

    async def _let_go(self, job: str, held: _Held | None) -> None:
        """Discards an update that is no longer held. What was reserved for it and never charged is released."""
        if held is not None:
            await self._budget.writer.run(self._budget.release, held.reserved, "the update was not sent")
            if held.staged is not None:
                self._keeper.discard(job, held.staged)

    async def _end(self, effect: m.EndedAttempt) -> None:
        self._sent_with.pop(effect.attempt, None)
        await self._budget.writer.run(self._record_end, effect)
        self._observer.attempt_ended(effect.attempt, effect.ended)

    def _record_end(self, effect: m.EndedAttempt) -> None:
        outcome = "published" if effect.ended.published else word(effect.ended.reason)
        self._budget.ended(effect.attempt, outcome, effect.ended.result, effect.survivors)
        self._journal.ended(effect.attempt, outcome, effect.ended.result)

    async def _sign(self, effect: m.Signed) -> None:
        """Records U3 in the journal, and commits what was staged with this member's vector if U3 names the member."""
        staged = self._sent_with.pop(effect.attempt, None)
        await self._budget.writer.run(self._record_signed, effect, staged)

    def _record_signed(self, effect: m.Signed, staged: str | None) -> None:
        self._journal.signed(effect.attempt, effect.survivors, staged)
        if staged is not None:
            self._keeper.confirmed(effect.attempt.job, staged, effect.survivors, self._link.identity.member)

    async def _send(self, effect: m.MaskAndUpload) -> None:
        """Asks the stewards once more, charges the ledger, and only then begins to encode."""
        held = self._held.get(effect.attempt.job)
        trained_for = None if held is None else (held.assignment.round, held.assignment.version)
        try:
            if held is None or trained_for != (effect.attempt.round, effect.version):
                gone = "this member no longer has the update that it trained for this attempt"
                raise PolicyRefusal(Reason.REASON_VECTOR_INVALID, gone)
            # One call: a release of the same update that is begun later comes after the charge.
            await self._budget.writer.run(self._charge, effect, held.reserved)
        except PolicyRefusal as refusal:
            self._events.put_nowait(m.MaskingFailed(effect.attempt, refusal.reason, refusal.detail))
            return
        if held.staged is not None:
            self._sent_with[effect.attempt] = held.staged
        self._uploads[effect.attempt] = asyncio.create_task(self._mask_and_upload(effect, held))

    def _charge(self, effect: m.MaskAndUpload, reserved: BudgetReservation) -> None:
        if self._withdrawals is not None:
            self._withdrawals.check(effect.attempt.job, effect.job)
        if self._desk is not None:
            self._desk.check(effect.job)
        self._budget.charge(effect.attempt, reserved)

    async def _mask_and_upload(self, effect: m.MaskAndUpload, held: _Held) -> None:
        """Masks and uploads the update of an attempt that is charged."""
        if held.model is not None and self._releaser is not None:
            try:
                reservation = await self._budget.writer.run(self._budget.charged_to, effect.attempt)
                await asyncio.to_thread(self._releaser.keep, held.model, reservation)
            except Exception as error:
                # It costs the text. The round is charged, and goes on.
                log.error("model_not_kept", attempt=str(effect.attempt), error=str(error), exc_info=error)
        try:
            packed, stage, message = await asyncio.to_thread(self._mask, effect, held)
        except secure_agg.Refusal as refusal:
            failed = m.MaskingFailed(effect.attempt, of_protocol(refusal.reason), refusal.detail)
            self._events.put_nowait(failed)
            return
        except (secure_agg.EncodingInvalid, RuntimeError) as error:
            self._events.put_nowait(m.MaskingFailed(effect.attempt, Reason.REASON_VECTOR_INVALID, str(error)))
            return
        except Exception as error:
            # Nobody awaits this task, so it must report its own errors.
            log.error("masking_failed", attempt=str(effect.attempt), error=str(error), exc_info=error)
            detail = f"masking failed ({type(error).__name__}); the member's own log says why"
            self._events.put_nowait(m.MaskingFailed(effect.attempt, Reason.REASON_INTERNAL, detail))
            return
        try:
            session = effect.stage.seat.session
            await self._budget.writer.run(self._budget.sending, effect.attempt, held.reserved, session, message)
        except PolicyRefusal as refusal:
            self._events.put_nowait(m.MaskingFailed(effect.attempt, refusal.reason, refusal.detail))
            return
        self._events.put_nowait(m.Masked(effect.attempt, stage))
        await self._upload(effect.attempt, packed, message)

    def _mask(
        self, effect: m.MaskAndUpload, held: _Held
    ) -> tuple[memoryview, secure_agg.AwaitingSurvivors, secure_agg.MaskedInput]:
        if effect.update is not None and update_digest(effect.job, held.update) != effect.update:
            # Another training for the same assignment has ended in the meantime.
            raise RuntimeError("the update that is held is not the one that the journal names for this attempt")
        vector = held.protection.encode(effect.job, held.update, effect.cohort, self._environment.random)
        self._observer.encoded(effect.attempt, vector)
        stage, message = effect.stage.mask(vector)
        # Packs in the vector's own memory. These b bits a value are what is sent, and what the signed digest covers.
        packed = secure_agg.pack_in_place(vector, effect.stage.seat.context.bits)
        return packed, stage, message

    async def _upload(self, attempt: AttemptId, packed: memoryview, message: secure_agg.MaskedInput) -> None:
        """Uploads until the coordinator has the whole vector. A broken upload resumes where it stopped.

        The first call asks nothing, because nothing has been sent. That saves a long line a round trip. On a slow line
        the vector goes in parts (`edge_client.identity.pace`).
        """
        # How much has arrived; None: ask.
        received: int | None = 0
        while True:
            stub, pace = await self._link.stub(), self._link.up
            try:
                if received is None:
                    status = await stub.MaskedUploadStatus(wire.attempt_to_pb(attempt), timeout=STALL_SECONDS)
                else:
                    until = received + pace.of(len(packed) - received)
                    began = pace.clock()
                    async with asyncio.timeout(STALL_SECONDS) as stalls:
                        parts = self._parts(attempt, packed, message, received, until, stalls)
                        status = await stub.UploadMasked(parts)
                    if status.received == until:
                        pace.took(until - received, pace.clock() - began)
            except TimeoutError:
                # Perhaps only the verdict takes long. The coordinator is asked, and must answer.
                log.warning("upload_stalled", attempt=str(attempt), seconds=STALL_SECONDS)
                received = None
                continue
            except CALL_BROKEN as error:
                raise_if_told_to_stop(error)
                if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    # The coordinator answers pings and nothing else. Another one may.
                    self._link.hang_up()
                received = None
                pace.broke()
                await self._link.pause_after_failure(stub)
                continue
            if status.complete:
                log.info("masked_vector_sent", attempt=str(attempt), bytes=status.received)
                return
            if status.reason in (Reason.REASON_ATTEMPT_STALE, Reason.REASON_UPLOAD_CLOSED):
                log.warning("upload_too_late", attempt=str(attempt), received=status.received)
                return
            if status.reason not in (
                Reason.REASON_UNSPECIFIED,
                Reason.REASON_UPLOAD_INCOMPLETE,
                Reason.REASON_SESSION_REPLACED,
            ):
                self._events.put_nowait(m.MaskingFailed(attempt, status.reason, status.detail))
                return
            if status.received > len(packed):
                detail = f"the coordinator says that {status.received} bytes of a vector of {len(packed)} arrived"
                self._events.put_nowait(m.MaskingFailed(attempt, Reason.REASON_MESSAGE_MALFORMED, detail))
                return
            # A call that ended early, or was replaced, says how much arrived, and the next one goes on from there.
            before, received = received, status.received
            if before is not None and received <= before:
                # However quickly a coordinator answers, this one is not asked without end.
                await self._link.pause_after_failure(stub)

    async def _parts(
        self,
        attempt: AttemptId,
        packed: memoryview,
        message: secure_agg.MaskedInput,
        offset: int,
        until: int,
        stalls: asyncio.Timeout,
    ) -> AsyncIterator[pb.MaskedUpload]:
        header = pb.MaskedUploadHeader(
            ref=wire.attempt_to_pb(attempt), offset=offset, input=wire.masked_input_to_pb(message)
        )
        yield pb.MaskedUpload(header=header)
        self._observer.uploading(attempt, offset, len(packed))
        for at in range(offset, until, CHUNK):
            end = min(at + CHUNK, until)
            yield pb.MaskedUpload(data=packed[at:end].tobytes())
            stalls.reschedule(asyncio.get_running_loop().time() + STALL_SECONDS)
            self._observer.uploading(attempt, end, len(packed))
