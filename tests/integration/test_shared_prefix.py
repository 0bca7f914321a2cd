"""Two coordinators of real processes on one prefix of a bucket: a restored one is refused until it takes over."""

import asyncio
import json
from contextlib import suppress
from functools import partial

import pytest

from coordinator import ports
from coordinator import server as coordinator_server
from coordinator.config import CoordinatorFolder, load_config
from coordinator.storage.database import open_database
from coordinator.storage.errors import StoreTaken
from coordinator.storage.object_store import open_store
from coordinator.storage.ownership import keep_marked
from coordinator.storage.prune import named_blobs
from tests.support.processes import PATIENCE, command, running_federation, succeed
from tests.support.s3_server import BUCKET, served
from tests.support.stored_job import fill

PREFIX = "shared"


class Coordinator:
    def __init__(self, folder):
        self.folder, self.config = folder, load_config(folder)
        self.store = open_store(self.config, CoordinatorFolder(folder))

    def stored(self, job):
        """What a published version leaves: blobs in the bucket, and rows that name them."""
        database = open_database(self.config.database_url)
        fill(database, self.store, job)
        database.close()

    def whole(self):
        database = open_database(self.config.database_url)
        named = named_blobs(database, self.store)
        database.close()
        return all(self.store.has(digest) for digest in named)

    def prune(self):
        return command("coordinator", "store", "prune", "--dir", self.folder, "--yes", "--grace-hours", "1", "--json")


@pytest.fixture
def server(monkeypatch):
    with served() as (server, bad):
        monkeypatch.setenv("TACIT_STORE_URL", f"s3://{BUCKET}/{PREFIX}")
        monkeypatch.setenv("TACIT_S3_ENDPOINT", bad.url)
        monkeypatch.setenv("TACIT_S3_PATH_STYLE", "true")
        yield server


def test_a_restore_on_the_same_prefix_deletes_nothing_until_somebody_takes_it_over(server, tmp_path):
    def age():
        server.age(48 * 3600, f"{PREFIX}/blobs")

    with running_federation(tmp_path) as federation:
        federation.coordinator.stop()
        first = Coordinator(federation.dir)
        first.stored("desk")
        succeed("coordinator", "backup", tmp_path / "backup", "--dir", first.folder, "--with-keys")
        succeed("coordinator", "restore", tmp_path / "backup", "--dir", tmp_path / "again", "--yes")
        again = Coordinator(tmp_path / "again")
        first.stored("later")
        age()
        # The restored one is refused, and what the first one stored later lives.
        refused = again.prune()
        assert (refused.returncode, "another history of this database" in refused.stdout + refused.stderr) == (
            4,
            True,
        ), refused
        served_ = command("coordinator", "serve", "--dir", again.folder)
        assert (served_.returncode, "coordinator store take-over" in served_.stderr) == (1, True), served_.stderr
        assert first.whole()
        assert json.loads(first.prune().stdout)["missing"] == []
        # Somebody takes the prefix over. Then the first one is refused.
        take = ("coordinator", "store", "take-over", "--dir", again.folder, "--json")
        assert command(*take).returncode == 2
        taken = json.loads(succeed(*take, "--yes"))
        assert (len(taken["found"]), taken["held"] > 5, taken["missing"]) == (1, True, [])
        again.stored("newest")
        age()
        refused = first.prune()
        assert (refused.returncode, "took it over" in refused.stdout + refused.stderr) == (4, True), refused
        assert again.prune().returncode == 0
        assert again.whole()
        said = succeed("coordinator", "store", "take-over", "--dir", again.folder, "--yes")
        assert "belongs to no other database" in said
        # The attack: without the marks, the first one deletes what the other one names.
        for key in server.keys(f"{PREFIX}/owners"):
            del server.bucket.keys[key]
        assert json.loads(first.prune().stdout.splitlines()[0])["blobs"] > 0
        assert not again.whole()


def test_a_serving_coordinator_ends_when_its_prefix_is_taken_over(server, tmp_path, monkeypatch):
    """What it would still store, the other one's next pruning removes."""
    monkeypatch.setattr(coordinator_server, "keep_marked", partial(keep_marked, seconds=0.05))
    monkeypatch.setattr(ports, "refuse_tls_12", _passed)
    with running_federation(tmp_path) as federation:
        federation.coordinator.stop()
        first, again = Coordinator(federation.dir), tmp_path / "again"
        first.stored("desk")
        succeed("coordinator", "backup", tmp_path / "backup", "--dir", first.folder, "--with-keys")
        succeed("coordinator", "restore", tmp_path / "backup", "--dir", again, "--yes")

        async def taken():
            serving = asyncio.create_task(coordinator_server.serve(first.folder, first.config))
            port = first.config.federation_port
            while not serving.done():
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
            await asyncio.to_thread(succeed, "coordinator", "store", "take-over", "--dir", again, "--yes")
            await asyncio.wait_for(serving, PATIENCE)

        with pytest.raises(StoreTaken, match="took it over"):
            asyncio.run(taken())
        # Nor does it begin again.
        refused = command("coordinator", "serve", "--dir", first.folder)
        assert (refused.returncode, "took it over" in refused.stderr) == (1, True), refused.stderr


async def _passed(_config):
    """These tests' process was not started as a coordinator is."""
