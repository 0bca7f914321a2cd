"""Two databases on one prefix of a bucket: marks keep each from deleting what the other one stored."""

import asyncio
import contextlib
import shutil

import pytest
from structlog.testing import capture_logs

from coordinator.storage import backup, records
from coordinator.storage import prune as prune_module
from coordinator.storage.database import open_database
from coordinator.storage.errors import BackupRefused, StoreNotOwned, StoreTaken, StoreUnusable
from coordinator.storage.owner_mark import new_mark
from coordinator.storage.ownership import Ownership, keep_marked
from coordinator.storage.prune import Retention, named_blobs, prune
from coordinator.storage.restore import check_target, restore_blobs, restore_rows
from tests.support.databases import migrated
from tests.support.s3_server import object_store, served
from tests.support.stored_job import fill

HOUR = 3600.0


@pytest.fixture(scope="module")
def service():
    with served() as both:
        yield both


@pytest.fixture
def bad(service):
    yield service[1]
    service[1].heal()


class House:
    """A database, and the store on the prefix that it shares with others."""

    opened = []  # noqa: RUF012  emptied by each test

    def __init__(self, path, service, prefix):
        self.opened.append(self)
        if not path.exists():
            path.write_bytes(migrated())
        self.path, self.server = path, service[0]
        self.url = f"sqlite:///{path}"
        self.database = open_database(self.url)
        self.store = object_store(service[1].url, path.with_suffix(".local"), prefix)
        self.owner = Ownership(self.database, self.store)

    def copied(self, service, name):
        """Another coordinator on a copy of the database's file, as it is now."""
        self.database.close()
        shutil.copy(self.path, self.path.with_name(name))
        self.database = open_database(self.url)
        self.owner._database = self.database
        return House(self.path.with_name(name), service, self.prefix)

    @property
    def prefix(self):
        return self.store._bucket.place.prefix.rstrip("/")

    def claim(self):
        self.owner.claim(1, "coordinator")

    def note(self, kind="operator_act"):
        self.database.run_now(lambda s: records.note(s, kind, "coordinator", 2, by="op"))

    def version(self, name):
        """Stores what a published version has: a blob that this database's rows name."""
        fill(self.database, self.store, name, rounds=1)

    def named(self):
        return named_blobs(self.database, self.store)

    def age(self, hours=50):
        self.server.age(hours * HOUR, self.prefix + "/blobs")

    def prune(self, **more):
        given = {"now_ms": 3, "grace_seconds": HOUR, "by": "machine:op"} | more
        return prune(self.database, self.store, Retention(), **given)

    def whole(self):
        return all(self.store.has(digest) for digest in self.named())

    def take_over(self):
        return self.owner.take_over(4, "machine:op", sorted(self.named()))


@pytest.fixture
def houses(service, tmp_path):
    House.opened.clear()
    yield lambda name="first": House(tmp_path / f"{name}.db", service, tmp_path.name.replace("_", "-"))
    for house in House.opened:
        house.database.close()


def restored(house, service, tmp_path):
    """What `coordinator backup` and `coordinator restore` make of a house, on the same prefix."""
    backup.make(house.url, house.store, tmp_path / "backup", federation=b"f" * 32, software="1", now_ms=1)
    found = backup.newest(tmp_path / "backup")
    again = House(tmp_path / "restored.db", service, house.prefix)
    restore_blobs(found, again.store)
    restore_rows(found, again.database, revoke=(), now_ms=2, by="machine:op")
    return again


def test_a_restored_database_on_the_same_prefix_is_refused_and_what_was_stored_later_lives(houses, service, tmp_path):
    house = houses()
    house.claim()
    house.version("desk")
    again = restored(house, service, tmp_path)
    house.version("later")
    house.age()
    for act in (again.prune, lambda: again.prune(dry_run=True), again.claim, again.owner.check):
        with pytest.raises(StoreNotOwned, match=r"belongs to another history of this database .*take-over"):
            act()
    assert house.whole()
    # The owner itself goes on.
    assert house.prune().missing == ()
    assert house.whole()


def test_without_the_check_the_restored_database_deletes_what_was_stored_later(houses, service, tmp_path, monkeypatch):
    """The attack, on the baseline."""
    house = houses()
    house.claim()
    house.version("desk")
    again = restored(house, service, tmp_path)
    house.version("later")
    house.age()
    monkeypatch.setattr(Ownership, "_refuse", lambda self, marks: None)
    assert again.prune().blobs > 0
    assert not house.whole()


def test_another_database_is_refused_before_it_writes_anything(houses):
    house, stranger = houses(), houses("stranger")
    house.version("desk")
    house.claim()
    stranger.note()
    keys = house.server.keys(house.prefix)
    with pytest.raises(StoreNotOwned, match=r"belongs to database [0-9a-f]{12}, which marked it at \d{4}-"):
        stranger.claim()
    assert house.server.keys(house.prefix) == keys
    assert stranger.database.run_now(records.head).id == 1


