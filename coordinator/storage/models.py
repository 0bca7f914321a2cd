"""The tables. All other code sees the frozen dataclasses of `records`, never these rows.

Times are milliseconds since 1970, UTC, as integers. Digests are 32 bytes. Reasons and statuses are words (reasons as
`tacit.reason.word` spells them). The schema itself refuses what must never happen: a number used twice, two open rounds
or attempts in one job, a digest of another length, a changed journal.

    members 1 --- n tokens
            1 --- 1 member_certificates
            1 --- 0..1 restored_members
            1 --- 0..1 certificate_requests                       waits for an authority on another machine
    operators 1 --- n operator_certificates
    jobs 1 --- n rounds 1 --- n attempts 1 --- n dropouts
         1 --- n versions 1 --- n evaluations
                          1 --- 0..1 estimates
                          1 --- n server_states
    jobs, members 1 --- n corpora                                 synthetic text, or a refusal; the newest one counts
    roster_log                                                    every certificate; only ever appended to
    roster_cosignatures                                           the newest of each witness and member
    journal                                                       who did what, when; only ever appended to
    lease                                                         which of several coordinators serves; one row or none
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tacit.identity import OPERATOR_ROLES, Role

__all__ = [
    "AttemptRow",
    "Base",
    "CertificateRequestRow",
    "CorpusRow",
    "DropoutRow",
    "EstimateRow",
    "EvaluationRow",
    "JobRow",
    "JournalRow",
    "LeaseRow",
    "MemberCertificateRow",
    "MemberRow",
    "OperatorCertificateRow",
    "OperatorRow",
    "RestoredMemberRow",
    "RosterCosignatureRow",
    "RosterLogRow",
    "RoundRow",
    "ServerStateRow",
    "TokenRow",
    "VersionRow",
    "WithdrawalMarkRow",
    "WithdrawalRow",
]

# SQLite numbers rows by itself only if the key is a plain INTEGER.
_Serial = BigInteger().with_variant(Integer(), "sqlite")
_Name = String(63)
_Word = String(64)


def _digest_check(column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} IS NULL OR length({column}) = 32", name=f"{column}_is_a_digest")


def _one_of(column: str, *values: str) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=f"{column}_known")


class Base(DeclarativeBase):
    """Names every constraint, so that migrations can name them too."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class MemberRow(Base):
    """A party that was invited, and may be enrolled or revoked."""

    __tablename__ = "members"
    __table_args__ = (_one_of("status", "invited", "enrolled", "revoked"), _digest_check("fingerprint"))

    name: Mapped[str] = mapped_column(_Name, primary_key=True)
    status: Mapped[str] = mapped_column(_Word)
    # SHA-256 of the one certificate under which this member is served; empty unless enrolled.
    fingerprint: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    certificate_expires_ms: Mapped[int | None] = mapped_column(BigInteger)
    software_version: Mapped[str | None] = mapped_column(String(64))
    invited_ms: Mapped[int] = mapped_column(BigInteger)
    enrolled_ms: Mapped[int | None] = mapped_column(BigInteger)
    revoked_ms: Mapped[int | None] = mapped_column(BigInteger)


class MemberCertificateRow(Base):
    """The certificate under which an enrolled member is served, and the one before it while that is needed."""

    __tablename__ = "member_certificates"
    __table_args__ = (
        _digest_check("previous"),
        CheckConstraint("(previous IS NULL) = (previous_expires_ms IS NULL)", name="previous_at_once"),
    )

    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name), primary_key=True)
    # DER. Handed out again if the answer was lost.
    certificate: Mapped[bytes] = mapped_column(LargeBinary)
    issued_ms: Mapped[int] = mapped_column(BigInteger)
    # SHA-256 of the certificate before this one. It is good until its end, or until this one is used.
    previous: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    previous_expires_ms: Mapped[int | None] = mapped_column(BigInteger)


class RestoredMemberRow(Base):
    """A member that may have renewed its certificate after the backup from which this database was restored."""

    __tablename__ = "restored_members"

    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name), primary_key=True)
    # The time of the backup.
    since_ms: Mapped[int] = mapped_column(BigInteger)


class OperatorRow(Base):
    """An operator's name. Its certificates that began before `revoked_ms` are refused."""

    __tablename__ = "operators"

    name: Mapped[str] = mapped_column(_Name, primary_key=True)
    revoked_ms: Mapped[int | None] = mapped_column(BigInteger)


