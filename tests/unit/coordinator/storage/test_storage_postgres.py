"""What only a server can do: broken connections, two coordinators, an unanswered commit."""

from contextlib import closing

import pytest
from sqlalchemy import create_engine, text

from coordinator.storage import database as module
from coordinator.storage import lease as lease_module
from coordinator.storage import records
from coordinator.storage.database import Database, open_database
from coordinator.storage.errors import DatabaseInUse, DatabaseUnusable, OutcomeUnknown
from coordinator.storage.lease import Candidate, Held
from tests.support.lost_answers import HeldCommits, Loses, LostAnswers, when_asked


def note(number: int):
    return lambda s: records.note(s, "test", "subject", number)


def numbers(database: Database) -> list[int]:
    return [entry.at_ms for entry in database.run_now(records.journal) if entry.kind == "test"]


@pytest.fixture
def briefly(monkeypatch):
    """Shortens the ten seconds that a starting coordinator waits for another one to end."""
    monkeypatch.setattr(module, "TAKEOVER_MS", 200)


def test_a_server_that_is_away_is_a_sentence_until_it_returns(postgres):
    seen: list[bool] = []
    database = open_database(postgres.database(), observe=lambda _seconds, failed: seen.append(failed), sole=True)
    database.run_now(note(1))
    postgres.stop("immediate")
    try:
        for _ in range(2):
            with pytest.raises(DatabaseUnusable, match="that it answers"):
                database.run_now(note(2))
    finally:
        postgres.start()
    database.run_now(note(3))
    assert numbers(database) == [1, 3]
    assert seen == [False, True, True, False, False]
    database.close()


def test_a_second_coordinator_is_refused_until_the_first_has_ended(database_url, briefly):
    first = open_database(database_url, sole=True)
    with pytest.raises(DatabaseInUse, match="another coordinator serves from the database"):
        open_database(database_url, sole=True)
    # Commands that only read, or make a backup, are let in.
    beside = open_database(database_url)
    beside.run_now(note(1))
    beside.close()
    first.run_now(note(2))
    first.close()
    second = open_database(database_url, sole=True)
    assert numbers(second) == [1, 2]
    second.close()


def test_a_coordinator_that_lost_its_place_writes_nothing_more(postgres, briefly):
    """Its connection broke, and another coordinator started before it was back."""
    url = postgres.database()
    first = open_database(url, sole=True)
    first.run_now(note(1))
    postgres.stop("immediate")
    postgres.start()
    second = open_database(url, sole=True)
    with pytest.raises(DatabaseInUse):
        first.run_now(note(2))
    second.run_now(note(3))
    assert numbers(second) == [1, 3]
    second.close()
    # Once the other one has ended, it continues.
    first.run_now(note(4))
    assert numbers(first) == [1, 3, 4]
    first.close()


# ---- a commit without an answer ----------------------------------------------------------------------------------


@pytest.fixture
def url(postgres):
    return postgres.database(migrated=True)


@pytest.fixture
def way(postgres):
    with closing(LostAnswers(postgres.port)) as way:
        yield way


class Serving:
    """A coordinator's database: it holds the lease, and reaches the server by a way that loses answers."""

    def __init__(self, url, way):
        self.lost: list[str] = []
        held = Candidate(url, "a:1").take(self.lost.append)
        assert isinstance(held, Held)
        self.held, self.database = held, open_database(way.url(url), fence=held.fence)
        self.database.run_now(note(1))

    def close(self):
        self.database.close()
        self.held.release()


@pytest.fixture
def serving(url, way):
    with closing(Serving(url, way)) as serving:
        yield serving


def test_work_whose_answer_was_lost_is_not_done_twice_and_not_reported_as_failed(serving, way):
    way.armed = Loses.ANSWER
    serving.database.run_now(note(2))
    assert way.cuts == 1
    assert numbers(serving.database) == [1, 2]


