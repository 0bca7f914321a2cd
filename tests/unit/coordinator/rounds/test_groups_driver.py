"""A cohort in groups through the real driver: one sum for each group, one version, metrics and records."""

import asyncio
import hashlib
import itertools
import math

import numpy as np
import pytest

import secure_agg
from coordinator.metrics import Metrics
from coordinator.rounds import events as ev
from coordinator.rounds.driver import JobDriver, Ports, state_of
from coordinator.rounds.state import Aggregating, Parameters
from coordinator.rounds.uploads import UploadDesk
from coordinator.storage import open_blobs, records
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from tacit.attempt import AttemptId
from tacit.job import Aggregation
from tacit.mechanism import DpSgd
from tacit.messages import AttemptEnded, AttemptMessage, AttemptOpened, AttemptRefusal
from tacit.reason import Reason, word
from tacit.validation import HALF, NoisedMetrics
from tests.support.databases import empty_database
from tests.support.fleet import VALUES, job_document
from tests.support.sum_fleet import FEDERATION, SeededRandom, TestIdentity, key_of, names, verify

MEMBERS = 12
ATTEMPT = AttemptId("questions", 1, 1)


def member_vector(seed, values=1000):
    return np.random.default_rng(seed).integers(0, 2**32, values, dtype=np.uint32).astype("<u4")


class Crowd:
    """Members that answer every message at once; `silent` says which messages a member ignores."""

    def __init__(self, job, liar=""):
        self.job, self.liar = job, liar
        self.driver = None
        self.states, self.shown, self.ended, self.tasks, self.rosters = {}, {}, {}, [], []
        self.silent = lambda name, payload: False
        self.measured = None
        self.max_totals = 0

    def send(self, name, message):
        payload = getattr(message, "payload", None)
        if payload is None or self.silent(name, payload):
            return
        answer = self.answer(name, payload, message.attempt)
        if answer is not None:
            self.driver.post(ev.Answered(name, AttemptMessage(message.attempt, answer)))

    def answer(self, name, payload, attempt):
        match payload:
            case AttemptOpened():
                self.states[name], said = secure_agg.advertise(
                    payload.context, TestIdentity(name), verify, SeededRandom(name), key_of=key_of
                )
                self.shown[name] = self.states[name]
            case secure_agg.GroupRoster():
                self.rosters.append(payload)
                shown = [state.advertisement for state in self.shown.values()]
                parts = [part for each in shown for part in (each.certificate, each.keys)]
                self.states[name], said = self.states[name].on_roster(payload, parts)
            case secure_agg.ReceivedDealings():
                self.upload(name, self.states[name].on_dealings(payload), attempt)
                return None
            case secure_agg.Survivors():
                self.states[name], said = self.states[name].on_survivors(payload)
            case secure_agg.Confirmations():
                self.states[name], said = self.states[name].on_confirmations(payload)
            case AttemptEnded():
                self.ended[name] = payload
                return None
        return said

    def upload(self, name, ready, attempt):
        level = -1.0 if name == self.liar else 0.1
        update = Update(np.full(VALUES, level, np.float32), 10, 5, 5, 10, measured=self.measured)
        vector = protection_of(self.job, 10).encode(self.job, update, MEMBERS, SeededRandom(name))
        self.states[name], message = ready.mask(vector)
        packed = bytes(secure_agg.pack_in_place(vector, ready.seat.context.bits))

        async def chunks():
            yield packed

        desk = self.driver._ports.uploads
        self.max_totals = max(self.max_totals, len(desk.totals(attempt)))
        self.tasks.append(asyncio.ensure_future(desk.take(attempt, name, 0, message, chunks(), self.driver)))


async def played(tmp_path, crowd, until):
    job = crowd.job
    database = empty_database(tmp_path)
    stored = await database.run(
        lambda session: records.create_job(
            session, name=job.name, document=job.digest(), rounds_total=1, version=job.weights, now_ms=1
        )
    )
    store, metrics = open_blobs(str(tmp_path / "store")), Metrics("test")
    store.put(np.zeros(VALUES, "<f4").tobytes())
    over = asyncio.Event()
    ports = Ports(database, store, crowd, metrics, UploadDesk(), over.set, lambda digest: None)
    driver = crowd.driver = JobDriver(
        state_of(stored, Parameters(job, job.digest(), FEDERATION, verify, key_of)), ports
    )
    driver.start()
    for name in names(MEMBERS):
        await driver.carry_out(ev.Connected(name, b"process" + name.encode()))
    for name in names(MEMBERS):
        driver.post(ev.SaidReady(name, driver.state.round, driver.state.version))
    async with asyncio.timeout(30):
        while not until(driver):
            over.clear()
            await over.wait()
    await asyncio.gather(*crowd.tasks)
    version = np.frombuffer(store.get(driver.state.version), "<f4")
    round_ = (await database.run(lambda session: records.rounds(session, job.name)))[0]
    await driver.stop()
    database.close()
    return version, metrics, round_.attempts[0]


def counted(metrics):
    outcomes = ("combined", "lost", "invalid", "outliers")
    return {outcome: metrics.value("groups_total", job="questions", outcome=outcome) for outcome in outcomes}


def one_round(rule, **numbers):
    return job_document(
        Aggregation(groups=3, assumed_corrupt=1, combine=rule, max_weight=100, **numbers),
        count=1,
        min_members=MEMBERS,
        target_members=MEMBERS,
    )


