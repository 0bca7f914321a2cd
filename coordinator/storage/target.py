"""The folder that a restore writes into: nothing in it leads out of it.

Guarantees: `write_secret` creates files below the folder and nowhere else, even while others write there: it opens
every folder on the way by its own name, and never through a link. `check_no_links` finds links before the rest of a
restore (database, blobs, the mark), which opens files by path: it holds while nobody else writes into the folder.
"""

import contextlib
import os
import stat
from pathlib import Path, PurePosixPath

from coordinator.storage.errors import BackupRefused

__all__ = ["check_no_links", "write_secret"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_no_links(folder: Path) -> None:
    """Raises: BackupRefused: something below the folder is a symbolic link. The folder itself may be one."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            if path.is_symlink():
                raise _link(path)


def write_secret(folder: Path, name: str, data: bytes) -> None:
    """Writes folder/name (0600), whole or not at all, and on the disk before it returns. An equal file stays.

    name: a relative path; its folders are made (0700) where they are missing.

    Raises:
        BackupRefused: a link on the way, or another file in its place. OSError.
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
            except NotADirectoryError as error:  # What O_NOFOLLOW and O_DIRECTORY say of a link, too.
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
        os.unlink(partial, dir_fd=at)  # A killed restore's, or a link: what it points to stays.
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
    raise BackupRefused(f"{path} is there already and is another one; name a new folder")


def _link(path: Path) -> BackupRefused:
    return BackupRefused(
        f"{path} is a symbolic link, and a restore writes into no folder with links; remove it, or name a new folder "
        "(store_url and database_url can name places elsewhere)"
    )
