"""Blobs: weights, documents, manifests and tokenizers, each named by its SHA-256 and never changed.

Guarantees:

- A blob is seen whole or not at all. It is written under another name, forced to the disk and checked, and only then
  gets its name. A crash leaves at most a partial file that nothing reads.
- What `get` returns has the requested digest. A blob that rotted on the disk is noticed and named.
- Bytes that arrived are kept: a broken-off upload continues where it stopped, also after a restart.
- Storing a blob that is there already writes nothing.
- A blob's age counts from the moment at which somebody last stored or held it (`hold`). Pruning removes only blobs
  older than its grace period (`remove_old`), so there is that much time to name a blob in a row. A lock keeps the check
  of the age and the removal together.
- What is too large for memory is read and written in pieces (`reading`, `writing`). Its digest is known only at the
  end, so a reader must use no result before that.

An fsspec URL says where blobs are: `file:///folder`, `memory://name` (tests), or another one that `check` finds
writable; for `s3://bucket/prefix` see `coordinator.storage.object_store`. Uploads in progress are always in a local
folder, because object stores cannot append.

Methods are synchronous and safe to call from several threads. A caller with an event loop runs them in the store's own
threads (`BlobStore.apart.run`), because a store that hangs would take those that all other work needs.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fsspec.core import url_to_fs

from coordinator.storage.errors import BlobCorrupt, BlobMissing, BlobRejected, StoreInUse, StoreUnusable
from coordinator.storage.owner_mark import OwnerMark
from coordinator.storage.store_threads import StoreThreads
from tacit.reading import shortened

__all__ = ["MAX_BLOB", "BlobStore", "Incoming", "Listed", "Ranges", "Reader", "Writer", "open_blobs", "prepared"]

# The largest backbone, which is larger than any version. A larger announcement is a mistake.
MAX_BLOB = 2**36 + 2**20
_STALE_SECONDS = 7 * 24 * 3600.0
_READ = threading.local()


@dataclass(frozen=True, slots=True)
class Listed:
    """A stored blob: its digest, its size in bytes, and since when nobody has stored or held it, in seconds."""

    digest: bytes
    size: int
    held: float


class BlobStore:
    """A content-addressed store, made by `open_blobs`."""

    def __init__(self, filesystem: Any, root: str, staging: Path) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._staging = staging
        self._local = filesystem is not None and _is_local(filesystem)
        self._lock = threading.Lock()
        # Runs calls to this store for callers with an event loop.
        self.apart = StoreThreads()
        # The local folder whose locks keep backups and prunings apart. None: the store cannot be pruned.
        self._locks = Path(self._root) if self._local else None

    # ---- writing -------------------------------------------------------------------------------------------

    def put(self, data: bytes | memoryview) -> bytes:
        """Stores `data` and returns its digest, once it is durable.

        Raises:
            StoreUnusable: no space, no permission, no connection.
        """
        digest = hashlib.sha256(data).digest()
        if self._held(digest):
            return digest
        if not self._local:
            with _sentences(self._where(digest), "written"):
                # Object stores show an object only once it is complete.
                self._fs.pipe_file(self._path(digest), bytes(data))
            return digest
        partial = self._staging / f"put-{uuid.uuid4().hex}"
        with _sentences(str(partial), "written"):
            try:
                with partial.open("xb") as file:
                    file.write(data)
                    _force(file.fileno())
                self._reveal(partial, digest)
            finally:
                partial.unlink(missing_ok=True)
        return digest

    @contextlib.contextmanager
    def writing(self) -> Iterator["Writer"]:
        """Opens a blob for writing in pieces. Without `Writer.finish` nothing of it stays.

        Raises:
            StoreUnusable: no space, no permission.
        """
        partial = self._staging / f"put-{uuid.uuid4().hex}"
        try:
            with _sentences(str(partial), "written"):
                file = partial.open("xb")
            with file:
                yield Writer(self, partial, file)
        finally:
            partial.unlink(missing_ok=True)

    def remove(self, digest: bytes) -> bool:
        """Deletes a blob that no row names any more, durably. Returns whether there was one.

        Raises:
            StoreUnusable: no permission, no connection.
        """
        with _sentences(self._where(digest), "deleted"):
            # Deleting does not say whether there was one on an object store.
            if not self._fs.exists(self._path(digest)):
                return False
            self._fs.rm_file(self._path(digest))
            if self._local:
                _force_folder(Path(self._path(digest)).parent)
        return True

    def hold(self, digest: bytes) -> None:
        """Lets a stored blob's age begin anew. Call it before a row names a blob that was stored at another time.

        Raises:
            BlobMissing: it is not stored.
        """
        if not self._held(digest):
            raise self._missing(digest)

    def _held(self, digest: bytes) -> bool:
        """Holds a blob, and returns whether it is stored. Without a local store, nothing is pruned."""
        if not self._local:
            return self.has(digest)
        path = Path(self._path(digest))
        with _sentences(self._where(digest), "looked up"):
            if not path.exists():
                return False
            with self._locked("hold.lock", fcntl.LOCK_SH):
                try:
                    os.utime(path)
                except FileNotFoundError:
                    return False
        return True

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        # The system releases it when the process dies.
        if self._locks is None:
            raise StoreUnusable(f"{self._root} has no locks, so it can be neither held nor pruned")
        descriptor = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    # ---- pruning -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unpruned(self) -> Iterator[None]:
        """Nothing is pruned inside. Waits for a pruning that has begun. For backups and restores."""
        if self._locks is None:
            yield
            return
        with self._locked("prune.lock", fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def pruning(self) -> Iterator[None]:
        """Lets the caller call `remove_old` inside.

        Raises:
            StoreInUse: a backup, a restore or another pruning is under way.
            StoreUnusable: the store is neither a folder of this machine nor an S3 bucket.
        """
        if self._locks is None:
            raise StoreUnusable(
                f"{self._root} is neither a folder of this machine nor an S3 bucket, and only such stores can be pruned"
            )
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._locked("prune.lock", fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                raise StoreInUse(
                    f"a backup, a restore or another `store prune` uses {self._root}; try again when it has ended"
                ) from None
            except OSError as error:
                raise StoreUnusable(f"{self._root} cannot be locked: {error.strerror}; check permissions") from error
            yield

    def listed(self) -> Iterator[Listed]:
        """Yields every blob of a local store, in no order. Blobs that come or go meanwhile may be missing."""
        with _sentences(self._root, "read"):
            for folder in os.scandir(Path(self._root) / "blobs"):
                if not folder.is_dir(follow_symlinks=False):
                    continue
                for entry in os.scandir(folder.path):
                    with contextlib.suppress(FileNotFoundError, ValueError):
                        digest, found = bytes.fromhex(entry.name), entry.stat(follow_symlinks=False)
                        if len(digest) == 32:
                            yield Listed(digest, found.st_size, found.st_mtime)

    def measure(self) -> tuple[int, int] | None:
        """Returns the number of blobs and their size in bytes; None if the store is not a folder of this machine."""
        if not self._local:
            return None
        count = size = 0
        for blob in self.listed():
            count, size = count + 1, size + blob.size
        return count, size

    def remove_old(self, digest: bytes, before: float) -> bool:
        """Removes a blob of a local store that nobody has held since `before`, in seconds since 1970.

        Returns whether it was removed. Inside `pruning` only. A removal that a power cut undoes is repeated by the
        next pruning.

        Raises:
            StoreUnusable: no permission.
        """
        path = Path(self._path(digest))
        with _sentences(str(path), "deleted"), self._locked("hold.lock", fcntl.LOCK_EX):
            try:
                if path.stat().st_mtime >= before:
                    return False
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def clock(self, now: float) -> float:
        """Returns the time by which ages are told, in seconds. `now` is this machine's time.

        Raises:
            StoreUnusable: the store tells its own time, and cannot be asked.
        """
        return now

    def tidy(self, before: float, proceed: Callable[[], None] = lambda: None) -> int:
        """Removes what the store keeps for itself, if it is older than a moment of its clock. Returns the bytes freed.

        Inside `pruning` only. A local store keeps nothing. `proceed` is called before each deletion, and may raise.

        Raises:
            StoreUnusable: no permission, no connection.
        """
        return 0

    @property
    def place(self) -> str:
        """How sentences name the store."""
        return self._root

    def marks(self) -> list[OwnerMark] | None:
        """Returns every mark of a database in the store; None for a store that needs none (`ownership`).

        Raises:
            StoreUnusable: it cannot be listed, or has a mark of newer software.
        """
        return None

    def write_mark(self, mark: OwnerMark) -> None:
        """Writes a mark. Raises: StoreUnusable: the store needs none, or cannot be written."""
        raise StoreUnusable(f"{self._root} has no marks of databases; only a bucket has them")

    def remove_mark(self, mark: OwnerMark) -> None:
        """Removes a mark, if it is there. Raises: StoreUnusable: the store needs none, or cannot be written."""
        raise StoreUnusable(f"{self._root} has no marks of databases; only a bucket has them")

    def check(self) -> list[str]:
        """Tries what serving needs, and returns what an operator should know about the store, as sentences.

        Raises:
            StoreUnusable: serving would fail.
        """
        if not self._local:
            self._try()
        return []

    def _try(self) -> None:
        key = f"checks/{uuid.uuid4().hex}"
        path, data = f"{self._root}/{key}", key.encode()
        where = self._fs.unstrip_protocol(self._root)
        try:
            self._fs.pipe_file(path, data)
            found = self._fs.cat_file(path)
            self._fs.rm_file(path)
        except Exception as error:  # A driver of another project raises what it likes.
            raise StoreUnusable(
                f"{where} cannot be written: {_told(error)}; set store_url to a folder or to s3://BUCKET/PREFIX"
            ) from error
        if found != data:
            raise StoreUnusable(
                f"{where} does not return what was just written to it; set store_url to a folder or to "
                "s3://BUCKET/PREFIX"
            )

    def incoming(self, digest: bytes, total: int) -> "Incoming":
        """Begins or continues an upload of a blob of `total` bytes.

        Raises:
            BlobRejected: this is no digest, or no blob has that size.
        """
        if not 0 <= total <= MAX_BLOB:
            raise BlobRejected(f"a blob of {total} bytes is over the limit of {MAX_BLOB}; check what is sent")
        return Incoming(self, digest, total)

    def received(self, digest: bytes) -> int:
        """Returns how many bytes are here: all of a stored blob, those of an unfinished upload, or 0."""
        try:
            return self.size(digest)
        except BlobMissing:
            with contextlib.suppress(FileNotFoundError):
                return self._partial(digest).stat().st_size
            return 0

    # ---- reading -------------------------------------------------------------------------------------------

    def has(self, digest: bytes) -> bool:
        """Whether the whole blob is stored."""
        with _sentences(self._where(digest), "looked up"):
            return bool(self._fs.exists(self._path(digest)))

    def size(self, digest: bytes) -> int:
        """Returns the length in bytes.

        Raises:
            BlobMissing: it is not stored.
        """
        with _sentences(self._where(digest), "looked up"):
            try:
                return int(self._fs.size(self._path(digest)))
            except FileNotFoundError as error:
                raise self._missing(digest) from error

    def get(self, digest: bytes) -> bytes:
        """Returns the whole blob, verified.

        Raises:
            BlobMissing: it is not stored.
            BlobCorrupt: it is stored, but no longer has its digest.
        """
        with _sentences(self._where(digest), "read"):
            try:
                data = bytes(self._fs.cat_file(self._path(digest)))
            except FileNotFoundError as error:
                raise self._missing(digest) from error
        if hashlib.sha256(data).digest() != digest:
            raise self._corrupt(digest)
        return data

    @contextlib.contextmanager
    def reading(self, digest: bytes) -> Iterator["Reader"]:
        """Opens the blob for reading in pieces.

        Raises:
            BlobMissing: it is not stored.
        """
        with _sentences(self._where(digest), "read"):
            try:
                file = self._fs.open(self._path(digest), "rb")
            except FileNotFoundError as error:
                raise self._missing(digest) from error
        with file:
            yield Reader(self, digest, file)

    def read(self, digest: bytes, offset: int, size: int) -> bytes:
        """Returns at most `size` bytes from `offset` on, none at the end.

        They are not verified: the caller verifies the whole blob.

        Raises:
            BlobMissing: it is not stored.
            BlobRejected: the offset is outside the blob.
        """
        total = self.size(digest)
        if not 0 <= offset <= total or size < 0:
            raise BlobRejected(f"offset {offset} is outside the blob of {total} bytes; start again at 0")
        end = min(offset + size, total)
        if end == offset:
            return b""
        with _sentences(self._where(digest), "read"):
            return bytes(self._fs.cat_file(self._path(digest), start=offset, end=end))

    def ranges(self, digest: bytes, *, keep_open: bool = True) -> "Ranges":
        """Opens the blob for reading anywhere, as often as needed. What is read is not verified.

        Args:
            digest: SHA-256 of the blob.
            keep_open: Whether the file stays open, which takes a descriptor. Otherwise each read opens it.

        Raises:
            BlobMissing: it is not stored.
        """
        if not self._local or not keep_open:
            return Ranges(self, digest, self.size(digest), None)
        with _sentences(self._where(digest), "read"):
            try:
                file = Path(self._path(digest)).open("rb", buffering=0)  # noqa: SIM115  Ranges closes it
            except FileNotFoundError as error:
                raise self._missing(digest) from error
        return Ranges(self, digest, os.fstat(file.fileno()).st_size, file)

    # ---- inside --------------------------------------------------------------------------------------------

    def _path(self, digest: bytes) -> str:
        # Anything shorter would name a folder.
        if len(digest) != 32:
            raise BlobRejected(f"a digest has 32 bytes, not {len(digest)}; send the SHA-256 of the blob")
        text = digest.hex()
        return f"{self._root}/blobs/{text[:2]}/{text}"

    def _where(self, digest: bytes) -> str:
        return self._fs.unstrip_protocol(self._path(digest)) if not self._local else self._path(digest)

    def _partial(self, digest: bytes) -> Path:
        return self._staging / digest.hex()

    def _corrupt(self, digest: bytes) -> BlobCorrupt:
        return BlobCorrupt(
            f"{self._where(digest)} is damaged: its bytes no longer have the digest in its name; restore that file "
            "from a copy, or remove it and upload it again"
        )

    def _missing(self, digest: bytes) -> BlobMissing:
        return BlobMissing(f"there is no blob {digest.hex()} in {self._root}; upload it first")

    def _reveal(self, partial: Path, digest: bytes) -> None:
        """Gives a complete, forced and checked local file its name."""
        if not self._local:
            self._fs.put_file(str(partial), self._path(digest))
            partial.unlink()
            return
        # An upload may have waited for days before it was finished.
        os.utime(partial)
        path = Path(self._path(digest))
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            _force_folder(path.parent.parent)
        partial.replace(path)
        _force_folder(path.parent)


class Reader:
    """Reads one blob from beginning to end. Made by `BlobStore.reading`."""

    def __init__(self, store: BlobStore, digest: bytes, file: Any) -> None:
        self._store = store
        self._digest = digest
        self._file = file
        self._hashed = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, fewer at the end. They are not verified before `finish`.

        Raises:
            StoreUnusable: the storage failed to read them.
        """
        with _sentences(self._store._where(self._digest), "read"):
            piece = bytes(self._file.read(size))
        self._hashed.update(piece)
        return piece

    def finish(self) -> None:
        """Checks that the whole blob was read and has its digest.

        Raises:
            BlobCorrupt: it does not, or there is more of it.
        """
        if self.read(1) or self._hashed.digest() != self._digest:
            raise self._store._corrupt(self._digest)


