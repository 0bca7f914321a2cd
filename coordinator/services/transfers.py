"""Moves what members fetch and send outside their sessions: blobs, certificates, masked vectors and corpora.

On its way through gRPC and TLS, a chunk takes several times its size in memory, and all members fetch and upload at
about the same moment. So chunks take turns. A chunk that does not move in time lets the next one begin, so a slow line
costs the others no more than that time.

A member's own downloads take turns first. So many calls of one member at once get about as many turns as the one call
of another, and chunks and messages to the others do not wait for all of them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import grpc.aio

from coordinator.metrics import Metrics
from coordinator.rounds.uploads import UploadProgress
from coordinator.services.corpora import MAX_CHUNK, CorpusProgress, Offer
from coordinator.services.running import Running
from coordinator.services.streams import EOF, Context, first_message
from coordinator.services.turns import Turns
from coordinator.storage.blobs import Ranges
from coordinator.storage.errors import BlobMissing, StoreUnusable
from tacit import wire
from tacit.identity import Certificate
from tacit.limits import CERTIFICATES_AT_ONCE, CERTIFICATES_IN_A_PART
from tacit.reason import Reason
from tacit.status import abort_with
from tacit.v1 import federation_pb2 as pb

__all__ = ["CHUNK", "Transfers"]

CHUNK = 256 * 1024
# Blobs whose files stay open while they are sent. For any more, each chunk opens the file.
_OPEN_FILES = 16
# Seconds after which a slow chunk lets the same member's next one begin. That is four a second, of the eighty slow ones
# that all members' turns take.
_PATIENCE_OF_A_MEMBER = 0.25


@dataclass(slots=True)
class _Shared:
    """A blob and the number of calls that read it."""

    calls: int = 0
    blob: Ranges | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class Transfers:
    """Moves bytes between members and the coordinator, in turns, for callers that were already checked."""

    def __init__(
        self,
        running: Running,
        metrics: Metrics,
        sending: Turns,
        receiving: Turns,
        *,
        first_seconds: float,
        chunk_seconds: float,
    ) -> None:
        """Creates the service.

        Args:
            running: The running coordinator.
            metrics: Where bytes are counted.
            sending: Turns for outgoing chunks.
            receiving: Turns for incoming chunks.
            first_seconds: Seconds to wait for a stream's first message.
            chunk_seconds: Seconds to wait for each further chunk of a masked vector.
        """
        self._running = running
        self._metrics = metrics
        self._sending = sending
        self._receiving = receiving
        self._first_seconds = first_seconds
        self._chunk_seconds = chunk_seconds
        self._open: dict[bytes, _Shared] = {}
        # By member, while it downloads.
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()

    # ---- out

    async def blob(self, member: str, request: pb.FetchBlobRequest, context: Context) -> None:
        """Sends a member a blob of a job, or the requested part of it."""
        digest, own = request.digest, self._turns.setdefault(member, Turns(1, _PATIENCE_OF_A_MEMBER))
        if digest not in self._running.fetchable:
            await self._running.loaded()
        if digest not in self._running.fetchable:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no job has a blob {digest.hex()[:12]}")
        try:
            async with self._opened(digest) as blob:
                offset = min(request.offset, blob.total)
                end = blob.total if not request.length else min(blob.total, offset + request.length)
                while True:
                    async with own.turn(), self._sending.turn():
                        size = min(CHUNK, end - offset)
                        # A busy blob is in memory, and then a thread would cost more than the read.
                        data = blob.read_cached(offset, size)
                        if data is None:
                            data = await self._running.store.apart.run(blob.read, offset, size)
                        await context.write(pb.BlobChunk(offset=offset, total=blob.total, data=data))
                    self._metrics.carried("out", "blob", len(data))
                    offset += len(data)
                    del data
                    if offset >= end:
                        return
        except BlobMissing as error:
            if self._always_there(digest):
                # A disk may not be mounted. A member that heard that there is no such blob would decline for good.
                raise StoreUnusable.lost(self._running.store.place, f"a blob of a job, {digest.hex()}") from error
            await context.abort(grpc.StatusCode.NOT_FOUND, f"blob {digest.hex()[:12]} is not kept any more")

    def _always_there(self, digest: bytes) -> bool:
        """Whether this is a blob of a job or its newest version, which no pruning removes."""
        for driver in self._running.drivers.values():
            job, version = driver.state.parameters, driver.state.version
            if digest in (job.document, version, *job.job.blobs):
                return True
        return False

    @contextlib.asynccontextmanager
    async def _opened(self, digest: bytes) -> AsyncIterator[Ranges]:
        """Opens a blob once for all calls that read it.

        A call may last as long as its member likes. So calls share a file, and few files are open at once: with a
        descriptor for each call, a few members could take all that the process has.
        """
        held = self._open.get(digest)
        if held is None and len(self._open) >= _OPEN_FILES:
            with await self._running.store.apart.run(self._running.store.ranges, digest, keep_open=False) as blob:
                yield blob
            return
        if held is None:
            held = self._open[digest] = _Shared()
        held.calls += 1
        try:
            async with held.opening:
                if held.blob is None:
                    held.blob = await self._running.store.apart.run(self._running.store.ranges, digest)
            yield held.blob
        finally:
            held.calls -= 1
            if not held.calls:
                del self._open[digest]
                if held.blob is not None:
                    held.blob.close()

    async def certificates(self, request: pb.FetchCertificatesRequest, context: Context) -> None:
        """Sends certificates and keys, by digest, from advertisements that were accepted; every member may see them."""
        if len(request.digests) > CERTIFICATES_AT_ONCE:
            detail = f"the call asks for {len(request.digests)} certificates; ask for {CERTIFICATES_AT_ONCE} at a time"
            await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, detail)
        for at in range(0, len(request.digests), CERTIFICATES_IN_A_PART):
            digests = request.digests[at : at + CERTIFICATES_IN_A_PART]
            found = self._running.certificates_of(digests)
            size = sum(map(len, found))
            async with self._sending.turn():
                await context.write(pb.CertificatesPart(certificates=found))
            self._metrics.carried("out", "blob", size)
            del found

    # ---- masked vectors

    async def vector_status(self, member: str, request: pb.AttemptRef, context: Context) -> pb.MaskedUploadReceipt:
        """Returns how much of this member's masked vector has arrived."""
        try:
            attempt = wire.attempt_from_pb(request)
        except wire.WireInvalid as error:
            await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, str(error))
        return _receipt(self._running.uploads.receipt(attempt, member))

    async def vector(self, member: str, context: Context) -> pb.MaskedUploadReceipt:
        """Receives this member's masked vector, or the rest of it."""
        first = await first_message(context, self._first_seconds)
        try:
            if first is EOF or first.WhichOneof("part") != "header":
                raise wire.WireInvalid(self._no_header)
            attempt = wire.attempt_from_pb(first.header.ref)
            described = wire.masked_input_from_pb(first.header.input)
        except wire.WireInvalid as error:
            await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, str(error))
        driver = self._running.drivers.get(attempt.job)
        if driver is None:
            return _receipt(UploadProgress(0, False, Reason.REASON_ATTEMPT_STALE))
        receipt = await self._running.uploads.take(
            attempt,
            member,
            first.header.offset,
            described,
            self.chunks(context),
            driver,
        )
        return _receipt(receipt)

    async def chunks(self, context: Context) -> AsyncIterator[bytes]:
        """Yields the chunks of a masked vector as they arrive."""
        # An unread stream holds no more than gRPC's small window in memory, and a read opens it for one whole chunk.
        # Hold no chunk while waiting for the next one or for the verdict: if every member uploads at once, one chunk in
        # a variable for each of them is the size of several vectors.
        while True:
            part = EOF
            # A member that stops sending learns how much has arrived, and continues from there.
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

    # ---- corpora

    async def corpus_status(self, member: str, request: pb.CorpusRef) -> pb.CorpusReceipt:
        """Returns whether this member's corpus is wanted and how much has arrived, or records that it declines."""
        corpora = self._running.corpora
        if request.declined:
            return _corpus_receipt(await corpora.decline(request.job, member))
        if not request.digest:
            return _corpus_receipt(await corpora.wanted(request.job, member))
        return _corpus_receipt(await corpora.arrived(request.job, member, request.digest, request.size))

    async def corpus(self, certificate: Certificate, context: Context) -> pb.CorpusReceipt:
        """Receives this member's corpus, or the rest of it."""
        first = await first_message(context, self._first_seconds)
        if first is EOF or first.WhichOneof("part") != "header":
            await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, self._no_header)
        header = first.header
        offer = Offer(header.ref.job, header.ref.digest, header.ref.size, header.statement, header.signature)
        return _corpus_receipt(
            await self._running.corpora.take(offer, certificate, header.offset, self._corpus_chunks(context))
        )

    async def _corpus_chunks(self, context: Context) -> AsyncIterator[bytes]:
        while True:
            async with self._receiving.turn():
                part = await context.read()
            if part is EOF:
                return
            if part.WhichOneof("part") != "data" or len(part.data) > MAX_CHUNK:
                detail = f"after its header, an upload has only chunks of up to {MAX_CHUNK} bytes"
                await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, detail)
            self._metrics.carried("in", "corpus", len(part.data))
            yield part.data

    @property
    def _no_header(self) -> str:
        return f"an upload must begin with its header, within {self._first_seconds:g} s; repeat it"


def _corpus_receipt(receipt: CorpusProgress) -> pb.CorpusReceipt:
    return pb.CorpusReceipt(
        received=receipt.received, complete=receipt.complete, reason=receipt.reason, detail=receipt.detail
    )


def _receipt(receipt: UploadProgress) -> pb.MaskedUploadReceipt:
    return pb.MaskedUploadReceipt(
        received=receipt.received, complete=receipt.complete, reason=receipt.reason, detail=receipt.detail
    )
