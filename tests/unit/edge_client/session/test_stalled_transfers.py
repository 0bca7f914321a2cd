"""A coordinator that answers pings and moves nothing does not hold a member: it goes on to its next address."""

import asyncio
import contextlib
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
from structlog.testing import capture_logs

import secure_agg
from coordinator.services.credentials import load_root
from edge_client.identity.pace import MOST_UP, Pace
from edge_client.session import agent as agent_module
from edge_client.session.agent import Agent
from edge_client.session.fetching import Fetcher
from edge_client.session.journal import Memory
from edge_client.session.link import Link
from tacit import blobs, wire
from tacit.attempt import AttemptId
from tacit.messages import Hello, Welcome
from tacit.protocol import PROTOCOL_VERSION
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.federation_port import FederationPort, serving

DATA = bytes(range(256)) * 2000
DIGEST = hashlib.sha256(DATA).digest()
ATTEMPT = AttemptId("questions", 1, 1)
SECONDS = 60.0


class Coordinator(FederationPort):
    """Keeps sessions open. Moves bytes until it has moved `most`, and then nothing."""

    def __init__(self, folder, most: int) -> None:
        super().__init__(load_root(folder))
        self.most, self.sessions, self.asked, self.taken = most, 0, 0, bytearray()

    async def Session(self, requests, context):  # noqa: N802
        await anext(aiter(requests))
        self.sessions += 1
        await context.write(wire.to_member(Welcome(PROTOCOL_VERSION, "0.1.0", "f" * 64, 0, 0)))
        await asyncio.Event().wait()

    async def FetchBlob(self, request, context):  # noqa: N802
        self.asked += 1
        end = min(len(DATA), request.offset + (request.length or len(DATA)))
        for at in range(request.offset, end, 50_000):
            if at >= self.most:
                await asyncio.Event().wait()
            await context.write(pb.BlobChunk(offset=at, total=len(DATA), data=DATA[at : min(at + 50_000, end)]))

    async def UploadMasked(self, requests, context):  # noqa: N802
        async for part in requests:
            if len(self.taken) >= self.most:
                await asyncio.Event().wait()
            self.taken += part.data
        return pb.MaskedUploadReceipt(received=len(self.taken), complete=len(self.taken) >= len(DATA))

    async def MaskedUploadStatus(self, request, context):  # noqa: N802
        if self.most < len(DATA):
            await asyncio.Event().wait()
        return pb.MaskedUploadReceipt(received=len(self.taken))


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Two minutes are too long for a test."""
    monkeypatch.setattr(blobs, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(agent_module, "STALL_SECONDS", 0.5)


def moved(tmp_path, folder, move):
    """Runs `move(link)` for a member whose first coordinator moves 100,000 bytes and no more. Returns both."""

    async def run():
        first, second = Coordinator(folder, 100_000), Coordinator(folder, 1 << 40)
        async with serving(folder, first), serving(folder, second):
            identity = party.member(tmp_path / "home", f"localhost:{first.port}")
            link = Link(
                identity.at([f"localhost:{each.port}" for each in (first, second)]),
                None,
                hello=lambda: Hello(PROTOCOL_VERSION, "0.1.0", bytes(16), (), ledger=None),
                on_welcome=lambda welcome: None,
                on_message=None,
                on_break=lambda sentence, seconds: None,
            )
            running = asyncio.create_task(link.run())
            try:
                async with asyncio.timeout(SECONDS):
                    await move(link)
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
        return first, second

    with capture_logs() as logs:
        return *asyncio.run(run()), [line["event"] for line in logs]


def test_a_download_that_stalls_goes_on_at_the_next_address(tmp_path, folder):
    into = tmp_path / "blob"

    async def move(link):
        await Fetcher(link, None).blob(DIGEST, into, len(DATA))

    first, second, events = moved(tmp_path, folder, move)
    assert into.read_bytes() == DATA
    assert (first.sessions, second.sessions) == (1, 1)
    assert "download_stalled" in events
    assert second.asked >= 1


def test_an_upload_that_stalls_is_asked_about_and_goes_on_at_the_next_address(tmp_path, folder):
    async def move(link):
        agent = Agent(None, None, SimpleNamespace(memory=lambda: Memory({})), None, None, None, None)
        vars(agent).update(_link=link, _observer=SimpleNamespace(uploading=lambda *_: None))
        message = secure_agg.MaskedInput("north", DIGEST, len(DATA) // 4, bytes(384))
        vector = np.frombuffer(DATA, np.uint8).copy()
        await agent._upload(ATTEMPT, memoryview(vector), message)

    first, second, events = moved(tmp_path, folder, move)
    assert bytes(second.taken) == DATA
    assert (first.sessions, second.sessions) == (1, 1)
    assert "upload_stalled" in events


@pytest.mark.parametrize("received", [1000, 5000])
def test_a_coordinator_that_answers_at_once_and_takes_nothing_is_not_asked_without_end(received, monkeypatch):
    """It says that all arrived and does not say that it is complete; or that more arrived than there is."""
    calls, pauses = [], []
    monkeypatch.setattr(wire, "masked_input_to_pb", lambda message: pb.MaskedInput())

    class Stub:
        async def UploadMasked(self, parts):  # noqa: N802
            calls.append([part async for part in parts])
            assert len(calls) < 50
            return pb.MaskedUploadReceipt(received=received)

    async def stub():
        return Stub()

    async def pause(_):
        pauses.append(len(calls))
        if len(pauses) == 3:
            raise EOFError

    async def run():
        agent = Agent(None, None, SimpleNamespace(memory=lambda: Memory({})), None, None, None, None)
        link = SimpleNamespace(stub=stub, up=Pace(MOST_UP), pause_after_failure=pause)
        vars(agent).update(_link=link, _observer=SimpleNamespace(uploading=lambda *_: None))
        with contextlib.suppress(EOFError):
            await agent._upload(ATTEMPT, memoryview(bytes(1000)), None)
        return agent._events

    events = asyncio.run(run())
    if received > 1000:
        assert (len(calls), pauses, events.get_nowait().reason) == (1, [], Reason.REASON_MESSAGE_MALFORMED)
    else:
        assert (len(calls), pauses, events.empty()) == (4, [2, 3, 4], True)
