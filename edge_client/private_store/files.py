"""The folder HOME/private, and the only way in which its files are created, changed and deleted.

    private/                0700
      .lock                 held by the one process that uses the store
      JOB/                  0700
        state               the committed state, if there is one yet
        staged-TOKEN        a trained state, not yet known to be part of a sum

Guarantees: a file is there as a whole or not at all, and is on the disk when a call returns (assuming that the disk
honours fsync). A process may be killed at every one of `POINTS`.
"""

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_client.private_store.container import TOKEN
from edge_client.private_store.errors import StoreBusy, StoreError, StoreUnusable, StoreUnwritable
from tacit.identity import name_is_valid
from toolkit.durable import FILE_STEPS, Faults, no_faults, sync_folder
from toolkit.private_files import NotPrivate, check_private

__all__ = [
    "POINTS",
    "check_owner",
    "jobs_in",
    "lock",
    "make_folder",
    "moved",
    "private_folder",
    "read",
    "remove_folder",
    "removed",
    "staged_in",
    "state_file",
    "sweep",
    "unreadable",
    "written",
]

_STAGED, _PARTIAL = "staged-", ".partial"
_IS_TOKEN = re.compile(TOKEN).fullmatch

# Points at which a process may be killed; `toolkit.durable` explains them.
POINTS = (
    "folder.making",
    "folder.made",
    *(f"stage.{step}" for step in FILE_STEPS),
    "commit.renaming",
    "commit.renamed",
    "commit.folder-synced",
    "discard.removing",
    "discard.removed",
    "discard.folder-synced",
    *(f"restore.{step}" for step in FILE_STEPS),
    *(f"rekey.{step}" for step in FILE_STEPS),
)


def private_folder(home: Path) -> Path:
    """The folder HOME/private."""
    return home / "private"


def state_file(home: Path, job: str, token: str | None = None) -> Path:
    """The path HOME/private/JOB/state, or that of the state staged under a token.

    Raises:
        StoreError: the job's name is not valid.
        ValueError: the token is not valid, which is a bug of ours.
    """
    if not name_is_valid(job):
        raise StoreError(f"{job!r} is not the name of a job; `edge_client private list` shows the jobs")
    if token is not None and _IS_TOKEN(token) is None:
        raise ValueError(f"{token!r} is not a token; use lower case letters, digits, dot, dash, underscore")
    return private_folder(home) / job / ("state" if token is None else f"{_STAGED}{token}")


def jobs_in(home: Path) -> list[str]:
    """Names of the jobs that have a folder, sorted.

    Raises:
        StoreUnusable: the folder is open to others, or cannot be read.
    """
    folder = private_folder(home)
    check_owner(folder)
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and name_is_valid(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def staged_in(home: Path, job: str) -> list[str]:
    """Tokens of the staged states, sorted."""
    names = (path.name.removeprefix(_STAGED) for path in state_file(home, job).parent.glob(f"{_STAGED}*"))
    # Leaves out files that somebody else put there.
    return sorted(name for name in names if _IS_TOKEN(name))


def check_owner(folder: Path) -> None:
    """Checks that only the owner can read the folder, if it exists.

    Raises:
        StoreUnusable: others can read it.
    """
    try:
        check_private(folder)
    except NotPrivate as error:
        raise StoreUnusable(f"{error}. Others who read it may know your vocabulary") from error
    except OSError as error:
        raise unreadable(folder, error) from error


def lock(home: Path) -> int:
    """Takes the lock and returns its descriptor. The kernel frees the lock when the process ends, however it ends.

    Raises:
        StoreBusy: another process holds the lock.
        StoreUnusable, StoreUnwritable: the folder cannot be used.
    """
    folder = private_folder(home)
    make_folder(folder)
    check_owner(folder)
    with _sentences(folder):
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise _unwritable(folder, error) from error
        raise StoreBusy(
            f"{folder} is in use by another process; stop the `edge_client run` of this member and try again"
        ) from error
    return descriptor


def make_folder(folder: Path, faults: Faults = no_faults) -> None:
    """Creates a folder (0700) if it does not exist. Its name is on the disk when this returns.

    Raises:
        StoreUnwritable: the disk does not take it.
    """
    with _sentences(folder):
        faults("folder.making")
        folder.mkdir(mode=0o700, exist_ok=True)
        faults("folder.made")
        # Needed for an existing folder too: the process that created it may have been killed before this line.
        sync_folder(folder.parent)


def read(path: Path) -> bytes | None:
    """Reads a whole file. None: it does not exist.

    Raises:
        StoreUnusable: it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> StoreUnusable:
    """Makes the error for a file that cannot be read."""
    return StoreUnusable(f"{path} cannot be read: {error.strerror}")


def written(path: Path, pieces: Iterable[bytes], point: str, faults: Faults = no_faults) -> None:
    """Writes a file (0600), replacing an existing one.

    Args:
        path: the file.
        pieces: its content.
        point: first part of the names of its points; one of FILE_STEPS follows.
        faults: called at each point.

    Raises:
        StoreUnwritable: the disk does not take it. What was there is still there.
    """
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    with _sentences(path):
        try:
            faults(f"{point}.opening")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                faults(f"{point}.opened")
                for piece in pieces:
                    file.write(piece)
                file.flush()
                faults(f"{point}.written")
                os.fsync(file.fileno())
            faults(f"{point}.synced")
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        faults(f"{point}.renamed")
        sync_folder(path.parent)
    faults(f"{point}.folder-synced")


def moved(source: Path, target: Path, faults: Faults = no_faults) -> None:
    """Replaces a file by another one of the same folder.

    Raises:
        StoreUnwritable: the disk does not allow it. Both are unchanged.
    """
    with _sentences(target):
        faults("commit.renaming")
        source.replace(target)
        faults("commit.renamed")
        sync_folder(target.parent)
    faults("commit.folder-synced")


def removed(path: Path, faults: Faults = no_faults) -> None:
    """Deletes a file, if it exists.

    Raises:
        StoreUnwritable: the disk does not allow it.
    """
    with _sentences(path):
        faults("discard.removing")
        try:
            path.unlink()
        except FileNotFoundError:
            return
        faults("discard.removed")
        sync_folder(path.parent)
    faults("discard.folder-synced")


def remove_folder(folder: Path) -> None:
    """Deletes an empty folder.

    Raises:
        StoreUnwritable: the disk does not allow it, or the folder holds another file.
    """
    with _sentences(folder):
        folder.rmdir()
        sync_folder(folder.parent)


def sweep(home: Path, job: str) -> None:
    """Deletes files that killed processes left half written. Needs the lock."""
    for path in state_file(home, job).parent.glob(f".*{_PARTIAL}"):
        removed(path)


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StoreUnwritable:
    return StoreUnwritable(
        f"{path} cannot be written ({error.strerror}); check free space and the permissions of {path.parent}. The "
        "earlier private state is still there"
    )
