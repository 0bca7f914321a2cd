"""The upload of a corpus: asked, sent, gone on with where it stopped, over as many connections as it takes.

`Asker` speaks to the coordinator; it knows neither disk nor ledger. It waits for a session as long as it takes, and
tries again what a broken line or a coordinator that restarts explains, with growing pauses; an upload that moves is
tried for ever, one that does not gives up its turn (`NotNow`), so that no job waits for another one's trouble. A
coordinator whose answer will not change raises `NotServed`.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from edge_client.identity.connection import CALL_BROKEN, NOT_SERVED, explain, raise_if_told_to_stop
from edge_client.identity.home import MemberIdentity
from tacit.corpus import CorpusStatement, signed_bytes
from tacit.reason import Reason, sentence
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc

__all__ = ["CORPUS_CHUNK", "Answer", "Asker", "NotNow", "NotServed"]

# Of a file, like a masked vector's.
CORPUS_CHUNK = 384 * 1024
_STATUS_SECONDS = 30.0
# An upload's deadline: for its beginning and the verdict, and for so many bytes a second, of a line that is barely one.
_UPLOAD_SECONDS, _SLOWEST = 120.0, 8 * 1024
# How often in a row without a byte more, and the pause before the second try; it doubles.
_TRIES = 6
_FIRST_PAUSE = 0.5

# What a broken line, a coordinator that restarts and a call that was cut off look like.
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
# What asking again does not change.
_FINAL = (Reason.REASON_CORPUS_NOT_WANTED, Reason.REASON_CORPUS_INVALID)

Stub = federation_pb2_grpc.FederationServiceStub
_Call = Callable[[Stub], Awaitable[pb.CorpusReceipt]]


class NotServed(Exception):
    """The coordinator does not take corpora at all; the text says what it answered."""


class NotNow(Exception):
    """No answer that helps came for now; the text says what did. To be asked again with the next session."""


@dataclass(frozen=True)
class Answer:
    """What the coordinator said of a corpus. refused: a reason that asking again does not change; None: none."""

    complete: bool
    received: int
    refused: Reason | None
    detail: str

    @classmethod
    def of(cls, receipt: pb.CorpusReceipt, *, upload: bool) -> "Answer":
        """The receipt, read. upload: whether it is about a file on its way, which may be incomplete.

        Raises:
            NotNow: it is neither a yes nor final.
        """
        reason = receipt.reason
        if reason in _FINAL:
            return cls(False, receipt.received, reason, receipt.detail or sentence(reason))
        goes_on = reason == Reason.REASON_UNSPECIFIED or (upload and reason == Reason.REASON_UPLOAD_INCOMPLETE)
        if not goes_on:
            raise NotNow(receipt.detail or sentence(reason))
        return cls(receipt.complete, receipt.received, None, receipt.detail)


class _Turn:
    """Tries of one job in a row that brought it no further."""

    def __init__(self) -> None:
        self._failed = 0

    def moved(self) -> None:
        """It came further: what failed before counts no more."""
        self._failed = 0

    async def failed(self, why: str) -> None:
        """Returns when the next try may be. Raises: NotNow: there were enough."""
        self._failed += 1
        if self._failed >= _TRIES:
            raise NotNow(why)
        if self._failed > 1:
            longest = _FIRST_PAUSE * 2 ** (self._failed - 2)
            await asyncio.sleep(random.uniform(longest / 2, longest))


class Asker:
    """link: the stub of the present session, waits for one. broken: told of a stub on which a call failed; returns when
    it may be tried again.
    """

    def __init__(self, link: Callable[[], Awaitable[Stub]], broken: Callable[[object], Awaitable[None]]) -> None:
        self._link = link
        self._broken = broken

    async def status(self, ref: pb.CorpusRef) -> Answer:
        """What the coordinator has. Raises: NotServed, NotNow."""
        return await self._status(ref, _Turn())

    async def upload(
        self,
        data: bytes,
        statement: CorpusStatement,
        identity: Callable[[], MemberIdentity],
        wanted: Callable[[], bool] = lambda: True,
    ) -> Answer | None:
        """Until the coordinator has it whole, or does not want it.

        identity: of the present; the statement is signed anew once it is another one. wanted: whether the file may
        leave still, asked before each call and each chunk; None is returned once it may not.

        Raises: NotServed, NotNow.
        """
        ref = pb.CorpusRef(job=statement.job, digest=statement.corpus, size=len(data))
        turn = _Turn()
        signer = identity()
        # Not before each call: what is gone on with is what was begun.
        signature = await asyncio.to_thread(signer.sign, signed_bytes(statement))
        furthest = -1
        while wanted():
            answer = await self._status(ref, turn)
            if answer.complete or answer.refused is not None:
                return answer
            if answer.received > furthest:
                furthest = answer.received
                turn.moved()
            if (now := identity()).certificate != signer.certificate:
                # It is checked against the certificate of the connection, which may have another key by now.
                signer = now
                signature = await asyncio.to_thread(signer.sign, signed_bytes(statement))
            header = pb.CorpusHeader(
                ref=ref, offset=answer.received, statement=statement.canonical(), signature=signature
            )

            async def send(stub: Stub, header: pb.CorpusHeader = header) -> pb.CorpusReceipt:
                seconds = _UPLOAD_SECONDS + (len(data) - header.offset) / _SLOWEST
                receipt: pb.CorpusReceipt = await stub.UploadCorpus(_parts(header, data, wanted), timeout=seconds)
                return receipt

            if not wanted():
                break
            receipt = await self._tried(send, turn)
            if receipt is None:
                # Where it stopped, the coordinator says next.
                continue
            sent = Answer.of(receipt, upload=True)
            if sent.complete or sent.refused is not None:
                return sent
            if sent.received <= furthest:
                # It takes nothing at this moment.
                await turn.failed(sent.detail or sentence(Reason.REASON_UPLOAD_INCOMPLETE))
        return None

    async def _status(self, ref: pb.CorpusRef, turn: _Turn) -> Answer:
        async def ask(stub: Stub) -> pb.CorpusReceipt:
            receipt: pb.CorpusReceipt = await stub.CorpusStatus(ref, timeout=_STATUS_SECONDS)
            return receipt

        while (receipt := await self._tried(ask, turn)) is None:
            pass
        return Answer.of(receipt, upload=bool(ref.digest))

    async def _tried(self, call: _Call, turn: _Turn) -> pb.CorpusReceipt | None:
        """None: it may be tried again, over this connection or over another one. Raises: NotServed, NotNow."""
        stub = await self._link()
        try:
            return await call(stub)
        except CALL_BROKEN as error:
            raise_if_told_to_stop(error)
            why = explain(error) if isinstance(error, grpc.aio.AioRpcError) else "the connection broke off"
            code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
            if code in NOT_SERVED:
                raise NotServed(why) from error
            await self._broken(stub)
            if code is not None and code not in _AGAIN and await self._link() is stub:
                # The coordinator has said no, and not because of a certificate that has been renewed since.
                raise NotNow(why) from error
            await turn.failed(why)
            return None


async def _parts(header: pb.CorpusHeader, data: bytes, wanted: Callable[[], bool]) -> AsyncIterator[pb.CorpusUpload]:
    yield pb.CorpusUpload(header=header)
    for at in range(header.offset, len(data), CORPUS_CHUNK):
        if not wanted():
            return
        yield pb.CorpusUpload(data=data[at : at + CORPUS_CHUNK])
