"""Blobs on their way to members: many slow calls take few descriptors, and every call ends."""

import asyncio
import contextlib
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.services.transfers import CHUNK, Transfers
from coordinator.services.turns import Turns
from coordinator.storage import open_blobs
from coordinator.storage.errors import BlobCorrupt
from tacit.v1 import federation_pb2 as pb

SIZE = 2 * CHUNK + 17


class Downloads:
    """A store with blobs, and members that read nothing until `gate` is set."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.store = open_blobs(f"file://{folder}")
        self.blobs = [os.urandom(SIZE) for _ in range(count)]
        self.digests = [self.store.put(blob) for blob in self.blobs]
        running: Any = SimpleNamespace(store=self.store, fetchable=set(self.digests))
        metrics: Any = SimpleNamespace(carried=lambda *_: None)
        self.transfers = Transfers(running, metrics, Turns(4, 0.01), Turns(4, 0.01), first_seconds=9, chunk_seconds=9)
        self.gate, self.waiting, self.calls = asyncio.Event(), 0, 0

    async def fetch(self, digest: bytes, **more: int) -> bytes:
        got: list[pb.BlobChunk] = []

        async def write(chunk: pb.BlobChunk) -> None:
            if not got:
                self.waiting += 1
                await self.gate.wait()
            assert chunk.data
            got.append(chunk)

        context: Any = SimpleNamespace(write=write)
        self.calls += 1
        await self.transfers.blob(f"member-{self.calls}", pb.FetchBlobRequest(digest=digest, **more), context)
        return b"".join(chunk.data for chunk in got)

    async def until_waiting(self, count: int) -> None:
        while self.waiting < count:  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.01)

    @property
    def open_files(self) -> int:
        count = 0
        for each in os.scandir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(each.path).startswith(str(self.folder / "blobs"))
        return count


@pytest.mark.parametrize(("blobs", "each", "most"), [(1, 120, 1), (40, 3, 16)])
def test_calls_that_wait_take_few_descriptors(blobs: int, each: int, most: int, tmp_path: Path) -> None:
    """A member may have 128 calls at once, and the process counts on three descriptors for a member."""

    async def work() -> None:
        downloads = Downloads(tmp_path, blobs)
        calls = [asyncio.create_task(downloads.fetch(digest)) for digest in downloads.digests * each]
        await downloads.until_waiting(len(calls))
        assert 1 <= downloads.open_files <= most
        downloads.gate.set()
        assert await asyncio.gather(*calls) == downloads.blobs * each
        assert downloads.open_files == 0

    asyncio.run(asyncio.wait_for(work(), 60))


def test_calls_that_end_early_leave_the_file_to_the_others(tmp_path: Path) -> None:
    async def work() -> None:
        downloads = Downloads(tmp_path, 1)
        calls = [asyncio.create_task(downloads.fetch(downloads.digests[0])) for _ in range(3)]
        await downloads.until_waiting(3)
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        downloads.gate.set()
        assert await asyncio.gather(*calls[1:]) == downloads.blobs * 2
        assert downloads.open_files == 0

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("blobs", [1, 17])
def test_a_file_that_became_shorter_ends_the_call(blobs: int, tmp_path: Path) -> None:
    """It sent empty chunks for ever."""

    async def work() -> None:
        downloads = Downloads(tmp_path, blobs)
        calls = [asyncio.create_task(downloads.fetch(digest)) for digest in downloads.digests]
        await downloads.until_waiting(blobs)
        os.truncate(downloads.store._path(downloads.digests[-1]), CHUNK)
        downloads.gate.set()
        with pytest.raises(BlobCorrupt):
            await calls[-1]
        await asyncio.gather(*calls[:-1])

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("length", [0, 1, CHUNK + 1, SIZE - 3, 2**64 - 1])
def test_a_call_gets_what_it_asked_for(length: int, tmp_path: Path) -> None:
    async def work() -> None:
        downloads = Downloads(tmp_path, 1)
        downloads.gate.set()
        got = await downloads.fetch(downloads.digests[0], offset=3, length=length)
        assert got == downloads.blobs[0][3:][: length or None]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_member_with_many_slow_calls_does_not_slow_the_others(tmp_path: Path) -> None:
    """Its 128 calls had 128 turns for each turn of another member, each as long as a slow chunk may take."""

    async def work() -> None:
        downloads = Downloads(tmp_path, 1)
        order: list[str] = []

        async def fetch(member: str, seconds: float) -> None:
            async def write(chunk: pb.BlobChunk) -> None:
                order.append(member)
                await asyncio.sleep(seconds)

            context: Any = SimpleNamespace(write=write)
            await downloads.transfers.blob(member, pb.FetchBlobRequest(digest=downloads.digests[0]), context)

        greedy = [asyncio.create_task(fetch("greedy", 0.02)) for _ in range(128)]
        while not order:  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0)
        await asyncio.gather(*(fetch(f"member-{number}", 0.0) for number in range(5)))
        # Three chunks for each of five members. Among them the greedy one had no more than one of the six.
        assert order.count("greedy") < 20
        for call in greedy:
            call.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        greedy.clear()
        del call
        # Members that download nothing are forgotten, once their timers are.
        while downloads.transfers._turns:
            gc.collect()
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(work(), 60))
