"""HOME/journal.db: what a member must remember of attempts, on its disk before it acts.

Guarantees:

- The highest (round, attempt) of a job is stored before the member advertises.
- That a masked vector leaves, and the digest of the update that it carries, is stored before its first byte leaves.
- U3 is stored before it is confirmed, once, and no later call changes it.

So no crash makes a member speak twice in one attempt, send two different updates for one version, or confirm two
different sums of it. The table's triggers protect each row against every writer of the file, this class included. The
home's lock keeps a second process of the member out. A journal that is restored from a backup has forgotten what
happened since, so keep it where it is.
"""

import json
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tacit.attempt import AttemptId

__all__ = ["Journal", "JournalUnusable", "Memory", "Sent"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    federation BLOB NOT NULL,
    job TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    version BLOB NOT NULL,
    document BLOB NOT NULL,
    joined_ms INTEGER NOT NULL,
    -- Set before the first byte of the masked vector leaves.
    opened_ms INTEGER,
    -- SHA-256 of the update that the vector carries; NULL under a mechanism.
    update_digest BLOB,
    -- U3, set before the member signs it: a JSON list.
    survivors TEXT,
    -- What the private parameters that were trained with this vector are staged under.
    staged TEXT,
    ended_ms INTEGER,
    outcome TEXT,
    result BLOB,
    PRIMARY KEY (federation, job, attempt)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER attempts_stay BEFORE DELETE ON attempts
BEGIN SELECT RAISE(ABORT, 'the journal forgets nothing'); END;
-- INSERT OR REPLACE deletes a row without the trigger above.
CREATE TRIGGER attempts_once BEFORE INSERT ON attempts
WHEN EXISTS (
    SELECT 1 FROM attempts
    WHERE (federation, job, attempt) = (NEW.federation, NEW.job, NEW.attempt)
)
BEGIN SELECT RAISE(ABORT, 'an attempt is joined once'); END;
-- UPDATE OR REPLACE could move one row over another.
CREATE TRIGGER attempts_keep BEFORE UPDATE ON attempts
WHEN (OLD.federation, OLD.job, OLD.round, OLD.attempt, OLD.version, OLD.document)
    IS NOT (NEW.federation, NEW.job, NEW.round, NEW.attempt, NEW.version, NEW.document)
    OR (OLD.opened_ms IS NOT NULL
        AND (OLD.opened_ms, OLD.update_digest) IS NOT (NEW.opened_ms, NEW.update_digest))
    OR (OLD.survivors IS NOT NULL AND (OLD.survivors, OLD.staged) IS NOT (NEW.survivors, NEW.staged))
BEGIN SELECT RAISE(ABORT, 'what was sent or signed does not change'); END;
"""
_VERSION = 1


class JournalUnusable(ValueError):
    """The journal cannot be used. The sentence says what to do."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One masked vector whose first byte may have left."""

    attempt: AttemptId
    version: bytes
    document: bytes
    # SHA-256 of the update that it carries (`learning.mechanisms.contribution.update_digest`); None under a mechanism.
    update: bytes | None = None
    # U3, if the member has signed it.
    survivors: frozenset[str] | None = None
    # The token of the private state staged with it; None if the job keeps none.
    staged: str | None = None


@dataclass(frozen=True)
class Memory:
    """What the journal holds."""

    # The highest (round, attempt) ever joined, by job.
    highest: dict[str, tuple[int, int]]
    sent: tuple[Sent, ...] = ()

    def sent_for(self, job: str, round: int, version: bytes) -> tuple[Sent, ...]:
        """Returns the vectors that this member sent in this round of the job, or from this version of it.

        Other jobs do not count. Honest jobs start from the same public weights, and each may have its sums. A
        coordinator that asks for the same sum under another job's name could just as well change one bit of the
        version, and no digest would show that.
        """
        return tuple(
            each
            for each in self.sent
            if each.attempt.job == job and (each.attempt.round == round or each.version == version)
        )


class Journal:
    """One member's journal in one federation. For one thread at a time.

    A write has reached the disk when it returns, but for `ended`.
    """

    def __init__(self, path: Path, federation: bytes) -> None:
        """Opens or creates the file.

        Raises:
            JournalUnusable: Other software wrote it, or the disk cannot store it.
        """
        self._federation = federation
        try:
            path.touch(mode=0o600, exist_ok=True)
            # The thread that opens it is not the one that writes (`edge_client.ledger.writer_thread`).
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._begin(path)
            except BaseException:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise JournalUnusable(
                f"{path} cannot be used ({error}); check free space and the permissions of {path.parent}, and do not "
                "delete the file: without it this member would not know what it has sent, so it takes part in nothing"
            ) from error

    def _begin(self, path: Path) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise JournalUnusable(
                f"{path} was written by other software (schema {version}); start the edge_client that wrote it"
            )
        # An existing table is left alone, so that a member can start on a full disk.
        if version == 0:
            self._create()

    def _create(self) -> None:
        """Creates the table and sets the version in one step. A process killed on the way leaves the file unchanged."""
        script = f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;"
        self._connection.executescript(script)

    def memory(self) -> Memory:
        """Returns what must not be forgotten."""
        rows = self._connection.execute(
            "SELECT job, MAX(round), MAX(attempt) FROM attempts WHERE federation = ? GROUP BY job",
            (self._federation,),
        )
        highest = {job: (round_, attempt) for job, round_, attempt in rows}
        rows = self._connection.execute(
            "SELECT job, round, attempt, version, document, update_digest, survivors, staged FROM attempts "
            "WHERE federation = ? AND opened_ms IS NOT NULL ORDER BY attempt",
            (self._federation,),
        )
        sent = tuple(
            Sent(
                AttemptId(job, round_, attempt),
                bytes(version),
                bytes(document),
                update,
                None if survivors is None else frozenset(json.loads(survivors)),
                staged,
            )
            for job, round_, attempt, version, document, update, survivors, staged in rows
        )
        return Memory(highest, sent)

    def joined(self, attempt: AttemptId, version: bytes, document: bytes) -> None:
        """Records that the member joins an attempt. Raises sqlite3.IntegrityError if it joined before."""
        self._flushes()
        self._connection.execute(
            "INSERT INTO attempts (federation, job, round, attempt, version, document, joined_ms) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self._federation, attempt.job, attempt.round, attempt.attempt, version, document, _now_ms()),
        )

    def opened(self, attempt: AttemptId, update: bytes | None = None) -> None:
        """Records that the first byte of a masked vector may leave from now on.

        Args:
            attempt: The attempt that it is for.
            update: SHA-256 of the update that it carries, 32 bytes; None under a mechanism.

        Raises:
            sqlite3.IntegrityError: A vector was recorded for this attempt before.
        """
        self._flushes()
        self._update("opened_ms = ?, update_digest = ?", (_now_ms(), update), attempt, once="opened_ms")

    def signed(self, attempt: AttemptId, survivors: Iterable[str], staged: str | None = None) -> None:
        """Records that the member is about to confirm this U3, and with it the state staged with its vector.

        Raises:
            sqlite3.IntegrityError: The member signed a U3 in this attempt before.
        """
        self._flushes()
        self._update("survivors = ?, staged = ?", (json.dumps(sorted(survivors)), staged), attempt, once="survivors")

    def ended(self, attempt: AttemptId, outcome: str, result: bytes) -> None:
        """Records how the attempt ended, as far as the member knows.

        This reaches the disk with the next write. `memory` does not read it, so a crash that takes it loses nothing
        that decides what the member does.
        """
        self._connection.execute("PRAGMA synchronous = NORMAL")
        try:
            self._update("ended_ms = ?, outcome = ?, result = ?", (_now_ms(), outcome, result or None), attempt)
        finally:
            self._flushes()

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def _flushes(self) -> None:
        """Lets each write reach the disk before it returns, whatever became of the level after the last one."""
        self._connection.execute("PRAGMA synchronous = FULL")

    def _update(self, assignment: str, values: tuple[object, ...], attempt: AttemptId, *, once: str = "") -> None:
        """Changes the row of an attempt. The column `once`, if given, must still be empty."""
        unset = f" AND {once} IS NULL" if once else ""
        changed = self._connection.execute(
            f"UPDATE attempts SET {assignment} WHERE federation = ? AND job = ? AND attempt = ?{unset}",  # noqa: S608  constants
            (*values, self._federation, attempt.job, attempt.attempt),
        )
        if changed.rowcount != 1:
            raise sqlite3.IntegrityError(f"the journal has no attempt {attempt}, or already has this record of it")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
