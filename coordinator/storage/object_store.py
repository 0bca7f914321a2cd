"""Blobs in an S3 bucket: `BlobStore` with the same promises, without locks and without a local clock.

    PREFIX/blobs/ab/SHA256/COPY     one copy of a blob; COPY is random, and no key is written twice
    PREFIX/checks/RANDOM            what `check` writes and deletes
    PREFIX/owners/MARK              which database uses the prefix (`coordinator.storage.ownership`)

    FOLDER/incoming/                uploads in progress, on this machine's disk: object stores cannot append
    FOLDER/cache/                   copies of what was read or written, up to a bound

Guarantees, beside those of `coordinator.storage.blobs`:

- What is read has the requested digest. A store that returns other bytes is found and named; another copy is read
  instead, if there is one. Only a blob that has no room in the cache is read unverified by `read` and `ranges`.
- **Nothing that is needed is deleted, also not by a request that arrives late.** To hold a blob makes another copy of
  it, unless the newest one is younger than `fresh` seconds. Pruning deletes single copies, by their keys, that are
  older than a moment before it read the rows. So a deletion that hangs in a network, or that a killed process had sent,
  finds only the old copy. A lock could not do that: it ends with the process, and the request does not.
- Ages are the store's: when it received an object, and its own time. This machine's clock plays no part.

No request is conditional (`If-None-Match`): a key of its own for each copy needs none, and not all stores know them.
"""

import contextlib
import hashlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.storage.blobs import BlobStore, Listed, Ranges, Reader, open_blobs, prepared
from coordinator.storage.bucket import PART_BYTES, Bucket, Object, place_of
from coordinator.storage.disk_cache import DiskCache
from coordinator.storage.errors import BlobCorrupt, BlobMissing, BlobRejected, StoreUnusable
from coordinator.storage.owner_mark import OWNERS, OwnerMark, mark_of

__all__ = ["FRESH_SECONDS", "SLACK_SECONDS", "ObjectStore", "open_store"]

# A copy below this age needs no other one when it is held.
FRESH_SECONDS = 15 * 60.0
# The store's machines may disagree by less than this about the time. With FRESH_SECONDS well below the shortest grace
# period, an hour.
SLACK_SECONDS = 5 * 60.0
# From this difference on, an operator should set the machine's clock. S3 refuses requests at 15 minutes.
_SKEW_SECONDS = 60.0
_LOCKS = 64


def open_store(config: CoordinatorConfig, folder: CoordinatorFolder) -> BlobStore:
    """Opens the store that a configuration names.

    Raises:
        StoreUnusable: it cannot be opened. An S3 store is asked nothing before `ObjectStore.check`.
    """
    if config.store_url.startswith("memory:"):
        raise StoreUnusable(
            f"store_url is {config.store_url}, which keeps nothing when this process ends; set it to a folder or to "
            "s3://BUCKET/PREFIX"
        )
    if not config.store_url.startswith("s3://"):
        return open_blobs(config.store_url)
    place = place_of(
        config.store_url,
        endpoint=config.s3_endpoint,
        region=config.s3_region,
        ca_file=str(folder.path / config.s3_ca_file) if config.s3_ca_file else "",
        path_style=config.s3_path_style,
    )
    if place.ca_file and not Path(place.ca_file).is_file():
        raise StoreUnusable(f"s3_ca_file names {place.ca_file}, which is not a file; correct it in coordinator.toml")
    return ObjectStore(Bucket(place), folder.store, int(config.store_cache_gb * 1e9))


