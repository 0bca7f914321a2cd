"""A COMMIT whose answer a coordinator never hears: a proxy in front of PostgreSQL, and commits that take long there."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.engine import make_url

__all__ = ["HeldCommits", "Loses", "LostAnswers", "when_asked"]

_LOCK = 4711


class Loses(Enum):
    """What is lost of a COMMIT. The client's side of the connection is cut in each case."""

    ANSWER = auto()
    """The server's answer, once it has come: the work is committed."""
    PATIENCE = auto()
    """The connection, as soon as the COMMIT is on its way. The server's side stays open, and knows nothing of it."""
    COMMIT = auto()
    """The COMMIT itself. The server's side stays open and waits for it."""


class LostAnswers:
    """A proxy to a PostgreSQL server that spoils the next COMMIT once `armed`."""

    def __init__(self, port: int) -> None:
        self.armed: Loses | None = None
        self.cuts = 0
        # How many of the next connections are closed at once, as by a server that restarts.
        self.refusals = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, url: str) -> str:
        """The URL of a database of that server, by this way."""
        return make_url(url).set(port=self.port).render_as_string(hide_password=False)

    def close(self) -> None:
        """Takes no more connections, and ends a waiting `accept`."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusals:
                self.refusals -= 1
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            deaf = threading.Event()
            threading.Thread(target=self._pump, args=(client, server, deaf, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, deaf, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, deaf: threading.Event, outward: bool) -> None:
        try:
            while data := source.recv(64 * 1024):
                if outward and self.armed is not None and b"COMMIT" in data:
                    loses, self.armed = self.armed, None
                    self.cuts += 1
                    if loses is Loses.ANSWER:
                        # First, because the answer may be there before this thread goes on.
                        deaf.set()
                    if loses is not Loses.COMMIT:
                        sink.sendall(data)
                    if loses is not Loses.ANSWER:
                        source.shutdown(socket.SHUT_RDWR)
                        # The other thread closes the server's side once the server has ended it, or has answered.
                        return
                    continue
                if not outward and deaf.is_set():
                    # The server has answered: the work is committed, and the coordinator will not hear of it.
                    break
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            # Closing alone would leave the other thread waiting in its recv.
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class HeldCommits:
    """Lets the commits that insert chosen rows take until `release`: a deferred trigger waits for a lock."""

    def __init__(self, url: str, table: str, when: str) -> None:
        """Holds such commits.

        Args:
            url: The database.
            table: The rows' table.
            when: An SQL condition on `NEW`.
        """
        self._engine = create_engine(url, isolation_level="AUTOCOMMIT")
        self._holding = self._engine.connect()
        self._holding.execute(
            text(
                "CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS "
                f"$$ BEGIN PERFORM pg_advisory_xact_lock_shared({_LOCK}); RETURN NULL; END $$"
            )
        )
        self._holding.execute(
            text(
                f"CREATE CONSTRAINT TRIGGER take_long AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED "
                f"FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION take_long()"
            )
        )
        self._holding.execute(text(f"SELECT pg_advisory_lock({_LOCK})"))

    def release(self) -> None:
        """Lets them end. May be called again."""
        self._holding.close()
        self._engine.dispose()


@contextmanager
def when_asked(then: Callable[[], None]) -> Iterator[None]:
    """Calls `then` each time that the database has said what became of a transaction, until the block ends."""

    def after(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        if "txid_status" in statement:
            then()

    event.listen(Engine, "after_cursor_execute", after)
    try:
        yield
    finally:
        event.remove(Engine, "after_cursor_execute", after)
