"""The member's connection to the coordinator: one session at a time, reopened when it breaks, and the calls beside it.

A member always connects outwards; nothing listens on its machine. If the federation has several coordinators, it goes
on to the next address at once (`edge_client.session.addresses`). A broken connection is retried after growing pauses
with jitter, so that members that lost it together do not return together. Messages without a session are dropped, and
so are those that were not sent yet when it broke. Once there is a session again, the coordinator says where each job
is, and the member's state machine answers that.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import cached_property

import grpc.aio
import structlog

from edge_client.identity.connection import explain, open_channel, raise_if_told_to_stop
from edge_client.identity.home import MemberIdentity
from edge_client.identity.pace import MOST_DOWN, MOST_UP, Pace
from edge_client.identity.renewal import RenewalFailed, Renewer, server_unknown
from edge_client.session.addresses import Addresses, Failed
from edge_client.session.idle import Idle
from tacit import wire
from tacit.messages import (
    Assignment,
    AttemptMessage,
    AuthoritiesChanged,
    CoordinatorPayload,
    FromMember,
    Goodbye,
    Hello,
    JobEnded,
    JobsEnded,
    Standby,
    Welcome,
)
from tacit.protocol import PROTOCOL_VERSION, disagreement
from tacit.reason import Reason, sentence
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc

__all__ = ["AgentStopped", "Link"]

log = structlog.get_logger("edge_client")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
# The longest pause in an outage in which a standby has answered: it will be active within seconds.
_LONGEST_STANDBY_PAUSE = 3.0
# A try that fails sooner was refused by a machine that is there.
_AT_ONCE_SECONDS = 1.0
# A standby that takes longer to answer made the member wait until it is known who is active, and the pauses begin anew.
# Long enough that members of a standby that is merely slow dial no more often than between the longest pauses.
_WAITED_SECONDS = 2.0
_CLOCK_SKEW_MS = 5 * 60 * 1000
# Maximum open channels of a session. Calls may still run on its own channel and on those opened after renewals.
_CHANNELS = 3
_MOVE_SECONDS = 20.0

# Refusals of the coordinator that asking again does not change.
_FINAL = frozenset(
    {
        Reason.REASON_CLIENT_CERTIFICATE_MISSING,
        Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN,
        Reason.REASON_CLIENT_CERTIFICATE_REVOKED,
        Reason.REASON_CLIENT_ROLE_WRONG,
        Reason.REASON_PROTOCOL_VERSION_UNSUPPORTED,
        Reason.REASON_SESSION_REPLACED,
    }
)


class AgentStopped(Exception):
    """The agent cannot continue. The sentence says why and what to do."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class Link:
    """The member's end of the connection. Used from one event loop."""

    def __init__(
        self,
        identity: MemberIdentity,
        renewer: Renewer | None,
        *,
        hello: Callable[[], Hello],
        on_welcome: Callable[[Welcome], None],
        on_message: Callable[[Assignment | JobEnded | AttemptMessage[CoordinatorPayload]], Awaitable[None]],
        on_break: Callable[[str, float], None],
        idle: Idle | None = None,
    ) -> None:
        """Prepares the link; `run` opens sessions.

        Args:
            identity: Whose certificate and address to use.
            renewer: Keeps the identity's certificate valid; without one, it is used as long as it is valid.
            hello: Makes the first message of a session.
            on_welcome: Called when the coordinator accepts the session; may raise AgentStopped.
            on_message: Takes a message for the state machine. The next one is not read until it returns.
            on_break: Told why there is no session, and the seconds until the next try.
            idle: Says when to be connected; None: always.
        """
        # The identity to connect with next.
        self.identity = identity
        if renewer is not None:
            renewer.address = lambda: self._addresses.present
        self._renewer = renewer
        self._hello = hello
        self._on_welcome = on_welcome
        self._on_message = on_message
        self._on_break = on_break
        self._idle = idle
        self._call: grpc.aio.StreamStreamCall[pb.MemberMessage, pb.CoordinatorMessage] | None = None
        # The open session's own channel, and those under certificates that were renewed since.
        self._channels: list[grpc.aio.Channel] = []
        self._outgoing: asyncio.Queue[FromMember | None] | None = None
        self._stub: federation_pb2_grpc.FederationServiceStub | None = None
        self._linked = asyncio.Event()
        # Whether the coordinator accepted the last session.
        self._stood = False

    # ---- for senders ------------------------------------------------------------------------------------------------

    def say(self, message: FromMember) -> None:
        """Sends to the coordinator, if there is a session."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def stub(self) -> federation_pb2_grpc.FederationServiceStub:
        """Returns the stub of the present session; waits for one."""
        while self._stub is None:
            await self._linked.wait()
        return self._stub

    async def channel(self) -> grpc.aio.Channel:
        """Returns the newest channel of the present session; waits for one."""
        await self.stub()
        return self._channels[-1]

    async def pause_after_failure(self, stub: object) -> None:
        """Pauses after a call failed on this stub, if its session is open. Otherwise the next call waits anyway."""
        if self._stub is not stub:
            return
        if self._renewer is not None and await self._renewer.reload():
            # Another process of this home has renewed, and the coordinator no longer accepts this stub's certificate.
            await self.move()
        else:
            await asyncio.sleep(random.uniform(0.2, 1.0))

    async def move(self) -> None:
        """Sends calls under the next certificate after a renewal. The session stays as it is."""
        channel = self._open_channel()
        stub = federation_pb2_grpc.FederationServiceStub(channel)
        try:
            # This is the first use. From now on the session may last for the life of the next certificate.
            await stub.Renew(pb.RenewRequest(), timeout=_MOVE_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("certificate_not_used", error=explain(error, self.identity))
            await channel.close(None)
            return
        if self._stub is None:
            # The session broke in the meantime, and the next one uses the new certificate anyway.
            await channel.close(None)
            return
        self._stub = stub
        self._channels.append(channel)
        if len(self._channels) > _CHANNELS:
            # The first channel is the session's own.
            await self._channels.pop(1).close(None)

    def hang_up(self) -> None:
        """Ends the present session, if there is one. `run` opens the next one when it may."""
        if self._call is not None:
            self._call.cancel()

    @cached_property
    def up(self) -> Pace:
        """How much one call may send."""
        return Pace(MOST_UP, divided=len(self._addresses) > 1)

    @cached_property
    def down(self) -> Pace:
        """How much one call may fetch."""
        return Pace(MOST_DOWN, divided=len(self._addresses) > 1)

    @cached_property
    def _addresses(self) -> Addresses:
        # Those of the start: a renewed identity is read from the disk, without the addresses of the command line.
        return Addresses(self.identity.addresses)

    # ---- sessions ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Opens session after session, until cancelled. It goes on with the addresses of the first identity.

        Raises:
            AgentStopped: The coordinator refuses this member for good.
        """
        pause, standby_seen = _FIRST_PAUSE, False
        while True:
            self._stood = stands_by = False
            if self._idle is not None:
                await self._idle.until_it_goes()
            if self._renewer is not None:
                await self._renewer.before_dialling()
            dialled_with, dialled, began = self.identity, self._addresses.present, time.monotonic()
            took = math.inf
            try:
                problem = await self._session()
            except grpc.aio.AioRpcError as error:
                took = time.monotonic() - began
                reason, _ = reason_of(error)
                problem = explain(error, dialled_with, address=dialled)
                stands_by = reason == Reason.REASON_COORDINATOR_STANDS_BY
                if reason is not None and await self._is_final(reason, dialled_with):
                    raise AgentStopped(reason, problem) from error
                if server_unknown(error) and self._renewer is not None and await self._renewer.catch_up():
                    problem = "the federation has a new authority, which this member now trusts"
            if self._stood:
                pause, standby_seen = _FIRST_PAUSE, False
                self._addresses.worked()
            standby_seen = standby_seen or stands_by
            if stands_by and took > _WAITED_SECONDS:
                pause = _FIRST_PAUSE
            quick = took < _AT_ONCE_SECONDS and not self._stood
            if not self._addresses.failed(_how(stands_by=stands_by, quick=quick)):
                self._on_break(problem, 0.0)
                continue
            if standby_seen:
                pause = min(pause, _LONGEST_STANDBY_PAUSE)
            # Jitter: members that lost the coordinator together do not return together.
            seconds = random.uniform(pause / 2, pause)
            self._on_break(problem, seconds)
            await asyncio.sleep(seconds)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _is_final(self, reason: Reason, identity: MemberIdentity) -> bool:
        """Whether asking again is in vain, with this certificate and with any other that the member can get."""
        if reason == Reason.REASON_CLOCK_SKEW:
            # Somebody may set a wrong clock. A certificate that is expired by this clock, too, stays expired.
            return datetime.now(UTC) > identity.expires
        return reason in _FINAL and not await self._replaced(identity, reason)

    async def _replaced(self, identity: MemberIdentity, reason: Reason) -> bool:
        """Whether a newer certificate has replaced this one.

        Another process of this home may have stored one, or the coordinator issues one, as it does to a member that was
        offline while an authority ended.
        """
        if self._renewer is None:
            return False
        await self._renewer.before_dialling()
        unknown = reason == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
        if unknown and self.identity.certificate == identity.certificate:
            try:
                await self._renewer.renew()
            except RenewalFailed as failure:
                log.warning("certificate_not_renewed", error=failure.sentence)
        return self.identity.certificate != identity.certificate

    def _open_channel(self) -> grpc.aio.Channel:
        return open_channel(self.identity, self._addresses.present, several=len(self._addresses) > 1)

    async def _session(self) -> str:
        """Runs one session, from connecting to its end, and returns why it ended."""
        outgoing: asyncio.Queue[FromMember | None] = asyncio.Queue()
        identity = self.identity
        async with self._open_channel() as channel:
            self._channels = [channel]
            stub = federation_pb2_grpc.FederationServiceStub(channel)
            call = self._call = stub.Session(self._messages(outgoing))
            try:
                async for encoded in call:
                    if encoded is None:
                        # gRPC returns None for bytes that do not parse.
                        raise wire.WireInvalid("a message that does not parse")
                    message = wire.from_coordinator(encoded)
                    match message:
                        case Welcome():
                            self._welcome(message, stub, outgoing)
                        case Goodbye():
                            if await self._is_final(message.reason, identity):
                                detail = message.detail or sentence(message.reason)
                                raise AgentStopped(message.reason, detail)
                            return message.detail or sentence(message.reason)
                        case AuthoritiesChanged():
                            # Handled before any later message, which the next authority may have signed.
                            if self._renewer is not None:
                                self._renewer.heard(message.document)
                        case Standby():
                            log.info("standby", detail=message.detail)
                        case Assignment() | JobEnded() | JobsEnded() | AttemptMessage():
                            if self._stub is None:
                                # Its answer needs calls, and so a Welcome, which nobody would read meanwhile.
                                raise wire.WireInvalid("a message about a job before Welcome")
                            for each in message.jobs if isinstance(message, JobsEnded) else (message,):
                                await self._on_message(each)
                return "the coordinator ended the session"
            except wire.WireInvalid as error:
                return f"the coordinator sent something unreadable: {error}"
            except asyncio.CancelledError as error:
                # Nobody cancelled this task: the call itself was cancelled.
                raise_if_told_to_stop(error)
                return "the session broke"
            finally:
                # gRPC's task that reads the queue would wait for ever.
                outgoing.put_nowait(None)
                self._linked.clear()
                self._stub = self._outgoing = self._call = None
                for beside in self._channels[1:]:
                    await beside.close(None)
                self._channels = []

    async def _messages(self, outgoing: "asyncio.Queue[FromMember | None]") -> AsyncIterator[pb.MemberMessage]:
        yield wire.to_coordinator(self._hello())
        while (message := await outgoing.get()) is not None:
            try:
                encoded = wire.to_coordinator(message)
            except (ValueError, TypeError) as error:
                # This is our own bug. gRPC would end the session without logging it.
                log.error("message_failed", kind=type(message).__name__, error=str(error), exc_info=error)
            else:
                yield encoded

    def _welcome(
        self,
        welcome: Welcome,
        stub: federation_pb2_grpc.FederationServiceStub,
        outgoing: "asyncio.Queue[FromMember | None]",
    ) -> None:
        why = disagreement(member=PROTOCOL_VERSION, coordinator=welcome.protocol_version)
        if why is not None:
            raise AgentStopped(Reason.REASON_PROTOCOL_VERSION_UNSUPPORTED, why)
        self._on_welcome(welcome)
        self._stood = True
        self._stub, self._outgoing = stub, outgoing
        self._linked.set()
        skew = abs(welcome.server_time_ms - time.time_ns() // 1_000_000)
        if skew > _CLOCK_SKEW_MS:
            log.warning("clock_differs", seconds=skew // 1000, advice="set this machine's clock")


def _how(*, stands_by: bool, quick: bool) -> Failed:
    if stands_by:
        return Failed.STANDS_BY
    return Failed.AT_ONCE if quick else Failed.SILENT