class OperatorCertificateRow(Base):
    """A certificate that was issued for an operator."""

    __tablename__ = "operator_certificates"
    __table_args__ = (_digest_check("fingerprint"), _one_of("role", *OPERATOR_ROLES))

    fingerprint: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    name: Mapped[str] = mapped_column(ForeignKey(OperatorRow.name), index=True)
    role: Mapped[str] = mapped_column(_Word)
    issued_ms: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    # SHA-256 of the authority's certificate that issued it.
    issuer: Mapped[bytes] = mapped_column(LargeBinary(32))
    revoked_ms: Mapped[int | None] = mapped_column(BigInteger)


class LedgerCounterRow(Base):
    """The highest sequence that a member reported for one of its privacy ledgers."""

    __tablename__ = "ledger_counters"
    __table_args__ = (
        CheckConstraint("ledger IS NULL OR length(ledger) = 16", name="ledger_is_an_id"),
        CheckConstraint("sequence >= 0", name="sequence_not_negative"),
    )

    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name), primary_key=True)
    ledger: Mapped[bytes] = mapped_column(LargeBinary(16), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger)


class TokenRow(Base):
    """A join token: redeemed once, and bound to the key that redeemed it. The secret is not stored."""

    __tablename__ = "tokens"
    __table_args__ = (
        _digest_check("secret_hash"),
        _digest_check("redeemed_by"),
        CheckConstraint("(redeemed_by IS NULL) = (redeemed_ms IS NULL)", name="redeemed_at_once"),
        CheckConstraint("chain IS NULL OR redeemed_by IS NOT NULL", name="certified_after_redeemed"),
    )

    token_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name), index=True)
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary(32))
    created_ms: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    redeemed_ms: Mapped[int | None] = mapped_column(BigInteger)
    redeemed_by: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    # The certificates that were handed out, DER in hexadecimal, the member's first.
    chain: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    revoked_ms: Mapped[int | None] = mapped_column(BigInteger)


class JobRow(Base):
    """A job: one model being trained."""

    __tablename__ = "jobs"
    __table_args__ = (
        _one_of("status", "running", "paused", "finished", "aborted"),
        _digest_check("document"),
        CheckConstraint("rounds_total > 0", name="has_rounds"),
        _one_of("exploded_measure", "norm", "change", "length"),
        CheckConstraint(
            "(exploded_version IS NULL) = (exploded_times IS NULL) AND "
            "(exploded_version IS NULL) = (exploded_measure IS NULL) AND "
            "(exploded_version IS NULL) = (exploded_than IS NULL)",
            name="exploded_at_once",
        ),
        CheckConstraint("(earlier_job IS NULL) = (earlier_version IS NULL)", name="earlier_at_once"),
        CheckConstraint("earlier_job IS NULL OR measured_job IS NULL", name="one_before"),
    )

    name: Mapped[str] = mapped_column(_Name, primary_key=True)
    document: Mapped[bytes] = mapped_column(LargeBinary(32))
    rounds_total: Mapped[int] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(_Word)
    reason: Mapped[str | None] = mapped_column(_Word)
    created_ms: Mapped[int] = mapped_column(BigInteger)
    changed_ms: Mapped[int] = mapped_column(BigInteger)
    # The first version that exploded (`coordinator.domain.explosion`), and how.
    exploded_version: Mapped[int | None] = mapped_column(Integer)
    exploded_measure: Mapped[str | None] = mapped_column(_Word)
    exploded_times: Mapped[float | None] = mapped_column(Double)
    exploded_than: Mapped[int | None] = mapped_column(Integer)
    # Abandoned rounds up to this one no longer count as failures in a row, because the operator resumed the job.
    forgiven_round: Mapped[int] = mapped_column(Integer, default=0)
    # The version of another job that it started from, if it did.
    earlier_job: Mapped[str | None] = mapped_column(_Name)
    earlier_version: Mapped[int | None] = mapped_column(Integer)
    # The job that a measurement asks about. A version from a bundle may be of no job here.
    measured_job: Mapped[str | None] = mapped_column(_Name)


