"""Server optimisers against a plain implementation of the papers' algorithms, over rounds and across blocks."""

import math

import numpy as np
import pytest

import secure_agg
from coordinator.rounds import publish
from coordinator.rounds.optimiser import StateNeeded, StateVectors, state_names, state_start, step_of
from coordinator.rounds.publish import GroupSum, ResultInvalid, next_version, next_version_of_groups
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from tacit.job import Aggregation
from tacit.mechanism import GaussianUpdate
from tacit.server_optimiser import FedAdagradServer, FedAdamServer, FedAvgMServer, FedAvgServer, FedYogiServer
from tacit.vector import layout_of
from tests.support.fleet import job_document
from tests.support.sum_fleet import SeededRandom

VALUES = 40
MEMBERS = 4
ROUNDS = 6
# All numbers differ from the defaults, so that mixing two up fails.
SERVERS = {
    "fedavg": FedAvgServer(learning_rate=0.5),
    "fedavgm": FedAvgMServer(learning_rate=0.3, momentum=0.8),
    "fedadagrad": FedAdagradServer(learning_rate=0.1, tau=0.01),
    "fedadagrad-beta_1": FedAdagradServer(learning_rate=0.1, tau=0.01, beta_1=0.6),
    "fedadam": FedAdamServer(learning_rate=0.1, beta_1=0.7, beta_2=0.9, tau=0.01, initial_accumulator=0.002),
    "fedyogi": FedYogiServer(learning_rate=0.1, beta_1=0.7, beta_2=0.9, tau=0.01, initial_accumulator=0.002),
}
SOURCE = secure_agg.SystemRandom()


def by_the_papers(server, start, changes):
    """x_T of Algorithm 2 of Reddi et al. 2021, of FedAvgM (Hsu et al. 2019) and of FedAvg, one number at a time."""
    x = [float(value) for value in start]
    m = [0.0] * len(x)
    v = [getattr(server, "initial_accumulator", None) or getattr(server, "tau", 0.0) ** 2] * len(x)
    eta = server.learning_rate
    for delta in changes:
        for i, d in enumerate(map(float, delta)):
            if server.optimiser == "fedavg":
                x[i] += eta * d
                continue
            if server.optimiser == "fedavgm":
                m[i] = server.momentum * m[i] + d
                x[i] += eta * m[i]
                continue
            m[i] = server.beta_1 * m[i] + (1 - server.beta_1) * d
            if server.optimiser == "fedadagrad":
                v[i] = v[i] + d * d
            elif server.optimiser == "fedyogi":
                sign = math.copysign(1.0, v[i] - d * d) if v[i] != d * d else 0.0
                v[i] = v[i] - (1 - server.beta_2) * d * d * sign
            else:
                v[i] = server.beta_2 * v[i] + (1 - server.beta_2) * d * d
            x[i] += eta * m[i] / (math.sqrt(v[i]) + server.tau)
    return np.array(x)


def a_job(server, values=VALUES, **changes):
    job = job_document(Aggregation(max_weight=1, bits=32))
    return job.model_copy(update={"server": server, "values": values, **changes})


def the_changes(rounds=ROUNDS, values=VALUES, seed=0):
    """Mean changes of every size from 1e-4 to 0.3, each a multiple of steps that the ring holds exactly."""
    random = np.random.default_rng(seed)
    sizes = 10 ** random.uniform(-4, math.log10(0.3), values)
    drawn = random.normal(size=(rounds, values)) * sizes
    return np.clip(np.round(drawn * 2**20) / 2**20, -1, 1)


def the_sum(job, change):
    """The sum of MEMBERS members that all made this change."""
    layout = layout_of(job, MEMBERS)
    assert layout.segments[0].scale >= 2**20
    total = np.zeros(layout.values, np.uint32)
    update = Update(np.asarray(change, np.float32), 1, 0, 0, 1)
    for _ in range(MEMBERS):
        total += protection_of(job, 1).encode(job, update, MEMBERS, SOURCE)
    return total & np.uint32(2**layout.bits - 1)


def played(job, start, changes, **more):
    """The versions that the coordinator makes from these changes, one after the other."""
    base, before, versions = start, None, []
    for change in changes:
        state = StateVectors(job.server, job.values, before)
        base = next_version(job, MEMBERS, MEMBERS, the_sum(job, change), base, state=state, **more).values
        before = state.after
        versions.append(base)
    return versions, before


