"""Two coordinators over one PostgreSQL and one bucket: a takeover while an upload to the bucket is in flight.

The tests run in order on one federation.
"""

import json
import socket
import threading
from contextlib import suppress

import pytest
from sqlalchemy import text

from coordinator.config import CoordinatorFolder, load_config
from coordinator.storage.database import engine_of, open_database
from coordinator.storage.object_store import open_store
from coordinator.storage.prune import named_blobs
from coordinator.storage.store_work import store_work
from tests.support.postgres import running_postgres
from tests.support.processes import PATIENCE, command, succeed
from tests.support.replicas import MEMBERS, Town
from tests.support.s3_server import BUCKET, served

pytestmark = pytest.mark.timeout(4 * PATIENCE)
PREFIX = "town"


@pytest.fixture(scope="module")
def service():
    with served() as both:
        yield both


@pytest.fixture(scope="module")
def town(service, tmp_path_factory):
    store = {"store_url": f"s3://{BUCKET}/{PREFIX}", "s3_endpoint": service[1].url, "s3_path_style": True}
    with running_postgres() as postgres:
        federation = Town(tmp_path_factory.mktemp("town"), postgres.database(), store=store)
        yield federation
        federation.close()


class Upload:
    """The next upload of a blob, which the proxy holds back until `arrive`."""

    def __init__(self, bad):
        self._caught, self._go, self._arrived = threading.Event(), threading.Event(), threading.Event()
        self.status = 0
        bad.rule("PUT", self._hold, pattern=f"{PREFIX}/blobs/", times=1)

    def _hold(self, handler, asked):
        self.key = asked.path.partition(f"/{BUCKET}/")[2].partition("?")[0]
        self._caught.set()
        self._go.wait(PATIENCE)
        self.status, headers, body = handler.passed_on(handler.body)
        self._arrived.set()
        handler.close_connection = True
        # Who asked may be gone.
        with suppress(OSError):
            handler.answer(self.status, headers, body)

    def in_flight(self):
        assert self._caught.wait(PATIENCE)
        return self

    def arrive(self):
        """Lets it reach the store, however late that is."""
        self._go.set()
        assert self._arrived.wait(PATIENCE)


def whole(town):
    """Checks that every blob that a row names is in the bucket, under its own digest."""
    config = load_config(town.active.dir)
    store = open_store(config, CoordinatorFolder(town.active.dir))
    database = open_database(config.database_url)
    try:
        named = named_blobs(database, store)
        assert len(named) > 2
        for digest in named:
            store.get(digest)
    finally:
        database.close()
        store.apart.close()


def test_a_coordinator_that_is_killed_during_an_upload_loses_nothing(town, service):
    town.light_job("killed", count=100_000, embedding=16)
    town.goes_on("killed", 1)
    upload = Upload(service[1]).in_flight()
    town.active.running.kill()
    town.taken_over("expired")
    town.goes_on("killed", 1)
    upload.arrive()
    whole(town)
    town.goes_on_from_there("killed")
    town.run(town.standby, "standing_by")


def test_an_upload_that_arrives_after_the_takeover_does_no_harm(town, service):
    server, bad = service
    town.light_job("late", count=100_000, embedding=16)
    town.goes_on("late", 1)
    upload = Upload(bad).in_flight()
    halted = town.active
    halted.halt()
    town.taken_over("expired")
    town.goes_on("late", 1)
    upload.arrive()
    assert upload.key in server.keys(PREFIX)
    # It hears that its blob is stored, and may not name it.
    halted.wake()
    halted.running.wait_for("lease_lost")
    assert halted.running.process.wait(timeout=PATIENCE) == 1
    whole(town)
    town.goes_on_from_there("late")
    # Nothing names the late copy, or a newer one is beside it. Either way it goes when it is old.
    server.age(7200, f"{PREFIX}/blobs/")
    pruned = json.loads(
        succeed("coordinator", "store", "prune", "--dir", town.active.dir, "--yes", "--grace-hours", "1", "--json")
    )
    assert pruned["missing"] == []
    whole(town)
    town.sound("late", MEMBERS)
    town.run(town.standby, "standing_by")


def fence(town):
    engine = engine_of(town.active.config.database_url)
    with engine.connect() as connection:
        found = connection.scalar(text("SELECT fence FROM lease"))
    engine.dispose()
    return found


def test_what_can_be_checked_is_checked_before_the_lease_is_taken(town, service):
    """Nobody has the lease, and a coordinator that cannot serve leaves it to one that can."""
    first, second = town.active, town.standby
    assert [each.running.stop() for each in (second, first)] == [0, 0]
    before = fence(town)
    service[1].refuse("DELETE", 403, "AccessDenied", pattern="checks/[0-9a-f]+$")
    assert first.start().process.wait(timeout=PATIENCE) == 1
    service[1].heal()
    assert fence(town) == before
    for port in (first.config.metrics_port, first.config.federation_port):
        with socket.create_server(("127.0.0.1", port)):
            assert first.start().process.wait(timeout=PATIENCE) == 1
        assert fence(town) == before
    town.run(first, "serving")
    assert fence(town) == before + 1
    town.run(second, "standing_by")
    # Two folders over one database: a command on one machine keeps out the other one's.
    with store_work(first.config.database_url, alone=False):
        done = command("coordinator", "store", "prune", "--dir", second.dir, "--yes")
    assert (done.returncode, "perhaps on another machine" in done.stderr) == (4, True), done.stderr
    # And a restore keeps out of a database that is served, on whichever machine it is typed.
    backup = town.folder / "backup"
    succeed("coordinator", "backup", backup, "--dir", second.dir)
    done = command("coordinator", "restore", backup, "--dir", second.dir, "--yes")
    assert (done.returncode, "a coordinator serves from the database" in done.stderr) == (1, True), done.stderr
