"""The lease of several coordinators over one PostgreSQL: who may take it, and that nobody commits without it."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from coordinator.storage import database as module
from coordinator.storage import lease as lease_module
from coordinator.storage import records
from coordinator.storage.database import Fence, engine_of, open_database
from coordinator.storage.errors import DatabaseInUse, DatabaseUnusable, LeaseLost
from coordinator.storage.lease import LEASE_SECONDS, MARGIN_SECONDS, Candidate, Held, Lease, Term, how_taken, take
from tests.support.processes import PATIENCE, within_patience

# ---- decisions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lease", "now_ms", "how"),
    [
        (Lease(0, "", "", 0, 0), 0, "first"),
        (Lease(3, "", "a:1", 10, 0), 5, "released"),
        (Lease(3, "one", "a:1", 10, 100), 99, None),
        (Lease(3, "one", "a:1", 10, 100), 100, "expired"),
    ],
)
def test_how_a_lease_may_be_taken(lease, now_ms, how):
    assert how_taken(lease, now_ms) == how


@given(
    renewals=st.lists(st.tuples(*[st.floats(0, 20)] * 4), max_size=20),
    offset=st.floats(-1e6, 1e6),
)
def test_a_holder_never_believes_longer_than_the_database(renewals, offset):
    """Whatever the database's clock says, and however long a renewal takes on its way there and back."""
    now, ends = 100.0, 100.0 + offset + LEASE_SECONDS
    term = Term(now)
    for pause, there, back, later in renewals:
        asked = now + pause
        ends = asked + there + offset + LEASE_SECONDS
        now = asked + there + back
        term.renewed(asked)
        if term.runs(now + later):
            assert now + later + offset < ends - MARGIN_SECONDS + 1e-6


def test_a_late_answer_does_not_shorten_a_lease():
    term = Term(0.0)
    term.renewed(3.0)
    term.renewed(1.0)
    assert term.runs(3.0 + LEASE_SECONDS - MARGIN_SECONDS - 0.01)
    assert not term.runs(3.0 + LEASE_SECONDS - MARGIN_SECONDS)


# ---- on a real server --------------------------------------------------------------------------------------------


class Lost:
    """Hears that a lease was lost."""

    def __init__(self) -> None:
        self.why = ""
        self.heard = threading.Event()

    def __call__(self, why: str) -> None:
        self.why = why
        self.heard.set()


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def url(postgres):
    return postgres.database(migrated=True)