def test_whoever_has_the_database_alone_hears_what_became_of_its_commit(postgres, way):
    with closing(open_database(way.url(postgres.database()), sole=True)) as database:
        way.armed = Loses.ANSWER
        database.run_now(note(1))
        assert way.cuts == 1
        assert numbers(database) == [1]


def test_a_commit_that_is_still_under_way_is_waited_for(serving, way, url):
    """A slow disk, or a replica that must have it first. The new connection is there before the old one's commit."""
    held = HeldCommits(url, "journal", "NEW.at_ms = 2")
    way.armed = Loses.PATIENCE
    # Not before the database has said for the first time that it is in progress.
    with when_asked(held.release):
        serving.database.run_now(note(2))
    assert way.cuts == 1
    assert numbers(serving.database) == [1, 2]


def test_a_database_that_nobody_can_ask_at_first_is_asked_again(serving, way):
    way.armed, way.refusals = Loses.ANSWER, 2
    serving.database.run_now(note(2))
    assert (way.cuts, way.refusals) == (1, 0)
    assert numbers(serving.database) == [1, 2]


def test_a_commit_that_never_arrived_has_failed_once_it_cannot_arrive_any_more(url, way, monkeypatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 1)
    with closing(Serving(url, way)) as serving:
        way.armed = Loses.COMMIT
        with pytest.raises(DatabaseUnusable) as failed:
            serving.database.run_now(note(2))
        # Known, and not only feared.
        assert not isinstance(failed.value, OutcomeUnknown)
        assert way.cuts == 1
        engine = create_engine(url)
        with engine.connect() as connection:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid <> '0'"
            assert connection.scalar(text(waiting)) == 0
        engine.dispose()
        assert serving.lost == []
        serving.database.run_now(note(3))
        assert numbers(serving.database) == [1, 3]


def test_the_database_gives_a_commit_that_never_arrived_up_before_a_coordinator_gives_up_asking():
    assert module.IDLE_SECONDS < module.MAX_DOUBT_SECONDS


def test_a_coordinator_that_cannot_learn_of_its_commit_ends_and_the_next_one_knows(serving, way, url, monkeypatch):
    """It must not go on: what it would write now could be contradicted by a commit that is still under way."""
    monkeypatch.setattr(module, "MAX_DOUBT_SECONDS", 0.3)
    monkeypatch.setattr(lease_module, "MAX_LOCK_MS", 50)
    held = HeldCommits(url, "journal", "NEW.at_ms = 2")
    way.armed = Loses.PATIENCE
    with pytest.raises(OutcomeUnknown, match=r"did not say within 0\.3 seconds whether it took effect"):
        serving.database.run_now(note(2))
    assert len(serving.lost) == 1
    for work in (note(3), records.head):
        with pytest.raises(OutcomeUnknown):
            serving.database.run_now(work)
    assert len(serving.lost) == 1
    # A released lease may be taken at once, but not before the commit has ended one way or the other.
    serving.held.release()
    candidate = Candidate(url, "b:1")
    with pytest.raises(DatabaseUnusable, match="lock timeout"):
        candidate.take(lambda why: None)
    held.release()
    after = candidate.take(lambda why: None)
    assert isinstance(after, Held)
    with closing(open_database(url, fence=after.fence)) as database:
        assert numbers(database) == [1, 2]
    after.release()


def test_a_command_that_cannot_learn_of_its_commit_says_so(postgres, way, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOUBT_SECONDS", 0.3)
    url = postgres.database()
    database = open_database(way.url(url), sole=True)
    database.run_now(note(1))
    way.armed = Loses.ANSWER
    way.close()
    with pytest.raises(OutcomeUnknown, match="see whether it did before you repeat"):
        database.run_now(note(2))
    assert way.cuts == 1
    database.close()
    # Exactly once.
    with closing(open_database(url)) as direct:
        assert numbers(direct) == [1, 2]
