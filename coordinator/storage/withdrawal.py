"""A member's withdrawal: which versions hold its updates, and the mark on them.

An update that went into a sum cannot be taken out again: every later version was made from it. So a withdrawal marks
the first version whose sum held the member and all that were made from it, other jobs' included. Versions before that
one hold nothing of the member. The mark stays for good, and later versions inherit it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.storage.errors import NotFound
from coordinator.storage.journal import note
from coordinator.storage.members import member as load_member
from coordinator.storage.models import AttemptRow, CorpusRow, JobRow, JournalRow, VersionRow

__all__ = ["Withdrawn", "withdraw"]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What one job holds of a member.

    Args:
        job: the job's name.
        first: the first version that holds an update of the member; 0: the job started from one that does.
        newest: the newest version; all from `first` on hold the member's updates.
        sums: the versions whose own sums the member was in.
        exported: the marked versions that were exported.
        text: whether the member's synthetic text counts in the job.
        marked: whether an earlier withdrawal marked the job.
    """

    job: str
    first: int
    newest: int
    sums: tuple[int, ...]
    exported: tuple[int, ...]
    text: bool
    marked: bool


def withdraw(
    s: Session,
    member: str,
    earlier: Mapping[str, tuple[str, int]],
    now_ms: int,
    *,
    by: str,
    dry_run: bool = False,
) -> list[Withdrawn]:
    """Finds what every job holds of a member, and marks it. A job that is marked for the member already stays as it is.

    Args:
        s: the transaction.
        member: the member's name.
        earlier: the version that each job started from, as (job, number), for jobs that started from one.
        now_ms: the time.
        by: who asks, for the journal.
        dry_run: whether to mark nothing.

    Raises:
        NotFound: no such member.
    """
    if load_member(s, member) is None:
        raise NotFound(f"there is no member named {member}; `coordinator member list` shows all members")
    told = s.scalars(select(JournalRow).where(JournalRow.subject == member, JournalRow.kind == "member_withdrawn"))
    before = {str(row.fields["job"]): row.at_ms for row in told}
    found: dict[str, Withdrawn] = {}
    for job, created_ms in s.execute(select(JobRow.name, JobRow.created_ms).order_by(JobRow.created_ms, JobRow.name)):
        start = earlier.get(job)
        held = _held(s, job, member, start, found)
        if held is None:
            continue
        # A job that was created from a marked version has the mark from its start on.
        marked = job in before or (start is not None and created_ms >= before.get(start[0], created_ms + 1))
        found[job] = Withdrawn(*held, marked)
        if dry_run or marked:
            continue
        of = found[job]
        mine = (VersionRow.job == job, VersionRow.number >= of.first)
        s.execute(update(VersionRow).where(*mine).values(withdrawn=VersionRow.withdrawn + 1))
        # Named under the member, and without its name under the job, because a passport repeats the latter.
        note(s, "member_withdrawn", member, now_ms, job=job, first=of.first, by=by)
        sums = len(of.sums)
        note(s, "version_withdrawn", job, now_ms, first=of.first, newest=of.newest, sums=sums, members=1, by=by)
    return list(found.values())


def _held(
    s: Session, job: str, member: str, start: tuple[str, int] | None, found: Mapping[str, Withdrawn]
) -> tuple[str, int, int, tuple[int, ...], tuple[int, ...], bool] | None:
    versions = {row.round: row for row in s.scalars(select(VersionRow).where(VersionRow.job == job))}
    published = select(AttemptRow).where(AttemptRow.job == job, AttemptRow.outcome == "published")
    rounds = [row.round for row in s.scalars(published) if member in row.survivors]
    sums = tuple(sorted(versions[each].number for each in rounds if each in versions))
    inherits = start is not None and start[0] in found and start[1] >= found[start[0]].first
    if not sums and not inherits:
        return None
    first = 0 if inherits else sums[0]
    newest = max(row.number for row in versions.values())
    fetched = s.scalars(
        select(JournalRow.fields).where(JournalRow.subject == job, JournalRow.kind == "version_fetched")
    )
    digests = {fields["version"] for fields in fetched if fields.get("exported")}
    exported = sorted(r.number for r in versions.values() if r.number >= first and r.digest.hex() in digests)
    counts = (CorpusRow.job == job, CorpusRow.member == member, CorpusRow.replaced_ms.is_(None))
    text = s.scalar(select(CorpusRow.id).where(*counts, CorpusRow.digest.is_not(None))) is not None
    return job, first, newest, sums, tuple(exported), text
