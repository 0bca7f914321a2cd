"""Checks, on both sides, that only their owner can use files and folders that hold secrets.

Each check has the rules for one kind of path. A missing path passes all of them, because the code that reads it reports
that.

    check_private      keys, databases and their folders: owned by this process's user, closed to all others
    check_unwritable   certificates and configuration: owned by this user or root, writable by nobody else
    check_keys         a folder of keys: each file in it by one of the two rules above
    check_secret       a secret from a supervisor or container: owned by this user, or by root and then also readable by
                       a group; below /run/secrets anybody may read it, because only the container sees it

Assumptions: root is trusted, and so are the folders above the checked ones. Access control lists are not checked. On a
system without POSIX owners nothing is checked; there the folder's own permissions must protect it.
"""

import os
import shlex
import stat
from pathlib import Path

__all__ = ["NotPrivate", "check_keys", "check_private", "check_secret", "check_unwritable", "user_name"]

# Container runtimes mount secrets here, readable by all users in the container.
_MOUNTED = Path("/run/secrets")
_ROOT = 0


class NotPrivate(ValueError):
    """Somebody else owns a file, or may read or change it. The text says what to type."""


def check_private(path: Path) -> None:
    """Checks that only this process's user owns, reads and writes a path.

    Raises:
        NotPrivate: somebody else does or may.
        OSError: its status cannot be read.
    """
    if (status := _status(path)) is None:
        return
    _check_owner(path, status, {os.geteuid()})
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise _open(path, status, "used", "chmod 700" if stat.S_ISDIR(status.st_mode) else "chmod 600")


def check_unwritable(path: Path) -> None:
    """Checks that only this process's user or root owns and changes a path.

    Raises:
        NotPrivate: somebody else does or may.
        OSError: its status cannot be read.
    """
    if (status := _status(path)) is None:
        return
    _check_owner(path, status, {os.geteuid(), _ROOT})
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise _open(path, status, "changed", "chmod go-w")


def check_secret(path: Path) -> None:
    """Checks a secret file that something else provides for this process.

    Raises:
        NotPrivate: somebody else may change it, or too many may read it.
        OSError: its status cannot be read.
    """
    if (status := _status(path)) is None:
        return
    _check_owner(path, status, {os.geteuid(), _ROOT})
    mode = stat.S_IMODE(status.st_mode)
    if path.is_relative_to(_MOUNTED):
        refused, command = 0o022, "chmod go-w"
    elif status.st_uid == os.geteuid():
        refused, command = 0o077, "chmod 600"
    else:
        refused, command = 0o027, "sudo chmod 440"
    if mode & refused:
        raise _open(path, status, "used", command)


def check_keys(folder: Path) -> None:
    """Checks a folder of keys (`*.key`, `key.pem` and partial files) and the other files in it, but no subfolders.

    Raises:
        NotPrivate: the folder or a key is not private, or others may change one of the other files.
        OSError: a status cannot be read.
    """
    check_private(folder)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_file():
            (check_private if path.name.endswith((".key", "key.pem", ".partial")) else check_unwritable)(path)


def user_name(uid: int) -> str:
    """The name of a user of this machine, or `#` and the number for a user without a name."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _status(path: Path) -> os.stat_result | None:
    if not hasattr(os, "geteuid"):
        return None
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _check_owner(path: Path, status: os.stat_result, allowed: set[int]) -> None:
    if status.st_uid in allowed:
        return
    command = "sudo chown -R" if stat.S_ISDIR(status.st_mode) else "sudo chown"
    me = user_name(os.geteuid()).removeprefix("#")
    raise NotPrivate(
        f"{path} belongs to another user, {user_name(status.st_uid)}; run this as that user, or take it over with "
        f"`{command} {me} {shlex.quote(str(path))}`"
    )


def _open(path: Path, status: os.stat_result, what: str, command: str) -> NotPrivate:
    return NotPrivate(
        f"{path} can be {what} by others (mode {stat.S_IMODE(status.st_mode):04o}); close it with "
        f"`{command} {shlex.quote(str(path))}`"
    )
