"""`coordinator store prune` beside a serving coordinator: killed at any moment, it loses nothing and leaves nothing.

The coordinator publishes versions of a real job all the while, so blobs come and rows begin to name them between any
two steps of a pruning.
"""

import hashlib
import json
import os
import random
import time

import pytest

from coordinator.config import load_config
from coordinator.storage import backup, snapshot
from coordinator.storage.blobs import open_blobs
from tests.support import warm
from tests.support.places import ROOT
from tests.support.processes import BIN, command, running_federation, succeed
from toolkit.console import ExitCode

MEMBERS = ("north", "east", "south")
# Longer than the coordinator takes from storing a blob to naming it, on a busy machine.
GRACE_SECONDS = 20.0
STRAYS = 150
PRUNE = ("coordinator", "store", "prune", "--grace-seconds", str(GRACE_SECONDS))


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with running_federation(tmp_path_factory.mktemp("prune"), *MEMBERS) as federation:
        config = federation.dir / "coordinator.toml"
        config.write_text(config.read_text().replace("keep_versions = 0", "keep_versions = 1"))
        federation.job("desk", count=100_000)
        for name in MEMBERS:
            federation.start(name)
        federation.wait_for("desk", lambda detail: detail.job.version_number >= 3)
        yield federation


def store_of(federation):
    return open_blobs(load_config(federation.dir).store_url)


def named(federation):
    """Every blob that a row names now, as a backup sees it."""
    with snapshot.of_database(load_config(federation.dir).database_url) as connection:
        return set(backup._named(connection, store_of(federation), False))


def strays(store, count, start):
    """Old blobs that nothing names."""
    for number in range(start, start + count):
        data = number.to_bytes(8, "big") * 32
        path = store._path(hashlib.sha256(data).digest())
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.utime(path, (1, 1))


def pruning(federation):
    words = [str(BIN / "coordinator"), *PRUNE[1:], "--dir", str(federation.dir), "--yes", "--json"]
    with open(os.devnull, "r+") as nothing:
        streams = {"stdin": nothing.fileno(), "stdout": nothing.fileno(), "stderr": nothing.fileno()}
        return warm.start(words, cwd=ROOT, env={**os.environ}, **streams)


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.long)])
def test_a_killed_pruning_removes_nothing_that_is_named_and_the_next_leaves_nothing(town, kills):
    store, choose = store_of(town), random.Random(kills)
    strays(store, STRAYS, 0)
    began = time.monotonic()
    assert pruning(town).wait(60) == 0
    whole = time.monotonic() - began
    before, cut_short = town.show("desk").job.version_number, 0
    for number in range(kills):
        strays(store, STRAYS, 10**6 * (kills + number))
        process = pruning(town)
        # A moment of the run, not a wait for anything.
        time.sleep(choose.uniform(0, whole))
        if process.poll() is None:
            process.kill()
            cut_short += 1
        process.wait(60)
        assert all(store.has(digest) for digest in named(town)), number
    assert cut_short > kills / 4
    said = json.loads(succeed(*PRUNE, "--dir", town.dir, "--yes", "--json"))
    assert said["missing"] == []
    # A version that was let go between the look at the rows and this one was young then.
    old, names = time.time() - 2 * GRACE_SECONDS, named(town)
    assert [blob for blob in store.listed() if blob.digest not in names and blob.held < old] == []
    after = town.wait_for("desk", lambda detail: detail.job.version_number > before + 1)
    assert after.job.reason == 0
    kept = [each.number for each in after.versions if store.has(each.digest)]
    assert {0, after.job.version_number} <= set(kept)


def test_backups_and_prunings_keep_out_of_each_others_way(town, tmp_path):
    with store_of(town).unpruned():
        refused = command(*PRUNE, "--dir", town.dir, "--yes")
    assert (refused.returncode, "a backup" in refused.stderr) == (ExitCode.REFUSED, True)
    succeed(*PRUNE, "--dir", town.dir, "--yes")
    succeed("coordinator", "backup", tmp_path / "backup", "--dir", town.dir)
    succeed("coordinator", "backup", "--verify", tmp_path / "backup")


def test_a_dry_run_removes_nothing_and_an_exported_version_stays(town, tmp_path):
    store = store_of(town)
    strays(store, 1, 5)
    said = json.loads(succeed(*PRUNE, "--dir", town.dir, "--dry-run", "--json"))
    assert said["dry_run"]
    assert said["blobs"] >= 1
    assert store.has(hashlib.sha256((5).to_bytes(8, "big") * 32).digest())
    newest = town.show("desk").job.version_number
    town.operator("export", "desk", "--version", str(newest), "--out", tmp_path / "model")
    town.wait_for("desk", lambda detail: detail.job.version_number > newest)
    after = json.loads(succeed(*PRUNE, "--dir", town.dir, "--json", "--yes"))
    assert newest not in after["versions"].get("desk", [])
    assert any(each.number == newest and store.has(each.digest) for each in town.show("desk").versions)


def test_a_folder_without_a_coordinator_is_refused_with_a_sentence(tmp_path):
    done = command("coordinator", "store", "prune", "--dir", tmp_path / "none", "--yes")
    assert (done.returncode, "does not exist" in done.stderr) == (ExitCode.USAGE, True)
