"""Everything that is stored in rows, in one place to import from: `members`, `jobs`, `journal`.

Functions take a session, work inside the caller's transaction (`Database.run`), and return frozen
dataclasses. The time comes from outside, in milliseconds. Every administrative act and every outcome leaves
an entry in the journal.
"""

from sqlalchemy.orm import Session

from coordinator.storage.errors import (
    JobExists,
    NameTaken,
    NotFound,
    OutOfOrder,
    StorageError,
    TokenWithdrawn,
)
from coordinator.storage.jobs import (
    AttemptKey,
    JobStatus,
    Outcome,
    StoredAttempt,
    StoredDropout,
    StoredEvaluation,
    StoredJob,
    StoredRound,
    StoredTraining,
    StoredVersion,
    abandon_open_attempts,
    create_job,
    end_attempt,
    end_round,
    load_job,
    load_jobs,
    open_attempt,
    open_round,
    publish_version,
    record_evaluation,
    rounds,
    set_job_status,
    versions,
)
from coordinator.storage.journal import JournalEntry, journal, note
from coordinator.storage.members import (
    DatabaseTokenDesk,
    MemberStatus,
    StoredMember,
    enrolled,
    heard_ledger,
    invite,
    member,
    members,
    revoke_member,
)

__all__ = [
    "AttemptKey",
    "DatabaseTokenDesk",
    "JobExists",
    "JobStatus",
    "JournalEntry",
    "MemberStatus",
    "NameTaken",
    "NotFound",
    "OutOfOrder",
    "Outcome",
    "Session",
    "StorageError",
    "StoredAttempt",
    "StoredDropout",
    "StoredEvaluation",
    "StoredJob",
    "StoredMember",
    "StoredRound",
    "StoredTraining",
    "StoredVersion",
    "TokenWithdrawn",
    "abandon_open_attempts",
    "create_job",
    "end_attempt",
    "end_round",
    "enrolled",
    "heard_ledger",
    "invite",
    "journal",
    "load_job",
    "load_jobs",
    "member",
    "members",
    "note",
    "open_attempt",
    "open_round",
    "publish_version",
    "record_evaluation",
    "revoke_member",
    "rounds",
    "set_job_status",
    "versions",
]
