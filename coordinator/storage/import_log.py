"""Brings back what the roster log has lost, after an older backup was restored, from a member's copy.

Members that the log revokes are revoked here, too, in the same transaction. The backup says that they are enrolled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.storage.journal import lock_appends, note
from coordinator.storage.members import MemberStatus, revoke_member
from coordinator.storage.models import MemberRow, RosterLogRow
from coordinator.storage.roster import entries
from tacit.roster import Entry, Kind

__all__ = ["BroughtBack", "LogContradicts", "bring_back"]


class LogContradicts(ValueError):
    """Entries from elsewhere do not continue this log. The sentence says why and what to do."""


@dataclass(frozen=True, slots=True)
class BroughtBack:
    """What was brought back.

    Args:
        entries: The number of entries.
        revoked: The members that are revoked now because the log says so, sorted.
        size: The number of entries of the log now.
    """

    entries: int
    revoked: tuple[str, ...]
    size: int


def bring_back(s: Session, known: Sequence[Entry], now_ms: int, *, by: str = "") -> BroughtBack:
    """Adds the entries that this log has lost, and revokes the members that they revoke.

    Args:
        known: the whole log as a member has it, whose head the caller has verified.
        now_ms: the present time.
        by: who does it, for the journal.

    Raises:
        LogContradicts: neither log is a beginning of the other.
    """
    lock_appends(s)
    here = entries(s, 0)
    if here[: len(known)] != list(known[: len(here)]):
        raise LogContradicts(
            f"this database's roster log, of {len(here)} entries, is not the beginning of that one, of {len(known)}: "
            "it grew in another way since the backup. Restore the backup again, and bring the entries back before the "
            "first member connects"
        )
    lost = known[len(here) :]
    for number, entry in enumerate(lost, start=len(here) + 1):
        s.add(
            RosterLogRow(
                id=number,
                certificate=entry.certificate,
                key=entry.key,
                name=entry.name,
                role=entry.role.value,
                kind=entry.kind.value,
                at_ms=entry.at_ms,
            )
        )
    s.flush()
    for at in range(0, len(lost), 1000):
        leaves = [entry.leaf.hex() for entry in lost[at : at + 1000]]
        note(s, "roster_log_brought_back", "coordinator", now_ms, leaves=leaves, by=by)
    revoked = tuple(_revoke(s, [*here, *lost], now_ms, by))
    return BroughtBack(len(lost), revoked, s.scalar(select(func.max(RosterLogRow.id))) or 0)


def _revoke(s: Session, known: Sequence[Entry], now_ms: int, by: str) -> list[str]:
    """Revokes the enrolled members whose certificate on record the log revokes. Returns their names, sorted.

    One that the log has under a newer certificate enrolled again since the backup. It needs a new invitation like
    everybody who enrolled since, and the log revokes what it had.
    """
    revocations: dict[str, int] = {}
    newest: dict[str, Kind] = {}
    issued: dict[tuple[str, bytes], int] = {}
    for number, entry in enumerate(known, start=1):
        newest[entry.name] = entry.kind
        if entry.kind is Kind.REVOKED:
            revocations[entry.name] = number
        else:
            issued[entry.name, entry.certificate] = number
    enrolled = select(MemberRow.name, MemberRow.fingerprint).where(MemberRow.status == MemberStatus.ENROLLED.value)
    revoked = sorted(
        name
        for name, fingerprint in s.execute(enrolled).all()
        if issued.get((name, fingerprint or b""), 0) < revocations.get(name, 0)
    )
    for name in revoked:
        revoke_member(s, name, now_ms, by=by, logged=newest[name] is Kind.REVOKED)
    return revoked
