"""Made-up text that members gave, or would not give."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_ONE_COUNTS = sa.text("replaced_ms IS NULL")


def upgrade() -> None:
    """To this revision."""
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
