"""SQLite databases without rows: a copy of one that was migrated once, because a migration costs 40 ms of CPU."""

import functools
import tempfile
from pathlib import Path

from coordinator.storage.database import Database, open_database

__all__ = ["empty_database", "migrated"]


@functools.cache
def migrated() -> bytes:
    """A SQLite file with today's schema and no rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tacit.db"
        open_database(f"sqlite:///{path}").close()
        return path.read_bytes()


def empty_database(folder: Path) -> Database:
    """Opens `tacit.db` in a folder, where nothing of that name is."""
    path = folder / "tacit.db"
    with path.open("xb") as file:
        file.write(migrated())
    return open_database(f"sqlite:///{path}")
