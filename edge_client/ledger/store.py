"""The ledger's file: records in SQLite, and nothing that thinks about privacy.

Guarantees: what `append` was given is on the disk when it returns (WAL, synchronous FULL), as far as the disk keeps its
word about fsync; a file is either empty or has the whole schema and a first record; triggers let records be appended
only, against accidents (whoever may write the file can drop them); every failure of SQLite or the disk becomes one of
the errors below.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_client.ledger.chain import Record
from toolkit.durable import Faults, no_faults

__all__ = [
    "LedgerBusy",
    "LedgerDamaged",
    "LedgerError",
    "LedgerMissing",
    "LedgerNewer",
    "LedgerUnwritable",
    "Store",
    "Writer",
    "reading",
]

_VERSION = 1
_SCHEMA = (
    # `line` is the record, `digest` its SHA-256: see edge_client/ledger/chain.py.
    "CREATE TABLE records (sequence INTEGER PRIMARY KEY, line TEXT NOT NULL, digest BLOB NOT NULL) STRICT",
    # Keyed hashes of the examples seen: see edge_client/ledger/overlap.py.
    "CREATE TABLE marks (mark INTEGER PRIMARY KEY) STRICT",
    "CREATE TRIGGER records_unchanged BEFORE UPDATE ON records "
    "BEGIN SELECT RAISE(ABORT, 'records are never changed'); END",
    "CREATE TRIGGER records_kept BEFORE DELETE ON records BEGIN SELECT RAISE(ABORT, 'records are never removed'); END",
    # REPLACE deletes the row it conflicts with, without a DELETE trigger unless the connection set recursive_triggers
    # (sqlite.org/lang_conflict.html).
    "CREATE TRIGGER records_appended BEFORE INSERT ON records "
    "WHEN NEW.sequence IS NOT (SELECT coalesce(max(sequence), 0) + 1 FROM records) "
    "BEGIN SELECT RAISE(ABORT, 'records are only appended'); END",
)

# Primary result codes that speak of the place and not of the file's content (sqlite.org/rescode.html).
_OF_THE_PLACE = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOLFS,
        sqlite3.SQLITE_AUTH,
    }
)


class LedgerError(Exception):
    """A ledger that cannot be used, or not for this. The sentence says what to do."""


class LedgerMissing(LedgerError):
    """There is no ledger of that name."""


class LedgerBusy(LedgerError):
    """Another process has it open."""


class LedgerDamaged(LedgerError):
    """The file's content is not what was written."""


class LedgerNewer(LedgerError):
    """Newer software wrote it."""


class LedgerUnwritable(LedgerError):
    """The disk or the folder does not take what must be written. Nothing was charged that is not on the disk."""


class Store:
    """A connection to the file. Not for two threads."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        # A damaged file can hold text that is no text: it must come out, to be compared with its hash.
        connection.text_factory = bytes

    def version(self) -> int:
        """Of the schema; 0 of a file that holds nothing. Raises: LedgerNewer, LedgerDamaged, LedgerUnwritable."""
        with _sentences(self.path):
            version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
            tables = int(self._connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0])
        if version > _VERSION:
            raise LedgerNewer(
                f"{self.path} was written by newer software (schema {version}, this reads {_VERSION}); upgrade "
                "edge_client. The file was left as it is"
            )
        if (version == 0) != (tables == 0):
            raise LedgerDamaged(f"{self.path} is not a ledger; {_RESTORE}")
        return version

    def rows(self) -> Iterator[tuple[object, object, object]]:
        """(sequence, line, digest) of every record in order, of one moment; types as the file has them.

        Raises: LedgerDamaged, LedgerUnwritable.
        """
        with _sentences(self.path):
            yield from self._connection.execute("SELECT sequence, line, digest FROM records ORDER BY sequence")

    def digest(self, sequence: int) -> bytes | None:
        """Of the record with that number, if there is one. Raises: LedgerDamaged, LedgerUnwritable."""
        with _sentences(self.path):
            found = self._connection.execute("SELECT digest FROM records WHERE sequence = ?", (sequence,)).fetchone()
        return None if found is None else found[0]

    def marks(self) -> set[int]:
        """All marks. Raises: LedgerDamaged, LedgerUnwritable."""
        with _sentences(self.path):
            return {mark for (mark,) in self._connection.execute("SELECT mark FROM marks")}

    def sound(self) -> list[str]:
        """What SQLite's own check finds wrong. Raises: LedgerDamaged, LedgerUnwritable."""
        with _sentences(self.path):
            lines = [bytes(line).decode(errors="replace") for (line,) in self._connection.execute("PRAGMA quick_check")]
        return [] if lines == ["ok"] else lines

    def close(self) -> None:
        """Lets go of the file."""
        self._connection.close()


