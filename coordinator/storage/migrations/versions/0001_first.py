"""The first schema.

The journal and the roster log only grow: triggers refuse to change, remove or replace one of their rows, whoever asks.
SQLite deletes the row that an INSERT OR REPLACE conflicts with, and runs no DELETE trigger for it unless the connection
that writes has set `recursive_triggers` (https://www.sqlite.org/lang_conflict.html). So a trigger takes an entry only
after the newest one. PostgreSQL has no REPLACE, and runs the UPDATE trigger for ON CONFLICT DO UPDATE.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ONE_COUNTS = sa.text("replaced_ms IS NULL")


def upgrade() -> None:
    """To this revision."""
    op.create_table(
        "jobs",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("document", sa.LargeBinary(length=32), nullable=False),
        sa.Column("rounds_total", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=True),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("changed_ms", sa.BigInteger(), nullable=False),
        sa.Column("exploded_version", sa.Integer(), nullable=True),
        sa.Column("exploded_measure", sa.String(length=64), nullable=True),
        sa.Column("exploded_times", sa.Double(), nullable=True),
        sa.Column("exploded_than", sa.Integer(), nullable=True),
        sa.Column("forgiven_round", sa.Integer(), nullable=False),
        sa.Column("earlier_job", sa.String(length=63), nullable=True),
        sa.Column("earlier_version", sa.Integer(), nullable=True),
        sa.Column("measured_job", sa.String(length=63), nullable=True),
        sa.CheckConstraint("(earlier_job IS NULL) = (earlier_version IS NULL)", name=op.f("ck_jobs_earlier_at_once")),
        sa.CheckConstraint("earlier_job IS NULL OR measured_job IS NULL", name=op.f("ck_jobs_one_before")),
        sa.CheckConstraint(
            "exploded_measure IN ('norm', 'change', 'length')", name=op.f("ck_jobs_exploded_measure_known")
        ),
        sa.CheckConstraint(
            "(exploded_version IS NULL) = (exploded_times IS NULL) AND "
            "(exploded_version IS NULL) = (exploded_measure IS NULL) AND "
            "(exploded_version IS NULL) = (exploded_than IS NULL)",
            name=op.f("ck_jobs_exploded_at_once"),
        ),
        sa.CheckConstraint("status IN ('running', 'paused', 'finished', 'aborted')", name=op.f("ck_jobs_status_known")),
        sa.CheckConstraint("document IS NULL OR length(document) = 32", name=op.f("ck_jobs_document_is_a_digest")),
        sa.CheckConstraint("rounds_total > 0", name=op.f("ck_jobs_has_rounds")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_jobs")),
    )
    op.create_table(
        "journal",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=128), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.Column("hash", sa.LargeBinary(length=32), nullable=False),
        sa.CheckConstraint("hash IS NULL OR length(hash) = 32", name=op.f("ck_journal_hash_is_a_digest")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_journal")),
    )
    op.create_index("ix_journal_subject", "journal", ["subject", "id"], unique=False)
    op.create_index("ix_journal_kind", "journal", ["kind", "subject"], unique=False)

    op.create_table(
        "members",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("status", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(length=32), nullable=True),
        sa.Column("certificate_expires_ms", sa.BigInteger(), nullable=True),
        sa.Column("software_version", sa.String(length=64), nullable=True),
        sa.Column("invited_ms", sa.BigInteger(), nullable=False),
        sa.Column("enrolled_ms", sa.BigInteger(), nullable=True),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("status IN ('invited', 'enrolled', 'revoked')", name=op.f("ck_members_status_known")),
        sa.CheckConstraint(
            "fingerprint IS NULL OR length(fingerprint) = 32", name=op.f("ck_members_fingerprint_is_a_digest")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_members")),
    )
    op.create_table(
        "rounds",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=True),
        sa.Column("opened_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(outcome = 'open') = (ended_ms IS NULL)", name=op.f("ck_rounds_ended_unless_open")),
        sa.CheckConstraint("outcome IN ('open', 'published', 'abandoned')", name=op.f("ck_rounds_outcome_known")),
        sa.CheckConstraint("number > 0", name=op.f("ck_rounds_number_positive")),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_rounds_job")),
        sa.PrimaryKeyConstraint("job", "number", name=op.f("pk_rounds")),
    )
    op.create_index(
        "uq_rounds_one_open",
        "rounds",
        ["job"],
        unique=True,
        sqlite_where=sa.text("outcome = 'open'"),
        postgresql_where=sa.text("outcome = 'open'"),
    )

    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(length=128), nullable=False),
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(length=32), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("redeemed_ms", sa.BigInteger(), nullable=True),
        sa.Column("redeemed_by", sa.LargeBinary(length=32), nullable=True),
        sa.Column("chain", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(redeemed_by IS NULL) = (redeemed_ms IS NULL)", name=op.f("ck_tokens_redeemed_at_once")),
        sa.CheckConstraint("chain IS NULL OR redeemed_by IS NOT NULL", name=op.f("ck_tokens_certified_after_redeemed")),
        sa.CheckConstraint(
            "secret_hash IS NULL OR length(secret_hash) = 32", name=op.f("ck_tokens_secret_hash_is_a_digest")
        ),
        sa.CheckConstraint(
            "redeemed_by IS NULL OR length(redeemed_by) = 32", name=op.f("ck_tokens_redeemed_by_is_a_digest")
        ),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_tokens_member")),
        sa.PrimaryKeyConstraint("token_id", name=op.f("pk_tokens")),
    )
    op.create_index(op.f("ix_tokens_member"), "tokens", ["member"], unique=False)

    op.create_table(
        "versions",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("norm", sa.Double(), nullable=True),
        sa.Column("change", sa.Double(), nullable=True),
        sa.Column("pruned_ms", sa.BigInteger(), nullable=True),
        sa.Column("withdrawn", sa.Integer(), nullable=False),
        sa.CheckConstraint("(number = 0) = (round = 0)", name=op.f("ck_versions_start_has_no_round")),
        sa.CheckConstraint("digest IS NULL OR length(digest) = 32", name=op.f("ck_versions_digest_is_a_digest")),
        sa.CheckConstraint("number >= 0", name=op.f("ck_versions_number_not_negative")),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_versions_job")),
        sa.PrimaryKeyConstraint("job", "number", name=op.f("pk_versions")),
        sa.UniqueConstraint("job", "round", name=op.f("uq_versions_job_round")),
    )
    op.create_table(
        "attempts",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("cohort", sa.JSON(), nullable=False),
        sa.Column("survivors", sa.JSON(), nullable=False),
        sa.Column("result", sa.LargeBinary(length=32), nullable=True),
        sa.Column("new_version", sa.LargeBinary(length=32), nullable=True),
        sa.Column("training_examples", sa.Double(), nullable=True),
        sa.Column("training_loss", sa.Double(), nullable=True),
        sa.Column("training_accuracy", sa.Double(), nullable=True),
        sa.Column("opened_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("(outcome = 'open') = (ended_ms IS NULL)", name=op.f("ck_attempts_ended_unless_open")),
        sa.CheckConstraint("outcome IN ('open', 'published', 'abandoned')", name=op.f("ck_attempts_outcome_known")),
        sa.CheckConstraint(
            "new_version IS NULL OR length(new_version) = 32",
            name=op.f("ck_attempts_new_version_is_a_digest"),
        ),
        sa.CheckConstraint("number > 0", name=op.f("ck_attempts_number_positive")),
        sa.CheckConstraint("result IS NULL OR length(result) = 32", name=op.f("ck_attempts_result_is_a_digest")),
        sa.ForeignKeyConstraint(["job", "round"], ["rounds.job", "rounds.number"], name=op.f("fk_attempts_job_round")),
        sa.PrimaryKeyConstraint("job", "number", name=op.f("pk_attempts")),
    )
    op.create_index("ix_attempts_job_round", "attempts", ["job", "round"], unique=False)
    op.create_index(
        "uq_attempts_one_open",
        "attempts",
        ["job"],
        unique=True,
        sqlite_where=sa.text("outcome = 'open'"),
        postgresql_where=sa.text("outcome = 'open'"),
    )

    op.create_table(
        "evaluations",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("accuracy", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("examples", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(length=32), nullable=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("data IS NULL OR length(data) = 32", name=op.f("ck_evaluations_data_is_a_digest")),
        sa.CheckConstraint("examples > 0", name=op.f("ck_evaluations_has_examples")),
        sa.ForeignKeyConstraint(
            ["job", "version"], ["versions.job", "versions.number"], name=op.f("fk_evaluations_job_version")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
    )
    op.create_index("ix_evaluations_job_version", "evaluations", ["job", "version"], unique=False)

    op.create_table(
        "dropouts",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("phase", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("evidence", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job", "attempt"], ["attempts.job", "attempts.number"], name=op.f("fk_dropouts_job_attempt")
        ),
        sa.PrimaryKeyConstraint("job", "attempt", "member", name=op.f("pk_dropouts")),
    )
    op.create_table(
        "ledger_counters",
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("ledger", sa.LargeBinary(length=16), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("ledger IS NULL OR length(ledger) = 16", name=op.f("ck_ledger_counters_ledger_is_an_id")),
        sa.CheckConstraint("sequence >= 0", name=op.f("ck_ledger_counters_sequence_not_negative")),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_ledger_counters_member")),
        sa.PrimaryKeyConstraint("member", "ledger", name=op.f("pk_ledger_counters")),
    )
    op.create_table(
        "member_certificates",
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.Column("issued_ms", sa.BigInteger(), nullable=False),
        sa.Column("previous", sa.LargeBinary(length=32), nullable=True),
        sa.Column("previous_expires_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "previous IS NULL OR length(previous) = 32", name=op.f("ck_member_certificates_previous_is_a_digest")
        ),
        sa.CheckConstraint(
            "(previous IS NULL) = (previous_expires_ms IS NULL)", name=op.f("ck_member_certificates_previous_at_once")
        ),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_member_certificates_member")),
        sa.PrimaryKeyConstraint("member", name=op.f("pk_member_certificates")),
    )
    op.create_table(
        "operators",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_operators")),
    )
    op.create_table(
        "operator_certificates",
        sa.Column("fingerprint", sa.LargeBinary(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=64), nullable=False),
        sa.Column("issued_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("issuer", sa.LargeBinary(length=32), nullable=False),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "fingerprint IS NULL OR length(fingerprint) = 32",
            name=op.f("ck_operator_certificates_fingerprint_is_a_digest"),
        ),
        sa.CheckConstraint(
            "role IN ('viewer', 'operator', 'administrator')", name=op.f("ck_operator_certificates_role_known")
        ),
        sa.ForeignKeyConstraint(["name"], ["operators.name"], name=op.f("fk_operator_certificates_name")),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_operator_certificates")),
    )
    op.create_index(op.f("ix_operator_certificates_name"), "operator_certificates", ["name"])
    op.create_table(
        "restored_members",
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_restored_members_member")),
        sa.PrimaryKeyConstraint("member", name=op.f("pk_restored_members")),
    )
    op.create_table(
        "estimates",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("members", sa.Integer(), nullable=False),
        sa.Column("accuracy", sa.Double(), nullable=True),
        sa.Column("accuracy_error", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("loss_error", sa.Double(), nullable=True),
        sa.Column("units", sa.Double(), nullable=True),
        sa.Column("units_error", sa.Double(), nullable=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("members > 0", name=op.f("ck_estimates_has_members")),
        sa.CheckConstraint(
            "(accuracy IS NULL) = (accuracy_error IS NULL) AND (accuracy IS NULL) = (loss IS NULL) AND "
            "(accuracy IS NULL) = (loss_error IS NULL) AND (accuracy IS NULL) = (units IS NULL) AND "
            "(accuracy IS NULL) = (units_error IS NULL)",
            name=op.f("ck_estimates_shown_at_once"),
        ),
        sa.ForeignKeyConstraint(
            ["job", "version"], ["versions.job", "versions.number"], name=op.f("fk_estimates_job_version")
        ),
        sa.PrimaryKeyConstraint("job", "version", name=op.f("pk_estimates")),
    )
    op.create_table(
        "server_states",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("pruned_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("digest IS NULL OR length(digest) = 32", name=op.f("ck_server_states_digest_is_a_digest")),
        sa.CheckConstraint("name IN ('momentum', 'accumulator')", name=op.f("ck_server_states_name_known")),
        sa.ForeignKeyConstraint(
            ["job", "version"], ["versions.job", "versions.number"], name=op.f("fk_server_states_job_version")
        ),
        sa.PrimaryKeyConstraint("job", "version", "name", name=op.f("pk_server_states")),
    )
    op.create_table(
        "corpora",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("row_count", sa.Integer(), nullable=True),
        sa.Column("statement", sa.LargeBinary(), nullable=True),
        sa.Column("signature", sa.LargeBinary(), nullable=True),
        sa.Column("certificate", sa.LargeBinary(), nullable=True),
        sa.Column("received_ms", sa.BigInteger(), nullable=True),
        sa.Column("declined_ms", sa.BigInteger(), nullable=True),
        sa.Column("replaced_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("digest IS NULL OR length(digest) = 32", name=op.f("ck_corpora_digest_is_a_digest")),
        sa.CheckConstraint(
            "(received_ms IS NULL) <> (declined_ms IS NULL)", name=op.f("ck_corpora_received_or_declined")
        ),
        sa.CheckConstraint(
            "received_ms IS NULL OR (digest IS NOT NULL AND size > 0 AND row_count > 0 AND statement IS NOT NULL "
            "AND signature IS NOT NULL AND certificate IS NOT NULL)",
            name=op.f("ck_corpora_received_whole"),
        ),
        sa.CheckConstraint("declined_ms IS NULL OR digest IS NULL", name=op.f("ck_corpora_declined_without_file")),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_corpora_job")),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_corpora_member")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_corpora")),
    )
    op.create_index(
        "uq_corpora_one_counts",
        "corpora",
        ["job", "member"],
        unique=True,
        sqlite_where=_ONE_COUNTS,
        postgresql_where=_ONE_COUNTS,
    )
    op.create_index("ix_corpora_digest", "corpora", ["digest"])
    op.create_table(
        "roster_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("certificate", sa.LargeBinary(length=32), nullable=False),
        sa.Column("key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "certificate IS NULL OR length(certificate) = 32", name=op.f("ck_roster_log_certificate_is_a_digest")
        ),
        sa.CheckConstraint("key IS NULL OR length(key) = 32", name=op.f("ck_roster_log_key_is_a_digest")),
        sa.CheckConstraint(
            "role IN ('member', 'viewer', 'operator', 'administrator', 'server')", name=op.f("ck_roster_log_role_known")
        ),
        sa.CheckConstraint("kind IN ('issued', 'renewed', 'revoked')", name=op.f("ck_roster_log_kind_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_roster_log")),
    )
    op.create_index("ix_roster_log_certificate", "roster_log", ["certificate"])
    op.create_table(
        "roster_cosignatures",
        sa.Column("signer_id", sa.LargeBinary(length=32), nullable=False),
        sa.Column("signer", sa.LargeBinary(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("root", sa.LargeBinary(length=32), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("signature", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint(
            "signer_id IS NULL OR length(signer_id) = 32", name=op.f("ck_roster_cosignatures_signer_id_is_a_digest")
        ),
        sa.CheckConstraint("root IS NULL OR length(root) = 32", name=op.f("ck_roster_cosignatures_root_is_a_digest")),
        sa.PrimaryKeyConstraint("signer_id", name=op.f("pk_roster_cosignatures")),
    )
    op.create_table(
        "certificate_requests",
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("token", sa.String(length=128), nullable=True),
        sa.Column("present", sa.LargeBinary(length=32), nullable=True),
        sa.Column("present_expires_ms", sa.BigInteger(), nullable=True),
        sa.Column("software_version", sa.String(length=64), nullable=False),
        sa.Column("asked_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("key IS NULL OR length(key) = 32", name=op.f("ck_certificate_requests_key_is_a_digest")),
        sa.CheckConstraint(
            "present IS NULL OR length(present) = 32", name=op.f("ck_certificate_requests_present_is_a_digest")
        ),
        sa.CheckConstraint(
            "(token IS NULL) <> (present IS NULL)", name=op.f("ck_certificate_requests_enrols_or_renews")
        ),
        sa.CheckConstraint(
            "(present IS NULL) = (present_expires_ms IS NULL)", name=op.f("ck_certificate_requests_present_at_once")
        ),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_certificate_requests_member")),
        sa.PrimaryKeyConstraint("member", name=op.f("pk_certificate_requests")),
    )
    op.create_table(
        "withdrawals",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("job", sa.String(length=63), nullable=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_withdrawals_member")),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_withdrawals_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_withdrawals")),
    )
    op.create_index("ix_withdrawals_member", "withdrawals", ["member"], unique=False)
    op.create_index("uq_withdrawals_job", "withdrawals", ["member", "job"], unique=True)
    op.create_index(
        "uq_withdrawals_all",
        "withdrawals",
        ["member"],
        unique=True,
        sqlite_where=sa.text("job IS NULL"),
        postgresql_where=sa.text("job IS NULL"),
    )
    op.create_table(
        "withdrawal_marks",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("first_version", sa.Integer(), nullable=False),
        sa.Column("sums", sa.Integer(), nullable=False),
        sa.CheckConstraint("first_version >= 0", name=op.f("ck_withdrawal_marks_first_not_negative")),
        sa.CheckConstraint("sums >= 0", name=op.f("ck_withdrawal_marks_sums_not_negative")),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_withdrawal_marks_job")),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_withdrawal_marks_member")),
        sa.PrimaryKeyConstraint("job", "member", name=op.f("pk_withdrawal_marks")),
    )
    op.create_index("ix_withdrawal_marks_member", "withdrawal_marks", ["member"], unique=False)
    op.create_table(
        "lease",
        sa.Column("fence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("one", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("address", sa.String(length=300), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("one = 1", name=op.f("ck_lease_one_row")),
        sa.CheckConstraint("fence >= 0", name=op.f("ck_lease_fence_not_negative")),
        sa.PrimaryKeyConstraint("fence", name=op.f("pk_lease")),
        sa.UniqueConstraint("one", name="uq_lease_one"),
    )
    for table in ("journal", "roster_log"):
        _only_grows(table)


def _only_grows(table: str) -> None:
    said = f"the {table.replace('_', ' ')} only grows"
    if op.get_bind().dialect.name == "sqlite":
        for act in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_only_grows_{act.lower()} BEFORE {act} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{said}'); END"
            )
        op.execute(
            f"CREATE TRIGGER {table}_only_grows_insert BEFORE INSERT ON {table} "  # noqa: S608  constants
            f"WHEN NEW.id IS NOT (SELECT coalesce(max(id), 0) + 1 FROM {table}) "
            f"BEGIN SELECT RAISE(ABORT, '{said}'); END"
        )
    else:
        op.execute(
            f"CREATE FUNCTION {table}_only_grows() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{said}'; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_only_grows BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_only_grows()"
        )
