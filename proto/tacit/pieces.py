"""Large files in pieces: a list of digests that lets a client check, resume and fetch them piece by piece.

A file of more than one piece has a list: the SHA-256 of each `PIECE` bytes, one after another. The list is itself a
blob, and the document that names the file names the list too, so both are trusted alike.

`Download` asks for all that is lacking in a row with one call. While a piece arrives, a thread checks the one before,
writes it, and adds it to the digest of the whole file. Guarantees:

- A file that it completes has the digest of the file and of all its pieces.
- What arrived before a break, a restart or a crash is not fetched again: the pieces in `NAME.pieces` that match their
  digests are kept. Nothing else is remembered on the disk, so nothing else can be wrong. A `Download` looks at the file
  once, so a break costs no second look.
- One process at a time writes to `NAME.pieces`, under a lock, and nothing writes to it once it is `NAME`. Otherwise a
  second job with the same digest and another list could change a file that the first has verified and mapped.
- A piece with other bytes ends the call, is refused, named, and fetched again, twice at most. A server that sends other
  bytes wastes no more than that.
- Memory: `AT_ONCE` pieces, whatever the file's size. Where the system can, nothing of the file goes through its cache.

Leaves to others: which list belongs to which file, and where there is room (`edge_client.downloads`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc.aio

from tacit.blobs import (
    BlobDamaged,
    BlobNotThere,
    FetchMethod,
    Progress,
    Retry,
    chunks_of,
    is_transient,
)
from tacit.status import details_of
from tacit.v1 import federation_pb2

__all__ = ["AT_ONCE", "PIECE", "Download", "check_list", "downloading", "fetch_pieces", "list_bytes", "list_of"]

PIECE = 4 * 1024 * 1024
# Pieces in memory: one arrives, one is checked, and two wait where either side is slower for a moment.
AT_ONCE = 4
_DIGEST = 32
# Times that a piece may arrive damaged before the fetch gives up.
_MAX_DAMAGED = 3
# Seconds between looks at a file that another process fetches.
_LOOK_SECONDS = 0.5
# What writes past the system's cache are multiples of.
_BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)

# Called with the number of a damaged piece, and how many pieces there are.
Damaged = Callable[[int, int], None]


def list_bytes(size: int) -> int:
    """Bytes of the list for a file of `size` bytes."""
    return _DIGEST * -(-size // PIECE)


def list_of(path: Path) -> bytes:
    """Computes the list of a file. Memory: one piece. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return b"".join(hashlib.sha256(piece).digest() for piece in iter(lambda: file.read(PIECE), b""))


def check_list(pieces: bytes, size: int) -> None:
    """Checks that a list may belong to a file of `size` bytes.

    Raises:
        BlobDamaged: It has another length.
    """
    if len(pieces) != list_bytes(size):
        raise BlobDamaged(
            f"the list of pieces has {len(pieces)} bytes, and a file of {size:,} bytes needs {list_bytes(size)}; the "
            "job was made wrongly, so tell the operator"
        )


async def fetch_pieces(
    method: FetchMethod,
    digest: bytes,
    pieces: bytes,
    size: int,
    into: Path,
    *,
    patience: float = 60.0,
    at_once: int = AT_ONCE,
    progress: Progress | None = None,
    damaged: Damaged | None = None,
) -> None:
    """Fetches a file of known size from one server. For the arguments see `downloading` and `Download.fetch`.

    Raises:
        BlobNotThere, BlobDamaged, grpc.aio.AioRpcError, OSError: as those do.
    """
    async with downloading(digest, pieces, size, into, at_once=at_once, progress=progress, damaged=damaged) as download:
        await download.fetch(method, patience=patience)


@contextlib.asynccontextmanager
async def downloading(
    digest: bytes,
    pieces: bytes,
    size: int,
    into: Path,
    *,
    at_once: int = AT_ONCE,
    progress: Progress | None = None,
    damaged: Damaged | None = None,
) -> AsyncIterator[Download]:
    """Yields a download into `into`, which gets its name only when it is complete and verified.

    Args:
        digest: SHA-256 of the file.
        pieces: the list of its pieces.
        size: its bytes.
        into: the file. Until it is complete, `NAME.pieces` holds what has arrived. If another process fetches it, this
            one waits, and takes over or uses the result.
        at_once: pieces that are in memory at once.
        progress: called with (arrived, total) in bytes.
        damaged: called with a piece's number, from 0, and their count, when a piece arrived with other bytes.

    Raises:
        BlobDamaged: the list cannot belong to a file of that size.
        OSError: the disk has no room, or refuses.
    """
    check_list(pieces, size)
    while (file := _Partial.opened(into, pieces, size)) is None:  # noqa: ASYNC110  another process tells no event
        await asyncio.sleep(_LOOK_SECONDS)
    # One thread, so that pieces are checked in their order.
    with contextlib.closing(file), _one_thread() as thread:
        complete = await asyncio.to_thread(file.is_there, digest)
        if not complete:
            await asyncio.to_thread(file.prepare)
        yield Download(digest, file, thread, complete, at_once, progress, damaged)


