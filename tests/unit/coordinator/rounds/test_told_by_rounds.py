"""What rounds, uploads and the database tell the metrics, as far as no process is needed to see it."""

import asyncio
import errno
import hashlib
import time

import numpy as np
import pytest

import secure_agg
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.rounds.driver import JobDriver, Ports, state_of
from coordinator.rounds.state import Parameters
from coordinator.rounds.uploads import UploadDesk
from coordinator.storage import open_blobs, records
from coordinator.storage.times import job_times
from tacit.attempt import AttemptId
from tacit.reason import Reason
from tests.support.databases import empty_database
from tests.support.fleet import job_document
from tests.support.sum_fleet import FEDERATION, key_of, verify

ATTEMPT = AttemptId("questions", 1, 1)
VALUES = 500


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


class Nobody:
    def send(self, member, message):
        pass


def test_a_driver_reports_its_job_a_failure_and_its_return(tmp_path):
    async def run():
        job = job_document()
        rounds = job.rounds
        database = Unreliable(empty_database(tmp_path))
        stored = await database.run(
            lambda session: records.create_job(
                session, name=job.name, document=job.digest(), rounds_total=3, version=job.weights, now_ms=1
            )
        )
        metrics = Metrics("test")
        store = open_blobs(str(tmp_path / "store"))
        ports = Ports(database, store, Nobody(), metrics, UploadDesk(), lambda: None, lambda digest: None)
        driver = JobDriver(state_of(stored, Parameters(job, job.digest(), FEDERATION, verify, key_of)), ports)

        def told(name):
            return metrics.value(name, job=job.name)

        before = time.time()
        driver.start()
        for name in ("m0", "m1", "m2"):
            await driver.carry_out(ev.Connected(name, b"process" + name.encode()))
        assert told("job_running") == 1
        assert told("members_needed") == rounds.min_members
        assert told("rounds_planned") == rounds.count
        limits = rounds.deadlines
        attempt = limits.advertise + limits.share + limits.longest_mask + limits.confirm + limits.unmask
        assert told("round_deadline_seconds") == limits.training + rounds.max_attempts * attempt
        assert before <= told("round_started_timestamp_seconds") <= time.time()
        assert metrics.value("aggregation_cpu_seconds_total", job=job.name, phase="training") > 0
        # One failure: storing the attempt fails, then storing the pause works.
        database.failures = 1
        for name in ("m0", "m1", "m2"):
            driver.post(ev.SaidReady(name, driver.state.round, driver.state.version))
        await driver.carry_out(ev.Cosigned())
        assert told("job_failures_total") == 1
        assert told("job_running") == 0
        assert told("attempts_open") != 1
        await driver.carry_out(ev.Resume())
        assert told("job_running") == 1
        await driver.carry_out(ev.Abort())
        assert metrics.value("jobs", status="aborted") == 1
        assert told("round_started_timestamp_seconds") == 0
        await driver.stop()
        database.real.close()

    asyncio.run(run())


def test_a_restart_does_not_change_the_age_of_a_round(tmp_path):
    async def run():
        job = job_document()
        database = empty_database(tmp_path)

        def create(session):
            records.create_job(
                session, name=job.name, document=job.digest(), rounds_total=3, version=job.weights, now_ms=1_500
            )

        await database.run(create)
        times = await database.run(lambda session: job_times(session, job.name))
        assert (times.round_opened, times.published) == (None, 1.5)
        await database.run(lambda session: records.open_round(session, job.name, 1, 7_250))
        times = await database.run(lambda session: job_times(session, job.name))
        assert (times.round_opened, times.published) == (7.25, 1.5)
        nothing = await database.run(lambda session: job_times(session, "none"))
        assert (nothing.round_opened, nothing.published) == (None, None)
        database.close()

    asyncio.run(run())


class Sink:
    """Gives each complete upload the verdict that it was made with."""

    def __init__(self, desk, accept):
        self.desk, self.accept = desk, accept

    def uploaded(self, member, attempt, message, digest):
        if self.accept:
            self.task = asyncio.ensure_future(self.desk.accept(attempt, member))
        else:
            self.desk.reject(attempt, member, Reason.REASON_MASKED_INPUT_SIGNATURE_INVALID, "")


async def take(desk, member, data, sink, upto=None):
    message = secure_agg.MaskedInput(member, hashlib.sha256(data).digest(), VALUES, b"")

    async def chunks():
        for at in range(0, len(data) if upto is None else upto, 100):
            yield data[at : at + 100]

    return await desk.take(ATTEMPT, member, 0, message, chunks(), sink)


@pytest.mark.parametrize("end", ["accept", "reject", "close"])
def test_the_spool_counts_the_bytes_that_wait_in_it(end):
    async def run():
        desk = UploadDesk()
        desk.open(ATTEMPT, frozenset("ab"), VALUES, 32)
        data = np.arange(VALUES, dtype="<u4").tobytes()
        await take(desk, "a", data, Sink(desk, True), upto=700)
        assert desk.spooled == 700
        if end != "close":
            await take(desk, "b", data, Sink(desk, end == "accept"))
            # b's upload has its verdict, so only a's part is still spooled.
            assert desk.spooled == 700
        desk.close(ATTEMPT, keep_sum=True)
        desk.close(ATTEMPT, keep_sum=False)
        assert desk.spooled == 0

    asyncio.run(run())


def test_a_disk_that_refuses_an_upload_is_counted(monkeypatch):
    async def run():
        metrics = Metrics("test")
        desk = UploadDesk(None, metrics.store_failed)
        desk.open(ATTEMPT, frozenset("a"), VALUES, 32)

        def full(file, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("coordinator.rounds.uploads._write", full)
        receipt = await take(desk, "a", bytes(4 * VALUES), Sink(desk, True))
        assert not receipt.complete
        assert metrics.value("store_failures_total") == 1
        assert desk.spooled == 0

    asyncio.run(run())
