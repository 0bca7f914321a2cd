"""The agent's own plumbing: one fetch a blob, and no message that ends a session without a word."""

import asyncio
import hashlib
import sqlite3
import threading
from types import SimpleNamespace

import grpc.aio
import pytest
from structlog.testing import capture_logs

import secure_agg
from edge_client.cache import CertificateCache
from edge_client.journal import Memory
from edge_client.session import agent as agent_module
from edge_client.session import states
from edge_client.session.agent import Agent
from tacit.attempt import AttemptId
from tacit.limits import CERTIFICATES_AT_ONCE, MOST_CERTIFICATE_BYTES
from tacit.messages import AttemptMessage, Decline, LedgerCounter, Ready
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


# ---- certificates ---------------------------------------------------------------------------------------------------

CERTIFICATES = [f"the certificate of m{number}".encode() * 20 for number in range(CERTIFICATES_AT_ONCE + 40)]
BY_DIGEST = {hashlib.sha256(each).digest(): each for each in CERTIFICATES}


class Call:
    """An answer in parts, and whether the member let it go."""

    def __init__(self, parts):
        self.parts, self.cancelled = parts, False

    def cancel(self):
        self.cancelled = True

    async def __aiter__(self):
        for part in self.parts:
            await asyncio.sleep(0)
            if isinstance(part, Exception):
                raise part
            yield pb.CertificatesPart(certificates=part)


class Shelf:
    """A coordinator's FetchCertificates; `change` makes other parts of the honest ones."""

    def __init__(self, change=lambda parts: parts):
        self.asked, self.calls, self.change = [], [], change

    def __call__(self, request):
        digests = list(request.digests)
        self.asked.append(digests)
        honest = [BY_DIGEST.get(digest, b"") for digest in digests]
        self.calls.append(Call(self.change([honest[at : at + 64] for at in range(0, len(honest), 64)])))
        return self.calls[-1]


def fetched(shelf, tmp_path, digests=tuple(BY_DIGEST)):
    """What the machine is told after asking for these."""

    async def run():
        made = agent(SimpleNamespace(FetchCertificates=shelf))
        made._certificates = CertificateCache(tmp_path / "certificates")
        made._carry_out(states.FetchCertificates(ATTEMPT, digests))
        async with asyncio.timeout(20):
            event = await made._events.get()
        assert not made._rosters
        return event

    with capture_logs() as logs:
        event = asyncio.run(run())
    assert isinstance(event, states.CertificatesFetched)
    assert event.attempt == ATTEMPT
    return event.certificates, logs


def test_certificates_are_fetched_in_requests_of_a_size_and_kept_once_they_were_found_good(tmp_path):
    shelf = Shelf()
    certificates, logs = fetched(shelf, tmp_path)
    assert certificates == tuple(CERTIFICATES)
    assert [len(each) for each in shelf.asked] == [CERTIFICATES_AT_ONCE, 40]
    assert [(line["event"], line["cached"], line["fetched"], line["missing"]) for line in logs] == [
        ("certificates_fetched", 0, len(CERTIFICATES), 0)
    ]
    # Fetched is not found good: nothing lies on the disk before the machine says so.
    again = Shelf()
    fetched(again, tmp_path)
    assert sum(map(len, again.asked)) == len(CERTIFICATES)

    async def keep():
        made = agent()
        made._certificates = CertificateCache(tmp_path / "certificates")
        made._carry_out(states.KeepCertificates(tuple(CERTIFICATES[:-1])))
        await asyncio.gather(*made._keeping)

    asyncio.run(keep())
    cached = Shelf()
    certificates, _ = fetched(cached, tmp_path)
    assert sorted(certificates) == sorted(CERTIFICATES)
    assert cached.asked == [[hashlib.sha256(CERTIFICATES[-1]).digest()]]


def test_a_certificate_that_is_damaged_on_the_disk_is_fetched_again(tmp_path):
    cache = CertificateCache(tmp_path / "certificates")
    cache.keep(CERTIFICATES[:3])
    digests = tuple(BY_DIGEST)[:3]
    assert set(cache.read(digests)) == set(digests)
    (tmp_path / "certificates" / digests[0].hex()).write_bytes(b"damaged")
    (tmp_path / "certificates" / digests[1].hex()).write_bytes(bytes(10**6))
    shelf = Shelf()
    certificates, _ = fetched(shelf, tmp_path, digests)
    assert sorted(certificates) == sorted(CERTIFICATES[:3])
    assert shelf.asked == [list(digests[:2])]


