"""A backup put back into an empty database, and what is done so that members can go on with what they remember.

Members were further than the backup. What they hold against a coordinator that says a number twice is right, so the
restored one says none twice:

- rounds and attempts go on a million above the backup's (`GAP`), beyond all that can have been used since: a member
  joins no attempt whose number is not above the highest in its journal;
- jobs that ran are paused, until the operator has revoked whom to revoke and sees the members connected: without noise
  those that confirmed a later, forgotten sum of the same version refuse any other (`policy_second_sum`);
- versions go on from the backup's number. Those that came after it are forgotten; a number is then said again of
  another version, and the journal's entry `restored` says from which number on, for which job. Receipts, rounds and
  bundles name versions by digest, which is never said of two;
- a member that renewed its certificate since is let in under it, once: that the coordinator had issued it is in
  nobody's database any more, but its authority signed it, for that name, after the backup (`admission`);
- invitations that were open are withdrawn: they may have been used since, and a token is for one use;
- who was revoked since is enrolled again, which nothing here can know: `revoke` says whom to revoke in the same
  transaction;
- what members told of their ledgers is heard again with their next update, and remembered from there.

Guarantees: nothing is written before the whole backup was read and found good; the rows appear all at once, or not at
all; a restore that was killed is simply done once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, Connection, Table, func, insert, select, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from coordinator.domain.jobs import JobStatus
from coordinator.storage import chain, jobs, snapshot
from coordinator.storage.backup import Snapshot, form_of, read_rows
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database, migrated, scripts
from coordinator.storage.errors import BackupDamaged, BackupRefused
from coordinator.storage.journal import note, pages
from coordinator.storage.members import MemberStatus, revoke_member
from coordinator.storage.models import Base, MemberRow, RestoredMemberRow, TokenRow
from tacit.reason import Reason, word

__all__ = ["GAP", "Restored", "check_empty", "restore_blobs", "restore_rows"]

# Rounds and attempts since the backup; more than 2000 restores fit into a column.
GAP = 1_000_000
_ROWS_AT_ONCE = 500
_PIECE = 1024 * 1024
# What rows that somebody made up can raise where the database, or what reads it, takes them for a coordinator's.
_MISFITS = (
    SQLAlchemyError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Restored:
    """What is there now."""

    rows: int
    # Jobs that go on, each with the number of its version.
    jobs: tuple[tuple[str, int], ...]
    revoked: tuple[str, ...]


def check_empty(database: Database) -> None:
    """Raises: BackupRefused: there are rows in it, or tables of something else."""
    database.run_now(lambda s: [table.name for table in _check_empty(s.connection())])


def restore_blobs(of: Snapshot, store: BlobStore) -> int:
    """Puts every blob of the backup into the store; those that are there already stay. Returns how many were put.

    Raises:
        BackupDamaged: a file of the backup is not what it was. StoreUnusable: no space, no permission.
    """
    put = 0
    for part in of.manifest.blobs:
        if store.has(part.sha256):
            continue
        incoming = store.incoming(part.sha256, part.size)
        try:
            with of.open_blob(part) as file:
                # A restore that was killed may have left the beginning of it.
                file.seek(incoming.received)
                while piece := file.read(_PIECE):
                    incoming.append(incoming.received, piece)
        except OSError as error:
            raise BackupDamaged(f"{of.blob(part)} cannot be read: {error.strerror}; take another backup") from error
        incoming.finish()
        put += 1
    return put


def restore_rows(of: Snapshot, database: Database, *, revoke: Sequence[str], now_ms: int, by: str) -> Restored:
    """Puts the rows back, in one transaction. `by`: who does it, for the journal.

    Raises:
        BackupRefused: the database is not empty, or the backup is of newer software.
        NotFound: nobody of a name in `revoke` is in the backup. DatabaseUnusable: what it says.
    """
    _config, directory = scripts()
    if of.manifest.revision not in {each.revision for each in directory.walk_revisions()}:
        raise BackupRefused(
            f"{of.path} is of newer software than this (its database is at {of.manifest.revision}); restore it with "
            f"that version, {of.manifest.software} or newer"
        )

    def work(s: Session) -> Restored:
        connection = s.connection()
        _emptied(connection)
        migrated(connection, of.manifest.revision)
        rows = _insert(of, connection)
        migrated(connection, "head")
        _check_chain(s, of)
        going_on = _leave_a_gap(s, now_ms)
        _doubt_certificates(s, of.manifest.made_ms)
        withdrawn = _withdraw(s, now_ms)
        for name in revoke:
            revoke_member(s, name, now_ms, by=by)
        note(
            s,
            "restored",
            "coordinator",
            now_ms,
            backup=of.path.stem,
            made_ms=of.manifest.made_ms,
            head=of.manifest.head.hex(),
            # Of each job, by the number that it went back to: those above are others from now on.
            versions=[f"{name} {number}" for name, number in going_on],
            withdrawn=withdrawn,
            revoked=list(revoke),
            by=by,
        )
        return Restored(rows, tuple(going_on), tuple(revoke))

    try:
        return database.run_now(work)
    except _MISFITS as error:
        # Its text, and its cause, may show a row.
        raise BackupDamaged(
            f"the rows in {of.path} are not those of a coordinator ({type(error).__name__}); nothing of them was "
            "restored; take another backup"
        ) from None


# ---- inside ---------------------------------------------------------------------------------------------------------


def _check_empty(connection: Connection) -> list[Table]:
    tables = snapshot.tables_of(connection)
    for table in tables:
        ours = table.name in Base.metadata.tables
        if not ours or connection.scalar(select(func.count()).select_from(table)):
            what = "rows in" if ours else "a table of something else,"
            raise BackupRefused(
                f"the database is not empty ({what} {table.name}): a backup is restored into an empty one only; name "
                "another database, or put this one aside"
            )
    return tables


def _emptied(connection: Connection) -> None:
    """A database with nothing in it, not even a schema: the backup's may be an older one."""
    for table in reversed(_check_empty(connection)):
        table.drop(connection)
    connection.execute(text("DROP TABLE IF EXISTS alembic_version"))
    if connection.dialect.name == "postgresql":
        connection.execute(text("DROP FUNCTION IF EXISTS journal_only_grows()"))


