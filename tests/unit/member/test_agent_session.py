"""The agent's own plumbing: one fetch a blob, and no message that ends a session without a word."""

import asyncio
import hashlib
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from edge_client.journal import Memory
from edge_client.session.agent import Agent
from tacit.messages import Decline, LedgerCounter, Ready
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb

DATA = bytes(range(256)) * 40


class Serving:
    """A coordinator's FetchBlob that gives way to others between any two chunks."""

    def __init__(self):
        self.calls = 0

    async def __call__(self, request):
        self.calls += 1
        for at in range(request.offset, len(DATA), 1000):
            await asyncio.sleep(0)
            yield pb.BlobChunk(offset=at, total=len(DATA), data=DATA[at : at + 1000])


def agent(stub=None):
    journal = SimpleNamespace(memory=lambda: Memory({}))
    budget = SimpleNamespace(counter=LedgerCounter(bytes(16), 1))
    made = Agent(None, None, journal, None, budget, None)
    made._stub = stub
    return made


@pytest.mark.parametrize("jobs", [2, 5])
def test_jobs_that_share_a_blob_fetch_it_once(tmp_path, jobs):
    serving, digest = Serving(), hashlib.sha256(DATA).digest()

    async def run():
        fetching = agent(SimpleNamespace(FetchBlob=serving))
        await asyncio.gather(*(fetching._fetch(digest, tmp_path / "blob", len(DATA)) for _ in range(jobs)))
        return len(fetching._fetching)

    assert asyncio.run(run()) == 0
    assert (tmp_path / "blob").read_bytes() == DATA
    assert serving.calls == 1


def test_a_message_that_cannot_be_written_is_logged_and_the_next_one_is_sent():
    async def run():
        outgoing = asyncio.Queue()
        for message in (Ready("a", -1, bytes(32)), Decline("a", 1, Reason.REASON_INTERNAL, "why")):
            outgoing.put_nowait(message)
        messages = agent()._messages(outgoing)
        assert (await anext(messages)).WhichOneof("message") == "hello"
        return await anext(messages)

    with capture_logs() as logs:
        following = asyncio.run(run())
    assert following.decline.detail == "why"
    assert [(line["event"], line["kind"]) for line in logs] == [("message_failed", "Ready")]