def another_for(which, certificate):
    def change(parts):
        parts[0][which] = certificate
        return parts

    return change


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (another_for(5, b"of another digest"), 5),
        (another_for(5, bytes(MOST_CERTIFICATE_BYTES + 1)), 5),
        # One that is not there is left out; the rest of the request still comes, and no other request follows.
        (another_for(5, b""), CERTIFICATES_AT_ONCE - 1),
        (lambda parts: [*parts, [CERTIFICATES[0]] * 64], CERTIFICATES_AT_ONCE + 40),
        (lambda parts: [parts[0], [], *parts[1:]], 64),
        (lambda parts: parts[:1], 64),
        (lambda parts: [], 0),
    ],
    ids=["another", "too-large", "missing", "more-than-asked", "an-empty-part", "fewer", "none"],
)
def test_a_coordinator_cannot_make_a_member_take_more_than_it_asked_for(tmp_path, change, taken):
    shelf = Shelf(change)
    certificates, logs = fetched(shelf, tmp_path)
    assert len(certificates) == len(set(certificates)) == taken
    assert set(certificates) <= set(CERTIFICATES)
    # Where one is missing the attempt cannot be joined, and nothing more is asked for.
    assert len(shelf.asked) == (2 if taken == len(CERTIFICATES) else 1)
    assert logs[-1]["missing"] == len(CERTIFICATES) - taken


def test_an_endless_answer_is_let_go():
    def endless():
        while True:
            yield [b""] * 64

    shelf = Shelf(lambda parts: endless())

    async def run():
        made = agent(SimpleNamespace(FetchCertificates=shelf))
        async with asyncio.timeout(20):
            return await made._ask_for_certificates(tuple(BY_DIGEST)[:100])

    assert asyncio.run(run()) == {}
    assert shelf.calls[0].cancelled


def broken(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="so it is")


def test_what_came_before_a_connection_broke_is_not_asked_for_again(tmp_path, monkeypatch):
    async def at_once(self, stub):
        pass

    monkeypatch.setattr(Agent, "_unlinked", at_once)
    shelf = Shelf()
    shelf.change = lambda parts: [*parts[:2], broken(grpc.StatusCode.UNAVAILABLE)] if len(shelf.asked) == 1 else parts
    certificates, _ = fetched(shelf, tmp_path)
    assert certificates == tuple(CERTIFICATES)
    assert [len(each) for each in shelf.asked] == [CERTIFICATES_AT_ONCE, CERTIFICATES_AT_ONCE - 128, 40]


def test_a_coordinator_that_serves_none_is_not_asked_for_ever(tmp_path):
    shelf = Shelf(lambda parts: [broken(grpc.StatusCode.UNIMPLEMENTED)])
    certificates, logs = fetched(shelf, tmp_path)
    assert certificates == ()
    assert [line["event"] for line in logs] == ["certificates_not_served", "certificates_fetched"]


def test_the_end_of_an_attempt_ends_its_fetching(tmp_path):
    async def run():
        made = agent()
        made._certificates = CertificateCache(tmp_path / "certificates")
        made._carry_out(states.FetchCertificates(ATTEMPT, tuple(BY_DIGEST)[:2]))
        fetching = made._rosters[ATTEMPT]
        made._carry_out(states.StopUpload(ATTEMPT))
        await asyncio.gather(fetching, return_exceptions=True)
        assert fetching.cancelled()
        assert not made._rosters
        assert made._events.empty()

    asyncio.run(run())


def test_while_a_roster_is_checked_the_session_lives(monkeypatch):
    """The machine stands still in a thread; the loop does not, and no other event overtakes the roster."""
    asked, go, order = threading.Event(), threading.Event(), []

    def slow(environment, state, event):
        order.append(type(getattr(getattr(event, "message", None), "payload", event)).__name__)
        if len(order) == 1:
            asked.set()
            assert go.wait(20)
        return state, (states.Say(Decline("a", len(order), Reason.REASON_INTERNAL, "")),)

    monkeypatch.setattr(agent_module, "transition", slow)

    async def run():
        made = agent()
        made._outgoing = asyncio.Queue()
        made._events.put_nowait(states.Received(AttemptMessage(ATTEMPT, secure_agg.DigestRoster(()))))
        made._events.put_nowait(states.Masked(ATTEMPT, None))
        working = asyncio.create_task(made._work_events())
        assert await asyncio.to_thread(asked.wait, 20)
        # This line is reached on the loop while the machine stands still.
        assert order == ["DigestRoster"]
        assert made._outgoing.empty()
        go.set()
        said = [await made._outgoing.get() for _ in range(2)]
        working.cancel()
        return said

    assert [each.round for each in asyncio.run(run())] == [1, 2]
    assert order == ["DigestRoster", "Masked"]
