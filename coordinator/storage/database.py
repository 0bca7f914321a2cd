"""One database, one writer thread, one transaction a call.

Guarantees:

- `run` returns after its work is committed and durable, or raises after it was rolled back; nothing in
  between.
- Calls are carried out one after another in the order in which they were made, so what one call committed the
  next one reads. Reads go the same way: there is no second, older view of the data in this process.
- A caller that is cancelled while it waits does not tear its work apart: it has happened whole, or not at
  all.
- Opening brings the schema to the newest migration, in one transaction; a database that newer software has
  migrated is refused and left alone.

SQLite (the default) runs in WAL mode with synchronous=FULL: a commit survives a power cut. Every transaction
is BEGIN IMMEDIATE, so a second process (`coordinator init` beside a server) waits its turn rather than
failing half-way.
"""

import asyncio
import re
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import resources
from typing import TypeVar

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from coordinator.storage.errors import DatabaseTooNew, DatabaseUnusable

__all__ = ["Database", "open_database"]

T = TypeVar("T")

BUSY_TIMEOUT_MS = 30_000

# Alembic keeps what it is working on in a global: two databases of one process migrate one after the other.
_alembic = threading.Lock()


class Database:
    """An open database. Made by `open_database`, ended by `close`."""

    def __init__(self, engine: Engine, writer: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._writer = writer
        self._where = engine.url.render_as_string(hide_password=True)

    async def run(self, work: Callable[[Session], T]) -> T:
        """Carries out `work` in a transaction of its own and returns what it returned, once that is
        committed.

        `work` is synchronous, runs in the writer thread and hands out no rows, only values.

        Raises:
            DatabaseUnusable: the database could not do it (disk full, locked for too long, gone).
            Whatever `work` raised, after the rollback.
        """
        return await asyncio.wrap_future(self._submit(work))

    def run_now(self, work: Callable[[Session], T]) -> T:
        """`run` for callers without an event loop."""
        return self._submit(work).result()

    def close(self) -> None:
        """Waits for the work that was handed in, then lets go of the database."""
        self._writer.submit(self._engine.dispose).result()
        self._writer.shutdown(wait=True)

    def _submit(self, work: Callable[[Session], T]) -> "Future[T]":
        try:
            return self._writer.submit(self._transaction, work)
        except RuntimeError as error:
            raise DatabaseUnusable(f"the database {self._where} was closed; the coordinator is stopping") from error

    def _transaction(self, work: Callable[[Session], T]) -> T:
        try:
            with Session(self._engine) as session, session.begin():
                return work(session)
        except IntegrityError:
            # The schema refused what `records` should have refused: a mistake of ours, to be seen as it is.
            raise
        except DBAPIError as error:
            raise DatabaseUnusable(
                f"the database {self._where} refused: {error.orig}; "
                "check free space, permissions and, for PostgreSQL, that it answers"
            ) from error


def open_database(url: str) -> Database:
    """Opens and migrates the database: `sqlite:////folder/tacit.db`, or a PostgreSQL URL.

    Raises:
        DatabaseTooNew: newer software has migrated it.
        DatabaseUnusable: not a database URL, a driver is missing, or nothing usable is there.
    """
    engine = _engine(url)
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
    try:
        writer.submit(_migrate, engine).result()
    except BaseException as error:
        writer.submit(engine.dispose).result()
        writer.shutdown(wait=True)
        if isinstance(error, DBAPIError):
            where = engine.url.render_as_string(hide_password=True)
            raise DatabaseUnusable(f"the database {where} cannot be opened: {error.orig}; check the URL") from error
        raise
    return Database(engine, writer)


def _engine(url: str) -> Engine:
    try:
        parsed: URL = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(parsed)
            event.listen(engine, "connect", _sqlite_connect)
            event.listen(engine, "begin", _sqlite_begin)
            return engine
        # One connection is enough for one writer; a stale one is noticed before it is used.
        return create_engine(parsed, pool_size=1, max_overflow=0, pool_pre_ping=True)
    except ArgumentError:
        shown = re.sub(r"//[^/]*@", "//***@", url)
        raise DatabaseUnusable(
            f"{shown!r} is not a database URL; write sqlite:////folder/tacit.db or postgresql://user@host/name"
        ) from None  # Its cause shows the URL with its password.
    except ModuleNotFoundError as error:
        raise DatabaseUnusable(
            f"the driver {error.name} is not installed; for PostgreSQL: pip install 'psycopg[binary]'"
        ) from error


def _sqlite_connect(connection: sqlite3.Connection, _record: object) -> None:
    # Transactions are begun by _sqlite_begin, not by the driver, which would begin them late and leave DDL
    # outside.
    connection.isolation_level = None
    cursor = connection.cursor()
    # First, because switching to WAL needs a lock that another process may hold.
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def scripts() -> tuple[Config, ScriptDirectory]:
    """The migrations as they are installed."""
    config = Config()
    folder = str(resources.files("coordinator.storage") / "migrations")
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config, ScriptDirectory.from_config(config)


def _migrate(engine: Engine) -> None:
    config, directory = scripts()
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            # Two coordinators that start together migrate one after the other.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7440744174427443)")
        present = MigrationContext.configure(connection).get_current_heads()
        known = {revision.revision for revision in directory.walk_revisions()}
        if unknown := sorted(set(present) - known):
            raise DatabaseTooNew(
                f"the database {engine.url.render_as_string(hide_password=True)} was migrated to "
                f"{unknown[0]} by newer software than this; install that version again, or restore the copy "
                "made before the upgrade"
            )
        if set(present) == set(directory.get_heads()):
            return

        config.attributes["connection"] = connection
        with _alembic:
            command.upgrade(config, "head")
