"""One database, one writer thread, one transaction a call.

Guarantees:

- `run` returns once its work is committed and durable, or raises once it is rolled back. In between there is only
  `OutcomeUnknown`, after which this process reads and writes nothing more.
- Calls run one after another in the order in which they were made, so each reads what earlier ones committed. Reads go
  the same way: this process has no second, older view of the data.
- Cancelling a waiting caller does not tear its work apart: all of it happened, or none.
- Opening brings the schema to the newest migration, in one transaction. A database that newer software has migrated is
  refused and left alone.

SQLite (the default) runs in WAL mode with synchronous=FULL, so a commit survives a power cut. Every transaction is
BEGIN IMMEDIATE, so a second process (`coordinator init` beside a server) waits its turn instead of failing half-way.

PostgreSQL is used through one connection, which is made anew after it broke. If it breaks during a commit, the database
is asked what became of the transaction until the answer is final (`_committed`). So stored work is not taken for lost
and done twice, and a commit that is still under way contradicts nothing that is done next. If no final answer comes, a
serving process ends as if it had lost the lease, and whoever takes the lease next waits for the commit.

On SQLite the serving process opens the database as its sole coordinator, under a lock of the file. On PostgreSQL one of
several coordinators serves: the one that holds the lease (`coordinator.storage.lease`). Each of its transactions checks
the lease's fence just before its commit, and a writing one locks it until then. So a coordinator that has lost the
lease, whatever it believes, commits nothing more.

Commands that replace or migrate the whole database open it as `sole`: they wait for the coordinator that serves, and
keep others from taking the lease. On PostgreSQL that is an advisory lock, which a serving coordinator shares and such a
command has alone.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn, TypeVar

import structlog
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from coordinator.storage.errors import DatabaseInUse, DatabaseTooNew, DatabaseUnusable, LeaseLost, OutcomeUnknown
from coordinator.storage.journal import noted
from coordinator.storage.models import Base
from toolkit.install import install_with

__all__ = [
    "Database",
    "Fence",
    "Observe",
    "engine_of",
    "is_current",
    "migrated",
    "open_database",
    "scripts",
    "shown",
    "try_no_offline_work",
    "words_of",
]

log = structlog.get_logger("coordinator.storage")

T = TypeVar("T")
# Called after every transaction with its seconds, and whether the database refused it.
Observe = Callable[[float, bool], None]

# The migrations installed with this program.
MIGRATIONS = str(resources.files("coordinator.storage") / "migrations")
BUSY_TIMEOUT_MS = 30_000
# How many milliseconds a starting coordinator waits for one that is just ending: PostgreSQL takes a moment to notice
# that a client was killed.
TAKEOVER_MS = 10_000
# How long the database is asked what became of a commit without an answer, and the pause between two questions. It is
# longer than IDLE_SECONDS, after which the database rolls back what waits for a commit that never arrived.
MAX_DOUBT_SECONDS, _ASK_AGAIN_SECONDS = 10.0, 0.2
_SOLE_LOCK = 7440744174427442
# A client that stops in the middle of a transaction keeps its locks for so long. Shorter than a lease lasts, so that a
# stopped coordinator's locks are gone when another one may take the lease.
IDLE_SECONDS = 4
# The same of a command's: a transaction may hold the journal's lock, for which every other one waits.
_COMMAND_IDLE_SECONDS = 60
# Give up a connection on which nobody answers any more, and the lock with it.
_POSTGRES_ARGUMENTS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "tacit coordinator",
}
# Parts of a PostgreSQL URL's query that are secret.
_PASSWORDS = ("password", "sslpassword")
_POSTGRES_SETTINGS = (
    f"SET lock_timeout = {BUSY_TIMEOUT_MS}",
    # The same for the server's side: a client that vanished must not keep the lock for hours.
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
)
# Kinds of entries after which the journal's head goes to the log. A log collector then holds heads that the owner of
# the database cannot change.
_TOLD = frozenset({"round_ended", "operator_act", "member_revoked", "member_invited", "backup_made", "restored"})

# Alembic keeps its work in a global, so two databases of one process migrate one after the other.
_alembic = threading.Lock()


@dataclass(frozen=True, slots=True)
class Fence:
    """Under which lease transactions are made."""

    number: int
    holder: str
    # Told why, once a transaction was refused because another coordinator has the lease, or nobody can say whether one
    # was committed.
    lost: Callable[[str], None]

    def check(self, session: Session, *, writes: bool) -> None:
        """Refuses the transaction unless the lease is still held. A writing one keeps it held until its end.

        Raises:
            LeaseLost: another coordinator has taken the lease.
        """
        lock = " FOR KEY SHARE" if writes else ""
        query = f"SELECT 1 FROM lease WHERE fence = :number AND holder = :holder{lock}"  # noqa: S608  constants
        if session.scalar(text(query), {"number": self.number, "holder": self.holder}) is None:
            raise LeaseLost(
                f"another coordinator has taken the lease {self.number}, and this one commits nothing more; "
                "restart it, and it stands by"
            )


class Database:
    """An open database, made by `open_database` and ended by `close`."""

    def __init__(
        self,
        engine: Engine,
        writer: ThreadPoolExecutor,
        observe: Observe = lambda _seconds, _failed: None,
        held: contextlib.ExitStack | None = None,
        *,
        serving: bool = False,
        fence: Fence | None = None,
    ) -> None:
        """Takes `held`, released after the last transaction. `serving` and `fence` are for the serving process."""
        self._engine = engine
        self._writer = writer
        self._observe = observe
        self._held = held or contextlib.ExitStack()
        self._where = shown(engine.url)
        self._postgres = engine.dialect.name == "postgresql"
        self._serving = serving
        self._fence = fence
        # Used by the writer thread alone. In doubt: why nothing more is read or written.
        self._written: set[int] = set()
        self._in_doubt = ""

    async def run(self, work: Callable[[Session], T]) -> T:
        """Runs `work` in a transaction of its own, and returns its result once that is committed.

        Args:
            work: synchronous; runs in the writer thread and returns values, never rows.

        Raises:
            DatabaseUnusable: the database could not do it (disk full, locked for too long, gone).
            OutcomeUnknown: the connection broke during this commit or an earlier one, and it cannot be learned whether
                that took effect.
            Exception: whatever `work` raised, after the rollback.
        """
        return await asyncio.wrap_future(self._submit(work))

    def run_now(self, work: Callable[[Session], T]) -> T:
        """`run` for callers without an event loop."""
        return self._submit(work).result()

    @property
    def url(self) -> str:
        """The database's URL, with its password."""
        return self._engine.url.render_as_string(hide_password=False)

    def written_here(self) -> frozenset[int]:
        """Returns the journal entries that the serving process has written itself since the last call.

        For use inside its transactions. All other entries come from commands beside it.
        """
        found = frozenset(self._written)
        self._written.clear()
        return found

    def close(self) -> None:
        """Waits for the queued work, then releases the database."""
        with self._held:
            self._writer.submit(self._engine.dispose).result()
            self._writer.shutdown(wait=True)

    def _submit(self, work: Callable[[Session], T]) -> "Future[T]":
        try:
            return self._writer.submit(self._observed, work)
        except RuntimeError as error:
            raise DatabaseUnusable(f"the database {self._where} is closed; the coordinator is stopping") from error

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
        if self._in_doubt:
            raise OutcomeUnknown(self._in_doubt)
        number: int | None = None
        committing = False
        try:
            with Session(self._engine) as session, session.begin():
                done = work(session)
                session.flush()
                if self._postgres:
                    number = session.scalar(text("SELECT txid_current_if_assigned()"))
                if self._fence is not None:
                    # Last, so that the lease is locked for a moment only.
                    self._fence.check(session, writes=number is not None)
                added = noted(session)
                committing = True
        except IntegrityError:
            # The schema refused what `records` should have refused: a bug of ours, to be seen as it is.
            raise
        except LeaseLost as error:
            if self._fence is not None:
                self._fence.lost(str(error))
            raise
        except DBAPIError as error:
            if not (committing and error.connection_invalidated and number is not None and self._committed(number)):
                raise DatabaseUnusable(
                    f"the database {self._where} refused: {words_of(error)}; "
                    "check free space, permissions and, for PostgreSQL, that it answers"
                ) from error
        if self._serving:
            self._written.update(head.id for _kind, head in added)
        told = [head for kind, head in added if kind in _TOLD]
        if told:
            log.info("journal_head", entry=told[-1].id, head=told[-1].hash.hex())
        return done

    def _committed(self, number: int) -> bool:
        """Whether a transaction was committed whose commit got no answer. Asks until the answer is final.

        The new connection may be there while the old one's commit still waits for a disk or a replica, or has yet to
        arrive.

        Raises:
            OutcomeUnknown: no final answer came within `MAX_DOUBT_SECONDS`.
        """
        until = time.monotonic() + MAX_DOUBT_SECONDS
        while (status := self._status(number)) not in ("committed", "aborted"):
            if time.monotonic() > until:
                self._doubt()
            time.sleep(_ASK_AGAIN_SECONDS)
        log.warning("commit_unanswered", outcome=status)
        return status == "committed"

    def _status(self, number: int) -> str | None:
        """What the database says now of a transaction. None: nobody can be asked."""
        try:
            with self._engine.connect() as connection:
                status: str | None = connection.scalar(text("SELECT txid_status(:number)"), {"number": number})
        except (DBAPIError, DatabaseUnusable):
            return None
        return status

    def _doubt(self) -> NoReturn:
        """Ends the work of this process, because what it would do next might be contradicted by a late commit."""
        log.warning("commit_unanswered", outcome="unknown")
        self._in_doubt = (
            f"the connection to the database {self._where} broke during a commit, and the database did not say within "
            f"{MAX_DOUBT_SECONDS:g} seconds whether it took effect; see whether it did before you repeat what you did"
        )
        if self._fence is not None:
            self._fence.lost(self._in_doubt)
        raise OutcomeUnknown(self._in_doubt)


