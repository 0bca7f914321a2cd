"""Synthetic text that members release to a job, or decline to, with each file's origin for as long as it is used.

A file is a blob, stored before its row. The row names it, with the member's signed statement and the certificate of the
key that signed. One answer of a member counts for a job, and another one replaces it. The earlier row stays, with
statement and signature; its file is to be deleted (`uncounted_corpora`) unless another answer that counts names it too.
Every answer, and every download of a file by an operator, leaves an entry in the journal.
"""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.domain.jobs import JobStatus
from coordinator.storage.errors import NotFound, OutOfOrder
from coordinator.storage.journal import note, note_seldom
from coordinator.storage.members import MemberStatus
from coordinator.storage.models import AttemptRow, CorpusRow, JobRow, MemberRow, RoundRow, VersionRow
from coordinator.storage.withdrawal import left_out

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

# How many answers of one member to one job are kept. This bounds what one member can add to the table.
MAX_ANSWERS = 20
_ROWS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class CorpusStanding:
    """What decides whether a job may take synthetic text."""

    status: JobStatus
    # Digest of its document.
    document: bytes


@dataclass(frozen=True, slots=True)
class CorpusOffered:
    """A checked file that counts, already stored as a blob.

    Attributes:
        digest: the file's SHA-256.
        size: its length in bytes.
        rows: its number of texts.
        promise: what the member promises of it.
        statement: the member's statement, in canonical form.
        signature: over the statement.
        certificate: DER, of the key that made `signature`.
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
    """A member's answer that counts: a file, or a refusal."""

    member: str
    at_ms: int
    # None if the member declined.
    digest: bytes | None
    size: int
    rows: int
    statement: bytes
    signature: bytes
    certificate: bytes


def corpus_standing(s: Session, job: str) -> CorpusStanding:
    """Returns a job's status and document.

    Raises:
        NotFound: no such job.
    """
    row = s.get(JobRow, job)
    if row is None:
        raise NotFound(f"there is no job named {job}")
    return CorpusStanding(JobStatus(row.status), row.document)


def took_part(s: Session, job: str) -> frozenset[str]:
    """Returns the survivors of all published attempts of the job."""
    members: set[str] = set()
    published = select(AttemptRow.survivors).where(AttemptRow.job == job, AttemptRow.outcome == "published")
    for survivors in s.scalars(published).yield_per(_ROWS_AT_ONCE):
        members.update(survivors)
    return frozenset(members)


def trained_from(s: Session, job: str, version: bytes, round: int) -> bool:
    """Whether the job had this round, and before it a version with this digest."""
    before = select(VersionRow.number).where(
        VersionRow.job == job, VersionRow.digest == version, VersionRow.round < round
    )
    return s.get(RoundRow, (job, round)) is not None and s.scalar(before.limit(1)) is not None


def corpus_of(s: Session, job: str, member: str) -> StoredCorpus | None:
    """Returns the member's answer that counts, or None."""
    row = _counting(s, job, member)
    return None if row is None else _stored(row)


def corpora(s: Session, job: str) -> list[StoredCorpus]:
    """Returns the answer that counts of every member, ordered by name."""
    mine = select(CorpusRow).where(CorpusRow.job == job, CorpusRow.replaced_ms.is_(None)).order_by(CorpusRow.member)
    return [_stored(row) for row in s.scalars(mine)]


def counts_anywhere(s: Session, digest: bytes) -> bool:
    """Whether an answer that counts names this file, for any member and job."""
    counting = select(CorpusRow.id).where(CorpusRow.digest == digest, CorpusRow.replaced_ms.is_(None))
    return s.scalar(counting.limit(1)) is not None


def uncounted_corpora(s: Session) -> frozenset[bytes]:
    """Returns the digests of files that were received once and that no answer names now."""
    counting = select(CorpusRow.digest).where(CorpusRow.replaced_ms.is_(None), CorpusRow.digest.is_not(None))
    replaced = select(CorpusRow.digest).where(CorpusRow.replaced_ms.is_not(None), CorpusRow.digest.not_in(counting))
    return frozenset(bytes(digest) for digest in s.scalars(replaced.distinct()) if digest is not None)


def check_answer(s: Session, job: str, member: str, most: int = MAX_ANSWERS) -> None:
    """Checks that one more answer of this member to this job would be kept. Writes nothing; for use before a blob is
    stored.

    Raises:
        OutOfOrder: the job is not finished, the member is no longer enrolled, or it has answered too often.
    """
    row, known = s.get(JobRow, job), s.get(MemberRow, member)
    if row is None or row.status != JobStatus.FINISHED.value:
        raise OutOfOrder(f"job {job} is not finished; it takes synthetic text only after its last round")
    if known is None or known.status != MemberStatus.ENROLLED.value:
        raise OutOfOrder(f"{member} is no longer a member, so nothing is taken from it")
    if member in left_out(s, job):
        raise OutOfOrder(f"{member} withdrew from job {job}, so nothing is taken from it")
    mine = select(func.count()).where(CorpusRow.job == job, CorpusRow.member == member)
    if (s.scalar(mine) or 0) >= most:
        raise OutOfOrder(f"{member} has answered {MAX_ANSWERS} times to {job}, and its last answer stays")


def keep_corpus(s: Session, job: str, member: str, offered: CorpusOffered, now_ms: int) -> bool:
    """Makes a file, already stored, the member's answer that counts. Returns whether it was not that before.

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
    """Records that the member declines; its earlier answer counts no longer. Returns whether that is new.

    Raises:
        OutOfOrder: as for `check_answer`, except that a member can always take a file back, however often it answered.
    """
    before = _counting(s, job, member)
    if (before is not None and before.digest is None) or member in left_out(s, job):
        return False
    # This takes at most one more row, because after it the member can only decline again.
    _replace(s, job, member, before, now_ms, most=MAX_ANSWERS + (before is not None))
    s.add(CorpusRow(job=job, member=member, declined_ms=now_ms))
    note(s, "corpus_declined", job, now_ms, member=member)
    s.flush()
    return True


def note_corpus_fetched(s: Session, digest: bytes, now_ms: int, within_ms: int, *, by: str) -> None:
    """Notes that an operator downloads a member's file; a repeat within `within_ms` is not noted again."""
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
    """Makes room for an answer. Checks it again, because receiving a file takes time."""
    check_answer(s, job, member, most)
    if before is not None:
        before.replaced_ms = now_ms
        # Before the next answer is added: the schema allows one that counts.
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
