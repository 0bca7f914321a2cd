"""Transfers of blobs, against a coordinator that breaks connections, lies and forgets."""

import asyncio
import hashlib
from collections.abc import Callable
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from tacit import blobs
from tacit.blobs import BlobDamaged, BlobNotThere, fetch_blob, put_blob
from tacit.v1 import federation_pb2, operator_pb2

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).digest()


def broken(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)  # type: ignore[call-arg]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Makes pauses take no time, and counts them."""
    pauses = []
    real = asyncio.sleep

    async def sleep(seconds):
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(blobs.asyncio, "sleep", sleep)  # type: ignore[attr-defined]
    return pauses


class Serving:
    """A coordinator's `FetchBlob`: sends pieces, and treats call number n as `fates[n]` says."""

    def __init__(self, data: bytes = DATA, *, piece: int = 100, fates: dict[int, Callable] | None = None) -> None:
        self.data, self.piece, self.fates = data, piece, fates or {}
        self.offsets: list[int] = []

    async def __call__(self, request):
        call = len(self.offsets)
        self.offsets.append(request.offset)
        fate = self.fates.get(call, lambda number, chunk: chunk)
        offset, number = request.offset, 0
        if offset > len(self.data):
            raise broken(grpc.StatusCode.INVALID_ARGUMENT, "offset lies outside the blob")
        while True:
            data = self.data[offset : offset + self.piece]
            chunk = fate(number, federation_pb2.BlobChunk(offset=offset, total=len(self.data), data=data))
            if chunk is None:
                return
            yield chunk
            offset, number = offset + len(data), number + 1
            if offset >= len(self.data):
                return


def breaks_after(pieces: int, code=grpc.StatusCode.UNAVAILABLE):
    def fate(number, chunk):
        if number == pieces:
            raise broken(code, "gone")
        return chunk

    return fate


def ends_after(pieces: int):
    return lambda number, chunk: None if number == pieces else chunk


def fetch(serving, into, **how):
    return asyncio.run(fetch_blob(serving, how.pop("digest", DIGEST), into, **how))


@pytest.fixture(params=["file", "memory"])
def sink(request, tmp_path):
    """A place for a blob, and a function that reads it there."""
    if request.param == "memory":
        data = bytearray()
        return data, lambda: bytes(data)
    path = tmp_path / "weights.bin"
    return path, lambda: path.read_bytes() if path.exists() else b""


# ---- fetching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 2048])
def test_a_blob_arrives(sink, size):
    into, content = sink
    told = []
    digest = hashlib.sha256(DATA[:size]).digest()
    assert fetch(Serving(DATA[:size]), into, digest=digest, progress=lambda *at: told.append(at)) == size
    assert content() == DATA[:size]
    assert told[-1] == (size, size)


def test_a_download_resumes_where_the_connection_broke(sink, no_waiting):
    into, content = sink
    serving = Serving(fates={0: breaks_after(3), 1: breaks_after(0), 2: breaks_after(5), 3: ends_after(2)})
    fetch(serving, into)
    assert content() == DATA
    assert serving.offsets == [0, 300, 300, 800, 1000]
    assert len(no_waiting) == 4


def test_a_file_gets_its_name_only_when_complete(tmp_path):
    path = tmp_path / "weights.bin"
    with pytest.raises(grpc.aio.AioRpcError):
        fetch(Serving(fates={0: breaks_after(4, grpc.StatusCode.PERMISSION_DENIED)}), path)
    assert not path.exists()
    assert (tmp_path / "weights.bin.partial").stat().st_size == 400
    later = Serving()
    fetch(later, path)
    assert later.offsets == [400]
    assert path.read_bytes() == DATA
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.bin"]


