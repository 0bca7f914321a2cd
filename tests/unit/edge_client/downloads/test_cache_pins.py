"""Tests of pins: a pinned blob stays while it is in use, whoever trims the folder, and no longer."""

import fcntl
import hashlib
import os
import subprocess
import sys

import pytest

from edge_client.downloads.cache import BlobCache


def blob(cache: BlobCache, content: bytes, used: int) -> bytes:
    digest = hashlib.sha256(content).digest()
    path = cache.path(digest)
    path.write_bytes(content)
    os.utime(path, (used, used))
    return digest


def kept(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def cache(tmp_path):
    return BlobCache(tmp_path, 25)


def test_a_pinned_blob_stays_however_long_ago_it_was_used(cache, tmp_path):
    backbone = blob(cache, b"b" * 20, 1)
    with cache.pin(backbone):
        new, old = blob(cache, b"n" * 5, 3000), blob(cache, b"o" * 5, 2000)
        # A second cache on the same folder finds the pin as another process would.
        BlobCache(tmp_path, 25).trim()
        # The pinned blob counts, so the others must fit beside it.
        assert kept(tmp_path) >= {backbone.hex(), new.hex()}
        assert old.hex() not in kept(tmp_path)
        assert cache.clear(old)
        assert {name for name in kept(tmp_path) if "." not in name} == {backbone.hex()}
        assert not cache.clear(old)
    blob(cache, b"n" * 20, 3000)
    cache.trim()
    assert backbone.hex() not in kept(tmp_path)
    assert not [name for name in kept(tmp_path) if name.endswith(".pin")]


def test_a_pin_also_keeps_the_partial_file(cache, tmp_path):
    digest = hashlib.sha256(b"a backbone").digest()
    partial = cache.path(digest).with_name(f"{digest.hex()}.partial")
    partial.write_bytes(b"b" * 24)
    os.utime(partial, (1, 1))
    with cache.pin(digest):
        blob(cache, b"n" * 20, 3000)
        cache.trim()
        assert partial.exists()
    blob(cache, b"m" * 20, 4000)
    cache.trim()
    assert not partial.exists()


def test_two_pins_on_one_blob_both_count(cache, tmp_path):
    backbone = blob(cache, b"b" * 20, 1)
    first, second = cache.pin(backbone), BlobCache(tmp_path, 25).pin(backbone)
    first.release()
    first.release()
    blob(cache, b"n" * 20, 3000)
    cache.trim()
    assert backbone.hex() in kept(tmp_path)
    second.release()
    blob(cache, b"n" * 20, 3000)
    cache.trim()
    assert backbone.hex() not in kept(tmp_path)


def test_a_pin_ends_with_its_process(cache, tmp_path):
    backbone = blob(cache, b"b" * 20, 1)
    holds = (
        "import sys; from pathlib import Path; from edge_client.downloads.cache import BlobCache\n"
        "pin = BlobCache(Path(sys.argv[1])).pin(bytes.fromhex(sys.argv[2])); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path), backbone.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        blob(cache, b"n" * 20, 3000)
        cache.trim()
        assert backbone.hex() in kept(tmp_path)
    finally:
        process.kill()
        process.communicate()
    blob(cache, b"n" * 20, 3000)
    cache.trim()
    assert backbone.hex() not in kept(tmp_path)
    # The lock file of the dead process is gone, too.
    assert not [name for name in kept(tmp_path) if name.endswith(".pin")]


def test_a_disk_without_writes_keeps_no_pin_and_stops_nothing(cache, tmp_path, monkeypatch):
    backbone = blob(cache, b"b" * 20, 1)
    # A folder that is gone refuses writes even of root.
    lost = BlobCache(tmp_path / "lost")
    (tmp_path / "lost").rmdir()
    with lost.pin(backbone):
        pass
    assert backbone.hex() in kept(tmp_path)


def test_a_pin_holds_although_its_file_is_removed_while_it_is_made(cache, tmp_path, monkeypatch):
    """Between opening and locking the lock file, a process that found it unlocked removes its name."""
    backbone = blob(cache, b"b" * 20, 1)
    lock, removed = fcntl.flock, []

    def flock(file, how):
        if how == fcntl.LOCK_SH and not removed:
            removed.append(True)
            os.unlink(file.name)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.pin(backbone):
        assert removed
        assert not cache.clear(bytes(32))
    assert cache.clear(bytes(32))
