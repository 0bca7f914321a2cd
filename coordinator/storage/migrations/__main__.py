"""Writes the next migration: `python -m coordinator.storage.migrations "what changes"`. For developers of Tacit."""

import sys

from alembic import command
from sqlalchemy import create_engine

from coordinator.storage.database import scripts


def main() -> None:
    """Compares the models with the schema that the migrations build in memory, and writes the difference."""
    message = " ".join(sys.argv[1:])
    if not message:
        sys.exit('name the change: python -m coordinator.storage.migrations "what changes"')
    config, directory = scripts()
    number = len(list(directory.walk_revisions())) + 1
    with create_engine("sqlite://").begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        command.revision(config, message, autogenerate=True, rev_id=f"{number:04}")


if __name__ == "__main__":
    main()
