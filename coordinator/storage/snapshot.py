"""Reads a database at one moment while others write: for backups, and to look at one that nobody serves.

Guarantees: everything read in the block is from the same moment, no writer waits, and nothing is written, not even the
schema: a database at an earlier revision is read as it is.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from alembic.migration import MigrationContext
from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    create_engine,
    event,
    inspect,
    select,
)
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import ReflectedColumn, ReflectedPrimaryKeyConstraint
from sqlalchemy.exc import ArgumentError, DBAPIError

from coordinator.storage.chain import JournalEntry
from coordinator.storage.database import BUSY_TIMEOUT_MS, engine_of, shown, words_of
from coordinator.storage.errors import DatabaseUnusable

__all__ = ["journal", "of_database", "revision_of", "tables_of"]

_AT_ONCE = 1000


@contextlib.contextmanager
def of_database(url: str) -> Iterator[Connection]:
    """Opens the database at this moment.

    Raises:
        DatabaseUnusable: this is no database URL, there is nothing, or it cannot be read.
    """
    path = _path(url)
    engine = engine_of(url) if path is None else _read_only(path, url)
    where = shown(engine.url)
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "postgresql":
                connection = connection.execution_options(  # noqa: PLW2901
                    isolation_level="REPEATABLE READ", postgresql_readonly=True
                )
            # The first read fixes the moment.
            inspect(connection).has_table("alembic_version")
            yield connection
    except DBAPIError as error:
        raise DatabaseUnusable(f"the database {where} cannot be read: {words_of(error)}; check the URL") from error
    finally:
        engine.dispose()


def revision_of(connection: Connection) -> str | None:
    """Returns the newest migration that was run; None for another program's database, or an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def tables_of(connection: Connection) -> list[Table]:
    """Returns the tables as they are, not as the newest software would have them, referred ones first.

    They have their columns and primary keys. All else, such as indexes, would take most of the time to read.
    """
    found = inspect(connection)
    columns, keys = found.get_multi_columns(), found.get_multi_pk_constraint()
    # The last name is None, with references that form a circle.
    names = [name for name, _ in found.get_sorted_table_and_fkc_names() if name not in (None, "alembic_version")]
    return [_table(name, columns[None, name], keys[None, name]) for name in names]


def _table(name: str, columns: Sequence[ReflectedColumn], key: ReflectedPrimaryKeyConstraint) -> Table:
    # An empty value of a JSON column is empty, not JSON null.
    kinds = [JSON(none_as_null=True) if isinstance(each["type"], JSON) else each["type"] for each in columns]
    made = [Column(each["name"], kind, nullable=each["nullable"]) for each, kind in zip(columns, kinds, strict=True)]
    return Table(name, MetaData(), *made, PrimaryKeyConstraint(*key["constrained_columns"]))


def journal(connection: Connection) -> Iterator[JournalEntry]:
    """Yields the journal in order.

    Raises:
        DatabaseUnusable: there is none.
    """
    found = inspect(connection)
    if not found.has_table("journal"):
        raise DatabaseUnusable("this database has no journal, so it is not a coordinator's; check database_url")
    table = _table("journal", found.get_columns("journal"), found.get_pk_constraint("journal"))
    after = 0
    while True:
        query = select(table).where(table.c.id > after).order_by(table.c.id).limit(_AT_ONCE)
        rows = connection.execute(query).all()
        if not rows:
            return
        for row in rows:
            yield JournalEntry(row.id, row.at_ms, row.kind, row.subject, row.fields, bytes(row.hash))
        after = rows[-1].id


def _path(url: str) -> Path | None:
    """Returns the path of a SQLite file; None for anything else."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database))


def _read_only(path: Path, url: str) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        return connection

    engine = create_engine(make_url(url), creator=connect)
    # Deferred: the first read makes it a read transaction, which stays at that moment.
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine
