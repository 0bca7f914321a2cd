"""Keeps what a frozen encoder computes of rows, so that trainings of heads on it compute a row once.

A member's own store has its rows alone. Trials deal the same rows to members again and again, and measure on others:
`SharedFeatures` keeps them in memory. A simulation's members train in several processes: `StoredFeatures` keeps them in
a file that all processes of a machine share, and that is there when the simulation goes on.
"""

import sqlite3
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from socket import gethostname

import numpy as np

from learning.prompts.features import Compute, Features, FeatureStore

__all__ = ["SharedFeatures", "StoredFeatures"]

# Seconds to wait for another process that writes.
_PATIENCE = 60.0
# Rows that one statement reads.
_ROWS = 500


class SharedFeatures(FeatureStore):
    """Features in memory, by the key of what computed them and the key of their row. Nothing is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[bytes, dict[bytes, Features]] = {}

    def read(self, kind: bytes, keys: Sequence[bytes], compute: Compute) -> Features:
        """Return the features of the rows with these keys, as `FeatureStore.read`."""
        rows = self._kinds.setdefault(kind, {})
        missing = {key: place for place, key in enumerate(keys) if key not in rows}
        if missing:
            for at, made in compute(list(missing.values())):
                # A copy of each row, since a view would hold its whole batch.
                rows.update((keys[place], row.copy()) for place, row in zip(at, made, strict=True))
        return np.stack([rows[key] for key in keys])


class StoredFeatures(FeatureStore):
    """Features in a file of a folder, one for each machine: a shared disk's locks may not reach other machines.

    Memory does not grow with the rows. A process that is killed leaves whole rows or none.
    """

    def __init__(self, folder: Path) -> None:
        """Opens nothing yet: most jobs have no such features."""
        super().__init__()
        self._folder = folder

    @cached_property
    def _file(self) -> sqlite3.Connection:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Each statement is a transaction of its own.
        file = sqlite3.connect(self._folder / f"{gethostname()}.sqlite", timeout=_PATIENCE, isolation_level=None)
        # Only a loss of power could cost rows, and they can be computed again.
        file.execute("PRAGMA synchronous = OFF")
        file.execute("CREATE TABLE IF NOT EXISTS features (key BLOB PRIMARY KEY, row BLOB) WITHOUT ROWID")
        return file

    def read(self, kind: bytes, keys: Sequence[bytes], compute: Compute) -> Features:
        """Return the features of the rows with these keys, as `FeatureStore.read`."""
        found: dict[bytes, Features] = {}
        wanted = list(dict.fromkeys(keys))
        for first in range(0, len(wanted), _ROWS):
            part = [kind + key for key in wanted[first : first + _ROWS]]
            marks = ", ".join("?" * len(part))
            rows = self._file.execute(f"SELECT key, row FROM features WHERE key IN ({marks})", part)  # noqa: S608
            found |= {key[len(kind) :]: np.frombuffer(row, "<f4") for key, row in rows}
        missing = {key: place for place, key in enumerate(keys) if key not in found}
        if missing:
            for at, made in compute(list(missing.values())):
                new = {keys[place]: row for place, row in zip(at, made, strict=True)}
                held = [(kind + key, np.ascontiguousarray(row, "<f4").tobytes()) for key, row in new.items()]
                self._file.execute("BEGIN IMMEDIATE")
                self._file.executemany("INSERT OR IGNORE INTO features VALUES (?, ?)", held)
                self._file.execute("COMMIT")
                found |= new
        return np.stack([found[key] for key in keys])
