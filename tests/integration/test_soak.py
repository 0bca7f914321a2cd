"""A short soak: kill the coordinator and a member during rounds, then check sums and receipts.

`python -m benchmarks.operations.soak` is the long soak.
"""

import asyncio

import numpy as np
import pytest

from benchmarks.operations import soak
from benchmarks.operations.soak_member import record_of
from tacit.attempt import AttemptId

# The test measures how many seconds a killed coordinator needs to come back, so no other federation may run beside it.
pytestmark = pytest.mark.alone

ROUNDS = 6


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    """The outcome of a soak, and the inputs from which it was computed, so that tests can compute it again."""
    folder, kept = tmp_path_factory.mktemp("soak"), []
    compare = soak.compare

    def keep(*of):
        kept.append(of[1:])
        compare(*of)

    patch = pytest.MonkeyPatch()
    patch.setattr(soak, "compare", keep)
    outcome = asyncio.run(soak.soak(folder, ROUNDS, seed=1, max_kills=2))
    patch.undo()
    return outcome, kept[0]


def test_no_version_is_lost_and_no_update_counts_twice(soaked):
    outcome, _ = soaked
    assert outcome.rounds == ROUNDS
    assert outcome.lost_versions == 0
    assert outcome.double_counts == 0
    assert outcome.parameter_difference == 0.0
    # The comparison was not empty: every survivor that heard of an attempt's end has a receipt.
    assert outcome.receipts >= ROUNDS


def test_the_coordinator_comes_back_within_ten_seconds(soaked):
    outcome, _ = soaked
    assert outcome.coordinator_kills >= 1
    assert len(outcome.recovery_seconds) >= 1
    assert max(outcome.recovery_seconds) < soak.TARGET_RECOVERY


def again(soaked, change):
    """The outcome that the same soak's data gives after `change`, which gets (folder, detail, versions, log)."""
    _, (folder, detail, versions, log) = soaked
    outcome = soak.Outcome()
    soak.compare(outcome, *change(folder, detail, versions, log))
    return outcome


def test_the_check_finds_a_vector_counted_twice(soaked):
    def change(folder, detail, versions, log):
        attempt = next(each for each in detail.rounds[0].attempts if each.outcome == "published")
        name = attempt.survivors[0]
        path = record_of(folder / f"records-{name}", AttemptId(soak.JOB, detail.rounds[0].number, attempt.number))
        given = np.load(path)
        np.save(path, 2 * given)
        undo.append((path, given))
        return folder, detail, versions, log

    undo = []
    outcome = again(soaked, change)
    for path, given in undo:
        np.save(path, given)
    # Every later version differs as well.
    assert outcome.double_counts == ROUNDS
    assert outcome.parameter_difference > 0


def test_the_check_finds_a_lost_version(soaked):
    def change(folder, detail, versions, log):
        forgotten = type(detail).FromString(detail.SerializeToString())
        for attempt in forgotten.rounds[-1].attempts:
            attempt.outcome = "abandoned"
        del forgotten.versions[-1]
        return folder, forgotten, {number: versions[number] for number in range(ROUNDS)}, log

    assert again(soaked, change).lost_versions > 0
