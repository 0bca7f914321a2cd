"""Blobs: complete or absent, verified, resumable."""

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import uuid
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.storage import blobs
from coordinator.storage.blobs import BlobStore, open_blobs
from coordinator.storage.errors import BlobCorrupt, BlobMissing, BlobRejected, StoreUnusable
from coordinator.storage.object_store import open_store
from tests.support.s3_server import object_store, served

DATA = bytes(range(256)) * 40


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.fixture(scope="module")
def s3():
    with served() as (_, way):
        yield way


@pytest.fixture(params=["file", "memory", "s3"])
def store(request, tmp_path) -> BlobStore:
    if request.param == "file":
        return open_blobs(f"file://{tmp_path / 'store'}")
    if request.param == "s3":
        return object_store(request.getfixturevalue("s3").url, tmp_path / "store", uuid.uuid4().hex)
    return open_blobs(f"memory://{uuid.uuid4().hex}", staging=tmp_path / "staging")


@pytest.fixture
def local(tmp_path) -> BlobStore:
    return open_blobs(f"file://{tmp_path / 'store'}")


def path_of(root: Path, digest: bytes) -> Path:
    return root / "store" / "blobs" / digest.hex()[:2] / digest.hex()


def upload(store: BlobStore, data: bytes, *, piece: int = 1000) -> None:
    incoming = store.incoming(digest_of(data), len(data))
    for offset in range(incoming.received, len(data), piece):
        incoming.append(offset, data[offset : offset + piece])
    incoming.finish()


# ---- every store -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["empty", "one byte", "10 KiB"])
def test_a_stored_blob_can_be_read(store, data):
    digest = store.put(data)
    assert digest == digest_of(data)
    assert store.has(digest)
    assert store.get(digest) == data
    assert store.size(digest) == store.received(digest) == len(data)


def test_a_removed_blob_is_gone_and_can_be_stored_again(store):
    other = store.put(b"other")
    digest = store.put(DATA)
    assert store.remove(digest)
    assert not store.has(digest)
    assert not store.remove(digest)
    with pytest.raises(BlobMissing):
        store.get(digest)
    assert store.get(other) == b"other"
    assert store.put(DATA) == digest
    assert store.get(digest) == DATA


def test_a_blob_that_cannot_be_removed_is_a_sentence(local, tmp_path, monkeypatch):
    digest = local.put(DATA)

    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local._fs, "rm_file", refuse)
    with pytest.raises(StoreUnusable, match="cannot be deleted"):
        local.remove(digest)
    assert path_of(tmp_path, digest).exists()


def test_a_blob_can_be_read_in_parts(store):
    digest = store.put(DATA)
    assert store.read(digest, 0, 10) == DATA[:10]
    assert store.read(digest, 300, 1000) == DATA[300:1300]
    assert store.read(digest, len(DATA) - 5, 1000) == DATA[-5:]
    assert store.read(digest, len(DATA), 1000) == b""
    for offset in (-1, len(DATA) + 1):
        with pytest.raises(BlobRejected, match="is outside"):
            store.read(digest, offset, 10)


def test_a_missing_blob_is_a_sentence(store):
    digest = digest_of(b"never stored")
    assert not store.has(digest)
    assert store.received(digest) == 0
    for read in (store.get, store.size, lambda name: store.read(name, 0, 1)):
        with pytest.raises(BlobMissing, match=digest.hex()):
            read(digest)


@pytest.mark.parametrize("name", [b"", b"\x00" * 31, b"\x00" * 33, b"../../../../etc/passwd"])
def test_a_name_that_is_no_digest_is_refused(store, name):
    for call in (store.has, store.get, store.size, store.received, lambda digest: store.incoming(digest, 1)):
        with pytest.raises(BlobRejected, match="a digest has 32 bytes"):
            call(name)


def test_a_blob_is_uploaded_in_pieces(store):
    upload(store, DATA)
    assert store.get(digest_of(DATA)) == DATA