class RoundRow(Base):
    """A round: one step of a job's model from a version to the next."""

    __tablename__ = "rounds"
    __table_args__ = (
        _one_of("outcome", "open", "published", "abandoned"),
        CheckConstraint("number > 0", name="number_positive"),
        CheckConstraint("(outcome = 'open') = (ended_ms IS NULL)", name="ended_unless_open"),
        Index(
            "uq_rounds_one_open",
            "job",
            unique=True,
            sqlite_where=text("outcome = 'open'"),
            postgresql_where=text("outcome = 'open'"),
        ),
    )

    job: Mapped[str] = mapped_column(ForeignKey(JobRow.name), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    outcome: Mapped[str] = mapped_column(_Word)
    reason: Mapped[str | None] = mapped_column(_Word)
    opened_ms: Mapped[int] = mapped_column(BigInteger)
    ended_ms: Mapped[int | None] = mapped_column(BigInteger)


class AttemptRow(Base):
    """An attempt of a round. Numbers rise through the whole job, so no two attempts share one."""

    __tablename__ = "attempts"
    __table_args__ = (
        ForeignKeyConstraint(["job", "round"], [RoundRow.job, RoundRow.number]),
        _one_of("outcome", "open", "published", "abandoned"),
        CheckConstraint("number > 0", name="number_positive"),
        CheckConstraint("(outcome = 'open') = (ended_ms IS NULL)", name="ended_unless_open"),
        _digest_check("result"),
        _digest_check("new_version"),
        Index(
            "uq_attempts_one_open",
            "job",
            unique=True,
            sqlite_where=text("outcome = 'open'"),
            postgresql_where=text("outcome = 'open'"),
        ),
        Index("ix_attempts_job_round", "job", "round"),
    )

    job: Mapped[str] = mapped_column(_Name, primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    round: Mapped[int] = mapped_column(Integer)
    outcome: Mapped[str] = mapped_column(_Word)
    reason: Mapped[str | None] = mapped_column(_Word)
    detail: Mapped[str] = mapped_column(Text)
    cohort: Mapped[list[str]] = mapped_column(JSON)
    survivors: Mapped[list[str]] = mapped_column(JSON)
    result: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    new_version: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    # Loss and accuracy are empty if they are not a number.
    training_examples: Mapped[float | None] = mapped_column(Double)
    training_loss: Mapped[float | None] = mapped_column(Double)
    training_accuracy: Mapped[float | None] = mapped_column(Double)
    opened_ms: Mapped[int] = mapped_column(BigInteger)
    ended_ms: Mapped[int | None] = mapped_column(BigInteger)


class DropoutRow(Base):
    """A member that did not finish an attempt, and why."""

    __tablename__ = "dropouts"
    __table_args__ = (ForeignKeyConstraint(["job", "attempt"], [AttemptRow.job, AttemptRow.number]),)

    job: Mapped[str] = mapped_column(_Name, primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    member: Mapped[str] = mapped_column(_Name, primary_key=True)
    phase: Mapped[str] = mapped_column(_Word)
    reason: Mapped[str] = mapped_column(_Word)
    detail: Mapped[str] = mapped_column(Text)
    # What convicts a dealer (`tacit.wire.evidence_from_bytes`), a few kilobytes.
    evidence: Mapped[bytes | None] = mapped_column(LargeBinary)


class VersionRow(Base):
    """A version of a job's model. The job starts from version 0."""

    __tablename__ = "versions"
    __table_args__ = (
        _digest_check("digest"),
        CheckConstraint("number >= 0", name="number_not_negative"),
        CheckConstraint("(number = 0) = (round = 0)", name="start_has_no_round"),
        UniqueConstraint("job", "round"),
    )

    job: Mapped[str] = mapped_column(ForeignKey(JobRow.name), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary(32))
    round: Mapped[int] = mapped_column(Integer)
    created_ms: Mapped[int] = mapped_column(BigInteger)
    # Euclidean norms of the version and of its change. The start has no change, and no norm before version 1.
    norm: Mapped[float | None] = mapped_column(Double)
    change: Mapped[float | None] = mapped_column(Double)
    # Since when its blob may be gone, by the retention policy (`coordinator.storage.prune`).
    pruned_ms: Mapped[int | None] = mapped_column(BigInteger)
    # Members that withdrew after their updates went into it, or into a version that it was made from.
    withdrawn: Mapped[int] = mapped_column(Integer, default=0)


class WithdrawalRow(Base):
    """A member's withdrawal from a job and those that start from it, or from all. There is no way back."""

    __tablename__ = "withdrawals"
    __table_args__ = (
        Index("ix_withdrawals_member", "member"),
        Index("uq_withdrawals_job", "member", "job", unique=True),
        Index(
            "uq_withdrawals_all",
            "member",
            unique=True,
            sqlite_where=text("job IS NULL"),
            postgresql_where=text("job IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name))
    # None: from all jobs, for good.
    job: Mapped[str | None] = mapped_column(ForeignKey(JobRow.name))
    at_ms: Mapped[int] = mapped_column(BigInteger)


class WithdrawalMarkRow(Base):
    """A member that withdrew, and the first version of a job that holds its updates: `versions.withdrawn` counts it."""

    __tablename__ = "withdrawal_marks"
    __table_args__ = (
        Index("ix_withdrawal_marks_member", "member"),
        CheckConstraint("first_version >= 0", name="first_not_negative"),
        CheckConstraint("sums >= 0", name="sums_not_negative"),
    )

    job: Mapped[str] = mapped_column(ForeignKey(JobRow.name), primary_key=True)
    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name), primary_key=True)
    first_version: Mapped[int] = mapped_column(Integer)
    # How many of the job's own sums the member was in.
    sums: Mapped[int] = mapped_column(Integer)


class ServerStateRow(Base):
    """A vector of the server optimiser's state with a version. Optimisers without a state have none."""

    __tablename__ = "server_states"
    __table_args__ = (
        ForeignKeyConstraint(["job", "version"], [VersionRow.job, VersionRow.number]),
        _one_of("name", "momentum", "accumulator"),
        _digest_check("digest"),
    )

    job: Mapped[str] = mapped_column(_Name, primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(_Word, primary_key=True)
    digest: Mapped[bytes] = mapped_column(LargeBinary(32))
    pruned_ms: Mapped[int | None] = mapped_column(BigInteger)


class EvaluationRow(Base):
    """A version measured from outside, on the operator's own data."""

    __tablename__ = "evaluations"
    __table_args__ = (
        ForeignKeyConstraint(["job", "version"], [VersionRow.job, VersionRow.number]),
        _digest_check("data"),
        CheckConstraint("examples > 0", name="has_examples"),
        Index("ix_evaluations_job_version", "job", "version"),
    )

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    job: Mapped[str] = mapped_column(_Name)
    version: Mapped[int] = mapped_column(Integer)
    accuracy: Mapped[float] = mapped_column(Double)
    loss: Mapped[float | None] = mapped_column(Double)
    examples: Mapped[int] = mapped_column(BigInteger)
    # SHA-256 of the file of examples, so that only measurements on the same data are compared.
    data: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    at_ms: Mapped[int] = mapped_column(BigInteger)


class EstimateRow(Base):
    """A version measured by the members of the round that started from it, under noise.

    Numbers and their standard errors are there together, or nothing is shown of the version.
    """

    __tablename__ = "estimates"
    __table_args__ = (
        ForeignKeyConstraint(["job", "version"], [VersionRow.job, VersionRow.number]),
        CheckConstraint("members > 0", name="has_members"),
        CheckConstraint(
            " AND ".join(
                f"(accuracy IS NULL) = ({other} IS NULL)"
                for other in ("accuracy_error", "loss", "loss_error", "units", "units_error")
            ),
            name="shown_at_once",
        ),
    )

    job: Mapped[str] = mapped_column(_Name, primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    round: Mapped[int] = mapped_column(Integer)
    members: Mapped[int] = mapped_column(Integer)
    accuracy: Mapped[float | None] = mapped_column(Double)
    accuracy_error: Mapped[float | None] = mapped_column(Double)
    # In nats.
    loss: Mapped[float | None] = mapped_column(Double)
    loss_error: Mapped[float | None] = mapped_column(Double)
    units: Mapped[float | None] = mapped_column(Double)
    units_error: Mapped[float | None] = mapped_column(Double)
    at_ms: Mapped[int] = mapped_column(BigInteger)


class CorpusRow(Base):
    """A member's answer to a job that orders synthetic text: a file with its origin, or a refusal.

    For each member and job the answer that none replaced counts. Earlier ones stay as history.
    """

    __tablename__ = "corpora"
    __table_args__ = (
        _digest_check("digest"),
        CheckConstraint("(received_ms IS NULL) <> (declined_ms IS NULL)", name="received_or_declined"),
        CheckConstraint(
            "received_ms IS NULL OR (digest IS NOT NULL AND size > 0 AND row_count > 0 AND statement IS NOT NULL "
            "AND signature IS NOT NULL AND certificate IS NOT NULL)",
            name="received_whole",
        ),
        CheckConstraint("declined_ms IS NULL OR digest IS NULL", name="declined_without_file"),
        Index(
            "uq_corpora_one_counts",
            "job",
            "member",
            unique=True,
            sqlite_where=text("replaced_ms IS NULL"),
            postgresql_where=text("replaced_ms IS NULL"),
        ),
        Index("ix_corpora_digest", "digest"),
    )

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey(JobRow.name))
    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name))
    # SHA-256 of the file, which is a blob.
    digest: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    size: Mapped[int | None] = mapped_column(BigInteger)
    row_count: Mapped[int | None] = mapped_column(Integer)
    # `tacit.corpus.CorpusStatement`, canonical, and the signature over it.
    statement: Mapped[bytes | None] = mapped_column(LargeBinary)
    signature: Mapped[bytes | None] = mapped_column(LargeBinary)
    # DER, of the key that signed: the member may have another key when somebody asks.
    certificate: Mapped[bytes | None] = mapped_column(LargeBinary)
    received_ms: Mapped[int | None] = mapped_column(BigInteger)
    declined_ms: Mapped[int | None] = mapped_column(BigInteger)
    replaced_ms: Mapped[int | None] = mapped_column(BigInteger)


class RosterLogRow(Base):
    """An entry of the roster log (`tacit.roster.Entry`). Triggers refuse to change, remove or replace a row.

    Numbers begin at 1 and have no gaps, so an entry's index in the Merkle tree is its number less one.
    """

    __tablename__ = "roster_log"
    __table_args__ = (
        _digest_check("certificate"),
        _digest_check("key"),
        _one_of("role", *Role),
        _one_of("kind", "issued", "renewed", "revoked"),
        Index("ix_roster_log_certificate", "certificate"),
    )

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    # SHA-256 of the certificate, and of its public key (SubjectPublicKeyInfo).
    certificate: Mapped[bytes] = mapped_column(LargeBinary(32))
    key: Mapped[bytes] = mapped_column(LargeBinary(32))
    name: Mapped[str] = mapped_column(_Name)
    role: Mapped[str] = mapped_column(_Word)
    kind: Mapped[str] = mapped_column(_Word)
    at_ms: Mapped[int] = mapped_column(BigInteger)


class CertificateRequestRow(Base):
    """A member's request that waits for the authority, whose key is on another machine. A newer one replaces it."""

    __tablename__ = "certificate_requests"
    __table_args__ = (
        _digest_check("key"),
        _digest_check("present"),
        CheckConstraint("(token IS NULL) <> (present IS NULL)", name="enrols_or_renews"),
        CheckConstraint("(present IS NULL) = (present_expires_ms IS NULL)", name="present_at_once"),
    )

    member: Mapped[str] = mapped_column(ForeignKey(MemberRow.name), primary_key=True)
    # PKCS#10, DER, and SHA-256 of its public key.
    request: Mapped[bytes] = mapped_column(LargeBinary)
    key: Mapped[bytes] = mapped_column(LargeBinary(32))
    # Of an enrolment.
    token: Mapped[str | None] = mapped_column(String(128))
    # Of a renewal: the certificate under which it was asked for, and its end.
    present: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    present_expires_ms: Mapped[int | None] = mapped_column(BigInteger)
    software_version: Mapped[str] = mapped_column(String(64))
    asked_ms: Mapped[int] = mapped_column(BigInteger)


class RosterCosignatureRow(Base):
    """The newest signature over a head of the roster log by a witness or a member (`tacit.roster.Cosignature`)."""

    __tablename__ = "roster_cosignatures"
    __table_args__ = (_digest_check("signer_id"), _digest_check("root"))

    # Of a witness: SHA-256 of its key. Of a member: SHA-256 of its name.
    signer_id: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    signer: Mapped[bytes] = mapped_column(LargeBinary)
    size: Mapped[int] = mapped_column(BigInteger)
    root: Mapped[bytes] = mapped_column(LargeBinary(32))
    at_ms: Mapped[int] = mapped_column(BigInteger)
    signature: Mapped[bytes] = mapped_column(LargeBinary)


class JournalRow(Base):
    """The audit journal. Triggers refuse to change, remove or replace a row (see the migration 0001).

    `journal.note` gives the numbers, without gaps, so no two entries follow the same one.
    """

    __tablename__ = "journal"
    __table_args__ = (
        Index("ix_journal_subject", "subject", "id"),
        Index("ix_journal_kind", "kind", "subject"),
        _digest_check("hash"),
    )

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    at_ms: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(_Word)
    subject: Mapped[str] = mapped_column(String(128))
    fields: Mapped[dict[str, Any]] = mapped_column(JSON)
    # Covers the entry and the hash before it; see `coordinator.storage.chain`.
    hash: Mapped[bytes] = mapped_column(LargeBinary(32))


class LeaseRow(Base):
    """Which of several coordinators is the active one; see `coordinator.storage.lease`. Empty on SQLite."""

    __tablename__ = "lease"
    __table_args__ = (
        UniqueConstraint("one", name="uq_lease_one"),
        CheckConstraint("one = 1", name="one_row"),
        CheckConstraint("fence >= 0", name="fence_not_negative"),
    )

    # The key: taking the lease changes it, and so waits for transactions that have locked it by its present value.
    fence: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    one: Mapped[int] = mapped_column(Integer)
    holder: Mapped[str] = mapped_column(_Word)
    address: Mapped[str] = mapped_column(String(300))
    since_ms: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
