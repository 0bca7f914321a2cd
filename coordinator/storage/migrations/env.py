"""Runs migrations on the connection, and in the transaction, that `database` passes in; also writes new ones.

A developer who changed the models writes the next migration with `python -m coordinator.storage.migrations "what
changes"`, and then reads it.
"""

from alembic import context

from coordinator.storage.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite cannot alter most of a table in place, so Alembic copies the table.
    render_as_batch=True,
)
context.run_migrations()