def _insert(of: Snapshot, connection: Connection) -> int:
    tables = {table.name: table for table in snapshot.tables_of(connection)}
    parts = {part.name: part for part in of.manifest.tables}
    if parts.keys() != tables.keys():
        odd = sorted(parts.keys() ^ tables.keys())[0]
        raise BackupDamaged(f"{of.path} and its own schema do not agree on the table {odd}; take another backup")
    total = 0
    # Who is named stands before who names it.
    for name, table in tables.items():
        file = f"{of.table(parts[name])} (table {name})"
        if {column.name: column.form for column in parts[name].columns} != {
            column.name: form_of(column.type) for column in table.columns
        }:
            raise BackupDamaged(f"{file} has other columns than that table; take another backup")
        count, batch = 0, list[dict[str, Any]]()
        for row in read_rows(of, parts[name]):
            count += 1
            if misfit := _odd(table, row):
                raise BackupDamaged(f"{file}, row {count}: {misfit} is of another type; take another backup")
            batch.append(row)
            if len(batch) == _ROWS_AT_ONCE:
                _insert_rows(connection, table, batch, file)
                batch = []
        if batch:
            _insert_rows(connection, table, batch, file)
        if count != parts[name].rows:
            raise BackupDamaged(f"{of.table(parts[name])} (table {name}) has {count} rows, not {parts[name].rows}")
        _count_on(connection, table)
        total += count
    return total


def _odd(table: Table, row: dict[str, Any]) -> str | None:
    """A column that this row's value does not fit. SQLite would store it all the same."""
    for column in table.columns:
        value, kind = row[column.name], column.type.python_type
        if value is None:
            if not column.nullable:
                return str(column.name)
        elif isinstance(column.type, JSON):
            continue
        elif not isinstance(value, (int, float) if kind is float else kind) or (
            isinstance(value, int) and not -(2**63) <= value < 2**63
        ):
            return str(column.name)
    return None


def _insert_rows(connection: Connection, table: Table, rows: list[dict[str, Any]], file: str) -> None:
    try:
        connection.execute(insert(table), rows)
    except OperationalError:
        raise
    except _MISFITS as error:
        # Its text, and its cause, show the row.
        raise BackupDamaged(
            f"{file} has a row that this table does not take ({type(error).__name__}); take another backup"
        ) from None


def _count_on(connection: Connection, table: Table) -> None:
    """PostgreSQL numbers rows by a counter of its own, which knows nothing of those that came with a number."""
    if connection.dialect.name != "postgresql":
        return
    for column in table.primary_key.columns:
        sequence = connection.scalar(
            text("SELECT pg_get_serial_sequence(:table, :column)"), {"table": table.name, "column": column.name}
        )
        highest = connection.scalar(select(func.max(column))) if sequence else None
        if highest is not None:
            connection.execute(text("SELECT setval(:sequence, :value)"), {"sequence": sequence, "value": highest})


def _check_chain(s: Session, of: Snapshot) -> None:
    try:
        chain.verify(pages(s))
    except chain.ChainBroken as error:
        raise BackupDamaged(f"the journal in {of.path} does not hold: {error}") from error


def _leave_a_gap(s: Session, now_ms: int) -> list[tuple[str, int]]:
    """Ends what was open, and raises the numbers of every job that goes on. Returns these with their versions' numbers.

    A number counts as used when it stands in a row: the gap is a round with an attempt that never was.
    """
    restarted = Reason.REASON_COORDINATOR_RESTARTED
    reason = word(restarted)
    jobs.abandon_open_attempts(s, now_ms, restarted)
    going_on = []
    for job in jobs.load_jobs(s):
        if job.status in (JobStatus.FINISHED, JobStatus.ABORTED):
            continue
        if job.round_open:
            jobs.end_round(s, job.name, job.round, "abandoned", reason, now_ms)
        round_, attempt = job.round + GAP, job.attempt + GAP
        jobs.open_round(s, job.name, round_, now_ms)
        jobs.open_attempt(s, job.name, round_, attempt, (), now_ms)
        jobs.abandon_open_attempts(s, now_ms, restarted, job=job.name)
        jobs.end_round(s, job.name, round_, "abandoned", reason, now_ms)
        if job.status is JobStatus.RUNNING:
            jobs.set_job_status(s, job.name, JobStatus.PAUSED, word(Reason.REASON_JOB_PAUSED), now_ms)
        # None of this is the members' failure.
        jobs.forgive(s, job.name)
        going_on.append((job.name, job.version_number))
    return going_on


def _doubt_certificates(s: Session, since_ms: int) -> None:
    for name in s.scalars(select(MemberRow.name).where(MemberRow.status == MemberStatus.ENROLLED.value)).all():
        doubt = s.get(RestoredMemberRow, name)
        if doubt is None:
            s.add(RestoredMemberRow(member=name, since_ms=since_ms))
        else:
            doubt.since_ms = since_ms
    s.flush()


def _withdraw(s: Session, now_ms: int) -> list[str]:
    open_ones = list(
        s.scalars(select(TokenRow).where(TokenRow.chain.is_(None), TokenRow.revoked_ms.is_(None)).order_by("token_id"))
    )
    for token in open_ones:
        token.revoked_ms = now_ms
    s.flush()
    return sorted({token.member for token in open_ones})