def open_database(
    url: str, *, observe: Observe | None = None, sole: bool = False, fence: Fence | None = None
) -> Database:
    """Opens and migrates the database: `sqlite:////folder/tacit.db`, or a PostgreSQL URL.

    Args:
        observe: called in the writer thread after every transaction.
        sole: refuse if another process serves from the database or has it open this way, and keep such others out while
            this one is open. On SQLite also for the serving process.
        fence: for the serving process on PostgreSQL: the lease that it holds.

    Raises:
        DatabaseInUse: another coordinator serves from it.
        DatabaseTooNew: newer software has migrated it.
        DatabaseUnusable: this is no database URL, a driver is missing, or nothing usable is there.
    """
    idle_seconds = _COMMAND_IDLE_SECONDS if fence is None else IDLE_SECONDS
    engine = engine_of(url, sole=sole, serving=fence is not None, idle_seconds=idle_seconds)
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
    held = contextlib.ExitStack()
    try:
        if engine.dialect.name == "sqlite" and engine.url.database not in (None, "", ":memory:"):
            if sole:
                held.enter_context(_sole_of_file(str(engine.url.database)))
            _made_private(str(engine.url.database))
        if sole and engine.dialect.name == "postgresql":
            writer.submit(_until_nobody_serves, engine).result()
        writer.submit(_migrate, engine).result()
    except BaseException as error:
        writer.submit(engine.dispose).result()
        writer.shutdown(wait=True)
        held.close()
        if isinstance(error, DBAPIError):
            where = shown(engine.url)
            raise DatabaseUnusable(
                f"the database {where} cannot be opened: {words_of(error)}; check the URL, and that it can be written"
            ) from error
        raise
    serving = sole or fence is not None
    return Database(engine, writer, observe or (lambda _seconds, _failed: None), held, serving=serving, fence=fence)


