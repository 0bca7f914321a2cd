"""Pruning an S3 store: killed at every request it loses nothing, and a deletion that arrives late finds an old copy."""

import hashlib
import shutil
import threading
import time
from datetime import UTC, datetime

import pytest

from coordinator.storage import backup, open_database, records
from coordinator.storage.errors import BackupRefused, StoreInUse, StoreUnusable
from coordinator.storage.object_store import ObjectStore
from coordinator.storage.prune import Retention, prune
from tests.support.databases import empty_database, url_without_rows
from tests.support.s3_server import object_store, served
from tests.support.stored_job import fill

DAY = 24 * 3600.0


# What differs between stores does not differ between databases: `test_storage_prune` prunes with both.
@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def database_url(request, tmp_path):
    return url_without_rows(request, tmp_path)


@pytest.fixture(scope="module")
def service():
    with served() as both:
        yield both


class Place:
    """A job of four versions in a store, all of which look two days old."""

    def __init__(self, database, server, store):
        self.database, self.server, self.store = database, server, store
        self.age()

    def age(self):
        self.server.age(2 * DAY, self.store._bucket.place.prefix)

    def keys(self):
        return self.server.keys(self.store._bucket.place.prefix)

    def prune(self, newest=0, *, store=None, **more):
        # This machine's clock plays no part in ages.
        given = {"now_ms": 1, "grace_seconds": DAY, "by": "op"} | more
        policy = Retention(newest=newest, best=False, exported=False, restarts=False)
        return prune(self.database, store or self.store, policy, **given)

    def versions(self):
        return self.database.run_now(lambda s: records.versions(s, "desk"))

    def held(self):
        return [each.number for each in self.versions() if self.store.has(each.digest)]

    def named(self, url):
        from coordinator.storage import snapshot

        with snapshot.of_database(url) as connection:
            return set(backup._named(connection, self.store, False))


@pytest.fixture(scope="module")
def filled(service, tmp_path_factory):
    """A SQLite file with a job of four versions, whose blobs are in the bucket below `filled`."""
    folder = tmp_path_factory.mktemp("filled")
    database = empty_database(folder)
    fill(database, object_store(service[0].url, folder / "local", "filled"), rounds=4)
    database.close()
    return folder / "tacit.db"


@pytest.fixture
def place(database_url, service, filled, tmp_path):
    server, bad = service
    prefix, sqlite = tmp_path.name.replace("_", "-"), database_url.startswith("sqlite")
    store = object_store(bad.url, tmp_path / "local", prefix)
    if sqlite:
        shutil.copy(filled, database_url.removeprefix("sqlite:///"))
        server.copy("filled/", f"{prefix}/")
    database = open_database(database_url)
    if not sqlite:
        fill(database, store, rounds=4)
    yield Place(database, server, store)
    bad.heal()
    database.close()


@pytest.fixture
def bad(service):
    return service[1]


def test_versions_and_blobs_that_nothing_names_go_and_young_ones_stay(place):
    stray = place.store.put(b"stray")
    place.age()
    young = place.store.put(b"young")
    newest = place.versions()[-1].number
    dry = place.prune(2, dry_run=True)
    assert place.store.has(stray)
    done = place.prune(2)
    assert (done.versions, done.blobs, done.young, done.missing) == (dry.versions, dry.blobs, 1, ())
    assert done.blobs >= 5
    assert place.held() == [0, newest - 1, newest]
    assert (place.store.has(stray), place.store.has(young)) == (False, True)
    assert place.prune(2).blobs == 0


def test_to_hold_a_blob_makes_a_copy_and_the_old_one_goes_later(place):
    digest = place.store.put(b"about to be named")
    assert len(place.store._copies(digest)) == 1
    place.store.hold(digest)
    # It is young.
    assert len(place.store._copies(digest)) == 1
    place.age()
    place.store.put(b"about to be named")
    old, new = place.store._copies(digest)
    assert place.prune().young == 1
    assert place.store._copies(digest) == [new]
    assert old.key != new.key


def test_a_named_blob_keeps_its_newest_copy_alone(place):
    named = place.versions()[-1].digest
    place.store.hold(named)
    place.age()
    assert len(place.store._copies(named)) == 2
    (_, newest) = place.store._copies(named)
    assert place.prune().freed >= newest.size
    assert place.store._copies(named) == [newest]


