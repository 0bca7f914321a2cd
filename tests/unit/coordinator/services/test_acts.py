"""Acts whose caller goes away while the database works, and commits whose answer was lost: what becomes of them."""

import asyncio
import contextlib
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from sqlalchemy import event
from structlog.testing import capture_logs

from coordinator.authority import Anchors, AuthorityBook
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.pki import key_pem, pem
from coordinator.rounds.driver import JobDriver
from coordinator.rounds.events import Answered, Cosigned
from coordinator.rounds.state import Aggregating
from coordinator.runtime import Runtime
from coordinator.services import operators
from coordinator.services.acts import Acts
from coordinator.services.renewal import Renewals
from coordinator.services.sessions import MemberSession
from coordinator.storage import open_blobs, records
from coordinator.storage.errors import DatabaseUnusable
from coordinator.storage.members import record_certificate, spend_token
from edge_client.withdrawal.folder import WithdrawalFolder
from tacit import wire
from tacit.attempt import AttemptId
from tacit.identity import Role
from tacit.messages import Goodbye, Hello, JobEnded
from tacit.protocol import PROTOCOL_VERSION
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.token import secret_hash
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import operator_pb2, operator_pb2_grpc
from tests.support import party
from tests.support.databases import empty_database
from tests.support.housed import housed
from tests.support.stored_job import make_job

PATIENCE = 20


class Stall:
    """Holds the database's writer inside a function of the storage, once, before the function does anything."""

    def __init__(self, monkeypatch, module, name):
        self._entered, self._go_on = asyncio.Event(), threading.Event()
        loop, real = asyncio.get_running_loop(), getattr(module, name)

        def stalled(*how, **more):
            loop.call_soon_threadsafe(self._entered.set)
            assert self._go_on.wait(PATIENCE)
            return real(*how, **more)

        monkeypatch.setattr(module, name, stalled)

    async def entered(self):
        await asyncio.wait_for(self._entered.wait(), PATIENCE)

    def end(self):
        self._go_on.set()


async def until(condition):
    """Waits for something that the event loop brings about."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  the code under test tells nobody of it
            await asyncio.sleep(0)


async def until_stored(house, condition):
    async with asyncio.timeout(PATIENCE):
        while not await house.database.run(condition):
            pass


@contextlib.asynccontextmanager
async def operating(house):
    """An administrator's stub, and a function that says how many of its calls the server has under way."""
    certificate = party.operator_on_record(house.database)
    credentials = grpc.ssl_channel_credentials(
        pem(party.authority().certificate), key_pem(party.key(3)), pem(certificate)
    )
    fingerprint = certificate.fingerprint(hashes.SHA256())
    async with grpc.aio.secure_channel(house.address, credentials) as channel:
        yield operator_pb2_grpc.OperatorServiceStub(channel), lambda: operators.calls.count(fingerprint)


async def given_up(call, stall, under_way):
    """Does what Ctrl-C or a deadline does while the database works: the client goes, then the database goes on."""
    await stall.entered()
    call.cancel()
    await until(lambda: not under_way())
    stall.end()


async def with_a_job(house, name="desk"):
    runtime = house.serving.runtime
    document = make_job(name, runtime.store)
    await runtime.create_job(document.digest(), document)


