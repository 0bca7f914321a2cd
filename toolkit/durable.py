"""Makes folders and files that are on disk whole or not at all, and defines the points at which tests kill the process.

A kill point is where the disk, or the process's knowledge of it, changes. In production nothing happens at one.
`benchmarks.operations.ledger_faults` and the tests pass a function that kills the process there.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["FILE_STEPS", "Faults", "durable_file", "durable_files", "make_folder", "no_faults", "sync_folder"]

# Called with the name of a kill point.
Faults = Callable[[str], None]

FILE_STEPS = ("opening", "opened", "written", "synced", "renamed", "folder-synced")


def no_faults(point: str) -> None:
    """Does nothing; for production."""


def sync_folder(folder: Path) -> None:
    """Flushes a folder: the names in it are on disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Makes a folder for its owner alone (0700), and the missing ones above it.

    The names of those that it makes are on disk on return.

    Raises:
        OSError: One cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_folder(each.parent)


def durable_file(path: Path, content: bytes, point: str = "file", faults: Faults = no_faults) -> None:
    """Writes a file that only its owner can read (0600). It is on disk whole or not at all, and synced on return.

    Args:
        path: The file; an existing one is replaced.
        content: All of its bytes.
        point: Prefix of its kill points; their names end with each of FILE_STEPS.
        faults: Called at each kill point.

    Raises:
        OSError: The file cannot be written; an existing one is unchanged.
    """
    durable_files(((path, content, point),), faults)


def durable_files(files: Sequence[tuple[Path, bytes, str]], faults: Faults = no_faults) -> None:
    """Writes files of one folder like `durable_file`, and flushes the folder once.

    A file is never there without the files before it in the list. After a power cut, this assumes that the file system
    keeps the order of two renames in one folder, as those with a journal or copy-on-write do.

    Args:
        files: The path, all bytes and the kill points' prefix of each.
        faults: Called at each kill point.

    Raises:
        OSError: The files cannot be written. Existing ones are unchanged if nothing could be written at all.
    """
    for path, content, point in files:
        faults(f"{point}.opening")
        descriptor = os.open(_partial(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            # A partial file left over from before keeps its mode.
            os.fchmod(file.fileno(), 0o600)
            faults(f"{point}.opened")
            file.write(content)
            file.flush()
            faults(f"{point}.written")
            os.fsync(file.fileno())
        faults(f"{point}.synced")
    for path, _, point in files:
        _partial(path).replace(path)
        faults(f"{point}.renamed")
    for folder in dict.fromkeys(path.parent for path, _, _ in files):
        sync_folder(folder)
    for _, _, point in files:
        faults(f"{point}.folder-synced")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
