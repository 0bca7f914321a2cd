"""Which database a coordinator's folder belongs to: DIR/database.json, written by who serves.

The journal is a chain of hashes, so an entry's number with its hash is in one database only, and in no earlier state of
it. The mark holds the newest entry that this folder's coordinator has seen, and where. A command that would work on
another database, on an empty one, or on an older state of the right one, is refused before it has written anything:

- beside a server that has its database's URL in its environment, a command without that variable would find the SQLite
  file of the folder, and say "done" of what nobody serves;
- a server on a lost or older database would throw every member out, or give them numbers that they have seen.

Guarantees: the mark is never ahead of the database, for it is written after the commit; a check writes nothing, and
makes no file.
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

# What else says in a PostgreSQL URL which database it is. Never a password, which may stand there, too.
_NAMING = ("host", "hostaddr", "port", "dbname", "service")


class Mark(Document):
    """DIR/database.json."""

    # As `place` writes it.
    place: Location
    # The newest entry of the journal that was seen, and its hash.
    entry: int = Field(ge=1)
    head: Digest


def place(url: str) -> str:
    """Where a database is, without who asks for it: the same for every spelling of one URL as far as it shows.

    Raises:
        DatabaseUnusable: not a database URL.
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
    """The journal's head; an empty journal gets its first entry, so that this database is like no other."""
    if head(s).id == 0:
        note(s, "database_begun", "coordinator", now_ms, id=uuid.uuid4().hex)
    return head(s)


def keep(path: Path, url: str, newest: Head) -> None:
    """Writes the mark of a database whose journal ends so. To be called after the commit of that entry.

    Raises:
        DatabaseUnusable: the file cannot be written.
    """
    mark = Mark(place=place(url), entry=newest.id, head=newest.hash)
    try:
        durable_file(path, mark.canonical() + b"\n")
    except OSError as error:
        raise DatabaseUnusable(
            f"{path} cannot be written: {error.strerror}; check free space, and that the folder is this user's"
        ) from error


def check(path: Path, url: str) -> None:
    """Whether the database at `url` is the one of the mark at `path`, and no older than it. Without a mark any is.

    Raises:
        DatabaseUnexpected: it is another one, an empty one, or an older state of it. DatabaseUnusable: it cannot be
        read.
    """
    mark = _read(path)
    if mark is None:
        return
    place(url)  # Whether it is a URL at all.
    found, what = _entry(url, mark.entry)
    if found == mark.head:
        return
    _same_place(mark, url)
    raise DatabaseUnexpected(
        f"the database {mark.place} {what}, and this folder's coordinator has served from one whose journal goes to "
        f"entry {mark.entry} at least: put that one back, or restore a backup into an empty one with `coordinator "
        "restore`; to serve from this one all the same, without what is not in it: `coordinator serve --new-database`"
    )


def check_place(path: Path, url: str) -> None:
    """Whether `url` names the place that the mark does, whatever is in it now.

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
            f"this folder's coordinator serves from the database {mark.place}, and this command was told {here}: set "
            "TACIT_DATABASE_URL as the service has it (or database_url in coordinator.toml) and repeat; to move to "
            "the other one, add --new-database to `coordinator restore` or `coordinator serve`"
        )


def _entry(url: str, number: int) -> tuple[bytes | None, str]:
    """The hash of an entry of the journal, and what to say of a database where it is not the one expected."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        # Looked at here: to open it would make it.
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
            f"{error}; it says which database this folder belongs to: look whether that is the one it should be, then "
            "`coordinator serve --new-database` writes it anew"
        ) from error
