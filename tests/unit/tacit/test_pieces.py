"""Files in pieces over real gRPC: breaks, leftovers, other bytes, wrong lists, full disks. Good pieces come once."""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.services.transfers import Transfers
from coordinator.services.turns import Turns
from coordinator.storage import open_blobs
from tacit.blobs import BlobDamaged, BlobNotThere, has_stalled
from tacit.pieces import PIECE, check_list, downloading, fetch_pieces, list_bytes, list_of
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tests.support.sweep import sweep

SIZE = 5 * PIECE + 12_345


async def _at_once() -> None:
    """All jobs are loaded."""


class Serving(federation_pb2_grpc.FederationServiceServicer):
    """The coordinator's own service on a real store. `changed` may change a chunk; `cut` breaks a request off."""

    def __init__(self, store: Any, digests: set[bytes]) -> None:
        nothing = SimpleNamespace(carried=lambda *_: None)
        running = SimpleNamespace(store=store, fetchable=digests, loaded=_at_once)
        self.transfers = Transfers(running, nothing, Turns(4, 0.05), Turns(4, 0.05), first_seconds=9, chunk_seconds=9)
        # The pieces that each call asked for.
        self.calls: list[range] = []
        self.offsets: list[int] = []
        # Those that a call began to send.
        self.asked: list[int] = []
        self.changed: Callable[[pb.BlobChunk], pb.BlobChunk] = lambda chunk: chunk
        self.cut: set[int] = set()
        # Bytes after which each call breaks.
        self.most: int | None = None

    async def FetchBlob(self, request: Any, context: Any) -> None:  # noqa: N802
        assert request.length
        self.offsets.append(request.offset)
        self.calls.append(range(request.offset // PIECE, -(-(request.offset + request.length) // PIECE)))

        async def write(chunk: pb.BlobChunk) -> None:
            number, within = divmod(chunk.offset, PIECE)
            if self.most is not None and chunk.offset + len(chunk.data) > request.offset + self.most:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            if not within:
                self.asked.append(number)
                if number in self.cut:
                    self.cut.discard(number)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            await context.write(self.changed(chunk))

        await self.transfers.blob("aster", request, SimpleNamespace(write=write, abort=context.abort))


class Source:
    """A file, its list of pieces, and a store that has it. No test changes what is there."""

    def __init__(self, folder: Path) -> None:
        self.path, self.store = folder / "source", folder / "store"
        self.data = os.urandom(SIZE)
        self.path.write_bytes(self.data)
        self.digest = open_blobs(f"file://{self.store}").put(self.data)
        self.pieces = list_of(self.path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("source"))


class Bench:
    """The coordinator that has the file, and what a fetch needs."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.data, self.digest, self.pieces, self.store = source.data, source.digest, source.pieces, source.store
        self.serving = Serving(open_blobs(f"file://{source.store}"), {self.digest})
        self.into = folder / "into"
        self.partial = folder / "into.pieces"
        self.damaged: list[tuple[int, int]] = []

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        server = grpc.aio.server()
        federation_pb2_grpc.add_FederationServiceServicer_to_server(self.serving, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                yield federation_pb2_grpc.FederationServiceStub(channel)
        finally:
            await server.stop(None)

    def fetch(self, **more: Any) -> None:
        async def work() -> None:
            async with self.stub() as stub:
                given = {"digest": self.digest, "pieces": self.pieces, "size": SIZE, **more}
                await fetch_pieces(
                    stub.FetchBlob,
                    given.pop("digest"),
                    given.pop("pieces"),
                    given.pop("size"),
                    self.into,
                    damaged=lambda number, count: self.damaged.append((number, count)),
                    **given,
                )

        asyncio.run(work())


@pytest.fixture
def bench(tmp_path: Path, source: Source) -> Bench:
    return Bench(tmp_path, source)


def test_a_list_is_the_digests_of_the_pieces(source: Source) -> None:
    data, pieces = source.path.read_bytes(), list_of(source.path)
    assert pieces == b"".join(hashlib.sha256(data[at : at + PIECE]).digest() for at in range(0, SIZE, PIECE))
    assert len(pieces) == list_bytes(SIZE) == 6 * 32
    check_list(pieces, SIZE)
    for wrong in (SIZE + PIECE, SIZE - PIECE):
        with pytest.raises(BlobDamaged, match="the list of pieces has 192 bytes"):
            check_list(pieces, wrong)


@pytest.mark.parametrize("at_once", sweep([1, 2, 4, 9], 1, 4))
def test_one_call_asks_for_every_piece(bench: Bench, at_once: int) -> None:
    seen: list[tuple[int, int]] = []
    bench.fetch(at_once=at_once, progress=lambda arrived, total: seen.append((arrived, total)))
    assert bench.into.read_bytes() == bench.data
    assert bench.serving.calls == [range(6)]
    assert seen == sorted(seen)
    assert len(seen) == 6
    assert seen[-1] == (SIZE, SIZE)
    assert not bench.partial.exists()


def test_what_arrived_is_kept_and_what_rotted_is_fetched_again(bench: Bench) -> None:
    """A killed process leaves a file with holes. One of its pieces has changed since."""
    with bench.partial.open("wb") as file:
        for number in (0, 3, 4):
            file.seek(number * PIECE)
            file.write(bench.data[number * PIECE : (number + 1) * PIECE])
        file.seek(3 * PIECE + 17)
        file.write(b"rot")
    bench.fetch()
    assert bench.into.read_bytes() == bench.data
    assert bench.serving.calls == [range(1, 4), range(5, 6)]


def test_a_longer_leftover_is_cut(bench: Bench) -> None:
    bench.partial.write_bytes(bench.data + b"more" * PIECE)
    bench.fetch()
    assert bench.into.read_bytes() == bench.data
    assert bench.serving.asked == []


def test_breaks_repeat_only_what_they_broke(bench: Bench) -> None:
    bench.serving.cut = {1, 4}
    bench.fetch()
    assert bench.into.read_bytes() == bench.data
    assert bench.serving.calls == [range(6), range(1, 6), range(4, 6)]


def test_a_line_that_breaks_within_every_piece_gets_on(bench: Bench) -> None:
    """A call carried a quarter of a piece, which was dropped with the connection, again and again."""
    bench.serving.most = PIECE // 4
    bench.fetch(patience=5)
    assert bench.into.read_bytes() == bench.data
    assert bench.serving.offsets == list(range(0, SIZE, PIECE // 4))
    assert bench.damaged == []


def test_what_a_break_left_is_checked_with_its_piece(bench: Bench) -> None:
    """A byte that changed before the break costs that piece, and it is fetched anew from its beginning."""
    bench.serving.changed, bench.serving.most = flipped(2, times=1), PIECE + PIECE // 2
    bench.fetch(patience=5)
    assert bench.into.read_bytes() == bench.data
    assert bench.damaged == [(2, 6)]
    assert bench.serving.offsets.count(2 * PIECE) == 1


def test_without_patience_a_break_ends_the_call_and_the_next_continues(bench: Bench) -> None:
    bench.serving.cut = {5}
    with pytest.raises(grpc.aio.AioRpcError):
        bench.fetch(patience=0)
    bench.fetch()
    assert bench.serving.calls == [range(6), range(5, 6)]
    assert bench.into.read_bytes() == bench.data


def flipped(number: int, times: int) -> Callable[[pb.BlobChunk], pb.BlobChunk]:
    """Changes one byte of the piece, the first `times` times that it is sent."""
    left = [times]

    def change(chunk: pb.BlobChunk) -> pb.BlobChunk:
        if chunk.offset == number * PIECE and left[0]:
            left[0] -= 1
            return pb.BlobChunk(offset=chunk.offset, total=chunk.total, data=b"\x00\x01" + chunk.data[2:])
        return chunk

    return change


def test_a_changed_piece_is_refused_named_and_fetched_again(bench: Bench) -> None:
    """It ends the call, so that a server that sends other bytes does not send many of them."""
    bench.serving.changed = flipped(2, times=1)
    bench.fetch(at_once=1)
    assert bench.into.read_bytes() == bench.data
    assert bench.damaged == [(2, 6)]
    assert bench.serving.calls == [range(6), range(2, 6)]


def test_a_server_with_other_bytes_gets_nothing_into_the_file(bench: Bench) -> None:
    """The good pieces stay, so an honest server need not send them again."""
    bench.serving.changed = flipped(2, times=99)
    with pytest.raises(BlobDamaged, match=r"piece 2 of 6 of .* arrived 3 times with other bytes"):
        bench.fetch()
    assert not bench.into.exists()
    assert bench.partial.read_bytes()[: 2 * PIECE] == bench.data[: 2 * PIECE]
    assert bytes(bench.partial.read_bytes()[2 * PIECE : 3 * PIECE]) == bytes(PIECE)
    assert [call.start for call in bench.serving.calls] == [0, 2, 2]
    bench.serving.changed, bench.serving.calls = (lambda chunk: chunk), []
    bench.fetch()
    assert bench.serving.calls[0].start == 2
    assert bench.into.read_bytes() == bench.data


@pytest.mark.parametrize(
    "change",
    [
        lambda chunk: pb.BlobChunk(offset=chunk.offset + 1, total=chunk.total, data=chunk.data),
        lambda chunk: pb.BlobChunk(offset=chunk.offset, total=chunk.total + 1, data=chunk.data),
        # Only after the last chunk of a piece, where no offset betrays it.
        lambda chunk: pb.BlobChunk(
            offset=chunk.offset,
            total=chunk.total,
            data=chunk.data + bytes((chunk.offset + len(chunk.data)) % PIECE == 0),
        ),
        # A stream of these would never end.
        lambda chunk: pb.BlobChunk(offset=chunk.offset // PIECE * PIECE, total=chunk.total),
    ],
    ids=["elsewhere", "another-size", "more", "nothing"],
)
def test_chunks_that_were_not_asked_for_end_the_fetch(bench: Bench, change: Any) -> None:
    bench.serving.changed = change
    with pytest.raises(BlobDamaged, match="arrived where"):
        bench.fetch()
    assert not bench.into.exists()


def test_a_list_of_another_file_is_found_out(bench: Bench) -> None:
    """All pieces are right by their list, but the file is not the one that the job names."""
    named = hashlib.sha256(b"another").digest()
    path = bench.store / "blobs" / named.hex()[:2]
    path.mkdir(parents=True, exist_ok=True)
    (path / named.hex()).write_bytes(bench.data)
    bench.serving.transfers._running.fetchable.add(named)
    with pytest.raises(BlobDamaged, match="the job's list of pieces is of the file"):
        bench.fetch(digest=named)
    assert not bench.into.exists()
    assert not bench.partial.exists()


def test_a_blob_that_is_not_served_is_missing(bench: Bench) -> None:
    with pytest.raises(BlobNotThere, match="no job has a blob"):
        bench.fetch(digest=bytes(32))


def test_a_disk_without_room_is_said_before_anything_is_fetched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fstatvfs", lambda _: SimpleNamespace(f_bavail=5, f_frsize=PIECE))
    with pytest.raises(OSError, match="bytes are still to come, and the disk has") as failed:
        bench.fetch()
    assert failed.value.errno == errno.ENOSPC
    assert bench.serving.asked == []
    # Pieces that are here already need no room.
    bench.partial.write_bytes(bench.data[:PIECE])
    bench.fetch()
    assert bench.into.read_bytes() == bench.data


# ---- several fetches of one file -------------------------------------------------------------------------------


def served(data: bytes, gate: asyncio.Event, asked: list[int]) -> Callable[[Any], AsyncIterator[pb.BlobChunk]]:
    """A server of these bytes that waits for the gate."""

    async def stream(request: pb.FetchBlobRequest) -> AsyncIterator[pb.BlobChunk]:
        for offset in range(request.offset, request.offset + request.length, PIECE):
            asked.append(offset // PIECE)
            await gate.wait()
            data_of = data[offset : min(offset + PIECE, request.offset + request.length)]
            yield pb.BlobChunk(offset=offset, total=SIZE, data=data_of)

    return stream


def listed(data: bytes) -> bytes:
    return b"".join(hashlib.sha256(data[at : at + PIECE]).digest() for at in range(0, SIZE, PIECE))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_another_job_with_a_false_list_cannot_change_a_file_that_is_in_use(bench: Bench) -> None:
    """Two processes of a member, and a document that names the same digest and other pieces.

    The second one had the file open before the first finished it, and went on writing to it.
    """
    evil = os.urandom(SIZE)

    async def work() -> None:
        gate, opened, asked, evil_asked = asyncio.Event(), asyncio.Event(), list[int](), list[int]()
        opened.set()
        false = asyncio.create_task(
            fetch_pieces(served(evil, gate, evil_asked), bench.digest, listed(evil), SIZE, bench.into)
        )
        await until(lambda: bool(evil_asked))
        true = asyncio.create_task(
            fetch_pieces(served(bench.data, opened, asked), bench.digest, bench.pieces, SIZE, bench.into)
        )
        # Without a lock, the true one completes now. With one, it waits for the false one.
        await asyncio.wait({true}, timeout=2)
        mapped = None
        if bench.into.exists():
            with bench.into.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        gate.set()
        with pytest.raises(BlobDamaged, match="the job's list of pieces is of the file"):
            await false
        await true
        assert mapped is None or mapped[:] == bench.data
        assert bench.into.read_bytes() == bench.data

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_fetch_that_waited_uses_what_the_other_fetched(bench: Bench) -> None:
    async def work() -> None:
        gate, asked, asked_later = asyncio.Event(), list[int](), list[int]()
        first = asyncio.create_task(
            fetch_pieces(served(bench.data, gate, asked), bench.digest, bench.pieces, SIZE, bench.into)
        )
        await until(lambda: bool(asked))
        second = asyncio.create_task(
            fetch_pieces(served(bench.data, gate, asked_later), bench.digest, bench.pieces, SIZE, bench.into)
        )
        gate.set()
        await asyncio.gather(first, second)
        assert (sorted(asked), asked_later) == (list(range(6)), [])

    asyncio.run(asyncio.wait_for(work(), 60))
    assert bench.into.read_bytes() == bench.data
    assert not bench.partial.exists()


def test_a_fetch_that_ends_leaves_its_place_to_the_next(bench: Bench) -> None:
    """A cancelled one, too: its thread may still be writing."""

    async def work() -> None:
        gate, asked, never = asyncio.Event(), list[int](), asyncio.Event()
        first = asyncio.create_task(
            fetch_pieces(served(bench.data, never, asked), bench.digest, bench.pieces, SIZE, bench.into)
        )
        await until(lambda: bool(asked))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.set()
        await fetch_pieces(served(bench.data, gate, asked), bench.digest, bench.pieces, SIZE, bench.into)

    asyncio.run(asyncio.wait_for(work(), 60))
    assert bench.into.read_bytes() == bench.data


# ---- a closed connection ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [asyncio.CancelledError(), grpc.aio.UsageError("Channel is closed.")], ids=repr)
def test_a_closed_connection_ends_the_fetch_as_a_broken_one_does(bench: Bench, error: BaseException) -> None:
    """Calls on it are cancelled. A task group takes that for a finished task, and the fetch asked for ever."""
    asked = []

    async def ended(request: pb.FetchBlobRequest) -> AsyncIterator[pb.BlobChunk]:
        asked.append(request.offset)
        await asyncio.sleep(0)
        raise error
        yield pb.BlobChunk()

    async def work() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await fetch_pieces(ended, bench.digest, bench.pieces, SIZE, bench.into, patience=0)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(asyncio.wait_for(work(), 30))
    assert len(asked) <= 4


def test_a_member_that_stops_ends_its_fetch(bench: Bench) -> None:
    """Its own cancellation is not taken for that of a call."""

    async def work() -> None:
        never, asked = asyncio.Event(), list[int]()
        task = asyncio.create_task(
            fetch_pieces(served(bench.data, never, asked), bench.digest, bench.pieces, SIZE, bench.into)
        )
        await until(lambda: bool(asked))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(work(), 30))


# ---- silence, breaks and the disk ------------------------------------------------------------------------------


def test_a_server_that_goes_silent_is_left_after_a_stated_time_and_the_next_goes_on(bench: Bench) -> None:
    """The attack: it keeps the connection and sends no more. Without a deadline, the fetch waits for ever."""

    async def work() -> None:
        gate, asked = asyncio.Event(), list[int]()

        async def silent(request: pb.FetchBlobRequest) -> AsyncIterator[pb.BlobChunk]:
            asked.append(request.offset // PIECE)
            if request.offset == 0:
                yield pb.BlobChunk(offset=0, total=SIZE, data=bench.data[: 2 * PIECE + 5])
            await gate.wait()
            yield pb.BlobChunk()

        async with downloading(bench.digest, bench.pieces, SIZE, bench.into) as download:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await download.fetch(silent, patience=0, stall=0.2)
            assert has_stalled(failed.value)
            assert failed.value.details() == "the other side kept the connection open and sent nothing for 0.2 s"
            assert download.arrived == 2 * PIECE
            gate.set()
            await download.fetch(served(bench.data, gate, asked))
        assert asked == [0, 2, 3, 4, 5]

    asyncio.run(asyncio.wait_for(work(), 60))
    assert bench.into.read_bytes() == bench.data


def test_a_silent_call_over_grpc_is_cancelled(bench: Bench) -> None:
    """The coordinator learns that nobody waits for it any more."""
    ended = asyncio.Event()

    async def work() -> None:
        async def never(chunk: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with bench.stub() as stub:
            bench.serving.transfers.blob = lambda member, request, context: never(request)
            with pytest.raises(grpc.aio.AioRpcError, match=r"sent nothing for 0\.3 s"):
                async with downloading(bench.digest, bench.pieces, SIZE, bench.into) as download:
                    await download.fetch(stub.FetchBlob, patience=0, stall=0.3)
            await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(work())


def test_a_slow_server_is_waited_for(bench: Bench) -> None:
    """The time counts from the last chunk, not from the beginning."""

    async def work() -> None:
        async def slow(request: pb.FetchBlobRequest) -> AsyncIterator[pb.BlobChunk]:
            for at in range(0, SIZE, PIECE):
                await asyncio.sleep(0.15)
                yield pb.BlobChunk(offset=at, total=SIZE, data=bench.data[at : at + PIECE])

        async with downloading(bench.digest, bench.pieces, SIZE, bench.into) as download:
            await download.fetch(slow, patience=0, stall=0.6)

    asyncio.run(asyncio.wait_for(work(), 60))
    assert bench.into.read_bytes() == bench.data


def test_a_break_costs_no_second_look_at_what_arrived(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch of 60 GB over a bad line would otherwise read and hash all of it after each break."""
    read: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        # The server's own reads have a flag.
        read.extend([] if flags else [offset // PIECE])
        return preadv(descriptor, buffers, offset, *flags)

    monkeypatch.setattr("tacit.pieces.os.preadv", counted)
    with bench.partial.open("wb") as file:
        file.write(bench.data[:PIECE])
        file.seek(2 * PIECE)
        file.write(bench.data[2 * PIECE : 3 * PIECE])

    async def work() -> None:
        bench.serving.cut = {1, 4}
        async with (
            bench.stub() as stub,
            downloading(bench.digest, bench.pieces, SIZE, bench.into) as download,
        ):
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match="cut"):
                    await download.fetch(stub.FetchBlob, patience=0)
            await download.fetch(stub.FetchBlob, patience=0)

    asyncio.run(asyncio.wait_for(work(), 60))
    assert bench.into.read_bytes() == bench.data
    # Both leftovers once at the beginning. The one behind the gap again, to hash the whole file in its order.
    assert read == [0, 2, 2]


@pytest.mark.parametrize("when", ["open", "write"])
def test_a_disk_that_has_no_direct_writes_is_written_through_the_cache(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    refused: list[str] = []
    opened, pwrite = os.open, os.pwrite

    def without(path: Any, flags: int, mode: int = 0o777) -> int:
        if when == "open" and flags & os.O_DIRECT and str(path).endswith(".pieces"):
            refused.append(when)
            raise OSError(errno.EINVAL, "no direct writes")
        return opened(path, flags, mode)

    def written(descriptor: int, data: Any, at: int) -> int:
        if when == "write" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(when)
            raise OSError(errno.EINVAL, "other blocks")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr("tacit.pieces.os.open", without)
    monkeypatch.setattr("tacit.pieces.os.pwrite", written)
    bench.fetch()
    assert refused == [when]
    assert bench.into.read_bytes() == bench.data
