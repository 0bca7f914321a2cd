"""Databases without rows: a copy of one that was migrated once, because a migration costs 40 ms of CPU and more."""

import functools
import tempfile
from pathlib import Path

import pytest

from coordinator.storage.database import Database, open_database

__all__ = ["empty_database", "migrated", "url_without_rows"]


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


def url_without_rows(request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of a test's database, of the kind that is the fixture's parameter: `sqlite` or `postgresql`.

    It has tables only for a test that has the fixture `database`.
    """
    if request.param == "sqlite":
        return f"sqlite:///{folder / 'tacit.db'}"
    return request.getfixturevalue("postgres").database(migrated="database" in request.fixturenames)
