"""Uploads a corpus: asks, sends, and resumes where it stopped, over as many connections as it takes.

`Asker` talks to the coordinator and knows neither disk nor ledger. It waits for a session as long as it takes. It
retries, with growing pauses, what a broken connection or a restarting coordinator can explain. An upload that makes
progress is retried for ever. One that does not gives up its turn (`NotNow`), so that no job waits for another one's
trouble. `NotServed` is raised if the coordinator's answer will not change.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from edge_client.identity.connection import CALL_BROKEN, NOT_SERVED, explain, raise_if_told_to_stop
from edge_client.identity.home import MemberIdentity
from edge_client.identity.pace import MOST_UP, Pace
from tacit.corpus import CorpusStatement, signed_bytes
from tacit.reason import Reason, sentence
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc

__all__ = ["CORPUS_CHUNK", "Answer", "Asker", "NotNow", "NotServed"]

# Bytes of a file in one message, as for a masked vector.
CORPUS_CHUNK = 384 * 1024
_STATUS_SECONDS = 30.0
# An upload's deadline: seconds for its start and the verdict, plus its bytes at the slowest speed (bytes per second).
_UPLOAD_SECONDS, _SLOWEST = 120.0, 8 * 1024
# Tries in a row without progress, and the first pause between two of them; it doubles.
_TRIES = 6
_FIRST_PAUSE = 0.5

# Status codes of a broken connection, a restarting coordinator and a call that was cut off.
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
# Reasons that asking again does not change.
_FINAL = (Reason.REASON_CORPUS_NOT_WANTED, Reason.REASON_CORPUS_INVALID)

Stub = federation_pb2_grpc.FederationServiceStub
_Call = Callable[[Stub], Awaitable[pb.CorpusReceipt]]


class NotServed(Exception):
    """The coordinator does not take corpora at all. The text is its answer."""


class NotNow(Exception):
    """The coordinator gave no useful answer for now. The text says what it gave. Ask again in the next session."""


@dataclass(frozen=True)
class Answer:
    """The coordinator's answer about a corpus. refused: a reason that asking again does not change. None: none."""

    complete: bool
    received: int
    refused: Reason | None
    detail: str

    @classmethod
    def of(cls, receipt: pb.CorpusReceipt, *, upload: bool) -> "Answer":
        """Reads a receipt. upload: whether it is about a file on its way, which may be incomplete.

        Raises:
            NotNow: the answer is neither a yes nor final.
        """
        reason = receipt.reason
        if reason in _FINAL:
            return cls(False, receipt.received, reason, receipt.detail or sentence(reason))
        goes_on = reason == Reason.REASON_UNSPECIFIED or (upload and reason == Reason.REASON_UPLOAD_INCOMPLETE)
        if not goes_on:
            raise NotNow(receipt.detail or sentence(reason))
        return cls(receipt.complete, receipt.received, None, receipt.detail)


async def _always() -> bool:
    return True


class _Turn:
    """Counts one job's tries in a row without progress."""

    def __init__(self) -> None:
        self._failed = 0

    def moved(self) -> None:
        """Records progress: earlier failures no longer count."""
        self._failed = 0

    async def failed(self, why: str) -> None:
        """Records a failure and waits until the next try is due.

        Raises:
            NotNow: there were enough tries.
        """
        self._failed += 1
        if self._failed >= _TRIES:
            raise NotNow(why)
        if self._failed > 1:
            longest = _FIRST_PAUSE * 2 ** (self._failed - 2)
            await asyncio.sleep(random.uniform(longest / 2, longest))


class Asker:
    """Asks the coordinator about corpora, and uploads them."""

    def __init__(
        self,
        link: Callable[[], Awaitable[Stub]],
        broken: Callable[[object], Awaitable[None]],
        pace: Pace | None = None,
    ) -> None:
        """Takes the two ways to a session.

        Args:
            link: waits for a session and returns its stub.
            broken: called with a stub on which a call failed; returns when a call may be tried again.
            pace: how much one call may send; None: all.
        """
        self._link = link
        self._broken = broken
        self._pace = pace or Pace(MOST_UP, divided=False)

    async def status(self, ref: pb.CorpusRef) -> Answer:
        """Asks what the coordinator has of a corpus.

        Raises:
            NotServed: the coordinator does not take corpora.
            NotNow: there is no useful answer for now.
        """
        return await self._status(ref, _Turn())

    async def upload(
        self,
        data: bytes,
        statement: CorpusStatement,
        identity: Callable[[], MemberIdentity],
        wanted: Callable[[], Awaitable[bool]] = _always,
    ) -> Answer | None:
        """Sends a file until the coordinator has all of it, or does not want it.

        Args:
            data: the file.
            statement: the statement about it.
            identity: returns the present identity. If it has changed, the statement is signed again.
            wanted: whether the file may still leave; called before each call and each chunk.

        Returns:
            The coordinator's answer. None: `wanted` said no.

        Raises:
            NotServed: the coordinator does not take corpora.
            NotNow: the upload makes no progress for now.
        """
        ref = pb.CorpusRef(job=statement.job, digest=statement.corpus, size=len(data))
        turn = _Turn()
        signer = identity()
        # Signed once, not for each call: a resumed upload must be the one that was started.
        signature = await asyncio.to_thread(signer.sign, signed_bytes(statement))
        furthest = -1
        while await wanted():
            answer = await self._status(ref, turn)
            if answer.complete or answer.refused is not None:
                return answer
            if answer.received > furthest:
                furthest = answer.received
                turn.moved()
            if (now := identity()).certificate != signer.certificate:
                # The coordinator checks it against the connection's certificate, which may have another key by now.
                signer = now
                signature = await asyncio.to_thread(signer.sign, signed_bytes(statement))
            header = pb.CorpusHeader(
                ref=ref, offset=answer.received, statement=statement.canonical(), signature=signature
            )

            until = header.offset + self._pace.of(len(data) - header.offset)

            async def send(stub: Stub, header: pb.CorpusHeader = header, until: int = until) -> pb.CorpusReceipt:
                seconds = _UPLOAD_SECONDS + (until - header.offset) / _SLOWEST
                parts = _parts(header, data, until, wanted)
                receipt: pb.CorpusReceipt = await stub.UploadCorpus(parts, timeout=seconds)
                return receipt

            if not await wanted():
                break
            began = self._pace.clock()
            receipt = await self._tried(send, turn)
            if receipt is None:
                # The next status says where it stopped.
                self._pace.broke()
                continue
            if receipt.received == until:
                self._pace.took(until - header.offset, self._pace.clock() - began)
            sent = Answer.of(receipt, upload=True)
            if sent.complete or sent.refused is not None:
                return sent
            if sent.received <= furthest:
                # The coordinator takes nothing at the moment.
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
        """Makes one call.

        Returns:
            None if the call may be tried again, over this connection or another one.

        Raises:
            NotServed: the coordinator does not take corpora.
            NotNow: the coordinator said no, or there were enough tries.
        """
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
                # The coordinator said no, and not because of a certificate that was renewed meanwhile.
                raise NotNow(why) from error
            await turn.failed(why)
            return None


async def _parts(
    header: pb.CorpusHeader, data: bytes, until: int, wanted: Callable[[], Awaitable[bool]]
) -> AsyncIterator[pb.CorpusUpload]:
    yield pb.CorpusUpload(header=header)
    for at in range(header.offset, until, CORPUS_CHUNK):
        if not await wanted():
            return
        yield pb.CorpusUpload(data=data[at : min(at + CORPUS_CHUNK, until)])
