"""What a member's session writes, and how it ends: over real connections, with a real job and database."""

import asyncio
import contextlib
import hashlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization
from sqlalchemy import event, func, select
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.pki import key_pem, pem
from coordinator.rounds import events as ev
from coordinator.rounds.driver import JobDriver
from coordinator.runtime import Runtime
from coordinator.services.credentials import federation_credentials, load_root, server_options
from coordinator.services.encoder import SharedEncoder
from coordinator.services.federation import FederationServicer, add_federation_service
from coordinator.services.member_session import MemberSessions
from coordinator.services.roster import RosterLog
from coordinator.services.turns import Turns
from coordinator.storage import open_blobs, open_database, records
from coordinator.storage.blobs import Ranges
from coordinator.storage.members import MAX_LEDGERS
from coordinator.storage.models import LedgerCounterRow
from tacit import wire
from tacit.attempt import AttemptId
from tacit.identity import Role, federation_of
from tacit.limits import CERTIFICATES_AT_ONCE, CERTIFICATES_IN_A_PART
from tacit.messages import (
    AttemptMessage,
    Decline,
    Goodbye,
    Hello,
    LedgerCounter,
    PrivacyReport,
    Ready,
    Standby,
    Welcome,
)
from tacit.protocol import PROTOCOL_VERSION
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.token import secret_hash
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tests.support import party
from tests.support.databases import empty_database
from tests.support.fleet import job_document

ONE, OTHER = b"1" * 16, b"2" * 16


class House:
    """A coordinator with the job `questions` and the enrolled member north."""

    def __init__(self, tmp_path, **how) -> None:
        """`how` has further arguments of the servicer."""
        folder = party.coordinator_folder(tmp_path / "coordinator")
        self.root = load_root(folder)
        self.database = empty_database(tmp_path)
        self.statements: list[str] = []
        self.writes: list[str] = []
        event.listen(self.database._engine, "before_cursor_execute", self._executed)
        self.store, self.metrics = open_blobs(str(tmp_path / "store")), Metrics("test")
        self.runtime = Runtime(self.database, self.store, self.metrics, self.root)
        self.server = grpc.aio.server(options=server_options())
        servicer = FederationServicer(self.runtime, self.metrics, federation_of(self.root), self.root, **how)
        add_federation_service(servicer, self.server)
        self.port = self.server.add_secure_port("127.0.0.1:0", federation_credentials(folder))
        self.certificate = party.authority().issue(party.key(2).public_key(), Role.MEMBER, "north", now=party.present())

    def _executed(self, _connection, _cursor, statement, *_) -> None:
        if "ledger_counters" in statement:
            self.statements.append(statement)
            if not statement.startswith("SELECT"):
                self.writes.append(statement)

    async def start(self) -> None:
        now, hashed, key = party.present(), secret_hash(b"s" * 32), b"k" * 32
        der = self.certificate.public_bytes(serialization.Encoding.DER)
        expires_ms = int((now + timedelta(hours=1)).timestamp() * 1000)

        def enrol(s):
            records.invite(s, "north", "t1", hashed, expires_ms, 1)

        await self.database.run(enrol)
        desk = records.DatabaseTokenDesk(self.database)
        await desk.spend("t1", hashed, key, now)
        await desk.record("t1", "north", (der,), now + timedelta(days=1), "0.1.0", now)
        job = job_document()
        await self.runtime.create_job(self.store.put(job.canonical()), job)
        await self.server.start()

    @contextlib.asynccontextmanager
    async def session(self, ledger=None, protocol_version=PROTOCOL_VERSION):
        """Opens a stream whose Hello names a ledger, and reads the Welcome if both sides speak the same version."""
        async with stub_of(self) as stub:
            stream = Stream(stub.Session())
            await stream.say(Hello(protocol_version, "0.1.0", b"p" * 16, ("*",), ledger=ledger))
            if protocol_version == PROTOCOL_VERSION:
                stream.welcome = await stream.until(Welcome)
            yield stream
            await stream.call.done_writing()
            await stream.until(Goodbye)

    async def ledgers(self) -> int:
        return await self.database.run(lambda s: s.scalar(select(func.count()).select_from(LedgerCounterRow)))


