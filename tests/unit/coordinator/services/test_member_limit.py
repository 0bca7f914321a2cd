"""Limits on what one member may send: the buckets with a test clock, the log, and the real service over TLS."""

import asyncio
import contextlib
import io
import json

import grpc
import grpc.aio
import pytest
from structlog import get_logger
from structlog.testing import capture_logs

import secure_agg
from coordinator.pki import key_pem, pem
from coordinator.services import member_limit
from coordinator.services.member_limit import BURST_SECONDS, MemberLimit, jobs_tokens, log_page_tokens
from coordinator.services.member_lines import MemberLines
from tacit import wire
from tacit.attempt import AttemptId
from tacit.messages import Decline, Goodbye, Hello, Welcome
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tests.support import party
from tests.support.clock import Clock
from tests.unit.coordinator.services.test_member_sessions import House, Stream
from toolkit.logs import configure


@pytest.fixture
def clock() -> Clock:
    return Clock()


# ---- the buckets -------------------------------------------------------------------------------------------------


def test_a_member_gets_its_burst_then_its_rate_at_no_cost_to_others(clock):
    limit = MemberLimit(clock, messages_per_second=10, calls_per_second=2)
    assert sum(not limit.message("north", 100) for _ in range(1000)) == 10 * BURST_SECONDS
    assert limit.message("north", 100) == pytest.approx(0.1)
    assert not limit.message("south", 100)
    # Calls have their own bucket.
    assert sum(not limit.call("north") for _ in range(1000)) == 2 * BURST_SECONDS
    assert limit.call_short("north") == pytest.approx(0.5)
    clock.now += 1
    assert sum(not limit.message("north", 100) for _ in range(1000)) == 10
    assert sum(not limit.call("north") for _ in range(1000)) == 2


def test_a_call_that_costs_more_takes_more_of_the_same_bucket(clock):
    limit = MemberLimit(clock, calls_per_second=2)
    full = 2 * BURST_SECONDS
    assert sum(not limit.call("north", 10) for _ in range(100)) == full / 10
    assert limit.call_short("north", 10) == pytest.approx(5)
    clock.now += 4.5
    assert limit.call("north", 10) == pytest.approx(0.5)
    # What was refused cost nothing.
    assert sum(not limit.call("north") for _ in range(100)) == 9
    assert [log_page_tokens(entries) for entries in (0, 199, 200, 1000)] == [1, 1, 2, 6]


def test_an_ended_session_may_return_at_a_quarter_of_the_bucket(clock):
    limit = MemberLimit(clock, messages_per_second=10)
    assert limit.session_short("north") == 0
    while not limit.message("north", 1):
        pass
    assert limit.session_short("north") == pytest.approx(BURST_SECONDS / 4)
    clock.now += BURST_SECONDS / 4
    assert limit.session_short("north") == 0


def test_a_large_message_costs_more(clock):
    limit = MemberLimit(clock, messages_per_second=10)
    assert sum(not limit.message("north", 1024 * 1024) for _ in range(1000)) == 10 * BURST_SECONDS // 17


def test_memory_is_bounded(clock):
    limit = MemberLimit(clock, members=10)
    for number in range(100):
        limit.message(f"m{number}", 1)
        limit.call(f"m{number}")
    assert len(limit) == 10


@pytest.mark.parametrize(("jobs", "rounds_a_second"), [(1, 10.0), (4, 2.0), (20, 0.5)])
def test_honest_traffic_is_far_below_the_defaults(clock, jobs, rounds_a_second):
    """Ten minutes of fast rounds: some with three attempts, a roster of 10,000 with new certificates, and reconnections
    that repeat every question.
    """
    limit, seconds, lowest = MemberLimit(clock), 600, 1.0

    def say(size=1000):
        assert not limit.message("north", size)

    def call():
        assert not limit.call("north")

    for number in range(int(seconds * rounds_a_second)):
        clock.now += 1 / rounds_a_second
        for _ in range(jobs):
            attempts = 3 if number % 10 == 0 else 1
            say()  # Ready
            for _ in range(attempts):
                for size in (500, 40_000, 500, 10_000):
                    say(size)
            # The version, and the status and upload of each attempt's vector.
            for _ in range(1 + (2 * attempts if number % 10 == 0 else 2)):
                call()
        if number % 100 == 0:
            for _ in range(20):
                call()
            assert not limit.session_short("north")
            for _ in range(2 + 3 * jobs):
                call()
        lowest = min(lowest, limit._messages._buckets["north"].left / (100 * BURST_SECONDS))
    assert lowest > 0.5