@pytest.mark.parametrize("name", SERVERS)
def test_versions_match_the_published_algorithm(name):
    server, changes = SERVERS[name], the_changes()
    start = np.random.default_rng(1).normal(size=VALUES).astype(np.float32)
    versions, _ = played(a_job(server), start, changes)
    for rounds in range(1, ROUNDS + 1):
        expected = by_the_papers(server, start, changes[:rounds])
        # float32 versions of size 1 to 4, rounded once a round.
        assert np.abs(versions[rounds - 1] - expected).max() < 2e-7 * (1 + np.abs(expected).max()) * rounds
    # The optimiser did something other than averaging.
    if name != "fedavg":
        plain = by_the_papers(FedAvgServer(learning_rate=server.learning_rate), start, changes)  # type: ignore[attr-defined]
        assert np.abs(versions[-1] - plain).max() > 0.01


@pytest.mark.parametrize("name", SERVERS)
def test_where_blocks_end_changes_no_bit(name, monkeypatch):
    job, changes = a_job(SERVERS[name]), the_changes()
    start = np.zeros(VALUES, np.float32)
    whole, state = played(job, start, changes)
    for size in (1, 7, VALUES - 1):
        monkeypatch.setattr(publish, "_BLOCK", size)
        pieces, carried = played(job, start, changes)
        assert [each.tobytes() for each in pieces] == [each.tobytes() for each in whole]
        assert {key: each.tobytes() for key, each in carried.items()} == {
            key: each.tobytes() for key, each in state.items()
        }


def test_the_ends_of_real_blocks():
    values, server = 2 * publish._BLOCK + 5, SERVERS["fedyogi"]
    changes = the_changes(3, values)
    versions, _ = played(a_job(server, values), np.zeros(values, np.float32), changes)
    for place in (0, publish._BLOCK - 1, publish._BLOCK, 2 * publish._BLOCK - 1, 2 * publish._BLOCK, values - 1):
        expected = by_the_papers(server, [0.0], changes[:, place : place + 1])
        assert versions[-1][place] == pytest.approx(expected[0], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("server", "carried"),
    [
        (FedAvgServer(), ()),
        (FedAvgMServer(), ("momentum",)),
        (FedAvgMServer(momentum=0.0), ()),
        (FedAdagradServer(), ("accumulator",)),
        (FedAdagradServer(beta_1=0.5), ("momentum", "accumulator")),
        (FedAdamServer(), ("momentum", "accumulator")),
        (FedYogiServer(beta_1=0.0), ("accumulator",)),
    ],
    ids=["fedavg", "fedavgm", "fedavgm-0", "fedadagrad", "fedadagrad-beta_1", "fedadam", "fedyogi-0"],
)
def test_an_optimiser_carries_exactly_the_state_it_needs(server, carried):
    assert state_names(server) == carried
    # With a state free of noise, a change of 0 moves nothing, so what a job froze stays unchanged.
    before = {name: np.zeros(3, np.float32) if name == "momentum" else np.ones(3, np.float32) for name in carried}
    step, after = step_of(server, np.zeros(3), before)
    assert not step.any()
    assert tuple(after) == carried
    job, sums = a_job(server), np.zeros(layout_of(a_job(server), MEMBERS).values, np.uint32)
    if carried:
        with pytest.raises(StateNeeded, match=f"{server.optimiser} needs its state from earlier rounds"):
            next_version(job, MEMBERS, MEMBERS, sums, np.zeros(VALUES, np.float32))
    else:
        next_version(job, MEMBERS, MEMBERS, the_sum(job, np.zeros(VALUES)), np.zeros(VALUES, np.float32))


def steps_by(server, change, rounds):
    """The steps of a coordinate whose change stays the same, in learning rates. `change` is in units of tau."""
    state = {name: np.full(1, state_start(server, name), np.float32) for name in state_names(server)}
    steps = []
    for _ in range(rounds):
        step, after = step_of(server, np.array([change * server.tau]), state)
        state = {name: block.astype(np.float32) for name, block in after.items()}
        steps.append(float(step[0]) / server.learning_rate)
    return steps


