"""Reads every job for those who look often, as an operator's status does several times a minute.

Reading a job takes a dozen queries. Jobs that are over stay for good, so their number only grows, and everybody else
waits for the database meanwhile. So a job is read again only if the journal has a newer entry about it: whatever an
operator sees of a job changes together with such an entry, in the same transaction, also if another process writes it.
"""

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.jobs import StoredJob, load_job
from coordinator.storage.journal import head
from coordinator.storage.models import JobRow, JournalRow

__all__ = ["JobsSeen"]


class JobsSeen:
    """Remembers the jobs as they were read last. Used inside one database's transactions, one at a time."""

    def __init__(self) -> None:
        self._known: dict[str, StoredJob] = {}
        self._entry = 0

    def read(self, s: Session) -> list[StoredJob]:
        """Returns every job, in the order of creation.

        Of each, `confirmed_sums` and `left_out` may be older: they are the driver's, and change without such an entry.
        """
        newest = head(s).id
        news = select(JournalRow.subject).where(JournalRow.id > self._entry, JournalRow.id <= newest).distinct()
        # Without a known job, all are read, and the journal may be long.
        changed = set(s.scalars(news)) if self._known else set[str]()
        unchanged = self._known.keys() - changed
        names = s.scalars(select(JobRow.name).order_by(JobRow.created_ms, JobRow.name)).all()
        self._known = {name: self._known[name] if name in unchanged else load_job(s, name) for name in names}
        self._entry = newest
        return list(self._known.values())
