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

PostgreSQL is one connection, made anew when it broke. Where it breaks during a commit, the database is asked what
became of the transaction (`_resolved`), so that what was stored is not taken for lost, and done twice.

Who serves opens the database as its sole coordinator. On PostgreSQL the lock for that belongs to the very connection
that writes: a coordinator whose connection was lost, and whose place another took, writes nothing more.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import resources
from typing import Any, TypeVar

import structlog
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from coordinator.storage.errors import DatabaseInUse, DatabaseTooNew, DatabaseUnusable
from coordinator.storage.journal import noted
from toolkit.install import install_with

__all__ = ["Database", "Observe", "engine_of", "migrated", "open_database", "scripts", "words_of"]

log = structlog.get_logger("coordinator.storage")

T = TypeVar("T")
# Called after every transaction with its seconds, and whether the database refused it.
Observe = Callable[[float, bool], None]

# The migrations that are installed with this program.
MIGRATIONS = str(resources.files("coordinator.storage") / "migrations")
BUSY_TIMEOUT_MS = 30_000
# How long a coordinator that starts waits for the place of one that is just ending: PostgreSQL takes a moment to notice
# that its client was killed.
TAKEOVER_MS = 10_000
_SOLE_LOCK = 7440744174427442
# Of a connection that nobody answers on any more: then it is given up, and the lock with it.
_POSTGRES_ARGUMENTS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "tacit coordinator",
}
_POSTGRES_SETTINGS = (
    f"SET lock_timeout = {BUSY_TIMEOUT_MS}",
    # The server's side of the same: who is gone without a word must not keep the lock for hours.
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
)
# Kinds of entries after which the journal's head goes to the log: a log collector then holds heads that whoever owns
# the database cannot change.
_TOLD = frozenset({"round_ended", "operator_act", "member_revoked", "member_invited", "backup_made", "restored"})

# Alembic keeps what it is working on in a global: two databases of one process migrate one after the other.
_alembic = threading.Lock()


class Database:
    """An open database. Made by `open_database`, ended by `close`."""

    def __init__(
        self,
        engine: Engine,
        writer: ThreadPoolExecutor,
        observe: Observe = lambda _seconds, _failed: None,
        held: contextlib.ExitStack | None = None,
        *,
        sole: bool = False,
    ) -> None:
        """held: what is let go after the last transaction. sole: for who serves."""
        self._engine = engine
        self._writer = writer
        self._observe = observe
        self._held = held or contextlib.ExitStack()
        self._where = engine.url.render_as_string(hide_password=True)
        self._postgres = engine.dialect.name == "postgresql"
        self._sole = sole
        # Of the writer thread alone.
        self._written: set[int] = set()

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

    def written_here(self) -> frozenset[int]:
        """Inside a transaction of who serves: the journal's entries that it wrote itself since this was last asked. The
        others were written by commands beside it.
        """
        found = frozenset(self._written)
        self._written.clear()
        return found

    def close(self) -> None:
        """Waits for the work that was handed in, then lets go of the database."""
        with self._held:
            self._writer.submit(self._engine.dispose).result()
            self._writer.shutdown(wait=True)

    def _submit(self, work: Callable[[Session], T]) -> "Future[T]":
        try:
            return self._writer.submit(self._observed, work)
        except RuntimeError as error:
            raise DatabaseUnusable(f"the database {self._where} was closed; the coordinator is stopping") from error

    def _observed(self, work: Callable[[Session], T]) -> T:
        start, failed = time.perf_counter(), False
        try:
            return self._transaction(work)
        except DatabaseUnusable:
            failed = True
            raise
        finally:
            self._observe(time.perf_counter() - start, failed)

    def _transaction(self, work: Callable[[Session], T]) -> T:
        number: int | None = None
        committing = False
        try:
            with Session(self._engine) as session, session.begin():
                done = work(session)
                session.flush()
                if self._postgres:
                    number = session.scalar(text("SELECT txid_current_if_assigned()"))
                added = noted(session)
                committing = True
        except IntegrityError:
            # The schema refused what `records` should have refused: a mistake of ours, to be seen as it is.
            raise
        except DBAPIError as error:
            if not (committing and error.connection_invalidated and number is not None and self._committed(number)):
                raise DatabaseUnusable(
                    f"the database {self._where} refused: {words_of(error)}; "
                    "check free space, permissions and, for PostgreSQL, that it answers"
                ) from error
        if self._sole:
            self._written.update(head.id for _kind, head in added)
        told = [head for kind, head in added if kind in _TOLD]
        if told:
            log.info("journal_head", entry=told[-1].id, head=told[-1].hash.hex())
        return done

    def _committed(self, number: int) -> bool:
        """What became of a transaction whose commit was never answered. False where nobody can be asked: the caller is
        then told of a failure, as it would be of any.
        """
        try:
            with self._engine.connect() as connection:
                status = connection.scalar(text("SELECT txid_status(:number)"), {"number": number})
        except (DBAPIError, DatabaseUnusable):
            return False
        log.warning("commit_unanswered", outcome=status)
        return bool(status == "committed")


