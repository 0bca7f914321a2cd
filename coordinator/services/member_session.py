"""Serves members' sessions: Hello and Welcome, then messages both ways until one side ends the session.

A malformed message ends the session with a sentence, and never reaches a job.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import grpc.aio
import structlog
from google.protobuf.message import DecodeError

import secure_agg
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.services.callers import Callers
from coordinator.services.encoder import SharedEncoder
from coordinator.services.lives import Lives
from coordinator.services.member_limit import MemberLimit, jobs_tokens, too_frequent
from coordinator.services.renewal import Renewals
from coordinator.services.running import Running
from coordinator.services.sessions import MemberSession
from coordinator.services.streams import EOF, Context, first_message
from coordinator.services.turns import Turns
from coordinator.services.unusable import come_again
from coordinator.storage import records
from coordinator.storage.errors import StorageError
from coordinator.storage.members import MAX_LEDGERS
from tacit import __version__, wire
from tacit.identity import Certificate
from tacit.messages import (
    AttemptMessage,
    AuthoritiesChanged,
    Decline,
    FromCoordinator,
    FromMember,
    Goodbye,
    Hello,
    LedgerCounter,
    Ready,
    Standby,
    Welcome,
)
from tacit.protocol import PROTOCOL_VERSION, disagreement
from tacit.reason import Reason, sentence
from tacit.status import abort_with
from tacit.v1 import federation_pb2 as pb

__all__ = ["MemberSessions"]

log = structlog.get_logger("coordinator.federation")

_MESSAGES_AHEAD = 16
# Messages above this many bytes take turns like chunks. A roster of a thousand members has half a megabyte.
_LARGE = 64 * 1024
# Kinds of messages that are encoded in their turn.
_MADE_IN_TURN = (secure_agg.ReceivedDealings, secure_agg.GroupRoster)


@dataclass
class _Ledger:
    """The privacy ledger that a session's Hello named."""

    id: bytes | None  # 16 bytes; None if Hello named none.
    before: int  # Highest sequence number reported before this session; 0 if none was.
    heard: int | None  # Highest sequence number on the disk now; None if this ledger is not remembered.