# ---- the log -----------------------------------------------------------------------------------------------------


def test_log_lines_of_one_member_and_event_are_limited_and_counted(clock):
    out = io.StringIO()
    configure("json", stream=out, first=(MemberLines(clock),))
    try:
        log = get_logger("coordinator.rounds")
        for _ in range(8000):
            log.info("decline", member="north", detail="no")
        # Other events and other members are not affected.
        log.info("member_revoked", member="north")
        log.info("decline", member="south")
        log.info("decline")
        clock.now += 24
        for _ in range(100):
            log.info("decline", member="north", detail="no")
    finally:
        configure("json")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    of_north = [line for line in lines if line.get("member") == "north" and line["event"] == "decline"]
    assert len(of_north) == 30 + 12
    assert of_north[30]["suppressed"] == 8000 - 30
    assert "suppressed" not in of_north[31]
    assert [line["event"] for line in lines if line not in of_north] == ["member_revoked", "decline", "decline"]


# ---- the service -------------------------------------------------------------------------------------------------


def serving(tmp_path, scenario, **how):
    async def whole() -> None:
        house = House(tmp_path, **how)
        await house.start()
        try:
            credentials = grpc.ssl_channel_credentials(
                pem(party.authority().certificate), key_pem(party.key(2)), pem(house.certificate)
            )
            async with grpc.aio.secure_channel(f"localhost:{house.port}", credentials) as channel:
                await scenario(house, federation_pb2_grpc.FederationServiceStub(channel))
        finally:
            await house.server.stop(0)
            await house.runtime.stop()
            house.database.close()

    asyncio.run(whole())


def test_a_call_that_is_answered_about_every_job_costs_by_their_number(tmp_path, clock, monkeypatch):
    """Jobs that are over stay, and each has something to say to a member that opens a session."""
    assert [jobs_tokens(jobs) for jobs in (0, 49, 50, 1000)] == [1, 1, 2, 21]
    # The one job of this house counts like fifty.
    monkeypatch.setattr(member_limit, "_JOBS_A_TOKEN", 1)
    limit = MemberLimit(clock, calls_per_second=10 / BURST_SECONDS)

    async def scenario(house, stub):
        for _ in range(2):
            await stub.OpenJobs(pb.OpenJobsRequest())
        stream = Stream(stub.Session())
        await stream.say(Hello(1, "0.1.0", b"p" * 16))
        await stream.until(Welcome)
        # Two for each list of jobs, two for the session, one for the second look at its certificate.
        assert sum(not limit.call("north") for _ in range(100)) == 10 - 7
        stream.call.cancel()

    serving(tmp_path, scenario, limit=limit)


async def refused(call) -> tuple[grpc.StatusCode, Reason, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return (raised.value.code(), *reason_of(raised.value))


def test_a_member_that_floods_its_session_is_told_and_may_return(tmp_path, clock):
    async def scenario(house, stub) -> None:
        stream = Stream(stub.Session())
        await stream.say(Hello(1, "0.1.0", b"p" * 16, ("*",)))
        await stream.until(Welcome)
        reading = asyncio.create_task(stream.until(Goodbye))
        said = 0
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while said < 8000 and not reading.done():
                await stream.say(Decline("questions", 1, Reason.REASON_POLICY_COHORT, "no"))
                said += 1
        assert said < 8000
        goodbye = await reading
        assert goodbye.reason == Reason.REASON_MEMBER_TOO_FREQUENT
        assert "too many messages; wait 1 s" in goodbye.detail
        assert house.metrics.value("session_messages_total", direction="in", phase="training") <= 202
        assert house.metrics.value("members_limited_total", kind="messages") == 1
        # A return at once is refused; once a quarter of its bucket has refilled, it is accepted.
        again = stub.Session()
        await again.write(wire.to_coordinator(Hello(1, "0.1.0", b"p" * 16, ("*",))))
        code, reason, sentence = await refused(again.read())
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.REASON_MEMBER_TOO_FREQUENT)
        assert "wait 5 s" in sentence
        clock.now += 5
        stream = Stream(stub.Session())
        await stream.say(Hello(1, "0.1.0", b"p" * 16, ("*",)))
        await stream.until(Welcome)
        await stream.call.done_writing()
        await stream.until(Goodbye)

    serving(tmp_path, scenario, limit=MemberLimit(clock, messages_per_second=10))


