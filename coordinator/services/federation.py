"""FederationService: what members speak. Thin: it checks who is calling, parses, hands on, and streams.

Every call is checked anew against the caller's certificate and the list of enrolled members, and ends when that member
is cut off. What arrives malformed ends that member's session with a sentence; it never reaches a job. What is sent to
a whole cohort (a roster, the survivors, their confirmations) is written as protobuf once, and where it is large its
copies take turns on the line.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc.aio
import structlog
from cryptography import x509
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs do not know it

import secure_agg
from coordinator.authority import Anchors
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.rounds.effects import Status
from coordinator.rounds.uploads import Receipt
from coordinator.runtime import Runtime
from coordinator.services import sessions
from coordinator.services.corpora import MOST_CHUNK, CorpusReceipt, Offer
from coordinator.services.credentials import is_trusted, peer
from coordinator.services.member_limit import MemberLimit, too_frequent
from coordinator.services.renewal import RenewalRefused, Renewals
from coordinator.services.turns import Turns
from coordinator.services.unusable import come_again
from coordinator.storage import records
from coordinator.storage.errors import BlobMissing, StorageError
from coordinator.storage.members import MAX_LEDGERS
from tacit import PROTOCOL_VERSIONS, __version__, wire
from tacit.attempt import AttemptId
from tacit.identity import Certificate, Role
from tacit.limits import CERTIFICATES_AT_ONCE, CERTIFICATES_IN_A_PART
from tacit.messages import (
    AttemptMessage,
    AuthoritiesChanged,
    CoordinatorPayload,
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
from tacit.reason import Reason, sentence
from tacit.status import abort_with, stamp
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc

__all__ = ["AUTHORITIES", "CHUNK", "FederationServicer", "SharedEncoder"]

log = structlog.get_logger("coordinator.federation")

CHUNK = 256 * 1024
# A member that opens a stream says at once what it is for.
_FIRST_SECONDS = 30.0
# Between two chunks of a vector: a chunk of 384 KiB over a line of 32 kbit/s takes 100.
_CHUNK_SECONDS = 120.0
# Calls of one member that may be under way: a connection carries 64, and a member has one or two.
_CALLS_AT_ONCE = 128
# A call that comes too often is answered this late, in seconds, so that asking again at once gains nothing.
_REFUSED_AFTER = 1.0
_MESSAGES_AHEAD = 16
# Chunks at once, out (of blobs) and in (of masked vectors). On its way through gRPC and TLS one is several times its
# size in memory, and all members fetch the same blob, and upload, at about the same moment. A line that has not moved
# its chunk after so many seconds lets the next one begin: slow lines cost the others that much and no more.
_CHUNKS_OUT, _PATIENCE_OUT = 4, 0.05
_CHUNKS_IN, _PATIENCE_IN = 8, 0.02
# A message of a session that takes a turn like a chunk does: a roster of a thousand has half a megabyte.
_LARGE = 64 * 1024

# What all of a cohort are sent alike; and how many of these are kept, of all jobs.
_TO_ALL = (
    secure_agg.Roster,
    secure_agg.DigestRoster,
    secure_agg.Survivors,
    secure_agg.Confirmations,
)
_SHARED_AT_ONCE = 8

Context = grpc.aio.ServicerContext[Any, Any]


# What a member's Hello says that reads `AuthoritiesChanged`.
AUTHORITIES = "authorities"


@dataclass
class _Life:
    """How long a session may stand: as the certificate that the member came with, or renewed to with the same key."""

    session: sessions.Session
    certificate: Certificate
    fingerprint: bytes
    public: bytes
    timer: asyncio.TimerHandle


@dataclass
class _Ledger:
    """The ledger that a session's Hello named."""

    id: bytes | None  # 16 bytes; None where it named none.
    before: int  # Highest sequence heard before this session; 0: none.
    heard: int | None  # Highest that is on the disk by now; None where this ledger is not remembered.


