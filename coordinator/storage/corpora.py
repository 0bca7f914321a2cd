"""Made-up text that members give to a job, or would not give: where each file comes from, for as long as it is used.

A file is a blob, stored before its row; a row names it with the member's signed statement and the certificate of the
key that signed. One answer of a member counts for a job: another one replaces it. The earlier row stays, with statement
and signature; the file that it names is for deleting (`uncounted_corpora`), unless another answer that counts names it
too. Every answer, and every fetching of a file by an operator, leaves an entry in the journal.
"""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.domain.jobs import JobStatus
from coordinator.storage.errors import NotFound, OutOfOrder
from coordinator.storage.journal import note, note_seldom
from coordinator.storage.members import MemberStatus
from coordinator.storage.models import AttemptRow, CorpusRow, JobRow, MemberRow, RoundRow, VersionRow

__all__ = [
    "MAX_ANSWERS",
    "CorpusOffered",
    "CorpusStanding",
    "StoredCorpus",
    "check_answer",
    "corpora",
    "corpus_of",
    "corpus_standing",
    "counts_anywhere",
    "decline_corpus",
    "keep_corpus",
    "note_corpus_fetched",
    "took_part",
    "trained_from",
    "uncounted_corpora",
]

# Answers of one member to one job that are remembered: what one member can make this table grow by.
MAX_ANSWERS = 20
_ROWS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class CorpusStanding:
    """How far a job is that may order made-up text."""

    status: JobStatus
    # Digest of its document.
    document: bytes


@dataclass(frozen=True, slots=True)
class CorpusOffered:
    """A file that was found to count, and is a blob by now.

    digest: its SHA-256. statement: canonical. certificate: DER, of the key that made `signature`.
    """

    digest: bytes
    size: int
    rows: int
    promise: str
    statement: bytes
    signature: bytes
    certificate: bytes


@dataclass(frozen=True, slots=True)
class StoredCorpus:
    """The answer of a member that counts: a file, or none given."""

    member: str
    at_ms: int
    # None: declined.
    digest: bytes | None
    size: int
    rows: int
    statement: bytes
    signature: bytes
    certificate: bytes


def corpus_standing(s: Session, job: str) -> CorpusStanding:
    """A job's status and document.

    Raises:
        NotFound: no such job.
    """
    row = s.get(JobRow, job)
    if row is None:
        raise NotFound(f"there is no job named {job}")
    return CorpusStanding(JobStatus(row.status), row.document)


def took_part(s: Session, job: str) -> frozenset[str]:
    """Who survived in an attempt of the job that was published."""
    members: set[str] = set()
    published = select(AttemptRow.survivors).where(AttemptRow.job == job, AttemptRow.outcome == "published")
    for survivors in s.scalars(published).yield_per(_ROWS_AT_ONCE):
        members.update(survivors)
    return frozenset(members)


def trained_from(s: Session, job: str, version: bytes, round: int) -> bool:
    """Whether the job had this round, and a version of this digest before it."""
    before = select(VersionRow.number).where(
        VersionRow.job == job, VersionRow.digest == version, VersionRow.round < round
    )
    return s.get(RoundRow, (job, round)) is not None and s.scalar(before.limit(1)) is not None


def corpus_of(s: Session, job: str, member: str) -> StoredCorpus | None:
    """The answer of this member that counts; None where there is none yet."""
    row = _counting(s, job, member)
    return None if row is None else _stored(row)


def corpora(s: Session, job: str) -> list[StoredCorpus]:
    """Every member's answer that counts, by name."""
    mine = select(CorpusRow).where(CorpusRow.job == job, CorpusRow.replaced_ms.is_(None)).order_by(CorpusRow.member)
    return [_stored(row) for row in s.scalars(mine)]


def counts_anywhere(s: Session, digest: bytes) -> bool:
    """Whether an answer that counts names this file, of whatever member and job."""
    counting = select(CorpusRow.id).where(CorpusRow.digest == digest, CorpusRow.replaced_ms.is_(None))
    return s.scalar(counting.limit(1)) is not None


def uncounted_corpora(s: Session) -> frozenset[bytes]:
    """Digests of the files that were given once and that no answer names now."""
    counting = select(CorpusRow.digest).where(CorpusRow.replaced_ms.is_(None), CorpusRow.digest.is_not(None))
    replaced = select(CorpusRow.digest).where(CorpusRow.replaced_ms.is_not(None), CorpusRow.digest.not_in(counting))
    return frozenset(bytes(digest) for digest in s.scalars(replaced.distinct()) if digest is not None)


