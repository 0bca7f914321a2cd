"""Members that break the rules: garbage, repeats, false digests, floods, endless streams, silent connections.

Each time, the coordinator names the fault and the member, the job continues with the other members, another job is not
affected, and the coordinator's memory and open files stay bounded.
"""

import contextlib
import os
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import secure_agg
from coordinator.services.credentials import server_options
from edge_client.identity.connection import channel_options
from edge_client.identity.home import MemberIdentity
from tacit import wire
from tacit.messages import Goodbye, Hello, Welcome
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tacit.verification import verifiers
from tests.support.besieged import Besieged, Footprint, attempts, dropouts
from tests.support.processes import PATIENCE, within_patience
from tests.support.rogue_member import FLOOD

HONEST = ("north", "east", "south")
ROGUE = "west"
MEBIBYTE = 2**20
SERVICE = "/tacit.v1.FederationService"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    running = Besieged(tmp_path_factory.mktemp("federation"))
    try:
        running.enrol(*HONEST, ROGUE)
        running.light_job("beside", embedding=8, count=1_000_000)
        for name in HONEST:
            running.light(name)
        running.goes_on("beside")
        yield running
    finally:
        running.close()


@pytest.fixture
def job(request):
    """A job name that only this test uses."""
    return "rogue-" + request.node.name.removeprefix("test_").replace("_", "-").split("[", 1)[0][:40]


@pytest.fixture(autouse=True)
def _sound_at_the_end(federation):
    """Checks after each test that it left nothing behind in the coordinator and that everybody else continues."""
    footprint = Footprint(federation.coordinator.process.pid)
    yield
    federation.goes_on("beside")
    federation.never_logged(HONEST, "job_failed", "attempt_refused", "message_failed")
    within_patience(lambda: footprint.opened < 16)
    assert footprint.grown < 96 * MEBIBYTE


@pytest.fixture
def rogue(federation):
    """The process of the member that breaks the rules, for jobs whose names begin with "rogue-"."""
    federation.order(ROGUE)
    member = federation.light(ROGUE, "rogue-*")
    member.wait_for("connected")
    yield member
    federation.order(ROGUE)
    assert member.stop() == 0
    federation.processes.remove(member)


# ---- in an attempt --------------------------------------------------------------------------------------------------


def test_a_vector_unlike_its_signed_digest_is_dropped(federation, rogue, job):
    federation.order(ROGUE, "digest")
    federation.light_job(job, count=2)
    rogue.wait_for("broke", order="digest")
    federation.finished(job)
    detail = federation.sound(job, HONEST)
    # It is left out of the rest of that round and asked again in the next. Its process does not end.
    assert dropouts(detail) == 2 * [(ROGUE, "mask", Reason.REASON_MASKED_INPUT_DIGEST_MISMATCH)]
    assert rogue.process.poll() is None


@pytest.mark.parametrize("opens", ["right", "wrong", "none"])
def test_a_dealer_of_garbage_opens_or_is_left_out_at_once(federation, rogue, opens):
    """Its receiver complains. No phase runs to its deadline, which is longer than this test may take."""
    job = f"rogue-opens-{opens}"
    federation.order(ROGUE, "garbage", "north", opens)
    began = time.monotonic()
    federation.light_job(job, count=1, min_members=3, target_members=4, deadlines={"mask": 600})
    rogue.wait_for("broke", order="garbage")
    federation.coordinator.wait_for("complaint", member="north", dealer=ROGUE, job=job)
    federation.finished(job)
    assert time.monotonic() - began < 60
    if opens == "right":
        detail = federation.sound(job, (*HONEST, ROGUE))
        assert dropouts(detail) == []
        federation.coordinator.wait_for("complaints_answered", member="north", job=job)
        return
    shown = federation.operator("job", "show", job)
    if opens == "none":
        # Its vector is in the sum, and only the receiver is lost.
        detail = federation.sound(job, (*HONEST, ROGUE))
        assert dropouts(detail) == [("north", "mask", Reason.REASON_COMPLAINT_UNANSWERED)]
        assert f"{ROGUE} does not answer" in shown
        return
    detail = federation.sound(job, HONEST)
    first, second = attempts(detail)
    assert (first.outcome, first.reason) == ("abandoned", Reason.REASON_DEALER_CONVICTED)
    assert dropouts(detail) == [(ROGUE, "mask", Reason.REASON_DEALER_CONVICTED)]
    assert sorted(second.survivors) == sorted(HONEST)
    # The operator reads the name, and the evidence.
    assert f"({ROGUE})" in shown
    (lost,) = first.dropouts
    identity = MemberIdentity.load(federation.home(ROGUE))
    verify, _ = verifiers(identity.trust)
    assert secure_agg.convicts(wire.evidence_from_bytes(lost.evidence), identity.certificate, verify)


