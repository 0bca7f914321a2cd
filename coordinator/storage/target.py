"""The folder that a restore writes into: nothing in it leads out of it.

Guarantees: `write_secret` creates files only below the folder, even while others write there: it opens each folder on
the way by its own name, and never through a link. `check_no_links` finds links before the rest of a restore (database,
blobs, the mark), which opens files by path. That check holds as long as nobody else writes into the folder.
"""

import contextlib
import os
import stat
from pathlib import Path, PurePosixPath

from coordinator.storage.errors import BackupRefused

__all__ = ["check_no_links", "write_secret"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_no_links(folder: Path) -> None:
    """Raises BackupRefused if anything below the folder is a symbolic link. The folder itself may be one."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            if path.is_symlink():
                raise _link(path)


def write_secret(folder: Path, name: str, data: bytes) -> None:
    """Writes folder/name (0600) completely or not at all, and to the disk before it returns. An equal file stays.

    Args:
        name: a relative path. Missing folders in it are made (0700).

    Raises:
        BackupRefused: a link is on the way, or another file is in its place.
        OSError: the file cannot be written.
    """
    *between, last = PurePosixPath(name).parts
    at, path = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), folder
    try:
        for part in between:
            path /= part
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=at)
            try:
                below = os.open(part, _FOLDER, dir_fd=at)
            except NotADirectoryError as error:  # O_NOFOLLOW and O_DIRECTORY raise it for a link too.
                raise (_link(path) if path.is_symlink() else error) from None
            os.close(at)
            at = below
        _write(at, path / last, last, data)
    finally:
        os.close(at)


def _write(at: int, path: Path, name: str, data: bytes) -> None:
    if _is_there(at, path, name, data):
        return
    partial = f"{name}.partial"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial, dir_fd=at)  # Left by a killed restore, or a link, whose target stays.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o600, dir_fd=at), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, name, src_dir_fd=at, dst_dir_fd=at)
    os.fsync(at)


def _is_there(at: int, path: Path, name: str, data: bytes) -> bool:
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(found.st_mode):
        raise _link(path)
    if stat.S_ISREG(found.st_mode) and found.st_size == len(data):
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at), "rb") as file:
            if file.read(len(data) + 1) == data:
                return True
    raise BackupRefused(f"{path} exists with other content; name a new folder")


def _link(path: Path) -> BackupRefused:
    return BackupRefused(
        f"{path} is a symbolic link, and a restore never writes into a folder with links; remove it, or name a new "
        "folder (store_url and database_url may point elsewhere)"
    )
