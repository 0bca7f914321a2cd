"""Restores a backup into an empty database, so that members can go on with what they remember.

The members are further than the backup. They are right to refuse a coordinator that uses a number twice, so the
restored one uses none twice:

- Rounds and attempts continue a million above the backup's (`GAP`), beyond all that can have been used since. A member
  joins no attempt whose number is not above the highest in its journal.
- Running jobs are paused until the operator has revoked members where needed and sees the others connected. Without
  noise, members that confirmed a later, forgotten sum of the same version refuse any other (`policy_second_sum`).
- Versions continue from the backup's number. Those after it are forgotten, so their numbers are used again for other
  versions. The journal's entry `restored` says from which number on, for each job. Receipts, rounds and bundles name
  versions by digest, and no digest is used twice.
- A member that has renewed its certificate since is let in under it, once. No database says any more that the
  coordinator issued it, but its authority signed it, for that name, after the backup (`admission`).
- Open invitations are withdrawn: they may have been used since, and a token can be redeemed once.
- A member that was revoked since is enrolled again, and nothing here can know it. `revoke` names the members to revoke
  in the same transaction.
- What members reported about their ledgers is learnt again with their next update, and remembered from there.

Guarantees: nothing is written before the whole backup is read and found good; all rows appear at once, or none; a
restore that ended at any step, also after its rows appeared, is simply repeated.
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
from coordinator.storage.journal import Value, journal, newest_of, note, pages
from coordinator.storage.members import MemberStatus, revoke_member
from coordinator.storage.models import Base, MemberRow, RestoredMemberRow, TokenRow
from tacit.reason import Reason, word

__all__ = ["GAP", "Restored", "check_target", "check_unopened", "restore_blobs", "restore_rows"]

# Covers the rounds and attempts since the backup. A column has room for more than 2000 restores.
GAP = 1_000_000
_ROWS_AT_ONCE = 500
_PIECE = 1024 * 1024
# What made-up rows can raise when the database, or a reader of it, takes them for a coordinator's.
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
    """What a restore has put back."""

    rows: int
    # Jobs that continue, each with the number of its version.
    jobs: tuple[tuple[str, int], ...]
    revoked: tuple[str, ...]


def check_unopened(url: str) -> bool:
    """Looks at a database without opening it, because to open one gives it this software's tables.

    Returns:
        Whether it has a coordinator's tables. Without them it is empty.

    Raises:
        BackupRefused: it has another program's tables.
        DatabaseUnusable: there is none, or it cannot be read.
    """
    with snapshot.of_database(url) as connection:
        ours = snapshot.revision_of(connection) is not None
        if not ours:
            _check_empty(connection)
    return ours


def check_target(database: Database, of: Snapshot, revoke: Sequence[str] = ()) -> None:
    """Checks that `restore_rows` would put the rows into this database, or did so before.

    A take-over of the store may have come after it, and nothing else.

    Raises:
        BackupRefused: it has other rows, or another program's tables, or a member of `revoke` was not revoked.
    """

    def work(s: Session) -> None:
        if _done(s, of, revoke) is None:
            _check_empty(s.connection())

    database.run_now(work)


def restore_blobs(of: Snapshot, store: BlobStore) -> int:
    """Puts every blob of the backup into the store; blobs that are there already stay. Returns how many were put.

    Raises:
        BackupDamaged: a file of the backup is altered.
        StoreUnusable: no space, or no permission.
    """
    put = 0
    for part in of.manifest.blobs:
        incoming = store.incoming(part.sha256, part.size)
        if incoming.complete:
            continue
        try:
            with of.open_blob(part) as file:
                # A killed restore may have left its beginning.
                file.seek(incoming.received)
                while piece := file.read(_PIECE):
                    incoming.append(incoming.received, piece)
        except OSError as error:
            raise BackupDamaged(f"{of.blob(part)} cannot be read: {error.strerror}; take another backup") from error
        incoming.finish()
        put += 1
    return put


def restore_rows(of: Snapshot, database: Database, *, revoke: Sequence[str], now_ms: int, by: str) -> Restored:
    """Puts the rows back, in one transaction. Changes nothing if it did so before.

    A take-over of the store may have come after it, and nothing else.

    Args:
        revoke: names of members to revoke in the same transaction.
        now_ms: the restore's time.
        by: who restores, for the journal.

    Raises:
        BackupRefused: the database has other rows, a member of `revoke` was not revoked with these, or newer software
            wrote the backup.
        BackupDamaged: the rows are not a coordinator's.
        NotFound: the backup has no member of a name in `revoke`.
        DatabaseUnusable: the database refused.
    """
    _config, directory = scripts()
    if of.manifest.revision not in {each.revision for each in directory.walk_revisions()}:
        raise BackupRefused(
            f"newer software wrote {of.path} (its database is at {of.manifest.revision}); restore it with version "
            f"{of.manifest.software} or newer"
        )

    def work(s: Session) -> Restored:
        if (done := _done(s, of, revoke)) is not None:
            return done
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
            # For each job, the number it went back to. Higher numbers are other versions from now on.
            versions=[f"{name} {number}" for name, number in going_on],
            withdrawn=withdrawn,
            revoked=list(revoke),
            by=by,
        )
        return Restored(rows, tuple(going_on), tuple(revoke))

    try:
        return database.run_now(work)
    except _MISFITS as error:
        # The exception's text and its cause may show a row.
        raise BackupDamaged(
            f"the rows in {of.path} are not a coordinator's ({type(error).__name__}), and none was restored; take "
            "another backup"
        ) from None


# ---- inside ---------------------------------------------------------------------------------------------------------


def _done(s: Session, of: Snapshot, revoke: Sequence[str]) -> Restored | None:
    """Returns what an earlier restore of this backup put back, if only take-overs of the store came after it."""
    entry = newest_of(s, "restored")
    # A take-over follows a restore, and one that failed is repeated together with it.
    if entry is None or any(each.kind != "store_taken" for each in journal(s, after=entry.id)):
        return None
    if (entry.fields["backup"], entry.fields["head"]) != (of.path.stem, of.manifest.head.hex()):
        return None
    going_on, revoked = (_words(entry.fields[name]) for name in ("versions", "revoked"))
    if late := sorted(set(revoke) - set(revoked)):
        raise BackupRefused(
            f"{of.path.stem} is already restored to this database, and {late[0]} was not revoked with it; empty the "
            "database, then restore again"
        )
    parts = [each.rpartition(" ") for each in going_on]
    numbers = tuple((name, int(number)) for name, _, number in parts)
    return Restored(sum(part.rows for part in of.manifest.tables), numbers, revoked)


def _words(value: Value) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else ()


def _check_empty(connection: Connection) -> list[Table]:
    tables = snapshot.tables_of(connection)
    for table in tables:
        ours = table.name in Base.metadata.tables
        if not ours or connection.scalar(select(func.count()).select_from(table)):
            what = "rows in" if ours else "another program's table"
            raise BackupRefused(
                f"the database is not empty ({what} {table.name}), and a backup is restored into an empty one only; "
                "name another database, or move this one away"
            )
    return tables


def _emptied(connection: Connection) -> None:
    """Leaves nothing in the database, not even a schema, because the backup's may be older."""
    for table in reversed(_check_empty(connection)):
        table.drop(connection)
    connection.execute(text("DROP TABLE IF EXISTS alembic_version"))
    if connection.dialect.name == "postgresql":
        for table_name in ("journal", "roster_log"):
            connection.execute(text(f"DROP FUNCTION IF EXISTS {table_name}_only_grows()"))