def test_too_frequent_calls_are_refused_before_any_database_query(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("coordinator.services.callers._REFUSED_AFTER", 0.0)

    async def scenario(house, stub) -> None:
        for _ in range(int(1 * BURST_SECONDS)):
            await stub.OpenJobs(pb.OpenJobsRequest())
        asked = []

        async def run(work):
            asked.append(work)

        monkeypatch.setattr(house.database, "run", run)
        with capture_logs() as logs:
            for call in (
                stub.OpenJobs(pb.OpenJobsRequest()),
                stub.MaskedUploadStatus(pb.AttemptRef()),
                stub.Session().read(),
                stub.FetchBlob(pb.FetchBlobRequest()).read(),
                stub.CorpusStatus(pb.CorpusRef()),
            ):
                code, reason, sentence = await refused(call)
                assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.REASON_MEMBER_TOO_FREQUENT)
                assert "too many calls; wait 1 s" in sentence
        assert asked == []
        assert {line["member"] for line in logs if line["event"] == "member_limited"} == {"north"}
        assert house.metrics.value("members_limited_total", kind="calls") == 5
        monkeypatch.undo()
        clock.now += 1
        await stub.OpenJobs(pb.OpenJobsRequest())

    serving(tmp_path, scenario, limit=MemberLimit(clock, calls_per_second=1))


def test_a_member_has_a_maximum_number_of_open_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.services.callers._CALLS_AT_ONCE", 3)

    async def scenario(house, stub) -> None:
        uploads = [stub.UploadMasked() for _ in range(3)]
        for upload in uploads:
            await upload.wait_for_connection()
        async with asyncio.timeout(20):
            while house.runtime.calls.count("north") < 3:
                await stub.FetchAuthorities(pb.FetchAuthoritiesRequest())
        code, reason, _ = await refused(stub.OpenJobs(pb.OpenJobsRequest()))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.REASON_MEMBER_TOO_FREQUENT)
        for upload in uploads:
            upload.cancel()
        async with asyncio.timeout(20):
            while house.runtime.calls.count("north"):
                await stub.FetchAuthorities(pb.FetchAuthoritiesRequest())
        await stub.OpenJobs(pb.OpenJobsRequest())

    serving(tmp_path, scenario)


@pytest.mark.parametrize("method", ["UploadMasked", "UploadCorpus", "Session"])
def test_a_stream_without_a_first_message_ends(tmp_path, method):
    async def scenario(house, stub) -> None:
        stream = getattr(stub, method)()
        await stream.wait_for_connection()
        async with asyncio.timeout(20):
            code, reason, sentence = await refused(stream.read() if method == "Session" else stream)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.REASON_MESSAGE_MALFORMED)
        assert "within 0.1 s" in sentence
        assert house.runtime.calls.count("north") == 0

    serving(tmp_path, scenario, first_seconds=0.1)


def test_a_stalled_vector_upload_is_told_how_much_arrived(tmp_path):
    async def scenario(house, stub) -> None:
        attempt = AttemptId("questions", 1, 1)
        house.runtime.uploads.open(attempt, frozenset({"north"}), values=1000, bits=32)
        upload = stub.UploadMasked()
        message = secure_agg.MaskedInput("north", b"d" * 32, 1000, b"s" * 384)
        header = pb.MaskedUploadHeader(
            ref=wire.attempt_to_pb(attempt), offset=0, input=wire.masked_input_to_pb(message)
        )
        await upload.write(pb.MaskedUpload(header=header))
        await upload.write(pb.MaskedUpload(data=b"x" * 100))
        async with asyncio.timeout(20):
            receipt = await upload
        assert (receipt.received, receipt.complete) == (100, False)
        assert receipt.reason == Reason.REASON_UPLOAD_INCOMPLETE

    serving(tmp_path, scenario, chunk_seconds=0.2)