class Writer(Store):
    """The one writer of a ledger; holds NAME.lock as long as it is open."""

    def __init__(self, path: Path, faults: Faults = no_faults) -> None:
        """Takes the lock, and opens or creates the file. What is in it is not touched before `begin`.

        Raises:
            LedgerBusy, LedgerUnwritable.
        """
        self._faults = faults
        faults("open.locking")
        self._lock = _locked(path)
        try:
            faults("open.locked")
            with _sentences(path):
                path.touch(mode=0o600, exist_ok=True)
                faults("open.touched")
                super().__init__(path, sqlite3.connect(path, isolation_level=None))
            faults("open.connected")
        except BaseException:
            os.close(self._lock)
            raise

    def begin(self) -> None:
        """Before the first write, once it is known that the file may be written to. Raises: LedgerUnwritable."""
        with _sentences(self.path):
            (mode,) = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != b"wal":
                raise LedgerUnwritable(
                    f"{self.path} lies on a file system that SQLite's write-ahead log does not work on; put the "
                    "member's home on a local disk"
                )
            self._connection.execute("PRAGMA synchronous = FULL")
        self._faults("open.wal")

    def create(self, first: Record) -> None:
        """The schema and the first record, in one step. Raises: LedgerUnwritable."""
        with self._transaction():
            self._faults("create.begun")
            for statement in _SCHEMA:
                self._connection.execute(statement)
            self._faults("create.tables")
            self._connection.execute(f"PRAGMA user_version = {_VERSION}")
            self._insert(first)

    def append(self, record: Record, marks: Iterable[int] = ()) -> None:
        """On the disk when it returns; with new marks, both or neither.

        Raises:
            LedgerUnwritable: nothing was written; or the file has gone on without this process.
        """
        with self._transaction():
            newest = self._connection.execute(
                "SELECT sequence, digest FROM records ORDER BY sequence DESC LIMIT 1"
            ).fetchone()
            if newest != (record.sequence - 1, record.previous):
                raise LedgerUnwritable(
                    f"{self.path} has gone on without this process; nothing was written. Stop whatever else writes "
                    "there and start again"
                )
            self._connection.executemany("INSERT INTO marks (mark) VALUES (?)", ((mark,) for mark in marks))
            self._insert(record)

    def _insert(self, record: Record) -> None:
        self._connection.execute(
            "INSERT INTO records (sequence, line, digest) VALUES (?, ?, ?)",
            (record.sequence, record.line.decode(), record.digest),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _sentences(self.path):
            self._faults("append.beginning")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._faults("append.begun")
                yield
                self._faults("append.inserted")
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
        self._faults("append.committed")

    def close(self) -> None:
        """Lets go of file and lock."""
        self._faults("close.closing")
        super().close()
        os.close(self._lock)
        self._faults("close.closed")


@contextmanager
def reading(path: Path) -> Iterator[Store]:
    """A ledger as it is at this moment, beside a writer or without one; nothing is changed.

    Raises:
        LedgerMissing, LedgerNewer, LedgerDamaged, LedgerUnwritable.
    """
    if not path.exists():
        raise LedgerMissing(f"there is no ledger {path}")
    with _sentences(path):
        store = Store(path, _read_only(path))
    try:
        store.version()
        with _sentences(path):
            store._connection.execute("BEGIN")
        yield store
    finally:
        store.close()


def _read_only(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        # A closed ledger in a folder that cannot be written, such as a backup: WAL would put a file beside it.
        if _code(error) != sqlite3.SQLITE_READONLY or path.with_name(path.name + "-wal").exists():
            raise
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _locked(path: Path) -> int:
    """The descriptor that holds the lock. The kernel lets go of it when the process ends, however it ends."""
    lock = path.with_suffix(".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise _unwritable(path, error.strerror) from error
        raise LedgerBusy(
            f"{path} is in use by another process: one process at a time spends the budget of one data set. Stop the "
            f"other `edge_client run`, or give this data a name of its own; `fuser {lock}` shows who it is"
        ) from error
    return descriptor


_RESTORE = (
    "put back the newest copy of the file together with its -wal file, if there is one. Do not delete it: what it "
    "recorded is spent"
)


def _unwritable(path: Path, why: object) -> LedgerUnwritable:
    return LedgerUnwritable(
        f"{path} cannot be written ({why}); look at free space and the rights of {path.parent}. Nothing leaves "
        "this machine before it can"
    )


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if _code(error) in _OF_THE_PLACE:
            raise _unwritable(path, error) from error
        raise LedgerDamaged(f"{path} is damaged ({error}); {_RESTORE}") from error
    except UnicodeError as error:
        # A name in the schema that is no text: the module decodes those itself.
        raise LedgerDamaged(f"{path} is damaged (its schema is no text); {_RESTORE}") from error
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
