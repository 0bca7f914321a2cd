"""Pruning leaves every blob that a row names, and takes every other that is old enough."""

import os
import time

import pytest
from sqlalchemy import text, update

from coordinator.domain.jobs import Norms
from coordinator.metrics import Metrics
from coordinator.services.job_check import check_job
from coordinator.storage import backup, records
from coordinator.storage import prune as prune_module
from coordinator.storage.blobs import open_blobs
from coordinator.storage.errors import NotFound, StoreInUse, StoreUnusable
from coordinator.storage.jobs import StoredEvaluation, StoredVersion
from coordinator.storage.models import CorpusRow
from coordinator.storage.prune import Retention, best_of, kept, prune
from tacit.reason import Reason
from tests.support.stored_job import fill, make_job

DAY = 24 * 3600.0


@pytest.fixture
def store(tmp_path):
    return open_blobs(f"file://{tmp_path / 'store'}")


@pytest.fixture
def place(database, store):
    fill(database, store, rounds=6)
    age(store)
    return Place(database, store)


class Place:
    def __init__(self, database, store):
        self.database, self.store = database, store

    def prune(self, newest=0, **more):
        how = {"best": False, "exported": False} | {
            name: more.pop(name) for name in ("best", "exported", "named") if name in more
        }
        now_ms = int(time.time() * 1000)
        given = {"now_ms": now_ms, "grace_seconds": DAY, "by": "op"} | more
        return prune(self.database, self.store, Retention(newest=newest, **how), **given)

    def versions(self):
        return self.database.run_now(lambda s: records.versions(s, "desk"))

    def held(self):
        return [each.number for each in self.versions() if self.store.has(each.digest)]


def age(store, days=2):
    """Lets every blob look as if nobody had held it for days."""
    past = time.time() - days * DAY
    for blob in store.listed():
        os.utime(store._path(blob.digest), (past, past))


def version(number, *accuracies, data=b"d" * 32):
    measured = tuple(
        StoredEvaluation(number, bytes(32), accuracy, 0.1, 10, data, at_ms) for accuracy, at_ms in accuracies
    )
    return StoredVersion(number, bytes([number]) * 32, number, 1, measured)


FOUND = [version(0), version(1, (0.5, 10)), version(2, (0.9, 20)), version(3, (0.7, 30)), version(4), version(5)]


@pytest.mark.parametrize(
    ("policy", "stays"),
    [
        (Retention(), {0, 1, 2, 3, 4, 5}),
        (Retention(1, best=False), {0, 5}),
        (Retention(2), {0, 2, 4, 5}),
        (Retention(1, best=False, exported=True), {0, 5}),
        (Retention(1, best=False, named=frozenset({("desk", 3), ("other", 1)})), {0, 3, 5}),
        (Retention(9), {0, 1, 2, 3, 4, 5}),
    ],
)
def test_the_policy_says_which_versions_stay(policy, stays):
    assert kept("desk", FOUND, frozenset(), policy) == stays
    if policy.exported and policy.newest == 1:
        assert kept("desk", FOUND, frozenset({FOUND[1].digest}), policy) == stays | {1}


def test_the_versions_of_a_jobs_average_stay():
    policy = Retention(1, best=False)
    assert kept("desk", FOUND, frozenset(), policy, averaged=3) == {0, 3, 4, 5}
    assert kept("desk", FOUND, frozenset(), Retention(4, best=False), averaged=3) == {0, 2, 3, 4, 5}


def test_the_best_version_is_the_best_on_the_newest_data():
    assert best_of(FOUND) == 2
    assert best_of([*FOUND, version(6, (0.6, 40), data=b"e" * 32)]) == 6
    # A later evaluation of the same version replaces the earlier one; of equals, the newest version.
    assert best_of([version(1, (0.9, 1), (0.2, 3)), version(2, (0.3, 2)), version(3, (0.3, 2))]) == 3
    assert best_of([version(1)]) is None