class Ranges:
    """A context manager that reads anywhere in one blob. Made by `BlobStore.ranges`."""

    def __init__(self, store: BlobStore, digest: bytes, total: int, file: IO[bytes] | None) -> None:
        self._store = store
        self._digest = digest
        self._file = file
        # The blob's size in bytes.
        self.total = total

    def __enter__(self) -> "Ranges":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if self._file is not None:
            self._file.close()

    def read_cached(self, offset: int, size: int) -> bytes | None:
        """Returns bytes that are in memory already, without waiting for a disk. None: call `read` in a thread."""
        if self._file is None or not hasattr(os, "RWF_NOWAIT"):
            return None
        # One buffer for each thread: a new one for each chunk costs four times as much as the read.
        buffer: bytearray | None = getattr(_READ, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = _READ.buffer = bytearray(size)
        data = memoryview(buffer)[:size]
        try:
            found = os.preadv(self._file.fileno(), [data], offset, os.RWF_NOWAIT)
        except OSError:
            # Not in memory, or a file system that cannot tell. A disk that fails says so in `read`.
            return None
        return bytes(data) if found == size else None

    def read(self, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset` on, fewer at the end.

        Raises:
            StoreUnusable: the storage failed to read them.
            BlobCorrupt: the file has become shorter.
        """
        if self._file is None:
            data = self._store.read(self._digest, offset, size)
        else:
            with _sentences(self._store._where(self._digest), "read"):
                data = os.pread(self._file.fileno(), size, offset)
        # A caller that waits for the rest would wait for ever.
        if len(data) < min(size, self.total - offset):
            raise self._store._corrupt(self._digest)
        return data


class Writer:
    """Writes one blob in pieces. Made by `BlobStore.writing`."""

    def __init__(self, store: BlobStore, partial: Path, file: IO[bytes]) -> None:
        self._store = store
        self._partial = partial
        self._file = file
        self._hashed = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes.

        Raises:
            StoreUnusable: no space, no permission.
        """
        with _sentences(str(self._partial), "written"):
            self._file.write(data)
        self._hashed.update(data)

    def finish(self) -> bytes:
        """Makes it a blob and returns its digest, once it is durable.

        Raises:
            StoreUnusable: no space, no permission, no connection.
        """
        digest = self._hashed.digest()
        with _sentences(str(self._partial), "written"):
            self._file.flush()
            if not self._store._held(digest):
                _force(self._file.fileno())
                self._store._reveal(self._partial, digest)
        return digest


class Incoming:
    """One upload in progress. Its state is the partial file itself, so any number of these may come and go."""

    def __init__(self, store: BlobStore, digest: bytes, total: int) -> None:
        self._store = store
        self._partial = store._partial(digest)
        self.digest = digest
        self.total = total
        # Whether the blob is stored. Once true, it stays true.
        self.complete = store._held(digest)

    @property
    def received(self) -> int:
        """Where to continue."""
        return self.total if self.complete else self._store.received(self.digest)

    def append(self, offset: int, data: bytes) -> int:
        """Appends bytes to what has arrived, and returns how many there are now.

        Does nothing if the blob is stored already.

        Raises:
            BlobRejected: the bytes do not follow, or exceed the announced size.
            StoreUnusable: no space, no permission.
        """
        if self.complete:
            return self.total
        # One writer at a time: a client that lost its connection may be back before its first call is known to be dead.
        with self._store._lock, _sentences(str(self._partial), "written"), self._partial.open("ab") as file:
            present = file.tell()
            if offset == present and present + len(data) <= self.total:
                file.write(data)
                return present + len(data)
        if offset != present:
            raise BlobRejected(f"bytes at {offset} do not follow the {present} that have arrived; ask how far it came")
        raise BlobRejected(f"{present + len(data)} bytes for a blob announced with {self.total}; check what is sent")

    def finish(self) -> None:
        """Checks size and digest and makes it a durable blob. Discards the upload if they do not match.

        Raises:
            BlobRejected: bytes are still missing (those that arrived are kept), or the digest is another one.
            StoreUnusable: no space, no permission, no connection.
        """
        if self.complete:
            return
        try:
            self._finish()
        except FileNotFoundError as error:
            # Another upload of the same blob may have finished first.
            if not self._store.has(self.digest):
                raise StoreUnusable(f"{self._partial} has disappeared; send the blob again") from error
        self.complete = True

    def _finish(self) -> None:
        # Without the lock: hashing takes long, and a partial file of the announced size takes no more bytes.
        with _sentences(str(self._partial), "stored"):
            if self.total == 0:
                self._partial.touch()
            with self._partial.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.total:
                    raise BlobRejected(f"{size} of {self.total} bytes have arrived; continue from there")
                found = hashlib.file_digest(file, "sha256").digest()
                _force(file.fileno())
            if size != self.total or found != self.digest:
                self._partial.unlink()
                raise BlobRejected(
                    f"{size} bytes arrived with the digest {found.hex()}, but {self.total} with {self.digest.hex()} "
                    "were announced; they were discarded, so send the blob again"
                )
            self._store._reveal(self._partial, self.digest)


def open_blobs(url: str, *, staging: Path | None = None) -> BlobStore:
    """Opens the store at an fsspec URL, and makes it if needed.

    Args:
        url: where the blobs are.
        staging: a local folder for uploads in progress. The default is inside a local store; otherwise it is in the
            machine's temporary folder.

    Raises:
        StoreUnusable: there is no such kind of store, a driver is missing, or it cannot be written.
    """
    if url.startswith("s3://"):
        raise StoreUnusable(f"{url} is an S3 store, which needs its settings; open it with `open_store`")
    try:
        filesystem, root = url_to_fs(url)
    except Exception as error:  # Some drivers connect here, and raise what they like.
        raise StoreUnusable(
            f"{url} cannot be opened as a blob store: {_told(error)}; write file:///folder, or an fsspec URL whose "
            "driver is installed"
        ) from error
    if staging is None:
        staging = Path(root) / "incoming" if _is_local(filesystem) else Path(tempfile.gettempdir()) / "tacit-incoming"
    with _made(url):
        if _is_local(filesystem):
            # `parents` would make it with the umask's permissions.
            Path(root).mkdir(parents=True, exist_ok=True, mode=0o700)
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_local(filesystem):
            (Path(root) / "blobs").mkdir(parents=True, exist_ok=True, mode=0o700)
            _force_folder(Path(root))
            if staging.stat().st_dev != (Path(root) / "blobs").stat().st_dev:
                raise StoreUnusable(
                    f"{staging} is on another disk than {root}, so a blob could not get its name in one step; put both "
                    "on one disk"
                )
    return BlobStore(filesystem, root, prepared(staging))


def prepared(staging: Path) -> Path:
    """Makes a local folder for uploads in progress, without those that nobody continued for a week, and returns it.

    Raises:
        StoreUnusable: it cannot be made.
    """
    with _made(str(staging)):
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(staging)
    return staging


def _is_local(filesystem: Any) -> bool:
    return "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,))


def _sweep(staging: Path) -> None:
    """Deletes uploads that nobody continued for a week."""
    for partial in staging.iterdir():
        if partial.stat().st_mtime < time.time() - _STALE_SECONDS:
            partial.unlink(missing_ok=True)


def _force(descriptor: int) -> None:
    os.fsync(descriptor)


def _force_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _told(error: Exception) -> str:
    """What a driver's error says: its name first, because the text of many is empty."""
    return ": ".join(filter(None, (type(error).__name__, shortened(str(error), 200))))


@contextlib.contextmanager
def _made(what: str) -> Iterator[None]:
    try:
        with _sentences(what, "made"):
            yield
    except FileNotFoundError as error:
        # A special file system, as /proc is.
        raise StoreUnusable(f"{what} cannot be made: no folder can be made there; set store_url to another") from error


@contextlib.contextmanager
def _sentences(what: str, verb: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise  # The caller knows what it means.
    except OSError as error:
        raise StoreUnusable(
            f"{what} cannot be {verb}: {error.strerror or error}; check free space, permissions, connection"
        ) from error