@pytest.mark.parametrize(
    ("server", "full", "first"),
    [
        (FedAdagradServer(), 1.0, {1: 0.414, 10: 0.905, 100: 0.990}),
        (FedAdagradServer(beta_1=0.8), 0.2, {1: 0.414, 10: 0.905, 100: 0.990}),
        (FedAdamServer(), 1.0, {1: 0.050, 10: 0.415, 100: 0.905}),
        (FedYogiServer(), 1.0, {1: 0.050, 10: 0.414, 100: 0.905}),
        # tau / sqrt(1 - beta_2) is 2 tau here, and (1 - beta_1) / sqrt(1 - beta_2) a half.
        (FedAdamServer(beta_1=0.75, beta_2=0.75), 0.5, {2: 0.430, 20: 0.906, 200: 0.990}),
    ],
    ids=["adagrad", "adagrad-beta_1", "adam", "yogi", "adam-other"],
)
def test_the_first_steps_are_as_long_as_docs_jobs_says(server, full, first):
    assert {change: steps_by(server, change, 1)[0] / full for change in first} == pytest.approx(first, abs=1e-3)
    assert steps_by(server, 1e5, 1)[0] == pytest.approx(full, rel=1e-3)


def test_later_steps_are_as_long_as_docs_jobs_says():
    far = steps_by(FedAdagradServer(), 1e4, 100)
    assert [far[3], far[99]] == pytest.approx([1 / 2, 1 / 10], rel=1e-3)
    for server in (FedAdamServer(), FedYogiServer()):
        far = steps_by(server, 1e4, 100)
        assert max(far) == pytest.approx(2.1, abs=0.04)
        assert far.index(max(far)) + 1 in (12, 13)
        for change in (1, 10, 1000):
            assert steps_by(server, change, 1000)[-1] == pytest.approx(change / (change + 1), rel=0.01)


@pytest.mark.parametrize("server", [FedAdamServer(), FedYogiServer(), FedAdagradServer()], ids=lambda s: s.optimiser)
def test_an_accumulator_is_never_negative(server):
    random = np.random.default_rng(2)
    state = {name: np.full(1000, 0.0 if name == "momentum" else 1e-6, np.float32) for name in state_names(server)}
    for _ in range(50):
        change = random.normal(size=1000) * 10.0 ** random.integers(-30, 5)
        step, after = step_of(server, change, state)
        state = {name: block.astype(np.float32) for name, block in after.items()}
        assert (state["accumulator"] >= 0).all()
        assert np.isfinite(step).all()


# ---- with groups, noise and mechanisms ------------------------------------------------------------------------------


def grouped(server, **numbers):
    job = job_document(
        Aggregation(groups=3, assumed_corrupt=1, max_weight=1, bits=32, **numbers), min_members=12, target_members=12
    )
    return job.model_copy(update={"server": server, "values": VALUES})


def group_sums(job, levels):
    """The sums of three groups of four members; all members of a group made the same change."""
    layout, sums = layout_of(job, 12), []
    for level in levels:
        total = np.zeros(layout.values, np.uint32)
        for _ in range(4):
            update = Update(np.full(VALUES, level, np.float32), 1, 0, 0, 1)
            total += protection_of(job, 1).encode(job, update, 12, SOURCE)
        sums.append(GroupSum(4, total & np.uint32(2**layout.bits - 1)))
    return sums


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean", "reject-outliers"])
def test_with_groups_the_optimiser_takes_the_combined_change(rule):
    job, levels = grouped(SERVERS["fedadam"], combine=rule), [(0.125, 0.25, -0.5), (0.0625, 0.125, 0.125)]
    base, before, combined = np.zeros(VALUES, np.float32), None, []
    for each in levels:
        plain = next_version_of_groups(
            grouped(FedAvgServer(), combine=rule), 12, group_sums(job, each), np.zeros(VALUES, np.float32)
        ).values
        combined.append(plain.copy())
        state = StateVectors(job.server, VALUES, before)
        base = next_version_of_groups(job, 12, group_sums(job, each), base, state=state).values
        before = state.after
    expected = by_the_papers(job.server, np.zeros(VALUES), combined)
    assert np.abs(base - expected).max() < 1e-6
    with pytest.raises(StateNeeded):
        next_version_of_groups(job, 12, group_sums(job, levels[0]), base)


