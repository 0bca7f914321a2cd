"""What was fetched by digest, kept for the next time: HOME/cache, one file a blob, oldest use goes first.

A cache only: every file can be deleted at any time, and every read is of a file whose digest was checked when it came.
Certificates of other members lie in HOME/certificates in the same way. What is kept there says nothing of whether one
is valid: its digest is checked when it is read, and everything else where it is relied on.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from tacit.limits import MOST_CERTIFICATE_BYTES

__all__ = ["BlobCache", "CertificateCache"]

_MOST_BYTES = 4 * 1024**3
# Of certificates: with the usual 1.2 KB those of fifty thousand members.
_MOST_CERTIFICATES_BYTES = 64 * 1024**2


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


class CertificateCache:
    """Certificates of other members by digest. Whatever the disk does, it costs no more than fetching them again."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_CERTIFICATES_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def read(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of these that are here, by digest: DER, at most 4 KiB each."""
        found = {}
        with contextlib.suppress(OSError):
            files = BlobCache(self._folder, self._most_bytes)
            for digest in digests:
                path = files.path(digest)
                try:
                    with path.open("rb") as file:
                        data = file.read(MOST_CERTIFICATE_BYTES + 1)
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
        files = BlobCache(self._folder, self._most_bytes)
        for certificate in certificates:
            path = files.path(hashlib.sha256(certificate).digest())
            if not path.exists():
                # Under its name only when it is whole.
                partial = path.with_name(path.name + ".partial")
                partial.write_bytes(certificate)
                partial.replace(path)
        files.trim()