def test_a_correct_file_is_not_fetched_again(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(DATA)
    serving = Serving()
    assert fetch(serving, path) == len(DATA)
    assert serving.offsets == []
    path.write_bytes(b"damaged")
    fetch(serving, path)
    assert path.read_bytes() == DATA


def test_a_damaged_partial_file_is_discarded(tmp_path):
    (tmp_path / "weights.bin.partial").write_bytes(b"x" * 500)
    serving = Serving()
    fetch(serving, tmp_path / "weights.bin")
    assert serving.offsets == [500, 0]
    assert (tmp_path / "weights.bin").read_bytes() == DATA


@pytest.mark.parametrize("size", [len(DATA), len(DATA) + 1, 10_000])
def test_a_partial_file_longer_than_the_blob_is_discarded(tmp_path, size):
    (tmp_path / "weights.bin.partial").write_bytes(b"x" * size)
    fetch(Serving(), tmp_path / "weights.bin")
    assert (tmp_path / "weights.bin").read_bytes() == DATA


def test_a_blob_with_another_digest_is_discarded(sink):
    into, content = sink
    with pytest.raises(BlobDamaged, match="another digest"):
        fetch(Serving(DATA[::-1]), into)
    assert content() == b""


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 7},
        {"total": 5000},
        {"data": b"x" * 5000},
    ],
    ids=["a gap", "a size that changes", "more than announced"],
)
def test_a_coordinator_that_breaks_the_rules_is_an_error(sink, lie):
    into, content = sink

    def fate(number, chunk):
        if number == 2:
            for field, value in lie.items():
                setattr(chunk, field, value)
        return chunk

    with pytest.raises(BlobDamaged, match="was due"):
        fetch(Serving(fates=dict.fromkeys(range(5), fate)), into)
    assert content() == b""


def test_a_blob_above_the_limit_is_refused(sink):
    into, content = sink
    with pytest.raises(BlobDamaged, match="the blob has at most 1000"):
        fetch(Serving(), into, limit=1000)
    assert content() == b""


def test_a_missing_blob_is_reported(sink):
    with pytest.raises(BlobNotThere, match="nothing of that name"):
        fetch(
            Serving(
                fates={0: lambda *_: (_ for _ in ()).throw(broken(grpc.StatusCode.NOT_FOUND, "nothing of that name"))}
            ),
            sink[0],
        )


def test_a_refusal_is_not_retried(sink):
    serving = Serving(fates={0: breaks_after(1, grpc.StatusCode.PERMISSION_DENIED)})
    with pytest.raises(grpc.aio.AioRpcError):
        fetch(serving, sink[0])
    assert len(serving.offsets) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_a_broken_connection_is_not_a_refusal(sink, code):
    serving = Serving(fates={0: breaks_after(3, code)})
    fetch(serving, sink[0])
    assert serving.offsets == [0, 300]


def test_an_internal_failure_of_the_coordinator_is_not_retried(sink):
    failed = grpc.aio.AioRpcError(  # type: ignore[call-arg]
        grpc.StatusCode.INTERNAL,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("tacit-reason", "REASON_INTERNAL")),
        details="the disk is full",
    )

    def fate(number, chunk):
        raise failed

    serving = Serving(fates={0: fate})
    with pytest.raises(grpc.aio.AioRpcError, match="the disk is full"):
        fetch(serving, sink[0])
    assert serving.offsets == [0]


def test_a_transfer_without_progress_gives_up(sink, no_waiting, monkeypatch):
    now = [0.0]

    class Clock:
        def time(self):
            now[0] += 1.0
            return now[0]

    monkeypatch.setattr(blobs.asyncio, "get_running_loop", Clock)  # type: ignore[attr-defined]
    serving = Serving(fates={0: breaks_after(3)} | dict.fromkeys(range(1, 1000), breaks_after(0)))
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        fetch(serving, sink[0], patience=30)
    assert 20 <= len(serving.offsets) <= 40
    # Pauses get longer, within bounds.
    assert max(no_waiting) <= 5.0
    assert no_waiting[-1] > no_waiting[0]


def test_an_empty_stream_is_not_requested_forever(sink, monkeypatch):
    now = [0.0]

    class Clock:
        def time(self):
            now[0] += 1.0
            return now[0]

    monkeypatch.setattr(blobs.asyncio, "get_running_loop", Clock)  # type: ignore[attr-defined]
    with pytest.raises(BlobDamaged, match="before its announced size"):
        fetch(Serving(fates=dict.fromkeys(range(1000), ends_after(0))), sink[0], patience=30)


# ---- uploading -------------------------------------------------------------------------------------------------


