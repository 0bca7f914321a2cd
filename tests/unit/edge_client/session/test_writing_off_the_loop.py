"""While ledger or journal wait for the disk, the session goes on; and nothing leaves before its record is there."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.operations.ledger_faults import LIMIT
from edge_client.ledger.ledger import Ledger, ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.ledger.writer_thread import WriterThread
from edge_client.policy.policy import Policy
from edge_client.session import agent as agent_module
from edge_client.session import states
from edge_client.session.agent import Agent
from edge_client.session.journal import Journal, Memory
from learning.mechanisms.contribution import Update
from tacit.attempt import AttemptId
from tacit.messages import Assignment, JobEnded, Ready
from tacit.reason import Reason
from tests.support import party
from tests.support.places import ROOT
from tests.unit.learning.mechanisms.test_mechanisms import GAUSSIAN, job

ATTEMPT = AttemptId("questions", 1, 1)
DOCUMENT = job(GAUSSIAN)
ASSIGNMENT = Assignment("questions", 1, b"d" * 32, bytes([1]) * 32, 0, 1000)
SECONDS = 20.0


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


class SlowDisk:
    """A ledger's next commit waits here, just before SQLite writes and flushes it, until `go`."""

    def __init__(self, budget) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        # Whether the loop let the commit go.
        self.released = False
        self._armed = True
        budget._ledger._writer._faults = self._fault

    def _fault(self, here: str) -> None:
        if here == "append.inserted" and self._armed:
            self._armed = False
            self.reached.set()
            self.released = self.go.wait(SECONDS)


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, SECONDS)


@pytest.fixture
def budget(tmp_path, identity):
    with open_budget(tmp_path / "home", identity, Policy(), ["one", "two"]) as opened:
        yield opened


def reserve(budget):
    return budget.reserve(ASSIGNMENT, DOCUMENT, budget.protection(DOCUMENT, 200))


def agent_of(budget, journal=None, **more):
    journal = journal or SimpleNamespace(memory=lambda: Memory({}))
    observer = SimpleNamespace(privacy=lambda figures: None)
    return Agent(None, SimpleNamespace(random=None), journal, None, budget, observer, None, **more)


def test_the_session_goes_on_while_a_charge_waits_for_the_disk_and_nothing_is_encoded_before(budget):
    encoded = []

    def encode(*_):
        encoded.append(len(budget._charged))
        raise MemoryError

    update = Update(np.zeros(4, np.float32), 10, 1.0, 5, 10)
    held = agent_module._Held(ASSIGNMENT, update, SimpleNamespace(encode=encode), reserve(budget))
    disk = SlowDisk(budget)

    async def run():
        made = agent_of(budget)
        made._held["questions"] = held
        sending = asyncio.create_task(
            made._carry_out(states.MaskAndUpload(ATTEMPT, DOCUMENT, ASSIGNMENT.version, 3, None))
        )
        await reached(disk.reached)
        # The coordinator speaks, the member greets it, and answers a message.
        await made._received(JobEnded("other", Reason.REASON_JOB_PAUSED, bytes(32)))
        assert made._events.qsize() == 1
        assert made._hello().ledger == budget.counter
        made._link._outgoing = asyncio.Queue()
        await made._carry_out(states.Say(Ready("other", 1, bytes(32))))
        assert made._link._outgoing.qsize() == 1
        # The charge is not on the disk, so the vector is not begun.
        assert (sending.done(), made._uploads, encoded) == (False, {}, [])
        disk.go.set()
        await sending
        await asyncio.gather(*made._uploads.values())

    asyncio.run(run())
    assert disk.released
    assert encoded == [1]
    assert budget._ledger.reservation(held.reserved.reservation).charged


