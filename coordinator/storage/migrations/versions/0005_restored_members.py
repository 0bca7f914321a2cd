"""Members whose certificates may be newer than a backup that was restored."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
    op.create_table(
        "restored_members",
        sa.Column("member", sa.String(length=63), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["member"], ["members.name"], name=op.f("fk_restored_members_member")),
        sa.PrimaryKeyConstraint("member", name=op.f("pk_restored_members")),
    )
