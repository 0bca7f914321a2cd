"""Members' withdrawals: who is asked no more, which versions hold a member's updates, and the marks on them.

An update that went into a sum cannot be taken out again: every later version was made from it. So a withdrawal marks
the first version whose sum held the member and all that were made from it, other jobs' included. Versions before that
one hold nothing of the member. A mark stays for good, and later versions inherit it. So does a version whose sum was
being opened while the member withdrew (`mark_published`).

A withdrawal is from all jobs, or from one job and every job that starts from a version of it, directly or through
others, or measures one of these. There is no way back, so the same withdrawal again changes nothing, and is answered
from the marks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Text, cast, func, or_, select, tuple_, update
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
    "left_by",
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
        sums: how many versions' own sums the member was in.
        exported: the marked versions that were exported.
        text: whether the member's synthetic text counted in the job.
        marked: whether an earlier withdrawal marked the job.
        start_pruned: whether the version before `first`, from which the job could start anew, was pruned.
    """

    job: str
    first: int
    newest: int
    sums: int
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
    """A job; the version that it started from, as (job, number), if it was another job's; and the job it measures."""

    name: str
    start: tuple[str, int] | None
    measured: str | None

    @property
    def before(self) -> str | None:
        """The job whose withdrawals count for this one."""
        return self.measured if self.start is None else self.start[0]


@dataclass(frozen=True, slots=True)
class _Found:
    """The first version of a job that holds the member's updates, and how many of the job's sums it was in."""

    first: int
    sums: int


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
    marks, lines = _marks(s, member), _lines(s)
    scope = _scope(lines, job)
    told = [] if proof is None or dry_run else _requests(s, member, job)
    if told:
        # Sent again. The marks say what jobs hold, and a member may repeat its request as often as it may call.
        known = {name: _Found(mark.first_version, mark.sums) for name, mark in marks.items()}
        return Withdrawal(_held(s, member, scope, known, marks), journal(s, after=told[0] - 1, limit=1)[0], ())
    # Over all jobs: one in scope may have started from a version that holds the member, of a job that is not in scope.
    mine = _held(s, member, scope, _found(s, member, lines, marks), marks)
    if dry_run:
        return Withdrawal(mine, None, ())
    entry = _record(s, member, job, now_ms, by, proof)
    for held in mine:
        mark = marks.get(held.job)
        if mark is None or held.first < mark.first_version:
            _mark(s, held.job, member, held.first, held.sums, now_ms, by=by, before=mark)
    texts = tuple(text for line in scope for text in _take_back(s, line.name, member, now_ms))
    return Withdrawal(mine, entry, texts)


def left_out(s: Session, job: str) -> frozenset[str]:
    """The members that a job asks for nothing: those that withdrew from all, from it, or from a job that it started
    from or measures, directly or through others.
    """
    line: list[str] = []
    name: str | None = job
    while name is not None and name not in line:
        line.append(name)
        row = s.get(JobRow, name)
        name = None if row is None else row.earlier_job or row.measured_job
    scope = or_(WithdrawalRow.job.is_(None), WithdrawalRow.job.in_(line))
    return frozenset(s.scalars(select(WithdrawalRow.member).where(scope)))


def left_by(s: Session, member: str) -> frozenset[str]:
    """The jobs that leave a member out, by what `left_out` says of each."""
    lines = _lines(s)
    scopes = list(s.scalars(select(WithdrawalRow.job).where(WithdrawalRow.member == member)))
    return frozenset(line.name for scope in scopes for line in _scope(lines, scope))


def carry_marks(s: Session, job: str, earlier: tuple[str, int]) -> int:
    """Marks a new job's start like the version that it is. Returns how many members withdrew whose updates it holds."""
    mine = (WithdrawalMarkRow.job == earlier[0], WithdrawalMarkRow.first_version <= earlier[1])
    members = list(s.scalars(select(WithdrawalMarkRow.member).where(*mine)))
    s.add_all(WithdrawalMarkRow(job=job, member=member, first_version=0, sums=0) for member in members)
    return len(members)


def mark_published(s: Session, job: str, number: int, survivors: Collection[str], now_ms: int) -> None:
    """Marks a version that was just published for members that withdrew while its sum was on its way."""
    marks = {row.member: row for row in s.scalars(select(WithdrawalMarkRow).where(WithdrawalMarkRow.job == job))}
    for member in sorted(left_out(s, job).intersection(survivors)):
        if member in marks:
            marks[member].sums += 1
        else:
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
    """All jobs. Each comes after the one that it started from or measures, also if the clock went back in between."""
    wanted = (JobRow.name, JobRow.earlier_job, JobRow.earlier_version, JobRow.measured_job)
    lines = {
        name: _Line(name, None if job is None else (job, number or 0), measured)
        for name, job, number, measured in s.execute(select(*wanted).order_by(JobRow.created_ms, JobRow.name))
    }
    ordered: dict[str, _Line] = {}
    for line in lines.values():
        above = []
        each: _Line | None = line
        while each is not None and each.name not in ordered and each not in above:
            above.append(each)
            each = None if each.before is None else lines.get(each.before)
        ordered |= {found.name: found for found in reversed(above)}
    return list(ordered.values())


