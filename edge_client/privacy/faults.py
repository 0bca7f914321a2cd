"""Where a process may be killed, by name, and the one way in which this room writes whole files.

Every point stands at a boundary at which what is on the disk changes, or what the process believes does. Nothing
happens at a point in service; `benchmarks.operations.ledger_faults` and the tests pass a function that kills the
process.
"""

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["CORPUS_POINTS", "FILE_STEPS", "POINTS", "Faults", "durable_file", "no_faults", "sync_folder"]

# Called with the name of a point.
Faults = Callable[[str], None]

FILE_STEPS = ("opening", "opened", "written", "synced", "renamed", "folder-synced")

# All of them, in the order in which a first start with one charge and one receipt comes by.
POINTS = (
    "open.locking",
    "open.locked",
    "open.touched",
    "open.connected",
    "open.replayed",
    "open.checked",
    "open.wal",
    "create.begun",
    "create.tables",
    "append.beginning",
    "append.begun",
    "append.inserted",
    "append.committed",
    "append.believed",
    *(f"pin.{step}" for step in FILE_STEPS),
    "open.done",
    *(f"certificate.{step}" for step in FILE_STEPS),
    *(f"signature.{step}" for step in FILE_STEPS),
    *(f"receipt.{step}" for step in FILE_STEPS),
    "close.closing",
    "close.closed",
)

# Beside these: of a job that orders made-up text, from its last charge to the coordinator's receipt for the file.
CORPUS_POINTS = (
    "model.charged",
    *(f"model.{step}" for step in FILE_STEPS),
    "histogram.charging",
    "histogram.charged",
    *(f"histogram.{step}" for step in FILE_STEPS),
    *(f"corpus.{step}" for step in FILE_STEPS),
    *(f"statement.{step}" for step in FILE_STEPS),
    *(f"corpus-state.{step}" for step in FILE_STEPS),
    "corpus.sending",
    "corpus.sent",
)


def no_faults(point: str) -> None:
    """In service: nothing."""


def sync_folder(folder: Path) -> None:
    """Names in the folder are on the disk when it returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def durable_file(path: Path, content: bytes, point: str, faults: Faults = no_faults) -> None:
    """Writes a file (0600) that is there as a whole or not at all, and on the disk when it returns.

    point: what its points are called, with one of FILE_STEPS behind it. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    faults(f"{point}.opening")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
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
