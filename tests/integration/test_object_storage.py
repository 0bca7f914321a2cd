"""A federation of real processes whose blobs are in a bucket: rounds, kills in the middle of an upload, export, backup
and prune.
"""

import hashlib
import json
import os
import threading

import pytest

from coordinator.config import CoordinatorFolder, load_config
from coordinator.storage import backup, snapshot
from coordinator.storage.object_store import open_store
from tests.support import warm
from tests.support.places import ROOT
from tests.support.processes import BIN, command, running_federation, succeed
from tests.support.s3_server import BUCKET, served

MEMBERS = ("north", "east", "south")


@pytest.fixture(scope="module")
def service():
    with served() as both:
        yield both


@pytest.fixture(scope="module")
def town(service, tmp_path_factory):
    """Its coordinator reaches the store through the proxy."""
    settings = {
        "TACIT_STORE_URL": f"s3://{BUCKET}/town",
        "TACIT_S3_ENDPOINT": service[1].url,
        "TACIT_S3_PATH_STYLE": "true",
        "TACIT_KEEP_VERSIONS": "1",
        "TACIT_KEEP_RESTARTS": "false",
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name, value)
        with running_federation(tmp_path_factory.mktemp("town"), *MEMBERS) as federation:
            federation.job("desk", count=100_000)
            for name in MEMBERS:
                federation.start(name)
            federation.wait_for("desk", lambda detail: detail.job.version_number >= 2)
            yield federation


@pytest.fixture
def bad(service):
    yield service[1]
    service[1].heal()


def store_of(town):
    return open_store(load_config(town.dir), CoordinatorFolder(town.dir))


def named(town):
    with snapshot.of_database(load_config(town.dir).database_url) as connection:
        return set(backup._named(connection, store_of(town), False))


def published(town, more=1):
    now = town.show("desk").job.version_number
    return town.wait_for("desk", lambda detail: detail.job.version_number >= now + more).job.version_number


def test_versions_are_in_the_bucket_and_nowhere_else(town, service):
    assert len(service[0].keys("town/blobs/")) >= 5
    assert not (town.dir / "store" / "blobs").exists()
    newest = town.show("desk").versions[-1]
    assert store_of(town).has(newest.digest)


def test_a_coordinator_that_is_killed_while_it_uploads_goes_on_after_a_restart(town, service, bad):
    caught = threading.Event()

    def hang(handler, asked):
        caught.set()
        # Ends with the killed process, whose connection is gone then.
        handler.rfile.read(1)
        handler.close_connection = True

    bad.rule("PUT", hang, pattern="town/blobs/", times=1)
    assert caught.wait(120)
    before = town.show("desk").job.version_number
    town.coordinator.kill()
    town.serve()
    assert published(town) > before
    assert all(store_of(town).has(digest) for digest in named(town))


def test_a_store_that_is_down_for_a_while_costs_no_version(town, bad):
    bad.refuse("PUT", 503, "ServiceUnavailable", pattern="town/blobs/", times=3)
    after = published(town, 2)
    assert bad.count("PUT", "town/blobs/") > 3
    versions = [each.number for each in town.show("desk").versions]
    assert versions[: after + 1] == list(range(after + 1))


def test_a_version_is_exported(town, tmp_path):
    town.operator("export", "desk", "--version", "0", "--out", tmp_path / "model")
    assert any((tmp_path / "model").rglob("*.onnx"))


def test_prunings_that_are_killed_lose_nothing_and_a_backup_is_whole(town, service, bad, tmp_path):
    server = service[0]
    prune = ("coordinator", "store", "prune", "--dir", town.dir, "--yes", "--json", "--grace-hours", "1")

    def age():
        """Lets every blob look old that no row names any more."""
        keep = {digest.hex() for digest in named(town)}
        for key in server.keys("town/blobs/"):
            if key.split("/")[3] not in keep:
                server.age(7200, key)

    published(town)
    for number in range(4):
        # Versions that the policy lets go.
        succeed(*prune[:-2])
        age()
        struck = threading.Event()

        def kill(handler, asked, struck=struck, number=number):
            # The store deletes the object or not, and the process never hears of it.
            if number % 2:
                handler.passed_on(b"")
            struck.set()
            handler.rfile.read(1)
            handler.close_connection = True

        store_of(town).put(b"stray %d" % number)
        server.age(7200, f"town/blobs/{_key(b'stray %d' % number)}")
        bad.rule("DELETE", kill, pattern="town/blobs/", times=1)
        with open(os.devnull, "r+") as nothing:
            streams = {"stdin": nothing.fileno(), "stdout": nothing.fileno(), "stderr": nothing.fileno()}
            words = [str(BIN / prune[0]), *map(str, prune[1:])]
            process = warm.start(words, cwd=ROOT, env={**os.environ}, **streams)
        assert struck.wait(60)
        process.kill()
        process.wait(60)
        bad.heal()
        assert all(store_of(town).has(digest) for digest in named(town)), number
    said = json.loads(succeed(*prune))
    assert said["missing"] == []
    published(town)
    succeed("coordinator", "backup", tmp_path / "backup", "--dir", town.dir)
    succeed("coordinator", "backup", "--verify", tmp_path / "backup")
    assert not any(store_of(town).has(_digest(b"stray %d" % number)) for number in range(4))


def _digest(data):
    return hashlib.sha256(data).digest()


def _key(data):
    name = _digest(data).hex()
    return f"{name[:2]}/{name}"


def test_the_start_says_what_is_wrong_with_the_store(town, bad):
    good = command("coordinator", "store", "check", "--dir", town.dir)
    assert (good.returncode, "can be used" in good.stdout) == (0, True)
    bad.refuse("DELETE", 403, "AccessDenied", pattern="checks/[0-9a-f]+$")
    for words in (("store", "check"), ("serve",)):
        if words == ("serve",):
            town.coordinator.stop()
        done = command("coordinator", *words, "--dir", town.dir)
        assert done.returncode == 1, words
        assert "give these credentials the right s3:DeleteObject" in done.stderr, done.stderr
    bad.heal()
    town.serve()
    published(town)


def test_a_restore_fills_an_empty_bucket(town, tmp_path, monkeypatch):
    succeed("coordinator", "backup", tmp_path / "backup", "--dir", town.dir, "--with-keys")
    monkeypatch.setenv("TACIT_STORE_URL", f"s3://{BUCKET}/restored")
    succeed("coordinator", "restore", tmp_path / "backup", "--dir", tmp_path / "again", "--yes")
    restored = open_store(load_config(tmp_path / "again"), CoordinatorFolder(tmp_path / "again"))
    found = backup.newest(tmp_path / "backup").manifest
    assert found.blobs
    assert all(restored.has(part.sha256) for part in found.blobs)