@contextlib.asynccontextmanager
async def session(house, identity):
    """A member's open session. Yields a function that returns the next message of a kind."""
    async with house.stub(identity) as stub:
        call = stub.Session()
        await call.write(wire.to_coordinator(Hello(PROTOCOL_VERSION, "0.1.0", b"p" * 16, ("*",))))
        await until(lambda: identity.member in house.serving.runtime.sessions.connected)

        async def heard(kind):
            async with asyncio.timeout(PATIENCE):
                while (read := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    if isinstance(message := wire.from_coordinator(read), kind):
                        return message
            raise AssertionError(f"the stream ended without {kind.__name__}")

        yield heard


# ---- an act whose caller goes away


def test_a_job_whose_creator_goes_away_is_driven(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, under_way):
            runtime = house.serving.runtime
            digest = make_job("desk", runtime.store).digest()
            # The upkeep heals what was lost, and shall not be what helps here.
            monkeypatch.setattr(type(runtime), "catch_up", _nothing, raising=False)
            stall = Stall(monkeypatch, records, "create_job")
            await given_up(stub.CreateJob(operator_pb2.CreateJobRequest(document=digest)), stall, under_way)
            await until_stored(house, lambda s: "desk" in {job.name for job in records.load_jobs(s)})
            await until(lambda: "desk" in runtime.drivers)
            abort = operator_pb2.ChangeJobRequest(name="desk", change=operator_pb2.JOB_CHANGE_ABORT)
            assert (await stub.ChangeJob(abort)).status == operator_pb2.JOB_STATUS_ABORTED

    asyncio.run(run())


async def _nothing(self):
    """Nothing."""


def test_a_member_whose_revoker_goes_away_is_disconnected(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, under_way):
            monkeypatch.setattr(type(house.serving.runtime), "catch_up", _nothing, raising=False)
            async with session(house, await house.enrol("north", 2, monkeypatch)) as heard:
                stall = Stall(monkeypatch, records, "revoke_member")
                await given_up(stub.RevokeMember(operator_pb2.RevokeMemberRequest(name="north")), stall, under_way)
                assert (await heard(Goodbye)).reason == Reason.REASON_CLIENT_CERTIFICATE_REVOKED

    asyncio.run(run())


@pytest.mark.parametrize("who", ["operator", "member"])
def test_a_withdrawal_whose_caller_goes_away_reaches_the_jobs_and_the_texts(tmp_path, monkeypatch, who):
    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, operators_calls):
            runtime, taken = house.serving.runtime, asyncio.Event()
            monkeypatch.setattr(type(runtime), "catch_up", _nothing, raising=False)

            async def taken_back(_files):
                taken.set()

            monkeypatch.setattr(runtime.corpora, "taken_back", taken_back)
            north = await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            async with session(house, north) as heard, house.stub(north) as own:
                stall = Stall(monkeypatch, records, "withdraw")
                if who == "operator":
                    asked = partial(stub.WithdrawMember, operator_pb2.WithdrawMemberRequest(name="north"))
                    under_way = operators_calls
                else:
                    kept = WithdrawalFolder(north.home, north.federation, north.member).ask(north, None)
                    signature = bytes.fromhex(kept.signature)
                    request = pb.WithdrawRequest(statement=kept.request.canonical(), signature=signature)
                    asked, under_way = partial(own.Withdraw, request), partial(runtime.calls.count, "north")
                await given_up(asked(), stall, under_way)
                assert (await heard(JobEnded)).reason == Reason.REASON_MEMBER_WITHDREW
                await asyncio.wait_for(taken.wait(), PATIENCE)
                # A repeat has its turn, and is answered.
                await asyncio.wait_for(asked(), PATIENCE)

    asyncio.run(run())


def test_an_evaluation_whose_recorder_goes_away_is_exported(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, under_way):
            await with_a_job(house)
            stall = Stall(monkeypatch, records, "record_evaluation")
            measured = operator_pb2.Evaluation(version_number=0, accuracy=0.75, loss=0.5, examples=4)
            call = stub.RecordEvaluation(operator_pb2.RecordEvaluationRequest(job="desk", evaluation=measured))
            await given_up(call, stall, under_way)
            metrics = house.serving.metrics
            await until(lambda: metrics.value("evaluation_accuracy", job="desk") == 0.75)

    asyncio.run(run())


def test_a_change_whose_operator_goes_away_is_carried_out(tmp_path, monkeypatch):
    """The journal has the act by then."""

    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, under_way):
            await with_a_job(house)
            stall = Stall(monkeypatch, records, "note")
            pause = operator_pb2.ChangeJobRequest(name="desk", change=operator_pb2.JOB_CHANGE_PAUSE)
            await given_up(stub.ChangeJob(pause), stall, under_way)
            driver = house.serving.runtime.drivers["desk"]
            await until(lambda: driver.state.status is JobStatus.PAUSED)

    asyncio.run(run())


def test_an_invitation_whose_operator_goes_away_is_shown_to_others(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, under_way):
            watching = stub.Watch(operator_pb2.StatusRequest())
            assert not (await watching.read()).members
            stall = Stall(monkeypatch, records, "invite")
            call = stub.InviteMember(operator_pb2.InviteMemberRequest(name="north"))
            await stall.entered()
            call.cancel()
            # Watch is under way, too.
            await until(lambda: under_way() == 1)
            stall.end()
            shown = await asyncio.wait_for(watching.read(), PATIENCE)
            assert [member.name for member in shown.members] == ["north"]

    asyncio.run(run())


