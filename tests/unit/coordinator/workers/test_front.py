"""The main process's side of a worker, against a worker that says anything: real sockets, no process."""

import asyncio
import contextlib
import functools
import socket

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import UInt64Value
from structlog.testing import capture_logs

from coordinator.services.streams import EOF
from coordinator.workers.channel import connect
from coordinator.workers.frames import FROM_MAIN, FROM_WORKER, Frame, Kind, decoded, encoded
from coordinator.workers.front import Desk, Methods
from tacit.limits import MAX_FROM_COORDINATOR
from toolkit.text import MAX_STATUS

CALLER = {"peer": "ipv4:192.0.2.1:5", "peer_uri": ["tacit://f/member/north"], "x509_pem_cert": ["PEM"]}
CONNECTIONS = 1
# The calls that one connection carries, and those that may be about to end.
MOST = 64 + 4096


def on_a_loop(test):
    """Runs a test on a loop of its own."""

    @functools.wraps(test)
    def run(*args, **named):
        asyncio.run(test(*args, **named))

    return run


def opening(name):
    return encoded({"method": f"/x/{name}", **CALLER})


class Services:
    """What the tests call, on bytes."""

    def __init__(self):
        self.ended = []
        self.read = []

    async def echo(self, request, context):
        assert context.peer() == CALLER["peer"]
        context.set_trailing_metadata((("tacit-time-ms", "5"),))
        return request + b"!" + context.auth_context()["peer_uri"][0]

    async def refuse(self, request, context):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no", (("tacit-reason", "R"),))

    async def fail(self, request, context):
        raise RuntimeError("a bug")

    async def undecodable(self, request, context):
        raise DecodeError("of something else")

    async def long_winded(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "x" * 100_000)

    async def huge(self, request, context):
        return bytes(MAX_FROM_COORDINATOR + request[0])

    async def huge_stream(self, request, context):
        yield bytes(MAX_FROM_COORDINATOR + request[0])

    async def twice(self, _, context):
        """Writes one message for each that it reads, until the member has said all."""
        try:
            while (message := await context.read()) is not EOF:
                self.read.append(message)
                await context.write(message)
        finally:
            self.ended.append("twice")

    async def patient(self, _, context):
        """Gives a read up, and gets its message with the next one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await context.read()
        await context.write(b"gave up")
        self.read.append(await context.read())

    async def count(self, request, context):
        for number in range(request[0]):
            yield bytes([number])

    def methods(self):
        made = Methods()
        made.add(
            "x",
            {
                "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
                "Refuse": grpc.unary_unary_rpc_method_handler(self.refuse),
                "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
                "Undecodable": grpc.unary_unary_rpc_method_handler(self.undecodable),
                "Number": grpc.unary_unary_rpc_method_handler(self.echo, UInt64Value.FromString),
                "LongWinded": grpc.unary_unary_rpc_method_handler(self.long_winded),
                "Huge": grpc.unary_unary_rpc_method_handler(self.huge),
                "HugeStream": grpc.unary_stream_rpc_method_handler(self.huge_stream),
                "Count": grpc.unary_stream_rpc_method_handler(self.count),
                "Twice": grpc.stream_stream_rpc_method_handler(self.twice),
                "Patient": grpc.stream_stream_rpc_method_handler(self.patient),
            },
        )
        return made


class Wire:
    """The worker's end, in the test's hands."""

    def __init__(self):
        self.services = Services()
        self.frames = asyncio.Queue()
        self.broken = asyncio.get_running_loop().create_future()

    async def __aenter__(self):
        ours, theirs = socket.socketpair()
        self.main = await connect(ours, FROM_WORKER, self._heard, self._lost)
        self.desk = Desk(self.services.methods(), self.main, 1, CONNECTIONS)
        self.worker = await connect(theirs, FROM_MAIN, self.frames.put_nowait, lambda _: None)
        return self

    def _heard(self, frame):
        self.desk.heard(frame)

    def _lost(self, why):
        self.tasks = self.desk.end_calls()
        if not self.broken.done():
            self.broken.set_result(why)

    async def __aexit__(self, *_):
        self.worker.close()
        await self.broken
        async with asyncio.timeout(30):
            await asyncio.gather(*self.tasks, return_exceptions=True)

    def send(self, kind, call=0, payload=b""):
        self.worker.send(kind, call, payload)

    async def next(self):
        async with asyncio.timeout(30):
            return await self.frames.get()

    async def end_of(self, call):
        """The frames up to the call's end, and its status."""
        found = []
        while (frame := await self.next()).kind is not Kind.END:
            assert frame.call == call
            found.append(frame)
        return found, decoded(frame.payload)