class ObjectStore(BlobStore):
    """A content-addressed store in a bucket."""

    def __init__(self, bucket: Bucket, folder: Path, cache_bytes: int, *, fresh: float = FRESH_SECONDS) -> None:
        """Uses a bucket, and a local folder that it makes.

        Args:
            bucket: where the blobs are.
            folder: local, for uploads in progress and copies.
            cache_bytes: how much of the disk copies may take.
            fresh: seconds for which a copy needs no other one when it is held.
        """
        super().__init__(None, bucket.url(), prepared(folder / "incoming"))
        self._bucket = bucket
        self._cache = DiskCache(folder / "cache", cache_bytes)
        self._fresh = fresh
        self._locks = folder
        # So that many members that ask for a new version fetch it once.
        self._fetching = [threading.Lock() for _ in range(_LOCKS)]

    # ---- writing -------------------------------------------------------------------------------------------

    def put(self, data: bytes | memoryview) -> bytes:
        digest = hashlib.sha256(data).digest()
        if self._held(digest):
            return digest
        with contextlib.suppress(OSError), self._cache.making() as path:
            path.write_bytes(data)
            self._store(path, digest)
            self._cache.keep(path, digest)
            return digest
        # The cache's disk takes no copy.
        with self.writing() as writer:
            writer.write(data)
            return writer.finish()

    def remove(self, digest: bytes) -> bool:
        found = self._copies(digest)
        for each in found:
            self._bucket.delete(each.key)
        self._drop(digest)
        return bool(found)

    def _held(self, digest: bytes) -> bool:
        found = self._copies(digest)
        if not found:
            return False
        newest = found[-1]
        if newest.modified > self._bucket.now() - self._fresh:
            return True
        # False: pruning has deleted the old copy meanwhile, so that the blob is written again.
        return self._bucket.copy(newest, self._new_key(digest))

    def _store(self, path: Path, digest: bytes) -> None:
        began = time.monotonic()
        self._bucket.put_file(self._new_key(digest), path)
        # The age of what comes in parts counts from its beginning.
        if time.monotonic() - began > self._fresh / 2 and not self._held(digest):
            raise StoreUnusable(
                f"{self._where(digest)} was removed by a pruning, because writing it took longer than the grace "
                "period; store it again, and raise prune_grace_hours if that takes as long"
            )

    def _reveal(self, partial: Path, digest: bytes) -> None:
        self._store(partial, digest)
        self._cache.keep(partial, digest)
        partial.unlink(missing_ok=True)

    # ---- pruning -------------------------------------------------------------------------------------------

    def clock(self, now: float) -> float:
        return self._bucket.now() - SLACK_SECONDS

    def listed(self) -> Iterator[Listed]:
        for digest, found in self._each():
            yield Listed(digest, sum(each.size for each in found), found[-1].modified)

    def measure(self) -> None:
        return None

    def remove_old(self, digest: bytes, before: float) -> bool:
        found = self._copies(digest)
        if not found or found[-1].modified >= before:
            return False
        for each in found:
            self._bucket.delete(each.key)
        self._drop(digest)
        return True

    def tidy(self, before: float, proceed: Callable[[], None] = lambda: None) -> int:
        freed = 0
        for _, found in self._each():
            for each in found[:-1]:
                if each.modified < before:
                    proceed()
                    self._bucket.delete(each.key)
                    freed += each.size
        proceed()
        self._bucket.abort_uploads(before)
        return freed

    # ---- marks of databases --------------------------------------------------------------------------------

    def marks(self) -> list[OwnerMark] | None:
        found = list[OwnerMark]()
        for each in self._bucket.each(OWNERS):
            mark = mark_of(each.key, each.modified)
            if mark is None:
                raise StoreUnusable(
                    f"{self._bucket.url(each.key)} is no mark that this software writes; use the newer software that "
                    "wrote it, or delete that object if nobody uses the prefix"
                )
            found.append(mark)
        return found

    def write_mark(self, mark: OwnerMark) -> None:
        self._bucket.put(mark.key, b"")

    def remove_mark(self, mark: OwnerMark) -> None:
        self._bucket.delete(mark.key)

    # ---- reading -------------------------------------------------------------------------------------------

    def has(self, digest: bytes) -> bool:
        return bool(self._copies(digest))

    def size(self, digest: bytes) -> int:
        self._path(digest)
        cached = self._cache.find(digest)
        if cached is not None:
            with contextlib.suppress(FileNotFoundError):
                return cached.stat().st_size
        return self._newest(digest).size

    def get(self, digest: bytes) -> bytes:
        with self._opened(digest) as file:
            if file is not None:
                return bytes(file.read())
        data = bytearray()
        self._download(digest, data.extend, data.clear)
        return bytes(data)

    @contextlib.contextmanager
    def reading(self, digest: bytes) -> Iterator[Reader]:
        # What is read once, by a backup, does not push out what members ask for.
        path = self._cache.find(digest)
        if path is not None:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                yield Reader(self, digest, file)
                return
        yield Reader(self, digest, _Stream(self._bucket, self._newest(digest)))

    def read(self, digest: bytes, offset: int, size: int) -> bytes:
        total = self.size(digest)
        if not 0 <= offset <= total or size < 0:
            raise BlobRejected(f"offset {offset} is outside the blob of {total} bytes; start again at 0")
        end = min(offset + size, total)
        if end == offset:
            return b""
        with self._opened(digest) as file:
            if file is not None:
                return os.pread(file.fileno(), end - offset, offset)
        try:
            return self._bucket.read(self._newest(digest).key, offset, end - offset)
        except FileNotFoundError as error:
            raise self._missing(digest) from error

    def ranges(self, digest: bytes, *, keep_open: bool = True) -> Ranges:
        with self._opened(digest) as file:
            if file is not None:
                kept = os.fdopen(os.dup(file.fileno()), "rb", buffering=0) if keep_open else None
                return Ranges(self, digest, os.fstat(file.fileno()).st_size, kept)
        return _Remote(self, digest, self._newest(digest))

    # ---- before serving ------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        here, there = time.time(), self._bucket.now()
        key = f"checks/{uuid.uuid4().hex}"
        data = key.encode()
        self._bucket.put(key, data)
        try:
            found = self._bucket.objects(key)
            with contextlib.suppress(FileNotFoundError):
                if len(found) == 1 and self._bucket.read(key, 1, len(data) - 2) == data[1:-1]:
                    self._bucket.try_parts(key)
                    return self._advice(here - there)
        finally:
            self._bucket.delete(key)
        raise StoreUnusable(
            f"{self._bucket.url()} does not return what was just written to it; use a store with read-after-write "
            "consistency, and no cache before it"
        )

    def _advice(self, ahead: float) -> list[str]:
        said = []
        if abs(ahead) > _SKEW_SECONDS:
            which = "ahead of" if ahead > 0 else "behind"
            said.append(
                f"this machine's clock is {abs(ahead):.0f} s {which} the store's; set it (NTP), because S3 refuses "
                "requests from 900 s on"
            )
        if self._bucket.versioned():
            said.append(
                f"the bucket {self._bucket.place.bucket} keeps what is deleted (versioning), and with it synthetic "
                "text that a member withdrew; let a lifecycle rule expire noncurrent versions"
            )
        return said

    # ---- inside --------------------------------------------------------------------------------------------

    def _path(self, digest: bytes) -> str:
        if len(digest) != 32:
            raise BlobRejected(f"a digest has 32 bytes, not {len(digest)}; send the SHA-256 of the blob")
        text = digest.hex()
        return f"blobs/{text[:2]}/{text}/"

    def _where(self, digest: bytes) -> str:
        return self._bucket.url(self._path(digest))

    def _new_key(self, digest: bytes) -> str:
        return self._path(digest) + uuid.uuid4().hex

    def _copies(self, digest: bytes) -> list[Object]:
        """The copies of a blob, the newest last."""
        return sorted(self._bucket.objects(self._path(digest)), key=_age)

    def _newest(self, digest: bytes) -> Object:
        found = self._copies(digest)
        if not found:
            raise self._missing(digest)
        return found[-1]

    def _each(self) -> Iterator[tuple[bytes, list[Object]]]:
        """Every blob with its copies, the newest last."""
        for name, found in itertools.groupby(self._bucket.each("blobs/"), key=lambda each: each.key.split("/")[2:3]):
            with contextlib.suppress(ValueError):
                digest = bytes.fromhex("".join(name))
                if len(digest) == 32:
                    yield digest, sorted(found, key=_age)

    @contextlib.contextmanager
    def _opened(self, digest: bytes) -> Iterator[Any]:
        """Opens the verified local copy of a blob, which it makes if need be; None if it can have none."""
        path = self._local_copy(digest)
        if path is None:
            yield None
            return
        try:
            file = path.open("rb")
        except FileNotFoundError:
            # Another process needed the room.
            yield None
            return
        with file:
            yield file

    def _local_copy(self, digest: bytes) -> Path | None:
        self._path(digest)
        with self._fetching[digest[0] % _LOCKS]:
            path = self._cache.find(digest)
            if path is not None or self._newest(digest).size > self._cache.max_bytes:
                return path
            # A disk without room for a copy costs no member its blob.
            with contextlib.suppress(OSError), self._cache.making() as made:
                with made.open("wb") as file:
                    self._download(digest, file.write, lambda: (file.seek(0), file.truncate()))
                self._cache.keep(made, digest)
            return self._cache.find(digest)

    def _download(self, digest: bytes, write: Any, restart: Any) -> None:
        """Writes a blob's bytes, verified at the end. A copy with other bytes is passed over for the one before it."""
        damaged = None
        for copy in reversed(self._copies(digest)):
            restart()
            hashed = hashlib.sha256()
            try:
                for offset in range(0, copy.size, PART_BYTES):
                    piece = self._bucket.read(copy.key, offset, min(PART_BYTES, copy.size - offset))
                    hashed.update(piece)
                    write(piece)
            except FileNotFoundError:
                continue
            if hashed.digest() == digest:
                if damaged is not None:
                    # Pruning leaves the newest copy alone. A store that takes nothing still lets this one be read.
                    with contextlib.suppress(StoreUnusable):
                        self._bucket.copy(copy, self._new_key(digest))
                return
            damaged = damaged or copy
        if damaged is None:
            raise self._missing(digest)
        raise BlobCorrupt(
            f"{self._bucket.url(damaged.key)} is damaged: the store returns bytes that do not have the digest in its "
            "name; delete that object and upload the blob again, or restore a backup"
        )

    def _drop(self, digest: bytes) -> None:
        try:
            self._cache.drop(digest)
        except OSError as error:
            raise StoreUnusable(
                f"the copy of {digest.hex()} in {self._cache.folder} cannot be deleted: {error.strerror}; check that "
                "disk, or delete the folder"
            ) from error

    def _missing(self, digest: bytes) -> BlobMissing:
        return BlobMissing(f"there is no blob {digest.hex()} in {self._bucket.url()}; upload it first")