@pytest.mark.parametrize("server", [SERVERS["fedavgm"], SERVERS["fedyogi"]], ids=["fedavgm", "fedyogi"])
def test_noise_after_aggregation_comes_before_the_optimiser(server):
    """The optimiser's state is noisy, and that state moves the version."""
    exact = a_job(server)
    blurred = exact.model_copy(update={"aggregation": Aggregation(max_weight=1, bits=32, noise_after=0.25)})
    change, zeros = np.full(VALUES, 0.125), np.zeros(VALUES, np.float32)
    quiet, loud = (StateVectors(server, VALUES) for _ in range(2))
    next_version(exact, MEMBERS, MEMBERS, the_sum(exact, change), zeros, state=quiet)
    values = next_version(
        blurred, MEMBERS, MEMBERS, the_sum(blurred, change), zeros, SeededRandom("noise"), state=loud
    ).values
    noised = (
        next_version(
            blurred.model_copy(update={"server": FedAvgServer()}),
            MEMBERS,
            MEMBERS,
            the_sum(blurred, change),
            zeros,
            SeededRandom("noise"),
        )
    ).values
    assert np.std(noised - change) > 0.1
    assert np.abs(values - by_the_papers(server, zeros, [noised])).max() < 1e-6
    for name in state_names(server):
        assert np.abs(loud.after[name] - quiet.after[name]).max() > 1e-3


def test_under_a_mechanism_the_optimiser_takes_the_mean_over_members():
    job = a_job(SERVERS["fedadam"], mechanism=GaussianUpdate(noise_multiplier=1.0, clip=1.0))
    layout = layout_of(job, MEMBERS)
    change = np.random.default_rng(3).uniform(-2, 2, VALUES)
    encoded = np.round(change * MEMBERS * layout.segments[0].scale).astype(np.int64)
    total = (encoded % 2**layout.bits).astype(np.uint32)
    state = StateVectors(job.server, VALUES)
    step = next_version(job, MEMBERS, MEMBERS, total, np.zeros(VALUES, np.float32), state=state)
    assert step.training is None
    assert np.abs(step.values - by_the_papers(job.server, np.zeros(VALUES), [change])).max() < 1e-5


def test_a_state_that_would_not_be_finite_is_refused():
    server = FedAdagradServer()
    state = StateVectors(server, VALUES, {"accumulator": np.full(VALUES, np.float32(3.4e38))})
    job = a_job(server).model_copy(update={"aggregation": Aggregation(max_weight=1, coordinate_bound=1e6, bits=32)})
    step = next_version(job, MEMBERS, MEMBERS, the_bounded(job), np.zeros(VALUES, np.float32), state=state)
    assert np.isfinite(step.values).all()
    state = StateVectors(server, VALUES, {"accumulator": np.full(VALUES, np.inf, np.float32)})
    with pytest.raises(ResultInvalid, match="not finite"):
        next_version(job, MEMBERS, MEMBERS, the_bounded(job), np.zeros(VALUES, np.float32), state=state)


def the_bounded(job):
    layout = layout_of(job, MEMBERS)
    total = np.zeros(layout.values, np.uint32)
    for _ in range(MEMBERS):
        total += protection_of(job, 1).encode(job, Update(np.ones(VALUES, np.float32), 1, 0, 0, 1), MEMBERS, SOURCE)
    return total & np.uint32(2**layout.bits - 1)


# ---- what it is for -------------------------------------------------------------------------------------------------


def loss_after(server, rounds, curvature, optima):
    """The loss after some rounds. Members take 5 local steps a round on quadratics of one curvature, optima differ."""
    x = np.zeros(curvature.size)
    state = StateVectors(server, x.size).take(x.size)
    for _ in range(rounds):
        changes = []
        for optimum in optima:
            local = x.copy()
            for _ in range(5):
                local -= 0.5 * curvature * (local - optimum)
            changes.append(local - x)
        step, after = step_of(server, np.mean(changes, axis=0), state)
        x = x + step
        state = {name: block.astype(np.float32) for name, block in after.items()}
    return float(0.5 * np.sum(curvature * np.square(x - optima.mean(axis=0))))


def test_fedadam_beats_fedavg_at_any_rate_on_a_badly_scaled_quadratic():
    random = np.random.default_rng(4)
    curvature = 10 ** random.uniform(-4, 0, 50)
    optima = random.normal(size=(10, 50)) + random.normal(size=50)
    rates = [10.0**power for power in (-3, -2, -1.5, -1, -0.5, 0, 0.25)]
    averaged = min(loss_after(FedAvgServer(learning_rate=rate), 100, curvature, optima) for rate in rates)
    adaptive = min(loss_after(FedAdamServer(learning_rate=rate, tau=1e-6), 100, curvature, optima) for rate in rates)
    assert adaptive < averaged / 4
