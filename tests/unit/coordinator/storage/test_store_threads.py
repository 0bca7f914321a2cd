"""A store that hangs holds up no other work of the coordinator, and no request is repeated by two layers."""

import ast
import asyncio
import threading

import pytest

from coordinator.storage import bucket as bucket_module
from coordinator.storage import mark, records
from coordinator.storage.database import open_database
from coordinator.storage.errors import StoreBusy, StoreUnusable
from coordinator.storage.store_threads import StoreThreads
from tests.support.places import ROOT
from tests.support.s3_server import object_store, served

DIGEST = bytes(32)
# More calls than the event loop has threads of its own.
MANY = 40


@pytest.fixture(scope="module")
def service():
    with served() as both:
        yield both


@pytest.fixture
def bad(service):
    service[1].asked.clear()
    yield service[1]
    service[1].heal()


class Hanging:
    """A store that takes every request of the prefix `only` and answers none until it is `over`."""

    def __init__(self, bad):
        self.over, self._came = threading.Event(), asyncio.Queue()
        self.loop, self.only = None, ""
        bad.rule("GET", self._hang)

    def _hang(self, handler, asked):
        # The threads of an earlier test may still ask.
        if self.only in asked.path:
            self.loop.call_soon_threadsafe(self._came.put_nowait, asked)
            self.over.wait(60)
        handler._cut()

    async def has(self, requests):
        """Waits until the store has so many requests."""
        for _ in range(requests):
            await asyncio.wait_for(self._came.get(), 60)


@pytest.fixture
def hanging(bad):
    found = Hanging(bad)
    yield found
    found.over.set()


async def everything_else(tmp_path, database):
    """What the coordinator does beside its store: the database, and files of its folder in the loop's own threads."""
    newest = await database.run(lambda s: mark.begin(s, 1))
    await asyncio.to_thread(mark.keep, tmp_path / "database.json", "sqlite:////x", newest)


def test_a_store_that_hangs_holds_up_nothing_else(hanging, bad, tmp_path):
    asyncio.run(_holds_up_nothing_else(hanging, bad, tmp_path))


async def _holds_up_nothing_else(hanging, bad, tmp_path):
    hanging.loop, hanging.only = asyncio.get_running_loop(), "hangs"
    store = object_store(bad.url, tmp_path, "hangs", attempts=1, shared=False)
    database = open_database(f"sqlite:///{tmp_path / 'tacit.db'}")
    try:
        calls = [asyncio.create_task(store.apart.run(store.has, DIGEST)) for _ in range(MANY)]
        await hanging.has(4)
        await asyncio.wait_for(everything_else(tmp_path, database), 20)
        assert not any(call.done() for call in calls)
        assert await database.run(records.head)
        for call in calls:
            call.cancel()
        hanging.over.set()
        await asyncio.gather(*calls, return_exceptions=True)
    finally:
        database.close()


def test_a_call_for_which_the_queue_has_no_room_is_refused_at_once(hanging, bad, tmp_path):
    asyncio.run(_refused_at_once(hanging, bad, tmp_path))


async def _refused_at_once(hanging, bad, tmp_path):
    hanging.loop, hanging.only = asyncio.get_running_loop(), "full"
    store = object_store(bad.url, tmp_path, "full", attempts=1, shared=False)
    store.apart = StoreThreads(2, 5)
    calls = [asyncio.create_task(store.apart.run(store.has, DIGEST)) for _ in range(5)]
    await hanging.has(2)
    with pytest.raises(StoreBusy, match=r"5 calls wait for the store, .* `coordinator store check`, and try again"):
        await store.apart.run(store.has, DIGEST)
    assert bad.count("GET", "full") == 2
    # A caller that goes away makes room as soon as its call would have begun.
    for call in calls[2:]:
        call.cancel()
    hanging.over.set()
    bad.heal()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await store.apart.run(store.has, DIGEST) is False
    store.apart.close()
    with pytest.raises(StoreBusy, match="stopping"):
        await store.apart.run(store.has, DIGEST)


def test_nothing_waits_for_the_store_in_a_thread_of_the_event_loop():
    """Each call of `asyncio.to_thread` in the coordinator, by what it runs and is given."""
    found = []
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("asyncio.to_thread", "_in_thread"):
                found.append((path.name, ", ".join(map(ast.unparse, node.args))))
    assert len(found) > 5
    # Before it serves, and without a request: it makes a client.
    found.remove(("standby.py", "open_store, config, folder"))
    assert [each for each in found if any(word in each[1] for word in ("store", "blob", "incoming"))] == []


@pytest.mark.parametrize("fault", ["refuses", "cuts the answer", "hangs"])
def test_one_layer_repeats_a_request(bad, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(bucket_module, "_READ_SECONDS", 1)
    monkeypatch.setattr(bucket_module, "_FIRST_WAIT", 0.01)
    store = object_store(bad.url, tmp_path, f"layers-{fault[:4]}", attempts=3, shared=False)
    store._bucket.put("blobs/x", bytes(1000))
    bad.asked.clear()
    over = threading.Event()
    if fault == "refuses":
        bad.refuse("GET", 503, "SlowDown")
    elif fault == "hangs":
        bad.rule("GET", lambda handler, asked: (over.wait(60), handler._cut()))
    else:
        bad.rule("GET", "truncate")
    try:
        with pytest.raises(StoreUnusable, match="cannot be read"):
            store._bucket.read("blobs/x", 0, 1000)
    finally:
        over.set()
    assert bad.count("GET", f"layers-{fault[:4]}") == 3


def test_a_request_is_made_no_more_once_patience_is_over(bad, tmp_path, monkeypatch):
    store = object_store(bad.url, tmp_path, "patience", attempts=6, shared=False)
    monkeypatch.setattr(bucket_module, "_PATIENCE", 0.0)
    bad.refuse("GET", 503, "SlowDown")
    with pytest.raises(StoreUnusable, match="SlowDown"):
        store.has(DIGEST)
    assert bad.count("GET", "patience") == 1
