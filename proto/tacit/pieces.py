"""Large files in pieces: a list of digests that lets a client check, resume and fetch them piece by piece.

A file of more than one piece has a list: the SHA-256 of each `PIECE` bytes, one after another. The list is itself a
blob, and the document that names the file names the list too, so both are trusted alike.

`fetch_pieces` fetches several pieces at once and writes a piece only once it has its digest. Guarantees:

- A file that it returns has the digest of the file and of all its pieces.
- What arrived before a break, a restart or a crash is not fetched again: the pieces in `NAME.partial` that match their
  digests are kept. Nothing else is remembered, so nothing else can be wrong.
- A piece with other bytes is refused, named, and fetched again, twice at most. A server that sends other bytes wastes
  no more than that.
- Memory: `STREAMS` pieces, whatever the file's size.

Leaves to others: which list belongs to which file, and where there is room (`edge_client.downloads`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
        into: the file. Until it is complete, `NAME.partial` holds what has arrived.
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
    file = await asyncio.to_thread(_Partial, into, pieces, size)
    try:
        whole = asyncio.create_task(_whole(file))
        retry = Retry(patience)
        try:
            while lacking := [number for number, done in enumerate(file.done) if not done.is_set()]:
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
            found = await whole
        finally:
            whole.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await whole
        if found != digest:
            file.discard()
            raise BlobDamaged(
                f"the job's list of pieces is of the file {found.hex()}, and the job names {digest.hex()}; it was "
                "discarded, so tell the operator"
            )
        await asyncio.to_thread(file.complete)
    finally:
        file.close()


class _Partial:
    """The file that fills up, in any order. Opening it checks what an earlier fetch left."""

    def __init__(self, path: Path, pieces: bytes, size: int) -> None:
        self._path, self._pieces, self.size = path, pieces, size
        self._partial = path.with_name(path.name + ".partial")
        # A cancelled fetch leaves its thread running. It must not write to a descriptor that is another file's by then.
        self._lock = threading.Lock()
        self._closed = False
        self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.done = [asyncio.Event() for _ in range(len(pieces) // _DIGEST)]
            self.arrived = 0
            self._keep_good()
            self._check_room()
            os.ftruncate(self._descriptor, size)
        except BaseException:
            self.close()
            raise

    def _keep_good(self) -> None:
        held, buffer = os.fstat(self._descriptor).st_size, bytearray(PIECE)
        at = 0
        while at < min(held, self.size):
            try:
                # Skip holes, which no fetch wrote.
                number = os.lseek(self._descriptor, at, os.SEEK_DATA) // PIECE
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return
            if self.matches(number, self.read(number, buffer)):
                self.done[number].set()
                self.arrived += self.length(number)
            at = (number + 1) * PIECE

    def _check_room(self) -> None:
        found = os.fstatvfs(self._descriptor)
        free, needed = found.f_bavail * found.f_frsize, self.size - self.arrived
        if free < needed:
            raise OSError(
                errno.ENOSPC, f"{needed:,} bytes are still to come, and the disk has {free:,} free", str(self._path)
            )

    def length(self, number: int) -> int:
        return min(PIECE, self.size - number * PIECE)

    def read(self, number: int, buffer: bytearray) -> memoryview:
        """Reads a piece into the buffer, and returns the part of it that the piece fills."""
        with self._open():
            found = os.preadv(self._descriptor, [memoryview(buffer)[: self.length(number)]], number * PIECE)
        return memoryview(buffer)[:found]

    def matches(self, number: int, piece: memoryview) -> bool:
        return hashlib.sha256(piece).digest() == self._pieces[_DIGEST * number : _DIGEST * (number + 1)]

    def keep(self, number: int, piece: memoryview) -> bool:
        """Writes a piece, unless it has another digest. Runs in a thread."""
        if not self.matches(number, piece):
            return False
        at = number * PIECE
        while piece:
            with self._open():
                written = os.pwrite(self._descriptor, piece, at)
            at, piece = at + written, piece[written:]
        return True

    def complete(self) -> None:
        os.fsync(self._descriptor)
        try:
            self._partial.replace(self._path)
        except FileNotFoundError:
            # Another process of this member completed the same file.
            if not self._path.exists():
                raise
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the fetch has ended", str(self._partial))
            yield

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._descriptor)


async def _whole(file: _Partial) -> bytes:
    """The digest of the whole file, computed in order while later pieces still arrive."""
    hashed, buffer = hashlib.sha256(), bytearray(PIECE)
    for number, done in enumerate(file.done):
        await done.wait()
        await asyncio.to_thread(_add, hashed, file, number, buffer)
    return hashed.digest()


def _add(hashed: Hash, file: _Partial, number: int, buffer: bytearray) -> None:
    hashed.update(file.read(number, buffer))


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
            piece = await _piece(method, digest, file, number, buffer)
            if await asyncio.to_thread(file.keep, number, piece):
                break
            if damaged is not None:
                damaged(number, len(file.done))
            if tries == _MAX_DAMAGED:
                raise BlobDamaged(
                    f"piece {number} of {len(file.done)} of {digest.hex()} arrived {tries} times with other bytes than "
                    "the job names; it was discarded, and the other pieces are kept"
                )
        file.done[number].set()
        file.arrived += file.length(number)
        retry.moved(file.arrived)
        if progress is not None:
            progress(file.arrived, file.size)


async def _piece(method: FetchMethod, digest: bytes, file: _Partial, number: int, buffer: bytearray) -> memoryview:
    begin, length, held = number * PIECE, file.length(number), 0
    request = federation_pb2.FetchBlobRequest(digest=digest, offset=begin, length=length)
    try:
        async for chunk in method(request):
            data = chunk.data
            if chunk.total != file.size or chunk.offset != begin + held or held + len(data) > length:
                raise BlobDamaged(
                    f"a chunk at {chunk.offset} of {chunk.total} bytes arrived where {begin + held} of {file.size} was "
                    "due"
                )
            buffer[held : held + len(data)] = data
            held += len(data)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise BlobNotThere(details_of(error) or f"the other side has no blob {digest.hex()}") from error
        raise
    # A stream that ends early fails the digest.
    return memoryview(buffer)[:held]


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The error that says most: anything else rather than a broken connection."""
    flat: list[Exception] = []
    for each in errors.exceptions:
        flat += [_first(each)] if isinstance(each, BaseExceptionGroup) else [each]
    return min(flat, key=lambda each: isinstance(each, grpc.aio.AioRpcError) and is_transient(each))
