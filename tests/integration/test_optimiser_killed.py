"""A job with a server optimiser over real processes. The coordinator is killed with SIGKILL, lost, and restored from a
backup. Its versions equal, bit for bit, those computed from what members sent.
"""

import hashlib
import json
import shutil
import sys

import numpy as np
import pytest

from benchmarks.operations.soak_member import record_of
from coordinator.rounds.optimiser import StateVectors
from coordinator.rounds.publish import next_version
from coordinator.storage import open_blobs, open_database, records
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.reason import Reason
from tacit.v1 import operator_pb2 as pb
from tacit.vector import layout_of
from tests.support.besieged import Besieged, attempts
from tests.support.processes import Process, succeed

MEMBERS = ("north", "east", "south")
SERVER = 'optimiser = "fedadam"\nlearning_rate = 0.05\nbeta_1 = 0.8\nbeta_2 = 0.9'


@pytest.fixture
def federation(tmp_path):
    running = Besieged(tmp_path)
    try:
        running.enrol(*MEMBERS)
        for name in MEMBERS:
            # These members record what they send.
            records_of(running, name).mkdir()
            words = [sys.executable, "-m", "benchmarks.operations.soak_member", str(running.home(name))]
            words.append(str(records_of(running, name)))
            running.processes.append(Process(name, words, tmp_path / f"{name}.log"))
        yield running
    finally:
        running.close()


def records_of(federation, name):
    return federation.folder / f"records-{name}"


def stored(federation):
    """The job, its versions and the store, read from the disk."""
    store = open_blobs(f"file://{federation.dir / 'store'}")
    database = open_database(f"sqlite:///{federation.dir / 'tacit.db'}")
    try:
        found = database.run_now(lambda s: (records.load_job(s, "adaptive"), records.versions(s, "adaptive")))
    finally:
        database.close()
    job = JobDocument.from_json(store.get(found[0].document))
    return job, [(each, store.get(each.digest)) for each in found[1]], store


def by_hand(federation, job, start, detail):
    """Digests of versions and states, computed from the records of each published attempt's survivors."""
    base, before = np.frombuffer(start, "<f4"), None
    layout = layout_of(job, len(MEMBERS))
    for each in detail.rounds:
        for attempt in each.attempts:
            if attempt.outcome != "published":
                continue
            total = np.zeros(layout.values, np.uint32)
            for name in attempt.survivors:
                path = record_of(records_of(federation, name), AttemptId(job.name, each.number, attempt.number))
                total += np.load(path, allow_pickle=False)
            total &= np.uint32((1 << layout.bits) - 1)
            state = StateVectors(job.server, job.values, before)
            base = next_version(job, len(MEMBERS), len(MEMBERS), total, base, state=state).values
            before = state.after
            yield (
                hashlib.sha256(base.tobytes()).digest(),
                {name: hashlib.sha256(vector.tobytes()).digest() for name, vector in before.items()},
            )


def killed_in(federation, phase, version):
    """Kills the coordinator (SIGKILL) in this phase, once the job has this version. Returns the last stored version."""
    federation.status(lambda jobs: jobs["adaptive"].version_number >= version and jobs["adaptive"].phase == phase)
    federation.coordinator.kill()
    return len(stored(federation)[1]) - 1


def test_a_restored_optimiser_reaches_the_versions_computed_by_hand(federation, tmp_path):
    federation.light_job("adaptive", count=100_000, embedding=16, deadlines={"mask": 5}, server=SERVER)
    came = killed_in(federation, "mask", 2)
    federation.serve()
    came = killed_in(federation, "publish", came + 1)
    backup = tmp_path / "backup"
    succeed("coordinator", "backup", backup, "--dir", federation.dir, "--with-keys")
    # The job continues, and then the machine is lost with everything that came after the backup.
    federation.serve()
    assert killed_in(federation, "mask", came + 1) > came
    shutil.rmtree(federation.dir)
    done = json.loads(succeed("coordinator", "restore", backup, "--dir", federation.dir, "--yes", "--json"))
    assert done["jobs"]["adaptive"] == came
    federation.serve()
    federation.status(lambda jobs: jobs["adaptive"].members_connected == len(MEMBERS))
    federation.operator("job", "resume", "adaptive")
    federation.status(lambda jobs: jobs["adaptive"].version_number >= came + 2)
    federation.abort("adaptive")
    detail = federation.show("adaptive")
    assert detail.job.status == pb.JOB_STATUS_ABORTED

    published = [attempt for attempt in attempts(detail) if attempt.outcome == "published"]
    assert all(sorted(attempt.survivors) == sorted(MEMBERS) for attempt in published)
    assert sum(attempt.reason == Reason.REASON_COORDINATOR_RESTARTED for attempt in attempts(detail)) >= 2
    federation.coordinator.stop()
    job, versions, store = stored(federation)
    expected = list(by_hand(federation, job, versions[0][1], detail))
    assert len(expected) == len(published)
    assert [(each.digest, dict(each.server_state)) for each, _ in versions[1:]] == expected
    assert [each.digest for each, _ in versions] == [each.digest for each in detail.versions]
    assert all(store.get(vector) for each, _ in versions for vector in each.server_state.values())
    federation.serve()
    said = federation.operator("job", "show", "adaptive")
    line = "Server optimiser: fedadam, learning_rate 0.05, beta_1 0.8, tau 0.001, initial_accumulator 1e-06, beta_2 0.9"
    assert line in said
    shown = json.loads(federation.operator("job", "show", "adaptive", "--json"))
    assert shown["server"]["optimiser"] == "fedadam"
    entries = [
        json.loads(each)
        for each in federation.operator("audit", "show", "--json", "--subject", "adaptive").splitlines()
    ]
    said = [each["fields"] for each in entries if each["kind"] == "version_published"]
    assert {each["optimiser"] for each in said} == {"fedadam"}
    assert said[-1]["server_state"] == [f"{name} {vector.hex()}" for name, vector in sorted(expected[-1][1].items())]
