"""Transfers of blobs, at the client: resumable, verified, in chunks of 256 KiB.

`fetch_blob` and `put_blob` resume where a broken connection left off, wait a little longer after each failure, and give
up when nothing has moved for `patience` seconds. What `fetch_blob` returns has the requested digest; other bytes are
discarded, so a coordinator can at worst waste a member's time, within `limit` bytes. A call that brings nothing for
`STALL_SECONDS` is broken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from tacit.status import details_of, reason_of
from tacit.v1 import federation_pb2, operator_pb2

__all__ = [
    "CHUNK",
    "MAX_BLOB",
    "STALL_SECONDS",
    "BlobDamaged",
    "BlobNotThere",
    "BlobStub",
    "FetchMethod",
    "Progress",
    "Retry",
    "chunks_of",
    "fetch_blob",
    "has_stalled",
    "is_transient",
    "moving",
    "put_blob",
]

CHUNK = 256 * 1024
# Default maximum size of a blob in bytes: 2^31 values of four bytes each, and a little more.
MAX_BLOB = 2**33 + 2**20
# Seconds without a chunk after which a call counts as broken, though its connection is open. A chunk of 256 KiB takes
# 65 s over a 32 kbit/s link.
STALL_SECONDS = 120.0
_SILENT = "the other side kept the connection open and sent nothing for"

_Message = TypeVar("_Message")
Progress = Callable[[int, int], None]
FetchMethod = Callable[[federation_pb2.FetchBlobRequest], AsyncIterable[federation_pb2.BlobChunk]]


class BlobNotThere(LookupError):
    """The other side has no blob with that digest."""


class BlobDamaged(ValueError):
    """The bytes that arrived do not match the digest, or the other side broke the rules of the transfer."""


class BlobStub(Protocol):
    """The part of `OperatorServiceStub` that uploads need."""

    @property
    def StatBlob(  # noqa: N802
        self,
    ) -> Callable[[operator_pb2.StatBlobRequest], Awaitable[operator_pb2.StatBlobResponse]]: ...

    @property
    def PutBlob(  # noqa: N802
        self,
    ) -> Callable[[AsyncIterator[operator_pb2.PutBlobRequest]], Awaitable[operator_pb2.StatBlobResponse]]: ...


async def fetch_blob(
    method: FetchMethod,
    digest: bytes,
    into: Path | bytearray,
    *,
    limit: int = MAX_BLOB,
    patience: float = 60.0,
    progress: Progress | None = None,
    exported: bool = False,
) -> int:
    """Fetches a blob into a file or a bytearray and returns its size in bytes.

    A file gets its name only when it is complete and verified. Until then `NAME.partial` holds what has arrived, and a
    later call resumes it. A file that is already there and correct is not fetched again.

    Args:
        method: a stub's `FetchBlob`.
        digest: SHA-256 of the blob.
        into: the file, or a bytearray, which is resumed from what it holds.
        limit: maximum size in bytes.
        patience: seconds without progress before it gives up.
        progress: called with (arrived, total) in bytes.
        exported: whether an operator exports it, so that the coordinator keeps it.

    Raises:
        BlobNotThere: the other side does not have it.
        BlobDamaged: what arrived was wrong; it has been discarded.
        grpc.aio.AioRpcError: the other side refused, or was unreachable for `patience` seconds.
    """
    sink = _Memory(into) if isinstance(into, bytearray) else _File(into, digest)
    if await asyncio.to_thread(sink.is_complete):
        return sink.size
    resumed = sink.size > 0
    while True:
        try:
            await _fetch(method, digest, sink, limit, patience, progress, exported)
            if await asyncio.to_thread(sink.digest) == digest:
                await asyncio.to_thread(sink.complete)
                return sink.size
            raise BlobDamaged(f"what arrived for {digest.hex()} has another digest; it was discarded")
        except BlobDamaged:
            sink.clear()
            # The partial file of an earlier call may have been damaged since, so try once more from the start. What
            # this call fetched itself has no such excuse.
            if not resumed:
                raise
            resumed = False


async def chunks_of(
    method: FetchMethod, request: federation_pb2.FetchBlobRequest, stall: float | None = None
) -> AsyncGenerator[federation_pb2.BlobChunk, None]:
    """Yields the chunks of a call. Close it (`contextlib.aclosing`), so that the call ends with it.

    Args:
        method: a stub's `FetchBlob`.
        request: what to ask for.
        stall: seconds without a chunk; None: `STALL_SECONDS`.

    Raises:
        grpc.aio.AioRpcError: the call ended, or brought nothing for `stall` seconds (`has_stalled`).
    """
    async with contextlib.aclosing(moving(method(request), stall)) as chunks:
        async for chunk in chunks:
            yield chunk
            # Not held while the next one is awaited.
            del chunk


async def moving(call: AsyncIterable[_Message], stall: float | None = None) -> AsyncGenerator[_Message, None]:
    """Yields the messages of a call that may last as long as they come.

    Args:
        call: the call, which ends with this generator. Close it (`contextlib.aclosing`).
        stall: seconds without a message; None: `STALL_SECONDS`.

    Raises:
        grpc.aio.AioRpcError: the call ended, or brought nothing for `stall` seconds (`has_stalled`).
    """
    seconds = STALL_SECONDS if stall is None else stall
    messages = aiter(call)
    try:
        while True:
            async with asyncio.timeout(seconds):
                try:
                    message = await anext(messages)
                except StopAsyncIteration:
                    return
            yield message
            del message
    except TimeoutError as error:
        nothing, said = grpc.aio.Metadata(), f"{_SILENT} {seconds:g} s"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, said, None) from error
    finally:
        if isinstance(call, grpc.aio.Call):
            call.cancel()
        elif isinstance(call, AsyncGenerator):
            # It makes calls of its own.
            await call.aclose()


def has_stalled(error: BaseException) -> bool:
    """Whether `chunks_of` broke a call off because it brought nothing."""
    return isinstance(error, grpc.aio.AioRpcError) and (error.details() or "").startswith(_SILENT)


async def put_blob(
    stub: BlobStub, source: bytes | Path, *, patience: float = 60.0, progress: Progress | None = None
) -> bytes:
    """Uploads bytes or a file, unless the other side has it already, and returns its digest.

    Args:
        stub: the operator's stub.
        source: the bytes, or the file.
        patience: seconds without progress before it gives up.
        progress: called with (arrived, total) in bytes.

    Raises:
        BlobDamaged: the other side rejected the content repeatedly; the file changes while it is sent.
        grpc.aio.AioRpcError: the other side refused, or was unreachable for `patience` seconds.
        OSError: the file cannot be read.
    """
    digest, total = await asyncio.to_thread(_measure, source)
    header = operator_pb2.PutBlobHeader(digest=digest, total=total)
    retry = Retry(patience)
    rejected = 0
    while True:
        try:
            at = await stub.StatBlob(operator_pb2.StatBlobRequest(digest=digest))
            _tell(progress, at.received, total)
            if at.complete:
                return digest
            retry.moved(at.received)
            header.offset = at.received
            at = await stub.PutBlob(_parts(header, source, _both(retry.moved, progress)))
            retry.moved(at.received)
            if at.complete:
                _tell(progress, total, total)
                return digest
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                # The offset is wrong because another upload of the same blob is under way, or the content is.
                rejected += 1
                if rejected > 2:
                    raise BlobDamaged(details_of(error)) from error
            elif not is_transient(error):
                raise
            await retry.wait(error)


class _Memory:
    """A bytearray that fills up."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def is_complete(self) -> bool:
        return False

    def add(self, data: bytes) -> None:
        self._data += data

    def digest(self) -> bytes:
        return hashlib.sha256(self._data).digest()

    def complete(self) -> None:
        """Does nothing: the bytes are where they belong."""

    def clear(self) -> None:
        self._data.clear()