@pytest.mark.parametrize("kind", [states.Joined, states.VectorLeaving, states.Signed])
def test_nothing_is_said_before_the_journal_is_on_the_disk(tmp_path, budget, monkeypatch, kind):
    """Keys are shown, a vector leaves and survivors are signed after the record. Meanwhile the loop goes on."""
    journal, path = Journal(tmp_path / "journal.db", bytes(32)), tmp_path / "journal.db"
    effects = {
        states.Joined: states.Joined(ATTEMPT, bytes(32), bytes(32)),
        states.VectorLeaving: states.VectorLeaving(ATTEMPT, bytes(32)),
        states.Signed: states.Signed(ATTEMPT, frozenset({"north"})),
    }
    if kind is not states.Joined:
        journal.joined(ATTEMPT, bytes(32), bytes(32))
    said = states.Say(Ready("questions", 1, bytes(32)))
    monkeypatch.setattr(agent_module, "transition", lambda environment, state, event: (state, (effects[kind], said)))
    begun, record = threading.Event(), journal._connection
    other = sqlite3.connect(path, isolation_level=None)
    # As long as another program holds the file, SQLite waits.
    other.execute("BEGIN IMMEDIATE")
    record.execute(f"PRAGMA busy_timeout = {int(1000 * SECONDS)}")
    record.set_trace_callback(lambda _statement: begun.set())

    async def run():
        made = agent_of(budget, journal)
        made._link.identity = SimpleNamespace(member="north")
        made._link._outgoing = asyncio.Queue()
        working = asyncio.create_task(made._work(states.Masked(ATTEMPT, None)))
        await reached(begun)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (working.done(), made._link._outgoing.qsize()) == (False, 0)
        other.execute("ROLLBACK")
        await working
        return made._link._outgoing.qsize()

    assert asyncio.run(run()) == 1
    columns = {states.Joined: "joined_ms", states.VectorLeaving: "opened_ms", states.Signed: "survivors"}
    ((found,),) = other.execute(f"SELECT {columns[kind]} IS NOT NULL FROM attempts")  # noqa: S608  a column's name
    assert found
    journal.close()
    other.close()


def test_a_cancelled_reservation_is_made_once_and_handed_to_its_caller(budget):
    """As on the loop: the cancellation strikes after the call, so whoever reserved can give it back."""
    disk, after = SlowDisk(budget), []

    async def prepares():
        reserved = await budget.writer.run(reserve, budget)
        after.append(reserved)
        try:
            await asyncio.sleep(SECONDS)
        except asyncio.CancelledError:
            await budget.writer.run(budget.release, reserved, "cancelled")
            raise

    async def run():
        task = asyncio.create_task(prepares())
        await reached(disk.reached)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        disk.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(run())
    (reservation,) = budget._ledger.reservations()
    assert [each.reservation for each in after] == [reservation.number]
    assert reservation.released is not None


def test_an_update_whose_member_is_told_to_stop_while_it_is_reported_is_given_back(budget):
    """The cancellation strikes before the update is held, so nobody else has to give it back."""
    reserved, looked = reserve(budget), threading.Event()
    go = threading.Event()

    def standing(_):
        looked.set()
        assert go.wait(SECONDS)
        return SimpleNamespace(approved=())

    async def prepare(assignment, fetch):
        return SimpleNamespace(job=DOCUMENT, update=None, reserved=reserved, staged=None, protection=None, model=None)

    async def run():
        made = agent_of(budget, desk=SimpleNamespace(standing=standing))
        made._preparer = SimpleNamespace(prepare=prepare)
        task = asyncio.create_task(made._prepare(ASSIGNMENT))
        await reached(looked)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return made._held, made._events.empty()

    assert asyncio.run(run()) == ({}, True)
    assert budget._ledger.reservation(reserved.reservation).released is not None


def test_a_member_that_starts_again_shows_what_it_has_spent_before_any_round(budget):
    budget.charge(ATTEMPT, reserve(budget))
    shown, seen = [], threading.Event()

    def show(figures):
        shown.append(figures)
        seen.set()

    async def forever():
        await asyncio.Event().wait()

    async def run():
        made = agent_of(budget)
        made._observer = SimpleNamespace(privacy=show)
        made._link = SimpleNamespace(run=forever)
        task = asyncio.create_task(made.run())
        await reached(seen)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert shown == [budget.statement("questions").figures()]
    assert 0 < shown[0].share_left < 1


def test_a_report_never_shows_older_figures_after_newer_ones(budget):
    """The first figures may take seconds, in which a round is prepared."""
    shown, counting, go, newer = [], threading.Event(), threading.Event(), threading.Event()

    def show(figures):
        if not counting.is_set():
            counting.set()
            assert go.wait(SECONDS)
        else:
            newer.set()
        shown.append(figures.epsilon)

    async def run():
        made = agent_of(budget)
        made._observer = SimpleNamespace(privacy=show)
        first = asyncio.create_task(made._show_figures())
        await reached(counting)
        await budget.writer.run(budget.charge, ATTEMPT, reserve(budget))
        second = asyncio.create_task(made._report("questions"))
        # What could overtake it has a second to do so.
        await asyncio.to_thread(newer.wait, 1)
        go.set()
        await asyncio.gather(first, second)

    asyncio.run(run())
    assert shown == sorted(shown)
    assert len(set(shown)) == 2


