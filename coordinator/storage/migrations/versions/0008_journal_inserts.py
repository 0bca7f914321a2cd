"""The journal takes an entry only after its newest one, so that no INSERT OR REPLACE removes one.

SQLite deletes the row that a REPLACE conflicts with, and runs no DELETE trigger for it unless the connection that
writes has set `recursive_triggers` (https://www.sqlite.org/lang_conflict.html). PostgreSQL has no REPLACE, and runs the
UPDATE trigger for ON CONFLICT DO UPDATE.
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            "CREATE TRIGGER journal_only_grows_insert BEFORE INSERT ON journal "
            "WHEN NEW.id IS NOT (SELECT coalesce(max(id), 0) + 1 FROM journal) "
            "BEGIN SELECT RAISE(ABORT, 'the journal only grows'); END"
        )