class Stream:
    def __init__(self, call) -> None:
        self.call, self.welcome, self.goodbye, self.asked = call, None, None, 0

    async def say(self, message) -> None:
        await self.call.write(wire.to_coordinator(message))

    async def until(self, kind):
        """Returns the next message of a kind."""
        if kind is Goodbye and self.goodbye is not None:
            return self.goodbye
        async with asyncio.timeout(20):
            while (read := await self.call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                message = wire.from_coordinator(read)
                if isinstance(message, Goodbye):
                    self.goodbye = message  # type: ignore[assignment]
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"the stream ended without {kind.__name__}")

    async def worked_out(self) -> None:
        """Waits until all earlier messages were processed; a session's messages are processed in order."""
        self.asked += 1
        await self.say(ready(job=f"end-{self.asked}"))
        while f"end-{self.asked}" not in (await self.until(Standby)).detail:
            pass


def ready(ledger=None, sequence=0, *, job="questions", epsilon=None):
    report = None if epsilon is None else PrivacyReport(epsilon, 1e-5)
    return Ready(job, 1, job_document().weights, report, ledger and LedgerCounter(ledger, sequence))


def housed(test):
    """Runs a test's coroutine in a house."""

    def run(tmp_path):
        async def whole():
            house = House(tmp_path)
            await house.start()
            try:
                await test(house)
            finally:
                await house.server.stop(0)
                await house.runtime.stop()
                house.database.close()

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@housed
async def test_ready_must_name_the_ledger_that_hello_named(house):
    async with house.session(LedgerCounter(ONE, 5)) as stream:
        await stream.say(ready(OTHER, 6))
        assert (await stream.until(Goodbye)).reason == Reason.REASON_MESSAGE_MALFORMED
    async with house.session() as stream:
        await stream.say(ready(ONE, 6, job="nothing"))
        assert (await stream.until(Goodbye)).reason == Reason.REASON_MESSAGE_MALFORMED
    async with house.session(LedgerCounter(ONE, 5)) as stream:
        assert stream.welcome.ledger_sequence == 5
        await stream.say(ready())
        await stream.worked_out()
    assert await house.ledgers() == 1


@housed
async def test_another_protocol_version_is_told_which_side_to_upgrade(house):
    for version, side in ((PROTOCOL_VERSION + 1, "coordinator"), (PROTOCOL_VERSION - 1, "member")):
        async with house.session(LedgerCounter(ONE, 5), protocol_version=version) as stream:
            goodbye = await stream.until(Goodbye)
            assert goodbye.reason == Reason.REASON_PROTOCOL_VERSION_UNSUPPORTED
            assert f"the member speaks protocol version {version}" in goodbye.detail
            assert goodbye.detail.endswith(f"upgrade the {side}'s software")
    assert await house.ledgers() == 0
    assert house.runtime.sessions.connected == {}


@housed
async def test_only_a_higher_sequence_for_a_known_job_is_written(house):
    async with house.session(LedgerCounter(ONE, 5)) as stream:
        assert len(house.writes) == 1
        said = len(house.statements)
        for sequence in (5, 4, 5):
            await stream.say(ready(ONE, sequence))
        await stream.say(ready(ONE, 99, job="nothing"))
        await stream.worked_out()
        # The database was not even asked.
        assert len(house.statements) == said
        await stream.say(ready(ONE, 7))
        await stream.worked_out()
        assert len(house.writes) == 2
        said = len(house.statements)
        for sequence in (7, 6):
            await stream.say(ready(ONE, sequence))
        await stream.worked_out()
        assert len(house.statements) == said
    async with house.session(LedgerCounter(ONE, 3)) as stream:
        assert stream.welcome.ledger_sequence == 7
        await stream.say(ready(ONE, 6))
        await stream.worked_out()
    assert len(house.writes) == 2