def test_a_renewal_whose_member_goes_away_is_logged_and_counted(tmp_path, monkeypatch):
    """Who uses a stolen key leaves a line in the log, however quickly it is gone."""

    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north, counted = await house.enrol("north", 2, monkeypatch), []
            renewals = Renewals(
                Anchors(AuthorityBook.of(party.authority())),
                house.database,
                acts=house.serving.runtime.acts,
                member_lifetime=timedelta(days=14),
                clock=lambda: datetime.now(UTC) + timedelta(days=10),
                count=counted.append,
            )
            stall = Stall(monkeypatch, records, "keep_next")
            name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "north")])
            signed = x509.CertificateSigningRequestBuilder().subject_name(name).sign(party.key(2), hashes.SHA256())
            request = signed.public_bytes(serialization.Encoding.DER)
            caller = north.trust.verify(north.certificate, role=Role.MEMBER, now=datetime.now(UTC))
            with capture_logs() as logs:
                call = asyncio.create_task(renewals.renew(caller, request, "0.1.0"))
                await stall.entered()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                # Another request of this member waits for the one before.
                again = asyncio.create_task(renewals.renew(caller, request, "0.1.0"))
                stall.end()
                served = await asyncio.wait_for(again, PATIENCE)
            assert [line["member"] for line in logs if line["event"] == "member_renewed"] == ["north"]
            assert counted == ["granted", "granted"]
            assert served[0] == (await house.database.run(lambda s: records.served(s, "north"))).certificate

    asyncio.run(run())


def test_jobs_hear_of_a_revocation_although_the_roster_log_cannot_be_read(tmp_path, monkeypatch):
    """The act then fails, and no attempt waits for the revoked member's answer."""

    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, _):
            await house.enrol("north", 2, monkeypatch)
            await with_a_job(house)
            driver, heard = house.serving.runtime.drivers["desk"], []
            # Its first event is over.
            await driver.carry_out(Cosigned())
            phase = Aggregating(AttemptId("desk", 1, 1), ("north",), None, 0, {})
            driver._state = replace(driver.state, phase=phase)
            monkeypatch.setattr(driver, "post", heard.append)

            async def away(max_age=0.0):
                raise DatabaseUnusable("the database is away")

            monkeypatch.setattr(house.serving.runtime.roster, "refresh", away)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.RevokeMember(operator_pb2.RevokeMemberRequest(name="north"))
            assert reason_of(failed.value)[0] == Reason.REASON_INTERNAL
            (told,) = [each for each in heard if isinstance(each, Answered)]
            assert (told.member, told.message.payload.reason) == ("north", Reason.REASON_CLIENT_CERTIFICATE_REVOKED)

    asyncio.run(run())


def test_an_operator_hears_that_an_abort_failed(tmp_path, monkeypatch):
    """The job is paused then. `member withdraw --restart` would otherwise start its successor beside it."""

    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, _):
            await with_a_job(house)
            real, failures = records.set_job_status, [DatabaseUnusable("the disk is full")]

            def full_once(*how):
                if failures:
                    raise failures.pop()
                return real(*how)

            monkeypatch.setattr(records, "set_job_status", full_once)
            abort = operator_pb2.ChangeJobRequest(name="desk", change=operator_pb2.JOB_CHANGE_ABORT)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.ChangeJob(abort)
            reason, sentence = reason_of(failed.value)
            assert reason == Reason.REASON_INTERNAL
            assert "could not abort job desk, which is paused now: the disk is full" in sentence
            assert (await stub.ChangeJob(abort)).status == operator_pb2.JOB_STATUS_ABORTED

    asyncio.run(run())


# ---- a stopping coordinator


def test_a_stopping_coordinator_waits_for_what_was_begun(tmp_path, monkeypatch):
    """Its drivers end last: a change of a job needs one."""

    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, under_way):
            await with_a_job(house)
            stall = Stall(monkeypatch, records, "note")
            pause = operator_pb2.ChangeJobRequest(name="desk", change=operator_pb2.JOB_CHANGE_PAUSE)
            call = stub.ChangeJob(pause)
            await stall.entered()
            call.cancel()
            await until(lambda: not under_way())
            stopping = asyncio.create_task(house.serving.runtime.stop())
            # It has begun to wait.
            await asyncio.sleep(0)
            stall.end()
            await asyncio.wait_for(stopping, PATIENCE)
            stored = await house.database.run(lambda s: records.load_job(s, "desk"))
            assert stored.status is JobStatus.PAUSED

    asyncio.run(run())


def test_an_act_without_an_end_is_given_up_and_named():
    async def run():
        acts, begun, ended = Acts(), asyncio.Event(), []

        async def endless():
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        caller = asyncio.create_task(acts.run(endless(), "RevokeMember", member="north"))
        await begun.wait()
        caller.cancel()
        with capture_logs() as logs:
            await asyncio.wait_for(acts.end(0.01), PATIENCE)
        assert ended == [True]
        assert [(line["event"], line["acts"]) for line in logs] == [("acts_given_up", ["RevokeMember"])]
        # Nothing is under way any more.
        await asyncio.wait_for(acts.end(60), PATIENCE)

    asyncio.run(run())


