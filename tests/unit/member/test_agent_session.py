"""The agent's own plumbing: one fetch a blob, and no message that ends a session without a word."""

import asyncio
import hashlib
import sqlite3
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from edge_client.journal import Memory
from edge_client.session import agent as agent_module
from edge_client.session import states
from edge_client.session.agent import Agent
from tacit.attempt import AttemptId
from tacit.messages import Decline, LedgerCounter, Ready
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb

ATTEMPT = AttemptId("a", 1, 1)
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


@pytest.mark.parametrize(
    "effect", [states.Joined(ATTEMPT, bytes(32), bytes(32)), states.Opened(ATTEMPT), states.Signed(ATTEMPT, ("a",))]
)
def test_nothing_follows_what_the_journal_could_not_write(monkeypatch, effect):
    """The disk is full: the attempt is refused, the member lives on, and the next step is carried out."""

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    journal = SimpleNamespace(memory=lambda: Memory({}), joined=full, opened=full, signed=full)
    carried, following = [], states.Say(Ready("a", 1, bytes(32)))
    steps = iter([(effect, following), (following,)])
    monkeypatch.setattr(agent_module, "transition", lambda environment, state, event: (state, next(steps)))

    async def run():
        made = Agent(None, None, journal, None, SimpleNamespace(counter=None), None)
        made._outgoing = asyncio.Queue()
        made._events.put_nowait(states.Masked(ATTEMPT, None))
        working = asyncio.create_task(made._work_events())
        # What the failure left is the next event, and its one effect is carried out.
        carried.append(await made._outgoing.get())
        working.cancel()
        return made

    with capture_logs() as logs:
        asyncio.run(run())
    assert carried == [following.message]
    assert [line["event"] for line in logs] == ["journal_failing"]
