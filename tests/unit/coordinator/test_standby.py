"""A standby over a real PostgreSQL, in this process: what keeps it from being there when it is needed."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from coordinator import ports, standby
from coordinator.config import load_config
from coordinator.storage.lease import Candidate, Held
from tests.support import party
from tests.support.postgres import running_postgres

PATIENCE = 20


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as server:
        yield server


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  the code under test tells nobody of it
            await asyncio.sleep(0.01)


def test_a_standby_outlives_a_renewal_of_its_certificate_that_fails(postgres, tmp_path, monkeypatch):
    """As while `authority/` is being copied from the other machine."""
    url = postgres.database(migrated=True)
    folder = party.coordinator_folder(tmp_path / "coordinator")
    config = load_config(folder.path).model_copy(update={"database_url": url})
    monkeypatch.setattr(standby, "_CERTIFICATE_SECONDS", 0.0)
    monkeypatch.setattr(standby, "_CERTIFICATE_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(ports, "speaks_tls_12", lambda *_: False)
    active = Candidate(url, "first:7441").take(lambda why: None)
    assert isinstance(active, Held)

    async def run():
        async with AsyncExitStack() as stack:
            with capture_logs() as logs:
                waiting = asyncio.create_task(standby.lease_of(folder, config, asyncio.Event(), stack))

                def said(event):
                    return [line for line in logs if line["event"] == event]

                # It has read the folder once, and has its ports.
                await until(lambda: said("relay_started") or waiting.done())
                assert not waiting.done()
                folder.authorities.write_bytes(b"{")
                folder.server_certificate.unlink()
                await until(lambda: said("server_certificate_not_renewed") or waiting.done())
                # Once the folder is whole again, it renews.
                folder.authorities.unlink()
                await until(lambda: folder.server_certificate.exists() or waiting.done())
                assert not waiting.done()
                active.release()
                held, store = await asyncio.wait_for(waiting, PATIENCE)
            assert "authorities" in said("server_certificate_not_renewed")[0]["error"]
            store.apart.close()
            held.release()

    asyncio.run(run())