@on_a_loop
async def test_a_call_with_one_answer_gets_it_with_status_and_metadata():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Echo"))
        wire.send(Kind.SAID, 1, b"hello")
        answers, status = await wire.end_of(1)
        assert answers == [Frame(Kind.LAST, 1, b"hello!tacit://f/member/north")]
        assert status == {"code": 0, "details": "", "metadata": [["tacit-time-ms", "5"]]}


@on_a_loop
async def test_a_refusal_travels_with_its_reason_and_a_bug_as_grpc_answers_one():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Refuse"))
        wire.send(Kind.SAID, 1, b"")
        assert (await wire.end_of(1))[1] == {"code": 7, "details": "no", "metadata": [["tacit-reason", "R"]]}
        wire.send(Kind.OPEN, 2, opening("Fail"))
        wire.send(Kind.SAID, 2, b"")
        assert (await wire.end_of(2))[1]["code"] == grpc.StatusCode.UNKNOWN.value[0]


@on_a_loop
async def test_only_a_members_own_message_is_blamed_for_not_being_protobuf():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Number"))
        wire.send(Kind.SAID, 1, b"\xff")
        status = (await wire.end_of(1))[1]
        assert (status["code"], status["details"]) == (3, "the message is not protobuf")
        wire.send(Kind.OPEN, 2, opening("Undecodable"))
        wire.send(Kind.SAID, 2, b"")
        assert (await wire.end_of(2))[1]["code"] == grpc.StatusCode.UNKNOWN.value[0]


@pytest.mark.parametrize("name", ["Huge", "HugeStream"])
@on_a_loop
async def test_an_answer_above_the_limit_ends_its_call_alone(name):
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening(name))
        wire.send(Kind.SAID, 1, bytes([0]))
        answer = await wire.next()
        assert len(answer.payload) == MAX_FROM_COORDINATOR
        wire.send(Kind.OPEN, 2, opening(name))
        with capture_logs() as lines:
            wire.send(Kind.SAID, 2, bytes([1]))
            if answer.kind is Kind.LAST:
                assert (await wire.next()).kind is Kind.END
            answers, status = await wire.end_of(2)
        assert answers == []
        assert status["code"] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert str(MAX_FROM_COORDINATOR + 1) in status["details"]
        assert [(line["event"], line["method"]) for line in lines] == [("call_failed", f"/x/{name}")]


@on_a_loop
async def test_a_long_status_is_cut():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("LongWinded"))
        wire.send(Kind.SAID, 1, b"")
        status = (await wire.end_of(1))[1]
        assert (status["code"], status["details"]) == (grpc.StatusCode.NOT_FOUND.value[0], "x" * MAX_STATUS)


@on_a_loop
async def test_answers_are_sent_one_at_a_time():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Count"))
        wire.send(Kind.SAID, 1, bytes([3]))
        for number in range(3):
            assert await wire.next() == Frame(Kind.TELL, 1, bytes([number]))
            # Another call is served meanwhile, and this one sends nothing more.
            wire.send(Kind.OPEN, 10 + number, opening("Echo"))
            wire.send(Kind.SAID, 10 + number, b"")
            await wire.end_of(10 + number)
            wire.send(Kind.WRITTEN, 1)
        assert (await wire.end_of(1))[1]["code"] == 0


@on_a_loop
async def test_a_stream_is_read_only_when_its_servicer_asks():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Twice"))
        for message in (b"a", b"b"):
            assert (await wire.next()).kind is Kind.READ
            wire.send(Kind.SAID, 1, message)
            assert await wire.next() == Frame(Kind.TELL, 1, message)
            wire.send(Kind.WRITTEN, 1)
        assert (await wire.next()).kind is Kind.READ
        wire.send(Kind.ALL_SAID, 1)
        assert (await wire.end_of(1))[1]["code"] == 0
        assert wire.services.read == [b"a", b"b"]
        assert wire.services.ended == ["twice"]


@on_a_loop
async def test_a_read_that_was_given_up_loses_no_message():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Patient"))
        frames = [await wire.next(), await wire.next()]
        assert sorted(each.kind for each in frames) == [Kind.READ, Kind.TELL]
        wire.send(Kind.SAID, 1, b"late")
        wire.send(Kind.WRITTEN, 1)
        assert (await wire.end_of(1))[0] == []
        assert wire.services.read == [b"late"]


