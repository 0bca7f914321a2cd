"""When something of ours fails, the driver pauses the job, says so, and keeps taking events."""

import asyncio
import errno
import hashlib
import threading

import numpy as np
import pytest

import secure_agg
from coordinator.domain.jobs import Exploded, JobStatus, Norms
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.rounds.driver import JobDriver, Ports, state_of
from coordinator.rounds.state import Aggregating, Parameters
from coordinator.rounds.uploads import UploadDesk
from coordinator.services.sessions import MemberSession, Sessions
from coordinator.storage import open_blobs, records
from tacit.attempt import AttemptId
from tacit.messages import Assignment, AttemptMessage, AttemptOpened, JobEnded, Standby
from tacit.reason import Reason
from tests.support.databases import empty_database
from tests.support.fleet import job_document
from tests.support.sum_fleet import FEDERATION, SeededRandom, TestIdentity, key_of, verify


class Sent(list):
    """Records what members were sent, and waits for it."""

    def __init__(self):
        super().__init__()
        self.arrived = asyncio.Event()

    def send(self, member, message):
        self.append((member, message))
        self.arrived.set()

    async def until(self, holds):
        async with asyncio.timeout(20):
            while not holds():
                self.arrived.clear()
                await self.arrived.wait()


class Unreliable:
    """A database of which some of the next transactions fail."""

    def __init__(self, real):
        self.real = real
        # Whether each of the next ones fails.
        self.next = []

    async def run(self, work):
        if self.next and self.next.pop(0):
            raise OSError(errno.ENOSPC, "no space left")
        return await self.real.run(work)


async def started(tmp_path, verify=verify):
    job = job_document()
    database = Unreliable(empty_database(tmp_path))
    stored = await database.run(
        lambda session: records.create_job(
            session, name=job.name, document=job.digest(), rounds_total=3, version=job.weights, now_ms=1
        )
    )
    sent = Sent()
    store = open_blobs(str(tmp_path / "store"))
    ports = Ports(database, store, sent, Metrics("test"), UploadDesk(), lambda: None, lambda digest: None)
    driver = JobDriver(state_of(stored, Parameters(job, job.digest(), FEDERATION, verify, key_of)), ports)
    driver.start()
    for name in ("m0", "m1", "m2"):
        await driver.carry_out(ev.Connected(name, b"process" + name.encode()))
    return driver, database, sent


def ready(driver, *names):
    for name in names:
        driver.post(ev.SaidReady(name, driver.state.round, driver.state.version))


def opened(sent):
    return [each for each in sent if isinstance(getattr(each[1], "payload", None), AttemptOpened)]


def test_a_failing_database_pauses_the_job_until_it_is_resumed(tmp_path):
    async def run():
        driver, database, sent = await started(tmp_path)
        # One failure for storing the attempt, and two for storing the pause.
        database.next = [True] * 3
        ready(driver, "m0", "m1", "m2")
        await sent.until(lambda: any(isinstance(message, JobEnded) for _, message in sent))
        assert not opened(sent), "nobody may hear of an attempt that is not on the disk"
        stored = await database.run(lambda session: records.load_job(session, "questions"))
        assert (stored.status, stored.reason) == (JobStatus.PAUSED, "internal")
        assert driver.state.status is JobStatus.PAUSED
        await driver.carry_out(ev.Resume())
        ready(driver, "m0", "m1", "m2")
        await sent.until(lambda: len(opened(sent)) == 3)
        await driver.stop()
        database.real.close()

    asyncio.run(run())


def test_a_failure_of_a_job_that_is_over_is_no_pause_whatever_fails_on_the_way(tmp_path):
    async def run():
        driver, database, sent = await started(tmp_path)
        await database.run(
            lambda session: records.set_job_status(session, "questions", JobStatus.ABORTED, "job_aborted", 2)
        )
        # The attempt cannot be stored. The pause is refused, and then the job cannot be read, twice.
        database.next = [True, False, True, True]
        ready(driver, "m0", "m1", "m2")
        await sent.until(lambda: any(isinstance(message, JobEnded) for _, message in sent))
        # The next event is taken: the driver's task has not ended.
        async with asyncio.timeout(20):
            await driver.carry_out(ev.Disconnected("m0"))
        assert database.next == []
        assert driver.state.status is JobStatus.ABORTED
        await driver.stop()
        database.real.close()

    asyncio.run(run())


def test_a_member_that_left_stays_out_although_the_database_failed_at_that_moment(tmp_path):
    """The other members are ready, so the attempt opens when it leaves. That cannot be stored, and the job pauses."""

    async def run():
        driver, database, sent = await started(tmp_path)
        for name in ("m3", "m4"):
            await driver.carry_out(ev.Connected(name, b"process" + name.encode()))
        ready(driver, "m0", "m1", "m2", "m3")
        database.next = [True]
        with pytest.raises(OSError, match="no space left"):
            await driver.carry_out(ev.Left("m4"))
        assert driver.state.status is JobStatus.PAUSED
        sent.clear()
        await driver.carry_out(ev.Resume())
        assert [name for name, message in sent if isinstance(message, Assignment)] == ["m0", "m1", "m2", "m3"]
        await driver.stop()
        database.real.close()

    asyncio.run(run())


