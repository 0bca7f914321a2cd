"""Heads of the roster log for anybody: however many ask, the database is asked once a second."""

import asyncio

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from coordinator.services.roster import RosterLog
from coordinator.storage.database import open_database
from tests.support.clock import Clock
from tests.support.databases import migrated

KEY = rsa.generate_private_key(65537, 2048)


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "tacit.db"
    path.write_bytes(migrated())
    found = open_database(f"sqlite:///{path}")
    yield found
    found.close()


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
