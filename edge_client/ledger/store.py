"""The ledger's file: records in SQLite. Nothing here knows about privacy.

Guarantees:

- a record is on the disk when `append` returns (WAL, synchronous FULL), assuming that the disk honours fsync;
- a file is either empty, which reads as no records, or has the whole schema and a first record;
- triggers allow records only to be appended. They prevent accidents, not attacks: anyone who may write the file can
  drop them;
- every failure of SQLite or the disk becomes one of the errors below.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_client.ledger.chain import Record
from toolkit.durable import Faults, make_folder, no_faults

__all__ = [
    "LedgerBusy",
    "LedgerDamaged",
    "LedgerError",
    "LedgerMissing",
    "LedgerNewer",
    "LedgerUnwritable",
    "Store",
    "Writer",
    "in_use",
    "reading",
]

_VERSION = 1
_SCHEMA = (
    # `line` is the record, `digest` its SHA-256: see edge_client/ledger/chain.py.
    "CREATE TABLE records (sequence INTEGER PRIMARY KEY, line TEXT NOT NULL, digest BLOB NOT NULL) STRICT",
    # Keyed hashes of the examples: see edge_client/ledger/overlap.py.
    "CREATE TABLE marks (mark INTEGER PRIMARY KEY) STRICT",
    "CREATE TRIGGER records_unchanged BEFORE UPDATE ON records "
    "BEGIN SELECT RAISE(ABORT, 'records are never changed'); END",
    "CREATE TRIGGER records_kept BEFORE DELETE ON records BEGIN SELECT RAISE(ABORT, 'records are never removed'); END",
    # REPLACE deletes the row that it conflicts with, and no DELETE trigger fires unless the connection set
    # recursive_triggers (sqlite.org/lang_conflict.html).
    "CREATE TRIGGER records_appended BEFORE INSERT ON records "
    "WHEN NEW.sequence IS NOT (SELECT coalesce(max(sequence), 0) + 1 FROM records) "
    "BEGIN SELECT RAISE(ABORT, 'records are only appended'); END",
)

# Primary result codes about the disk or the folder, not the file's content (sqlite.org/rescode.html).
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
    """A ledger cannot be used, or not for this call. The sentence says what to do."""


class LedgerMissing(LedgerError):
    """There is no ledger of that name."""


class LedgerBusy(LedgerError):
    """Another process has the ledger open."""


class LedgerDamaged(LedgerError):
    """The file's content is not what was written."""


class LedgerNewer(LedgerError):
    """Newer software wrote the file."""


class LedgerUnwritable(LedgerError):
    """The disk or the folder does not take a write. Nothing was charged that is not on the disk."""


