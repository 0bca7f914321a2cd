"""The upload of a corpus: asked, sent, gone on with where it stopped, over as many connections as it takes.

`Asker` speaks to the coordinator and waits for it as long as it takes; it knows neither disk nor ledger. A coordinator
of before there were corpora answers UNIMPLEMENTED: `NotServed`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from edge_client.connection import CALL_BROKEN, NOT_SERVED, explain, raise_if_told_to_stop
from edge_client.home import MemberIdentity
from tacit.corpus import CorpusStatement, signed_bytes
from tacit.reason import Reason, sentence
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc

__all__ = ["CORPUS_CHUNK", "Answer", "Asker", "NotServed"]

# Of a file, like a masked vector's.
CORPUS_CHUNK = 384 * 1024
_STATUS_SECONDS = 30.0

Stub = federation_pb2_grpc.FederationServiceStub
_Call = Callable[[Stub], Awaitable[pb.CorpusReceipt]]


class NotServed(Exception):
    """The coordinator does not take corpora at all; the text says what it answered."""


@dataclass(frozen=True)
class Answer:
    """What the coordinator said of a corpus. refused: a reason that asking again does not change; None: none."""

    complete: bool
    received: int
    refused: Reason | None
    detail: str

    @classmethod
    def of(cls, receipt: pb.CorpusReceipt) -> "Answer":
        """The receipt, read."""
        reason = receipt.reason
        goes_on = reason in (Reason.REASON_UNSPECIFIED, Reason.REASON_UPLOAD_INCOMPLETE)
        return cls(
            receipt.complete,
            receipt.received,
            None if goes_on else reason,
            receipt.detail or ("" if goes_on else sentence(reason)),
        )


class Asker:
    """link: the stub of the present session, waits for one. broken: told of a stub on which a call failed; returns when
    it may be tried again.
    """

    def __init__(self, link: Callable[[], Awaitable[Stub]], broken: Callable[[object], Awaitable[None]]) -> None:
        self._link = link
        self._broken = broken

    async def status(self, ref: pb.CorpusRef) -> Answer:
        """What the coordinator has. Raises: NotServed."""

        async def ask(stub: Stub) -> pb.CorpusReceipt:
            receipt: pb.CorpusReceipt = await stub.CorpusStatus(ref, timeout=_STATUS_SECONDS)
            return receipt

        return Answer.of(await self._answered(ask))

    async def upload(self, data: bytes, statement: CorpusStatement, identity: MemberIdentity) -> Answer:
        """Until the coordinator has it whole, or does not want it. Raises: NotServed."""
        ref = pb.CorpusRef(job=statement.job, digest=statement.corpus, size=len(data))
        # Signed once: what is gone on with is what was begun.
        signature = await asyncio.to_thread(identity.sign, signed_bytes(statement))
        while True:
            answer = await self.status(ref)
            if answer.complete or answer.refused is not None:
                return answer
            header = pb.CorpusHeader(
                ref=ref, offset=answer.received, statement=statement.canonical(), signature=signature
            )

            async def send(stub: Stub, header: pb.CorpusHeader = header) -> pb.CorpusReceipt:
                receipt: pb.CorpusReceipt = await stub.UploadCorpus(_parts(header, data))
                return receipt

            receipt = await self._tried(send)
            if receipt is None:
                # Where it stopped, the coordinator says next.
                continue
            sent = Answer.of(receipt)
            if sent.complete or sent.refused is not None:
                return sent
            if sent.received <= answer.received:
                # It takes nothing at this moment.
                await self._broken(await self._link())

    async def _answered(self, call: _Call) -> pb.CorpusReceipt:
        """Over as many connections as it takes."""
        while (receipt := await self._tried(call)) is None:
            pass
        return receipt

    async def _tried(self, call: _Call) -> pb.CorpusReceipt | None:
        """None: the connection broke, and there is another one, or soon will be."""
        stub = await self._link()
        try:
            return await call(stub)
        except CALL_BROKEN as error:
            raise_if_told_to_stop(error)
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in NOT_SERVED:
                raise NotServed(explain(error)) from error
            await self._broken(stub)
            return None


async def _parts(header: pb.CorpusHeader, data: bytes) -> AsyncIterator[pb.CorpusUpload]:
    yield pb.CorpusUpload(header=header)
    for at in range(header.offset, len(data), CORPUS_CHUNK):
        yield pb.CorpusUpload(data=data[at : at + CORPUS_CHUNK])
