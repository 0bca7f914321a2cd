"""A job with a server optimiser through the real driver, database and store.

Killed at any point between a sum and its version and started again, it ends with the same bits. If the optimiser's
state is lost, the job pauses at once.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.metrics import Metrics
from coordinator.rounds import driver as driving
from coordinator.rounds import events as ev
from coordinator.rounds import publish
from coordinator.rounds.driver import JobDriver, Ports, state_of
from coordinator.rounds.optimiser import StateVectors
from coordinator.rounds.publish import next_version
from coordinator.rounds.server_state import StoredState
from coordinator.rounds.state import Parameters
from coordinator.rounds.uploads import UploadDesk
from coordinator.storage import open_blobs, open_database, records
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from tacit.job import Aggregation
from tacit.messages import Assignment, AttemptEnded, AttemptMessage, AttemptOpened, JobEnded
from tacit.reason import Reason, sentence
from tacit.server_optimiser import FedAdamServer, FedAvgMServer, FedYogiServer
from tacit.vector import layout_of
from tests.support.databases import empty_database
from tests.support.fleet import VALUES, job_document
from tests.support.sum_fleet import FEDERATION, SeededRandom, TestIdentity, key_of, verify

MEMBERS = ("m0", "m1", "m2")
ROUNDS = 4
SERVER = FedAdamServer(learning_rate=0.1, beta_1=0.8, beta_2=0.9)


class Killed(BaseException):
    """Stands for kill -9: nothing catches it, and nothing runs after it."""


def a_job(server=SERVER):
    return job_document(Aggregation(max_weight=100), count=ROUNDS).model_copy(update={"server": server})


def update_of(name, round):
    """What a member sends in a round, the same in every attempt and process."""
    random = np.random.default_rng([MEMBERS.index(name), round])
    examples = 10 * (1 + MEMBERS.index(name))
    return Update(random.uniform(-0.3, 0.3, VALUES).astype(np.float32), examples, 5, 5, examples)


def encoded(job, name, round):
    update = update_of(name, round)
    return protection_of(job, update.examples).encode(job, update, len(MEMBERS), SeededRandom(f"{name}/{round}"))


class Crowd:
    """Members that train and answer at once."""

    def __init__(self, job):
        self.job, self.driver = job, None
        self.states, self.tasks, self.ended, self.told, self.opened = {}, [], [], [], 0

    def send(self, name, message):
        match message:
            case Assignment():
                self.driver.post(ev.SaidReady(name, message.round, message.version))
            case JobEnded():
                self.ended.append(message)
            case AttemptMessage(payload=AttemptEnded() as payload):
                self.told.append(payload)
            case AttemptMessage(payload=payload):
                answer = self.answer(name, payload, message.attempt)
                if answer is not None:
                    self.driver.post(ev.Answered(name, AttemptMessage(message.attempt, answer)))

    def answer(self, name, payload, attempt):
        match payload:
            case AttemptOpened():
                self.opened += 1
                self.states[name], said = secure_agg.advertise(
                    payload.context, TestIdentity(name), verify, SeededRandom(f"{name}/{attempt}"), key_of=key_of
                )
            case secure_agg.Roster():
                self.states[name], said = self.states[name].on_roster(payload)
            case secure_agg.ReceivedDealings():
                self.upload(name, self.states[name].on_dealings(payload), attempt)
                return None
            case secure_agg.Survivors():
                self.states[name], said = self.states[name].on_survivors(payload)
            case secure_agg.Confirmations():
                self.states[name], said = self.states[name].on_confirmations(payload)
            case _:
                return None
        return said

    def vector(self, name, round):
        return encoded(self.job, name, round)

    def upload(self, name, ready, attempt):
        vector = self.vector(name, attempt.round)
        self.states[name], message = ready.mask(vector)
        packed = bytes(secure_agg.pack_in_place(vector, ready.seat.context.bits))

        async def chunks():
            yield packed

        desk = self.driver._ports.uploads
        self.tasks.append(asyncio.ensure_future(desk.take(attempt, name, 0, message, chunks(), self.driver)))


class Coordinator:
    """A coordinator's folder; `run` is one process on it."""

    crowd = Crowd

    def __init__(self, folder: Path, job):
        self.folder, self.job = folder, job
        folder.mkdir(exist_ok=True)
        self.store = open_blobs(str(folder / "store"))
        self.store.put(np.zeros(VALUES, "<f4").tobytes())
        self.metrics = Metrics("test")
        # What members may fetch.
        self.fetchable = {job.weights}
        database = self.new_database()
        database.run_now(
            lambda s: records.create_job(
                s, name=job.name, document=job.digest(), rounds_total=job.rounds.count, version=job.weights, now_ms=1
            )
        )
        database.close()

    def new_database(self):
        return empty_database(self.folder)

    def database(self):
        return open_database(f"sqlite:///{self.folder}/tacit.db")

    def read(self, work):
        database = self.database()
        try:
            return database.run_now(lambda s: work(s, self.job.name))
        finally:
            database.close()

    def run(self, *, resume=False):
        """Runs until the job is over or paused, or the process is killed. Returns whether it was, and the crowd."""

        async def process():
            crowd, changed = self.crowd(self.job), asyncio.Event()
            database = self.database()
            await database.run(lambda s: records.abandon_open_attempts(s, 2, Reason.REASON_COORDINATOR_RESTARTED))
            stored = await database.run(lambda s: records.load_job(s, self.job.name))
            ports = Ports(database, self.store, crowd, self.metrics, UploadDesk(), changed.set, self.fetchable.add)
            parameters = Parameters(self.job, self.job.digest(), FEDERATION, verify, key_of)
            driver = crowd.driver = JobDriver(state_of(stored, parameters), ports)
            driver.start()
            if resume:
                driver.post(ev.Resume())
            for name in MEMBERS:
                driver.post(ev.Connected(name, b"process" + name.encode()))

            def over():
                return driver.state.status is not JobStatus.RUNNING and crowd.ended

            def killed():
                ours = [driver._task, *driver._computing, *self.computed]
                return any(each.done() and not each.cancelled() and each.exception() is not None for each in ours)

            async with asyncio.timeout(60):
                while not over() and not killed():
                    self.computed |= driver._computing
                    changed.clear()
                    await asyncio.wait(
                        [asyncio.ensure_future(changed.wait()), driver._task, *driver._computing],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
            died = killed()
            await driver.stop()
            await asyncio.gather(*crowd.tasks, return_exceptions=True)
            database.close()
            return died, crowd

        self.computed: set = set()
        return asyncio.run(process())


def by_hand(job):
    """Computes every version and state of the job from the members' vectors alone."""
    base, before, made = np.zeros(VALUES, np.float32), None, []
    for round in range(1, ROUNDS + 1):
        layout = layout_of(job, len(MEMBERS))
        total = np.zeros(layout.values, np.uint32)
        for name in MEMBERS:
            total += encoded(job, name, round)
        total &= np.uint32(2**layout.bits - 1)
        state = StateVectors(job.server, VALUES, before)
        base = next_version(job, len(MEMBERS), len(MEMBERS), total, base, state=state).values
        before = state.after
        made.append((base.tobytes(), {name: vector.tobytes() for name, vector in before.items()}))
    return made


def kept(coordinator):
    """Every version and state as the coordinator recorded and stored them."""
    versions = coordinator.read(records.versions)
    assert [each.number for each in versions] == list(range(ROUNDS + 1))
    assert versions[0].server_state == {}
    get = coordinator.store.get
    return [
        (get(each.digest), {name: get(vector) for name, vector in each.server_state.items()}) for each in versions[1:]
    ]


@pytest.mark.parametrize(
    "server", [SERVER, FedYogiServer(learning_rate=0.1), FedAvgMServer(momentum=0.5)], ids=["adam", "yogi", "momentum"]
)
def test_every_version_and_state_follows_from_the_sums(tmp_path, server):
    coordinator = Coordinator(tmp_path / "one", a_job(server))
    died, crowd = coordinator.run()
    assert not died
    assert {each.reason for each in crowd.ended} == {Reason.REASON_JOB_FINISHED}
    assert kept(coordinator) == by_hand(coordinator.job)
    entries = [
        entry for entry in coordinator.read(lambda s, job: records.journal(s)) if entry.kind == "version_published"
    ]
    assert [entry.fields["optimiser"] for entry in entries] == [server.optimiser] * ROUNDS
    said = [dict(each.split() for each in entry.fields["server_state"]) for entry in entries]
    stored = [each.server_state for each in coordinator.read(records.versions)[1:]]
    assert said == [{name: vector.hex() for name, vector in each.items()} for each in stored]


# ---- killed ---------------------------------------------------------------------------------------------------------


def _once(monkeypatch, owner, name, at, *, after):
    """Kills the process at the at-th call: before it, or after it has returned."""
    real, calls = getattr(owner, name), []

    def dying(*given, **named):
        calls.append(None)
        if len(calls) == at and not after:
            raise Killed
        result = real(*given, **named)
        if len(calls) == at:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)