@housed
async def test_a_ledger_beyond_the_maximum_displaces_no_other(house):
    for number in range(MAX_LEDGERS):
        await house.runtime.database.run(
            lambda s, number=number: records.heard_ledger(s, "north", b"%016d" % number, 9)
        )
    for _ in range(2):
        with capture_logs() as logs:
            async with house.session(LedgerCounter(ONE, 5)) as stream:
                assert stream.welcome.ledger_sequence == 0
                said = len(house.statements)
                for sequence in (6, 7):
                    await stream.say(ready(ONE, sequence))
                await stream.worked_out()
                assert len(house.statements) == said
        (warning,) = (line for line in logs if line["log_level"] == "warning")
        assert (warning["event"], warning["member"]) == ("message_failed", "north")
    assert await house.ledgers() == MAX_LEDGERS
    async with house.session(LedgerCounter(b"%016d" % 0, 1)) as stream:
        assert stream.welcome.ledger_sequence == 9


@contextlib.asynccontextmanager
async def stub_of(house):
    """Yields a stub that calls as the member north."""
    credentials = grpc.ssl_channel_credentials(
        pem(party.authority().certificate), key_pem(party.key(2)), pem(house.certificate)
    )
    async with grpc.aio.secure_channel(f"localhost:{house.port}", credentials) as channel:
        yield federation_pb2_grpc.FederationServiceStub(channel)


@housed
async def test_accepted_certificates_are_served_by_digest_in_parts(house):
    ders = []
    for number in range(CERTIFICATES_IN_A_PART + 6):
        certificate = party.authority().issue(party.key(3).public_key(), Role.MEMBER, f"m{number}", now=party.present())
        ders.append(certificate.public_bytes(serialization.Encoding.DER))
        # The runtime does this when it accepts an advertisement.
        house.runtime._key_of(ders[-1])
    digests = [hashlib.sha256(der).digest() for der in ders]
    asked = [digests[5], bytes(32), *digests[6:], digests[0]]
    async with stub_of(house) as stub:
        parts = [part async for part in stub.FetchCertificates(pb.FetchCertificatesRequest(digests=asked))]
        assert [len(part.certificates) for part in parts] == [
            CERTIFICATES_IN_A_PART,
            len(asked) - CERTIFICATES_IN_A_PART,
        ]
        got = [certificate for part in parts for certificate in part.certificates]
        assert got == [ders[5], b"", *ders[6:], ders[0]]
        too_many = pb.FetchCertificatesRequest(digests=[bytes(32)] * (CERTIFICATES_AT_ONCE + 1))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [part async for part in stub.FetchCertificates(too_many)]
    assert reason_of(refused.value)[0] == Reason.REASON_MESSAGE_MALFORMED
    assert str(CERTIFICATES_AT_ONCE) in refused.value.details()


@housed
async def test_jobs_are_looked_at_once_for_many_certificates(house):
    """There may be a thousand jobs, and a member may ask for 512 unknown certificates fifty times a second."""
    looks, state = [], vars(JobDriver)["state"]
    unknown = pb.FetchCertificatesRequest(digests=[bytes(32)] * CERTIFICATES_AT_ONCE)
    async with stub_of(house) as stub:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JobDriver, "state", property(lambda driver: (looks.append(driver), state.fget(driver))[1]))
            parts = [part async for part in stub.FetchCertificates(unknown)]
    assert len(looks) == len(parts) == CERTIFICATES_AT_ONCE // CERTIFICATES_IN_A_PART


def test_a_message_to_a_whole_cohort_is_encoded_once():
    encoder = SharedEncoder()
    entry = secure_agg.DigestAdvertisement("a", *(bytes(32) for _ in range(4)))
    one, other = AttemptId("questions", 1, 1), AttemptId("triage", 1, 1)
    roster = secure_agg.DigestRoster((entry,) * 3)
    first = encoder.encode(AttemptMessage(one, roster))
    assert encoder.encode(AttemptMessage(one, roster)) is first
    assert (first.kind, first.data) == (
        "digest_roster",
        wire.to_member(AttemptMessage(one, roster)).SerializeToString(),
    )
    # The same payload in another attempt, and an equal payload that is another object, are encoded again.
    moved = encoder.encode(AttemptMessage(other, roster)).data
    assert pb.CoordinatorMessage.FromString(moved).digest_roster.ref.job == "triage"
    again = secure_agg.DigestRoster((entry,) * 3)
    assert encoder.encode(AttemptMessage(one, again)) is not first
    assert encoder.encode(AttemptMessage(one, again)) == first
    # A message to a single member is not kept.
    dealings = AttemptMessage(one, secure_agg.ReceivedDealings(()))
    assert encoder.encode(dealings) is not encoder.encode(dealings)
    for number in range(20):
        encoder.encode(AttemptMessage(one, secure_agg.Survivors((f"m{number}",))))
    assert len(encoder._last) == 8