def test_the_log_hears_of_a_failure_that_no_caller_hears_of():
    async def run():
        acts, go_on = Acts(), asyncio.Event()

        async def fails():
            await go_on.wait()
            raise DatabaseUnusable("the database is away")

        with capture_logs() as logs:
            here = asyncio.create_task(acts.run(fails(), "RevokeMember", member="north"))
            gone = asyncio.create_task(acts.run(fails(), "InviteMember", operator="op"))
            await asyncio.sleep(0)
            gone.cancel()
            acts.begin(fails(), "sweep")
            go_on.set()
            with pytest.raises(DatabaseUnusable):
                await here
            await acts.end()
        assert sorted((line["act"], line["error"], line.get("operator")) for line in logs) == [
            ("InviteMember", "the database is away", "op"),
            ("sweep", "the database is away", None),
        ]

    asyncio.run(run())


# ---- a commit whose answer was lost, as the database has it


@pytest.mark.parametrize(("raised", "lines"), [(ValueError("an unsuitable key"), 0), (KeyError("a bug"), 1)])
def test_a_refusal_that_no_caller_hears_of_is_no_failure(raised, lines):
    async def scenario():
        acts, go_on = Acts(), asyncio.Event()

        async def act():
            await go_on.wait()
            raise raised

        with capture_logs() as logs:
            call = asyncio.create_task(acts.run(act(), "Renew", refusals=ValueError, member="north"))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            go_on.set()
            await acts.end()
        assert len([line for line in logs if line["event"] == "act_failed"]) == lines

    asyncio.run(scenario())


def test_a_stored_job_without_a_driver_is_started(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, _):
            runtime = house.serving.runtime
            store_job(house, "desk")
            await until(lambda: "desk" in runtime.drivers)
            pause = operator_pb2.ChangeJobRequest(name="desk", change=operator_pb2.JOB_CHANGE_PAUSE)
            assert (await stub.ChangeJob(pause)).status == operator_pb2.JOB_STATUS_PAUSED

    asyncio.run(run())


def store_job(house, name, *, without=False):
    """Stores a job as `CreateJob` does whose answer from the database is lost. Returns its document, without it in the
    store if `without`."""
    store = house.serving.runtime.store
    document = make_job(name, store)
    if without:
        store.remove(document.digest())
    house.database.run_now(
        lambda s: records.create_job(
            s, name=name, document=document.digest(), rounds_total=1, version=document.weights, now_ms=1
        )
    )
    return document.canonical()


