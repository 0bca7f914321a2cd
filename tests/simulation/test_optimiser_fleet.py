"""A job with a server optimiser, in one thread: whenever the coordinator crashes, versions follow from opened sums."""

import hashlib

import numpy as np
import pytest

from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from coordinator.rounds.optimiser import StateVectors
from coordinator.rounds.publish import GroupSum, next_version, next_version_of_groups
from edge_client.policy.policy import Policy
from tacit.job import Aggregation
from tacit.server_optimiser import FedAdamServer, FedAvgMServer
from tests.support.fleet import VALUES, Fleet, job_document

SERVERS = {"fedadam": FedAdamServer(learning_rate=0.1), "fedavgm": FedAvgMServer(learning_rate=0.5)}


def a_fleet(server, seed, groups=None):
    if groups is None:
        job, members = job_document(count=4), 5
    else:
        numbers = Aggregation(groups=groups, assumed_corrupt=1, combine="median", max_weight=100)
        job, members = job_document(numbers, count=3, min_members=12, target_members=12), 12
    policy = None if groups is None else Policy(mechanisms=("none",), assumed_corrupt=1)
    return Fleet(members, seed=seed, policy=policy, job=job.model_copy(update={"server": server})).connect()


def check_versions(fleet):
    """Computes every published version and state again from what was opened for it. Returns their number."""
    base, before = np.zeros(VALUES, np.float32), None
    published = [record for record in fleet.records if isinstance(record, fx.PublishVersion)]
    ended = {record.version: record for record in fleet.ends() if record.published}
    for record in published:
        end = ended[record.digest]
        sums = [
            GroupSum(len(survivors), total.copy()) for survivors, total in fleet.group_results[end.attempt].values()
        ]
        cohort = next(
            len(each.cohort)
            for each in fleet.records
            if isinstance(each, fx.OpenAttempt) and each.attempt == end.attempt
        )
        state = StateVectors(fleet.job.server, VALUES, before)
        if fleet.job.aggregation.groups is None:
            base = next_version(fleet.job, cohort, sums[0].members, sums[0].total, base, state=state).values
        else:
            base = next_version_of_groups(fleet.job, cohort, sums, base, state=state).values
        before = state.after
        assert record.digest == hashlib.sha256(base.tobytes()).digest()
        assert record.server_state == {
            name: hashlib.sha256(vector.tobytes()).digest() for name, vector in before.items()
        }
        assert record.optimiser == fleet.job.server.optimiser
    return len(published)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("groups", [None, 3], ids=["one-sum", "groups"])
def test_every_version_follows_from_what_was_opened(name, groups):
    fleet = a_fleet(SERVERS[name], 0, groups).run()
    assert fleet.state.status is JobStatus.FINISHED
    assert check_versions(fleet) == fleet.job.rounds.count


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 24))])
def test_crashes_at_any_moment_lose_no_state(seed):
    fleet = a_fleet(SERVERS["fedadam"], seed)
    # A round takes a little more than a second, of which publishing takes DELAY_MS.
    for at in sorted(np.random.default_rng(seed).integers(200, 9000, 5)):
        fleet.at(int(at), fleet.crash_coordinator)
    fleet.run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert check_versions(fleet) == 4
    assert fleet.state.server_state == next(
        record.server_state for record in reversed(fleet.records) if isinstance(record, fx.PublishVersion)
    )


def test_a_crash_before_the_version_repeats_the_round_from_the_same_state():
    fleet = a_fleet(SERVERS["fedadam"], 0)
    crashed = []
    compute = fleet._compute

    def computes_and_dies(effect):
        compute(effect)
        if fleet.state.version_number == 2 and not crashed:
            crashed.append(effect.attempt)
            # Before the event that it is computed, which the crash forgets.
            fleet.at(0, fleet.crash_coordinator)

    fleet._compute = computes_and_dies
    fleet.run()
    assert len(crashed) == 1
    assert not any(end.published for end in fleet.ends() if end.attempt == crashed[0])
    assert check_versions(fleet) == 4