def test_a_copy_that_lacks_a_marked_entry_is_refused(houses, service):
    """A copied file has no entry of a restore; the mark is renewed while the first one serves."""
    house = houses()
    house.claim()
    copy = house.copied(service, "copy.db")
    house.version("later")
    house.owner.renew()
    house.age()
    with pytest.raises(StoreNotOwned, match="another history of this database"):
        copy.prune()
    assert house.whole()


def test_a_copy_that_came_first_is_refused_from_the_next_renewal_on(houses, service):
    house = houses()
    house.claim()
    copy = house.copied(service, "copy.db")
    # Nothing yet says that there are two.
    copy.prune()
    house.version("later")
    with pytest.raises(StoreNotOwned):
        house.owner.renew()
    house.age()
    for each in (copy, house):
        with pytest.raises(StoreNotOwned):
            each.prune()
    assert house.whole()
    # Somebody decides.
    house.take_over()
    house.prune()
    with pytest.raises(StoreNotOwned, match="took it over"):
        copy.prune()


def test_a_take_over_holds_what_it_names_and_the_woken_owner_is_refused(houses, service, tmp_path):
    house = houses()
    house.claim()
    house.version("desk")
    again = restored(house, service, tmp_path)
    house.version("later")
    house.age()
    taken = again.take_over()
    assert (len(taken.marks), taken.missing) == (1, ())
    assert taken.held == len(again.named())
    (entry,) = again.database.run_now(lambda s: [e for e in records.journal(s) if e.kind == "store_taken"])
    assert entry.fields["by"] == "machine:op"
    # A second one finds nothing to do.
    assert again.take_over().marks == ()
    # The first owner wakes up: it neither prunes nor marks.
    keys = house.server.keys(house.prefix + "/owners")
    house.note()
    for act in (house.prune, house.owner.renew, house.owner.check, house.claim):
        with pytest.raises(StoreNotOwned, match="took it over"):
            act()
    assert house.server.keys(house.prefix + "/owners") == keys
    # The new one serves, renews and prunes; what only the first one named goes.
    again.claim()
    again.note()
    again.owner.renew()
    assert again.prune().blobs > 0
    assert again.whole()
    assert len(house.server.keys(house.prefix + "/owners")) == 2


def test_a_restore_is_repeated_after_its_take_over_failed_in_the_middle(houses, service, tmp_path, monkeypatch):
    """As the Kubernetes Job does: each of its tries restores first, and then takes over."""
    house = houses()
    house.claim()
    house.version("desk")
    again = restored(house, service, tmp_path)
    found = backup.newest(tmp_path / "backup")
    put_back = restore_rows(found, again.database, revoke=(), now_ms=3, by="machine:op")

    def fail(_digest):
        raise StoreUnusable("the store does not answer")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(again.store, "hold", fail)
            with pytest.raises(StoreUnusable, match="does not answer"):
                again.take_over()
        check_target(again.database, found)
        assert restore_rows(found, again.database, revoke=(), now_ms=5, by="machine:op") == put_back
    assert again.take_over().missing == ()
    check_target(again.database, found)
    # Not once the coordinator has used the database.
    again.note()
    with pytest.raises(BackupRefused, match="not empty"):
        restore_rows(found, again.database, revoke=(), now_ms=6, by="machine:op")
    with pytest.raises(BackupRefused, match="not empty"):
        check_target(again.database, found)


def test_a_pruning_that_is_taken_over_in_the_middle_ends(houses, service, tmp_path, monkeypatch):
    monkeypatch.setattr(prune_module, "_BATCH", 1)
    house = houses()
    house.claim()
    house.version("desk")
    again = restored(house, service, tmp_path)
    strays = [house.store.put(b"stray %d" % number) for number in range(3)]
    house.age()
    real, calls = house.store.remove_old, []

    def remove(digest, before):
        calls.append(digest)
        if len(calls) == 1:
            again.take_over()
        return real(digest, before)

    monkeypatch.setattr(house.store, "remove_old", remove)
    with pytest.raises(StoreNotOwned, match="took it over"):
        house.prune()
    assert len(calls) == 1
    assert sum(house.store.has(digest) for digest in strays) == 2
    assert again.whole()


def test_a_pruning_that_began_before_a_take_over_deletes_nothing_that_the_new_owner_names(
    houses, service, tmp_path, monkeypatch
):
    """Its requests hang in the network, so no check stops them: holding does."""
    house = houses()
    house.claim()
    house.version("desk")
    again = restored(house, service, tmp_path)
    house.age()
    before = house.store.clock(0) - HOUR
    assert again.take_over().held > 0
    for digest in again.named():
        house.store.remove_old(digest, before)
    house.store.tidy(before)
    assert again.whole()