def expire(url):
    engine = engine_of(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE lease SET expires_ms = 0"))
    engine.dispose()


def note(number):
    return lambda s: records.note(s, "test", "subject", number)


def taken(url, address, lost=None, **more):
    found = Candidate(url, address).take(lost or Lost(), **more)
    assert isinstance(found, Held)
    return found


def test_one_holds_the_lease_until_it_releases_it(url):
    first = taken(url, "a:1")
    second = Candidate(url, "b:1")
    seen = second.take(Lost())
    assert isinstance(seen, Lease)
    assert (seen.fence, seen.address) == (1, "a:1")
    database = open_database(url, fence=first.fence)
    database.run_now(note(1))
    database.close()
    first.release()
    assert not first.runs()
    after = second.take(Lost())
    assert isinstance(after, Held)
    assert after.lease.fence == 2
    after.release()
    database = open_database(url)
    entries = [entry for entry in database.run_now(records.journal) if entry.kind == "lease_taken"]
    database.close()
    assert [entry.fields for entry in entries] == [
        {"fence": 1, "address": "a:1", "how": "first", "before": ""},
        {"fence": 2, "address": "b:1", "how": "released", "before": "a:1"},
    ]


def test_whoever_lost_the_lease_commits_and_reads_nothing_more(url):
    """It was asleep, and believes what it believed before."""
    lost = Lost()
    # Not renewed: its thread sleeps as long as the process.
    asleep = Fence(1, "asleep", lost)
    engine = engine_of(url)
    with Session(engine) as session:
        assert take(session, "asleep", "a:1")[1]
        session.commit()
    database = open_database(url, fence=asleep)
    database.run_now(note(1))
    expire(url)
    # Nobody has taken it yet, so nothing can be contradicted.
    database.run_now(note(2))
    second = taken(url, "b:1")
    for work in (note(3), records.head):
        with pytest.raises(LeaseLost, match="commits nothing more"):
            database.run_now(work)
    assert lost.heard.is_set()
    database.close()
    active = open_database(url, fence=second.fence)
    active.run_now(note(4))
    assert [entry.at_ms for entry in active.run_now(records.journal) if entry.kind == "test"] == [1, 2, 4]
    active.close()
    second.release()
    engine.dispose()


def test_a_holder_hears_that_it_cannot_be_sure_any_more(url):
    """By its own clock, whether or not the database answers: it may be cut off."""
    lost, clock = Lost(), Clock()
    held = taken(url, "a:1", lost, clock=clock)
    assert held.runs()
    clock.now += LEASE_SECONDS - MARGIN_SECONDS
    assert not held.runs()
    assert lost.heard.wait(PATIENCE)
    assert "could not be renewed" in lost.why
    held.release()


def test_a_lease_is_renewed_and_a_holder_hears_that_another_one_has_it(url):
    lost = Lost()
    held = taken(url, "a:1", lost)
    # As if another coordinator had taken it.
    engine = engine_of(url)
    with engine.begin() as connection:
        before = connection.scalar(text("SELECT expires_ms FROM lease"))
    renewed = before
    while renewed == before:
        with engine.begin() as connection:
            renewed = connection.scalar(text("SELECT expires_ms FROM lease"))
    assert renewed > before
    with engine.begin() as connection:
        connection.execute(text("UPDATE lease SET fence = fence + 1, holder = 'another'"))
    engine.dispose()
    assert lost.heard.wait(PATIENCE)
    assert "another coordinator has taken" in lost.why
    assert not held.runs()
    # It releases nothing that is not its own.
    held.release()
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT holder FROM lease")) == "another"
    engine.dispose()


def test_a_coordinator_that_stops_in_a_transaction_holds_nobody_up(url, monkeypatch):
    """Its locks, here the journal's, are gone before its lease has ended."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 1)
    engine = engine_of(url)
    with Session(engine) as session:
        take(session, "asleep", "a:1")
        session.commit()
    engine.dispose()
    stopped, wakes = threading.Event(), threading.Event()
    database = open_database(url, fence=Fence(1, "asleep", Lost()))

    def work(session):
        records.note(session, "test", "subject", 1)
        stopped.set()
        assert wakes.wait(PATIENCE)

    failed: list[BaseException] = []

    def run() -> None:
        try:
            database.run_now(work)
        except DatabaseUnusable as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert stopped.wait(PATIENCE)
    expire(url)
    # The first try may find the journal locked, and be repeated.
    candidate = Candidate(url, "b:1")
    while True:
        with suppress(DatabaseUnusable):
            found = candidate.take(Lost())
            if isinstance(found, Held):
                break
    wakes.set()
    thread.join(PATIENCE)
    assert len(failed) == 1
    database.close()
    active = open_database(url, fence=found.fence)
    assert [entry.kind for entry in active.run_now(records.journal) if entry.kind == "test"] == []
    active.close()
    found.release()


class Halting:
    """Halts the thread of a name before its next commit, as SIGSTOP halts a process, until `wakes` is set."""

    def __init__(self) -> None:
        self.thread = ""
        self.halted, self.wakes = threading.Event(), threading.Event()

    def __call__(self, _connection: object) -> None:
        if threading.current_thread().name == self.thread and not self.halted.is_set():
            self.halted.set()
            assert self.wakes.wait(PATIENCE)


@pytest.fixture
def halting() -> Iterator[Halting]:
    made = Halting()
    event.listen(Engine, "commit", made)
    yield made
    made.wakes.set()
    for thread in threading.enumerate():
        if thread.name == made.thread:
            thread.join(PATIENCE)
    event.remove(Engine, "commit", made)


def takes_at_last(url: str) -> Held:
    """Takes the lease in at most five tries. Each waits for its locks as long as the database lets it."""
    candidate = Candidate(url, "c:1")
    for _ in range(5):
        with suppress(DatabaseUnusable):
            if isinstance(found := candidate.take(Lost()), Held):
                return found
    raise AssertionError("the halted coordinator still has its locks")


@pytest.fixture
def ends_at_once(monkeypatch):
    """A lease that has ended when it is taken or renewed. Its holder renews it all the same."""
    monkeypatch.setattr(lease_module, "LEASE_SECONDS", 0.001)
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)


def test_a_holder_that_stops_in_a_renewal_holds_nobody_up(url, halting, ends_at_once):
    halting.thread = "lease-renewal"
    first = taken(url, "a:1")
    assert halting.halted.wait(PATIENCE)
    second = takes_at_last(url)
    assert second.lease.fence == 2
    halting.wakes.set()
    second.release()
    first.release()


def test_a_standby_that_stops_while_it_takes_the_lease_holds_nobody_up(url, halting, ends_at_once):
    """It has the journal's lock as well, so the others could write nothing either."""
    failed: list[BaseException] = []

    def take_and_halt() -> None:
        try:
            Candidate(url, "b:1").take(Lost())
        except DatabaseUnusable as error:
            failed.append(error)

    halting.thread = "halted"
    thread = threading.Thread(target=take_and_halt, name="halted")
    thread.start()
    assert halting.halted.wait(PATIENCE)
    second = takes_at_last(url)
    assert second.lease.fence == 1
    database = open_database(url, fence=second.fence)
    database.run_now(note(1))
    # When it wakes, it has nothing.
    halting.wakes.set()
    thread.join(PATIENCE)
    assert len(failed) == 1
    database.run_now(note(2))
    database.close()
    second.release()


def test_a_halted_renewal_has_given_its_locks_back_when_the_lease_ends():
    assert lease_module.RENEW_SECONDS + lease_module.MAX_IDLE_SECONDS < LEASE_SECONDS


def test_commands_that_need_the_whole_database_and_coordinators_exclude_each_other(url, monkeypatch):
    held = taken(url, "a:1")
    active = open_database(url, fence=held.fence)
    with monkeypatch.context() as soon:
        soon.setattr(module, "TAKEOVER_MS", 200)
        with pytest.raises(DatabaseInUse, match="another coordinator serves"):
            open_database(url, sole=True)
    active.close()
    held.release()
    alone = open_database(url, sole=True)
    # A standby waits until the command has ended.
    candidate = Candidate(url, "b:1")
    assert isinstance(candidate.take(Lost()), Lease)
    alone.close()
    # PostgreSQL notices a connection that was closed a little later.
    tries = []

    def takes():
        tries.append(candidate.take(Lost()))
        return isinstance(tries[-1], Held)

    within_patience(takes)
    tries[-1].release()


def test_a_command_refuses_while_a_lease_is_renewed_whatever_became_of_its_holders_connection(url, monkeypatch):
    monkeypatch.setattr(module, "TAKEOVER_MS", 300)
    held = taken(url, "a:1")
    # Its connection to the database broke, and with it went its share of the lock.
    with pytest.raises(DatabaseInUse, match="another coordinator serves"):
        open_database(url, sole=True)
    held.release()
    open_database(url, sole=True).close()


def test_a_command_that_hangs_in_a_transaction_gives_its_locks_back(url):
    command = open_database(url)
    told = command.run_now(lambda s: s.scalar(text("SHOW idle_in_transaction_session_timeout")))
    command.close()
    assert told == "1min"


# ---- every interleaving ------------------------------------------------------------------------------------------


@dataclass
class Coordinator:
    """One of several: the lease that it believes to hold, and its open transaction."""

    fence: Fence | None = None
    session: Session | None = None
    checked: bool = False


_WHO = st.integers(0, 2)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("expire"), _WHO),
        st.tuples(st.sampled_from(["take", "note", "write", "check", "commit"]), _WHO),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
