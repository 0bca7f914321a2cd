"""What was fetched is kept up to a size; whatever other jobs do in the folder meanwhile."""

import hashlib
import os

from edge_client.downloads.cache import BlobCache, CertificateCache


def kept(folder):
    return {path.name for path in folder.iterdir()}


def blob(cache, content, used):
    path = cache.path(hashlib.sha256(content).digest())
    path.write_bytes(content)
    os.utime(path, (used, used))
    return path.name


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    cache = BlobCache(tmp_path, 25)
    oldest, middle, newest = (blob(cache, bytes([number]) * 10, 1000 + number) for number in range(3))
    cache.trim()
    assert kept(tmp_path) == {middle, newest}
    # It was used: the other is the older one now.
    cache.path(bytes.fromhex(middle))
    blob(cache, b"3" * 10, 5000)
    cache.trim()
    assert middle in kept(tmp_path)
    assert newest not in kept(tmp_path)
    assert oldest not in kept(tmp_path)


def test_a_file_that_goes_while_the_folder_is_looked_through_stops_nothing(tmp_path):
    cache = BlobCache(tmp_path, 15)
    old, new = (blob(cache, bytes([number]) * 10, 1000 + number) for number in range(2))
    # What another job's fetch leaves of its partial file when it has found its final name: a name with nothing behind.
    for number in range(4):
        (tmp_path / f"{number}.partial").symlink_to(tmp_path / "gone")
    cache.trim()
    assert new in kept(tmp_path)
    assert old not in kept(tmp_path)


def test_room_is_made_with_everything_that_nobody_is_using(tmp_path):
    cache = BlobCache(tmp_path)
    blob(cache, b"an old version", 1000)
    wanted = blob(cache, b"wanted", 1000)
    (tmp_path / f"{wanted}.partial").write_bytes(b"wan")
    assert cache.clear(bytes.fromhex(wanted))
    assert kept(tmp_path) == {wanted, f"{wanted}.partial"}
    assert not cache.clear(bytes.fromhex(wanted))


def test_a_damaged_certificate_is_not_given_out_and_goes(tmp_path):
    cache = CertificateCache(tmp_path / "certificates")
    cache.keep([b"one", b"two"])
    one, two = (hashlib.sha256(each).digest() for each in (b"one", b"two"))
    (tmp_path / "certificates" / two.hex()).write_bytes(b"tow")
    assert cache.read([one, two]) == {one: b"one"}
    assert kept(tmp_path / "certificates") == {one.hex()}