def test_an_empty_blob_can_be_uploaded(store):
    upload(store, b"")
    assert store.get(digest_of(b"")) == b""


def test_an_upload_continues_where_it_broke_off(store):
    incoming = store.incoming(digest_of(DATA), len(DATA))
    incoming.append(0, DATA[:3000])
    assert not store.has(digest_of(DATA))
    assert store.received(digest_of(DATA)) == 3000
    with pytest.raises(BlobRejected, match=f"3000 of {len(DATA)} bytes have arrived"):
        incoming.finish()
    again = store.incoming(digest_of(DATA), len(DATA))
    assert again.received == 3000
    upload(store, DATA)
    assert store.get(digest_of(DATA)) == DATA


def test_bytes_that_do_not_follow_are_refused_and_change_nothing(store):
    incoming = store.incoming(digest_of(DATA), len(DATA))
    incoming.append(0, DATA[:3000])
    for offset in (0, 2999, 3001):
        with pytest.raises(BlobRejected, match="do not follow the 3000"):
            incoming.append(offset, b"x")
    with pytest.raises(BlobRejected, match="announced with"):
        incoming.append(3000, DATA)
    assert incoming.received == 3000
    upload(store, DATA)
    assert store.get(digest_of(DATA)) == DATA


def test_an_upload_with_another_digest_is_discarded(store):
    wrong = store.incoming(digest_of(DATA), 5)
    wrong.append(0, b"wrong")
    with pytest.raises(BlobRejected, match="they were discarded"):
        wrong.finish()
    assert not store.has(digest_of(DATA))
    assert store.received(digest_of(DATA)) == 0
    upload(store, DATA)
    assert store.get(digest_of(DATA)) == DATA


def test_an_upload_of_another_size_is_discarded(store):
    longer = store.incoming(digest_of(DATA), len(DATA) + 1)
    longer.append(0, DATA + b"x")
    with pytest.raises(BlobRejected, match="they were discarded"):
        store.incoming(digest_of(DATA), len(DATA)).finish()
    assert store.received(digest_of(DATA)) == 0


def test_uploading_a_stored_blob_does_nothing(store):
    store.put(DATA)
    incoming = store.incoming(digest_of(DATA), len(DATA))
    assert incoming.complete
    assert incoming.received == len(DATA)
    assert incoming.append(0, b"whatever") == len(DATA)
    incoming.finish()
    assert store.get(digest_of(DATA)) == DATA


def test_two_uploads_of_one_blob_at_once_both_finish(store):
    first, second = (store.incoming(digest_of(DATA), len(DATA)) for _ in range(2))
    first.append(0, DATA[:5000])
    second.append(5000, DATA[5000:])
    first.finish()
    second.finish()
    assert store.get(digest_of(DATA)) == DATA


def test_an_impossible_size_is_refused(store):
    for total in (-1, blobs.MAX_BLOB + 1):
        with pytest.raises(BlobRejected, match="over the limit"):
            store.incoming(digest_of(DATA), total)


def test_many_threads_store_the_same_and_different_blobs(store):
    items = [bytes([number % 5]) * 2000 for number in range(20)]
    threads = [threading.Thread(target=store.put, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(store.get(digest_of(item)) == item for item in items)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=8), tried=st.data())
def test_an_upload_arrives_however_it_is_cut(tmp_path, data, cuts, tried):
    store = open_blobs(f"memory://{uuid.uuid4().hex}", staging=tmp_path / uuid.uuid4().hex)
    digest = digest_of(data)
    for _ in cuts:
        incoming = store.incoming(digest, len(data))
        # A client that guesses where to continue does no harm.
        offset = tried.draw(st.integers(0, len(data)))
        before = store.received(digest)
        try:
            incoming.append(offset, data[offset : offset + tried.draw(st.integers(0, 200))])
        except BlobRejected:
            assert store.received(digest) == before
    incoming = store.incoming(digest, len(data))
    incoming.append(incoming.received, data[incoming.received :])
    incoming.finish()
    assert store.get(digest) == data