def check_answer(s: Session, job: str, member: str, most: int = MAX_ANSWERS) -> None:
    """That one more answer of this member to this job would be kept. Writes nothing: whoever stores a blob for a row
    asks before.

    Raises:
        OutOfOrder: the job is not finished, the member is not enrolled any more, or has answered too often.
    """
    row, known = s.get(JobRow, job), s.get(MemberRow, member)
    if row is None or row.status != JobStatus.FINISHED.value:
        raise OutOfOrder(f"job {job} is not finished: it takes no made-up text")
    if known is None or known.status != MemberStatus.ENROLLED.value:
        raise OutOfOrder(f"{member} is no member any more: nothing is taken of it")
    mine = select(func.count()).where(CorpusRow.job == job, CorpusRow.member == member)
    if (s.scalar(mine) or 0) >= most:
        raise OutOfOrder(f"{member} has answered {MAX_ANSWERS} times to {job}, and no more is kept: its last one stays")


def keep_corpus(s: Session, job: str, member: str, offered: CorpusOffered, now_ms: int) -> bool:
    """This file counts for the member from now on; the blob is stored already. Returns whether it did not before.

    Raises:
        OutOfOrder: as for `check_answer`.
    """
    before = _counting(s, job, member)
    if before is not None and before.digest == offered.digest:
        return False
    _replace(s, job, member, before, now_ms)
    s.add(
        CorpusRow(
            job=job,
            member=member,
            digest=offered.digest,
            size=offered.size,
            row_count=offered.rows,
            statement=offered.statement,
            signature=offered.signature,
            certificate=offered.certificate,
            received_ms=now_ms,
        )
    )
    note(
        s,
        "corpus_received",
        job,
        now_ms,
        member=member,
        corpus=offered.digest.hex(),
        bytes=offered.size,
        rows=offered.rows,
        promise=offered.promise,
    )
    s.flush()
    return True


def decline_corpus(s: Session, job: str, member: str, now_ms: int) -> bool:
    """The member gives nothing to this job; what it gave before counts no longer. Returns whether that is news.

    Raises:
        OutOfOrder: as for `check_answer`, but that a file can be taken back however often its member has answered.
    """
    before = _counting(s, job, member)
    if before is not None and before.digest is None:
        return False
    # One row more at most: nothing but a no is left to say then, and that is said.
    _replace(s, job, member, before, now_ms, most=MAX_ANSWERS + (before is not None))
    s.add(CorpusRow(job=job, member=member, declined_ms=now_ms))
    note(s, "corpus_declined", job, now_ms, member=member)
    s.flush()
    return True


def note_corpus_fetched(s: Session, digest: bytes, now_ms: int, within_ms: int, *, by: str) -> None:
    """Notes that an operator fetches a member's file; once more within `within_ms` is not noted again."""
    named = select(CorpusRow.job, CorpusRow.member).where(CorpusRow.digest == digest, CorpusRow.replaced_ms.is_(None))
    for job, member in s.execute(named.order_by(CorpusRow.job, CorpusRow.member)).all():
        note_seldom(
            s,
            "corpus_fetched",
            job,
            now_ms,
            within_ms,
            same=("by", "corpus", "member"),
            by=by,
            corpus=digest.hex(),
            member=member,
        )


def _counting(s: Session, job: str, member: str) -> CorpusRow | None:
    return s.scalars(
        select(CorpusRow).where(CorpusRow.job == job, CorpusRow.member == member, CorpusRow.replaced_ms.is_(None))
    ).one_or_none()


def _replace(s: Session, job: str, member: str, before: CorpusRow | None, now_ms: int, most: int = MAX_ANSWERS) -> None:
    """Makes room for an answer. Checked here, and not only where it was asked for: receiving a file takes its time."""
    check_answer(s, job, member, most)
    if before is not None:
        before.replaced_ms = now_ms
        # Before the next one is there: the schema has room for one that counts.
        s.flush()


def _stored(row: CorpusRow) -> StoredCorpus:
    return StoredCorpus(
        row.member,
        row.received_ms if row.received_ms is not None else row.declined_ms or 0,
        row.digest,
        row.size or 0,
        row.row_count or 0,
        row.statement or b"",
        row.signature or b"",
        row.certificate or b"",
    )
