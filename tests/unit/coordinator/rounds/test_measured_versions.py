"""Noised metrics through the real driver, database and store: estimates, the best version, an early stop, and kills.

Round r measures version r - 1, which it starts from. The last version is measured by nobody.
"""

import numpy as np
import pytest

from coordinator.domain.jobs import JobStatus
from coordinator.domain.validation import Validation
from coordinator.metrics import Metrics
from coordinator.rounds.measuring import measure
from coordinator.rounds.publish import GroupSum
from coordinator.storage import records
from coordinator.storage.database import Database
from coordinator.storage.prune import Retention, kept
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from tacit.job import Aggregation
from tacit.mechanism import DpSgd
from tacit.reason import Reason
from tacit.validation import HALF, NoisedMetrics
from tacit.vector import layout_of
from tests.support.fleet import VALUES, job_document
from tests.support.sum_fleet import SeededRandom
from tests.unit.coordinator.rounds import test_optimiser_driver as driven

MEMBERS = driven.MEMBERS
UNITS = 400
BOUND = 4.0
# By version.
ACCURACIES = (0.5, 0.7, 0.8, 0.8, 0.8, 0.9, 0.9)
COUNT = 7


def a_job(*, aggregation=Aggregation(), **metrics):  # noqa: B008
    given = {"noise_multiplier": 0.1, "loss_bound": BOUND, "patience": 2, "min_improvement": 0.02, **metrics}
    more = {"mechanism": DpSgd(noise_multiplier=1.0, clip=1.0, lot=8), "metrics": NoisedMetrics(**given)}
    rounds = {} if aggregation.groups is None else {"min_members": 12, "target_members": 12}
    return job_document(aggregation, count=COUNT, **rounds).model_copy(update=more)


def steps(units, accuracy, loss=0.25):
    """The metrics of a member with that many units, without noise."""
    return (
        np.array([units * (2 * HALF * loss - HALF), units * (2 * HALF * accuracy - HALF), units * HALF])
        .round()
        .astype(int)
    )


class Crowd(driven.Crowd):
    """Members with equally many units, whose answers are right as often as `ACCURACIES` says."""

    units = UNITS

    def vector(self, name, round):
        change = np.full(VALUES, 0.01 * round, np.float32)
        measured = steps(self.units, ACCURACIES[round - 1])
        update = Update(change, 10, 0.0, 0, 0, measured=measured)
        return protection_of(self.job, 10).encode(self.job, update, len(MEMBERS), SeededRandom(f"{name}/{round}"))


class Coordinator(driven.Coordinator):
    """The coordinator of such members."""

    crowd = Crowd

    def estimates(self):
        return self.read(records.load_job).estimates


def test_a_job_stops_early_says_why_and_keeps_its_best_version(tmp_path):
    coordinator = Coordinator(tmp_path / "one", a_job())
    died, crowd = coordinator.run()
    assert not died
    stored = coordinator.read(records.load_job)
    assert (stored.status, stored.reason, stored.version_number) == (JobStatus.FINISHED, "no_improvement", 5)
    assert {each.reason for each in crowd.ended} == {Reason.REASON_NO_IMPROVEMENT}
    # Each measured version is the one that its round started from, and nobody measured the last one.
    versions = coordinator.read(records.versions)
    assert [each.estimate and each.estimate.round for each in versions] == [1, 2, 3, 4, 5, None]
    for version in versions[:-1]:
        found = version.estimate.estimate
        assert found.accuracy.value == pytest.approx(ACCURACIES[version.number], abs=1e-3)
        assert found.loss.value == pytest.approx(0.25 * BOUND)
        assert found.units.value == len(MEMBERS) * UNITS
        assert 0 < found.accuracy.error < 0.02
    assert (stored.best.version_number, stored.newest_shown.version_number) == (2, 4)
    entries = [each for each in coordinator.read(lambda s, job: records.journal(s)) if each.kind == "version_measured"]
    assert [each.fields["number"] for each in entries] == [0, 1, 2, 3, 4]
    assert entries[2].fields["version"] == versions[2].digest.hex()
    assert entries[2].fields["accuracy_error"] == versions[2].estimate.estimate.accuracy.error
    value = coordinator.metrics.value
    assert (value("estimate_version", job="questions"), value("best_version", job="questions")) == (4, 2)
    assert value("best_accuracy", job="questions") == pytest.approx(0.8)
    assert value("best_accuracy_error", job="questions") == stored.best.estimate.accuracy.error
    assert value("estimate_loss_error", job="questions") == stored.newest_shown.estimate.loss.error
    assert value("versions_measured_total", job="questions", outcome="shown") == 5
    # The best one stays in the store, however few of the newest do.
    assert kept("questions", versions, frozenset(), Retention(newest=1)) == {0, 2, 5}
    assert kept("questions", versions, frozenset(), Retention(newest=1, best=False)) == {0, 5}


def test_a_job_without_patience_does_all_its_rounds(tmp_path):
    coordinator = Coordinator(tmp_path / "one", a_job(patience=0))
    coordinator.run()
    stored = coordinator.read(records.load_job)
    assert (stored.status, stored.reason, stored.version_number) == (JobStatus.FINISHED, "job_finished", COUNT)
    assert [each.version_number for each in stored.estimates] == list(range(COUNT))
    assert stored.best.version_number == 5


