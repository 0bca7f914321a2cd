"""Small in-memory file systems that a test can fill, empty and make read-only. Needs Linux and root."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

__all__ = ["SmallDisk", "needs_small_disks"]


def _may_mount() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    # In a container, root may lack the right to mount.
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_small_disks = pytest.mark.skipif(
    not _may_mount(), reason="`mount -t tmpfs`, which makes a small disk, needs root: run this test as root"
)


class SmallDisk:
    """A file system of `size` bytes, mounted at a folder. It keeps the folder's content."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        held = folder.with_name(f"{folder.name}.held")
        if folder.exists():
            folder.rename(held)
        folder.mkdir(mode=0o700, parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder))
        if held.exists():
            _run("cp", "-a", f"{held}/.", str(folder))
            _run("rm", "-rf", str(held))
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Fills the disk to the last byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (2**20, 4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        free = os.statvfs(self.folder).f_bavail
        assert free == 0, f"{free} blocks of {self.folder} are still free"

    def empty(self) -> None:
        """Frees the space that `fill` took, unless a member's cache has deleted it to make room."""
        self._filler.unlink(missing_ok=True)

    def read_only(self, on: bool = True) -> None:
        """Makes the disk read-only, or writable again. No file on it may be open for writing."""
        _run("mount", "-o", f"remount,{'ro' if on else 'rw'}", str(self.folder))

    def close(self) -> None:
        """Unmounts the disk and discards its content, even while it is in use."""
        done = subprocess.run(["umount", "--lazy", str(self.folder)], capture_output=True, check=False)
        assert done.returncode == 0 or not self.folder.is_mount(), os.strerror(errno.EBUSY)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