def test_a_charge_that_is_cancelled_is_made_once(budget):
    held = reserve(budget)
    disk = SlowDisk(budget)

    async def charges():
        await budget.writer.run(budget.charge, ATTEMPT, held)
        await asyncio.sleep(SECONDS)

    async def run():
        task = asyncio.create_task(charges())
        await reached(disk.reached)
        task.cancel()
        # Begun after the charge, so it finds it.
        releasing = asyncio.create_task(budget.writer.run(budget.release, held, "not held"))
        await asyncio.sleep(0)
        disk.go.set()
        await asyncio.gather(task, releasing, return_exceptions=True)
        await budget.writer.run(budget.charge, ATTEMPT, held)

    asyncio.run(run())
    (reservation,) = budget._ledger.reservations()
    assert (len(reservation.attempts), reservation.released) == (1, None)


def test_calls_run_in_the_order_in_which_they_were_begun_and_errors_reach_their_callers():
    ran = []

    def call(number):
        # An earlier call is slower.
        time.sleep(0.002 * (5 - number % 5))
        ran.append(number)
        if number % 3 == 0:
            raise OSError(number)
        return number

    async def run():
        with WriterThread() as writer:
            return await asyncio.gather(*(writer.run(call, number) for number in range(20)), return_exceptions=True)

    got = asyncio.run(run())
    assert ran == list(range(20))
    assert [each.errno or each.args[0] if isinstance(each, OSError) else each for each in got] == ran


def test_a_deadline_around_a_call_strikes_once_the_call_has_ended():
    go, went = threading.Event(), []

    async def within(seconds, call):
        async with asyncio.timeout(seconds):
            went.append(await call)
            await asyncio.sleep(SECONDS)

    async def run():
        with WriterThread() as writer:
            asyncio.get_running_loop().call_later(0.1, go.set)
            with pytest.raises(TimeoutError):
                await within(0.01, writer.run(go.wait, SECONDS))
            assert went == [True]
            # The task itself is not cancelled.
            assert asyncio.current_task().cancelling() == 0
            await asyncio.sleep(0)

    asyncio.run(run())


def test_a_cancellation_and_a_deadline_during_one_call_both_strike():
    go, went = threading.Event(), []

    async def works(writer):
        async with asyncio.timeout(0.05):
            went.append(await writer.run(go.wait, SECONDS))
            await asyncio.sleep(SECONDS)

    async def run():
        with WriterThread() as writer:
            task = asyncio.create_task(works(writer))
            await asyncio.sleep(0)
            task.cancel()
            asyncio.get_running_loop().call_later(0.2, go.set)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert went == [True]


def test_an_agent_that_stops_in_a_charge_leaves_no_upload(budget, monkeypatch):
    over = threading.Event()

    def encode(*_):
        # The upload does not end by itself before the agent has stopped.
        over.wait(SECONDS)
        raise MemoryError

    update = Update(np.zeros(4, np.float32), 10, 1.0, 5, 10)
    held = agent_module._Held(ASSIGNMENT, update, SimpleNamespace(encode=encode), reserve(budget))
    disk = SlowDisk(budget)
    effect = states.MaskAndUpload(ATTEMPT, DOCUMENT, ASSIGNMENT.version, 3, None)
    monkeypatch.setattr(agent_module, "transition", lambda environment, state, event: (state, (effect,)))

    async def run():
        made = agent_of(budget)
        made._link = SimpleNamespace(run=asyncio.Event().wait)
        made._held["questions"] = held
        made._events.put_nowait(states.Masked(ATTEMPT, None))
        running = asyncio.create_task(made.run())
        await reached(disk.reached)
        running.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        disk.go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        over.set()
        return [task.cancelled() for task in made._uploads.values()]

    # A thread may have begun to encode. Nothing is sent of it.
    assert asyncio.run(run()) == [True]
    assert budget._ledger.reservation(held.reserved.reservation).charged