def test_a_job_that_could_not_be_started_is_started_once_that_works(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house, operating(house) as (stub, _):
            runtime = house.serving.runtime
            digest, real = make_job("desk", runtime.store).digest(), records.left_out

            def away(*_):
                monkeypatch.setattr(records, "left_out", real)
                raise DatabaseUnusable("the database is away")

            monkeypatch.setattr(records, "left_out", away)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.CreateJob(operator_pb2.CreateJobRequest(document=digest))
            assert reason_of(refused.value)[0] == Reason.REASON_INTERNAL
            await until(lambda: "desk" in runtime.drivers)

    asyncio.run(run())


def test_a_job_that_cannot_be_started_keeps_no_other_one_waiting(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            runtime = house.serving.runtime
            with capture_logs() as logs:
                document = store_job(house, "broken", without=True)
                store_job(house, "whole")
                await until(lambda: "whole" in runtime.drivers)
                await until(lambda: any(line["event"] == "upkeep_failed" for line in logs))
            assert "broken" not in runtime.drivers
            runtime.store.put(document)
            await until(lambda: "broken" in runtime.drivers)

    asyncio.run(run())


def test_a_driver_is_never_started_twice(tmp_path, monkeypatch):
    """The upkeep finds a job that is just being created."""

    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            runtime, started = house.serving.runtime, []
            real = JobDriver.start
            monkeypatch.setattr(JobDriver, "start", lambda driver: (started.append(driver), real(driver)))
            document = make_job("desk", runtime.store)
            creating = asyncio.create_task(runtime.create_job(document.digest(), document))
            while not creating.done():
                await runtime.catch_up()
            await runtime.catch_up()
            assert len(started) == 1
            assert runtime.drivers == {"desk": started[0]}

    asyncio.run(run())


def test_a_connected_member_that_is_no_longer_enrolled_is_disconnected(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            identities = [await house.enrol(name, key, monkeypatch) for name, key in (("north", 2), ("south", 4))]
            north, south = identities
            async with session(house, north) as heard, session(house, south):
                # As `coordinator member import-log` does beside the server.
                await house.database.run(lambda s: records.revoke_member(s, "north", now_ms()))
                assert (await heard(Goodbye)).reason == Reason.REASON_CLIENT_CERTIFICATE_REVOKED
                assert list(house.serving.runtime.sessions.connected) == ["south"]

    asyncio.run(run())


def now_ms():
    return int(datetime.now(UTC).timestamp() * 1000)


def test_a_call_of_a_member_that_is_no_longer_enrolled_is_ended(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north = await house.enrol("north", 2, monkeypatch)
            async with house.stub(north) as stub:
                call = stub.UploadMasked()
                await until(lambda: house.serving.runtime.calls.count("north"))
                await house.database.run(lambda s: records.revoke_member(s, "north", now_ms()))
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await asyncio.wait_for(call, PATIENCE)
                assert reason_of(ended.value)[0] == Reason.REASON_CLIENT_CERTIFICATE_REVOKED

    asyncio.run(run())


def test_a_member_that_was_revoked_and_enrolled_again_stays_connected(tmp_path, monkeypatch):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north, runtime = await house.enrol("north", 2, monkeypatch), house.serving.runtime
            async with session(house, north) as heard:

                def again(s):
                    records.revoke_member(s, "north", now_ms())
                    records.invite(s, "north", "t2", secret_hash(b"s" * 32), now_ms() + 60_000, now_ms())
                    now = datetime.now(UTC)
                    spend_token(s, "t2", secret_hash(b"s" * 32), b"k" * 32, now)
                    later = now + timedelta(days=1)
                    record_certificate(s, "t2", "north", (north.certificate,), later, "0.1.0", now)

                await house.database.run(again)
                await runtime.catch_up()
                assert list(runtime.sessions.connected) == ["north"]
                await house.database.run(lambda s: records.revoke_member(s, "north", now_ms()))
                assert (await heard(Goodbye)).reason == Reason.REASON_CLIENT_CERTIFICATE_REVOKED

    asyncio.run(run())


@pytest.mark.parametrize("away_once", [False, True])
def test_a_stored_withdrawal_reaches_the_jobs(tmp_path, monkeypatch, away_once):
    async def run():
        async with housed(tmp_path, monkeypatch) as house:
            north, real = await house.enrol("north", 2, monkeypatch), records.left_by
            await with_a_job(house)

            def away(*_):
                monkeypatch.setattr(records, "left_by", real)
                raise DatabaseUnusable("the database is away")

            if away_once:
                monkeypatch.setattr(records, "left_by", away)
            async with session(house, north) as heard:
                await house.database.run(lambda s: records.withdraw(s, "north", None, now_ms()))
                assert (await heard(JobEnded)).reason == Reason.REASON_MEMBER_WITHDREW

    asyncio.run(run())


def _appends_to(statements):
    def executed(_connection, _cursor, statement, *_):
        if not statement.startswith("BEGIN"):
            statements.append(statement)

    return executed


def test_what_was_missed_is_found_without_a_query_for_each_member(tmp_path):
    async def run():
        database, statements = empty_database(tmp_path), []
        runtime = Runtime(database, open_blobs(str(tmp_path / "store")), Metrics("test"), party.authority().certificate)
        names = [f"member-{number}" for number in range(50)]

        def invited(s):
            for name in names:
                records.invite(s, name, f"t-{name}", secret_hash(name.encode()), 2, 1)

        # What was before the start asks for nothing.
        await database.run(lambda s: records.invite(s, "early", "t", secret_hash(b"early"), 2, 1))
        await runtime.start()
        await runtime.acts.end()
        for name in names:
            runtime.sessions.open(MemberSession(name, b"p" * 16, "0.1.0", ()))
        event.listen(database._engine, "before_cursor_execute", _appends_to(statements))
        await runtime.catch_up()
        assert (len(statements), len(runtime.sessions.connected)) == (1, 50)
        # Invited anew, so no longer enrolled.
        await database.run(invited)
        statements.clear()
        await runtime.catch_up()
        assert len(statements) < 6
        assert not runtime.sessions.connected
        statements.clear()
        await runtime.catch_up()
        assert len(statements) == 1
        await runtime.stop()
        database.close()

    asyncio.run(run())