def test_whoever_asked_for_a_change_hears_that_it_failed(tmp_path):
    async def run():
        driver, database, _ = await started(tmp_path)
        database.next = [True]
        with pytest.raises(OSError, match="no space left"):
            await driver.carry_out(ev.Abort())
        assert driver.state.status is JobStatus.PAUSED
        await driver.carry_out(ev.Abort())
        assert driver.state.status is JobStatus.ABORTED
        await driver.stop()
        database.real.close()

    asyncio.run(run())


def test_a_message_that_breaks_our_code_costs_only_its_sender(tmp_path):
    async def run():
        driver, database, sent = await started(tmp_path)
        ready(driver, "m0", "m1", "m2")
        await sent.until(lambda: len(opened(sent)) == 3)
        attempt = opened(sent)[0][1].attempt
        # No protobuf message is like this. It stands for a bug of ours that somebody finds.
        await driver.carry_out(ev.Answered("m1", AttemptMessage(attempt, BreaksWhatLooksAtIt())))
        assert driver.state.status is JobStatus.RUNNING
        assert driver.state.members["m1"].faults == 1
        await driver.stop()
        database.real.close()

    asyncio.run(run())


class Slow:
    """A `verify` that blocks until it is released."""

    def __init__(self):
        self.asked, self.go = threading.Event(), threading.Event()
        self.members = []

    def verify(self, certificate, message, signature):
        self.asked.set()
        assert self.go.wait(20)
        member = verify(certificate, message, signature)
        self.members.append(member)
        return member


async def advertising(tmp_path, slow):
    """A driver that waits for three advertisements, and the advertisements."""
    driver, database, sent = await started(tmp_path, slow.verify)
    ready(driver, "m0", "m1", "m2")
    await sent.until(lambda: len(opened(sent)) == 3)
    said = {}
    for name, message in opened(sent):
        _, payload = secure_agg.advertise(message.payload.context, TestIdentity(name), verify, SeededRandom(name))
        said[name] = ev.Answered(name, AttemptMessage(message.attempt, payload))
    return driver, database, sent, said


def test_other_jobs_and_the_operator_get_answers_during_signature_checks(tmp_path):
    async def run():
        slow = Slow()
        driver, database, sent, said = await advertising(tmp_path / "one", slow)
        beside, other_database, _ = await started(tmp_path / "other")
        before = driver.state
        for name in ("m2", "m0", "m1"):
            driver.post(said[name])
        assert await asyncio.to_thread(slow.asked.wait, 20)
        # The loop is free: another job handles an event, and this one tells its state.
        await beside.carry_out(ev.Connected("m9", b"process m9"))
        assert "m9" in beside.state.members
        assert driver.state is before
        assert (driver.live().phase, driver.live().answered) == ("advertise", 0)
        slow.go.set()
        rosters = lambda: [each for each in sent if isinstance(getattr(each[1], "payload", None), secure_agg.Roster)]  # noqa: E731
        await sent.until(lambda: len(rosters()) == 3)
        assert slow.members == ["m2", "m0", "m1"], "events are handled in the order in which they came"
        for each, closed in ((driver, database), (beside, other_database)):
            await each.stop()
            closed.real.close()

    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    asyncio.run(run())


def test_a_driver_stopped_during_signature_checks_ignores_their_result(tmp_path):
    async def run():
        slow = Slow()
        driver, database, sent, said = await advertising(tmp_path, slow)
        before, heard = driver.state, len(sent)
        driver.post(said["m0"])
        assert await asyncio.to_thread(slow.asked.wait, 20)
        async with asyncio.timeout(20):
            await driver.stop()
        slow.go.set()
        # The thread has ended, and nobody uses its result.
        async with asyncio.timeout(20):
            await asyncio.get_running_loop().shutdown_default_executor()
        assert slow.members == ["m0"]
        assert driver.state is before
        assert len(sent) == heard
        database.real.close()

    asyncio.run(run())


