"""Writes files that are on disk whole or not at all, and defines the points at which tests kill the process.

A kill point is where the disk, or the process's knowledge of it, changes. In production nothing happens at one.
`benchmarks.operations.ledger_faults` and the tests pass a function that kills the process there.
"""

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["FILE_STEPS", "Faults", "durable_file", "no_faults", "sync_folder"]

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
    partial = path.with_name(f".{path.name}.partial")
    faults(f"{point}.opening")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        # A partial file left over from before keeps its mode.
        os.fchmod(file.fileno(), 0o600)
        faults(f"{point}.opened")
        file.write(content)
        file.flush()
        faults(f"{point}.written")
        os.fsync(file.fileno())
    faults(f"{point}.synced")
    partial.replace(path)
    faults(f"{point}.renamed")
    sync_folder(path.parent)
    faults(f"{point}.folder-synced")
