"""What was fetched by digest, kept for the next time: HOME/cache, one file a blob, oldest use goes first.

A cache only: every file can be deleted at any time, and every read is of a file whose digest was checked when it came.
What is in use for as long as a job runs, a backbone of a gigabyte, can be pinned: no process that trims this folder or
makes room in it deletes it then. A pin is a lock on an empty file beside the blob, so that it ends with its process.
Certificates of other members lie in HOME/certificates in the same way. What is kept there says nothing of whether one
is valid: its digest is checked when it is read, and everything else where it is relied on.
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

_MAX_BYTES = 4 * 1024**3
# Of certificates: with the usual 1.2 KB those of fifty thousand members.
_MAX_CERTIFICATES_BYTES = 64 * 1024**2
_PIN = ".pin"


class BlobCache:
    """A folder of blobs."""

    def __init__(self, folder: Path, max_bytes: int = _MAX_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes

    def path(self, digest: bytes) -> Path:
        """Where the blob lies, or would."""
        path = self._folder / digest.hex()
        # It is not there yet; or the disk takes no writes, and what lies there is good all the same.
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def pin(self, digest: bytes) -> "Pin":
        """Keeps the blob of this digest, and what has arrived of it, until the pin is released: also of other processes
        with this folder. A disk that takes no writes keeps no pin; a blob that then goes is fetched again.
        """
        return Pin(self._folder / (digest.hex() + _PIN))

    @property
    def max_bytes(self) -> int:
        """What `trim` leaves at most."""
        return self._max_bytes

    @contextlib.contextmanager
    def room(self, digest: bytes, size: int) -> Iterator[Path]:
        """An empty folder in here for what it takes to make the blob of this digest, gone when the block ends.

        The caller pins the blob, which keeps the folder too, and writes no more than `size` bytes. Others make room for
        them first. A folder that a killed process left goes with the next `trim`.
        """
        self.trim(reserve=size)
        with tempfile.TemporaryDirectory(prefix=f"{digest.hex()}.", dir=self._folder) as made:
            yield Path(made)

    def trim(self, *, reserve: int = 0) -> None:
        """Deletes what was not used for longest and nobody has pinned, until the rest fits beside `reserve` bytes."""
        pinned = self._pinned()
        found, total = [], 0
        for path in self._folder.iterdir():
            # Another job's fetch may just have given its file its final name.
            with contextlib.suppress(FileNotFoundError):
                status, size = path.stat(), _size(path)
                if path.name.partition(".")[0] in pinned:
                    total += size
                else:
                    found.append((status.st_mtime_ns, size, path))
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > self._max_bytes - reserve or path.is_dir():
                _remove(path)

    def clear(self, besides: bytes) -> bool:
        """Makes what room there is to make: the disk is full of other things. Partial files and what is pinned stay,
        they are in use.

        Returns: whether anything but the blob of this digest was there to delete.
        """
        kept = {besides.hex(), *self._pinned()}
        found = [path for path in self._folder.glob("[0-9a-f]" * 64) if path.name not in kept]
        for path in found:
            path.unlink(missing_ok=True)
        return bool(found)

    def _pinned(self) -> set[str]:
        """The names of blobs that are pinned; pins that a killed process left are removed."""
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
    """Of a file, or of the files in a folder, in bytes. Raises: FileNotFoundError."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.iterdir())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Pin:
    """That a blob is in use. Made by `BlobCache.pin`; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._file = _shared(path)

    def release(self) -> None:
        """The blob may go. A second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        with file, contextlib.suppress(OSError):
            # Only the last to go takes the file along.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> "Pin":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _shared(path: Path) -> BinaryIO:
    """The file, open and locked with whoever else has it locked. Raises: OSError."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            # Whoever looked at the pins in between may have found nobody there, and removed the name.
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            file.close()
            raise
        file.close()


class CertificateCache:
    """Certificates of other members by digest. Whatever the disk does, it costs no more than fetching them again."""

    def __init__(self, folder: Path, max_bytes: int = _MAX_CERTIFICATES_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def read(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of these that are here, by digest: DER, at most 4 KiB each."""
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
                    # Damaged: it is fetched again.
                    path.unlink(missing_ok=True)
        return found

    def keep(self, certificates: Iterable[bytes]) -> None:
        """For the next time. Raises: OSError: the disk does not take them."""
        files = BlobCache(self._folder, self._max_bytes)
        for certificate in certificates:
            path = files.path(hashlib.sha256(certificate).digest())
            if not path.exists():
                # Under its name only when it is whole.
                partial = path.with_name(path.name + ".partial")
                partial.write_bytes(certificate)
                partial.replace(path)
        files.trim()
