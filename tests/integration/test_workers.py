"""A federation whose coordinator has two workers: the same results, and what the death of a process costs."""

import asyncio
import os
import signal
import sqlite3
from contextlib import closing

import grpc
import psutil
import pytest

from coordinator.config import load_config
from edge_client.identity.connection import open_channel
from edge_client.identity.home import MemberIdentity
from learning.accounting.calibration import repeated
from learning.accounting.events import SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from tacit.reason import Reason, sentence
from tacit.status import reason_of
from tacit.v1 import federation_pb2, federation_pb2_grpc
from tests.support.places import ROOT
from tests.support.processes import PATIENCE, command, running_federation, succeed, within_patience

MEMBERS = ("north", "east", "south")
WORKERS = 2


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TACIT_WORKERS", str(WORKERS))
        with running_federation(tmp_path_factory.mktemp("workers"), *MEMBERS, "gone") as running:
            yield running


@pytest.fixture(autouse=True)
def _members_end(federation):
    yield
    for process in federation.processes[:]:
        if process is not federation.coordinator:
            process.end()
            federation.processes.remove(process)


def workers(federation):
    """By number: the process ids of the workers that last said that they accept connections."""
    # The log, because what the metrics know is a second old.
    return {
        line["worker"]: line["process"] for line in federation.coordinator.lines if line["event"] == "worker_started"
    }


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def calls(federation):
    return [federation.metric("tacit_coordinator_worker_calls", worker=str(number + 1)) for number in range(WORKERS)]


def versions(federation, job):
    """The digests of a job's versions."""
    url = load_config(federation.dir).database_url
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        rows = database.execute("SELECT number, digest FROM versions WHERE job = ? ORDER BY number", (job,))
        return dict(rows)


def test_one_and_two_workers_publish_the_same_versions(federation, tmp_path):
    """Training without noise follows from the job and the data, and the sum from the updates, to the bit."""
    federation.job("same", target_members=3)
    bundle = federation.folder / "bundle-same"
    members = [federation.start(name, "--until-finished") for name in MEMBERS]
    detail = federation.finished("same")
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0]
    assert [sorted(each.survivors) for one in detail.rounds for each in one.attempts] == [sorted(MEMBERS)] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TACIT_WORKERS")
        with running_federation(tmp_path, *MEMBERS) as alone:
            assert alone.metric("tacit_coordinator_workers") == 0
            alone.operator("job", "create", "--bundle", bundle)
            for name in MEMBERS:
                alone.start(name, "--until-finished")
            alone.finished("same")
            expected = versions(alone, "same")
    assert len(expected) == 4
    assert versions(federation, "same") == expected


def test_a_job_with_noise_is_trained_and_charged(federation):
    """Secure sum, policy and ledger through two workers."""
    for name in MEMBERS:
        federation.home(name).joinpath("policy.toml").write_text("schema = 1\n")
    federation.create(ROOT / "examples" / "mechanisms" / "dp-sgd.toml")
    for name in MEMBERS:
        # The other tests' data has fewer rows, which would cost more.
        federation.data(name).unlink()
        federation.data(name, 360)
    members = [
        federation.start(name, "--job", "dp-sgd", "--data-name", "dp-sgd", "--until-finished") for name in MEMBERS
    ]
    detail = federation.finished("dp-sgd")
    assert [member.process.wait(timeout=PATIENCE) for member in members] == [0, 0, 0]
    assert detail.job.version_number == 5
    epsilon = federation.metric("tacit_coordinator_privacy_epsilon_largest", job="dp-sgd")
    event = SampledGaussian(multiplier=2.0, rate=64 / 360, steps=8)
    assert epsilon == pytest.approx(epsilon_counted([repeated(event, 5)], Limit(8.0, 1e-6)), rel=1e-3)
    for name in MEMBERS:
        succeed("edge_client", "ledger", "verify", "--home", federation.home(name), "--data-name", "dp-sgd")
        federation.home(name).joinpath("policy.toml").write_text((ROOT / "examples/desk/policy.toml").read_text())


