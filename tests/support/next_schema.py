"""An invented next schema: the program's migrations and one more, in the test's own folder."""

import shutil
from pathlib import Path

from coordinator.storage import database

__all__ = ["NEXT", "with_next_schema"]

NEXT = "0002"

_MIGRATION = '''
"""Tokens have a region."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To this revision."""
    op.add_column("tokens", sa.Column("region", sa.String(length=63), nullable=True))
    op.execute("UPDATE tokens SET region = 'of ' || member")
    # On SQLite this copies the table.
    with op.batch_alter_table("tokens") as batch:
        batch.alter_column("region", existing_type=sa.String(length=63), nullable=False)
    op.create_index("ix_tokens_region", "tokens", ["region"])
'''


def with_next_schema(folder: Path) -> str:
    """Makes the folder of migrations and returns its path, a value for `coordinator.storage.database.MIGRATIONS`."""
    made = folder / "migrations"
    shutil.copytree(database.MIGRATIONS, made, ignore=shutil.ignore_patterns("__pycache__"))
    (made / "versions" / "0002_next.py").write_text(_MIGRATION)
    return str(made)
