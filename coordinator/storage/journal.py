"""The audit journal: every administrative act and every outcome of a round, in the order in which they
happened.

An entry is written in the transaction of what it tells of, so neither exists without the other. Entries are
only ever added: triggers in the database refuse to change or remove one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.models import JournalRow

__all__ = ["JournalEntry", "Value", "journal", "note"]

Value = str | int | float | bool | None | list[str]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line of the journal."""

    id: int
    at_ms: int
    kind: str
    subject: str  # A member's or a job's name.
    fields: Mapping[str, Value]


def note(s: Session, kind: str, subject: str, now_ms: int, **fields: Value) -> None:
    """Adds an entry. Fields are numbers, words and names, digests in hexadecimal; never keys or secrets."""
    s.add(JournalRow(at_ms=now_ms, kind=kind, subject=subject, fields=fields))


def journal(s: Session, *, subject: str | None = None, after: int = 0, limit: int = 1000) -> list[JournalEntry]:
    """Entries in order, of one subject or of all, from the one after `after` on."""
    query = select(JournalRow).where(JournalRow.id > after).order_by(JournalRow.id).limit(limit)
    if subject is not None:
        query = query.where(JournalRow.subject == subject)
    return [JournalEntry(row.id, row.at_ms, row.kind, row.subject, row.fields) for row in s.scalars(query)]