@pytest.mark.parametrize("rule", ["mean", "median", "reject-outliers"])
def test_a_version_is_made_from_the_sums_of_all_groups(tmp_path, rule):
    crowd = Crowd(one_round(rule), liar="m4")
    version, metrics, attempt = asyncio.run(played(tmp_path, crowd, lambda driver: driver.state.version_number == 1))
    assert len(attempt.survivors) == MEMBERS
    assert crowd.max_totals == 3
    # The members of a group hear its roster one after another, so that it is encoded once.
    rosters = [group for group, _ in itertools.groupby(crowd.rosters, key=id)]
    assert len(rosters) == 3
    assert len(crowd.rosters) == MEMBERS
    expected = 0.1 if rule != "mean" else 0.1 - 1.1 / 12
    assert np.allclose(version, expected, atol=1e-4)
    outliers = int(rule == "reject-outliers")
    assert counted(metrics) == {"combined": 3 - outliers, "lost": 0, "invalid": 0, "outliers": outliers}
    assert all(ended.published for ended in crowd.ended.values())


@pytest.mark.parametrize("rule", ["mean", "median", "reject-outliers"])
def test_the_metrics_of_all_groups_are_one_estimate_of_the_version_that_the_round_started_from(tmp_path, rule):
    job = one_round(rule).model_copy(
        update={
            "mechanism": DpSgd(noise_multiplier=1.0, clip=1.0, lot=8),
            "metrics": NoisedMetrics(noise_multiplier=0.1, loss_bound=4.0),
        }
    )
    crowd = Crowd(job, liar="m4")
    # 100 units each, three quarters of them right, with a loss of half the bound.
    crowd.measured = np.array([0, 100 * HALF // 2, 100 * HALF])
    _, metrics, attempt = asyncio.run(played(tmp_path, crowd, lambda driver: driver.state.version_number == 1))
    assert len(attempt.survivors) == MEMBERS
    value = metrics.value
    assert (value("estimate_version", job="questions"), value("best_version", job="questions")) == (0, 0)
    assert value("estimate_accuracy", job="questions") == pytest.approx(0.75)
    assert value("estimate_loss", job="questions") == pytest.approx(2.0)
    # All twelve, whose noise it is, whatever became of their updates.
    assert value("estimate_units", job="questions") == 100 * MEMBERS
    error = 2 * math.sqrt(MEMBERS) * job.metrics.noise.std / (2 * HALF)
    assert value("estimate_units_error", job="questions") == pytest.approx(error)


def test_a_lost_group_is_counted_and_its_members_are_told(tmp_path):
    crowd = Crowd(one_round("mean", min_groups=2))

    refusal = AttemptRefusal(Reason.REASON_SURVIVORS_TOO_FEW, "as if its policy said so")

    def gone(name, payload):
        phase = crowd.driver.state.phase
        if isinstance(payload, secure_agg.Survivors) and isinstance(phase, Aggregating):
            group = crowd.states["m0"].seat.session.groups[1]
            if name in group[:2]:
                crowd.driver.post(ev.Answered(name, AttemptMessage(ATTEMPT, refusal)))
                return True
        return False

    crowd.silent = gone
    version, metrics, attempt = asyncio.run(played(tmp_path, crowd, lambda driver: driver.state.version_number == 1))
    assert np.allclose(version, 0.1, atol=1e-4)
    assert counted(metrics) == {"combined": 2, "lost": 1, "invalid": 0, "outliers": 0}
    told = [name for name, ended in crowd.ended.items() if ended.published]
    assert len(told) == 8
    reasons = sorted(word(lost.reason) for lost in attempt.dropouts)
    assert reasons == ["group_too_small", "group_too_small", "survivors_too_few", "survivors_too_few"]


def test_an_upload_goes_only_into_the_sum_of_its_group():
    async def run():
        desk = UploadDesk()
        desk.open(ATTEMPT, frozenset("abcd"), 1000, 32, {"a": 0, "b": 2, "c": 0, "d": 2})
        assert set(desk.totals(ATTEMPT)) == {0, 2}

        class Judge:
            def uploaded(self, member, attempt, message, digest):
                self.task = asyncio.ensure_future(desk.accept(attempt, member))

        async def whole(data):
            yield data

        for seed, name in enumerate("abcd"):
            data = member_vector(seed).tobytes()
            message = secure_agg.MaskedInput(name, hashlib.sha256(data).digest(), 1000, b"")
            receipt = await desk.take(ATTEMPT, name, 0, message, whole(data), Judge())
            assert receipt.complete
        totals = desk.totals(ATTEMPT)
        assert np.array_equal(totals[0], member_vector(0) + member_vector(2))
        assert np.array_equal(totals[2], member_vector(1) + member_vector(3))
        assert sum(each.nbytes for each in totals.values()) == 2 * 4000
        desk.close(ATTEMPT, keep_sum=False)

    asyncio.run(run())


def test_a_version_is_marked_for_a_member_that_withdrew_while_its_sum_was_opened(tmp_path):
    seen = {}

    def until(driver):
        phase, database = driver.state.phase, driver._ports.database
        if isinstance(phase, Aggregating) and phase.protocol.phase is secure_agg.Phase.UNMASK and not seen:
            database.run_now(lambda s: records.invite(s, "m0", "a" * 24, bytes(32), 9, 1))
            seen["held"] = database.run_now(lambda s: records.withdraw(s, "m0", "questions", 2)).held
        if driver.state.version_number == 0:
            return False
        seen["versions"] = database.run_now(lambda s: records.versions(s, "questions"))
        return True

    _, _, attempt = asyncio.run(played(tmp_path, Crowd(one_round("median")), until))
    assert "m0" in attempt.survivors
    assert seen["held"] == ()
    assert [each.withdrawn for each in seen["versions"]] == [0, 1]