@pytest.mark.parametrize("releases", [True, False])
def test_an_update_that_cannot_be_reported_is_a_failed_preparation(budget, monkeypatch, releases):
    reserved = reserve(budget)

    def fails(*_):
        raise OSError(5, "Input/output error")

    async def prepare(assignment, fetch):
        return SimpleNamespace(job=DOCUMENT, update=None, reserved=reserved, staged=None, protection=None, model=None)

    if not releases:
        monkeypatch.setattr(budget, "release", fails)

    async def run():
        made = agent_of(budget, desk=SimpleNamespace(standing=fails))
        made._preparer = SimpleNamespace(prepare=prepare)
        await made._prepare(ASSIGNMENT)
        return made._held, made._events.get_nowait()

    held, event = asyncio.run(run())
    assert (held, type(event), event.reason) == ({}, states.PreparationFailed, Reason.REASON_TRAINING_FAILED)
    assert "OSError" in event.detail
    assert (budget._ledger.reservation(reserved.reservation).released is not None) == releases


_CHARGES = """
import asyncio, os, signal, sys
from pathlib import Path
from benchmarks.operations.ledger_faults import EVENT, LIMIT, Member, purpose_of
from edge_client.ledger.ledger import Ledger, ledger_path
from edge_client.ledger.writer_thread import WriterThread

home, point, armed = Path(sys.argv[1]), sys.argv[2], []

def faults(here):
    if armed and here == point:
        os.kill(os.getpid(), signal.SIGKILL)

async def run(ledger):
    with WriterThread() as writer:
        purpose = purpose_of(Member("north", None, b"", b"", bytes(32)), "desk", 1)
        held = await writer.run(ledger.reserve, EVENT, purpose)
        armed.append(True)
        charging = asyncio.create_task(writer.run(ledger.charge, held.number, 1))
        charging.add_done_callback(lambda _: faults("handed over"))
        await charging
        faults("handed back")
        (home / "left").touch()

with Ledger.open(ledger_path(home, "data"), "data", LIMIT, faults=faults) as ledger:
    asyncio.run(run(ledger))
"""
_CRASHES = {
    "append.begun": False,
    "append.inserted": False,
    "append.committed": True,
    "append.believed": True,
    "pin.renamed": True,
    "handed over": True,
    "handed back": True,
}


@pytest.mark.parametrize("point", _CRASHES)
def test_a_kill_while_a_charge_is_handed_to_the_thread_or_back_loses_no_charge(tmp_path, point):
    done = subprocess.run(
        [sys.executable, "-c", _CHARGES, str(tmp_path), point], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "left").exists()
    with Ledger.open(ledger_path(tmp_path, "data"), "data", LIMIT) as ledger:
        ledger.recover()
        (reservation,) = ledger.reservations()
    assert reservation.charged == _CRASHES[point]
    # What was not charged is free again, and nothing of it left.
    assert (reservation.released is not None) == (not _CRASHES[point])


def test_the_end_of_an_attempt_waits_for_no_flush_and_every_other_record_of_the_journal_does(tmp_path):
    """How an attempt ended decides nothing at the next start. It is written with what follows."""
    journal = Journal(tmp_path / "journal.db", bytes(32))
    levels, level = {}, ["FULL"]

    def written(what, call):
        def seen(statement):
            if statement.startswith("PRAGMA synchronous"):
                level.append(statement.rsplit(" ", 1)[-1])
            elif statement.startswith(("INSERT", "UPDATE")):
                levels.setdefault(what, set()).add(level[-1])

        journal._connection.set_trace_callback(seen)
        call()

    written("joined", lambda: journal.joined(ATTEMPT, bytes(32), bytes(32)))
    written("opened", lambda: journal.opened(ATTEMPT, bytes(32)))
    written("signed", lambda: journal.signed(ATTEMPT, ["north"]))
    before = journal.memory()
    written("ended", lambda: journal.ended(ATTEMPT, "published", bytes(32)))
    written("next", lambda: journal.joined(AttemptId("questions", 1, 2), bytes(32), bytes(32)))
    full = {"FULL"}
    assert levels == {"joined": full, "opened": full, "signed": full, "ended": {"NORMAL"}, "next": full}
    assert before.sent == journal.memory().sent
    # 2 is FULL.
    assert journal._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    with pytest.raises(sqlite3.IntegrityError):
        journal.ended(AttemptId("questions", 1, 3), "published", b"")
    assert journal._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    # Whatever left the level low.
    for number, what in ((2, "opened"), (2, "signed"), (4, "joined")):
        journal._connection.execute("PRAGMA synchronous = NORMAL")
        arguments = {"opened": (), "signed": (["north"],), "joined": (bytes(32), bytes(32))}[what]
        getattr(journal, what)(AttemptId("questions", 1, number), *arguments)
        assert journal._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    journal.close()