def mistaken(*_):
    raise RuntimeError("a mistake of ours")


async def closed(house) -> None:
    async with asyncio.timeout(20):
        while house.runtime.sessions.connected:
            await house.runtime.changed()


@housed
async def test_a_database_failure_ends_the_session_and_is_logged(house):
    with capture_logs() as logs:
        async with house.session(LedgerCounter(ONE, 5)) as stream:
            await stream.worked_out()
            assert "north" in house.runtime.sessions.connected
            house.database.close()
            await stream.say(ready(ONE, 6))
            await stream.until(Goodbye)
            await closed(house)
    assert house.metrics.value("members_connected") == 0
    (line,) = (line for line in logs if line["event"] == "storage_failed")
    assert (line["member"], line["log_level"]) == ("north", "error")
    assert "is closed" in line["detail"]
    house.database = open_database("sqlite://")


@housed
async def test_a_member_whose_session_cannot_be_stored_is_told_to_come_again(house):
    """A full disk lets the database read who calls, and not store what Hello says of the ledger."""
    event.listen(house.database._engine, "before_cursor_execute", _disk_full)
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as refused:
        async with house.session(LedgerCounter(ONE, 5)):
            pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(refused.value)[0] == Reason.REASON_INTERNAL
    assert "the disk is full" not in refused.value.details()
    (line,) = (line for line in logs if line["event"] == "storage_failed")
    assert line["member"] == "north"
    assert "the disk is full" in line["detail"]
    assert not house.runtime.sessions.connected


@housed
async def test_a_member_whose_blob_is_damaged_is_told_to_come_again(house):
    job = house.runtime.drivers["questions"].state.parameters.document
    path = Path(house.store._path(job))

    def becomes_shorter(*_):
        path.write_bytes(b"")

    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(Ranges, "read_cached", becomes_shorter)
        async with stub_of(house) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.FetchBlob(pb.FetchBlobRequest(digest=job)).read()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(refused.value)[0] == Reason.REASON_INTERNAL
    assert str(path.parent) not in refused.value.details()
    (line,) = (line for line in logs if line["event"] == "blob_corrupt")
    assert line["member"] == "north"
    assert str(path) in line["detail"]


@housed
async def test_only_a_version_that_may_be_pruned_is_said_to_be_gone(house):
    """Whoever hears that a blob of a job is not there declines the job until it restarts."""
    state = house.runtime.drivers["questions"].state
    job, earlier = state.parameters.document, house.store.put(b"an earlier version")
    house.runtime.fetchable.add(earlier)
    async with stub_of(house) as stub:
        for digest in (job, state.version, earlier):
            remove(house.store, digest)
            with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.FetchBlob(pb.FetchBlobRequest(digest=digest)).read()
            assert str(house.store.place) not in refused.value.details()
            lines = [line for line in logs if line["event"] == "storage_failed"]
            if digest == earlier:
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
                assert "is not kept any more" in refused.value.details()
                assert not lines
            else:
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert f"{house.store.place} has lost files" in lines[0]["detail"]
                assert digest.hex() in lines[0]["detail"]


def remove(store, digest):
    Path(store._path(digest)).unlink(missing_ok=True)


def _disk_full(_connection, _cursor, statement, *_):
    if statement.startswith("INSERT INTO ledger_counters"):
        raise DBAPIError(statement, None, OSError("the disk is full"))


