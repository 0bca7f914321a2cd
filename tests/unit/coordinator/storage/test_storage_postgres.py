"""What only a server can do: broken connections, two coordinators, an unanswered commit."""

import socket
import threading
from contextlib import suppress

import pytest
from sqlalchemy.engine import make_url

from coordinator.storage import database as module
from coordinator.storage import records
from coordinator.storage.database import Database, open_database
from coordinator.storage.errors import DatabaseInUse, DatabaseUnusable


def note(number: int):
    return lambda s: records.note(s, "test", "subject", number)


def numbers(database: Database) -> list[int]:
    return [entry.at_ms for entry in database.run_now(records.journal)]


@pytest.fixture
def briefly(monkeypatch):
    """Shortens the ten seconds that a starting coordinator waits for another one to end."""
    monkeypatch.setattr(module, "TAKEOVER_MS", 200)


def test_a_server_that_is_away_is_a_sentence_until_it_returns(postgres):
    seen: list[bool] = []
    database = open_database(postgres.database(), observe=lambda _seconds, failed: seen.append(failed), sole=True)
    database.run_now(note(1))
    postgres.stop("immediate")
    try:
        for _ in range(2):
            with pytest.raises(DatabaseUnusable, match="that it answers"):
                database.run_now(note(2))
    finally:
        postgres.start()
    database.run_now(note(3))
    assert numbers(database) == [1, 3]
    assert seen == [False, True, True, False, False]
    database.close()


def test_a_second_coordinator_is_refused_until_the_first_has_ended(database_url, briefly):
    first = open_database(database_url, sole=True)
    with pytest.raises(DatabaseInUse, match="another coordinator serves from the database"):
        open_database(database_url, sole=True)
    # Commands that only read, or make a backup, are let in.
    beside = open_database(database_url)
    beside.run_now(note(1))
    beside.close()
    first.run_now(note(2))
    first.close()
    second = open_database(database_url, sole=True)
    assert numbers(second) == [1, 2]
    second.close()


def test_a_coordinator_that_lost_its_place_writes_nothing_more(postgres, briefly):
    """Its connection broke, and another coordinator started before it was back."""
    url = postgres.database()
    first = open_database(url, sole=True)
    first.run_now(note(1))
    postgres.stop("immediate")
    postgres.start()
    second = open_database(url, sole=True)
    with pytest.raises(DatabaseInUse):
        first.run_now(note(2))
    second.run_now(note(3))
    assert numbers(second) == [1, 3]
    second.close()
    # Once the other one has ended, it continues.
    first.run_now(note(4))
    assert numbers(first) == [1, 3, 4]
    first.close()


class DeafOnCommit:
    """A proxy that lets a COMMIT through and cuts the connection before its answer."""

    def __init__(self, port: int) -> None:
        self.armed = False
        self.cuts = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            deaf = threading.Event()
            threading.Thread(target=self._pump, args=(client, server, deaf, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, deaf, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, deaf: threading.Event, outward: bool) -> None:
        try:
            while data := source.recv(64 * 1024):
                if outward and self.armed and b"COMMIT" in data:
                    self.armed = False
                    self.cuts += 1
                    deaf.set()
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

    def close(self) -> None:
        """Takes no more connections, and ends a waiting `accept`."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("server_stays", [True, False], ids=["asked", "nobody-to-ask"])
def test_the_database_is_asked_about_an_unanswered_commit(postgres, server_stays):
    url = make_url(postgres.database())
    way = DeafOnCommit(postgres.port)
    database = open_database(url.set(port=way.port).render_as_string(hide_password=False), sole=True)
    database.run_now(note(1))
    way.armed = True
    if server_stays:
        database.run_now(note(2))
    else:
        way.close()
        with pytest.raises(DatabaseUnusable):
            database.run_now(note(2))
    assert way.cuts == 1
    database.close()
    way.close()
    # Exactly once.
    direct = open_database(url.render_as_string(hide_password=False))
    assert numbers(direct) == [1, 2]
    direct.close()