@example(steps=[("take", 0), ("write", 0), ("check", 0), ("expire", 0), ("take", 1), ("commit", 0)])
@example(steps=[("take", 0), ("note", 0), ("check", 0), ("expire", 0), ("take", 1), ("commit", 0)])
@example(steps=[("take", 0), ("write", 0), ("expire", 0), ("take", 1), ("check", 0), ("commit", 0)])
def test_no_commit_follows_the_next_holder(url, steps, monkeypatch):
    """Three coordinators take leases and do their transactions in steps, in any order that the database allows.

    A commit is always under the newest lease.
    """
    monkeypatch.setattr(lease_module, "MAX_LOCK_MS", 20)
    engine = engine_of(url)
    several = [Coordinator() for _ in range(3)]
    engines = [engine_of(url) for _ in several]
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS written (fence bigint)"))
        connection.execute(text("UPDATE lease SET expires_ms = 0"))
    newest = _newest(engine)

    def drop(one: Coordinator) -> None:
        if one.session is not None:
            one.session.close()
        one.session, one.checked = None, False

    try:
        for number, (step, place) in enumerate(steps):
            one = several[place]
            match step:
                case "expire":
                    with engine.begin() as connection:
                        connection.execute(text("UPDATE lease SET expires_ms = 0"))
                case "take":
                    drop(one)
                    name = f"holder-{place}-{number}"
                    with Session(engines[place]) as session, suppress(DBAPIError):
                        row, mine = take(session, name, f"{place}:1")
                        session.commit()
                        if mine:
                            assert row.fence == newest + 1
                            newest = row.fence
                            one.fence = Fence(row.fence, name, Lost())
                case "note" | "write" if one.fence is not None and one.session is None:
                    one.session = Session(engines[place])
                    try:
                        one.session.execute(text("SET LOCAL lock_timeout = 20"))
                        if step == "note":
                            # Under the journal's lock, which taking the lease needs, too.
                            records.note(one.session, "test", f"fence-{one.fence.number}", number)
                        else:
                            one.session.execute(text("INSERT INTO written VALUES (:n)"), {"n": one.fence.number})
                    except DBAPIError:
                        drop(one)
                case "check" if one.session is not None and one.fence is not None:
                    try:
                        one.fence.check(one.session, writes=True)
                        one.checked = True
                    except LeaseLost:
                        assert one.fence.number != newest
                        drop(one)
                    except DBAPIError:
                        drop(one)
                case "commit" if one.checked and one.session is not None and one.fence is not None:
                    one.session.commit()
                    assert one.fence.number == newest, "a commit after the next holder took the lease"
                    drop(one)
    finally:
        for one in several:
            drop(one)
        for each in (engine, *engines):
            each.dispose()


def _newest(engine) -> int:
    with engine.begin() as connection:
        return int(connection.scalar(text("SELECT fence FROM lease")) or 0)