def test_a_deletion_that_arrives_late_harms_nobody(place, bad):
    """The network holds a pruning's deletion, whose process is killed, and delivers it after the blob was named."""
    digest = place.store.put(b"late")
    place.age()
    caught, deliver, done = threading.Event(), threading.Event(), threading.Event()

    def hang(handler, asked):
        caught.set()
        deliver.wait(60)
        handler.passed_on(b"")
        done.set()
        handler._cut()

    bad.rule("DELETE", hang, pattern=digest.hex(), times=1)
    # A process that is killed while it waits for the answer.
    killed = threading.Thread(target=lambda: place.store.remove_old(digest, time.time()), daemon=True)
    killed.start()
    assert caught.wait(60)
    # Somebody relies on the blob meanwhile: it was judged, and is still there.
    assert place.store.has(digest)
    place.store.hold(digest)
    deliver.set()
    assert done.wait(60)
    killed.join(60)
    assert place.store.has(digest)
    assert place.store.get(digest) == b"late"
    # What would have happened with one key for a blob: the deletion removed the only copy.
    assert len(place.store._copies(digest)) == 1


@pytest.mark.parametrize("when", ["between list and copy", "never"])
def test_a_blob_that_is_pruned_while_it_is_held_is_written_again(place, monkeypatch, when):
    digest = place.store.put(b"raced")
    place.age()
    real = place.store._bucket.copy

    def copy(source, key):
        if when != "never":
            place.prune(grace_seconds=3600)
        return real(source, key)

    monkeypatch.setattr(place.store._bucket, "copy", copy)
    place.store.put(b"raced")
    assert len(place.store._copies(digest)) == (1 if when != "never" else 2)
    place.store._cache.drop(digest)
    assert place.store.get(digest) == b"raced"


def test_an_upload_longer_than_the_grace_period_that_is_pruned_is_no_success(place, monkeypatch):
    """Its age counts from its beginning, so a pruning may remove it the moment it is complete."""
    bucket = place.store._bucket
    real = bucket.put_file

    def slow(key, path):
        real(key, path)
        place.age()
        place.prune(grace_seconds=3600)

    monkeypatch.setattr(bucket, "put_file", slow)
    monkeypatch.setattr(place.store, "_fresh", 0.0)
    with pytest.raises(StoreUnusable, match="removed by a pruning"):
        place.store.put(b"took hours")
    incoming = place.store.incoming(hashlib.sha256(b"sent").digest(), 4)
    incoming.append(0, b"sent")
    with pytest.raises(StoreUnusable, match="removed by a pruning"):
        incoming.finish()
    # What was sent is still here, so that only the store is asked again.
    assert place.store.received(incoming.digest) == 4


def test_uploads_of_others_in_a_bucket_without_a_prefix_go_on(service, tmp_path):
    server, bad = service
    store = object_store(bad.url, tmp_path, "")
    other = object_store(bad.url, tmp_path / "other", "another-federation")
    began = server.uploads()
    for bucket, key in ((store._bucket, "blobs/x"), (other._bucket, "blobs/x"), (store._bucket, "logs/x")):
        bucket._call("create_multipart_upload", "written", Key=bucket._key(key))
    assert store._bucket.abort_uploads(time.time() + DAY * 10_000) == 1
    assert server.uploads() == began + 2
    server.bucket.multiparts.clear()


def test_uploads_are_given_up_on_every_page_of_their_list(service, tmp_path):
    _, bad = service
    store, asked = object_store(bad.url, tmp_path, "pages"), []
    real = store._bucket._call

    def call(method, verb, **given):
        if method != "list_multipart_uploads":
            return real(method, verb, **given)
        asked.append(given.get("KeyMarker"))
        upload = {"Key": f"pages/blobs/{len(asked)}", "UploadId": "gone", "Initiated": datetime(2020, 1, 1, tzinfo=UTC)}
        more = {"IsTruncated": True, "NextKeyMarker": upload["Key"], "NextUploadIdMarker": "gone"}
        return {"Uploads": [upload], **(more if len(asked) < 3 else {})}

    store._bucket._call = call
    assert store._bucket.abort_uploads(time.time()) == 3
    assert asked == [None, "pages/blobs/1", "pages/blobs/2"]


class Killed(BaseException):
    pass


