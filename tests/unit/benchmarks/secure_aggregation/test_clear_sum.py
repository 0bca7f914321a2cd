"""The clear side of the comparison adds exactly the members' vectors in each round."""

import asyncio

import numpy as np
import pytest

import secure_agg
from benchmarks.library.members import ClearAgent, clear_input, synthetic_update
from benchmarks.secure_aggregation.clear import ClearDriver
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.rounds.driver import Ports, state_of
from coordinator.rounds.publish import next_version
from coordinator.rounds.state import Parameters
from coordinator.rounds.uploads import UploadDesk
from coordinator.storage import open_blobs, open_database, records
from learning.mechanisms.protection import protection_of
from tacit.attempt import AttemptId
from tacit.messages import Assignment, AttemptEnded, AttemptMessage, AttemptOpened, JobEnded
from tacit.reason import Reason
from tacit.vector import layout_of
from tests.support.fleet import VALUES, job_document
from tests.support.processes import PATIENCE
from tests.support.sum_fleet import FEDERATION, SeededRandom, key_of, verify

MEMBERS = ("m0", "m1", "m2")
ROUNDS = 2


class Inbox:
    """Records the messages to the members, and waits for them."""

    def __init__(self):
        self.sent = []
        self._arrived = asyncio.Event()

    def send(self, member, message):
        self.sent.append((member, message))
        self._arrived.set()

    def of(self, kind):
        found = [message for _, message in self.sent]
        return [each for each in found if isinstance(each, kind) or isinstance(getattr(each, "payload", None), kind)]

    async def until(self, kind, count):
        async with asyncio.timeout(20):
            while len(self.of(kind)) < count:
                self._arrived.clear()
                await self._arrived.wait()


async def chunks(data):
    for at in range(0, len(data), 7):
        yield data[at : at + 7]


async def started(tmp_path, store):
    job = job_document(count=ROUNDS)
    store.put(np.zeros(VALUES, "<f4").tobytes())
    database = open_database(f"sqlite:///{tmp_path}/tacit.db")
    stored = await database.run(
        lambda session: records.create_job(
            session, name=job.name, document=job.digest(), rounds_total=ROUNDS, version=job.weights, now_ms=1
        )
    )
    inbox = Inbox()
    ports = Ports(database, store, inbox, Metrics("test"), UploadDesk(), lambda: None, lambda digest: None)
    driver = ClearDriver(state_of(stored, Parameters(job, job.digest(), FEDERATION, verify, key_of)), ports)
    driver.start()
    for member in MEMBERS:
        driver.post(ev.Connected(member, member.encode() * 8))
    return job, driver, ports, inbox


async def play_round(number, job, driver, ports, inbox):
    """Send from all members, and return the sum of their encoded vectors modulo 2^b."""
    await inbox.until(Assignment, number * len(MEMBERS))
    assignment = inbox.of(Assignment)[-1]
    for member in MEMBERS:
        driver.post(ev.SaidReady(member, assignment.round, assignment.version))
    await inbox.until(AttemptOpened, number * len(MEMBERS))
    attempt = inbox.of(AttemptOpened)[-1].attempt
    vectors = {
        member: protection_of(job, 1).encode(
            job, synthetic_update(member, VALUES), len(MEMBERS), SeededRandom(f"{member}/{number}")
        )
        for member in MEMBERS
    }
    bits = layout_of(job, len(MEMBERS)).bits
    packed = {member: bytes(secure_agg.pack_in_place(vector.copy(), bits)) for member, vector in vectors.items()}
    uploads = (
        ports.uploads.take(attempt, member, 0, clear_input(member, vector), chunks(packed[member]), driver)
        for member, vector in vectors.items()
    )
    receipts = await asyncio.gather(*uploads)
    assert all(receipt.complete for receipt in receipts)
    await inbox.until(AttemptEnded, number * len(MEMBERS))
    plain = sum(vector.astype(object) for vector in vectors.values())
    return np.array([int(value) % 2**bits for value in plain], dtype="<u4")