def test_versions_states_and_blobs_that_nothing_names_go(place):
    stray = place.store.put(b"stray")
    young = place.store.put(b"young")
    os.utime(place.store._path(stray), (1, 1))
    newest = place.versions()[-1]
    states = {digest for each in place.versions() for digest in each.server_state.values()}
    dry = place.prune(2, dry_run=True)
    assert place.store.has(stray)
    assert place.held() == [each.number for each in place.versions()]
    done = place.prune(2)
    assert (done.versions, done.states, done.blobs, done.freed) == (dry.versions, dry.states, dry.blobs, dry.freed)
    assert place.held() == [0, newest.number - 1, newest.number]
    assert not place.store.has(stray)
    assert place.store.has(young)
    assert {digest for digest in states if place.store.has(digest)} == set(newest.server_state.values())
    assert (done.missing, done.young) == ((), 1)
    told = place.database.run_now(records.journal)[-1]
    assert (told.kind, told.fields["numbers"]) == ("versions_pruned", [str(n) for n in done.versions["desk"]])
    # A second run finds nothing more, and says nothing.
    again = place.prune(2)
    assert (again.versions, again.states, again.blobs) == ({}, 0, 0)
    assert place.database.run_now(records.journal)[-1].id == told.id


def test_documents_are_read_before_the_transaction_and_a_job_that_comes_meanwhile_is_seen(place, monkeypatch):
    """The transaction holds the journal's lock, for which all others wait, and a store may take long to answer."""
    read, inside = prune_module.read_document, []

    def slowly(store, job, digest):
        # Another transaction writes meanwhile.
        now = place.database.run_now(lambda s: records.note(s, "test", "subject", 1))
        inside.append((job, now))
        if len(inside) == 1:
            fill(place.database, place.store, rounds=1, name="ward")
        return read(store, job, digest)

    monkeypatch.setattr(prune_module, "read_document", slowly)
    place.prune(2)
    assert [job for job, _ in inside] == ["desk", "ward"]
    assert all(place.store.has(each.digest) for each in place.database.run_now(lambda s: records.versions(s, "ward")))


def test_without_a_policy_only_blobs_that_nothing_names_go(place):
    done = place.prune()
    # `fill` has a text that was replaced, and is still there.
    assert (done.versions, done.blobs, done.freed, done.missing) == ({}, 1, len(b"first"), ())
    assert place.held() == [each.number for each in place.versions()]


def test_a_backup_after_pruning_is_whole_and_waits_for_none(place, database_url, tmp_path):
    place.prune(1)
    given = {"federation": b"f" * 32, "software": "1", "now_ms": 1_800_000_000_000}
    backup.make(database_url, place.store, tmp_path / "backup", **given)
    newest = place.versions()[-1]
    held = {part.sha256 for part in backup.newest(tmp_path / "backup").manifest.blobs}
    assert {newest.digest, *newest.server_state.values()} <= held
    assert place.versions()[2].digest not in held
    with place.store.unpruned(), pytest.raises(StoreInUse, match="a backup"):
        place.prune(1)
    with place.store.pruning(), pytest.raises(StoreInUse):
        place.prune(1)


def test_an_exported_version_stays_and_an_evaluated_one_alone_does_not(place):
    found = place.versions()
    for each, exported in ((found[2], True), (found[3], False)):
        place.database.run_now(
            lambda s, d=each.digest, e=exported: records.note_fetched(s, d, 1, 1000, by="op", exported=e)
        )
    place.prune(1, exported=True)
    assert place.held() == [0, 2, found[-1].number]


@pytest.mark.parametrize("named", [("typo", 1), ("desk", 99)])
def test_a_named_version_that_does_not_exist_lets_nothing_go(place, named):
    with pytest.raises(NotFound, match=f"{named[0]}/{named[1]}"):
        place.prune(1, named=frozenset({named}))
    assert place.held() == [each.number for each in place.versions()]


