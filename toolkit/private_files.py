"""Whether files and folders that hold secrets are closed to everybody but their owner, for both sides.

The rules, by what a path holds. A missing path breaks none of them: whoever reads it says so.

    check_private      keys, databases and their folders: owned by this process's user, closed to all others
    check_unwritable   certificates and configuration: owned by this user or root, written by nobody else
    check_keys         a folder of keys, each file in it by one of those two
    check_secret       a secret that a supervisor or a container hands in: owned by this user, or by root and then also
                       readable by a group; below /run/secrets everybody may read it, as only the container sees it

Assumptions: root is trusted, and so are the folders above those that are checked. Access control lists are not looked
at. A system without POSIX owners is not checked: there the folder's own permissions protect it.
"""

import os
import shlex
import stat
from pathlib import Path

__all__ = ["NotPrivate", "check_keys", "check_private", "check_secret", "check_unwritable", "user_name"]

# Container runtimes mount secrets here, readable by all in the container.
_MOUNTED = Path("/run/secrets")
_ROOT = 0


class NotPrivate(ValueError):
    """Somebody else owns a file, or may read or change it. The sentence says what to type."""


def check_private(path: Path) -> None:
    """Only this process's user owns, reads and writes it.

    Raises:
        NotPrivate: somebody else may.
        OSError: it cannot be looked at.
    """
    if (status := _status(path)) is None:
        return
    _check_owner(path, status, {os.geteuid()})
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise _open(path, status, "used", "chmod 700" if stat.S_ISDIR(status.st_mode) else "chmod 600")


def check_unwritable(path: Path) -> None:
    """Only this process's user, or root, owns and changes it.

    Raises:
        NotPrivate: somebody else may.
        OSError: it cannot be looked at.
    """
    if (status := _status(path)) is None:
        return
    _check_owner(path, status, {os.geteuid(), _ROOT})
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise _open(path, status, "changed", "chmod go-w")


def check_secret(path: Path) -> None:
    """A secret file that this process is handed.

    Raises:
        NotPrivate: somebody else may change it, or people who need not know it may read it.
        OSError: it cannot be looked at.
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
    """A folder with keys (`*.key`, `key.pem`, and what is half written) and what belongs to them, not below it.

    Raises:
        NotPrivate: the folder or a key is not private, or others may change one of the other files.
        OSError: something cannot be looked at.
    """
    check_private(folder)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_file():
            (check_private if path.name.endswith((".key", "key.pem", ".partial")) else check_unwritable)(path)


def user_name(uid: int) -> str:
    """The name of a user of this machine, or the number as chown and sudo take it."""
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
        f"{path} belongs to another user, {user_name(status.st_uid)}: run this as that user, or take it over with "
        f"`{command} {me} {shlex.quote(str(path))}`"
    )


def _open(path: Path, status: os.stat_result, what: str, command: str) -> NotPrivate:
    return NotPrivate(
        f"{path} may be {what} by others (mode {stat.S_IMODE(status.st_mode):04o}); close it with "
        f"`{command} {shlex.quote(str(path))}`"
    )
