"""Members' withdrawals: who is asked no more, which versions hold a member's updates, and the marks on them.

An update that went into a sum cannot be taken out again: every later version was made from it. So a withdrawal marks
the first version whose sum held the member and all that were made from it, other jobs' included. Versions before that
one hold nothing of the member. A mark stays for good, and later versions inherit it. So does a version whose sum was
being opened while the member withdrew (`mark_published`).

A withdrawal is from all jobs, or from one job and every job that starts from a version of it, directly or through
others. There is no way back, so the same withdrawal again changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from coordinator.storage.errors import NotFound
from coordinator.storage.journal import JournalEntry, journal, note
from coordinator.storage.members import member as load_member
from coordinator.storage.models import (
    AttemptRow,
    CorpusRow,
    JobRow,
    JournalRow,
    VersionRow,
    WithdrawalMarkRow,
    WithdrawalRow,
)

__all__ = [
    "Held",
    "Proof",
    "Withdrawal",
    "carry_marks",
    "left_out",
    "mark_published",
    "restart_points",
    "successors",
    "withdraw",
]


@dataclass(frozen=True, slots=True)
class Proof:
    """What proves that the member itself asked: its request (`tacit.withdrawal`), canonical; its signature on it; and
    its certificate, DER.
    """

    request: bytes
    signature: bytes
    certificate: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """What one job holds of a member.

    Args:
        job: the job's name.
        first: the first version that holds an update of the member; 0: the job started from one that does.
        newest: the newest version; all from `first` on hold the member's updates.
        sums: the versions whose own sums the member was in.
        exported: the marked versions that were exported.
        text: whether the member's synthetic text counted in the job.
        marked: whether an earlier withdrawal marked the job.
        start_pruned: whether the version before `first`, from which the job could start anew, was pruned.
    """

    job: str
    first: int
    newest: int
    sums: tuple[int, ...]
    exported: tuple[int, ...]
    text: bool
    marked: bool
    start_pruned: bool


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """What a withdrawal found.

    Args:
        held: what jobs hold of the member; each job comes after the one that it started from.
        entry: the journal's entry with the member's own request. None: it did not ask itself.
        texts: files of synthetic text that counted until now.
    """

    held: tuple[Held, ...]
    entry: JournalEntry | None
    texts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """A job and the version that it started from, as (job, number), if it was another job's."""

    name: str
    start: tuple[str, int] | None


def withdraw(
    s: Session,
    member: str,
    job: str | None,
    now_ms: int,
    *,
    by: str = "",
    proof: Proof | None = None,
    dry_run: bool = False,
) -> Withdrawal:
    """Records a withdrawal, finds what every job in its scope holds of the member, and marks it.

    Args:
        s: the transaction.
        member: the member's name.
        job: the job. None: all, for good.
        now_ms: the time.
        by: the operator who asks, for the journal; empty if the member does.
        proof: the member's own request.
        dry_run: whether to change nothing.

    Raises:
        NotFound: no such member or job.
    """
    if load_member(s, member) is None:
        raise NotFound(f"there is no member named {member}; `coordinator member list` shows all members")
    if job is not None and s.get(JobRow, job) is None:
        raise NotFound(f"there is no job named {job}; `coordinator job list` shows all jobs")
    marks = _marks(s, member)
    lines = _lines(s)
    # Over all jobs: one in scope may have started from a version that holds the member, of a job that is not in scope.
    found: dict[str, Held] = {}
    for line in lines:
        held = _held(s, line, member, found, marks)
        if held is not None:
            found[line.name] = held
    scope = _scope(lines, job)
    mine = tuple(found[line.name] for line in scope if line.name in found)
    if dry_run:
        return Withdrawal(mine, None, ())
    entry = _record(s, member, job, now_ms, by, proof)
    for held in mine:
        if held.first < marks.get(held.job, held.newest + 1):
            _mark(s, held.job, member, held.first, len(held.sums), now_ms, by=by, before=marks.get(held.job))
    texts = tuple(text for line in scope for text in _take_back(s, line.name, member, now_ms))
    return Withdrawal(mine, entry, texts)


def left_out(s: Session, job: str) -> frozenset[str]:
    """The members that a job asks for nothing: those that withdrew from all, from it, or from a job that it started
    from, directly or through others.
    """
    line = []
    row = s.get(JobRow, job)
    while row is not None and row.name not in line:
        line.append(row.name)
        row = None if row.earlier_job is None else s.get(JobRow, row.earlier_job)
    scope = or_(WithdrawalRow.job.is_(None), WithdrawalRow.job.in_(line))
    return frozenset(s.scalars(select(WithdrawalRow.member).where(scope)))