def test_messages_sent_twice_count_once(federation, rogue, job):
    federation.order(ROGUE, "twice")
    federation.light_job(job, count=2, min_members=4)
    rogue.wait_for("broke", order="twice", said="AttemptMessage")
    federation.finished(job)
    detail = federation.sound(job, (*HONEST, ROGUE))
    assert dropouts(detail) == []
    assert all(sorted(attempt.survivors) == sorted((*HONEST, ROGUE)) for attempt in attempts(detail))


def test_a_conflicting_second_message_drops_the_member(federation, rogue, job):
    federation.order(ROGUE, "other")
    # Keeps the phase open until the second message has arrived.
    federation.order("north", "halt", "advertise")
    federation.light_job(job, count=1)
    rogue.wait_for("broke", order="other")
    federation.coordinator.wait_for("dropout", member=ROGUE, job=job)
    federation.order("north")
    federation.finished(job)
    detail = federation.sound(job, HONEST)
    assert dropouts(detail) == [(ROGUE, "advertise", Reason.REASON_MESSAGE_CONFLICTING)]


@pytest.mark.parametrize("kind", ["endless", "trickle"])
def test_an_endless_vector_drops_the_member(federation, rogue, kind):
    job = f"rogue-{kind}"
    federation.order(ROGUE, kind)
    federation.light_job(job, count=1, deadlines={"mask": 4})
    rogue.wait_for("broke", order=kind)
    federation.goes_on("beside")
    federation.finished(job)
    detail = federation.sound(job, HONEST)
    ((member, phase, reason),) = dropouts(detail)
    assert (member, phase) == (ROGUE, "mask")
    # The endless sender is refused for its length. The coordinator waits for the silent one until the deadline.
    expected = Reason.REASON_MASKED_INPUT_LENGTH_WRONG if kind == "endless" else Reason.REASON_PHASE_DEADLINE
    assert reason == expected


def test_a_flood_of_messages_holds_up_nobody(federation, rogue, job):
    federation.order(ROGUE, "flood")
    footprint = Footprint(federation.coordinator.process.pid)
    before = federation.metric("tacit_coordinator_bytes_total", channel="session", direction="in")
    federation.light_job(job, count=2)
    rogue.wait_for("broke", order="flood")
    federation.goes_on("beside")
    federation.finished(job)
    federation.sound(job, (*HONEST, ROGUE))
    # The coordinator read the whole flood: the digests of a version in it already make this many bytes.
    within_patience(
        lambda: (
            federation.metric("tacit_coordinator_bytes_total", channel="session", direction="in") - before > FLOOD * 32
        )
    )
    assert footprint.grown < 96 * MEBIBYTE


# ---- outside the protocol --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def channel(federation):
    """A connection with the rogue's certificate, which sends bytes that no member would send."""
    identity = MemberIdentity.load(federation.home(ROGUE))
    credentials = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
    options = [*channel_options(), ("grpc.max_send_message_length", -1)]
    with grpc.secure_channel(identity.address, credentials, options=options) as made:
        yield made


def hello():
    """An encoded Hello."""
    return wire.to_coordinator(Hello(1, "rogue", os.urandom(16), ("nothing",))).SerializeToString()


def heard(answers):
    """The messages of a session until it ends, and the status with which it ends."""
    messages = []
    try:
        messages += [wire.from_coordinator(pb.CoordinatorMessage.FromString(data)) for data in answers]
    except grpc.RpcError as error:
        return messages, error.code()
    return messages, grpc.StatusCode.OK


GARBAGE = {
    "bytes that are no protobuf": b"\xff\xff\xff\xff\xff",
    "an empty message": b"",
    "a field that nobody knows": b"\xfa\x3f\x06nobody",
}