class SharedEncoder:
    """Messages as protobuf. One payload that goes to many members is turned into it once: a roster of a thousand costs
    the event loop milliseconds. Used from one event loop.
    """

    def __init__(self) -> None:
        # By the payload itself, not by what it equals: comparing two rosters costs as much as writing one. The payload
        # is kept beside, so that no other object can come to stand at its place.
        self._last: OrderedDict[int, tuple[CoordinatorPayload, AttemptId, pb.CoordinatorMessage]] = OrderedDict()

    def encode(self, message: FromCoordinator) -> pb.CoordinatorMessage:
        """As it travels. The result is shared: nobody changes it."""
        if not isinstance(message, AttemptMessage):
            return wire.to_member(message)
        known = self._last.get(id(message.payload))
        if known is not None and known[1] == message.attempt:
            return known[2]
        encoded = wire.to_member(message)
        if isinstance(message.payload, _TO_ALL):
            self._last[id(message.payload)] = (message.payload, message.attempt, encoded)
            if len(self._last) > _SHARED_AT_ONCE:
                self._last.popitem(last=False)
        return encoded


class FederationServicer(federation_pb2_grpc.FederationServiceServicer):
    """Members' service over a running coordinator."""

    def __init__(
        self,
        runtime: Runtime,
        metrics: Metrics,
        federation: bytes,
        root: x509.Certificate | Anchors,
        renewals: Renewals | None = None,
        *,
        limit: MemberLimit | None = None,
        first_seconds: float = _FIRST_SECONDS,
        chunk_seconds: float = _CHUNK_SECONDS,
    ) -> None:
        """
        Args:
            renewals: None where nobody can certify.
            limit: how much a member may send.
            first_seconds: how long a stream's first message may take.
            chunk_seconds: how long each further chunk of a masked vector may take.
        """
        self._runtime = runtime
        self._metrics = metrics
        self._federation = federation
        self._root = root
        self._renewals = renewals
        self._limit = MemberLimit(time.monotonic) if limit is None else limit
        self._first_seconds = first_seconds
        self._chunk_seconds = chunk_seconds
        self._lives: dict[str, _Life] = {}
        self._sending = Turns(_CHUNKS_OUT, _PATIENCE_OUT)
        self._receiving = Turns(_CHUNKS_IN, _PATIENCE_IN)
        self._encoder = SharedEncoder()

    @contextlib.asynccontextmanager
    async def _caller(self, context: Context) -> AsyncIterator[str]:
        """The enrolled member that is calling; ends the call otherwise, and when the member is cut off."""
        member = (await self._certificate(context)).identity.name
        async with self._under_way(member, context):
            yield member

    @contextlib.asynccontextmanager
    async def _under_way(self, member: str, context: Context) -> AsyncIterator[None]:
        if self._runtime.calls.count(member) >= _CALLS_AT_ONCE:
            await self._refuse_often(context, member, 1.0)
        with self._runtime.calls.of(member) as call:
            try:
                yield
            except asyncio.CancelledError:
                if call.reason is None:
                    raise
                # Ended from here: said in a way that the member understands.
                call.task.uncancel()
                await abort_with(context, call.reason, call.detail)

    async def _certificate(self, context: Context, *, retired: bool = False) -> Certificate:
        now = datetime.now(UTC)
        # Looked at before the certificate is verified, which is most of what a refused call would cost. The handshake
        # has shown that the name is an authority's word; tokens are taken only from who is verified.
        claimed = b"".join(context.auth_context().get("peer_uri") or ()).decode(errors="replace").rpartition("/")[2]
        if seconds := self._limit.call_short(claimed):
            stamp(context, now)
            await self._refuse_often(context, claimed, seconds)
        found = await peer(context, Role.MEMBER, self._federation, self._root, now, retired=retired)
        name, fingerprint = found.identity.name, hashlib.sha256(found.der).digest()
        if seconds := self._limit.call(name):
            await self._refuse_often(context, name, seconds)
        now_ms = int(now.timestamp() * 1000)
        begins_ms, expires_ms = (int(moment.timestamp() * 1000) for moment in (found.begins, found.expires))
        # Whoever has a retired authority's key makes certificates of any date: those are never taken for unknown ones.
        adopting = is_trusted(found, self._root)
        async with come_again(context, member=name):
            served = await self._runtime.database.run(
                lambda session: records.let_in(
                    session,
                    name,
                    found.der,
                    begins_ms=begins_ms,
                    expires_ms=expires_ms,
                    now_ms=now_ms,
                    adopting=adopting,
                )
            )
        if served is None:
            async with come_again(context, member=name):
                known = await self._runtime.database.run(lambda session: records.member(session, name))
            if known is None:
                detail = f"this coordinator knows no member {name}, though its authority certified one: the operator "
                detail += "may have lost or replaced its database, or restored one from before; ask, then enrol again "
                detail += "with a new join token, or start this member again once the database is back"
                await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, detail)
            await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_REVOKED)
        if not served.admits(fingerprint, now_ms):
            detail = f"{name} has a newer certificate than this one: renewed, or enrolled again, since; use that one, "
            detail += "or, if that was not this machine, tell the operator"
            await abort_with(context, Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN, detail)
        if fingerprint == served.current:
            self._used(name, fingerprint, found)
        return found

    async def _refuse_often(self, context: Context, member: str, seconds: float) -> NoReturn:
        """Ends a call of a member that sends too much."""
        self._metrics.member_limited("calls")
        log.warning("member_limited", member=member, what="calls")
        await asyncio.sleep(min(seconds, _REFUSED_AFTER))
        await abort_with(context, Reason.REASON_MEMBER_TOO_FREQUENT, too_frequent("calls", seconds))

    def _used(self, member: str, fingerprint: bytes, certificate: Certificate) -> None:
        """A member's newest certificate is in its hands: what stands under the one before it goes on, or does not."""
        life = self._lives.get(member)
        if life is None or life.fingerprint == fingerprint:
            return
        if life.public == certificate.public:
            self._live(life.session, certificate)
        else:
            detail = "the member has taken another key; it goes on with a session under that one"
            self._runtime.sessions.end(member, Reason.REASON_DISCONNECTED, detail)

    def _live(self, session: sessions.Session, certificate: Certificate) -> None:
        """The session stands as long as this certificate is valid."""
        if (before := self._lives.pop(session.member, None)) is not None:
            before.timer.cancel()
        left = (certificate.expires - datetime.now(UTC)).total_seconds()
        timer = asyncio.get_running_loop().call_later(left, self._expired, session)
        fingerprint = hashlib.sha256(certificate.der).digest()
        self._lives[session.member] = _Life(session, certificate, fingerprint, certificate.public, timer)

    # ---- certificates ---------------------------------------------------------------------------------------------

    async def Renew(  # noqa: N802
        self, request: pb.RenewRequest, context: Context
    ) -> pb.RenewResponse:
        """The caller's next certificate. Also for one whose authority was retired while it was away."""
        if self._renewals is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nobody certifies here")
        caller = await self._certificate(context, retired=True)
        try:
            async with come_again(context, member=caller.identity.name):
                chain = await self._renewals.renew(caller, request.certificate_request, request.software_version[:64])
        except RenewalRefused as refusal:
            await abort_with(context, refusal.reason, str(refusal))
        return pb.RenewResponse(certificate_chain=chain, authorities=self._renewals.document)

    async def FetchAuthorities(  # noqa: N802
        self, request: pb.FetchAuthoritiesRequest, context: Context
    ) -> pb.FetchAuthoritiesResponse:
        """For whoever got past the handshake: it is public, and proves itself."""
        uri = b"".join(context.auth_context().get("peer_uri") or ()).decode(errors="replace")
        # By the whole identity, which is never a member's name: whoever shows a retired authority's certificate takes
        # nothing from the member that it names.
        if seconds := self._limit.call(uri):
            await self._refuse_often(context, uri, seconds)
        return pb.FetchAuthoritiesResponse(authorities=self._renewals.document if self._renewals is not None else b"")

    # ---- the session ----------------------------------------------------------------------------------------------

    async def Session(  # noqa: N802  gRPC's name
        self, _: AsyncIterator[pb.MemberMessage], context: Context
    ) -> None:
        """One member's stream."""
        # Read and written by hand, as all streams here: gRPC's own loops hold the last message of either direction
        # until the next, which with many members is several vectors.
        certificate = await self._certificate(context)
        member = certificate.identity.name
        if seconds := self._limit.session_short(member):
            await self._refuse_often(context, member, seconds)
        # Who is cut off before its session is open has none to be ended.
        async with self._under_way(member, context):
            session, ledger, certificate = await self._opened(member, context)
        if session is None:
            return
        reader = asyncio.create_task(self._read(session, ledger, context))
        try:
            self._runtime.sessions.open(session)
            # A session must not outlive the certificate it was opened with, or renewed to.
            self._live(session, certificate)
            async for message in self._outgoing(session):
                encoded = self._encoder.encode(message)
                size = encoded.ByteSize()
                self._metrics.message("out", encoded.WhichOneof("message"), size)
                if size > _LARGE:
                    async with self._sending.turn():
                        await context.write(encoded)
                else:
                    await context.write(encoded)
                del message, encoded
        finally:
            life = self._lives.get(member)
            if life is not None and life.session is session:
                life.timer.cancel()
                del self._lives[member]
            reader.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await reader
            except StorageError as error:
                log.error("storage_failed", member=member, detail=str(error))
            except Exception as error:
                log.error("message_failed", member=member, error=str(error), exc_info=error)
            finally:
                # Whatever became of the reader: who has no stream is not connected.
                self._runtime.sessions.close(session)

    async def _opened(self, member: str, context: Context) -> tuple[sessions.Session | None, _Ledger, Certificate]:
        """Hello and Welcome; None where the two sides speak no common version, which is told."""
        hello = await self._hello(context)
        # Once more: its Hello may have taken as long as another key needs to take its place.
        certificate = await self._certificate(context)
        version = max(set(hello.protocol_versions) & set(PROTOCOL_VERSIONS), default=None)
        if version is None:
            detail = (
                f"this coordinator ({__version__}) speaks {list(PROTOCOL_VERSIONS)}, "
                f"the member ({hello.software_version}) {list(hello.protocol_versions)}"
            )
            await context.write(wire.to_member(Goodbye(Reason.REASON_PROTOCOL_VERSION_UNSUPPORTED, detail)))
            return None, _Ledger(None, 0, None), certificate
        session = sessions.Session(member, hello.process, hello.software_version, hello.admits, hello.capabilities)
        now_ms = time.time_ns() // 1_000_000
        ledger = await self._named_ledger(member, hello.ledger)
        await context.write(
            wire.to_member(Welcome(version, __version__, self._federation.hex(), now_ms, ledger.before))
        )
        if self._renewals is not None and self._renewals.document and AUTHORITIES in hello.capabilities:
            # Before anything that the next authority may have signed.
            session.outgoing.put_nowait(AuthoritiesChanged(self._renewals.document))
        return session, ledger, certificate

    async def _named_ledger(self, member: str, named: LedgerCounter | None) -> _Ledger:
        """What a Hello says of the member's ledger, on the disk before the member hears of it."""
        if named is None:
            return _Ledger(None, 0, 0)
        before = await self._heard_ledger(member, named)
        if before is None:
            detail = (
                f"{member} has named {MAX_LEDGERS} ledgers before this one: how far this one comes is not "
                "remembered, and an older copy of it will not be noticed here"
            )
            log.warning("message_failed", member=member, detail=detail)
            return _Ledger(named.id, 0, None)
        return _Ledger(named.id, before, max(before, named.sequence))

    async def _heard_ledger(self, member: str, ledger: LedgerCounter) -> int | None:
        """See `records.heard_ledger`."""
        return await self._runtime.database.run(
            lambda session: records.heard_ledger(session, member, ledger.id, ledger.sequence)
        )

    async def _ready_ledger(self, member: str, ready: Ready, ledger: _Ledger) -> None:
        """What a Ready says of the member's ledger. Only a higher number, for a job that is here, reaches the database.

        Raises:
            wire.WireInvalid: it is another ledger than that of the session's Hello.
        """
        if ready.ledger is None:
            return
        if ready.ledger.id != ledger.id:
            raise wire.WireInvalid("Ready names the ledger that the session's Hello named, or none")
        if ledger.heard is None or ready.ledger.sequence <= ledger.heard or ready.job not in self._runtime.drivers:
            return
        await self._heard_ledger(member, ready.ledger)
        ledger.heard = ready.ledger.sequence

    def _expired(self, session: sessions.Session) -> None:
        if self._runtime.sessions.connected.get(session.member) is not session:
            return
        life = self._lives.get(session.member)
        if life is not None and life.certificate.expires > datetime.now(UTC):
            # The clock has been set back since this was reckoned.
            self._live(session, life.certificate)
            return
        detail = (
            "by the coordinator's clock the member's certificate has expired; if that is so, enrol again with a new "
        )
        detail += "join token; if not, one of the two clocks is wrong"
        # Not final: the member looks at its own clock.
        self._runtime.sessions.end(session.member, Reason.REASON_CLOCK_SKEW, detail)

    async def _first(self, context: Context) -> Any:
        """A stream's first message; EOF where it does not come in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_seconds):
                return await context.read()
        return EOF

    @property
    def _no_header(self) -> str:
        return f"an upload begins with its header, within {self._first_seconds:g} s; repeat it"

    async def _hello(self, context: Context) -> Hello:
        first: FromMember | None = None
        # Bytes that are no protobuf raise out of the read itself.
        with contextlib.suppress(wire.WireInvalid, DecodeError):
            message = await self._first(context)
            first = None if message is EOF else wire.from_member(message)
        if not isinstance(first, Hello) or not 8 <= len(first.process) <= 64:
            await abort_with(
                context,
                Reason.REASON_MESSAGE_MALFORMED,
                f"a session opens with Hello, within {self._first_seconds:g} s",
            )
        return first

    @staticmethod
    async def _outgoing(session: sessions.Session) -> AsyncIterator[Any]:
        """Messages as they come, and the Goodbye last."""
        ended = asyncio.create_task(session.ended.wait())
        following: asyncio.Task[Any] | None = None
        try:
            while True:
                following = asyncio.create_task(session.outgoing.get())
                await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    yield following.result()
                    continue
                if session.goodbye is not None:
                    yield session.goodbye
                return
        finally:
            ended.cancel()
            if following is not None:
                following.cancel()

    async def _read(self, session: sessions.Session, ledger: _Ledger, context: Context) -> None:
        # So many messages of one member may wait to be worked out; what comes after waits in its own connection.
        slots = asyncio.Semaphore(_MESSAGES_AHEAD)
        try:
            while (message := await context.read()) is not EOF:
                size = message.ByteSize()
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
                self._dispatch(session, spoken, slots.release)
                del spoken
        except (wire.WireInvalid, DecodeError) as error:
            session.end(Reason.REASON_MESSAGE_MALFORMED, str(error))
        except grpc.aio.UsageError:
            pass  # The stream was closed under the reader.
        finally:
            # The member has closed its half: nothing more can come of this session.
            session.end(Reason.REASON_DISCONNECTED)

    def _dispatch(self, session: sessions.Session, message: FromMember, done: Callable[[], None]) -> None:
        match message:
            case Hello():
                raise wire.WireInvalid("a session says Hello once")
            case Decline():
                detail = message.detail or sentence(message.reason)
                event: ev.Event = ev.Declined(session.member, message.round, message.reason, detail)
                job = message.job
            case Ready():
                event = ev.SaidReady(session.member, message.round, message.version)
                job = message.job
            case AttemptMessage():
                event = ev.Answered(session.member, message)
                job = message.attempt.job
        driver = self._runtime.drivers.get(job)
        if driver is None:
            self._runtime.sessions.send(session.member, Standby(f"there is no job named {job[:63]}"))
            done()
        else:
            # What comes late is not counted: the metrics have forgotten a job that is over.
            if driver.state.status not in (Status.FINISHED, Status.ABORTED):
                self._count_privacy(session.member, message)
            driver.post(event, done)

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

    async def OpenJobs(  # noqa: N802
        self, request: pb.OpenJobsRequest, context: Context
    ) -> pb.OpenJobsResponse:
        """Jobs that are running, or all."""
        async with self._caller(context):
            states = [driver.state for driver in self._runtime.drivers.values()]
            return pb.OpenJobsResponse(
                jobs=[
                    pb.OpenJob(
                        name=state.name,
                        job_document=state.parameters.document,
                        round=state.round,
                        version_number=state.version_number,
                        version=state.version,
                        status=state.status.value,
                        reason=state.reason,
                    )
                    for state in states
                    if request.all or state.status is Status.RUNNING
                ]
            )

    # ---- blobs ----------------------------------------------------------------------------------------------------

    async def FetchBlob(  # noqa: N802
        self, request: pb.FetchBlobRequest, context: Context
    ) -> None:
        """A blob of a job, from an offset on."""
        async with self._caller(context):
            store, digest = self._runtime.store, request.digest
            if digest not in self._runtime.fetchable:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"no job has a blob {digest.hex()[:12]}")
            try:
                total = await asyncio.to_thread(store.size, digest)
                offset = min(request.offset, total)
                while True:
                    async with self._sending.turn():
                        data = await asyncio.to_thread(store.read, digest, offset, CHUNK)
                        await context.write(pb.BlobChunk(offset=offset, total=total, data=data))
                    self._metrics.carried("out", "blob", len(data))
                    offset += len(data)
                    del data
                    if offset >= total:
                        return
            except BlobMissing as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))

    async def FetchCertificates(  # noqa: N802
        self, request: pb.FetchCertificatesRequest, context: Context
    ) -> None:
        """Certificates of members whose advertisement was accepted, by digest: every member may see them."""
        async with self._caller(context):
            if len(request.digests) > CERTIFICATES_AT_ONCE:
                detail = f"{len(request.digests)} certificates were asked for; ask for {CERTIFICATES_AT_ONCE} at once"
                await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, detail)
            for at in range(0, len(request.digests), CERTIFICATES_IN_A_PART):
                digests = request.digests[at : at + CERTIFICATES_IN_A_PART]
                found = [self._runtime.certificate_of(digest) or b"" for digest in digests]
                async with self._sending.turn():
                    part = pb.CertificatesPart(certificates=found)
                    await context.write(part)
                self._metrics.carried("out", "blob", part.ByteSize())
                del found, part

    # ---- masked vectors -------------------------------------------------------------------------------------------

    async def MaskedUploadStatus(  # noqa: N802
        self, request: pb.AttemptRef, context: Context
    ) -> pb.MaskedUploadReceipt:
        """How far this member's vector is."""
        async with self._caller(context) as member:
            try:
                attempt = wire.attempt_from_pb(request)
            except wire.WireInvalid as error:
                await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, str(error))
            return _receipt(self._runtime.uploads.receipt(attempt, member))

    async def UploadMasked(  # noqa: N802
        self, _: AsyncIterator[pb.MaskedUpload], context: Context
    ) -> pb.MaskedUploadReceipt:
        """(The rest of) this member's vector."""
        async with self._caller(context) as member:
            first = await self._first(context)
            try:
                if first is EOF or first.WhichOneof("part") != "header":
                    raise wire.WireInvalid(self._no_header)
                attempt = wire.attempt_from_pb(first.header.ref)
                described = wire.masked_input_from_pb(first.header.input)
            except wire.WireInvalid as error:
                await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, str(error))
            driver = self._runtime.drivers.get(attempt.job)
            if driver is None:
                return _receipt(Receipt(0, False, Reason.REASON_ATTEMPT_STALE))
            receipt = await self._runtime.uploads.take(
                attempt,
                member,
                first.header.offset,
                described,
                self._chunks(context),
                driver,
            )
            return _receipt(receipt)

    async def _chunks(self, context: Context) -> AsyncIterator[bytes]:
        # A stream that is not read has no more than gRPC's small window here; a read opens it for one whole chunk.
        # Whoever waits for a chunk, or for the verdict, holds none: with every member uploading at once, one that each
        # leaves in a variable is several vectors.
        while True:
            part = EOF
            # Who sends nothing more is answered how far it is, and goes on from there.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._chunk_seconds), self._receiving.turn():
                    part = await context.read()
            if part is EOF:
                return
            data = part.data
            del part
            self._metrics.carried("in", "masked", len(data))
            yield data
            del data

    # ---- made-up text ---------------------------------------------------------------------------------------------

    async def CorpusStatus(  # noqa: N802
        self, request: pb.CorpusRef, context: Context
    ) -> pb.CorpusReceipt:
        """Whether this member's file is wanted, how far it is, or that there will be none."""
        async with self._caller(context) as member, come_again(context, member=member):
            corpora = self._runtime.corpora
            if request.declined:
                return _corpus_receipt(await corpora.decline(request.job, member))
            if not request.digest:
                return _corpus_receipt(await corpora.wanted(request.job, member))
            return _corpus_receipt(await corpora.arrived(request.job, member, request.digest, request.size))

    async def UploadCorpus(  # noqa: N802
        self, _: AsyncIterator[pb.CorpusUpload], context: Context
    ) -> pb.CorpusReceipt:
        """(The rest of) this member's file."""
        certificate = await self._certificate(context)
        member = certificate.identity.name
        async with self._under_way(member, context), come_again(context, member=member):
            first = await self._first(context)
            if first is EOF or first.WhichOneof("part") != "header":
                await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, self._no_header)
            header = first.header
            offer = Offer(header.ref.job, header.ref.digest, header.ref.size, header.statement, header.signature)
            return _corpus_receipt(
                await self._runtime.corpora.take(offer, certificate, header.offset, self._corpus_chunks(context))
            )

    async def _corpus_chunks(self, context: Context) -> AsyncIterator[bytes]:
        while True:
            async with self._receiving.turn():
                part = await context.read()
            if part is EOF:
                return
            if part.WhichOneof("part") != "data" or len(part.data) > MOST_CHUNK:
                detail = f"behind the header of an upload come chunks of up to {MOST_CHUNK} bytes"
                await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, detail)
            self._metrics.carried("in", "corpus", len(part.data))
            yield part.data


def _corpus_receipt(receipt: CorpusReceipt) -> pb.CorpusReceipt:
    return pb.CorpusReceipt(
        received=receipt.received, complete=receipt.complete, reason=receipt.reason, detail=receipt.detail
    )


def _receipt(receipt: Receipt) -> pb.MaskedUploadReceipt:
    return pb.MaskedUploadReceipt(
        received=receipt.received, complete=receipt.complete, reason=receipt.reason, detail=receipt.detail
    )
