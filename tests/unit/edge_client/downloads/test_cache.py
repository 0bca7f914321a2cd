"""Tests of the cache: it keeps fetched blobs up to a size, whatever other jobs do in the folder meanwhile."""

import hashlib
import os
import shutil
from types import SimpleNamespace

import pytest

from edge_client.downloads.cache import BlobCache, CertificateCache


def kept(folder):
    return {path.name for path in folder.iterdir()}


def blob(cache, content, used):
    path = cache.path(hashlib.sha256(content).digest())
    path.write_bytes(content)
    os.utime(path, (used, used))
    return path.name


def test_the_least_recently_used_blob_goes_first(tmp_path):
    cache = BlobCache(tmp_path, 25)
    oldest, middle, newest = (blob(cache, bytes([number]) * 10, 1000 + number) for number in range(3))
    cache.trim()
    assert kept(tmp_path) == {middle, newest}
    # This use makes the other blob the older one.
    cache.path(bytes.fromhex(middle))
    blob(cache, b"3" * 10, 5000)
    cache.trim()
    assert middle in kept(tmp_path)
    assert newest not in kept(tmp_path)
    assert oldest not in kept(tmp_path)


def test_a_file_that_vanishes_during_a_trim_does_not_stop_it(tmp_path):
    cache = BlobCache(tmp_path, 15)
    old, new = (blob(cache, bytes([number]) * 10, 1000 + number) for number in range(2))
    # A dangling link stands for a partial file that another job's fetch has just renamed.
    for number in range(4):
        (tmp_path / f"{number}.partial").symlink_to(tmp_path / "gone")
    assert BlobCache(tmp_path).max_bytes > 0
    cache.trim()
    assert new in kept(tmp_path)
    assert old not in kept(tmp_path)


@pytest.mark.parametrize(
    ("total", "free", "holds"),
    [
        # A small disk keeps a tenth free, a large one 4 GiB: a member with a tenth of it left can still take part.
        (20, 3, 1),
        (20, 2, 0),
        (20, 1, 0),
        (250, 24, 20),
        (250, 4, 0),
        (4000, 4000, 68),
    ],
)
def test_the_default_bound_leaves_room_for_other_programs(tmp_path, monkeypatch, total, free, holds):
    """All in GiB."""
    disk = SimpleNamespace(total=total * 2**30, free=free * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    cache = BlobCache(tmp_path)
    assert cache.max_bytes == holds * 2**30
    # What the cache holds already is not what other programs need.
    (tmp_path / bytes(32).hex()).write_bytes(b"h" * 4096)
    if 0 < holds < 68:
        assert cache.max_bytes == holds * 2**30 + 4096


def test_a_blob_that_cannot_fit_costs_no_other_its_place(tmp_path):
    """A job may name a backbone of 64 GiB on any member."""
    cache = BlobCache(tmp_path, 25)
    old, used = (blob(cache, bytes([number]) * 10, 1000 + number) for number in range(2))
    wanted = bytes(32)
    with cache.pin(bytes.fromhex(used)):
        assert not cache.fits(wanted, 16)
        assert {old, used} <= kept(tmp_path)
        assert cache.fits(wanted, 15)
        assert used in kept(tmp_path)
        assert old not in kept(tmp_path)


def test_what_has_arrived_of_a_blob_needs_no_more_room(tmp_path):
    cache = BlobCache(tmp_path, 25)
    other, wanted = blob(cache, b"o" * 5, 1000), bytes(32)
    (tmp_path / f"{wanted.hex()}.pieces").write_bytes(b"w" * 12)
    with cache.pin(wanted):
        assert cache.fits(wanted, 20)
        assert {other, f"{wanted.hex()}.pieces"} <= kept(tmp_path)
        assert not cache.fits(wanted, 26)


def test_clear_deletes_everything_that_is_not_in_use(tmp_path):
    cache = BlobCache(tmp_path)
    blob(cache, b"an old version", 1000)
    wanted = blob(cache, b"wanted", 1000)
    (tmp_path / f"{wanted}.partial").write_bytes(b"wan")
    assert cache.clear(bytes.fromhex(wanted))
    assert kept(tmp_path) == {wanted, f"{wanted}.partial"}
    assert not cache.clear(bytes.fromhex(wanted))


def test_a_damaged_certificate_is_deleted_and_not_returned(tmp_path):
    cache = CertificateCache(tmp_path / "certificates")
    cache.keep([b"one", b"two"])
    one, two = (hashlib.sha256(each).digest() for each in (b"one", b"two"))
    (tmp_path / "certificates" / two.hex()).write_bytes(b"tow")
    assert cache.read([one, two]) == {one: b"one"}
    assert kept(tmp_path / "certificates") == {one.hex()}
