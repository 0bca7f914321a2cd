"""Uploads and downloads over a long line, with the coordinator's and the member's own code and mutual TLS.

Nothing here measures seconds. A sender that waits for an answer before it sends on leaves the line empty, and the line
notes how many bytes had entered it then (`tests.support.line`).
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from types import SimpleNamespace

import grpc.aio
import numpy as np
import pytest

import secure_agg
from coordinator.config import CoordinatorConfig
from coordinator.rounds.uploads import UploadDesk
from coordinator.services.credentials import load_root
from coordinator.services.transfers import Transfers
from coordinator.services.turns import Turns
from coordinator.storage import open_blobs
from edge_client.identity.connection import open_channel
from edge_client.identity.pace import MOST_UP, Pace
from edge_client.session.agent import CHUNK, Agent
from edge_client.session.journal import Memory
from tacit import wire
from tacit.attempt import AttemptId
from tacit.pieces import PIECE, fetch_pieces, list_of
from tacit.v1 import federation_pb2_grpc
from tests.support import party
from tests.support.bad_network import BadNetwork, Fault, Way
from tests.support.federation_port import FederationPort, serving

ATTEMPT = AttemptId("questions", 1, 1)
VALUES = 5 * CHUNK // 4
VECTOR = np.random.default_rng(5).integers(0, 2**32, VALUES, dtype=np.uint32).astype("<u4")
# A stop of all processes is noticed on the line after its delay, so this is how long a crowded machine may stop.
RATE, DELAY = 400_000.0, 0.75


class Port(FederationPort):
    """Takes one member's vector, and sends blobs."""

    def __init__(self, root, folder) -> None:
        super().__init__(root)
        self.desk, self.added, self.statuses = UploadDesk(), [], 0
        self.desk.open(ATTEMPT, frozenset({"north"}), VALUES, 32)
        self.store = open_blobs(f"file://{folder}")
        self.fetchable: set[bytes] = set()
        running = SimpleNamespace(
            uploads=self.desk, drivers={ATTEMPT.job: self}, store=self.store, fetchable=self.fetchable
        )
        nothing = SimpleNamespace(carried=lambda *_: None)
        turns = Turns(4, 0.05), Turns(8, 0.02)
        self.transfers = Transfers(running, nothing, *turns, first_seconds=30, chunk_seconds=120)

    def uploaded(self, member, attempt, message, digest):
        self.added.append((member, digest))
        self.task = asyncio.ensure_future(self.desk.accept(attempt, member))

    async def UploadMasked(self, requests, context):  # noqa: N802
        return await self.transfers.vector("north", context)

    async def MaskedUploadStatus(self, request, context):  # noqa: N802
        self.statuses += 1
        return await self.transfers.vector_status("north", request, context)

    async def FetchBlob(self, request, context):  # noqa: N802
        await self.transfers.blob("north", request, context)


class Far:
    """A member's stub through a bad network, and a new one once its connection broke."""

    def __init__(self, port: Port, network: BadNetwork, identity) -> None:
        self.port, self.network, self._identity = port, network, identity
        self._channel: grpc.aio.Channel | None = None
        self.up = Pace(MOST_UP, divided=False)

    async def stub(self):
        if self._channel is None:
            self._channel = open_channel(self._identity)
        return federation_pb2_grpc.FederationServiceStub(self._channel)

    async def pause_after_failure(self, stub):
        await self.close()

    async def close(self):
        if self._channel is not None:
            await self._channel.close(None)
        self._channel = None


def far(tmp_path, scenario: Callable, *, window_kib: int | None = None) -> None:
    async def work():
        folder = party.coordinator_folder(tmp_path / "coordinator")
        port = Port(load_root(folder), tmp_path / "store")
        async with serving(folder, port, window_kib=window_kib):
            network = BadNetwork(port.port)
            link = Far(port, network, party.member(tmp_path / "member", f"localhost:{network.port}"))
            try:
                await scenario(link)
            finally:
                await link.close()
                await asyncio.to_thread(network.close)

    asyncio.run(asyncio.wait_for(work(), 120))