@housed
async def test_a_bug_in_the_reader_ends_the_session_and_is_logged(house):
    with capture_logs() as logs:
        async with house.session(LedgerCounter(ONE, 5)) as stream:
            await stream.worked_out()
            # Simulate a bug of ours that a member triggers.
            house.metrics.budget_left = mistaken
            await stream.say(ready())
            await stream.until(Goodbye)
            await closed(house)
    (line,) = (line for line in logs if line["event"] == "message_failed")
    assert (line["member"], line["error"]) == ("north", "a mistake of ours")
    assert isinstance(line["exc_info"], RuntimeError)


@housed
async def test_a_ready_member_is_not_at_its_limit(house):
    spent = Decline("questions", 1, Reason.REASON_BUDGET_SPENT, "")

    def value(name):
        return house.metrics.value(name, job="questions")

    async with house.session() as stream:
        for message, left, epsilon in (
            (spent, 1, None),
            (ready(), 0, None),
            (spent, 1, None),
            (ready(epsilon=2.0), 0, 2.0),
        ):
            await stream.say(message)
            await stream.worked_out()
            assert value("members_budget_spent") == left
            assert epsilon is None or value("privacy_epsilon_largest") == epsilon
        # A job that is over is no longer counted, even after a restart, when the metrics do not know that it ended.
        await house.runtime.change_job("questions", "abort")
        assert house.runtime.drivers["questions"].state.status is JobStatus.ABORTED
        assert value("privacy_epsilon_largest") == 2.0
        house.metrics._over.clear()
        await stream.say(ready(epsilon=7.0))
        await stream.say(spent)
        await stream.worked_out()
        # Late messages about a job that is over change nothing.
        assert value("privacy_epsilon_largest") == 2.0
        assert value("members_budget_spent") == 0


def test_what_was_dealt_to_each_of_a_cohort_is_encoded_in_turn():
    """A thousand such messages at once would be hundreds of megabytes."""
    share = secure_agg.DealtShare("m0", bytes(1168), bytes(82), *(bytes(32),) * 3, bytes(1168), bytes(32))
    dealings = secure_agg.ReceivedDealings((secure_agg.ReceivedDealing("m1", share, bytes(32), (), bytes(384)),) * 50)
    message = AttemptMessage(AttemptId("questions", 1, 1), dealings)
    held, most = set(), []

    def made(*_):
        # Called once for each message that is encoded.
        held.add(asyncio.current_task())
        most.append(len(held))

    class Slow:
        async def write(self, data):
            await asyncio.sleep(0)
            held.remove(asyncio.current_task())

    async def all_at_once():
        sessions = MemberSessions.__new__(MemberSessions)
        sessions._encoder, sessions._sending = SharedEncoder(), Turns(2, 60.0)
        sessions._metrics = SimpleNamespace(message=made)  # type: ignore[assignment]
        sessions._running = SimpleNamespace(sessions=SimpleNamespace(may_speak=lambda: True))
        await asyncio.gather(*(sessions._send(Slow(), message) for _ in range(20)))

    asyncio.run(all_at_once())
    assert max(most) == 2


@housed
async def test_the_certificate_of_an_advertisement_is_looked_up_in_the_roster_log(house):
    """A member may show any certificate that the authority signed, and so also one that is not in the log."""
    signer = lambda: (party.key(1), b"")  # noqa: E731
    acts = house.runtime.acts
    from_now = RosterLog(house.database, federation_of(house.root), signer, acts=acts, trust=lambda: None)
    house.runtime.roster = from_now
    seen, driver = [], house.runtime.drivers["questions"]
    post = driver.post

    def noted(event, done=lambda: None):
        if isinstance(event, ev.Answered):
            seen.append(event.entry)
        post(event, done)

    driver.post = noted
    own = house.certificate.public_bytes(serialization.Encoding.DER)
    async with house.session() as stream:
        for certificate in (own, b"a certificate of another authority's", own):
            keys = secure_agg.Advertisement("north", certificate, b"k" * 2432, b"n" * 32, b"s")
            await stream.say(AttemptMessage(AttemptId("questions", 1, 1), keys))
        await stream.worked_out()
    assert seen == [1, None, 1]