def engine_of(
    url: str,
    *,
    sole: bool = False,
    serving: bool = False,
    connect: Mapping[str, str] | None = None,
    idle_seconds: int | None = None,
) -> Engine:
    """Returns a SQLAlchemy engine, set up as this package expects it.

    Args:
        url: As in `open_database`.
        sole: See `open_database`.
        serving: Whether each connection says that a coordinator serves, which commands that are `sole` wait for.
        connect: Settings of a PostgreSQL connection in place of ours. The URL's own take precedence.
        idle_seconds: After how many seconds of silence in a transaction PostgreSQL ends the connection, and takes its
            locks. None: never, for connections that lock nothing in a transaction.

    Raises:
        DatabaseUnusable: this is no database URL, or its driver is missing.
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
        # The URL's own settings take precedence.
        arguments = {
            key: value for key, value in {**_POSTGRES_ARGUMENTS, **(connect or {})}.items() if key not in parsed.query
        }
        # One connection is enough for one writer; a stale one is noticed before use.
        engine = create_engine(parsed, pool_size=1, max_overflow=0, pool_pre_ping=True, connect_args=arguments)
        set_up = _postgres_sole if sole else _postgres_serving if serving else _postgres_connect
        event.listen(engine, "connect", set_up)
        if idle_seconds is not None:
            event.listen(engine, "connect", lambda connection, _record: _postgres_idle(connection, idle_seconds))
        return engine
    except (ArgumentError, ValueError):  # ValueError for a port that is not a number.
        # A password may hold any character, and where it begins is not known.
        hidden = re.sub(r"^([a-z0-9+]+:/*)?.*@", r"\1***@", url).partition("?")[0]
        raise DatabaseUnusable(
            f"{hidden!r} is not a database URL; write sqlite:////folder/tacit.db or postgresql://user@host/name"
        ) from None  # The cause would show the URL with its password.
    except ModuleNotFoundError as error:
        raise DatabaseUnusable(
            f"the driver {error.name} is not installed; for PostgreSQL, {install_with('coordinator-postgres')}"
        ) from error


def shown(url: URL) -> str:
    """Returns a URL for people and logs: without passwords, wherever it has them."""
    return url.difference_update_query(_PASSWORDS).render_as_string(hide_password=True)


def _made_private(path: str) -> None:
    """Creates a missing file for its owner alone.

    SQLite would use the umask's permissions, and gives its log those of the file.
    """
    # If that fails, SQLite says so.
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


@contextlib.contextmanager
def _sole_of_file(path: str) -> Iterator[None]:
    """Locks the database for one process. The lock ends with the process, however it ends; the empty file stays."""
    try:
        descriptor = os.open(f"{path}.serving", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DatabaseUnusable(
            f"{path}.serving cannot be written: {error.strerror}; check that its folder exists, and permissions"
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
    """Returns what the driver says, on one line; its own lines become sentences."""
    lines = [" ".join(line.split()) for line in str(error.orig).splitlines()]
    text = ""
    for line in filter(None, lines):
        text += line if not text else f" {line}" if text.endswith((".", ",", ":", ";", "?", "!")) else f". {line}"
    return text


def _in_use(where: str) -> str:
    return (
        f"another coordinator serves from the database {where}, and two would give members contradictory numbers; end "
        "that one first"
    )


def _postgres_connect(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        for setting in _POSTGRES_SETTINGS:
            cursor.execute(setting)
    connection.commit()


def _postgres_sole(connection: Any, record: object) -> None:
    _lock_of_serving(connection, "pg_advisory_lock")
    _postgres_connect(connection, record)


def _postgres_serving(connection: Any, record: object) -> None:
    _lock_of_serving(connection, "pg_advisory_lock_shared")
    _postgres_connect(connection, record)


def _postgres_idle(connection: Any, seconds: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{seconds}s'")
    connection.commit()


def try_no_offline_work(session: Session) -> bool:
    """Whether no command has the whole PostgreSQL database for itself. If so, none begins during this transaction."""
    return bool(session.scalar(text(f"SELECT pg_try_advisory_xact_lock_shared({_SOLE_LOCK})")))


def _lock_of_serving(connection: Any, function: str) -> None:
    # The lock belongs to the connection, not to a transaction: whatever writes through it has the lock.
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = {TAKEOVER_MS}")
        try:
            cursor.execute(f"SELECT {function}({_SOLE_LOCK})")
        except Exception as error:
            # The code of lock_not_available.
            if getattr(error, "sqlstate", None) != "55P03":
                raise
            where = _in_use(f"{connection.info.dbname} on {connection.info.host}")
            connection.close()
            raise DatabaseInUse(where) from None


def _sqlite_connect(connection: sqlite3.Connection, _record: object) -> None:
    # _sqlite_begin begins transactions, because the driver would begin them late and leave DDL outside.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    _wal(cursor)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _wal(cursor: sqlite3.Cursor) -> None:
    """Switches a file to WAL, which a new one needs once.

    SQLite does not wait out its own timeout here if another process writes or switches: both could wait for each other.
    """
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.02)


def _sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def scripts() -> tuple[Config, ScriptDirectory]:
    """Returns this program's migrations."""
    config = Config()
    config.set_main_option("script_location", MIGRATIONS.replace("%", "%%"))
    return config, ScriptDirectory.from_config(config)


