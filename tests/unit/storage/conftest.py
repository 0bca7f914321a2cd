"""A database for each test: SQLite in a file, or what TACIT_TEST_DATABASE names (emptied first)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from coordinator.storage.database import Database, open_database


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    url = os.environ.get("TACIT_TEST_DATABASE")
    if url is None:
        return f"sqlite:///{tmp_path / 'tacit.db'}"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = open_database(database_url)
    yield database
    database.close()


@pytest.fixture
def sqlite_only() -> None:
    if "TACIT_TEST_DATABASE" in os.environ:
        pytest.skip("about SQLite")
