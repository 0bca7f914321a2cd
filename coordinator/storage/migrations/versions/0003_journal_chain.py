"""The journal becomes a hash chain: each entry carries a hash of itself and of the entry before it.

Entries that are there already are chained in the order of their numbers.
"""

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_BATCH = 1000


def upgrade() -> None:
    """To this revision."""
    sqlite = op.get_bind().dialect.name == "sqlite"
    if sqlite:
        for act in ("update", "delete"):
            op.execute(f"DROP TRIGGER journal_only_grows_{act}")
    else:
        op.execute("ALTER TABLE journal DISABLE TRIGGER journal_only_grows")
    op.add_column("journal", sa.Column("hash", sa.LargeBinary(length=32), nullable=True))
    _chain()
    # On SQLite this copies the table.
    with op.batch_alter_table("journal") as batch:
        batch.alter_column("hash", existing_type=sa.LargeBinary(length=32), nullable=False)
        batch.create_check_constraint(op.f("ck_journal_hash_is_a_digest"), "hash IS NULL OR length(hash) = 32")
    if sqlite:
        for act in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER journal_only_grows_{act.lower()} BEFORE {act} ON journal "
                "BEGIN SELECT RAISE(ABORT, 'the journal only grows'); END"
            )
    else:
        op.execute("ALTER TABLE journal ENABLE TRIGGER journal_only_grows")


def _chain() -> None:
    # As `coordinator.storage.chain` has it, written out once more: a migration never changes.
    connection = op.get_bind()
    journal = sa.table(
        "journal",
        sa.column("id", sa.BigInteger),
        sa.column("at_ms", sa.BigInteger),
        sa.column("kind", sa.String),
        sa.column("subject", sa.String),
        sa.column("fields", sa.JSON),
        sa.column("hash", sa.LargeBinary),
    )
    previous, last = bytes(32), None
    while True:
        query = sa.select(journal).order_by(journal.c.id).limit(_BATCH)
        rows = connection.execute(query if last is None else query.where(journal.c.id > last)).all()
        if not rows:
            return
        for row in rows:
            entry = [row.id, row.at_ms, row.kind, row.subject, row.fields]
            told = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
            previous = hashlib.sha256(b"tacit journal 1\n" + previous + told.encode("ascii")).digest()
            connection.execute(sa.update(journal).where(journal.c.id == row.id).values(hash=previous))
        last = rows[-1].id