class Taking:
    """A coordinator's `StatBlob` and `PutBlob`, whose connection breaks after a number of messages."""

    def __init__(self, *, lasts: list[int] | None = None, keeps: bytes = b"") -> None:
        self.kept, self.lasts = keeps, lasts or []
        self.uploads: list[int] = []
        self.complete = False
        self.total = None

    async def StatBlob(self, request):  # noqa: N802
        return operator_pb2.StatBlobResponse(received=len(self.kept), complete=self.complete)

    async def PutBlob(self, parts):  # noqa: N802
        left = self.lasts.pop(0) if self.lasts else 1_000_000
        header = (await anext(parts)).header
        self.uploads.append(header.offset)
        if header.offset != len(self.kept):
            raise broken(grpc.StatusCode.INVALID_ARGUMENT, "bytes do not follow")
        async for part in parts:
            if left == 0:
                raise broken(grpc.StatusCode.UNAVAILABLE, "gone")
            left -= 1
            self.kept += part.data
        self.complete = len(self.kept) == header.total
        if self.complete and hashlib.sha256(self.kept).digest() != header.digest:
            self.complete, self.kept = False, b""
            raise broken(grpc.StatusCode.INVALID_ARGUMENT, "they were discarded")
        return operator_pb2.StatBlobResponse(received=len(self.kept), complete=self.complete)


@pytest.fixture(params=["bytes", "file"])
def source(request, tmp_path):
    if request.param == "bytes":
        return DATA
    path = tmp_path / "weights.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(blobs, "CHUNK", 100)


def put(taking, source, **how):
    return asyncio.run(put_blob(taking, source, **how))


def test_an_upload_arrives(source):
    taking, told = Taking(), []
    assert put(taking, source, progress=lambda *at: told.append(at)) == DIGEST
    assert taking.kept == DATA
    assert told[0] == (0, len(DATA))
    assert told[-1] == (len(DATA), len(DATA))


def test_an_upload_resumes_where_the_connection_broke(source):
    taking = Taking(lasts=[3, 0, 5])
    put(taking, source)
    assert taking.kept == DATA
    assert taking.uploads == [0, 300, 300, 800]


def test_a_long_upload_that_breaks_is_resumed(source, monkeypatch):
    """One call that moved for longer than the patience lost its connection, and the upload gave up."""
    now = [0.0]
    monkeypatch.setattr(blobs.asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: now[0]))  # type: ignore[attr-defined]

    class Slowly(Taking):
        async def PutBlob(self, parts):  # noqa: N802
            async def slow():
                async for part in parts:
                    now[0] += 20.0
                    yield part

            return await super().PutBlob(slow())

    taking = Slowly(lasts=[10, 1000])
    put(taking, source, patience=60)
    assert taking.kept == DATA
    assert taking.uploads == [0, 1000]


def test_an_upload_that_is_never_kept_gives_up(source, monkeypatch):
    """The other side takes bytes and loses them: sending them again and again is no progress."""
    now = [0.0]
    monkeypatch.setattr(blobs.asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: now[0]))  # type: ignore[attr-defined]

    class Losing(Taking):
        async def PutBlob(self, parts):  # noqa: N802
            self.uploads.append((await anext(parts)).header.offset)
            for _ in range(5):
                await anext(parts)
                now[0] += 20.0
            raise broken(grpc.StatusCode.UNAVAILABLE, "gone")

    taking = Losing()
    with pytest.raises(grpc.aio.AioRpcError, match="gone"):
        put(taking, source, patience=60)
    assert taking.uploads == [0, 0]


def test_an_upload_resumes_an_earlier_one(source):
    taking = Taking(keeps=DATA[:1234])
    put(taking, source)
    assert taking.uploads == [1234]
    assert taking.kept == DATA


def test_a_stored_blob_is_not_sent_again(source):
    taking = Taking(keeps=DATA)
    taking.complete = True
    assert put(taking, source) == DIGEST
    assert taking.uploads == []


def test_a_damaged_earlier_upload_is_sent_again(source):
    taking = Taking(keeps=b"x" * 500)
    put(taking, source)
    assert taking.uploads == [500, 0]
    assert taking.kept == DATA


def test_a_file_that_changes_while_it_is_sent_is_an_error(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(DATA)

    class Changing(Taking):
        async def StatBlob(self, request):  # noqa: N802
            path.write_bytes(DATA[::-1])
            return await super().StatBlob(request)

    with pytest.raises(BlobDamaged, match="discarded"):
        put(Changing(), path)


def test_an_empty_upload():
    taking = Taking()
    assert put(taking, b"") == hashlib.sha256(b"").digest()
    assert taking.complete