def is_current(url: str) -> bool:
    """Whether the database has the newest schema that this software knows. Changes nothing.

    Raises:
        DatabaseUnusable: it cannot be read.
    """
    engine = engine_of(url)
    try:
        with engine.connect() as connection:
            present = MigrationContext.configure(connection).get_current_heads()
    except DBAPIError as error:
        where = shown(engine.url)
        raise DatabaseUnusable(
            f"the database {where} cannot be read: {words_of(error)}; check the URL, and that it answers"
        ) from error
    finally:
        engine.dispose()
    return set(present) == set(scripts()[1].get_heads())


def _until_nobody_serves(engine: Engine) -> None:
    """Waits until nobody holds the lease. It cannot be taken meanwhile, but its holder may have it still.

    Its connection to the database may have broken, and its share of the lock with it, while another one renews the
    lease.

    Raises:
        DatabaseInUse: somebody holds the lease and renews it.
    """
    until = time.monotonic() + TAKEOVER_MS / 1000
    held = "holder <> '' AND expires_ms > extract(epoch FROM clock_timestamp()) * 1000"
    while True:
        with engine.begin() as connection:
            there = connection.scalar(text("SELECT to_regclass('lease')")) is not None
            if not there or connection.scalar(text(f"SELECT 1 FROM lease WHERE {held}")) is None:  # noqa: S608  a constant
                return
        if time.monotonic() > until:
            raise DatabaseInUse(_in_use(f"{engine.url.database} on {engine.url.host}"))
        time.sleep(0.2)


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
                f"the database {shown(engine.url)} was migrated to "
                f"{unknown[0]} by newer software; install that version again, or restore the copy made before the "
                "upgrade"
            )
        if set(present) != set(directory.get_heads()):
            migrated(connection, "head")
        elif wrong := _unlike_models(connection):
            raise DatabaseUnusable(
                f"the database {shown(engine.url)} is at {present[0]} and {wrong}: other "
                "software made it; use that, or restore a backup that this version made into a new database"
            )


def _unlike_models(connection: Connection) -> str:
    """Returns what this software would miss in the database, or would have to fill in there. Empty if it can use it.

    The revision does not tell: a development version may have had another schema under the same number.
    """
    found = {name: columns for (_, name), columns in inspect(connection).get_multi_columns().items()}
    wrong = []
    for name, table in Base.metadata.tables.items():
        if name not in found:
            wrong.append(f"lacks {name}")
            continue
        there = {column["name"]: column for column in found[name]}
        wrong += [f"lacks {name}.{each}" for each in table.columns.keys() - there.keys()]
        wrong += [
            f"needs {name}.{each}"
            for each, column in there.items()
            if each not in table.columns and not column["nullable"] and column["default"] is None
        ]
    return ", ".join(sorted(wrong)[:3])


def migrated(connection: Connection, revision: str) -> None:
    """Runs the migrations up to `revision`, in the connection's transaction."""
    config, _directory = scripts()
    config.attributes["connection"] = connection
    with _alembic:
        command.upgrade(config, revision)
