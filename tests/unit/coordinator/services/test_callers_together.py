"""Callers that come while the database answers are looked up together, and hear what they would hear alone."""

import asyncio
import threading
from hashlib import sha256

import pytest
from sqlalchemy import event

from coordinator.services.callers import _Door
from coordinator.storage import records
from coordinator.storage.models import MemberCertificateRow, MemberRow
from tests.support.databases import empty_database

NEW, OLD = b"the newest certificate", b"the one before it"
NOW_MS, END_MS = 1_000_000, 2_000_000


@pytest.fixture
def database(tmp_path):
    made = empty_database(tmp_path)

    def enrol(s):
        for name in ("north", "south"):
            s.add(MemberRow(name=name, status="enrolled", fingerprint=sha256(NEW).digest(), invited_ms=1))
            s.flush()
            previous = {"previous": sha256(OLD).digest(), "previous_expires_ms": END_MS}
            s.add(MemberCertificateRow(member=name, certificate=NEW, issued_ms=1, **previous))

    made.run_now(enrol)
    yield made
    made.close()


def coming(name, certificate):
    dates = {"begins_ms": 1, "expires_ms": END_MS, "now_ms": NOW_MS}
    return lambda s: records.let_in(s, name, certificate, key=bytes(32), adopting=False, **dates)


async def together(database, *look_ups):
    """Asks while the database's one thread is held, so that all are waiting. Returns the answers."""
    door, held = _Door(), threading.Event()
    holding = asyncio.create_task(database.run(lambda _: held.wait(60)))
    await asyncio.sleep(0)
    asked = [asyncio.create_task(door.ask(database, each)) for each in look_ups]
    await asyncio.sleep(0)
    assert len(door._waiting) == len(look_ups)
    held.set()
    await holding
    return await asyncio.gather(*asked, return_exceptions=True)


def test_callers_that_wait_share_a_transaction(database):
    begun = []
    event.listen(database._engine, "begin", begun.append)
    found = asyncio.run(together(database, *[coming("north", NEW)] * 20))
    assert all(served.admits(sha256(NEW).digest(), NOW_MS) for served in found)
    # What holds the thread asks the database nothing.
    assert len(begun) == 1


def test_the_first_use_of_a_certificate_ends_the_one_before_it_for_a_caller_beside_it(database):
    first, newest, before, other = asyncio.run(
        together(database, coming("south", NEW), coming("north", NEW), coming("north", OLD), coming("east", NEW))
    )
    assert first.admits(sha256(NEW).digest(), NOW_MS)
    assert newest.admits(sha256(NEW).digest(), NOW_MS)
    assert not before.admits(sha256(OLD).digest(), NOW_MS)
    assert other is None


def test_a_failure_is_its_callers_alone(database):
    def broken(_):
        raise RuntimeError("a mistake of ours")

    first, failed, beside = asyncio.run(together(database, coming("south", NEW), broken, coming("north", NEW)))
    assert first.admits(sha256(NEW).digest(), NOW_MS)
    assert isinstance(failed, RuntimeError)
    assert beside.admits(sha256(NEW).digest(), NOW_MS)


def test_a_caller_that_hangs_up_costs_the_others_nothing(database):
    async def one_leaves():
        door, held = _Door(), threading.Event()
        holding = asyncio.create_task(database.run(lambda _: held.wait(60)))
        await asyncio.sleep(0)
        asked = [asyncio.create_task(door.ask(database, coming("north", NEW))) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(door._waiting) == 3
        asked[1].cancel()
        held.set()
        await holding
        return await asyncio.gather(*asked, return_exceptions=True)

    first, left, last = asyncio.run(one_leaves())
    assert isinstance(left, asyncio.CancelledError)
    assert first.admits(sha256(NEW).digest(), NOW_MS)
    assert last.admits(sha256(NEW).digest(), NOW_MS)
