"""A coordinator on PostgreSQL is killed, backed up while it serves, lost, and restored to SQLite. Members continue."""

import json
import shutil
import time

import pytest

from coordinator.storage.restore import GAP
from tacit.v1 import operator_pb2 as pb
from tests.support.besieged import Besieged, attempts
from tests.support.postgres import running_postgres
from tests.support.processes import PATIENCE, command, succeed

MEMBERS = ("north", "east", "south", "west")


@pytest.fixture
def postgres():
    with running_postgres() as server:
        yield server


def head_of(federation, *more):
    return json.loads(federation.operator("audit", "verify", "--json", *more))


def test_a_killed_and_lost_coordinator_is_restored_elsewhere(postgres, tmp_path, monkeypatch):
    url = postgres.database()
    monkeypatch.setenv("TACIT_DATABASE_URL", url)
    federation = Besieged(tmp_path)
    try:
        federation.enrol(*MEMBERS)
        assert not (federation.dir / "tacit.db").exists()
        for name in MEMBERS:
            federation.light(name)
        federation.light_job("desk", count=100_000, embedding=16, deadlines={"mask": 5})
        # kill -9 in the middle of a round.
        federation.status(lambda jobs: jobs["desk"].version_number >= 2 and jobs["desk"].phase == "mask")
        federation.coordinator.kill()
        began = time.monotonic()
        federation.serve()
        federation.goes_on("desk")
        # No fixed waiting window of a minute. The coordinator waits for the whole cohort, whose members may have
        # confirmed a sum.
        assert time.monotonic() - began < 30
        # A command that needs the whole database is refused, and the coordinator continues.
        done = command("coordinator", "migrate", "--dir", federation.dir)
        assert done.returncode == 4, done.stderr
        assert "another coordinator serves from the database" in done.stderr
        # The database server goes away under it. Another coordinator may have the lease by the time that it is back, so
        # this one ends, and its supervisor starts it again. Nothing is lost.
        postgres.stop("immediate")
        federation.coordinator.wait_for("lease_lost")
        assert federation.coordinator.process.wait(timeout=PATIENCE) == 1
        postgres.start()
        federation.serve()
        job = federation.status(lambda jobs: "desk" in jobs)["desk"]
        if job.status == pb.JOB_STATUS_PAUSED:
            federation.operator("job", "resume", "desk")
        federation.goes_on("desk")
        assert "Unexpected" not in (tmp_path / "coordinator.log").read_text()

        # A backup during rounds, then more rounds, which the backup does not contain.
        backup = tmp_path / "backup"
        made = json.loads(succeed("coordinator", "backup", backup, "--dir", federation.dir, "--with-keys", "--json"))
        succeed("coordinator", "backup", "--verify", backup)
        kept = head_of(federation, "--head", made["head"])
        assert made["head"] in kept["found"]
        federation.goes_on("desk")
        lost = federation.sound("desk", MEMBERS)
        federation.coordinator.kill()

        # The machine and its database server are lost: restore into another folder, on SQLite.
        monkeypatch.delenv("TACIT_DATABASE_URL")
        shutil.rmtree(federation.dir)
        done = json.loads(succeed("coordinator", "restore", backup, "--dir", federation.dir, "--yes", "--json"))
        went_back = done["jobs"]["desk"]
        assert 2 <= went_back < lost.job.version_number
        # Whoever does not know whether it ended types it again. That changes nothing.
        again = json.loads(succeed("coordinator", "restore", backup, "--dir", federation.dir, "--yes", "--json"))
        assert again == done | {"blobs": 0, "keys": 0}
        federation.serve()
        federation.status(lambda jobs: jobs["desk"].members_connected == len(MEMBERS))
        federation.operator("job", "resume", "desk")
        # No member refuses: the coordinator does not reuse numbers that members have seen.
        federation.status(lambda jobs: jobs["desk"].version_number >= lost.job.version_number + 2)
        federation.abort("desk")
        now = federation.sound("desk", MEMBERS)
        after = [attempt for attempt in attempts(now) if attempt.number > GAP and attempt.cohort]
        assert {attempt.outcome for attempt in after[:-1]} == {"published"}
        assert [lost for attempt in after for lost in attempt.dropouts] == []
        assert {name for attempt in after for name in attempt.cohort} == set(MEMBERS)
        seen = {attempt.number for attempt in attempts(lost)}
        assert not seen & {attempt.number for attempt in after}
        # The backup's versions are unchanged.
        then = {version.number: version.digest for version in lost.versions}
        kept_versions = {v.number: v.digest for v in now.versions if v.number <= went_back}
        assert kept_versions == {number: then[number] for number in kept_versions}
        # Higher version numbers now name other versions. The journal and a check against a later head both show it.
        (entry,) = [
            entry
            for entry in map(json.loads, federation.operator("audit", "show", "--json").splitlines())
            if entry["kind"] == "restored"
        ]
        assert entry["fields"]["versions"] == [f"desk {went_back}"]
        assert entry["fields"]["head"] == made["head"]
        head_of(federation, "--head", made["head"])
        later = command("coordinator", "audit", "verify", "--dir", federation.dir, "--head", kept["head"])
        assert (later.returncode, "is not in the journal" in later.stderr) == (1, True), later.stderr
        federation.coordinator.kill()
        again = command("coordinator", "restore", backup, "--dir", federation.dir, "--yes")
        assert (again.returncode, "not empty" in again.stderr) == (1, True), again.stderr
    finally:
        federation.close()