class _Remote(Ranges):
    """Reads anywhere in a blob without a local copy, with one request for each piece."""

    def __init__(self, store: ObjectStore, digest: bytes, source: Object) -> None:
        super().__init__(store, digest, source.size, None)
        self._objects, self._source = store, source

    def read(self, offset: int, size: int) -> bytes:
        wanted = min(size, self.total - offset)
        if wanted <= 0:
            return b""
        try:
            data = self._objects._bucket.read(self._source.key, offset, wanted)
        except FileNotFoundError:
            # Pruning left only a newer copy.
            self._source = self._objects._newest(self._digest)
            try:
                data = self._objects._bucket.read(self._source.key, offset, wanted)
            except FileNotFoundError as error:
                raise self._objects._missing(self._digest) from error
        if len(data) != wanted:
            raise self._objects._corrupt(self._digest)
        return data


class _Stream:
    """Reads an object from beginning to end, in pieces of `PART_BYTES`."""

    def __init__(self, bucket: Bucket, source: Object) -> None:
        self._bucket = bucket
        self._source = source
        self._at = 0
        self._ahead = b""

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, fewer at the end."""
        while len(self._ahead) < size and self._at < self._source.size:
            wanted = min(PART_BYTES, self._source.size - self._at)
            try:
                piece = self._bucket.read(self._source.key, self._at, wanted)
            except FileNotFoundError as error:
                # `Reader.read` makes a sentence of it.
                raise OSError(0, "it was deleted meanwhile") from error
            if len(piece) != wanted:
                raise OSError(0, "the store returns fewer bytes than it has")
            self._at += wanted
            self._ahead += piece
        piece, self._ahead = self._ahead[:size], self._ahead[size:]
        return piece


def _age(found: Object) -> tuple[float, str]:
    return found.modified, found.key
