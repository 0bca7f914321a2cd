"""Keeps blobs that were fetched by digest in HOME/cache, one file each. The least recently used one goes first.

It is only a cache: every file may be deleted at any time, and the digest of every file was checked when it arrived. A
blob that is in use while a job runs, such as a backbone of a gigabyte, can be pinned; then no process that trims this
folder or makes room in it deletes the blob. A pin is a lock on an empty file beside the blob, so it ends with its
process.

Certificates of other members are kept in HOME/certificates in the same way. That a certificate is kept there says
nothing about whether it is valid: its digest is checked when it is read, and everything else where it is used.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from tacit.limits import MAX_CERTIFICATE_BYTES

__all__ = ["BlobCache", "CertificateCache", "Pin"]

# One backbone of the largest size, and others beside it.
_MAX_BYTES = 68 * 1024**3
# What stays free under the default bound: this part of the disk, and no more than this many bytes. A tenth of a large
# disk is more than most members have left on it, and a small backbone takes nothing from anybody there.
_FREE_PART = 10
_MAX_FREE_BYTES = 4 * 1024**3
# The bound for certificates. At the usual 1.2 KB, those of fifty thousand members fit.
_MAX_CERTIFICATES_BYTES = 64 * 1024**2
_PIN = ".pin"


class BlobCache:
    """A folder of blobs."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        """Opens the cache in a folder, and makes it if needed.

        Args:
            folder: The folder.
            max_bytes: The most that `trim` leaves. None: 68 GiB, and a tenth of the disk stays free, or 4 GiB
                of a large one.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._given = max_bytes

    def path(self, digest: bytes) -> Path:
        """Returns where the blob is, or would be, and marks it as used."""
        path = self._folder / digest.hex()
        # Either the blob is not there yet, or the disk is read-only and the blob is good all the same.
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def pin(self, digest: bytes) -> "Pin":
        """Keeps the blob of this digest, or its partial file, until the pin is released, from all processes.

        A disk that takes no writes keeps no pin. If the blob is then deleted, it is fetched again.
        """
        return Pin(self._folder / (digest.hex() + _PIN))

    @property
    def max_bytes(self) -> int:
        """The most that `trim` leaves, in bytes."""
        if self._given is not None:
            return self._given
        disk = shutil.disk_usage(self._folder)
        held = sum(size for _, size, _ in self._files())
        kept_free = min(disk.total // _FREE_PART, _MAX_FREE_BYTES)
        return max(0, min(_MAX_BYTES, held + disk.free - kept_free))

    @contextlib.contextmanager
    def room(self, digest: bytes, size: int) -> Iterator[Path]:
        """Makes an empty folder in which to make the blob of this digest, and deletes it when the block ends.

        Other blobs are deleted to make room for `size` bytes. The caller pins the blob, which also keeps the folder,
        and writes at most `size` bytes. The next `trim` deletes a folder that a killed process left.
        """
        self.trim(reserve=size)
        with tempfile.TemporaryDirectory(prefix=f"{digest.hex()}.", dir=self._folder) as made:
            yield Path(made)

    def fits(self, digest: bytes, size: int) -> bool:
        """Whether a pinned blob of `size` bytes fits beside all that is pinned. If so, makes room as `trim` does.

        What has arrived of it counts as a part of it. For a blob that does not fit, nothing is deleted.
        """
        pinned, files, most = self._pinned(), self._files(), self.max_bytes
        arrived = sum(found for _, found, path in files if path.name.startswith(digest.hex()))
        others = sum(found for _, found, path in files if path.name.partition(".")[0] in pinned - {digest.hex()})
        if others + size > most:
            return False
        self.trim(reserve=max(0, size - arrived))
        return True

    def trim(self, *, reserve: int = 0) -> None:
        """Deletes the least recently used blobs that are not pinned, until the rest fits beside `reserve` bytes."""
        pinned, most = self._pinned(), self.max_bytes - reserve
        found, total = [], 0
        for used, size, path in self._files():
            if path.name.partition(".")[0] in pinned:
                total += size
            else:
                found.append((used, size, path))
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > most or path.is_dir():
                _remove(path)

    def clear(self, besides: bytes) -> bool:
        """Deletes every blob but the one of this digest, for a disk that is full of other things.

        Partial files and pinned blobs stay, because they are in use.

        Returns:
            Whether there was anything to delete.
        """
        kept = {besides.hex(), *self._pinned()}
        found = [path for path in self._folder.glob("[0-9a-f]" * 64) if path.name not in kept]
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each file or folder was used last, in nanoseconds, and its bytes."""
        found = []
        for path in self._folder.iterdir():
            # The fetch of another job may just have renamed its file, or another process deleted it.
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, _size(path), path))
        return found

    def _pinned(self) -> set[str]:
        """Returns the names of the pinned blobs, and removes pins that a killed process left."""
        found = set()
        for path in self._folder.glob("*" + _PIN):
            with contextlib.suppress(OSError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.add(path.name.removesuffix(_PIN))
                else:
                    path.unlink(missing_ok=True)
        return found


def _size(path: Path) -> int:
    """Returns the size of a file, or of the files in a folder, in bytes. Raises FileNotFoundError."""
    if not path.is_dir():
        found = path.stat()
        # A file that arrives in pieces has holes.
        return min(found.st_size, found.st_blocks * 512)
    return sum(each.stat().st_size for each in path.iterdir())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Pin:
    """A context manager that marks a blob as in use. Made by `BlobCache.pin`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = _shared(path)

    def release(self) -> None:
        """Allows the blob to be deleted. A second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        with file, contextlib.suppress(OSError):
            # Only the last holder of the lock removes the file.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> "Pin":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _shared(path: Path) -> BinaryIO:
    """Returns the open file under a shared lock. Raises OSError."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            # A process that listed the pins in between may have found this one unlocked, and removed its name.
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            file.close()
            raise
        file.close()


class CertificateCache:
    """Certificates of other members by digest. A disk failure costs no more than fetching them again."""

    def __init__(self, folder: Path, max_bytes: int = _MAX_CERTIFICATES_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def read(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Returns those of these certificates that are here, by digest: DER, at most 4 KiB each."""
        found = {}
        with contextlib.suppress(OSError):
            files = BlobCache(self._folder, self._max_bytes)
            for digest in digests:
                path = files.path(digest)
                try:
                    with path.open("rb") as file:
                        data = file.read(MAX_CERTIFICATE_BYTES + 1)
                except FileNotFoundError:
                    continue
                if hashlib.sha256(data).digest() == digest:
                    found[digest] = data
                else:
                    # The file is damaged, and will be fetched again.
                    path.unlink(missing_ok=True)
        return found

    def keep(self, certificates: Iterable[bytes]) -> None:
        """Stores certificates for the next time. Raises OSError if the disk does not take them."""
        files = BlobCache(self._folder, self._max_bytes)
        for certificate in certificates:
            path = files.path(hashlib.sha256(certificate).digest())
            if not path.exists():
                # The file gets its name only when it is complete.
                partial = path.with_name(path.name + ".partial")
                partial.write_bytes(certificate)
                partial.replace(path)
        files.trim()
