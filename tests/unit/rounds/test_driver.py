"""The driver when something of ours fails: the job pauses and says so, and never lies deaf."""

import asyncio
import errno
import hashlib

import numpy as np

import secure_agg
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.rounds.driver import JobDriver, Ports, state_of
from coordinator.rounds.effects import Status
from coordinator.rounds.state import Parameters
from coordinator.rounds.uploads import UploadDesk
from coordinator.services.sessions import Session, Sessions
from coordinator.storage import open_blobs, open_database, records
from tacit.attempt import AttemptId
from tacit.messages import AttemptMessage, AttemptOpened, JobEnded, Standby
from tacit.reason import Reason
from tests.support.fleet import job_document
from tests.unit.secure_agg.sum_fleet import FEDERATION, key_of, verify


class Sent(list):
    """What members were sent, and a way to wait for it."""

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
    """A database whose next transactions fail."""

    def __init__(self, real):
        self.real = real
        self.failures = 0

    async def run(self, work):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, "no space left")
        return await self.real.run(work)


async def started(tmp_path):
    job = job_document()
    database = Unreliable(open_database(f"sqlite:///{tmp_path}/tacit.db"))
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


def test_a_database_that_fails_pauses_the_job_tells_the_members_and_can_be_resumed(tmp_path):
    async def run():
        driver, database, sent = await started(tmp_path)
        # The attempt cannot be stored, nor, twice, that the job is paused.
        database.failures = 3
        ready(driver, "m0", "m1", "m2")
        await sent.until(lambda: any(isinstance(message, JobEnded) for _, message in sent))
        assert not opened(sent), "nobody may hear of an attempt that is not on the disk"
        stored = await database.run(lambda session: records.load_job(session, "questions"))
        assert (stored.status, stored.reason) == (records.JobStatus.PAUSED, "internal")
        assert driver.state.status is Status.PAUSED
        await driver.carry_out(ev.Resume())
        ready(driver, "m0", "m1", "m2")
        await sent.until(lambda: len(opened(sent)) == 3)
        await driver.stop()
        database.real.close()

    asyncio.run(run())


def test_a_message_that_breaks_our_own_code_costs_its_sender_and_nobody_else(tmp_path):
    async def run():
        driver, database, sent = await started(tmp_path)
        ready(driver, "m0", "m1", "m2")
        await sent.until(lambda: len(opened(sent)) == 3)
        attempt = opened(sent)[0][1].attempt
        # No protobuf message can be this; it stands for a mistake of ours that somebody finds.
        await driver.carry_out(ev.Answered("m1", AttemptMessage(attempt, BreaksWhatLooksAtIt())))
        assert driver.state.status is Status.RUNNING
        assert driver.state.members["m1"].faults == 1
        await driver.stop()
        database.real.close()

    asyncio.run(run())


class BreaksWhatLooksAtIt:
    """Raises on every comparison."""

    def __eq__(self, other):
        raise RuntimeError("a mistake of ours")

    __hash__ = None


def test_a_disk_that_is_full_in_the_middle_of_a_chunk_leaves_the_spool_as_it_was():
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
            spool.file = Full(spool.file)
            yield data[256:512]

        async def rest(start):
            yield data[start:]

        judge = Judge()
        receipt = await desk.take(attempt, "a", 0, message, breaking(), judge)
        assert (receipt.complete, receipt.received) == (False, 256)
        spool = desk._desks[attempt].spools["a"]
        spool.file = spool.file.real
        receipt = await desk.take(attempt, "a", 256, message, rest(256), judge)
        assert receipt.complete
        assert desk.total(attempt).tobytes() == data

    asyncio.run(run())


def test_a_session_that_is_ended_counts_no_more_whether_its_goodbye_is_read_or_not():
    async def run():
        seen = []
        sessions = Sessions(lambda session: seen.append("opened"), lambda session: seen.append("closed"))
        session = Session("m", b"process", "1", ())
        sessions.open(session)
        sessions.end("m", Reason.REASON_CLIENT_CERTIFICATE_REVOKED)
        assert seen == ["opened", "closed"]
        assert not sessions.connected
        sessions.close(session)
        assert seen == ["opened", "closed"]
        silent = Session("n", b"process", "1", ())
        sessions.open(silent)
        for _ in range(1001):
            sessions.send("n", Standby())
        assert "n" not in sessions.connected
        assert silent.goodbye is not None

    asyncio.run(run())


def test_a_newer_session_of_a_member_replaces_the_older_in_order():
    async def run():
        seen = []
        sessions = Sessions(
            lambda session: seen.append(("opened", session.process)),
            lambda session: seen.append(("closed", session.process)),
        )
        first, second = Session("m", b"1", "1", ()), Session("m", b"2", "1", ())
        sessions.open(first)
        sessions.open(second)
        sessions.close(first)
        assert seen == [("opened", b"1"), ("closed", b"1"), ("opened", b"2")]
        assert first.goodbye.reason == Reason.REASON_SESSION_REPLACED

    asyncio.run(run())
