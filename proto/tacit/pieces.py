"""Large files in pieces: a list of digests that lets a client check, resume and fetch them piece by piece.

A file of more than one piece has a list: the SHA-256 of each `PIECE` bytes, one after another. The list is itself a
blob, and the document that names the file names the list too, so both are trusted alike.

`fetch_pieces` fetches several pieces at once and writes a piece only once it has its digest. Guarantees:

- A file that it returns has the digest of the file and of all its pieces.
- What arrived before a break, a restart or a crash is not fetched again: the pieces in `NAME.pieces` that match their
  digests are kept. Nothing else is remembered, so nothing else can be wrong.
- One process at a time writes to `NAME.pieces`, under a lock, and nothing writes to it once it is `NAME`. Otherwise a
  second job with the same digest and another list could change a file that the first has verified and mapped.
- A piece with other bytes is refused, named, and fetched again, twice at most. A server that sends other bytes wastes
  no more than that.
- Memory: `STREAMS` pieces, whatever the file's size.

Leaves to others: which list belongs to which file, and where there is room (`edge_client.downloads`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from tacit.blobs import BlobDamaged, BlobNotThere, FetchMethod, Progress, Retry, is_transient
from tacit.status import details_of
from tacit.v1 import federation_pb2

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

__all__ = ["PIECE", "STREAMS", "check_list", "fetch_pieces", "list_bytes", "list_of"]

PIECE = 4 * 1024 * 1024
# Pieces that are fetched at once.
STREAMS = 4
_DIGEST = 32
# Times that a piece may arrive damaged before the fetch gives up.
_MAX_DAMAGED = 3
# Seconds between looks at a file that another process fetches.
_LOOK_SECONDS = 0.5

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
    streams: int = STREAMS,
    progress: Progress | None = None,
    damaged: Damaged | None = None,
) -> None:
    """Fetches a file of known size into `into`, which gets its name only when it is complete and verified.

    Args:
        method: a stub's `FetchBlob`.
        digest: SHA-256 of the file.
        pieces: the list of its pieces.
        size: its bytes.
        into: the file. Until it is complete, `NAME.pieces` holds what has arrived. If another process fetches it, this
            one waits, and takes over or uses the result.
        patience: seconds without progress before it gives up.
        streams: pieces that are fetched at once.
        progress: called with (arrived, total) in bytes.
        damaged: called with a piece's number, from 0, and their count, when a piece arrived with other bytes.

    Raises:
        BlobNotThere: the other side does not have it.
        BlobDamaged: a piece arrived damaged several times, or the list belongs to another file. The good pieces of the
            former are kept.
        grpc.aio.AioRpcError: the other side refused, or was unreachable for `patience` seconds.
        OSError: the disk has no room, or refuses.
    """
    check_list(pieces, size)
    while (file := _Partial.opened(into, pieces, size)) is None:  # noqa: ASYNC110  another process tells no event
        await asyncio.sleep(_LOOK_SECONDS)
    try:
        if await asyncio.to_thread(file.is_there, digest):
            return
        await asyncio.to_thread(file.prepare)
        retry = Retry(patience)
        while lacking := [number for number, done in enumerate(file.done) if not done]:
            queue = iter(lacking)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(streams, len(lacking))):
                        group.create_task(_worker(method, digest, file, queue, retry, progress, damaged))
            except* (grpc.aio.AioRpcError, BlobNotThere, BlobDamaged, OSError) as errors:
                ended = _first(errors)
                if not isinstance(ended, grpc.aio.AioRpcError) or not is_transient(ended):
                    raise ended from None
                await retry.wait(ended)
        # At the end, since a thread that hashes meanwhile and this one would take turns at each chunk.
        if (found := await asyncio.to_thread(file.digest)) != digest:
            file.discard()
            raise BlobDamaged(
                f"the job's list of pieces is of the file {found.hex()}, and the job names {digest.hex()}; it was "
                "discarded, so tell the operator"
            )
        await asyncio.to_thread(file.complete)
    finally:
        file.close()


class _Partial:
    """The locked file that fills up, in any order. Made by `opened`."""

    def __init__(self, path: Path, pieces: bytes, size: int, descriptor: int) -> None:
        self._path, self._pieces, self.size = path, pieces, size
        self._partial = _partial_of(path)
        self._descriptor = descriptor
        # A cancelled fetch leaves its thread running. It must not write to a descriptor that is another file's by then.
        self._lock = threading.Lock()
        self._closed = False
        self.done = [False] * (len(pieces) // _DIGEST)
        self.arrived = 0

    @classmethod
    def opened(cls, path: Path, pieces: bytes, size: int) -> _Partial | None:
        """Opens and locks the file. None: another fetch has it. Raises OSError."""
        partial = _partial_of(path)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        held, buffer = os.fstat(descriptor).st_size, bytearray(PIECE)
        at = 0
        while at < min(held, self.size):
            try:
                # Skip holes, which no fetch wrote.
                number = os.lseek(descriptor, at, os.SEEK_DATA) // PIECE
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return
            found = os.preadv(descriptor, [memoryview(buffer)[: self.length(number)]], number * PIECE)
            if self.matches(number, hashlib.sha256(memoryview(buffer)[:found])):
                self.done[number] = True
                self.arrived += self.length(number)
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

    def digest(self) -> bytes:
        """The digest of the whole file. Runs in a thread."""
        with self._open() as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").digest()

    def matches(self, number: int, hashed: Hash) -> bool:
        return hashed.digest() == self._pieces[_DIGEST * number : _DIGEST * (number + 1)]

    def write(self, number: int, piece: memoryview) -> None:
        """Writes a piece that matches. Runs in a thread."""
        at = number * PIECE
        while piece:
            with self._open() as descriptor:
                written = os.pwrite(descriptor, piece, at)
            at, piece = at + written, piece[written:]

    def complete(self) -> None:
        with self._open() as descriptor:
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


async def _worker(
    method: FetchMethod,
    digest: bytes,
    file: _Partial,
    queue: Iterator[int],
    retry: Retry,
    progress: Progress | None,
    damaged: Damaged | None,
) -> None:
    """Fetches the next piece that nobody fetches, until there is none."""
    # One buffer for all its pieces: memory that is returned to the system is dear to get again.
    buffer = bytearray(PIECE)
    for number in queue:
        for tries in range(1, _MAX_DAMAGED + 1):
            piece, hashed = await _piece(method, digest, file, number, buffer)
            if file.matches(number, hashed):
                await asyncio.to_thread(file.write, number, piece)
                break
            if damaged is not None:
                damaged(number, len(file.done))
            if tries == _MAX_DAMAGED:
                raise BlobDamaged(
                    f"piece {number} of {len(file.done)} of {digest.hex()} arrived {tries} times with other bytes than "
                    "the job names; it was discarded, and the other pieces are kept"
                )
        file.done[number] = True
        file.arrived += file.length(number)
        retry.moved(file.arrived)
        if progress is not None:
            progress(file.arrived, file.size)


async def _piece(
    method: FetchMethod, digest: bytes, file: _Partial, number: int, buffer: bytearray
) -> tuple[memoryview, Hash]:
    """Receives a piece into the buffer, and hashes it."""
    begin, length, held = number * PIECE, file.length(number), 0
    request = federation_pb2.FetchBlobRequest(digest=digest, offset=begin, length=length)
    hashed = hashlib.sha256()
    try:
        async for chunk in method(request):
            data = chunk.data
            # Without the first check, a stream of nothing would never end.
            if not data or chunk.total != file.size or chunk.offset != begin + held or held + len(data) > length:
                raise BlobDamaged(
                    f"a chunk of {len(data)} bytes at {chunk.offset} of {chunk.total} arrived where {begin + held} of "
                    f"{file.size} was due"
                )
            buffer[held : held + len(data)] = data
            # Here, because a chunk that has just arrived is still in the processor's cache.
            hashed.update(data)
            held += len(data)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise BlobNotThere(details_of(error) or f"the other side has no blob {digest.hex()}") from error
        raise
    except (grpc.aio.UsageError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        # The channel was closed. A task group would take a cancelled call for a task that has finished.
        nothing, said = grpc.aio.Metadata(), "the connection was closed during the call"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, said, None) from error
    # A stream that ends early fails the digest.
    return memoryview(buffer)[:held], hashed


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The error that says most: anything else rather than a broken connection."""
    flat: list[Exception] = []
    for each in errors.exceptions:
        flat += [_first(each)] if isinstance(each, BaseExceptionGroup) else [each]
    return min(flat, key=lambda each: isinstance(each, grpc.aio.AioRpcError) and is_transient(each))