def test_withdrawn_text_goes_and_text_that_counts_stays(place):
    texts = place.database.run_now(lambda s: [row.digest for row in s.query(CorpusRow) if row.digest is not None])
    held = [digest for digest in texts if place.store.has(digest)]
    assert held
    place.database.run_now(lambda s: s.execute(update(CorpusRow).values(replaced_ms=5)) and None)
    assert place.prune().blobs == len(set(held))
    assert not any(place.store.has(digest) for digest in held)


def test_a_blob_that_is_held_again_while_the_store_is_read_stays(place, monkeypatch):
    digest = place.store.put(b"about to be named")
    os.utime(place.store._path(digest), (1, 1))
    listed = list(place.store.listed())
    # After pruning has looked, somebody stores the same bytes again, which writes nothing.
    monkeypatch.setattr(type(place.store), "listed", lambda store: (place.store.put(b"about to be named"), listed)[1])
    assert place.prune().young == 1
    assert place.store.has(digest)


def test_every_way_to_a_row_holds_its_blobs(database, store):
    job = make_job("late", store)
    upload = store.incoming(job.weights, store.size(job.weights))
    age(store)
    for hold in (
        lambda: store.put(store.get(job.weights)),
        lambda: store.incoming(job.weights, 1),
        lambda: check_job(store, job.digest()),
        lambda: store.hold(job.weights),
    ):
        age(store)
        hold()
        assert prune(database, store, Retention(), now_ms=int(time.time() * 1000), grace_seconds=DAY, by="op").young
        assert store.has(job.weights)
        for digest in (job.digest(), *job.blobs):
            if not store.has(digest):
                make_job("late", store)
    assert upload.complete
    # An upload that was complete for days gets its name now, and is young now.
    slow = store.incoming(bytes.fromhex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"), 3)
    slow.append(0, b"abc")
    os.utime(store._partial(slow.digest), (1, 1))
    slow.finish()
    assert not store.remove_old(slow.digest, time.time() - DAY)


def test_a_document_that_cannot_be_read_lets_nothing_go(place):
    document = place.database.run_now(lambda s: records.load_job(s, "desk")).document
    before = {blob.digest for blob in place.store.listed()}
    path = place.store._path(document)
    with open(path, "ab") as file:
        file.write(b" ")
    with pytest.raises(StoreUnusable, match="nothing was removed"):
        place.prune(1)
    assert {blob.digest for blob in place.store.listed()} == before


def test_a_version_with_the_bytes_of_one_that_was_pruned_is_stored_again(place):
    place.prune(1)
    gone = place.versions()[2]
    assert not place.store.has(gone.digest)
    data = b"the next version"
    digest = place.store.put(data)
    newest = place.versions()[-1]

    def publish(s):
        s.execute(text("UPDATE versions SET digest = :digest WHERE number = 2"), {"digest": digest})
        records.abandon_open_attempts(s, 8, Reason.REASON_COORDINATOR_RESTARTED)
        state = records.load_job(s, "desk")
        records.publish_version(
            s, "desk", newest.number + 1, digest, state.round, 9, norms=Norms(1.0, 1.0, 0.5), server_state={}
        )

    place.database.run_now(publish)
    age(place.store)
    place.prune(1)
    # Version 2 was let go, and the newest version has the same bytes.
    assert place.store.has(digest)


def test_the_size_of_the_store_is_measured_and_told(store):
    assert store.measure() == (0, 0)
    store.put(b"four")
    store.put(b"three")
    assert store.measure() == (2, 9)
    assert open_blobs("memory://measured").measure() is None
    metrics = Metrics("test")
    metrics.store_holds(2, 9)
    assert (metrics.value("store_blobs"), metrics.value("store_bytes")) == (2, 9)


def test_a_row_whose_blob_is_lost_is_reported(place):
    lost = place.versions()[-1].digest
    place.store.remove(lost)
    assert place.prune(1).missing == (lost,)
