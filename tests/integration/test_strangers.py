"""Strangers on the enrolment port, with real processes: what they use up, and that members on the other port continue.

The coordinator may open only 256 files here, so a flood of a few hundred connections exceeds its limit.
"""

import asyncio
import os
import signal
import socket
from datetime import UTC, datetime

import pytest

from edge_client.identity.connection import open_channel
from edge_client.identity.home import MemberIdentity
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tests.support.processes import BIN, Federation, Process, command, within_patience
from tests.support.strangers import Strangers

FILES = 256


class Narrow(Federation):
    """A federation whose coordinator may open few files."""

    def serve(self) -> Process:
        words = ["/bin/sh", "-c", f'ulimit -n {FILES} && exec "$0" "$@"', str(BIN / "coordinator"), "serve"]
        words += ["--dir", str(self.dir), "--log-format", "json"]
        self.coordinator = Process("coordinator", words, self.folder / "coordinator.log")
        self.processes.append(self.coordinator)
        self.coordinator.wait_for("serving")
        return self.coordinator

    @property
    def enrolment_port(self) -> int:
        config = (self.dir / "coordinator.toml").read_text()
        return int(config.split("enrolment_port = ")[1].split()[0])

    def seen(self, event: str) -> dict:
        return next(line for line in self.coordinator.lines if line.get("event") == event)

    def call(self, name: str) -> list:
        """An honest member's call on the federation port."""

        async def ask() -> list:
            identity = MemberIdentity.load(self.home(name), now=datetime.now(UTC))
            async with open_channel(identity) as channel:
                stub = federation_pb2_grpc.FederationServiceStub(channel)
                return list((await stub.OpenJobs(pb.OpenJobsRequest(all=True), timeout=20)).jobs)

        return asyncio.run(ask())


@pytest.fixture
def federation(tmp_path):
    made = Narrow(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_strangers_flooding_the_enrolment_port_lock_nobody_out(federation):
    federation.enrol("aster")
    with Strangers(federation.enrolment_port).staying() as strangers:
        strangers.shaking_hands(FILES + 50)
        with strangers.pressing():
            # A member still calls the other port, and a newcomer still enrols on this one.
            assert federation.call("aster") == []
            assert command("coordinator", "health", "--dir", federation.dir).returncode == 0
            federation.enrol("birch")
            assert federation.call("birch") == []
        within_patience(lambda: strangers.standing() <= FILES // 4)
        within_patience(lambda: federation.metric("tacit_coordinator_enrolment_connections_open") > 1)
        federation.coordinator.wait_for("enrolment_flooded")
    within_patience(lambda: federation.metric("tacit_coordinator_enrolment_connections_open") == 0)
    assert federation.metric("tacit_coordinator_enrolment_connections_total", outcome="network_full") > FILES // 2
    files = federation.seen("open_files")
    assert (files["limit"], files["enrolment_connections"]) == (FILES, FILES // 4)
    low = federation.seen("open_files_low")
    assert low["needed"] > FILES
    assert f"LimitNOFILE={low['needed']}" in low["advice"]


def test_a_flooded_federation_port_leaves_files_for_connected_members(federation):
    """Strangers can keep new connections out, which a firewall must limit. They cannot take the last file."""
    federation.enrol("aster")

    async def connected() -> None:
        identity = MemberIdentity.load(federation.home("aster"), now=datetime.now(UTC))
        async with open_channel(identity) as channel:
            stub = federation_pb2_grpc.FederationServiceStub(channel)
            await stub.OpenJobs(pb.OpenJobsRequest(), timeout=20)
            with Strangers(federation.port).staying() as strangers:
                await asyncio.to_thread(strangers.silent, FILES + 100)
                # The coordinator still has files to open and write its database and log.
                assert federation.metric("process_open_fds") < FILES - 40
                for _ in range(3):
                    await stub.OpenJobs(pb.OpenJobsRequest(), timeout=20)
            await stub.OpenJobs(pb.OpenJobsRequest(), timeout=20)

    asyncio.run(connected())


def test_the_log_names_the_strangers_address_not_the_relays(federation):
    replaced, _ = federation.token("aster"), federation.token("aster")
    assert command("edge_client", "enrol", replaced, "--home", federation.home("aster")).returncode == 4
    assert federation.coordinator.wait_for("enrolment_refused")["peer"].startswith("ipv4:127.0.0.1:")


def test_the_relay_restarts_and_ends_with_its_coordinator(federation):
    first = federation.seen("relay_started")["process"]
    os.kill(first, signal.SIGKILL)
    federation.coordinator.wait_for("relay_ended")
    second = federation.coordinator.wait_for("relay_started")["process"]
    assert second != first
    assert command("coordinator", "health", "--dir", federation.dir).returncode == 0
    federation.coordinator.kill()

    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", federation.enrolment_port)) != 0

    within_patience(refused)
    # A coordinator that is started at once finds its port free.
    federation.serve()
    third = federation.seen("relay_started")["process"]
    assert federation.coordinator.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(third, 0)