def test_killed_at_every_request_a_pruning_loses_nothing_and_the_next_leaves_nothing(
    sqlite_only, place, database_url, monkeypatch, tmp_path
):
    # Not through the proxy, which a thousand requests would pass.
    prefix = place.store._bucket.place.prefix.rstrip("/")
    store = object_store(place.server.url, tmp_path / "pruner", prefix, cache_bytes=0)
    real, at, count = store._bucket._call, 0, 0

    def call(method, verb, **given):
        nonlocal count
        count += 1
        # Odd: the process dies before the request leaves; even: after the store has carried it out.
        if count == (at + 1) // 2 and at % 2:
            raise Killed
        answer = real(method, verb, **given)
        if count == (at + 1) // 2 and not at % 2 and at > 0:
            raise Killed
        return answer

    monkeypatch.setattr(store._bucket, "_call", call)
    strays = [b"stray"]
    finished = kills = 0
    while not finished:
        at += 1
        count = -(10**9)
        for each in strays:
            store.put(each)
        place.age()
        count = 0
        try:
            place.prune(1, store=store)
            finished = at > 0 and count < at // 2
        except Killed:
            kills += 1
        count = -(10**9)
        assert {each.digest for each in store.listed()} >= place.named(database_url), at
    count = -(10**9)
    place.age()
    done = place.prune(1, store=store)
    assert done.missing == ()
    named = place.named(database_url)
    assert {each.digest for each in store.listed()} == named
    # Besides the blobs there is the database's mark; those of killed prunings are gone.
    left = place.keys()
    assert [key.split("/")[1] for key in left] == ["blobs"] * len(named) + ["owners"]
    assert kills > 15


@pytest.mark.parametrize(("hours", "left"), [(1, 1), (30, 0)])
def test_a_pruning_gives_up_uploads_that_nobody_goes_on_with(place, bad, hours, left):
    bucket = place.store._bucket

    def tell(handler, asked):
        # moto says 2010 for all of them.
        status, headers, data = handler.passed_on(b"")
        began = datetime.fromtimestamp(time.time() - hours * 3600, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        handler.answer(status, headers, data.replace(b"2010-11-10T20:48:33.000Z", began.encode()))

    bad.rule("GET", tell, pattern=r"\?uploads")
    begun = bucket._call("create_multipart_upload", "written", Key=bucket.place.prefix + "blobs/aa/dead")
    place.prune()
    assert place.server.uploads(bucket.place.prefix) == left
    if left:
        bucket._call("abort_multipart_upload", "deleted", Key=begun["Key"], UploadId=begun["UploadId"])


def test_a_clock_of_this_machine_that_is_days_ahead_takes_no_young_blob(place):
    young = place.store.put(b"young")
    place.prune(now_ms=int((time.time() + 10 * DAY) * 1000))
    assert place.store.has(young)


def test_a_backup_and_a_restore_of_an_s3_store(place, database_url, tmp_path, bad):
    place.prune(1)
    given = {"federation": b"f" * 32, "software": "1", "now_ms": 1_800_000_000_000}
    empty = ObjectStore(place.store._bucket, tmp_path / "empty", 10**9)
    made = backup.make(database_url, empty, tmp_path / "backup", **given)
    # A backup does not push out what members ask for.
    assert not {part.sha256.hex() for part in made.snapshot.manifest.blobs if part.size > 5000} & {
        path.name for path in (tmp_path / "empty" / "cache").iterdir()
    }
    backup.newest(tmp_path / "backup").check()
    with empty.unpruned(), pytest.raises(StoreInUse, match="a backup"):
        place.prune(1, store=empty)
    from coordinator.storage.restore import restore_blobs

    target = object_store(bad.url, tmp_path / "target", "restored-" + tmp_path.name.replace("_", "-"))
    found = backup.newest(tmp_path / "backup")
    assert restore_blobs(found, target) == len(found.manifest.blobs)
    assert all(target.has(part.sha256) for part in found.manifest.blobs)


def test_a_backup_names_a_blob_that_the_store_damaged(place, database_url, tmp_path):
    named = place.versions()[-1].digest
    (copy,) = place.store._copies(named)
    place.server.damage(place.store._bucket.place.prefix + copy.key)
    empty = ObjectStore(place.store._bucket, tmp_path / "empty", 10**9)
    with pytest.raises(BackupRefused, match=f"{named.hex()}.*that digest"):
        backup.make(database_url, empty, tmp_path / "backup", federation=b"f" * 32, software="1", now_ms=1)