def carry_marks(s: Session, job: str, earlier: tuple[str, int]) -> int:
    """Marks a new job's start like the version that it is. Returns how many members withdrew whose updates it holds."""
    mine = (WithdrawalMarkRow.job == earlier[0], WithdrawalMarkRow.first_version <= earlier[1])
    members = list(s.scalars(select(WithdrawalMarkRow.member).where(*mine)))
    s.add_all(WithdrawalMarkRow(job=job, member=member, first_version=0) for member in members)
    return len(members)


def mark_published(s: Session, job: str, number: int, survivors: Collection[str], now_ms: int) -> None:
    """Marks a version that was just published for members that withdrew while its sum was on its way."""
    marked = set(s.scalars(select(WithdrawalMarkRow.member).where(WithdrawalMarkRow.job == job)))
    for member in sorted(left_out(s, job).intersection(survivors) - marked):
        _mark(s, job, member, number, 1, now_ms, by="")


def restart_points(s: Session, job: str, wanted: Mapping[int, int]) -> frozenset[int]:
    """The versions before some member's first sum: from one of them the job starts anew if that member withdraws.

    Args:
        s: the transaction.
        job: the job's name.
        wanted: the number of the version that each round made.
    """
    published = select(AttemptRow).where(AttemptRow.job == job, AttemptRow.outcome == "published")
    first: dict[str, int] = {}
    for row in s.scalars(published):
        if row.round in wanted:
            for member in row.survivors:
                first[member] = min(wanted[row.round], first.get(member, wanted[row.round]))
    return frozenset(number - 1 for number in first.values())


def successors(s: Session, job: str) -> list[tuple[str, int, int, str]]:
    """The jobs that started from a version of this one, in the order of creation.

    Returns:
        For each its name, the version, how many members withdrew whose updates its newest version holds, its status.
    """
    rows = s.scalars(select(JobRow).where(JobRow.earlier_job == job).order_by(JobRow.created_ms, JobRow.name))
    return [(row.name, row.earlier_version or 0, _count(s, row.name), row.status) for row in rows]


# ---- inside ----------------------------------------------------------------------------------------------------


def _lines(s: Session) -> list[_Line]:
    """All jobs. Each comes after the one that it started from, also if the clock went back in between."""
    rows = s.execute(
        select(JobRow.name, JobRow.earlier_job, JobRow.earlier_version).order_by(JobRow.created_ms, JobRow.name)
    )
    lines = {name: _Line(name, None if job is None else (job, number or 0)) for name, job, number in rows}
    ordered: dict[str, _Line] = {}
    for line in lines.values():
        above = []
        each: _Line | None = line
        while each is not None and each.name not in ordered and each not in above:
            above.append(each)
            each = None if each.start is None else lines.get(each.start[0])
        ordered |= {found.name: found for found in reversed(above)}
    return list(ordered.values())


def _scope(lines: Sequence[_Line], job: str | None) -> list[_Line]:
    """The jobs that a withdrawal is about, those that others started from coming first."""
    if job is None:
        return list(lines)
    names, scope = {job}, []
    for line in lines:
        if line.name == job or (line.start is not None and line.start[0] in names):
            names.add(line.name)
            scope.append(line)
    return scope


def _record(s: Session, member: str, job: str | None, now_ms: int, by: str, proof: Proof | None) -> JournalEntry | None:
    """Stores the withdrawal and notes who asked, unless both are there. Returns the entry with the member's request."""
    mine = (WithdrawalRow.member == member, WithdrawalRow.job.is_(None) if job is None else WithdrawalRow.job == job)
    new = s.scalar(select(WithdrawalRow.id).where(*mine)) is None
    if new:
        s.add(WithdrawalRow(member=member, job=job, at_ms=now_ms))
        s.flush()
    told = _requests(s, member, job)
    if proof is None:
        if new:
            note(s, "withdrawal_taken", member, now_ms, job=job or "", by=by, request="", signature="", certificate="")
        return None
    if not told:
        note(
            s,
            "withdrawal_taken",
            member,
            now_ms,
            job=job or "",
            by=by,
            request=proof.request.decode(),
            signature=proof.signature.hex(),
            certificate=proof.certificate.hex(),
        )
        told = _requests(s, member, job)
    return journal(s, after=told[0] - 1, limit=1)[0]


