"""A withdrawal marks what holds a member's updates, in every job that was made from it, and nothing else."""

import pytest

from coordinator.domain.jobs import Norms
from coordinator.storage import records
from coordinator.storage.blobs import open_blobs
from coordinator.storage.errors import NotFound
from coordinator.storage.withdrawal import withdraw
from tests.support.stored_job import fill, make_job

LATER_MS = 1_900_000_000_000


@pytest.fixture
def store(tmp_path):
    return open_blobs(f"file://{tmp_path / 'store'}")


def marks(database, job):
    return [each.withdrawn for each in database.run_now(lambda s: records.versions(s, job))]


def create(database, store, name, earlier, now_ms):
    document = make_job(name, store)
    database.run_now(
        lambda s: records.create_job(
            s,
            name=name,
            document=document.digest(),
            rounds_total=3,
            version=document.weights,
            now_ms=now_ms,
            earlier=earlier,
        )
    )


def test_all_versions_from_the_first_sum_on_are_marked_once(database, store):
    fill(database, store, rounds=3)
    fill(database, store, "ward", rounds=1)

    def run(who="desk-east", **more):
        return database.run_now(lambda s: withdraw(s, who, {}, LATER_MS, by="op", **more))

    (dry,) = run(dry_run=True)
    assert (dry.job, dry.first, dry.newest, dry.sums, dry.text, dry.marked) == ("desk", 1, 3, (1, 2, 3), True, False)
    assert marks(database, "desk") == [0, 0, 0, 0]
    run()
    assert [each.marked for each in run()] == [True]
    assert marks(database, "desk") == [0, 1, 1, 1]
    assert marks(database, "ward") == [0, 0]
    # It was in the cohort and dropped out, so no sum holds its update.
    assert run("desk-north") == []
    with pytest.raises(NotFound):
        run("nobody")
    entries = database.run_now(records.journal)
    assert [each.kind for each in entries if each.kind.endswith("withdrawn")] == [
        "member_withdrawn",
        "version_withdrawn",
    ]
    assert not any(
        "desk-east" in map(str, each.fields.values()) for each in entries if each.kind == "version_withdrawn"
    )
    newest = database.run_now(lambda s: records.versions(s, "desk"))[-1]

    def publish(s):
        records.publish_version(s, "desk", 4, newest.digest, 4, LATER_MS, norms=Norms(1.0, 1.0, 1.0))

    database.run_now(publish)
    assert marks(database, "desk") == [0, 1, 1, 1, 1]


def test_jobs_that_were_made_from_a_marked_version_are_marked(database, store):
    fill(database, store, rounds=2)
    create(database, store, "before", ("desk", 1), LATER_MS)
    create(database, store, "start", ("desk", 0), LATER_MS)
    earlier = {"before": ("desk", 1), "start": ("desk", 0), "after": ("desk", 2), "last": ("before", 0)}
    create(database, store, "last", ("before", 0), LATER_MS + 1)

    def run():
        return database.run_now(lambda s: withdraw(s, "desk-east", earlier, LATER_MS + 5, by="op"))

    assert [(each.job, each.first) for each in run()] == [("desk", 1), ("before", 0), ("last", 0)]
    create(database, store, "after", ("desk", 2), LATER_MS + 9)
    assert {job: marks(database, job) for job in earlier} == {"before": [1], "start": [0], "after": [1], "last": [1]}
    # The job that came later has the mark from its start, and gets no second one.
    assert all(each.marked for each in run())
    assert marks(database, "after") == [1]
    told = [each for each in database.run_now(records.journal) if each.subject == "after"]
    assert [each.fields["members"] for each in told if each.kind == "version_withdrawn"] == [1]
