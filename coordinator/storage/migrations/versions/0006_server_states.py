"""What server optimisers carry from version to version."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
    op.create_table(
        "server_states",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.CheckConstraint("digest IS NULL OR length(digest) = 32", name=op.f("ck_server_states_digest_is_a_digest")),
        sa.CheckConstraint("name IN ('momentum', 'accumulator')", name=op.f("ck_server_states_name_known")),
        sa.ForeignKeyConstraint(
            ["job", "version"], ["versions.job", "versions.number"], name=op.f("fk_server_states_job_version")
        ),
        sa.PrimaryKeyConstraint("job", "version", "name", name=op.f("pk_server_states")),
    )