# Where the process dies in round 3: the call, which one, before or after it, and the newest version afterwards.
POINTS = {
    "the sum is open, nothing is written": (driving, "next_version", 3, False, 2),
    "the state is written, but has no name": (StoredState, "finish", 3, False, 2),
    "the state is stored, the version is not": (BlobStore, "put", 3, False, 2),
    "both are stored, no row says so": (BlobStore, "put", 3, True, 2),
    "before the version's row": (records, "publish_version", 3, False, 2),
    "after the version's row, before the commit": (records, "publish_version", 3, True, 2),
    "after the attempt's row, before the commit": (records, "end_attempt", 3, True, 2),
    "after the round's row, before the commit": (records, "end_round", 3, True, 2),
    "right after the commit": (Database, "run", 3, True, 3),
}


@pytest.mark.parametrize("point", POINTS)
def test_after_a_kill_version_and_state_are_both_there_or_neither(tmp_path, monkeypatch, point):
    owner, name, at, after, there = POINTS[point]
    coordinator = Coordinator(tmp_path / "one", a_job())
    with monkeypatch.context() as patched:
        if owner is Database:
            real, published = Database.run, records.publish_version
            calls = []

            def publishing(*given, **named):
                calls.append(None)
                return published(*given, **named)

            async def commit_and_die(self, work):
                result = await real(self, work)
                if len(calls) == at:
                    raise Killed
                return result

            patched.setattr(records, "publish_version", publishing)
            patched.setattr(Database, "run", commit_and_die)
        else:
            _once(patched, owner, name, at, after=after)
        died, _ = coordinator.run()
        assert died
    versions = coordinator.read(records.versions)
    assert len(versions) == there + 1
    expected = by_hand(coordinator.job)
    newest = versions[-1]
    assert (coordinator.store.get(newest.digest), dict(newest.server_state).keys()) == (
        expected[there - 1][0],
        expected[there - 1][1].keys(),
    )
    stored = coordinator.read(records.load_job)
    assert (stored.version, stored.server_state) == (newest.digest, newest.server_state)
    died, _ = coordinator.run()
    assert not died
    assert coordinator.read(records.load_job).status is JobStatus.FINISHED
    assert kept(coordinator) == expected
    assert list((coordinator.folder / "store" / "incoming").iterdir()) == []


