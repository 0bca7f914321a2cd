"""A standby over a real PostgreSQL, in this process: what keeps it from being there when it is needed."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from coordinator import ports, standby
from coordinator.config import load_config
from coordinator.services.credentials import certificate_end
from coordinator.storage.errors import DatabaseUnusable
from coordinator.storage.lease import Candidate, Held
from tests.support import party
from tests.support.postgres import running_postgres

PATIENCE = 20


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as server:
        yield server


@pytest.fixture
def place(postgres, tmp_path):
    """A coordinator's folder, and its configuration over a database of its own."""
    folder = party.coordinator_folder(tmp_path / "coordinator")
    url = postgres.database(migrated=True)
    return folder, load_config(folder.path).model_copy(update={"database_url": url})


@pytest.fixture
def metrics(monkeypatch):
    """The metrics of the standbys that are started."""
    monkeypatch.setattr(ports, "speaks_tls_12", lambda *_: False)
    kept, metered = [], ports.metered

    def keep(config, metrics):
        kept.append(metrics)
        return metered(config, metrics)

    monkeypatch.setattr(ports, "metered", keep)
    return kept


def active(config):
    held = Candidate(config.database_url, "first:7441").take(lambda why: None)
    assert isinstance(held, Held)
    return held


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  the code under test tells nobody of it
            await asyncio.sleep(0.01)


def test_a_standby_that_does_not_reach_the_database_shows_since_when(postgres, place, metrics, monkeypatch):
    folder, config = place
    failed, take = [], Candidate.take

    def taking(candidate, lost):
        try:
            return take(candidate, lost)
        except DatabaseUnusable as error:
            failed.append(str(error))
            raise

    monkeypatch.setattr(Candidate, "take", taking)
    first = active(config)

    def read():
        return metrics[0].value("lease_read_timestamp_seconds")

    async def run():
        async with AsyncExitStack() as stack:
            stop = asyncio.Event()
            waiting = asyncio.create_task(standby.lease_of(folder, config, stop, stack))
            await until(lambda: metrics or waiting.done())
            begun = read()
            await until(lambda: read() > begun or waiting.done())
            await asyncio.to_thread(postgres.stop, "immediate")
            try:
                await until(lambda: failed or waiting.done())
                lost = read()
                await until(lambda: len(failed) > 2 or waiting.done())
                assert read() == lost
            finally:
                await asyncio.to_thread(postgres.start)
            await until(lambda: read() > lost or waiting.done())
            assert not waiting.done()
            stop.set()
            assert await waiting is None

    asyncio.run(run())
    first.release()


def test_a_standby_outlives_a_renewal_of_its_certificate_that_fails(place, metrics, monkeypatch):
    """As while `authority/` is being copied from the other machine."""
    folder, config = place
    monkeypatch.setattr(standby, "_CERTIFICATE_SECONDS", 0.0)
    monkeypatch.setattr(standby, "_CERTIFICATE_AGAIN_SECONDS", 0.0)
    first = active(config)

    async def run():
        async with AsyncExitStack() as stack:
            with capture_logs() as logs:
                waiting = asyncio.create_task(standby.lease_of(folder, config, asyncio.Event(), stack))

                def said(event):
                    return [line for line in logs if line["event"] == event]

                # It has read the folder once, and has its ports.
                await until(lambda: said("relay_started") or waiting.done())
                assert not waiting.done()
                end = certificate_end(folder.server_certificate)
                assert metrics[0].value("certificate_expires_timestamp_seconds", kind="server") == end
                folder.authorities.write_bytes(b"{")
                folder.server_certificate.unlink()
                await until(lambda: said("server_certificate_not_renewed") or waiting.done())
                # Once the folder is whole again, it renews.
                folder.authorities.unlink()
                await until(lambda: folder.server_certificate.exists() or waiting.done())
                assert not waiting.done()
                first.release()
                held, store = await asyncio.wait_for(waiting, PATIENCE)
            assert "authorities" in said("server_certificate_not_renewed")[0]["error"]
            store.apart.close()
            held.release()

    asyncio.run(run())
