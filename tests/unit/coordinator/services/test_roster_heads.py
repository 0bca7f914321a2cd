"""Heads of the roster log: the first one after a takeover, when the clocks of the machines differ; and for anybody."""

import asyncio

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from structlog.testing import capture_logs

from coordinator.services.roster import RosterLog
from coordinator.storage import records
from coordinator.storage.database import open_database
from tacit.roster import MAX_SKEW
from tests.support.clock import Clock
from tests.support.databases import migrated

NOW = 1_800_000_000_000
KEY = rsa.generate_private_key(65537, 2048)


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "tacit.db"
    path.write_bytes(migrated())
    found = open_database(f"sqlite:///{path}")
    yield found
    found.close()


def coordinator(database, ahead_ms):
    """A started coordinator's log, on a machine whose clock is ahead by so much, and its clock."""
    clock = [NOW + ahead_ms]
    log = RosterLog(database, b"f" * 32, lambda: (KEY, b"certificate"), trust=lambda: None, now_ms=lambda: clock[0])
    asyncio.run(log.refresh())
    return log, clock


def journalled(database, at_ms):
    database.run_now(lambda s: records.note(s, "attempt_opened", "desk", at_ms))


def test_a_machine_whose_clock_is_behind_begins_where_the_other_one_was(database):
    first, _ = coordinator(database, 40_000)
    journalled(database, NOW + 40_000)
    before = first.head().head.at_ms
    second, clock = coordinator(database, -20_000)
    # An entry that the takeover itself writes, by the database's clock.
    journalled(database, NOW)
    assert second.head().head.at_ms == before == NOW + 40_000
    # Its own clock goes on from there.
    clock[0] += 200_000
    assert second.head().head.at_ms == clock[0] > before


def test_a_journal_from_the_future_is_not_believed(database):
    """Members refuse a head that is so far ahead of their clocks, whoever signs it."""
    journalled(database, NOW + int(MAX_SKEW.total_seconds() * 1000) + 1)
    with capture_logs() as said:
        log, _ = coordinator(database, 0)
    assert log.head().head.at_ms == NOW
    assert [each["event"] for each in said] == ["clock_behind"]


def test_an_empty_journal_leaves_the_clock_alone(database):
    assert coordinator(database, 5)[0].head().head.at_ms == NOW + 5


def test_a_flood_asks_the_database_once_a_second(database, monkeypatch):
    asked, clock, run = [], Clock(), database.run

    async def counted(work):
        asked.append(work)
        return await run(work)

    monkeypatch.setattr(database, "run", counted)
    log = RosterLog(database, b"f" * 32, lambda: (KEY, b"certificate"), trust=lambda: None, clock=lambda: clock.now)

    async def flood():
        found = await asyncio.gather(*(log.since(0) for _ in range(50)))
        assert {each.head.size for each in found} == {0}

    async def scenario():
        await flood()
        assert len(asked) == 1
        clock.now += 0.9
        await flood()
        assert len(asked) == 1
        clock.now += 0.2
        await flood()
        assert len(asked) == 2
        # A caller that needs the newest head gets it.
        await log.refresh()
        assert len(asked) == 3

    asyncio.run(scenario())