class _File:
    """A file that fills up under a temporary name."""

    def __init__(self, path: Path, digest: bytes) -> None:
        self._path = path
        self._wanted = digest
        self._partial = path.with_name(path.name + ".partial")

    @property
    def size(self) -> int:
        for path in (self._partial, self._path):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        return 0

    def is_complete(self) -> bool:
        if not self._path.exists():
            return False
        if _digest_of(self._path) == self._wanted:
            self._partial.unlink(missing_ok=True)
            return True
        self._path.unlink()
        return False

    def add(self, data: bytes) -> None:
        with self._partial.open("ab") as file:
            file.write(data)

    def digest(self) -> bytes:
        self._partial.touch()
        return _digest_of(self._partial)

    def complete(self) -> None:
        with self._partial.open("rb") as file:
            os.fsync(file.fileno())
        self._partial.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def clear(self) -> None:
        self._partial.unlink(missing_ok=True)


async def _fetch(
    method: FetchMethod,
    digest: bytes,
    sink: _Memory | _File,
    limit: int,
    patience: float,
    progress: Progress | None,
    exported: bool,
) -> None:
    """Fills the sink up to the announced size."""
    retry = Retry(patience)
    total: int | None = None
    while True:
        ended: Exception = BlobDamaged(f"the blob {digest.hex()} ends before its announced size")
        try:
            request = federation_pb2.FetchBlobRequest(digest=digest, offset=sink.size, exported=exported)
            async with contextlib.aclosing(chunks_of(method, request)) as chunks:
                async for chunk in chunks:
                    total = chunk.total if total is None else total
                    _check(chunk, sink.size, total, limit)
                    sink.add(chunk.data)
                    retry.moved(sink.size)
                    _tell(progress, sink.size, total)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise BlobNotThere(details_of(error) or f"the other side has no blob {digest.hex()}") from error
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT and sink.size:
                # We hold more bytes than the blob has, so what an earlier call left belongs to something else.
                raise BlobDamaged(details_of(error) or "the offset lies outside the blob") from error
            if not is_transient(error):
                raise
            ended = error
        # A stream that sends nothing from an offset above 0 has no more; the digest decides.
        if sink.size == total or (total is None and sink.size and isinstance(ended, BlobDamaged)):
            return
        await retry.wait(ended)