def test_every_version_follows_from_the_plain_sum(tmp_path):
    async def run():
        store = open_blobs(str(tmp_path / "store"))
        job, driver, ports, inbox = await started(tmp_path, store)
        base = np.zeros(VALUES, "<f4")
        for number in range(1, ROUNDS + 1):
            total = await play_round(number, job, driver, ports, inbox)
            base = next_version(job, len(MEMBERS), len(MEMBERS), total, base).values
            ended = [each.payload for each in inbox.of(AttemptEnded)[-len(MEMBERS) :]]
            assert {each.new_version for each in ended} == {store.put(base.tobytes())}
        await inbox.until(JobEnded, len(MEMBERS))
        assert driver.state.status is JobStatus.FINISHED
        stored = await ports.database.run(lambda session: records.load_job(session, job.name))
        assert (stored.status, stored.version_number) == (JobStatus.FINISHED, ROUNDS)
        await driver.stop()
        ports.database.close()

    asyncio.run(run())


def test_the_mean_of_a_round_is_the_mean_of_the_updates(tmp_path):
    """Up to quantisation, so the two sides do the same work with the same result."""

    async def run():
        store = open_blobs(str(tmp_path / "store"))
        job, driver, ports, inbox = await started(tmp_path, store)
        total = await play_round(1, job, driver, ports, inbox)
        new = np.frombuffer(store.get(inbox.of(AttemptEnded)[0].payload.new_version), "<f4")
        await driver.stop()
        ports.database.close()
        assert total.size == layout_of(job, len(MEMBERS)).values
        return job, new

    job, new = asyncio.run(run())
    mean = np.mean([synthetic_update(member, VALUES).change for member in MEMBERS], axis=0)
    step = job.aggregation.max_weight / layout_of(job, len(MEMBERS)).segments[0].scale / 100
    assert np.abs(new - mean).max() <= step


def test_a_member_that_leaves_fails_the_round(tmp_path):
    async def run():
        _, driver, ports, inbox = await started(tmp_path, open_blobs(str(tmp_path / "store")))
        await inbox.until(Assignment, len(MEMBERS))
        with pytest.raises(RuntimeError, match="m1 left"):
            await driver.carry_out(ev.Disconnected("m1"))
        assert driver.state.status is JobStatus.PAUSED
        await driver.stop()
        ports.database.close()

    asyncio.run(run())


def test_the_synthetic_update_follows_from_the_name():
    assert np.array_equal(synthetic_update("m0", 8).change, synthetic_update("m0", 8).change)
    assert not np.array_equal(synthetic_update("m0", 8).change, synthetic_update("m1", 8).change)


def test_a_clear_upload_is_unsigned():
    header = clear_input("m0", np.zeros(5, "<u4"))
    assert header == secure_agg.MaskedInput("m0", bytes(32), 5, bytes(64))


@pytest.mark.parametrize("values", [100_000, 1_000_000])
def test_the_jobs_model_has_exactly_the_values_asked_for(tmp_path, values):
    from benchmarks.library.untrained import job_file
    from export.bundle import make_job_bundle
    from tacit.job import JobSpec

    path = tmp_path / "job.toml"
    path.write_text(job_file(tmp_path, "load", members=3, rounds=2, values=values))
    assert make_job_bundle(JobSpec.from_toml(path), tmp_path, tmp_path / "bundle").values == values


def test_an_impossible_number_of_values_is_refused(tmp_path):
    from benchmarks.library.untrained import job_file

    with pytest.raises(ValueError, match="multiple of 100"):
        job_file(tmp_path, "load", members=3, rounds=2, values=1_000_050)


def test_a_member_in_the_clear_reads_any_number_of_messages():
    """Its session stops while sixteen messages wait, so each place must be given back."""
    agent = ClearAgent.__new__(ClearAgent)
    agent._events, agent._room = asyncio.Queue(), asyncio.Semaphore(16)
    agent._uploads, agent._held = {}, {"clear": object()}
    ended = AttemptMessage(AttemptId("clear", 1, 1), AttemptEnded(True, Reason.REASON_UNSPECIFIED, "", bytes(32), b""))

    async def play():
        working = asyncio.create_task(agent._work_events())
        async with asyncio.timeout(PATIENCE):
            for _ in range(40):
                await agent._received(ended)
        working.cancel()

    asyncio.run(play())
    assert agent._held == {}