def _requests(s: Session, member: str, job: str | None) -> list[int]:
    """Numbers of the entries with a request of the member itself."""
    rows = select(JournalRow.id, JournalRow.fields).where(
        JournalRow.subject == member, JournalRow.kind == "withdrawal_taken"
    )
    return [
        number
        for number, fields in s.execute(rows.order_by(JournalRow.id))
        if fields["job"] == (job or "") and fields["request"]
    ]


def _marks(s: Session, member: str) -> dict[str, int]:
    rows = s.scalars(select(WithdrawalMarkRow).where(WithdrawalMarkRow.member == member))
    return {row.job: row.first_version for row in rows}


def _mark(
    s: Session, job: str, member: str, first: int, sums: int, now_ms: int, *, by: str, before: int | None = None
) -> None:
    """Marks a job's versions from `first` on. `before`: from where on they are marked already."""
    newest = s.scalar(select(func.max(VersionRow.number)).where(VersionRow.job == job)) or 0
    if before is None:
        s.add(WithdrawalMarkRow(job=job, member=member, first_version=first))
    else:
        lower = update(WithdrawalMarkRow).where(WithdrawalMarkRow.job == job, WithdrawalMarkRow.member == member)
        s.execute(lower.values(first_version=first))
        newest = before - 1
    mine = (VersionRow.job == job, VersionRow.number >= first, VersionRow.number <= newest)
    s.execute(update(VersionRow).where(*mine).values(withdrawn=VersionRow.withdrawn + 1))
    # Named under the member, and without its name under the job, because a passport repeats the latter.
    note(s, "member_withdrawn", member, now_ms, job=job, first=first, by=by)
    note(s, "version_withdrawn", job, now_ms, first=first, newest=newest, sums=sums, members=1, by=by)
    s.flush()


def _count(s: Session, job: str) -> int:
    return s.scalar(select(func.count()).where(WithdrawalMarkRow.job == job)) or 0


def _take_back(s: Session, job: str, member: str, now_ms: int) -> list[bytes]:
    """Makes the member's synthetic text count no longer. Returns the digest of the file, if there was one."""
    mine = (CorpusRow.job == job, CorpusRow.member == member, CorpusRow.replaced_ms.is_(None))
    row = s.scalars(select(CorpusRow).where(*mine, CorpusRow.digest.is_not(None))).one_or_none()
    if row is None or row.digest is None:
        return []
    row.replaced_ms = now_ms
    # Before the next answer is added: the schema allows one that counts.
    s.flush()
    s.add(CorpusRow(job=job, member=member, declined_ms=now_ms))
    note(s, "corpus_declined", job, now_ms, member=member)
    return [bytes(row.digest)]


def _held(s: Session, line: _Line, member: str, found: Mapping[str, Held], marks: Mapping[str, int]) -> Held | None:
    versions = {row.round: row for row in s.scalars(select(VersionRow).where(VersionRow.job == line.name))}
    published = select(AttemptRow).where(AttemptRow.job == line.name, AttemptRow.outcome == "published")
    rounds = [row.round for row in s.scalars(published) if member in row.survivors]
    sums = tuple(sorted(versions[each].number for each in rounds if each in versions))
    start = line.start
    inherits = start is not None and start[0] in found and start[1] >= found[start[0]].first
    firsts = [*sums, *([0] if inherits else []), *([marks[line.name]] if line.name in marks else [])]
    if not firsts:
        return None
    first = min(firsts)
    newest = max(row.number for row in versions.values())
    fetched = s.scalars(
        select(JournalRow.fields).where(JournalRow.subject == line.name, JournalRow.kind == "version_fetched")
    )
    digests = {fields["version"] for fields in fetched if fields.get("exported")}
    exported = sorted(r.number for r in versions.values() if r.number >= first and r.digest.hex() in digests)
    counts = (CorpusRow.job == line.name, CorpusRow.member == member, CorpusRow.replaced_ms.is_(None))
    text = s.scalar(select(CorpusRow.id).where(*counts, CorpusRow.digest.is_not(None))) is not None
    before = next((row for row in versions.values() if row.number == first - 1), None)
    # The start's blob always stays: the job's document names it.
    pruned = before is not None and before.number > 0 and before.pruned_ms is not None
    return Held(line.name, first, newest, sums, tuple(exported), text, line.name in marks, pruned)
