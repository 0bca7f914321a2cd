"""FederationService, which members call: it checks the caller and passes the call on.

`callers` checks every call anew, `member_session` serves sessions, and `transfers` moves blobs, vectors and corpora.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
from cryptography import x509

from coordinator.authority import Anchors
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.services.callers import Callers
from coordinator.services.lives import Lives
from coordinator.services.member_limit import WITHDRAWAL_TOKENS, MemberLimit, jobs_tokens, log_page_tokens
from coordinator.services.member_session import MemberSessions
from coordinator.services.renewal import RenewalRefused, Renewals
from coordinator.services.roster import cosigned_or_abort
from coordinator.services.running import Running
from coordinator.services.streams import Context
from coordinator.services.transfers import Transfers
from coordinator.services.turns import Turns
from coordinator.services.unusable import come_again
from coordinator.services.withdrawals import WithdrawalRefused, take_own
from tacit.status import abort_with
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc

__all__ = ["FederationServicer", "add_federation_service"]

# Seconds to wait for a stream's first message, which says what the stream is for.
_FIRST_SECONDS = 30.0
# Seconds to wait for the next chunk of a vector. A chunk of 384 KiB takes 100 s over a 32 kbit/s link.
_CHUNK_SECONDS = 120.0
# Concurrent chunks out (of blobs) and in (of masked vectors), and the seconds after which a slow one yields its turn.
_CHUNKS_OUT, _PATIENCE_OUT = 4, 0.05
_CHUNKS_IN, _PATIENCE_IN = 8, 0.02


class FederationServicer(federation_pb2_grpc.FederationServiceServicer):
    """Serves members from a running coordinator."""

    def __init__(
        self,
        running: Running,
        metrics: Metrics,
        federation: bytes,
        root: x509.Certificate | Anchors,
        renewals: Renewals | None = None,
        *,
        limit: MemberLimit | None = None,
        first_seconds: float = _FIRST_SECONDS,
        chunk_seconds: float = _CHUNK_SECONDS,
    ) -> None:
        """Creates the service.

        Args:
            running: The running coordinator.
            metrics: Where calls and bytes are counted.
            federation: The federation's name, 32 bytes.
            root: The authority or authorities whose certificates are accepted.
            renewals: Renews certificates; None if this process has no authority's key.
            limit: How much one member may send.
            first_seconds: Seconds to wait for a stream's first message.
            chunk_seconds: Seconds to wait for each further chunk of a masked vector.
        """
        self._running = running
        self._federation = federation
        self._renewals = renewals
        self._limit = limit = MemberLimit(time.monotonic) if limit is None else limit
        self._withdrawing = asyncio.Lock()
        lives = Lives(running)
        sending = Turns(_CHUNKS_OUT, _PATIENCE_OUT)
        self._callers = callers = Callers(running, metrics, federation, root, limit, lives)
        self._sessions = MemberSessions(
            running, metrics, federation, renewals, callers, lives, limit, sending, first_seconds=first_seconds
        )
        self._transfers = Transfers(
            running,
            metrics,
            sending,
            Turns(_CHUNKS_IN, _PATIENCE_IN),
            first_seconds=first_seconds,
            chunk_seconds=chunk_seconds,
        )

    async def Renew(  # noqa: N802
        self, request: pb.RenewRequest, context: Context
    ) -> pb.RenewResponse:
        """Returns the caller's next certificate, even if its authority was retired while the member was away."""
        if self._renewals is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this coordinator issues no certificates")
        caller = await self._callers.certificate(context, retired=True)
        try:
            async with come_again(context, member=caller.identity.name):
                chain = await self._renewals.renew(caller, request.certificate_request, request.software_version[:64])
        except RenewalRefused as refusal:
            await abort_with(context, refusal.reason, str(refusal))
        if self._running.roster is not None:
            # The member may advertise with its next certificate at once.
            async with come_again(context, member=caller.identity.name):
                await self._running.roster.refresh()
        return pb.RenewResponse(certificate_chain=chain, authorities=self._renewals.document)

    async def FetchAuthorities(  # noqa: N802
        self, request: pb.FetchAuthoritiesRequest, context: Context
    ) -> pb.FetchAuthoritiesResponse:
        """Returns the federation's authorities to anyone past the handshake: the list is public and proves itself."""
        uri = b"".join(context.auth_context().get("peer_uri") or ()).decode(errors="replace")
        # Count by the whole identity URI, which is never a member's name. So a caller with a certificate from a retired
        # authority uses up nothing of the member that the certificate names.
        if seconds := self._limit.call(uri):
            await self._callers.refuse_often(context, uri, seconds)
        return pb.FetchAuthoritiesResponse(authorities=self._renewals.document if self._renewals is not None else b"")

    async def Session(  # noqa: N802  gRPC's name
        self, _: AsyncIterator[bytes], context: Context
    ) -> None:
        """Serves one member's session. It carries bytes; see `add_federation_service`."""
        await self._sessions.serve(context)

    async def OpenJobs(  # noqa: N802
        self, request: pb.OpenJobsRequest, context: Context
    ) -> pb.OpenJobsResponse:
        """Returns the running jobs, or all."""
        async with self._callers.member(context, jobs_tokens(len(self._running.drivers))):
            if request.all:
                await self._running.loaded()
            states = [driver.state for driver in self._running.drivers.values()]
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
                    if request.all or state.status is JobStatus.RUNNING
                ]
            )

    async def FetchBlob(  # noqa: N802
        self, request: pb.FetchBlobRequest, context: Context
    ) -> None:
        """Sends a blob of a job, starting at an offset."""
        async with self._callers.member(context) as member, come_again(context, member=member):
            await self._transfers.blob(member, request, context)

    async def FetchCertificates(  # noqa: N802
        self, request: pb.FetchCertificatesRequest, context: Context
    ) -> None:
        """Sends certificates, by digest, of members whose advertisement was accepted."""
        async with self._callers.member(context):
            await self._transfers.certificates(request, context)

    async def FetchLog(  # noqa: N802
        self, request: pb.FetchLogRequest, context: Context
    ) -> pb.FetchLogResponse:
        """Returns entries of the roster log and its newest head."""
        log = self._running.roster
        if log is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this coordinator keeps no roster log")
        tokens = log_page_tokens(log.entries_of(request))
        async with self._callers.member(context, tokens) as member, come_again(context, member=member):
            return await log.page(request)

    async def Cosign(  # noqa: N802
        self, request: pb.CosignRequest, context: Context
    ) -> pb.CosignResponse:
        """Takes this member's signature over a head."""
        async with self._callers.member(context) as member, come_again(context, member=member):
            return await cosigned_or_abort(self._running.roster, request, context, member)

    async def Withdraw(  # noqa: N802
        self, request: pb.WithdrawRequest, context: Context
    ) -> pb.WithdrawResponse:
        """Takes this member's own withdrawal."""
        log = self._running.roster
        if log is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this coordinator takes no withdrawals")
        caller = await self._callers.certificate(context, tokens=WITHDRAWAL_TOKENS)
        member = caller.identity.name
        async with self._callers.under_way(member, context), come_again(context, member=member):
            try:
                now_ms = time.time_ns() // 1_000_000
                # One at a time: a member that repeats its own must not fill the queue of the database.
                turn = self._withdrawing
                return await take_own(self._running, log, self._federation, caller, request, now_ms, turn)
            except WithdrawalRefused as refused:
                await abort_with(context, refused.reason, str(refused))

    async def MaskedUploadStatus(  # noqa: N802
        self, request: pb.AttemptRef, context: Context
    ) -> pb.MaskedUploadReceipt:
        """Returns how much of this member's masked vector has arrived."""
        async with self._callers.member(context) as member:
            return await self._transfers.vector_status(member, request, context)

    async def UploadMasked(  # noqa: N802
        self, _: AsyncIterator[pb.MaskedUpload], context: Context
    ) -> pb.MaskedUploadReceipt:
        """Receives this member's masked vector, or the rest of it."""
        async with self._callers.member(context) as member:
            return await self._transfers.vector(member, context)

    async def CorpusStatus(  # noqa: N802
        self, request: pb.CorpusRef, context: Context
    ) -> pb.CorpusReceipt:
        """Returns whether this member's corpus is wanted and how much has arrived, or records that it declines."""
        async with self._callers.member(context) as member, come_again(context, member=member):
            return await self._transfers.corpus_status(member, request)

    async def UploadCorpus(  # noqa: N802
        self, _: AsyncIterator[pb.CorpusUpload], context: Context
    ) -> pb.CorpusReceipt:
        """Receives this member's corpus, or the rest of it."""
        certificate = await self._callers.certificate(context)
        member = certificate.identity.name
        async with self._callers.under_way(member, context), come_again(context, member=member):
            return await self._transfers.corpus(certificate, context)


def add_federation_service(servicer: FederationServicer, server: grpc.aio.Server) -> None:
    """Registers the service. `Session` reads and writes bytes, and `MemberSessions` decodes and encodes them."""
    federation_pb2_grpc.add_FederationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    # The handler that was registered last counts.
    server.add_registered_method_handlers(  # type: ignore[attr-defined]  # its stubs do not know it
        pb.DESCRIPTOR.services_by_name["FederationService"].full_name,
        {"Session": grpc.stream_stream_rpc_method_handler(servicer.Session)},
    )
