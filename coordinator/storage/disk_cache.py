"""Copies of blobs on this machine's disk, up to a bound. They may be deleted at any time.

Guarantees: a file is used only after its bytes had its digest in this process. The folder stays below the bound; what
was used longest ago goes first. Several processes may share the folder. A disk that takes no copy, or that fails, costs
no blob: it is read from its store.
"""

import contextlib
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DiskCache"]

# A file that is being written and nobody finished.
_STALE_SECONDS = 24 * 3600.0


class DiskCache:
    """A folder of blobs, named by their digests."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Uses a folder, which it makes (0700)."""
        self.folder = folder
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._checked: set[bytes] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(self, digest: bytes) -> Path | None:
        """Returns the file of a blob, or None, also if the disk fails. A file with other bytes is deleted."""
        path = self.folder / digest.hex()
        try:
            if digest not in self._checked:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").digest() != digest:
                        path.unlink(missing_ok=True)
                        return None
                self._checked.add(digest)
            os.utime(path)
        except OSError:
            return None
        return path

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """Yields the path of a new file, for `keep`. What was not kept is deleted."""
        path = self.folder / f"new-{uuid.uuid4().hex}"
        # Somebody who needed the room may have deleted the folder.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def keep(self, path: Path, digest: bytes) -> None:
        """Takes a file whose bytes have this digest, and lets others go until all fit.

        A larger one is not kept, nor one that the disk refuses (the folder may be a disk of its own).
        """
        with contextlib.suppress(OSError):
            if path.stat().st_size > self.max_bytes:
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(path.stat().st_size)
            path.replace(self.folder / digest.hex())
            self._checked.add(digest)

    def drop(self, digest: bytes) -> None:
        """Deletes a blob's copy. Raises OSError: the disk does not."""
        self._checked.discard(digest)
        (self.folder / digest.hex()).unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        with self._lock:
            files = list[tuple[float, int, Path]]()
            for entry in os.scandir(self.folder):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    if entry.name.startswith("new-"):
                        if found.st_mtime < time.time() - _STALE_SECONDS:
                            os.unlink(entry.path)
                        continue
                    files.append((found.st_mtime, found.st_size, Path(entry.path)))
            total = size + sum(each for _, each, _ in files)
            for _, each, path in sorted(files):
                if total <= self.max_bytes:
                    return
                path.unlink(missing_ok=True)
                with contextlib.suppress(ValueError):
                    self._checked.discard(bytes.fromhex(path.name))
                total -= each
