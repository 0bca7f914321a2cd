"""A database of each kind for each test: a SQLite file, and a database of a real PostgreSQL server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from coordinator.storage.database import Database, open_database
from tests.support.databases import migrated, url_without_rows
from tests.support.postgres import Postgres, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_without_rows(request, tmp_path)


@pytest.fixture
def another_url(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> str:
    """An empty database of the same kind."""
    if database_url.startswith("sqlite"):
        return f"sqlite:///{tmp_path / 'another.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.database()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An open database without rows."""
    if database_url.startswith("sqlite"):
        Path(make_url(database_url).database).write_bytes(migrated())
    database = open_database(database_url)
    yield database
    database.close()


@pytest.fixture
def sqlite_only(request: pytest.FixtureRequest) -> None:
    if "database_url" in request.fixturenames and request.node.callspec.params.get("database_url") != "sqlite":
        pytest.skip("about SQLite")