def open_database(url: str, *, observe: Observe | None = None, sole: bool = False) -> Database:
    """Opens and migrates the database: `sqlite:////folder/tacit.db`, or a PostgreSQL URL.

    observe: called in the writer thread after every transaction. sole: refuse where another process has the database
    open in this way, and keep such others out for as long as this one is open; for who serves.

    Raises:
        DatabaseInUse: another coordinator serves from it.
        DatabaseTooNew: newer software has migrated it.
        DatabaseUnusable: not a database URL, a driver is missing, or nothing usable is there.
    """
    engine = engine_of(url, sole=sole)
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
    held = contextlib.ExitStack()
    try:
        if engine.dialect.name == "sqlite" and engine.url.database not in (None, "", ":memory:"):
            if sole:
                held.enter_context(_sole_of_file(str(engine.url.database)))
            _made_private(str(engine.url.database))
        writer.submit(_migrate, engine).result()
    except BaseException as error:
        writer.submit(engine.dispose).result()
        writer.shutdown(wait=True)
        held.close()
        if isinstance(error, DBAPIError):
            where = engine.url.render_as_string(hide_password=True)
            raise DatabaseUnusable(
                f"the database {where} cannot be opened: {words_of(error)}; check the URL, and that it can be written"
            ) from error
        raise
    return Database(engine, writer, observe or (lambda _seconds, _failed: None), held, sole=sole)


def engine_of(url: str, *, sole: bool = False) -> Engine:
    """SQLAlchemy's engine, set up as everything here expects it.

    Raises:
        DatabaseUnusable: not a database URL, or its driver is missing.
    """
    try:
        parsed: URL = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(parsed)
            event.listen(engine, "connect", _sqlite_connect)
            event.listen(engine, "begin", _sqlite_begin)
            return engine
        # What the URL says of a connection stands.
        arguments = {key: value for key, value in _POSTGRES_ARGUMENTS.items() if key not in parsed.query}
        # One connection is enough for one writer; a stale one is noticed before it is used.
        engine = create_engine(parsed, pool_size=1, max_overflow=0, pool_pre_ping=True, connect_args=arguments)
        event.listen(engine, "connect", _postgres_sole if sole else _postgres_connect)
        return engine
    except (ArgumentError, ValueError):  # The latter for a port that is no number.
        shown = re.sub(r"//[^/]*@", "//***@", url)
        raise DatabaseUnusable(
            f"{shown!r} is not a database URL; write sqlite:////folder/tacit.db or postgresql://user@host/name"
        ) from None  # Its cause shows the URL with its password.
    except ModuleNotFoundError as error:
        raise DatabaseUnusable(
            f"the driver {error.name} is not installed; for PostgreSQL, {install_with('coordinator-postgres')}"
        ) from error


def _made_private(path: str) -> None:
    """Makes the file for its owner alone, where there is none: SQLite would take the umask's rights, and gives its log
    those of the file.
    """
    # Where it cannot be made, SQLite says so.
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


@contextlib.contextmanager
def _sole_of_file(path: str) -> Iterator[None]:
    """The lock goes with the process, however it ends; the file stays, empty."""
    try:
        descriptor = os.open(f"{path}.serving", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DatabaseUnusable(
            f"{path}.serving cannot be written: {error.strerror}; check that its folder is there, and permissions"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DatabaseInUse(_in_use(path)) from None
        yield
    finally:
        os.close(descriptor)


def words_of(error: DBAPIError) -> str:
    """What the driver says, on one line; its own lines become sentences."""
    lines = [" ".join(line.split()) for line in str(error.orig).splitlines()]
    text = ""
    for line in filter(None, lines):
        text += line if not text else f" {line}" if text.endswith((".", ",", ":", ";", "?", "!")) else f". {line}"
    return text


def _in_use(where: str) -> str:
    return (
        f"another coordinator serves from the database {where}: two would give members contradictory numbers; end that "
        "one first"
    )


def _postgres_connect(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        for setting in _POSTGRES_SETTINGS:
            cursor.execute(setting)
    connection.commit()


def _postgres_sole(connection: Any, record: object) -> None:
    # Of this connection, not of a transaction: whoever writes through it has the lock.
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = {TAKEOVER_MS}")
        try:
            cursor.execute(f"SELECT pg_advisory_lock({_SOLE_LOCK})")
        except Exception as error:
            # lock_not_available
            if getattr(error, "sqlstate", None) != "55P03":
                raise
            where = _in_use(f"{connection.info.dbname} on {connection.info.host}")
            connection.close()
            raise DatabaseInUse(where) from None
    _postgres_connect(connection, record)


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
    """The migrations of this program."""
    config = Config()
    config.set_main_option("script_location", MIGRATIONS.replace("%", "%%"))
    return config, ScriptDirectory.from_config(config)


def _migrate(engine: Engine) -> None:
    _config, directory = scripts()
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
        migrated(connection, "head")


def migrated(connection: Connection, revision: str) -> None:
    """Runs the migrations up to `revision`, in the connection's transaction."""
    config, _directory = scripts()
    config.attributes["connection"] = connection
    with _alembic:
        command.upgrade(config, revision)