@pytest.mark.parametrize("first", ["first", "after Hello"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_a_session_ends_it(federation, garbage, first):
    said = [GARBAGE[garbage]] if first == "first" else [hello(), GARBAGE[garbage]]
    with channel(federation) as connection:
        messages, code = heard(connection.stream_stream(f"{SERVICE}/Session")(iter(said), timeout=PATIENCE))
    if first == "first":
        assert (messages, code) == ([], grpc.StatusCode.INVALID_ARGUMENT)
    else:
        assert isinstance(messages[0], Welcome)
        assert isinstance(messages[-1], Goodbye)
        assert messages[-1].reason == Reason.REASON_MESSAGE_MALFORMED


def test_garbage_in_any_other_call_is_refused(federation):
    with channel(federation) as connection:
        for method in ("OpenJobs", "MaskedUploadStatus"):
            with pytest.raises(grpc.RpcError):
                connection.unary_unary(f"{SERVICE}/{method}")(b"\xff\xff\xff", timeout=PATIENCE)
        for method in ("FetchBlob", "FetchCertificates"):
            with pytest.raises(grpc.RpcError):
                list(connection.unary_stream(f"{SERVICE}/{method}")(b"\xff\xff\xff", timeout=PATIENCE))
        for said in (b"\xff\xff\xff", b"", pb.MaskedUpload(data=b"x").SerializeToString()):
            with pytest.raises(grpc.RpcError):
                connection.stream_unary(f"{SERVICE}/UploadMasked")(iter([said]), timeout=PATIENCE)


def test_an_oversized_message_is_refused(federation):
    (most,) = [value for name, value in server_options() if name == "grpc.max_receive_message_length"]
    footprint = Footprint(federation.coordinator.process.pid)
    with channel(federation) as connection:
        session = connection.stream_stream(f"{SERVICE}/Session")
        _, code = heard(session(iter([hello(), bytes(most + 1)]), timeout=PATIENCE))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert footprint.grown < most


def test_unread_streams_hold_up_nobody(federation):
    blobs = federation.show("beside").job
    request = pb.FetchBlobRequest(digest=blobs.version).SerializeToString()
    footprint = Footprint(federation.coordinator.process.pid)
    with channel(federation) as connection:
        fetch = connection.unary_stream(f"{SERVICE}/FetchBlob")
        unread = [fetch(request, timeout=PATIENCE) for _ in range(200)]
        federation.goes_on("beside", 3)
        assert footprint.grown < 96 * MEBIBYTE
        for each in unread:
            each.cancel()


def test_each_session_of_a_storm_replaces_the_one_before(federation):
    before = Footprint(federation.coordinator.process.pid)
    with channel(federation) as connection:
        session = connection.stream_stream(f"{SERVICE}/Session")
        over = threading.Event()

        def said():
            yield hello()
            over.wait(PATIENCE)

        storm = [session(said(), timeout=PATIENCE) for _ in range(200)]
        # Each is read while it lasts. Unread, those that wait for a stream sometimes wait until their timeout.
        with ThreadPoolExecutor(len(storm)) as readers:
            reading = readers.map(heard, storm)
            try:
                federation.goes_on("beside")
            finally:
                over.set()
            endings = list(reading)
    goodbyes = [messages[-1].reason for messages, _ in endings if messages and isinstance(messages[-1], Goodbye)]
    # Each session replaces the one before. The last ends with its own stream.
    assert Reason.REASON_SESSION_REPLACED in goodbyes
    assert set(goodbyes) <= {Reason.REASON_SESSION_REPLACED, Reason.REASON_DISCONNECTED}
    assert before.grown < 96 * MEBIBYTE


def test_unfinished_handshakes_hold_up_nobody(federation):
    hello_of_tls = ssl.MemoryBIO()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        client.wrap_bio(ssl.MemoryBIO(), hello_of_tls).do_handshake()
    first = hello_of_tls.read()
    footprint = Footprint(federation.coordinator.process.pid)
    with contextlib.ExitStack() as stack:
        for number in range(500):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", federation.port)))
            # In turn: nothing, a part of the first message, or all of it and then nothing.
            connection.sendall((b"", first[: len(first) // 2], first)[number % 3])
        federation.goes_on("beside")
        # A new connection is still served without waiting for the silent ones.
        with channel(federation) as connection:
            asked = connection.unary_unary(f"{SERVICE}/OpenJobs")(b"", timeout=10)
        assert pb.OpenJobsResponse.FromString(asked).jobs
        assert footprint.opened <= 520
        assert footprint.grown < 96 * MEBIBYTE
    within_patience(lambda: footprint.opened < 16)