@pytest.mark.parametrize("order", ["one after the other", "both look before either writes"])
def test_of_two_new_databases_that_claim_at_once_one_at_most_succeeds(houses, monkeypatch, order):
    one, two = houses("one"), houses("two")
    real = two.store.write_mark

    def write(mark):
        # The other one looked, saw nothing, and writes just now.
        if order != "one after the other":
            with contextlib.suppress(StoreNotOwned):
                one.claim()
        real(mark)

    monkeypatch.setattr(two.store, "write_mark", write)
    with contextlib.suppress(StoreNotOwned):
        two.claim()
    won = []
    for each in (one, two):
        with contextlib.suppress(StoreNotOwned):
            each.owner.check()
            won.append(each)
    assert len(won) == 1
    won[0].claim()


@pytest.mark.parametrize("request_", range(6))
def test_a_claim_that_is_killed_at_any_request_can_be_repeated(houses, monkeypatch, request_):
    class Killed(BaseException):
        pass

    house = houses()
    house.claim()
    house.note()
    real, count = house.store._bucket._call, 0

    def call(method, verb, **given):
        nonlocal count
        count += 1
        if count > request_:
            raise Killed
        return real(method, verb, **given)

    monkeypatch.setattr(house.store._bucket, "_call", call)
    with contextlib.suppress(Killed):
        house.claim()
    monkeypatch.setattr(house.store._bucket, "_call", real)
    house.claim()
    assert len(house.server.keys(house.prefix + "/owners")) == 1


def test_a_mark_that_was_deleted_ends_a_pruning_and_an_unknown_one_too(houses, monkeypatch):
    house = houses()
    house.claim()
    for key in house.server.keys(house.prefix + "/owners"):
        house.store._bucket.delete(key.removeprefix(house.prefix + "/"))
    with pytest.raises(StoreNotOwned, match="has lost the mark"):
        house.owner.check()
    house.store._bucket.put("owners/of-another-kind", b"")
    with pytest.raises(StoreUnusable, match="is no mark that this software writes"):
        house.prune()


def test_a_store_that_does_not_list_what_was_written_is_refused(houses, bad):
    house = houses()
    bad.rule("PUT", lambda handler, asked: handler.answer(200, {"ETag": '"x"'}, b""), pattern="owners/")
    with pytest.raises(StoreUnusable, match="read-after-write"):
        house.claim()


def test_a_renewal_writes_only_if_there_is_news(houses, bad):
    house = houses()
    house.claim()
    bad.asked.clear()
    for _ in range(5):
        house.owner.renew()
    assert bad.count("PUT") == 0
    house.note()
    house.owner.renew()
    assert (bad.count("PUT", "owners/"), bad.count("DELETE", "owners/")) == (1, 1)


def test_a_folder_has_no_marks(houses, tmp_path):
    from coordinator.storage.blobs import open_blobs

    house = houses()
    owner = Ownership(house.database, open_blobs(str(tmp_path / "folder")))
    owner.claim(1, "coordinator")
    owner.renew()
    owner.check()
    assert house.database.run_now(records.head).id == 0
    with pytest.raises(StoreUnusable, match="only a bucket has marks"):
        owner.take_over(1, "op", [])


def test_text_that_a_member_took_back_is_not_deleted_from_anothers_prefix(houses):
    from coordinator.services.acts import Acts
    from coordinator.services.corpora import Corpora

    house, stranger = houses(), houses("stranger")
    house.claim()
    house.note()
    digest = house.store.put(b"the same words")
    corpora = [Corpora(each.database, each.store, None, b"f" * 32, Acts()) for each in (stranger, house)]
    with pytest.raises(StoreNotOwned):
        corpora[0]._remove(digest)
    assert house.store.has(digest)
    assert corpora[1]._remove(digest)
    assert not house.store.has(digest)


def test_a_serving_coordinator_renews_its_mark_and_hears_that_it_was_taken_over(houses):
    house, other = houses(), houses("other")
    house.claim()
    other.note()

    async def watched():
        looked = asyncio.Queue()
        real, loop = house.owner.renew, asyncio.get_running_loop()

        def renew():
            try:
                real()
            finally:
                loop.call_soon_threadsafe(looked.put_nowait, [each.entry for each in house.store.marks()])

        house.owner.renew = renew
        heard = []
        task = asyncio.create_task(keep_marked(house.owner, house.store, heard.append, 0.001))
        try:
            house.note()
            newest = house.database.run_now(records.head).id
            while await asyncio.wait_for(looked.get(), 60) != [newest]:
                pass
            with capture_logs() as said:
                # Another one's mark beside its own is no decision, so it goes on.
                house.store.write_mark(new_mark(newest, b"x" * 32, b"y" * 32))
                while not any(each["event"] == "store_not_owned" for each in said):
                    await asyncio.wait_for(looked.get(), 60)
                assert not heard
                other.take_over()
                await asyncio.wait_for(task, 60)
            assert [type(each) for each in heard] == [StoreTaken]
            assert said[-1]["event"] == "store_taken"
        finally:
            task.cancel()

    asyncio.run(watched())