def test_killed_workers_cost_a_connection_and_no_job(federation):
    members = [federation.start(name) for name in MEMBERS]
    # The numbers of all workers add up: three sessions, and calls that come and go.
    within_patience(lambda: federation.metric("tacit_coordinator_members_connected") == 3)
    within_patience(lambda: sum(calls(federation)) == 3)
    assert federation.metric("tacit_coordinator_workers") == WORKERS
    federation.job("killed", count=6)
    federation.wait_for("killed", lambda detail: detail.job.version_number >= 2)
    before = workers(federation)
    for number, process in before.items():
        os.kill(process, signal.SIGKILL)
        federation.coordinator.wait_for("worker_ended", worker=number, status=-signal.SIGKILL)
        federation.coordinator.wait_for("worker_started", worker=number)
    # Every member was at one of the two.
    for member in members:
        member.wait_for("disconnected")
    detail = federation.finished("killed")
    assert detail.job.version_number == 6
    lost = {loss.reason for one in detail.rounds for each in one.attempts for loss in each.dropouts}
    assert lost <= {Reason.REASON_DISCONNECTED, Reason.REASON_PHASE_DEADLINE}
    assert set(workers(federation)) == set(before)
    assert not set(workers(federation).values()) & set(before.values())
    for number in before:
        assert federation.metric("tacit_coordinator_worker_starts_total", worker=str(number)) == 2


def test_a_revoked_member_is_refused_through_every_worker(federation):
    identity = MemberIdentity.load(federation.home("gone"))

    async def ask(count):
        said = []
        for _ in range(count):
            # Each channel has a connection of its own, which the kernel gives to either worker.
            async with open_channel(identity) as channel:
                stub = federation_pb2_grpc.FederationServiceStub(channel)
                try:
                    await stub.OpenJobs(federation_pb2.OpenJobsRequest(), timeout=PATIENCE)
                    said.append(None)
                except grpc.aio.AioRpcError as error:
                    said.append(reason_of(error)[0])
        return said

    assert asyncio.run(ask(12)) == [None] * 12
    federation.operator("member", "revoke", "gone", "--yes")
    # All twelve at one of the two has a chance of 1 in 2048.
    assert asyncio.run(ask(12)) == [Reason.REASON_CLIENT_CERTIFICATE_REVOKED] * 12


def test_no_worker_outlives_its_coordinator_and_a_stop_is_clean(federation):
    member = federation.start("north")
    within_patience(lambda: federation.metric("tacit_coordinator_members_connected") == 1)
    first = workers(federation)
    assert all(runs(process) for process in first.values())
    federation.coordinator.kill()
    within_patience(lambda: not any(runs(process) for process in first.values()))
    federation.serve()
    second = workers(federation)
    assert len(second) == WORKERS
    member.wait_for("disconnected")
    within_patience(lambda: federation.metric("tacit_coordinator_members_connected") == 1)
    assert federation.coordinator.stop() == 0
    assert not any(runs(process) for process in second.values())
    # The Goodbye reached it through a worker.
    while sentence(Reason.REASON_COORDINATOR_STOPPING) not in member.wait_for("disconnected")["why"]:
        # It tried while no coordinator ran.
        continue
    federation.serve()


@pytest.mark.parametrize("value", ["0", "65", "two", "1.5"])
def test_a_bad_number_of_workers_is_a_sentence(federation, value):
    done = command("coordinator", "serve", "--dir", federation.dir, variables={"TACIT_WORKERS": value})
    assert done.returncode == 2
    assert "workers" in done.stderr
    assert "TACIT_WORKERS" in done.stderr
    assert "Traceback" not in done.stderr
    assert command("coordinator", "serve", "--dir", federation.dir, "--workers", value).returncode == 2