@on_a_loop
async def test_a_member_that_is_gone_ends_its_call():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Twice"))
        assert (await wire.next()).kind is Kind.READ
        wire.send(Kind.GONE, 1)
        assert (await wire.end_of(1))[1]["code"] == grpc.StatusCode.CANCELLED.value[0]
        assert wire.services.ended == ["twice"]


@on_a_loop
async def test_a_call_that_is_gone_in_the_moment_it_begins_leaves_nothing():
    async with Wire() as wire:
        # In one piece, so that the call is cancelled before its task has run.
        wire.send(Kind.OPEN, 1, opening("Twice"))
        wire.send(Kind.GONE, 1)
        await wire.end_of(1)
        wire.send(Kind.OPEN, 2, opening("Echo"))
        wire.send(Kind.SAID, 2, b"")
        await wire.end_of(2)
        await asyncio.sleep(0)
        assert len(wire.desk) == 0


@on_a_loop
async def test_calls_end_with_their_worker():
    async with Wire() as wire:
        wire.send(Kind.OPEN, 1, opening("Twice"))
        assert (await wire.next()).kind is Kind.READ
        wire.worker.close()
        assert await wire.broken == ""
        async with asyncio.timeout(30):
            await asyncio.gather(*wire.tasks)
        assert wire.services.ended == ["twice"]
        assert len(wire.desk) == 0


OPEN_TWICE = Kind.OPEN, 1, opening("Twice")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([(Kind.SAID, 1, b"")], id="a message of no call"),
        pytest.param([OPEN_TWICE, (Kind.SAID, 2, b"")], id="a message of a later call"),
        pytest.param([OPEN_TWICE, OPEN_TWICE], id="a number twice"),
        pytest.param([(Kind.OPEN, 5, opening("Twice")), (Kind.OPEN, 4, opening("Twice"))], id="a number backwards"),
        pytest.param([(Kind.OPEN, 1, opening("Absent"))], id="a method that is not there"),
        pytest.param([(Kind.OPEN, 1, encoded({"method": ["/x/Twice"], **CALLER}))], id="a method that is no text"),
        pytest.param([(Kind.OPEN, 1, encoded({"method": "/x/Twice"}))], id="no caller"),
        pytest.param([(Kind.OPEN, 1, encoded({"method": "/x/Twice", **CALLER, "peer_uri": 5}))], id="a bad caller"),
        pytest.param([(Kind.OPEN, 1, b"[1")], id="no JSON"),
        pytest.param([OPEN_TWICE, (Kind.WRITTEN, 1, b"")], id="an answer to nothing"),
        pytest.param([OPEN_TWICE, (Kind.SAID, 1, b""), (Kind.SAID, 1, b"")], id="a message unasked"),
        pytest.param(
            [(Kind.OPEN, 1, opening("Echo")), (Kind.SAID, 1, b""), (Kind.SAID, 1, b"")], id="a second message of one"
        ),
        pytest.param([(Kind.OPEN, number, opening("Twice")) for number in range(1, MOST + 2)], id="too many calls"),
    ],
)
@on_a_loop
async def test_a_worker_that_breaks_the_rules_is_cut_off(frames):
    async with Wire() as wire:
        for kind, call, payload in frames:
            wire.send(kind, call, payload)
        async with asyncio.timeout(30):
            assert await wire.broken


@on_a_loop
async def test_as_many_calls_as_the_connections_carry_are_served():
    async with Wire() as wire:
        for number in range(1, MOST + 1):
            wire.send(Kind.OPEN, number, opening("Twice"))
        for _ in range(MOST):
            assert (await wire.next()).kind is Kind.READ
        assert not wire.broken.done()


@on_a_loop
async def test_a_slow_worker_holds_back_what_it_is_sent():
    """A cohort's rosters to a worker that does not read wait with their senders, and not in the socket's buffer."""
    ours, theirs = socket.socketpair()
    lost = asyncio.get_running_loop().create_future()
    channel = await connect(ours, FROM_WORKER, lambda _: None, lost.set_result)
    message, sent = bytes(512 * 1024), 0

    async def send_all():
        nonlocal sent
        for _ in range(100):
            await channel.room()
            channel.send(Kind.TELL, 1, message)
            sent += 1

    sending = asyncio.create_task(send_all())
    # It runs until it waits, and nobody reads.
    for _ in range(50):
        await asyncio.sleep(0)
    assert 1 <= sent <= 16
    received = asyncio.Queue()
    await connect(theirs, FROM_MAIN, received.put_nowait, lambda _: None)
    async with asyncio.timeout(60):
        await sending
        for _ in range(100):
            assert len((await received.get()).payload) == len(message)
    channel.close()
    await lost