async def upload(link: Far) -> None:
    """Sends the vector as a member's agent does."""
    agent = Agent(None, None, SimpleNamespace(memory=lambda: Memory({})), None, None, None, None)
    vars(agent).update(_link=link, _observer=SimpleNamespace(uploading=lambda *_: None))
    digest = hashlib.sha256(VECTOR).digest()
    message = secure_agg.MaskedInput("north", digest, VALUES, bytes(384))
    await agent._upload(ATTEMPT, memoryview(VECTOR).cast("B"), message)
    # It is in the sum, once.
    await link.port.task
    assert link.port.added == [("north", digest)]
    assert (link.port.desk.total(ATTEMPT) == VECTOR).all()


def emptied(link: Far) -> list[int]:
    """Where in the vector the line was found empty, but for its beginning and end."""
    return [at for at in link.network.lines[Way.UP].empty_at if 64 * 1024 < at < VECTOR.nbytes - 64 * 1024]


async def connected(link: Far) -> None:
    """Lays the line, and connects over it."""
    link.network.line(RATE, DELAY)
    await (await link.stub()).MaskedUploadStatus(wire.attempt_to_pb(ATTEMPT))
    link.port.statuses = 0
    link.network.measure_anew()


def test_an_upload_with_a_window_of_the_lines_own_never_leaves_it_empty(tmp_path):
    async def scenario(link):
        await connected(link)
        await upload(link)
        assert emptied(link) == []
        # It asks nothing before its first byte.
        assert link.port.statuses == 0

    # What the line carries in a round trip.
    far(tmp_path, scenario, window_kib=int(2 * DELAY * RATE) // 1024 + 64)


def test_with_a_small_window_a_long_line_is_empty_after_each_message(tmp_path):
    """The baseline: one message in a round trip."""

    async def scenario(link):
        await connected(link)
        await upload(link)
        assert 3 <= len(emptied(link)) <= 5

    far(tmp_path, scenario, window_kib=64)


def test_the_default_window_holds_what_two_megabits_carry_in_three_hundred_milliseconds():
    assert CoordinatorConfig(advertise=("localhost",)).upload_window_kib * 1024 >= 2_000_000 / 8 * 0.3


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_an_upload_that_is_cut_sends_only_the_rest(tmp_path, share):
    async def scenario(link):
        await link.stub()
        link.network.plan(Fault.CUT, Way.UP, int(share * VECTOR.nbytes))
        await upload(link)
        assert link.network.struck.is_set()
        assert link.port.statuses == 1
        # The message that the cut interrupted is sent again, and two handshakes.
        assert link.network.carried[Way.UP] < VECTOR.nbytes + CHUNK + 64 * 1024

    far(tmp_path, scenario)


def test_a_download_with_many_cuts_brings_little_twice(tmp_path):
    """A cut costs what was in flight. It also cost what had arrived of the piece that it interrupted."""
    size = 4 * PIECE + 12_345
    source = tmp_path / "source"
    source.write_bytes(np.random.default_rng(7).bytes(size))

    async def scenario(link):
        digest = link.port.store.put(source.read_bytes())
        link.port.fetchable.add(digest)

        async def cuts():
            while True:
                link.network.plan(Fault.CUT, Way.DOWN, 3 * PIECE // 2)
                await asyncio.to_thread(link.network.struck.wait)

        def method(request):
            return federation_pb2_grpc.FederationServiceStub(link._channel).FetchBlob(request)

        # A reset also costs what the member's system has received and not handed over, so not too fast for that.
        link.network.line(2e6, 0.05)
        await link.stub()
        cutting = asyncio.create_task(cuts())
        try:
            await fetch_pieces(method, digest, list_of(source), size, tmp_path / "into")
        finally:
            cutting.cancel()
            link.network.struck.set()
            with contextlib.suppress(asyncio.CancelledError):
                await cutting
        assert (tmp_path / "into").read_bytes() == source.read_bytes()
        assert link.network.connections >= 3
        assert link.network.carried[Way.DOWN] <= 1.1 * size

    far(tmp_path, scenario)