def _check(chunk: federation_pb2.BlobChunk, offset: int, total: int, limit: int) -> None:
    if total > limit:
        raise BlobDamaged(f"the other side announced {total} bytes, but the blob has at most {limit}")
    if chunk.offset != offset or chunk.total != total or offset + len(chunk.data) > total:
        raise BlobDamaged(f"a chunk at {chunk.offset} of {chunk.total} bytes arrived where {offset} of {total} was due")


async def _parts(
    header: operator_pb2.PutBlobHeader, source: bytes | Path, progress: Progress | None
) -> AsyncIterator[operator_pb2.PutBlobRequest]:
    yield operator_pb2.PutBlobRequest(header=header)
    offset = header.offset
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(source.open("rb")) if isinstance(source, Path) else None
        if file is not None:
            file.seek(offset)
        while offset < header.total:
            data = file.read(CHUNK) if file is not None else source[offset : offset + CHUNK]  # type: ignore[index]
            if not data:
                return
            yield operator_pb2.PutBlobRequest(data=data)
            offset += len(data)
            _tell(progress, offset, header.total)


class Retry:
    """Waits longer after each failure without progress, and gives up in the end."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds without progress after which `wait` raises."""
        self._patience = patience
        self._best = -1
        self._failures = 0
        self._since = asyncio.get_running_loop().time()

    def moved(self, size: int) -> None:
        """Says how many bytes are there by now."""
        if size > self._best:
            self._best, self._failures = size, 0
            self._since = asyncio.get_running_loop().time()

    async def wait(self, error: Exception) -> None:
        """Waits before the next try, or raises `error`, which ended the last."""
        if asyncio.get_running_loop().time() - self._since >= self._patience:
            raise error
        self._failures += 1
        await asyncio.sleep(min(0.05 * 2**self._failures, 5.0) * random.uniform(0.5, 1.0))


def is_transient(error: grpc.aio.AioRpcError) -> bool:
    """Whether another try may succeed."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return True
    # gRPC sometimes reports these for a broken connection. Tacit's own refusals carry a reason.
    lost = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
    return error.code() in lost and reason_of(error)[0] is None


def _measure(source: bytes | Path) -> tuple[bytes, int]:
    if isinstance(source, Path):
        return _digest_of(source), source.stat().st_size
    return hashlib.sha256(source).digest(), len(source)


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _both(moved: Callable[[int], None], progress: Progress | None) -> Progress:
    """A long call that breaks has moved until then, so its break is a first failure, and not the end of patience."""

    def sent(arrived: int, total: int) -> None:
        moved(arrived)
        _tell(progress, arrived, total)

    return sent


def _tell(progress: Progress | None, arrived: int, total: int) -> None:
    if progress is not None:
        progress(arrived, total)