def _insert(of: Snapshot, connection: Connection) -> int:
    tables = {table.name: table for table in snapshot.tables_of(connection)}
    parts = {part.name: part for part in of.manifest.tables}
    if parts.keys() != tables.keys():
        odd = sorted(parts.keys() ^ tables.keys())[0]
        raise BackupDamaged(f"{of.path} and its own schema differ in the table {odd}; take another backup")
    total = 0
    # Tables are ordered so that a row comes after those it refers to.
    for name, table in tables.items():
        file = f"{of.table(parts[name])} (table {name})"
        if {column.name: column.form for column in parts[name].columns} != {
            column.name: form_of(column.type) for column in table.columns
        }:
            raise BackupDamaged(f"{file} has other columns than the table; take another backup")
        count, batch = 0, list[dict[str, Any]]()
        for row in read_rows(of, parts[name]):
            count += 1
            if misfit := _odd(table, row):
                raise BackupDamaged(f"{file}, row {count}: {misfit} has the wrong type; take another backup")
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
    """Returns a column that the row's value does not fit. SQLite would store it anyway."""
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
        # The exception's text and its cause show the row.
        raise BackupDamaged(
            f"{file} has a row that does not fit the table ({type(error).__name__}); take another backup"
        ) from None


def _count_on(connection: Connection, table: Table) -> None:
    """Moves PostgreSQL's own row counter past the numbers that the restored rows brought along."""
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
        raise BackupDamaged(f"the journal in {of.path} is broken: {error}") from error


def _leave_a_gap(s: Session, now_ms: int) -> list[tuple[str, int]]:
    """Ends what was open, and raises the numbers of every job that continues. Returns these jobs and their versions.

    A number counts as used once a row has it, so the gap is a round with an attempt that never took place.
    """
    restarted = Reason.REASON_COORDINATOR_RESTARTED
    reason = word(restarted)
    jobs.abandon_open_attempts(s, now_ms, restarted)
    going_on = []
    for job in jobs.load_jobs(s):
        if job.status.is_final:
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
        # None of this is a failure of the members.
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