class Download:
    """A file that arrives, over as many calls as it takes. Made by `downloading`."""

    def __init__(
        self,
        digest: bytes,
        file: _Partial,
        thread: ThreadPoolExecutor,
        complete: bool,
        at_once: int,
        progress: Progress | None,
        damaged: Damaged | None,
    ) -> None:
        self._digest, self._file, self._thread, self._complete = digest, file, thread, complete
        self._progress, self._damaged = progress, damaged
        # Aligned, as writes past the system's cache need it. Memory that goes back to the system is dear to get again.
        self._buffers = [mmap.mmap(-1, PIECE) for _ in range(at_once)]
        self._tries: dict[int, int] = {}
        # The piece that a break interrupted, and what had arrived of it. It is checked once it is whole.
        self._begun: tuple[int, bytes] = (-1, b"")

    @property
    def arrived(self) -> int:
        """Bytes that are here and right."""
        return self._file.arrived

    async def fetch(self, method: FetchMethod, *, patience: float = 60.0, stall: float | None = None) -> None:
        """Fetches what is lacking. After an error, another call goes on from there.

        Args:
            method: a stub's `FetchBlob`.
            patience: seconds without progress before it gives up.
            stall: seconds without a chunk before a call counts as broken; None: `tacit.blobs.STALL_SECONDS`.

        Raises:
            BlobNotThere: the other side does not have it.
            BlobDamaged: a piece arrived damaged several times, or the list belongs to another file. The good pieces of
                the former are kept.
            grpc.aio.AioRpcError: the other side refused, or sent nothing or was unreachable for `patience` seconds.
            OSError: the disk has no room, or refuses.
        """
        if self._complete:
            return
        file, retry = self._file, Retry(patience)
        while (run := file.lacking()) is not None:
            try:
                await self._stream(method, run, retry, stall)
            except grpc.aio.AioRpcError as error:
                if not is_transient(error):
                    raise
                await retry.wait(error)
        if (found := await asyncio.to_thread(file.digest)) != self._digest:
            file.discard()
            raise BlobDamaged(
                f"the job's list of pieces is of the file {found.hex()}, and the job names {self._digest.hex()}; it "
                "was discarded, so tell the operator"
            )
        await asyncio.to_thread(file.complete)
        self._complete = True

    async def _stream(self, method: FetchMethod, run: range, retry: Retry, stall: float | None) -> None:
        """Receives these pieces with one call. Returns early if one was damaged."""
        checking: deque[tuple[int, asyncio.Future[bool]]] = deque()
        try:
            await self._receive(method, run, retry, stall, checking)
        finally:
            # After a break, too, a piece that is whole counts.
            await asyncio.gather(*(checked for _, checked in checking), return_exceptions=True)
            while checking:
                await self._settle(*checking.popleft(), retry)

    async def _receive(
        self,
        method: FetchMethod,
        run: range,
        retry: Retry,
        stall: float | None,
        checking: deque[tuple[int, asyncio.Future[bool]]],
    ) -> None:
        file, loop = self._file, asyncio.get_running_loop()
        number, end = run.start, min(run.stop * PIECE, file.size)
        begun, first = self._begun
        buffer, held = memoryview(self._buffers[0]), len(first) if begun == number else 0
        buffer[:held] = first[:held]
        at = number * PIECE + held
        request = federation_pb2.FetchBlobRequest(digest=self._digest, offset=at, length=end - at)
        try:
            async with contextlib.aclosing(_translated(method, request, stall, self._digest)) as chunks:
                async for chunk in chunks:
                    data = memoryview(chunk.data)
                    # Without the first check, a stream of nothing would never end.
                    if not data or chunk.total != file.size or chunk.offset != at or at + len(data) > end:
                        raise BlobDamaged(
                            f"a chunk of {len(data)} bytes at {chunk.offset} of {chunk.total} arrived where {at} of "
                            f"{file.size} was due"
                        )
                    at += len(data)
                    while data:
                        part = data[: file.length(number) - held]
                        buffer[held : held + len(part)] = part
                        data, held = data[len(part) :], held + len(part)
                        retry.moved(at - len(data))
                        if held < file.length(number):
                            continue
                        checking.append((number, loop.run_in_executor(self._thread, file.take, number, buffer, held)))
                        number, held = number + 1, 0
                        # The oldest buffer must be free again. What is known already is looked at, too.
                        while checking and (len(checking) >= len(self._buffers) or checking[0][1].done()):
                            if not await self._settle(*checking.popleft(), retry):
                                return
                        buffer = memoryview(self._buffers[(number - run.start) % len(self._buffers)])
            if number < run.stop:
                # The stream ended early, and no part of a piece has its digest.
                checking.append((number, loop.run_in_executor(self._thread, file.take, number, buffer, held)))
                held = 0
        finally:
            # A line that breaks before it has carried a whole piece would otherwise never get on.
            self._begun = (number, bytes(buffer[:held]))

    async def _settle(self, number: int, checked: asyncio.Future[bool], retry: Retry) -> bool:
        """Waits until a piece was checked, and returns whether it is right.

        Raises:
            BlobDamaged: it arrived damaged too often.
        """
        count = len(self._file.done)
        if await checked:
            retry.moved(self._file.arrived)
            if self._progress is not None:
                self._progress(self._file.arrived, self._file.size)
            return True
        if self._damaged is not None:
            self._damaged(number, count)
        tries = self._tries[number] = self._tries.get(number, 0) + 1
        if tries == _MAX_DAMAGED:
            raise BlobDamaged(
                f"piece {number} of {count} of {self._digest.hex()} arrived {tries} times with other bytes than the "
                "job names; it was discarded, and the other pieces are kept"
            )
        return False