class Store:
    """A connection to the file. For one thread at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        # A damaged file can hold invalid UTF-8. It must be read as bytes, to be compared with its hash.
        connection.text_factory = bytes

    def version(self) -> int:
        """The version of the schema; 0 for an empty file.

        Raises:
            LedgerNewer: newer software wrote the file.
            LedgerDamaged: the file is not a ledger.
            LedgerUnwritable: the file cannot be read.
        """
        with _sentences(self.path):
            version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
            tables = int(self._connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0])
        if version > _VERSION:
            raise LedgerNewer(
                f"{self.path} was written by newer software (schema {version}, this one reads {_VERSION}); upgrade "
                "edge_client. The file is unchanged"
            )
        if (version == 0) != (tables == 0):
            raise LedgerDamaged(f"{self.path} is not a ledger; {_RESTORE}")
        return version

    def rows(self) -> Iterator[tuple[object, object, object]]:
        """Yields (sequence, line, digest) of every record in order, from one snapshot; types are those in the file.

        Raises:
            LedgerDamaged, LedgerUnwritable: the file cannot be read.
        """
        if not self.version():
            return
        with _sentences(self.path):
            yield from self._connection.execute("SELECT sequence, line, digest FROM records ORDER BY sequence")

    def digest(self, sequence: int) -> bytes | None:
        """The digest of the record with a number. None: there is no such record.

        Raises:
            LedgerDamaged, LedgerUnwritable: the file cannot be read.
        """
        if not self.version():
            return None
        with _sentences(self.path):
            found = self._connection.execute("SELECT digest FROM records WHERE sequence = ?", (sequence,)).fetchone()
        return None if found is None else found[0]

    def marks(self) -> set[int]:
        """All marks.

        Raises:
            LedgerDamaged, LedgerUnwritable: the file cannot be read.
        """
        if not self.version():
            return set()
        with _sentences(self.path):
            return {mark for (mark,) in self._connection.execute("SELECT mark FROM marks")}

    def sound(self) -> list[str]:
        """The problems that SQLite's own check finds; empty if the file is sound.

        Raises:
            LedgerDamaged, LedgerUnwritable: the file cannot be read.
        """
        with _sentences(self.path):
            lines = [bytes(line).decode(errors="replace") for (line,) in self._connection.execute("PRAGMA quick_check")]
        return [] if lines == ["ok"] else lines

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()


class Writer(Store):
    """The only writer of a ledger. It holds NAME.lock while it is open."""

    def __init__(self, path: Path, faults: Faults = no_faults) -> None:
        """Takes the lock, and opens or creates the file. Its content is not changed before `begin`.

        Raises:
            LedgerBusy: another process has the ledger open.
            LedgerUnwritable: the disk or the folder does not take the file.
        """
        self._faults = faults
        faults("open.locking")
        self._lock = _locked(path)
        try:
            faults("open.locked")
            with _sentences(path):
                path.touch(mode=0o600, exist_ok=True)
                faults("open.touched")
                # The thread that opens it is not the one that writes (`edge_client.ledger.writer_thread`).
                super().__init__(path, sqlite3.connect(path, isolation_level=None, check_same_thread=False))
            faults("open.connected")
        except BaseException:
            os.close(self._lock)
            raise

    def begin(self) -> None:
        """Prepares the file for writing, once the caller has checked that it may be written.

        Raises:
            LedgerUnwritable: the file system or the disk does not allow it.
        """
        with _sentences(self.path):
            (mode,) = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != b"wal":
                raise LedgerUnwritable(
                    f"{self.path} is on a file system without support for SQLite's write-ahead log; put the member's "
                    "home on a local disk"
                )
            self._connection.execute("PRAGMA synchronous = FULL")
        self._faults("open.wal")

    def create(self, first: Record) -> None:
        """Writes the schema and the first record in one transaction.

        Raises:
            LedgerUnwritable: nothing was written.
        """
        with self._transaction():
            self._faults("create.begun")
            for statement in _SCHEMA:
                self._connection.execute(statement)
            self._faults("create.tables")
            self._connection.execute(f"PRAGMA user_version = {_VERSION}")
            self._insert(first)

    def append(self, record: Record, marks: Iterable[int] = ()) -> None:
        """Appends a record and new marks, both or neither. They are on the disk when this returns.

        Raises:
            LedgerUnwritable: nothing was written. The disk refused, or another process wrote to the file.
        """
        with self._transaction():
            newest = self._connection.execute(
                "SELECT sequence, digest FROM records ORDER BY sequence DESC LIMIT 1"
            ).fetchone()
            if newest != (record.sequence - 1, record.previous):
                raise LedgerUnwritable(
                    f"another process wrote to {self.path}, so this one wrote nothing. Stop the other process and "
                    "start again"
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
        """Closes the file and gives up the lock."""
        self._faults("close.closing")
        super().close()
        os.close(self._lock)
        self._faults("close.closed")


@contextmanager
def reading(path: Path) -> Iterator[Store]:
    """Opens a ledger to read its present state, with or without a writer beside. Changes nothing.

    Raises:
        LedgerMissing: there is no such file.
        LedgerNewer: newer software wrote the file.
        LedgerDamaged: the file is not a ledger.
        LedgerUnwritable: the file cannot be read.
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
        # WAL would create a file beside the ledger, which fails for a closed ledger in a read-only folder (a backup).
        if _code(error) != sqlite3.SQLITE_READONLY or path.with_name(path.name + "-wal").exists():
            raise
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def in_use(path: Path) -> bool:
    """Whether a process has the ledger open to write.

    Raises:
        LedgerUnwritable: its lock cannot be read.
    """
    try:
        with path.with_suffix(".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError) as error:
        return isinstance(error, BlockingIOError)
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    return False


def _locked(path: Path) -> int:
    """Takes the lock and returns its descriptor. The kernel frees the lock when the process ends, however it ends."""
    lock = path.with_suffix(".lock")
    try:
        make_folder(path.parent)
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
            f"{path} is in use by another process, and one process at a time may spend the budget of a data set. Stop "
            f"the other `edge_client run` (`fuser {lock}` shows it), or give this data a name of its own"
        ) from error
    return descriptor


_RESTORE = (
    "put back the newest copy of the file, with its -wal file if there is one. Do not delete it: what it recorded is "
    "spent"
)


def _unwritable(path: Path, why: object) -> LedgerUnwritable:
    return LedgerUnwritable(
        f"{path} cannot be written ({why}); check free space and the permissions of {path.parent}. Nothing leaves "
        "this machine until it can be written"
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
        # The sqlite3 module decodes names in the schema itself, whatever `text_factory` is.
        raise LedgerDamaged(f"{path} is damaged (its schema is not text); {_RESTORE}") from error
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
