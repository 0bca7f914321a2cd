"""Keeps prunings of a store apart from backups and restores, on whichever machines they are typed.

The locks of a store's folder (`BlobStore.pruning`, `BlobStore.unpruned`) reach as far as that folder does. Several
machines share one PostgreSQL, so there an advisory lock keeps them apart as well: a pruning has it alone, and backups
and restores share it. It belongs to a connection, and ends with its process.

A serving coordinator needs no part in it. It holds a blob before a row names it, and pruning leaves what was held
within the grace period. A restore keeps it out by another lock (`coordinator.storage.database`).
"""

import contextlib
from collections.abc import Callable, Iterator

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from coordinator.storage.database import engine_of, words_of
from coordinator.storage.errors import DatabaseUnusable, StoreInUse

__all__ = ["store_work"]

_LOCK = 7440744174427445


@contextlib.contextmanager
def store_work(url: str, *, alone: bool) -> Iterator[Callable[[], None]]:
    """Holds the lock over a database's store. On SQLite, which is on one machine, there is none.

    Args:
        url: The database.
        alone: Whether nobody else may have it: for a pruning. Others wait for one that has begun.

    Yields:
        A call that raises DatabaseUnusable once the lock may be lost.

    Raises:
        StoreInUse: `alone`, and somebody else has it.
        DatabaseUnusable: the database cannot be reached.
    """
    engine = engine_of(url)
    if engine.dialect.name != "postgresql":
        engine.dispose()
        yield lambda: None
        return
    with contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        with _reached():
            # No transaction stays open, which the database might end.
            connection = stack.enter_context(engine.connect()).execution_options(isolation_level="AUTOCOMMIT")
            _take(connection, alone)
        stack.callback(_give_back, connection)

        def held() -> None:
            with _reached():
                connection.execute(text("SELECT 1"))

        yield held


def _take(connection: Connection, alone: bool) -> None:
    if not alone:
        connection.execute(text("SET lock_timeout = 0"))
        connection.execute(text(f"SELECT pg_advisory_lock_shared({_LOCK})"))
    elif not connection.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK})")):
        raise StoreInUse(
            "a backup, a restore or another `store prune` is under way over this database, perhaps on another machine; "
            "try again when it has ended"
        )


def _give_back(connection: Connection) -> None:
    """Releases the lock before this returns. The database notices a connection that is only closed a little later."""
    # A connection that broke has lost it.
    with contextlib.suppress(SQLAlchemyError):
        connection.execute(text("SELECT pg_advisory_unlock_all()"))


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise DatabaseUnusable(
            f"the database does not answer, so nothing keeps prunings, backups and restores apart: {words_of(error)}; "
            "check it, and repeat the command"
        ) from error
