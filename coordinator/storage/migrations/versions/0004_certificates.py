"""Certificates that are renewed, and operators that can be cut off.

Members that enrolled before are served as ever; their certificate is stored here when it is renewed.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
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
        sa.Column("known_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("issuer", sa.LargeBinary(length=32), nullable=False),
        sa.Column("revoked_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "fingerprint IS NULL OR length(fingerprint) = 32",
            name=op.f("ck_operator_certificates_fingerprint_is_a_digest"),
        ),
        sa.ForeignKeyConstraint(["name"], ["operators.name"], name=op.f("fk_operator_certificates_name")),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_operator_certificates")),
    )
    op.create_index(op.f("ix_operator_certificates_name"), "operator_certificates", ["name"])