# ---- the server optimiser's state is lost ---------------------------------------------------------------------------


def _turned(good, at, bits):
    """Flips bits in the byte `at` of a file."""
    at %= len(good)
    return good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :]


# Little-endian float32: the last byte of four is the sign and most of the exponent.
HARMS = {
    "changed": lambda good: _turned(good, -4, 1),
    "the first block's sign": lambda good: _turned(good, 3, 0x80),
    "the last block's sign": lambda good: _turned(good, -1, 0x80),
    "no number in the first block": lambda good: b"\0\0\xc0\x7f" + good[4:],
    "no number in the last block": lambda good: good[:-4] + b"\0\0\xc0\x7f",
    "shorter": lambda good: good[:-4],
    "longer": lambda good: good + bytes(4),
}


# The plainest harms in every file, and a damage in each place and of each kind once. The sweep has the others.
_ONCE = ("the last block's sign", "no number in the first block", "longer")
LOST = [
    pytest.param(
        what,
        harm,
        marks=() if harm in ("gone", "changed") or (what == "momentum" and harm in _ONCE) else pytest.mark.long,
    )
    for harm in ("gone", *HARMS)
    for what in ("momentum", "accumulator", "version")
]


# A result made from damaged state is refused, so it needs no warning.
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("what", "harm"), LOST)
def test_a_lost_state_pauses_the_job_at_once_until_it_is_restored(tmp_path, monkeypatch, what, harm):
    monkeypatch.setattr(publish, "_BLOCK", 3)
    coordinator = Coordinator(tmp_path / "one", a_job())
    with monkeypatch.context() as patched:
        _once(patched, records, "open_round", 3, after=False)
        died, _ = coordinator.run()
        assert died
    stored = coordinator.read(records.load_job)
    assert stored.version_number == 2
    path = Path(coordinator.store._path(stored.version if what == "version" else stored.server_state[what]))
    good = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(HARMS[harm](good))
    died, crowd = coordinator.run()
    assert not died
    assert {each.reason for each in crowd.ended} == {Reason.REASON_INTERNAL}
    # Only one attempt, because each costs members.
    assert crowd.opened == len(MEMBERS)
    stored = coordinator.read(records.load_job)
    assert (stored.status, stored.reason, stored.version_number) == (JobStatus.PAUSED, "internal", 2)
    attempt = coordinator.read(records.rounds)[-1].attempts[-1]
    assert (attempt.outcome, attempt.reason) == ("abandoned", "internal")
    if what != "version":
        assert f"the {what} of version 2 of questions" in attempt.detail
        assert "coordinator job resume questions" in attempt.detail
    assert coordinator.metrics.value("job_failures_total", job="questions") == 1
    # Members hear that it failed. Only the operator hears where the store lies and what to do there.
    assert (str(tmp_path) in attempt.detail) or what != "version"
    assert crowd.told == [AttemptEnded(False, Reason.REASON_INTERNAL, sentence(Reason.REASON_INTERNAL))] * len(MEMBERS)
    path.write_bytes(good)
    died, _ = coordinator.run(resume=True)
    assert not died
    assert kept(coordinator) == by_hand(coordinator.job)


