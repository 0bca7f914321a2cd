"""Tests of a backbone over real gRPC from a real store: cut off twice, resumed, and not sent a second time."""

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from coordinator.storage import open_blobs
from edge_client.downloads.backbones import BackboneMissing, Backbones, Wanted
from edge_client.downloads.cache import BlobCache
from learning.backbones.layout import checked_config, layout_of
from learning.backbones.stored import digest_of, read_backbone
from tacit.blobs import CHUNK, BlobDamaged, fetch_blob
from tacit.v1 import federation_pb2, federation_pb2_grpc

CONFIG = checked_config(
    {
        "model_type": "bert",
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 3000,
        "masked_lm": True,
    }
)


class Serving(federation_pb2_grpc.FederationServiceServicer):
    """Serves `FetchBlob` from a store as the coordinator does, a chunk at a time."""

    def __init__(self, store: Any) -> None:
        self.store, self.offsets, self.sent = store, [], 0

    async def FetchBlob(self, request, context):  # noqa: N802
        self.offsets.append(request.offset)
        total, offset = self.store.size(request.digest), request.offset
        while True:
            data = await asyncio.to_thread(self.store.read, request.digest, offset, CHUNK)
            await context.write(federation_pb2.BlobChunk(offset=offset, total=total, data=data))
            self.sent += len(data)
            offset += len(data)
            if offset >= total:
                return


@contextlib.asynccontextmanager
async def cut_off(port: int, after: list[int]) -> AsyncIterator[int]:
    """Forwards to the port. The first connections break after the bytes in `after` came back on them."""
    budgets = iter(after)

    async def carry(reader: Any, writer: Any, left: float, end: Callable[[], None]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(16 * 1024):
                left -= len(data)
                if left < 0:
                    break
                writer.write(data)
                await writer.drain()
        end()

    async def connect(reader: Any, writer: Any) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)

        def end() -> None:
            writer.transport.abort()
            inner_writer.transport.abort()

        left = next(budgets, float("inf"))
        await asyncio.gather(carry(reader, inner_writer, float("inf"), end), carry(inner_reader, writer, left, end))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def fetching(serving: Serving, after: list[int]) -> AsyncIterator[Any]:
    """Yields a member's fetch function, over connections that break."""
    server = grpc.aio.server()
    federation_pb2_grpc.add_FederationServiceServicer_to_server(serving, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with cut_off(port, after) as way:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{way}", options=options) as channel:
                stub = federation_pb2_grpc.FederationServiceStub(channel)

                async def fetch(digest: bytes, into: Path, limit: int) -> None:
                    await fetch_blob(stub.FetchBlob, digest, into, limit=limit, patience=30)

                yield fetch
    finally:
        await server.stop(None)


@pytest.fixture
def wanted(tmp_path):
    """Writes a backbone of five megabytes."""
    layout = layout_of(CONFIG)
    path = tmp_path / "file"
    # Small numbers, each different from its neighbours.
    values = np.arange((layout.size - len(layout.header)) // 4, dtype="<f4") / 1e4
    path.write_bytes(layout.header + values.tobytes())
    assert 5e6 < layout.size < 6e6
    return Wanted(digest_of(path), CONFIG)


@pytest.fixture
def serving(tmp_path, wanted):
    store = open_blobs(f"file://{tmp_path / 'store'}")
    assert store.put((tmp_path / "file").read_bytes()) == wanted.digest
    return Serving(store)


def test_a_transfer_resumes_after_breaks_and_the_next_job_needs_none(tmp_path, wanted, serving):
    cache = BlobCache(tmp_path / "cache")

    async def scenario() -> None:
        async with fetching(serving, [2_000_000, 2_000_000]) as fetch:
            first = Backbones(cache, allowed=["coordinator"])
            found = await first.open(wanted, fetch)
            assert found.tensors.keys() == layout_of(CONFIG).shapes.keys()
            # Each connection resumed where the one before it broke.
            begin, middle, late = serving.offsets
            assert begin == 0 < CHUNK <= middle < late
            # A break loses at most the bytes in flight.
            sent = serving.sent
            assert wanted.size <= sent < 2 * wanted.size
            # A second job of this process and a job of another process use the same file.
            assert await first.open(wanted, fetch) is found
            second = await Backbones(cache, allowed=["coordinator"]).open(wanted, fetch)
            assert second.tensors.keys() == found.tensors.keys()
            assert (serving.sent, len(serving.offsets)) == (sent, 3)

    asyncio.run(scenario())
    assert digest_of(cache.path(wanted.digest)) == wanted.digest


def test_memory_stays_flat_on_both_sides(tmp_path, wanted, serving):
    """Client and server share this process. Together they hold a few chunks, and no whole backbone."""

    async def scenario() -> int:
        async with fetching(serving, []) as fetch:
            tracemalloc.start()
            try:
                await fetch(wanted.digest, tmp_path / "fetched", wanted.size)
                read_backbone(tmp_path / "fetched", CONFIG)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    peak = asyncio.run(scenario())
    assert peak < 12 * CHUNK < wanted.size


def test_a_file_larger_than_the_config_needs_is_never_fetched(tmp_path, wanted, serving):
    """The coordinator's file is larger than its job's config says."""
    smaller = Wanted(wanted.digest, checked_config({**CONFIG, "vocab_size": 2000}))

    async def scenario() -> None:
        async with fetching(serving, []) as fetch:
            with pytest.raises(BackboneMissing, match=r"announced \d+ bytes, but the blob has at most \d+"):
                await Backbones(BlobCache(tmp_path / "cache"), allowed=["coordinator"]).open(smaller, fetch)

    asyncio.run(scenario())
    assert [path for path in (tmp_path / "cache").iterdir() if path.stat().st_size] == []


def test_wrong_bytes_of_the_coordinator_are_not_kept(tmp_path, wanted, serving):
    read = serving.store.read
    serving.store.read = lambda digest, offset, size: bytes(len(read(digest, offset, size)))

    async def scenario() -> None:
        async with fetching(serving, []) as fetch:
            with pytest.raises(BlobDamaged, match="has another digest"):
                await fetch(wanted.digest, tmp_path / "fetched", wanted.size)

    asyncio.run(scenario())
    assert not (tmp_path / "fetched").exists()
