"""What others wrote to the database that the serving process must act on, as the journal has it.

A commit may be done although its answer was lost, and commands beside the server write, too. Each such change has an
entry in the journal, in the same transaction. So one query of the newest entries says whether there is anything to do,
however many members and jobs there are.
"""

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.domain.jobs import JobStatus
from coordinator.storage.members import MemberStatus
from coordinator.storage.models import JobRow, JournalRow, MemberRow

__all__ = ["Missed", "missed"]

# Entries looked at in one call. Their subjects fit one query.
_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Missed:
    """What entries of the journal ask of the serving process. All of it may be done already.

    Args:
        entry: the number of the last entry that was looked at.
        ended: members that were revoked, or invited anew, and are not enrolled now.
        withdrew: members that withdrew from a job or from all.
        texts: whether files of synthetic text may count no longer.
        jobs: jobs that were created and are running.
    """

    entry: int
    ended: frozenset[str] = frozenset()
    withdrew: frozenset[str] = frozenset()
    texts: bool = False
    jobs: frozenset[str] = frozenset()


def missed(s: Session, after: int) -> Missed:
    """Returns what the next entries after entry `after` ask for."""
    entries = select(JournalRow.id, JournalRow.kind, JournalRow.subject).where(JournalRow.id > after)
    added = s.execute(entries.order_by(JournalRow.id).limit(_AT_ONCE)).all()
    if not added:
        return Missed(after)
    subjects: dict[str, set[str]] = {}
    for _, kind, subject in added:
        subjects.setdefault(kind, set()).add(subject)
    left = subjects.get("member_revoked", set()) | subjects.get("member_invited", set())
    created = subjects.get("job_created", set())
    ended = select(MemberRow.name).where(MemberRow.name.in_(left), MemberRow.status != MemberStatus.ENROLLED.value)
    running = select(JobRow.name).where(JobRow.name.in_(created), JobRow.status == JobStatus.RUNNING.value)
    return Missed(
        added[-1].id,
        frozenset(s.scalars(ended)) if left else frozenset(),
        frozenset(subjects.get("withdrawal_taken", ())),
        bool(subjects.keys() & {"corpus_declined", "corpus_received"}),
        frozenset(s.scalars(running)) if created else frozenset(),
    )