def test_an_invalid_sum_with_an_undamaged_state_costs_only_the_attempt(tmp_path, monkeypatch):
    """The state was checked and is not the cause."""
    real, calls = driving.next_version, []  # type: ignore[attr-defined]

    def beyond(job, cohort, survivors, total, *given, **named):
        calls.append(None)
        if len(calls) == 3:
            # The last value, so that blocks of the state were taken before.
            total[VALUES - 1] = 2 ** (layout_of(job, cohort).bits - 1)
        return real(job, cohort, survivors, total, *given, **named)

    monkeypatch.setattr(publish, "_BLOCK", 3)
    monkeypatch.setattr(driving, "next_version", beyond)
    coordinator = Coordinator(tmp_path / "one", a_job())
    died, crowd = coordinator.run()
    assert not died
    assert len(calls) == ROUNDS + 1
    assert [each.reason for each in crowd.told if not each.published] == [Reason.REASON_RESULT_INVALID] * len(MEMBERS)
    assert {each.reason for each in crowd.ended} == {Reason.REASON_JOB_FINISHED}
    assert coordinator.metrics.value("job_failures_total", job="questions") == 0
    assert list((coordinator.folder / "store" / "incoming").iterdir()) == []


def test_impossible_metrics_cost_no_attempt_and_the_operator_hears(tmp_path, monkeypatch):
    real, calls = driving.next_version, []  # type: ignore[attr-defined]

    def boasting(job, cohort, survivors, total, *given, **named):
        calls.append(None)
        if len(calls) == 3:
            names = [segment.name for segment in layout_of(job, cohort).segments]
            # More correct answers than examples; the update's values come first.
            total[VALUES - 1 + names.index("correct")] += 1000
        return real(job, cohort, survivors, total, *given, **named)

    monkeypatch.setattr(driving, "next_version", boasting)
    coordinator = Coordinator(tmp_path / "one", a_job())
    with capture_logs() as logs:
        died, crowd = coordinator.run()
    assert not died
    assert len(calls) == ROUNDS
    assert all(each.published for each in crowd.told)
    assert [line["number"] for line in logs if line["event"] == "metrics_invalid"] == [3]
    attempts = [attempt for each in coordinator.read(records.rounds) for attempt in each.attempts]
    assert [attempt.training is not None for attempt in attempts] == [True, True, False, True]
    assert kept(coordinator) == by_hand(coordinator.job)