def _scope(lines: Sequence[_Line], job: str | None) -> list[_Line]:
    """The jobs that a withdrawal is about, those that others started from or measure coming first."""
    if job is None:
        return list(lines)
    names: set[str | None] = {job}
    scope = []
    for line in lines:
        if line.name == job or line.before in names:
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


def _marks(s: Session, member: str) -> dict[str, WithdrawalMarkRow]:
    return {row.job: row for row in s.scalars(select(WithdrawalMarkRow).where(WithdrawalMarkRow.member == member))}


def _mark(
    s: Session,
    job: str,
    member: str,
    first: int,
    sums: int,
    now_ms: int,
    *,
    by: str,
    before: WithdrawalMarkRow | None = None,
) -> None:
    """Marks a job's versions from `first` on. `before`: the mark that there is, which begins too late."""
    newest = s.scalar(select(func.max(VersionRow.number)).where(VersionRow.job == job)) or 0
    if before is None:
        s.add(WithdrawalMarkRow(job=job, member=member, first_version=first, sums=sums))
    else:
        newest = before.first_version - 1
        before.first_version, before.sums = first, sums
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


def _found(
    s: Session, member: str, lines: Sequence[_Line], marks: Mapping[str, WithdrawalMarkRow]
) -> dict[str, _Found]:
    """What each job holds of the member, by the sums and by what its start holds."""
    # The database looks for the name: a cohort may have thousands, and there may be thousands of attempts. No name has
    # a character that JSON escapes.
    inside = cast(AttemptRow.survivors, Text).contains(f'"{member}"', autoescape=True)
    same = (AttemptRow.job == VersionRow.job) & (AttemptRow.round == VersionRow.round)
    published = select(VersionRow.job, VersionRow.number).join(AttemptRow, same)
    sums: dict[str, list[int]] = {}
    for job, number in s.execute(published.where(AttemptRow.outcome == "published", inside)):
        sums.setdefault(job, []).append(number)
    found: dict[str, _Found] = {}
    for line in lines:
        firsts = list(sums.get(line.name, ()))
        if line.start is not None and line.start[0] in found and line.start[1] >= found[line.start[0]].first:
            firsts.append(0)
        if line.name in marks:
            firsts.append(marks[line.name].first_version)
        if firsts:
            found[line.name] = _Found(min(firsts), len(sums.get(line.name, ())))
    return found


def _held(
    s: Session, member: str, scope: Sequence[_Line], found: Mapping[str, _Found], marks: Collection[str]
) -> tuple[Held, ...]:
    """Describes what the jobs in scope hold, with a fixed number of queries for all of them."""
    names = [line.name for line in scope if line.name in found]
    last = select(func.max(VersionRow.number)).where(VersionRow.job == JobRow.name).scalar_subquery()
    newest = {name: number or 0 for name, number in s.execute(select(JobRow.name, last).where(JobRow.name.in_(names)))}
    fetched = select(JournalRow.subject, JournalRow.fields).where(
        JournalRow.kind == "version_fetched", JournalRow.subject.in_(names)
    )
    gone = {(job, fields["version"]) for job, fields in s.execute(fetched) if fields.get("exported")}
    digests = select(VersionRow.job, VersionRow.number, VersionRow.digest).where(
        VersionRow.job.in_(sorted({job for job, _ in gone}))
    )
    exported: dict[str, list[int]] = {}
    for job, number, digest in s.execute(digests.order_by(VersionRow.job, VersionRow.number)):
        if number >= found[job].first and (job, digest.hex()) in gone:
            exported.setdefault(job, []).append(number)
    counts = (CorpusRow.member == member, CorpusRow.replaced_ms.is_(None), CorpusRow.digest.is_not(None))
    texts = set(s.scalars(select(CorpusRow.job).where(*counts, CorpusRow.job.in_(names))))
    # The start's blob always stays: the job's document names it.
    before = [(name, found[name].first - 1) for name in names if found[name].first > 1]
    here = tuple_(VersionRow.job, VersionRow.number).in_(before)
    pruned = set(s.scalars(select(VersionRow.job).where(here, VersionRow.pruned_ms.is_not(None))))
    return tuple(
        Held(
            name,
            found[name].first,
            newest[name],
            found[name].sums,
            tuple(exported.get(name, ())),
            name in texts,
            name in marks,
            name in pruned,
        )
        for name in names
    )
