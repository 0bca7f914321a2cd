"""How far each member's privacy ledger had come when it last spoke."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
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
