"""Prunings, backups and restores exclude each other on several machines over one PostgreSQL and one bucket."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text

from coordinator.storage import backup
from coordinator.storage.database import engine_of, open_database
from coordinator.storage.errors import DatabaseUnusable, StoreInUse
from coordinator.storage.prune import Retention, prune
from coordinator.storage.store_work import store_work
from tests.support.processes import PATIENCE, within_patience
from tests.support.s3_server import object_store, served
from tests.support.stored_job import fill


class Machine:
    """One machine: its own folder for locks and cache, over the common database and bucket."""

    def __init__(self, name, url, endpoint, folder):
        self.url, self.folder = url, folder / name
        self.database = open_database(url)
        self.store = object_store(endpoint, self.folder, "shared")

    def prune(self):
        return prune(self.database, self.store, Retention(), now_ms=3, grace_seconds=3600.0, by="machine:op")

    def backup(self):
        return backup.make(self.url, self.store, self.folder / "backup", federation=b"f" * 32, software="1", now_ms=1)


class Held:
    """A request to the store that the proxy holds back until `go`."""

    def __init__(self, bad, method):
        self.caught, self.go = threading.Event(), threading.Event()
        bad.rule(method, self._hold, pattern="shared/blobs/", times=1)

    def _hold(self, handler, asked):
        self.caught.set()
        self.go.wait(PATIENCE)
        handler.answer(*handler.passed_on(handler.body))


@pytest.fixture
def url(postgres):
    found = postgres.database()
    open_database(found, sole=True).close()
    return found


@pytest.fixture
def service():
    with served() as both:
        yield both


@pytest.fixture
def machines(url, service, tmp_path):
    both = [Machine(name, url, service[1].url, tmp_path) for name in ("first", "second")]
    fill(both[0].database, both[0].store, "desk")
    yield both
    for each in both:
        each.database.close()


@pytest.fixture
def apart():
    with ThreadPoolExecutor(2) as threads:
        yield threads


def waiting(url):
    engine = engine_of(url)
    with engine.connect() as connection:
        found = connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
    engine.dispose()
    return found


def test_no_machine_prunes_while_another_one_backs_up(machines, service, apart):
    first, second = machines
    held = Held(service[1], "GET")
    try:
        making = apart.submit(second.backup)
        assert held.caught.wait(PATIENCE)
        with pytest.raises(StoreInUse, match="perhaps on another machine"):
            first.prune()
    finally:
        held.go.set()
    making.result(PATIENCE).snapshot.check()
    assert first.prune().missing == ()


def test_a_backup_waits_for_a_pruning_on_another_machine(machines, service, apart, url):
    first, second = machines
    stray = first.store.put(b"stray")
    service[0].age(7200, "shared/blobs/")
    held = Held(service[1], "DELETE")
    try:
        pruning = apart.submit(first.prune)
        assert held.caught.wait(PATIENCE)
        with pytest.raises(StoreInUse):
            second.prune()
        making = apart.submit(second.backup)
        within_patience(lambda: waiting(url) == 1)
        assert not making.done()
    finally:
        held.go.set()
    # A slow store may have been asked twice to write it, under two keys.
    assert pruning.result(PATIENCE).blobs >= 1
    making.result(PATIENCE).snapshot.check()
    assert not first.store.has(stray)


def test_backups_of_two_machines_run_side_by_side(url):
    with store_work(url, alone=False) as one, store_work(url, alone=False) as other:
        one()
        other()
        with pytest.raises(StoreInUse), store_work(url, alone=True):
            pass


@pytest.mark.parametrize("alone", [True, False])
def test_the_lock_is_free_once_the_work_has_ended(url, alone, monkeypatch):
    """A pruning that a script starts right after a backup is not refused, however late the database sees it go."""
    # As long as the connection is not closed, it keeps what was not released.
    with monkeypatch.context() as late:
        late.setattr(Engine, "dispose", lambda engine: None)
        with store_work(url, alone=alone):
            pass
    with store_work(url, alone=True):
        pass


def test_a_pruning_ends_when_its_lock_may_be_lost(url):
    """The database ends its connection, and another machine may begin."""
    engine = engine_of(url)
    with store_work(url, alone=True) as held:
        held()
        with engine.connect() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted "
                    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
            )
        engine.dispose()
        within_patience(lambda: _free(url))
        with pytest.raises(DatabaseUnusable, match="repeat the command"):
            held()


def _free(url):
    try:
        with store_work(url, alone=True):
            return True
    except StoreInUse:
        return False


def test_sqlite_needs_no_such_lock(tmp_path):
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with store_work(url, alone=True) as held, store_work(url, alone=True):
        held()
    assert not (tmp_path / "a.db").exists()
