"""A publication whose commit is answered late, or never, through the real driver, database server and store.

It neither stands as failed, nor is overwritten as abandoned, nor leaves a version that members cannot fetch.
"""

import errno
from contextlib import closing

import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.orm import Session

from coordinator.domain.jobs import JobStatus
from coordinator.storage import database as module
from coordinator.storage import lease, records, withdrawal
from coordinator.storage.database import Fence, engine_of, open_database
from tests.support.lost_answers import HeldCommits, Loses, LostAnswers, when_asked
from tests.support.postgres import running_postgres
from tests.unit.coordinator.rounds import test_optimiser_driver as driven

# The version whose commit is held up.
LATE = 2


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as server:
        yield server


@pytest.fixture
def way(postgres):
    with closing(LostAnswers(postgres.port)) as way:
        yield way


class Coordinator(driven.Coordinator):
    """One of several over a PostgreSQL, by a way that loses the answer to the commit of version `LATE`."""

    def __init__(self, folder, job, url, way):
        self.url, self.way, self.fence = url, way, None
        super().__init__(folder, job)
        self.takes_lease()

    def takes_lease(self):
        """Takes the lease, as the next process does.

        Raises:
            DBAPIError: a commit under the one before is under way.
        """
        engine = engine_of(self.url)
        with Session(engine) as session:
            session.execute(text("UPDATE lease SET expires_ms = 0"))
            taken, mine = lease.take(session, "a holder", "a:1")
            session.commit()
        engine.dispose()
        assert mine
        self.fence = Fence(taken.fence, taken.holder, self.lost)

    def lost(self, why):
        raise driven.Killed(why)

    def new_database(self):
        return open_database(self.url)

    def database(self):
        return open_database(self.way.url(self.url), fence=self.fence)

    def spoils_publication(self, monkeypatch, loses):
        """Loses something of the first commit of version `LATE`."""
        real = records.publish_version

        def publish(session, job, number, *given, **named):
            if number == LATE and not self.way.cuts:
                self.way.armed = loses
            real(session, job, number, *given, **named)

        monkeypatch.setattr(records, "publish_version", publish)


@pytest.fixture
def coordinator(tmp_path, postgres, way):
    return Coordinator(tmp_path / "one", driven.a_job(), postgres.database(migrated=True), way)


def check_published(coordinator):
    """Checks that the whole job was published, each round by one attempt, and that everything of it is known."""
    assert coordinator.way.cuts == 1
    assert driven.kept(coordinator) == driven.by_hand(coordinator.job)
    rounds = coordinator.read(records.rounds)
    assert [[each.outcome for each in one.attempts] for one in rounds] == [["published"]] * driven.ROUNDS
    assert [one.outcome for one in rounds] == ["published"] * driven.ROUNDS
    # A withdrawal finds every sum that held the member.
    lines, marks = coordinator.read(lambda s, job: (withdrawal._lines(s), withdrawal._marks(s, "m0")))
    found = coordinator.read(lambda s, job: withdrawal._found(s, "m0", lines, marks))
    assert (found["questions"].first, found["questions"].sums) == (1, driven.ROUNDS)
    versions = coordinator.read(records.versions)
    assert {each.digest for each in versions} <= coordinator.fetchable


@pytest.mark.parametrize("loses", [Loses.PATIENCE, Loses.ANSWER], ids=["late", "answer-lost"])
def test_a_publication_that_is_answered_late_is_one_like_any_other(coordinator, monkeypatch, loses):
    held = HeldCommits(coordinator.url, "versions", f"NEW.number = {LATE}")
    if loses is Loses.ANSWER:
        held.release()
    coordinator.spoils_publication(monkeypatch, loses)
    with when_asked(held.release):
        died, crowd = coordinator.run()
    assert not died
    assert crowd.opened == driven.ROUNDS * len(driven.MEMBERS)
    assert coordinator.read(records.load_job).status is JobStatus.FINISHED
    assert coordinator.metrics.value("job_failures_total", job="questions") == 0
    check_published(coordinator)


def test_a_publication_that_nobody_answers_for_ends_the_process_and_the_next_one_goes_on(coordinator, monkeypatch):
    """What the first would store about its failure, the commit would contradict."""
    monkeypatch.setattr(module, "MAX_DOUBT_SECONDS", 0.3)
    monkeypatch.setattr(lease, "MAX_LOCK_MS", 50)
    held = HeldCommits(coordinator.url, "versions", f"NEW.number = {LATE}")
    coordinator.spoils_publication(monkeypatch, Loses.PATIENCE)
    died, _ = coordinator.run()
    assert died
    with pytest.raises(Exception, match="lock timeout"):
        coordinator.takes_lease()
    held.release()
    coordinator.takes_lease()
    stored = coordinator.read(records.load_job)
    assert (stored.status, stored.version_number) == (JobStatus.RUNNING, LATE)
    # As a starting process does.
    coordinator.fetchable.add(stored.version)
    died, _ = coordinator.run()
    assert not died
    check_published(coordinator)


def test_a_publication_that_never_arrived_is_a_failure_that_nothing_contradicts(coordinator, monkeypatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 1)
    coordinator.spoils_publication(monkeypatch, Loses.COMMIT)
    died, _ = coordinator.run()
    assert not died
    stored = coordinator.read(records.load_job)
    assert (stored.status, stored.reason, stored.version_number) == (JobStatus.PAUSED, "internal", LATE - 1)
    attempt = coordinator.read(records.rounds)[-1].attempts[-1]
    assert (attempt.outcome, attempt.reason, attempt.new_version) == ("abandoned", "internal", None)
    assert coordinator.metrics.value("job_failures_total", job="questions") == 1
    died, _ = coordinator.run(resume=True)
    assert not died
    assert driven.kept(coordinator) == driven.by_hand(coordinator.job)


def test_a_version_that_is_found_after_a_failure_may_be_fetched(tmp_path):
    """The publication was committed, but its driver heard of a failure: no room for the log's line about it."""
    failed = []

    def full_once(_logger, _method, line):
        if line["event"] == "journal_head" and not failed:
            failed.append(line)
            raise OSError(errno.ENOSPC, "no space left")
        raise structlog.DropEvent

    structlog.configure(processors=[full_once])
    coordinator = driven.Coordinator(tmp_path / "one", driven.a_job())
    died, _ = coordinator.run()
    assert not died
    stored = coordinator.read(records.load_job)
    assert (stored.status, stored.reason, stored.version_number) == (JobStatus.PAUSED, "internal", 1)
    assert stored.version in coordinator.fetchable
    died, _ = coordinator.run(resume=True)
    assert not died
    assert driven.kept(coordinator) == driven.by_hand(coordinator.job)