class MemberSessions:
    """Serves each member's session."""

    def __init__(
        self,
        running: Running,
        metrics: Metrics,
        federation: bytes,
        renewals: Renewals | None,
        callers: Callers,
        lives: Lives,
        limit: MemberLimit,
        sending: Turns,
        *,
        first_seconds: float,
    ) -> None:
        """Creates the service.

        Args:
            running: The running coordinator.
            metrics: Where messages are counted.
            federation: The federation's name, 32 bytes.
            renewals: Renews certificates; None if this process has no authority's key.
            callers: Checks who is calling.
            lives: Ends sessions whose certificate expires.
            limit: How much one member may send.
            sending: Turns for large outgoing messages.
            first_seconds: Seconds to wait for Hello.
        """
        self._running = running
        self._metrics = metrics
        self._federation = federation
        self._renewals = renewals
        self._callers = callers
        self._lives = lives
        self._limit = limit
        self._sending = sending
        self._first_seconds = first_seconds
        self._encoder = SharedEncoder()

    async def serve(self, context: Context) -> None:
        """Serves one member's session until it ends."""
        # Like all streams here, this one is read and written explicitly. gRPC's own loops hold the last message of each
        # direction until the next one, which for many members is the size of several vectors. It carries bytes
        # (`add_federation_service`), so a message to a whole cohort is encoded once, and none is encoded for its size.
        certificate = await self._callers.certificate(context, tokens=jobs_tokens(len(self._running.drivers)))
        member = certificate.identity.name
        if seconds := self._limit.session_short(member):
            await self._callers.refuse_often(context, member, seconds)
        # A member that is revoked before its session opens has no session to end, so its call is ended instead.
        async with self._callers.under_way(member, context), come_again(context, member=member):
            session, ledger, certificate = await self._opened(member, context)
        if session is None:
            return
        reader = asyncio.create_task(self._read(session, ledger, context))
        try:
            self._running.sessions.open(session)
            # A session must not outlive its certificate, or the renewal of that certificate.
            self._lives.begin(session, certificate)
            async for message in self._outgoing(session):
                await self._send(context, message)
                del message
        finally:
            self._lives.end(session)
            reader.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await reader
            except StorageError as error:
                log.error("storage_failed", member=member, detail=str(error))
            except Exception as error:
                log.error("message_failed", member=member, error=str(error), exc_info=error)
            finally:
                # However the reader ended, a member without a stream is not connected.
                self._running.sessions.close(session)

    async def _send(self, context: Context, message: FromCoordinator) -> None:
        if isinstance(message, AttemptMessage) and isinstance(message.payload, _MADE_IN_TURN):
            # Every member or group gets another one, of hundreds of kilobytes in a large cohort.
            async with self._sending.turn():
                await self._write(context, self._encoded(message))
            return
        data = self._encoded(message)
        if len(data) > _LARGE:
            async with self._sending.turn():
                await self._write(context, data)
        else:
            await self._write(context, data)

    async def _write(self, context: Context, data: bytes) -> None:
        # Asked last: a turn may come late. If another coordinator may be active, this process is about to end.
        if self._running.sessions.may_speak():
            await context.write(data)

    def _encoded(self, message: FromCoordinator) -> bytes:
        encoded = self._encoder.encode(message)
        self._metrics.message("out", encoded.kind, len(encoded.data))
        return encoded.data

    async def _opened(self, member: str, context: Context) -> tuple[MemberSession | None, _Ledger, Certificate]:
        """Exchanges Hello and Welcome. The session is None if the two sides speak different protocol versions.

        The member is then told which side to upgrade.
        """
        hello = await self._hello(context)
        # Check the certificate again: while Hello was awaited, another key may have replaced this one.
        certificate = await self._callers.certificate(context)
        detail = disagreement(member=hello.protocol_version, coordinator=PROTOCOL_VERSION)
        if detail is not None:
            goodbye = Goodbye(Reason.REASON_PROTOCOL_VERSION_UNSUPPORTED, detail)
            await context.write(wire.to_member(goodbye).SerializeToString())
            return None, _Ledger(None, 0, None), certificate
        if self._running.roster is not None:
            # The head of the next attempt must have this certificate in its log.
            await self._running.roster.refresh()
        session = MemberSession(member, hello.process, hello.software_version, hello.admits)
        now_ms = time.time_ns() // 1_000_000
        ledger = await self._named_ledger(member, hello.ledger)
        welcome = Welcome(PROTOCOL_VERSION, __version__, self._federation.hex(), now_ms, ledger.before)
        await context.write(wire.to_member(welcome).SerializeToString())
        if self._renewals is not None and self._renewals.document:
            # Send this before any message that the next authority may have signed.
            session.outgoing.put_nowait(AuthoritiesChanged(self._renewals.document))
        return session, ledger, certificate

    async def _named_ledger(self, member: str, named: LedgerCounter | None) -> _Ledger:
        """Stores what Hello says about the member's ledger, before the member gets an answer."""
        if named is None:
            return _Ledger(None, 0, 0)
        before = await self._heard_ledger(member, named)
        if before is None:
            detail = (
                f"{member} has named {MAX_LEDGERS} other ledgers before this one; the coordinator does not remember "
                "this one's sequence, so it will not notice an older copy of it"
            )
            log.warning("message_failed", member=member, detail=detail)
            return _Ledger(named.id, 0, None)
        return _Ledger(named.id, before, max(before, named.sequence))

    async def _heard_ledger(self, member: str, ledger: LedgerCounter) -> int | None:
        """See `records.heard_ledger`."""
        return await self._running.database.run(
            lambda session: records.heard_ledger(session, member, ledger.id, ledger.sequence)
        )

    async def _ready_ledger(self, member: str, ready: Ready, ledger: _Ledger) -> None:
        """Stores what Ready says about the member's ledger.

        Only a higher number, for a job that this process runs, reaches the database.

        Raises:
            wire.WireInvalid: the ledger is not the one that the session's Hello named.
        """
        if ready.ledger is None:
            return
        if ready.ledger.id != ledger.id:
            raise wire.WireInvalid("Ready must name the ledger that the session's Hello named, or none")
        if ledger.heard is None or ready.ledger.sequence <= ledger.heard or ready.job not in self._running.drivers:
            return
        await self._heard_ledger(member, ready.ledger)
        ledger.heard = ready.ledger.sequence

    async def _hello(self, context: Context) -> Hello:
        first: FromMember | None = None
        # Reading bytes that are not protobuf raises.
        with contextlib.suppress(wire.WireInvalid, DecodeError):
            data = await first_message(context, self._first_seconds)
            first = None if data is EOF else wire.from_member(pb.MemberMessage.FromString(data))
        if not isinstance(first, Hello) or not 8 <= len(first.process) <= 64:
            await abort_with(
                context,
                Reason.REASON_MESSAGE_MALFORMED,
                f"a session must open with Hello, within {self._first_seconds:g} s",
            )
        return first

    @staticmethod
    async def _outgoing(session: MemberSession) -> AsyncGenerator[FromCoordinator, None]:
        """Yields the queued messages, up to the Goodbye. While it waits, it holds none."""
        over = False
        while not over:
            message = await session.outgoing.get()
            over = isinstance(message, Goodbye)
            yield message
            del message

    async def _read(self, session: MemberSession, ledger: _Ledger, context: Context) -> None:
        # At most this many messages of one member wait to be processed; further ones wait in the member's connection.
        slots = asyncio.Semaphore(_MESSAGES_AHEAD)
        try:
            while (data := await context.read()) is not EOF:
                size, message = len(data), pb.MemberMessage.FromString(data)
                del data
                self._metrics.message("in", message.WhichOneof("message"), size)
                if seconds := self._limit.message(session.member, size):
                    self._metrics.member_limited("messages")
                    log.warning("member_limited", member=session.member, what="messages")
                    session.end(Reason.REASON_MEMBER_TOO_FREQUENT, too_frequent("messages", seconds))
                    return
                await slots.acquire()
                if session.goodbye is not None:
                    return
                spoken = wire.from_member(message)
                del message
                if isinstance(spoken, Ready):
                    await self._ready_ledger(session.member, spoken, ledger)
                self._dispatch(session, spoken, await self._entry_of(session, spoken), slots.release)
                del spoken
        except (wire.WireInvalid, DecodeError) as error:
            session.end(Reason.REASON_MESSAGE_MALFORMED, str(error))
        except grpc.aio.UsageError:
            pass  # The stream was closed under the reader.
        finally:
            # The member has closed its half, so this session is over.
            session.end(Reason.REASON_DISCONNECTED)

    async def _entry_of(self, session: MemberSession, message: FromMember) -> int | None:
        """See `ev.Answered.entry`. The database is asked once for each certificate in a session."""
        roster = self._running.roster
        if roster is None or not isinstance(message, AttemptMessage):
            return 0
        if not isinstance(message.payload, secure_agg.Advertisement):
            return 0
        certificate = secure_agg.certificate_digest(message.payload.certificate)
        if session.entry is not None and session.entry[0] == certificate:
            return session.entry[1]
        number = await roster.entry_of(certificate, session.member)
        if number is not None:
            session.entry = (certificate, number)
        return number

    def _dispatch(
        self, session: MemberSession, message: FromMember, entry: int | None, done: Callable[[], None]
    ) -> None:
        match message:
            case Hello():
                raise wire.WireInvalid("a session sends Hello only once")
            case Decline():
                detail = message.detail or sentence(message.reason)
                event: ev.Event = ev.Declined(session.member, message.round, message.reason, detail)
                job = message.job
            case Ready():
                event = ev.SaidReady(session.member, message.round, message.version, message.approvals)
                job = message.job
            case AttemptMessage():
                event = ev.Answered(session.member, message, entry)
                job = message.attempt.job
        driver = self._running.drivers.get(job)
        if driver is None:
            self._running.sessions.send(session.member, Standby(f"there is no job named {job[:63]}"))
            done()
        else:
            # Do not count late messages, as the metrics have forgotten a job that is over.
            if not driver.state.status.is_final:
                self._count_privacy(session.member, message)
            if isinstance(message, Ready):
                driver.reported(session.member, message.privacy)
            driver.post(event, lambda _: done())

    def _count_privacy(self, member: str, message: FromMember) -> None:
        match message:
            case Ready(job=job, privacy=report):
                self._metrics.budget_left(job, member)
                if report is not None:
                    self._metrics.privacy_reported(job, member, report.epsilon)
            case Decline(job=job, reason=Reason.REASON_BUDGET_SPENT):
                self._metrics.budget_exhausted(job, member)
            case _:
                pass