def test_only_every_so_many_rounds_measure(tmp_path):
    coordinator = Coordinator(tmp_path / "one", a_job(every=3))
    coordinator.run()
    assert [each.version_number for each in coordinator.estimates()] == [0, 3, 6]


def test_nothing_is_shown_of_too_few_units(tmp_path, monkeypatch):
    monkeypatch.setattr(Crowd, "units", 9)
    coordinator = Coordinator(tmp_path / "one", a_job())
    coordinator.run()
    stored = coordinator.read(records.load_job)
    # It is known which versions were measured, and no number of them is kept.
    assert [(each.version_number, each.members, each.estimate) for each in stored.estimates] == [
        (number, len(MEMBERS), None) for number in range(COUNT)
    ]
    assert (stored.version_number, stored.best, stored.newest_shown) == (COUNT, None, None)
    assert coordinator.metrics.value("versions_measured_total", job="questions", outcome="too_few_units") == COUNT
    assert np.isnan(coordinator.metrics.value("estimate_accuracy", job="questions"))
    said = [
        each.fields for each in coordinator.read(lambda s, job: records.journal(s)) if each.kind == "version_measured"
    ]
    assert {each["accuracy"] for each in said} | {each["units"] for each in said} == {None}


# ---- killed ---------------------------------------------------------------------------------------------------------

# Where the process dies when it records version 5, at which the job stops, and the newest version afterwards.
POINTS = {
    "before the rows": ("publish_version", False, 4),
    "after the rows, before the commit": ("publish_version", True, 4),
    "right after the commit": (None, True, 5),
}


@pytest.mark.parametrize("point", POINTS)
def test_after_a_kill_a_version_and_the_estimate_of_the_one_before_are_both_there_or_neither(
    tmp_path, monkeypatch, point
):
    name, after, there = POINTS[point]
    coordinator = Coordinator(tmp_path / "one", a_job())
    with monkeypatch.context() as patched:
        if name is not None:
            driven._once(patched, records, name, 5, after=after)
        else:
            real = Database.run

            async def commit_and_die(self, work):
                result = await real(self, work)
                if len(coordinator_versions(self)) == there + 1:
                    raise driven.Killed
                return result

            def coordinator_versions(database):
                return database.run_now(lambda s: records.versions(s, coordinator.job.name))

            patched.setattr(Database, "run", commit_and_die)
        died, _ = coordinator.run()
        assert died
    stored = coordinator.read(records.load_job)
    assert (stored.version_number, len(stored.estimates), stored.status) == (there, there, JobStatus.RUNNING)
    coordinator.metrics = Metrics("restarted")
    died, crowd = coordinator.run()
    assert not died
    stored = coordinator.read(records.load_job)
    assert (stored.status, stored.reason, stored.version_number) == (JobStatus.FINISHED, "no_improvement", 5)
    assert [each.version_number for each in stored.estimates] == [0, 1, 2, 3, 4]
    assert stored.best.version_number == 2
    # If the evidence was there, no member was asked for another round.
    assert (crowd.opened == 0) == (there == 5)


# ---- groups, and sums that nobody can have sent ---------------------------------------------------------------------

GROUPS = Aggregation(groups=3, combine="median")


def group_sum(job, cohort, members, metrics):
    layout = layout_of(job, cohort)
    total = np.zeros(layout.values, np.uint32)
    total[job.values :] = np.asarray(metrics).astype(np.int64).astype(np.uint32) & np.uint32(2**layout.bits - 1)
    return GroupSum(members, total)


def test_the_sums_of_all_groups_are_read_as_one():
    job = a_job(aggregation=GROUPS)
    sums = [group_sum(job, 12, 4, steps(300, accuracy)) for accuracy in (0.5, 0.6, 0.7)]
    validation, left_out = measure(job, 1, 12, sums)
    assert (validation.members, left_out) == (12, False)
    assert validation.estimate.accuracy.value == pytest.approx(0.6)
    assert validation.estimate.units.value == 900


def test_a_group_whose_metrics_nobody_can_have_sent_is_left_out_and_said():
    job = a_job(aggregation=GROUPS)
    bad = [4 * job.metrics.noise.largest + 1, 0, 0]
    sums = [group_sum(job, 12, 4, steps(300, 0.6)), group_sum(job, 12, 4, bad), group_sum(job, 12, 3, steps(300, 0.8))]
    validation, left_out = measure(job, 1, 12, sums)
    assert (validation.members, left_out) == (7, True)
    assert validation.estimate.accuracy.value == pytest.approx(0.7)
    assert measure(job, 1, 12, [sums[1]]) == (Validation(4, None), True)


def test_rounds_that_measure_nothing_are_not_read():
    job = a_job(every=2)
    assert measure(job, 2, 3, [group_sum(job, 3, 3, steps(300, 0.6))]) == (None, False)
    assert measure(job_document(), 1, 3, []) == (None, False)