@contextlib.contextmanager
def _one_thread() -> Iterator[ThreadPoolExecutor]:
    thread = ThreadPoolExecutor(1, "tacit-pieces")
    try:
        yield thread
    finally:
        # A cancelled fetch does not wait: what its thread still does ends with the file.
        thread.shutdown(wait=False, cancel_futures=True)


class _Partial:
    """The locked file that fills up, in any order, and the digest of its beginning. Made by `opened`."""

    def __init__(self, path: Path, pieces: bytes, size: int, descriptor: int) -> None:
        self._path, self._pieces, self.size = path, pieces, size
        self._partial = _partial_of(path)
        self._descriptor = descriptor
        # A cancelled fetch leaves its thread running. It must not write to a descriptor that is another file's by then.
        self._lock = threading.Lock()
        self._closed = False
        self.done = [False] * (len(pieces) // _DIGEST)
        self.arrived = 0
        # The digest of the first `_hashed` pieces. One thread at a time.
        self._whole, self._hashed = hashlib.sha256(), 0

    @classmethod
    def opened(cls, path: Path, pieces: bytes, size: int) -> _Partial | None:
        """Opens and locks the file. None: another fetch has it. Raises OSError."""
        partial = _partial_of(path)
        descriptor = _open_direct(partial)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The fetch that had the lock may have given the file its final name.
            if os.path.samestat(os.fstat(descriptor), partial.stat()):
                return cls(path, pieces, size, descriptor)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def is_there(self, digest: bytes) -> bool:
        """Whether the complete file is there already, which another process may have fetched. Runs in a thread."""
        try:
            with self._path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").digest() != digest:
                    return False
        except FileNotFoundError:
            return False
        self.discard()
        return True

    def prepare(self) -> None:
        """Keeps what an earlier fetch left and is right. Runs in a thread."""
        with self._open() as descriptor:
            self._keep_good(descriptor)
            self._check_room(descriptor)
            os.ftruncate(descriptor, self.size)

    def _keep_good(self, descriptor: int) -> None:
        held = os.fstat(descriptor).st_size
        at = 0
        with mmap.mmap(-1, PIECE) as mapped, memoryview(mapped) as buffer:
            while at < min(held, self.size):
                try:
                    # Skip holes, which no fetch wrote.
                    number = os.lseek(descriptor, at, os.SEEK_DATA) // PIECE
                except OSError as error:
                    if error.errno != errno.ENXIO:
                        raise
                    return
                found = min(os.preadv(descriptor, [buffer], number * PIECE), self.length(number))
                if self._matches(number, buffer[:found]):
                    self._have(number, buffer[:found])
                at = (number + 1) * PIECE

    def _check_room(self, descriptor: int) -> None:
        found = os.fstatvfs(descriptor)
        free, needed = found.f_bavail * found.f_frsize, self.size - self.arrived
        if free < needed:
            raise OSError(
                errno.ENOSPC, f"{needed:,} bytes are still to come, and the disk has {free:,} free", str(self._path)
            )

    def length(self, number: int) -> int:
        return min(PIECE, self.size - number * PIECE)

    def lacking(self) -> range | None:
        """The first pieces in a row that are not here; None: all are here."""
        try:
            first = self.done.index(False)
        except ValueError:
            return None
        following = (number for number in range(first, len(self.done)) if self.done[number])
        return range(first, next(following, len(self.done)))

    def take(self, number: int, buffer: memoryview, held: int) -> bool:
        """Writes the `held` bytes of a piece if they are right, and returns whether they are. Runs in a thread."""
        if not self._matches(number, buffer[:held]):
            return False
        # The file is cut to its size at the end.
        padded = -(-held // _BLOCK) * _BLOCK
        buffer[held:padded] = bytes(padded - held)
        self._write(number * PIECE, buffer[:padded])
        self._have(number, buffer[:held])
        return True

    def _matches(self, number: int, piece: memoryview) -> bool:
        return hashlib.sha256(piece).digest() == self._pieces[_DIGEST * number : _DIGEST * (number + 1)]

    def _have(self, number: int, piece: memoryview) -> None:
        """Notes a piece that is on the disk, and adds it to the whole digest while it is in memory, if it is next."""
        self._catch_up(number)
        if self._hashed == number:
            self._whole.update(piece)
            self._hashed += 1
        self.done[number] = True
        self.arrived += self.length(number)

    def _catch_up(self, until: int) -> None:
        """Adds to the whole digest what arrived before it was next: what an earlier fetch left behind a gap."""
        if self._hashed >= until or not self.done[self._hashed]:
            return
        with self._open() as descriptor, mmap.mmap(-1, PIECE) as mapped, memoryview(mapped) as buffer:
            while self._hashed < until and self.done[self._hashed]:
                length = self.length(self._hashed)
                if os.preadv(descriptor, [buffer], self._hashed * PIECE) < length:
                    raise OSError(errno.EIO, "the file became shorter while it was fetched", str(self._partial))
                self._whole.update(buffer[:length])
                self._hashed += 1

    def digest(self) -> bytes:
        """The digest of the whole file, once all is here. Runs in a thread."""
        self._catch_up(len(self.done))
        return self._whole.digest()

    def _write(self, at: int, data: memoryview) -> None:
        while data:
            with self._open() as descriptor:
                try:
                    written = os.pwrite(descriptor, data, at)
                except OSError as error:
                    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                    if error.errno != errno.EINVAL or not flags & _DIRECT:
                        raise
                    # A disk with larger blocks. Then through the cache.
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
                    continue
            at, data = at + written, data[written:]

    def complete(self) -> None:
        with self._open() as descriptor:
            os.ftruncate(descriptor, self.size)
            os.fsync(descriptor)
            self._partial.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        """A descriptor of its own for a thread, which holds the file's lock for as long as it is open."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the fetch has ended", str(self._partial))
            descriptor = os.dup(self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._descriptor)


def _partial_of(path: Path) -> Path:
    # Not `NAME.partial`, to which `tacit.blobs.fetch_blob` appends without a lock.
    return path.with_name(path.name + ".pieces")


def _open_direct(path: Path) -> int:
    """Opens a file past the system's cache, which a file of gigabytes would empty of all else, if its disk can."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        return os.open(path, flags, 0o600)


async def _translated(
    method: FetchMethod, request: federation_pb2.FetchBlobRequest, stall: float | None, digest: bytes
) -> AsyncGenerator[federation_pb2.BlobChunk, None]:
    """Yields a call's chunks. What closed its connection, or kept it silent, is raised as a broken connection."""
    try:
        async with contextlib.aclosing(chunks_of(method, request, stall)) as chunks:
            async for chunk in chunks:
                yield chunk
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise BlobNotThere(details_of(error) or f"the other side has no blob {digest.hex()}") from error
        raise
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        # The channel was closed, which cancels its calls and not this task.
        nothing, said = grpc.aio.Metadata(), "the connection was closed during the call"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, said, None) from error
