"""Which database a coordinator's folder belongs to: DIR/database.json, written by the process that serves.

The journal is a chain of hashes, so an entry's number with its hash occurs in one database only, and in no earlier
state of it. The mark holds the newest entry that this folder's coordinator has seen, and the database's place. `check`
refuses a command that would work on another database, on an empty one, or on an older state of the right one, before
the command has written anything:

- Suppose a server has its database's URL in its environment. A command without that variable would find the folder's
  SQLite file, and report success for a database that nobody serves.
- A server on a lost or older database would throw out every member, or give them numbers that they have seen.

Guarantees: the mark is never ahead of the database, because it is written after the commit; a check writes nothing and
creates no file.
"""

import uuid
from pathlib import Path

from pydantic import Field
from sqlalchemy import inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from coordinator.storage import snapshot
from coordinator.storage.database import engine_of
from coordinator.storage.errors import DatabaseUnexpected, DatabaseUnusable
from coordinator.storage.journal import Head, head, note
from coordinator.storage.models import JournalRow
from tacit.documents import Digest, Document, DocumentInvalid, Location
from toolkit.durable import durable_file

__all__ = ["Mark", "begin", "check", "check_place", "keep", "place"]

# The other parts of a PostgreSQL URL that say which database it is. Never a password, which may be there too.
_NAMING = ("host", "hostaddr", "port", "dbname", "service")


class Mark(Document):
    """The contents of DIR/database.json."""

    # In the form that `place` returns.
    place: Location
    # The newest journal entry seen, and its hash.
    entry: int = Field(ge=1)
    head: Digest


def place(url: str) -> str:
    """Returns where a database is, without credentials: the same for every spelling of one URL, as far as it shows.

    Raises:
        DatabaseUnusable: this is no database URL.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        engine_of(url)  # Says so without the password.
        raise
    if parsed.get_backend_name() == "sqlite":
        return f"sqlite:///{parsed.database or ''}"
    where = f"{parsed.host or ''}:{parsed.port}" if parsed.port else parsed.host or ""
    rest = "&".join(f"{name}={parsed.query[name]}" for name in _NAMING if name in parsed.query)
    return f"postgresql://{where}/{parsed.database or ''}" + (f"?{rest}" if rest else "")


def begin(s: Session, now_ms: int) -> Head:
    """Returns the journal's head. An empty journal first gets an entry that makes this database unlike any other."""
    if head(s).id == 0:
        note(s, "database_begun", "coordinator", now_ms, id=uuid.uuid4().hex)
    return head(s)


def keep(path: Path, url: str, newest: Head) -> None:
    """Writes the mark of a database whose journal ends with `newest`. Call it after the commit of that entry.

    Raises:
        DatabaseUnusable: the file cannot be written.
    """
    mark = Mark(place=place(url), entry=newest.id, head=newest.hash)
    try:
        durable_file(path, mark.canonical() + b"\n")
    except OSError as error:
        raise DatabaseUnusable(
            f"{path} cannot be written: {error.strerror}; check free space and the folder's owner"
        ) from error


def check(path: Path, url: str) -> None:
    """Checks that the database at `url` is the one of the mark at `path`, and no older. Without a mark, any passes.

    Raises:
        DatabaseUnexpected: it is another one, an empty one, or an older state of it.
        DatabaseUnusable: it cannot be read.
    """
    mark = _read(path)
    if mark is None:
        return
    place(url)  # Fails unless it is a database URL.
    found, what = _entry(url, mark.entry)
    if found == mark.head:
        return
    _same_place(mark, url)
    raise DatabaseUnexpected(
        f"the database {mark.place} {what}, but this folder's coordinator has served from one whose journal reaches at "
        f"least entry {mark.entry}; bring that one back, or restore a backup into an empty database with `coordinator "
        "restore`, or serve from this one, without what it lacks, with `coordinator serve --new-database`"
    )


def check_place(path: Path, url: str) -> None:
    """Checks that `url` names the mark's place, whatever the database holds now.

    Raises:
        DatabaseUnexpected: it is another place.
    """
    mark = _read(path)
    if mark is not None:
        _same_place(mark, url)


def _same_place(mark: Mark, url: str) -> None:
    here = place(url)
    if here != mark.place:
        raise DatabaseUnexpected(
            f"this folder's coordinator serves from the database {mark.place}, and this command was told {here}; "
            "set TACIT_DATABASE_URL as the service has it (or database_url in coordinator.toml) and repeat; to move to "
            "the other database, add --new-database to `coordinator restore` or `coordinator serve`"
        )


def _entry(url: str, number: int) -> tuple[bytes | None, str]:
    """Returns the hash of a journal entry, and what to say about the database if it is not the expected one."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        # Checked without opening it, which would create it.
        return None, "is not there"
    with snapshot.of_database(url) as connection:
        if not inspect(connection).has_table("journal"):
            return None, "is empty"
        found = connection.scalar(select(JournalRow.hash).where(JournalRow.id == number))
        if found is not None:
            return bytes(found), "is another one"
        any_ = connection.scalar(select(JournalRow.id).limit(1))
        return None, "is empty" if any_ is None else "is another one, or an older copy"


def _read(path: Path) -> Mark | None:
    try:
        return Mark.from_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatabaseUnusable(f"{path} cannot be read: {error.strerror}; check permissions") from error
    except DocumentInvalid as error:
        raise DatabaseUnusable(
            f"{error}; this file names the folder's database. Check that it is the right one, then write the file anew "
            "with `coordinator serve --new-database`"
        ) from error