def test_events_worked_out_ahead_of_a_failure_are_worked_out_again(tmp_path):
    """Four events come in one go. The second needs a transaction that fails, so the job pauses.

    What the others would have done in the attempt that never opened does not happen. What they say of members counts.
    """

    async def run():
        driver, database, sent = await started(tmp_path)
        ready(driver, "m0")
        await driver.carry_out(ev.Connected("m0", b"processm0"))
        database.next = [True]
        for event in (
            ev.SaidReady("m1", 1, driver.state.version),
            ev.SaidReady("m2", 1, driver.state.version),
            ev.Disconnected("m0"),
        ):
            driver.post(event)
        await driver.carry_out(ev.Connected("m3", b"processm3"))
        assert driver.state.status is JobStatus.PAUSED
        assert not isinstance(driver.state.phase, Aggregating)
        assert not opened(sent)
        assert not driver.state.members["m0"].connected
        assert driver.state.members["m3"].connected
        assert any(name == "m3" and isinstance(message, JobEnded) for name, message in sent)
        await driver.stop()
        database.real.close()

    asyncio.run(run())


class BreaksWhatLooksAtIt:
    """Raises on every comparison."""

    def __eq__(self, other):
        raise RuntimeError("a bug of ours")

    __hash__ = None


def test_a_disk_that_fills_up_within_a_chunk_leaves_the_spool_unchanged():
    async def run():
        attempt, values = AttemptId("questions", 1, 1), 1000
        data = np.arange(values, dtype="<u4").tobytes()
        message = secure_agg.MaskedInput("a", hashlib.sha256(data).digest(), values, b"")
        desk = UploadDesk()
        desk.open(attempt, frozenset("a"), values, 32)

        class Judge:
            def uploaded(self, member, attempt, message, digest):
                assert digest == message.digest
                self.task = asyncio.ensure_future(desk.accept(attempt, member))

        class Full:
            def __init__(self, real):
                self.real = real

            def write(self, chunk):
                if len(chunk) < 200:
                    raise OSError(errno.ENOSPC, "no space left")
                return self.real.write(chunk[:100])

            def __getattr__(self, name):
                return getattr(self.real, name)

        async def breaking():
            yield data[:256]
            spool = desk._desks[attempt].spools["a"]
            spool.file = Full(spool.file)  # type: ignore[assignment]
            yield data[256:512]

        async def rest(start):
            yield data[start:]

        judge = Judge()
        receipt = await desk.take(attempt, "a", 0, message, breaking(), judge)
        assert (receipt.complete, receipt.received) == (False, 256)
        spool = desk._desks[attempt].spools["a"]
        spool.file = spool.file.real  # type: ignore[attr-defined]
        receipt = await desk.take(attempt, "a", 256, message, rest(256), judge)
        assert receipt.complete
        assert desk.total(attempt).tobytes() == data

    asyncio.run(run())


def test_an_ended_session_does_not_count_even_if_its_goodbye_is_unread():
    async def run():
        seen = []
        sessions = Sessions(lambda session: seen.append("opened"), lambda session: seen.append("closed"))
        session = MemberSession("m", b"process", "1", ())
        sessions.open(session)
        sessions.end("m", Reason.REASON_CLIENT_CERTIFICATE_REVOKED)
        assert seen == ["opened", "closed"]
        assert not sessions.connected
        sessions.close(session)
        assert seen == ["opened", "closed"]
        silent = MemberSession("n", b"process", "1", ())
        sessions.open(silent)
        for _ in range(1001):
            sessions.send("n", Standby())
        assert "n" not in sessions.connected
        assert silent.goodbye is not None

    asyncio.run(run())


def test_a_newer_session_of_a_member_replaces_the_older_one_in_order():
    async def run():
        seen = []
        sessions = Sessions(
            lambda session: seen.append(("opened", session.process)),
            lambda session: seen.append(("closed", session.process)),
        )
        first, second = MemberSession("m", b"1", "1", ()), MemberSession("m", b"2", "1", ())
        sessions.open(first)
        sessions.open(second)
        sessions.close(first)
        assert seen == [("opened", b"1"), ("closed", b"1"), ("opened", b"2")]
        assert first.goodbye.reason == Reason.REASON_SESSION_REPLACED

    asyncio.run(run())


def test_a_job_loaded_again_awaits_its_last_cohort(tmp_path):
    job = job_document()

    async def again():
        driver, database, _ = await started(tmp_path)
        await driver.stop()
        await database.run(lambda session: records.open_attempt(session, job.name, 1, 1, ["m0", "m2"], 2))
        stored = await database.run(lambda session: records.load_job(session, job.name))
        return state_of(stored, driver.state.parameters)

    assert asyncio.run(again()).awaited == {"m0", "m2"}


def test_a_job_loaded_again_knows_norms_and_the_first_explosion(tmp_path):
    async def run():
        driver, database, _ = await started(tmp_path)
        await driver.stop()
        norms, found = Norms(3.0, 40.0, 39.0), Exploded(1, "norm", 40 / 3, 0)

        def publish(session):
            records.publish_version(session, "questions", 1, bytes(32), 1, 2, norms=norms, exploded=found)
            return records.load_job(session, "questions")

        stored = await database.run(publish)
        state = state_of(stored, driver.state.parameters)
        assert (state.norms, state.exploded) == ((norms,), found)
        database.real.close()

    asyncio.run(run())
