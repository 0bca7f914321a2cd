"""What was fetched by digest, kept for the next time: HOME/cache, one file a blob, oldest use goes first.

A cache only: every file can be deleted at any time, and every read is of a file whose digest was checked when it came.
"""

import contextlib
import os
from pathlib import Path

__all__ = ["BlobCache"]

_MOST_BYTES = 4 * 1024**3


class BlobCache:
    """A folder of blobs."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._most_bytes = most_bytes

    def path(self, digest: bytes) -> Path:
        """Where the blob lies, or would."""
        path = self._folder / digest.hex()
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return path

    def trim(self) -> None:
        """Deletes what was not used for longest, until the rest fits."""
        files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > self._most_bytes:
                path.unlink(missing_ok=True)