# ---- on a disk -------------------------------------------------------------------------------------------------


def test_damage_on_the_disk_is_noticed_and_named(local, tmp_path):
    digest = local.put(DATA)
    path = path_of(tmp_path, digest)
    damaged = bytearray(path.read_bytes())
    damaged[700] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(BlobCorrupt, match=str(path)):
        local.get(digest)


def test_storing_a_stored_blob_does_not_touch_it(local, tmp_path):
    path = path_of(tmp_path, local.put(DATA))
    before = path.stat()
    local.put(DATA)
    assert path.stat() == before


def test_a_failed_put_is_a_sentence_and_leaves_nothing(local, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blobs, "_force", full)
    with pytest.raises(StoreUnusable, match="No space left on device; check free space"):
        local.put(DATA)
    assert not local.has(digest_of(DATA))
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_a_blob_is_on_the_disk_before_it_has_its_name(local, tmp_path, monkeypatch):
    acts = []
    real_force, real_folder, real_replace = blobs._force, blobs._force_folder, Path.replace
    monkeypatch.setattr(blobs, "_force", lambda fd: (acts.append("file forced"), real_force(fd)))
    monkeypatch.setattr(blobs, "_force_folder", lambda path: (acts.append("folder forced"), real_folder(path)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (acts.append("named"), real_replace(self, to))[1])
    local.put(DATA)
    upload(local, b"another blob")
    assert acts == ["file forced", "folder forced", "named", "folder forced"] * 2


# Kills a process at every line of the store: the blob is complete or absent afterwards, and the same work succeeds when
# repeated.
KILL = """
    import hashlib, os, sys, uuid
    from pathlib import Path
    from coordinator.storage import blobs
    from coordinator.storage.errors import BlobMissing

    root, how = Path(sys.argv[1]), sys.argv[2]
    data = bytes(range(256)) * 20
    digest = hashlib.sha256(data).digest()

    def work(store):
        if how == "put":
            return store.put(data)
        incoming = store.incoming(digest, len(data))
        while incoming.received < len(data):
            at = incoming.received
            incoming.append(at, data[at:at + 2000])
        incoming.finish()

    def killed_at(line):
        seen = 0
        def trace(frame, event, argument):
            nonlocal seen
            if frame.f_code.co_filename != blobs.__file__:
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    os._exit(9)
            return trace
        return trace

    line, whole, absent = 0, 0, 0
    while True:
        line += 1
        folder = root / f"{how}-{line}"
        store = blobs.open_blobs(f"file://{folder}")
        child = os.fork()
        if child == 0:
            sys.settrace(killed_at(line))
            work(store)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        store = blobs.open_blobs(f"file://{folder}")
        if store.has(digest):
            whole += 1
            assert store.get(digest) == data, line
        else:
            absent += 1
            try:
                store.get(digest)
                raise SystemExit("read what is not there")
            except BlobMissing:
                pass
        names = {path.name for path in (folder / "blobs").rglob("*") if path.is_file()}
        assert names <= {digest.hex()}, names
        work(store)
        assert store.get(digest) == data, line
        if status == 0:
            break
        assert status == 9
    print(line, whole, absent)
"""


@pytest.mark.parametrize("how", ["put", "upload"])
def test_killed_at_any_line_a_blob_is_complete_or_absent(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILL), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines, whole, absent = map(int, done.stdout.split())
    # Kills before and after the blob got its name were both reached.
    assert lines > 20
    assert whole >= 3
    assert absent >= 10


def test_a_half_written_upload_survives_a_restart(tmp_path):
    open_blobs(f"file://{tmp_path / 'store'}").incoming(digest_of(DATA), len(DATA)).append(0, DATA[:777])
    store = open_blobs(f"file://{tmp_path / 'store'}")
    assert store.received(digest_of(DATA)) == 777
    upload(store, DATA)
    assert store.get(digest_of(DATA)) == DATA


def test_uploads_that_nobody_continued_are_deleted(tmp_path):
    store = open_blobs(f"file://{tmp_path / 'store'}")
    old, new = (b"old" * 100, b"new" * 100)
    for data in (old, new):
        store.incoming(digest_of(data), len(data)).append(0, data[:50])
    partial = tmp_path / "store" / "incoming" / digest_of(old).hex()
    os.utime(partial, (0, 0))
    store = open_blobs(f"file://{tmp_path / 'store'}")
    assert store.received(digest_of(old)) == 0
    assert store.received(digest_of(new)) == 50


def test_other_users_of_the_machine_cannot_read_blobs(local, tmp_path):
    for folder in ("blobs", "incoming"):
        assert (tmp_path / "store" / folder).stat().st_mode & 0o077 == 0


# ---- sentences -------------------------------------------------------------------------------------------------


def test_an_unknown_kind_of_store_is_a_sentence():
    with pytest.raises(StoreUnusable, match="write file:///folder"):
        open_blobs("carrier-pigeon://loft")


def test_a_missing_driver_is_a_sentence():
    with pytest.raises(StoreUnusable, match=r"gs://bucket cannot be opened|pip install"):
        open_blobs("gs://bucket")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no file system that makes no folders")
def test_a_place_where_no_folder_can_be_made_is_a_sentence(tmp_path):
    with pytest.raises(StoreUnusable, match="file:///proc/tacit-store cannot be made"):
        open_blobs("file:///proc/tacit-store")
    with pytest.raises(StoreUnusable, match="/proc/tacit-incoming cannot be made"):
        blobs.prepared(Path("/proc/tacit-incoming"))


def test_a_driver_that_cannot_connect_is_a_sentence():
    with pytest.raises(StoreUnusable, match=r"no\.such\.host\.invalid/x cannot be opened as a blob store: gaierror"):
        open_blobs("ftp://no.such.host.invalid/x")


class ReadOnly(MemoryFileSystem):
    """Takes nothing."""

    protocol = ("readonly",)

    def pipe_file(self, path, value, mode="overwrite", **how):
        raise NotImplementedError


def test_a_store_that_takes_nothing_fails_its_check(tmp_path):
    register_implementation("readonly", ReadOnly, clobber=True)
    store = open_blobs("readonly://x", staging=tmp_path / "staging")
    with pytest.raises(StoreUnusable, match="readonly://x cannot be written: NotImplementedError; set store_url"):
        store.check()


class Forgetful(MemoryFileSystem):
    """Takes everything and keeps nothing."""

    protocol = ("forgetful",)

    def pipe_file(self, path, value, mode="overwrite", **how):
        super().pipe_file(path, b"", mode=mode, **how)


def test_a_store_that_keeps_nothing_fails_its_check(tmp_path):
    register_implementation("forgetful", Forgetful, clobber=True)
    store = open_blobs(f"forgetful://{uuid.uuid4().hex}", staging=tmp_path / "staging")
    with pytest.raises(StoreUnusable, match="does not return what was just written to it"):
        store.check()


def test_a_check_leaves_nothing_behind(tmp_path):
    name = uuid.uuid4().hex
    store = open_blobs(f"memory://{name}", staging=tmp_path / "staging")
    assert store.check() == []
    assert MemoryFileSystem().find(f"/{name}") == []
    digest = store.put(DATA)
    assert store.check() == []
    assert store.get(digest) == DATA


def test_no_coordinator_keeps_its_blobs_in_memory(tmp_path):
    config = CoordinatorConfig(advertise=("localhost",), store_url="memory://x/y")
    with pytest.raises(StoreUnusable, match="store_url is memory://x/y, which keeps nothing when this process ends"):
        open_store(config, CoordinatorFolder(tmp_path))


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "store").write_bytes(b"a file")
    with pytest.raises(StoreUnusable, match="cannot be made"):
        open_blobs(f"file://{tmp_path / 'store'}")
