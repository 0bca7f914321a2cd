"""The audit journal: every administrative act and every outcome of a round, in order.

An entry is written in the transaction of the event it describes, so neither exists without the other. Entries are only
ever added: triggers in the database refuse to change, remove or replace one. Each is chained to the one before it
(`chain`), which reveals changes made without the triggers, except at the end (see there).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from coordinator.storage.chain import GENESIS, JournalEntry, Value, canonical_fields, entry_hash
from coordinator.storage.models import JournalRow

__all__ = [
    "Head",
    "JournalEntry",
    "StoredAct",
    "Value",
    "acts",
    "head",
    "journal",
    "lock_appends",
    "newest_authorities",
    "newest_ms",
    "newest_of",
    "note",
    "note_seldom",
    "noted",
    "pages",
]

# On PostgreSQL a writer holds it from its first entry to its commit. On SQLite every transaction is alone anyway.
_APPEND_LOCK = 7440744174427444
# Entries whose times are compared.
_NEWEST = 1000
_NOTED = "journal_noted"
PAGE = 1000
# Kinds of entries about a job that somebody caused, and what they did.
_ACTS = {"versions_pruned": "prune", "version_withdrawn": "withdraw"}
_MAX_ACTS = 200


@dataclass(frozen=True, slots=True)
class Head:
    """The newest entry; number 0 and 32 zero bytes for an empty journal."""

    id: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class StoredAct:
    """What somebody did to a job. by: an operator's name, or `machine:` and a user of the coordinator's machine."""

    at_ms: int
    by: str
    act: str


def note(s: Session, kind: str, subject: str, now_ms: int, **fields: Value) -> None:
    """Adds an entry. Fields are numbers, words, names and digests in hexadecimal; never keys or secrets.

    Raises:
        ValueError: a number is not finite.
    """
    canonical_fields(fields)
    lock_appends(s)
    before = head(s)
    chained = entry_hash(before.hash, before.id + 1, now_ms, kind, subject, fields)
    s.add(JournalRow(id=before.id + 1, at_ms=now_ms, kind=kind, subject=subject, fields=fields, hash=chained))
    s.flush()
    s.info.setdefault(_NOTED, []).append((kind, Head(before.id + 1, chained)))


def lock_appends(s: Session) -> None:
    """Lets no other transaction append to the journal or the roster log before this one ends."""
    if s.get_bind().dialect.name == "postgresql":
        s.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _APPEND_LOCK})


def noted(s: Session) -> list[tuple[str, Head]]:
    """Returns what this session's transaction has added so far: kinds, each with the head that it made."""
    return list(s.info.get(_NOTED, ()))


def note_seldom(
    s: Session, kind: str, subject: str, now_ms: int, within_ms: int, *, same: Collection[str] = (), **fields: Value
) -> bool:
    """Adds an entry unless the last `within_ms` have one with this subject, kind and the fields named in `same`.

    For events that others may cause as often as they like, so that they cannot fill the disk. Returns whether the entry
    was added.
    """
    recent = select(JournalRow.fields).where(
        JournalRow.subject == subject,
        JournalRow.kind == kind,
        JournalRow.at_ms > now_ms - within_ms,
        JournalRow.at_ms <= now_ms,
    )
    if any(all(found.get(name) == fields[name] for name in same) for found in s.scalars(recent)):
        return False
    note(s, kind, subject, now_ms, **fields)
    return True


def head(s: Session) -> Head:
    """Returns the newest entry's number and hash."""
    row = s.execute(select(JournalRow.id, JournalRow.hash).order_by(JournalRow.id.desc()).limit(1)).one_or_none()
    return Head(0, GENESIS) if row is None else Head(row.id, row.hash)


def journal(s: Session, *, subject: str | None = None, after: int = 0, limit: int = PAGE) -> list[JournalEntry]:
    """Returns entries in order, of one subject or of all, starting after entry `after`."""
    query = select(JournalRow).where(JournalRow.id > after).order_by(JournalRow.id).limit(limit)
    if subject is not None:
        query = query.where(JournalRow.subject == subject)
    return [JournalEntry(row.id, row.at_ms, row.kind, row.subject, row.fields, row.hash) for row in s.scalars(query)]


def acts(s: Session, job: str, *, last: int = _MAX_ACTS) -> list[StoredAct]:
    """Returns who changed a job or took its model away, in order.

    Args:
        job: The job's name.
        last: How many of the newest acts.
    """
    exported = (JournalRow.kind == "version_fetched") & JournalRow.fields["exported"].as_boolean()
    wanted = JournalRow.kind.in_(("operator_act", *_ACTS)) | exported
    query = select(JournalRow).where(JournalRow.subject == job, wanted, JournalRow.fields["by"].as_string() != "")
    rows = list(s.scalars(query.order_by(JournalRow.id.desc()).limit(last)))[::-1]
    return [
        StoredAct(row.at_ms, row.fields["by"], row.fields.get("act") or _ACTS.get(row.kind, "export")) for row in rows
    ]


def newest_of(s: Session, *kinds: str, after: int = 0) -> JournalEntry | None:
    """Returns the newest entry of these kinds, among those after `after`."""
    query = select(JournalRow).where(JournalRow.kind.in_(kinds), JournalRow.id > after)
    row = s.scalars(query.order_by(JournalRow.id.desc()).limit(1)).one_or_none()
    return None if row is None else JournalEntry(row.id, row.at_ms, row.kind, row.subject, row.fields, row.hash)


def newest_ms(s: Session) -> int:
    """Returns the latest time of the newest entries, in milliseconds since 1970; 0 without any.

    Several machines write them, each with its own clock.
    """
    newest = select(JournalRow.at_ms).order_by(JournalRow.id.desc()).limit(_NEWEST).subquery()
    return int(s.scalar(select(func.max(newest.c.at_ms))) or 0)


def newest_authorities(s: Session) -> tuple[bytes | None, bytes | None]:
    """Returns the fingerprints of the newest authority and of the one that was retired last; None if there is none."""
    rotated, retired = newest_of(s, "authority_rotated"), newest_of(s, "authority_retired")
    return (_fingerprint(rotated), _fingerprint(retired))


def _fingerprint(entry: JournalEntry | None) -> bytes | None:
    return None if entry is None else bytes.fromhex(str(entry.fields["fingerprint"]))


def pages(s: Session) -> Iterator[JournalEntry]:
    """Yields the whole journal, read page by page."""
    after = 0
    while page := journal(s, after=after):
        yield from page
        after = page[-1].id
        s.expunge_all()
