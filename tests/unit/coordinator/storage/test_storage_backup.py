"""Backups: their content, interruption, damage, and what a restore means for members."""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import textwrap
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text

from coordinator.domain.jobs import JobStatus
from coordinator.domain.tokens import Refused
from coordinator.storage import backup, chain, records, snapshot
from coordinator.storage import restore as restoring
from coordinator.storage.blobs import BlobStore, open_blobs
from coordinator.storage.certificates import served
from coordinator.storage.database import Database, open_database
from coordinator.storage.errors import BackupDamaged, BackupRefused, DatabaseInUse, NotFound
from coordinator.storage.journal import pages
from coordinator.storage.members import spend_token
from coordinator.storage.models import LeaseRow, WithdrawalMarkRow, WithdrawalRow
from coordinator.storage.restore import GAP, check_target, restore_blobs, restore_rows
from tacit.heads import KeptHead
from tacit.reason import Reason
from tests.support.databases import migrated
from tests.support.next_schema import with_next_schema
from tests.support.postgres import Postgres
from tests.support.stored_job import SECRET, fill

FEDERATION = b"f" * 32
# Long after everything that `fill` writes.
MADE_MS = 1_800_000_000_000
HOUR_MS = 3_600_000


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return open_blobs(f"file://{tmp_path / 'store'}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture(params=["sqlite", "postgresql"])
def target_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without rows to restore into."""
    if request.param == "sqlite":
        path = tmp_path / "restored.db"
        path.write_bytes(migrated())
        return f"sqlite:///{path}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.database(migrated=True)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'one.db'}"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database that has a row in every table, and its store."""
    folder = tmp_path_factory.mktemp("full")
    database = open_database(f"sqlite:///{folder / 'one.db'}")
    fill(database, open_blobs(f"file://{folder / 'store'}"))
    database.close()
    return folder


@pytest.fixture
def filled(full: Path, tmp_path: Path, sqlite_url: str, store: BlobStore) -> str:
    """The URL of a copy of that database. Its store is copied, too."""
    shutil.copy(full / "one.db", tmp_path)
    shutil.copytree(full / "store", tmp_path / "store", dirs_exist_ok=True)
    return sqlite_url


@pytest.fixture(scope="module")
def backed_up(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of that database."""
    copy = tmp_path_factory.mktemp("backed-up") / "copy"
    shutil.copytree(full, copy)
    make(f"sqlite:///{copy / 'one.db'}", open_blobs(f"file://{copy / 'store'}"), copy / "backup")
    return copy / "backup"


@pytest.fixture
def made(backed_up: Path, folder: Path) -> backup.Snapshot:
    """A copy of that backup."""
    shutil.copytree(backed_up, folder)
    return backup.newest(folder)


def make(url: str, store: BlobStore, folder: Path, **options) -> backup.BackupMade:
    given = {"federation": FEDERATION, "software": "0.1.0", "now_ms": MADE_MS} | options
    return backup.make(url, store, folder, **given)


def rows(url: str) -> dict[str, list[tuple]]:
    with snapshot.of_database(url) as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key.columns))]
            for table in snapshot.tables_of(connection)
        }


def restored(of: backup.Snapshot, url: str, **options) -> tuple[Database, restoring.Restored]:
    database = open_database(url)
    given = {"revoke": (), "now_ms": MADE_MS + HOUR_MS, "by": "op"} | options
    return database, restore_rows(of, database, **given)


# ---- content --------------------------------------------------------------------------------------------------------


def test_a_whole_database_comes_back_in_another(database, database_url, store, folder, target_url, tmp_path):
    job = fill(database, store)

    def withdrawn(s):
        s.add(WithdrawalRow(member="desk-south", job="desk", at_ms=MADE_MS))
        s.add(WithdrawalMarkRow(member="desk-south", job="desk", first_version=1, sums=1))
        s.add(LeaseRow(one=1, fence=3, holder="one", address="a:1", since_ms=MADE_MS, expires_ms=MADE_MS))

    database.run_now(withdrawn)
    before = rows(database_url)
    assert all(found for name, found in before.items() if name != "restored_members"), before
    made = make(database_url, store, folder)
    newest = backup.newest(folder)
    newest.check()
    assert newest.manifest == made.snapshot.manifest
    assert newest.manifest.head == database.run_now(records.head).hash
    elsewhere = open_blobs(f"file://{tmp_path / 'elsewhere'}")
    assert restore_blobs(newest, elsewhere) == len(newest.manifest.blobs)
    target, done = restored(newest, target_url)
    after = rows(target_url)
    assert done.rows == sum(map(len, before.values()))
    # Journal, rounds and attempts continue from there; nothing else differs.
    for name, found in before.items():
        if name in ("journal", "rounds", "attempts", "versions", "evaluations", "dropouts"):
            open_ones = {"rounds": 1, "attempts": 1}.get(name, 0)
            assert after[name][: len(found) - open_ones] == found[: len(found) - open_ones], name
        elif name not in ("jobs", "tokens", "restored_members"):
            assert after[name] == found, name
    assert (
        target.run_now(lambda s: chain.verify(pages(s), [KeptHead(newest.manifest.head)])).head_id
        > newest.manifest.head_entry
    )
    # Exactly the blobs that rows name are there.
    named = {job.digest(), *job.blobs, *(row[2] for row in before["versions"])}
    states = {row[3] for row in before["server_states"]}
    assert len(states) == 4
    # The file of a replaced answer is deleted. Its row stays, with what was signed.
    files = {row[3] for row in before["corpora"] if row[3] is not None and row[-1] is None}
    assert len(files) == 1
    assert len({row[3] for row in before["corpora"]} - {None}) == 2
    named |= states | files
    assert {part.sha256 for part in newest.manifest.blobs} == named
    assert all(elsewhere.get(digest) for digest in named)
    # The database can be written, and its own numbering continues.
    target.run_now(
        lambda s: records.record_evaluation(
            s, "desk", version_number=1, accuracy=0.5, loss=0.7, examples=9, data=None, now_ms=MADE_MS
        )
    )
    target.close()


def test_a_later_backup_writes_only_what_is_new(filled, store, folder):
    first = make(filled, store, folder)
    assert (first.blobs_written, first.blobs_kept) == (len(first.snapshot.manifest.blobs), 0)
    assert first.blobs_written > 4
    again = make(filled, store, folder, now_ms=MADE_MS + 1)
    assert (again.blobs_written, again.blobs_kept) == (0, first.blobs_written)
    # A blob whose length is wrong is written again.
    part = first.snapshot.manifest.blobs[0]
    first.snapshot.blob(part).write_bytes(b"")
    assert make(filled, store, folder, now_ms=MADE_MS + 2).blobs_written == 1
    assert [each.manifest.made_ms - MADE_MS for each in backup.snapshots(folder)] == [0, 1, 2]
    backup.newest(folder).check()


def test_old_backups_are_removed_and_what_others_name_stays(filled, store, folder):
    make(filled, store, folder, keep=2)
    database = open_database(filled)
    for number in range(3):
        database.run_now(lambda s, number=number: records.note(s, "test", "north", number))
        made = make(filled, store, folder, keep=2, now_ms=MADE_MS + 1 + number)
    database.close()
    assert made.removed == 1
    left = backup.snapshots(folder)
    assert [each.manifest.made_ms - MADE_MS for each in left] == [2, 3]
    for each in left:
        each.check()
    named = {part.sha256.hex() for each in left for part in each.manifest.tables}
    assert {path.name for path in (folder / "parts").iterdir()} == named


def test_a_clock_that_was_ahead_neither_removes_new_backups_nor_goes_before_them(filled, store, folder):
    for days in (400, 401):
        make(filled, store, folder, keep=2, now_ms=MADE_MS + days * 24 * HOUR_MS)
    made = make(filled, store, folder, keep=2)
    assert made.removed == 1
    assert [each.manifest.made_ms for each in backup.snapshots(folder)] == [MADE_MS + 401 * 24 * HOUR_MS, MADE_MS]
    assert backup.newest(folder) == made.snapshot
    made.snapshot.check()
    # Nor does one whose clock is behind.
    again = make(filled, store, folder, keep=1, now_ms=MADE_MS - HOUR_MS)
    assert [each.path for each in backup.snapshots(folder)] == [again.snapshot.path]
    again.snapshot.check()


def test_after_an_older_backup_was_restored_the_next_one_is_the_newest(filled, store, folder, tmp_path):
    """Its journal is shorter than that of the history which was given up."""
    older = make(filled, store, folder)
    database = open_database(filled)
    for number in range(100):
        database.run_now(lambda s, number=number: records.note(s, "test", "north", number))
    database.close()
    given_up = make(filled, store, folder, now_ms=MADE_MS + 1)
    url = f"sqlite:///{tmp_path / 'restored.db'}"
    target, _ = restored(older.snapshot, url)
    target.close()
    made = make(url, store, folder, keep=2, now_ms=MADE_MS + 2)
    assert made.snapshot.manifest.head_entry < given_up.snapshot.manifest.head_entry
    assert backup.newest(folder) == made.snapshot
    assert [each.path for each in backup.snapshots(folder)] == [given_up.snapshot.path, made.snapshot.path]


def test_backups_are_in_the_order_of_their_numbers(filled, store, folder):
    first = make(filled, store, folder).snapshot
    assert first.path.name.startswith("snapshot-000001-")
    # The number alone decides, also with more digits than usual, and of one whose content nobody can read.
    first.path.rename(folder / first.path.name.replace("000001", "999999"))
    second = make(filled, store, folder, now_ms=MADE_MS - 1).snapshot
    assert second.path.name.startswith("snapshot-1000000-")
    assert backup.newest(folder) == second
    flip(second.path)
    third = make(filled, store, folder, now_ms=MADE_MS - 2).snapshot
    assert third.path.name.startswith("snapshot-1000001-")
    assert backup.newest(folder) == third
    # A name without a number goes before all others, so it removes nothing and is no default.
    third.path.rename(folder / third.path.name.replace("1000001", "30000101T000000.000Z"))
    with pytest.raises(BackupDamaged, match=second.path.name):
        backup.newest(folder)
    assert make(filled, store, folder).snapshot.path.name.startswith("snapshot-1000001-")
    # Copied together from several folders: those of one number are in the order of their times.
    names = [f"snapshot-2000000-2027{day:04}T080000.000Z-{'0' * 16}.json" for day in range(20)]
    for name in names:
        (folder / name).touch()
    assert [path.name for path in backup._in_order(folder)][-20:] == names


def test_a_damaged_older_backup_keeps_everything_in_place(filled, store, folder):
    make(filled, store, folder, keep=1)
    (old,) = folder.glob("snapshot-*")
    old.write_bytes(old.read_bytes().replace(b"0.1.0", b"0.1.1"))
    before = set((folder / "parts").iterdir())
    made = make(filled, store, folder, keep=1, now_ms=MADE_MS + 1)
    assert made.removed == 0
    assert old.name in made.not_removed
    assert before <= set((folder / "parts").iterdir())


def test_a_backup_shows_one_moment(database, database_url, store, folder, monkeypatch):
    """While tables are read one after the other, a round ends and the next one begins."""
    fill(database, store)
    head = database.run_now(records.head)
    real = backup._write_table

    def slowly(connection, table, into):
        if table.name == "rounds":
            fill(database, store, "later")
        return real(connection, table, into)

    monkeypatch.setattr(backup, "_write_table", slowly)
    made = make(database_url, store, folder)
    made.snapshot.check()
    manifest = made.snapshot.manifest
    assert (manifest.head_entry, manifest.head) == (head.id, head.hash)
    jobs = {
        row["name"] for part in manifest.tables if part.name == "jobs" for row in backup.read_rows(made.snapshot, part)
    }
    assert jobs == {"desk"}
    rounds = [part.rows for part in manifest.tables if part.name == "rounds"]
    assert rounds == [3]
    assert database.run_now(lambda s: len(records.load_jobs(s))) == 2


def test_a_blob_that_the_store_has_lost_is_named(filled, store, folder, tmp_path):
    database = open_database(filled)
    digest = database.run_now(lambda s: records.versions(s, "desk"))[1].digest
    database.close()
    path = Path(store._path(digest))
    good = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(bytes(len(good)))):
        damage()
        with pytest.raises(BackupRefused, match=f"{digest.hex()}.*--allow-missing"):
            make(filled, store, folder)
        assert list(folder.glob("snapshot-*")) == []
        made = make(filled, store, tmp_path / f"other-{path.exists()}", allow_missing=True)
        assert made.snapshot.manifest.missing == (digest,)
        made.snapshot.check()


def test_a_blob_that_the_backups_disk_damaged_is_written_again(filled, store, folder):
    """It keeps its size, so only reading it tells."""
    first = make(filled, store, folder)
    harmed = [first.snapshot.blob(part) for part in first.snapshot.manifest.blobs[:2]]
    for path in harmed:
        flip(path)
    with pytest.raises(BackupDamaged, match=harmed[0].name):
        first.snapshot.check()
    again = make(filled, store, folder, now_ms=MADE_MS + 1)
    assert (again.blobs_mended, again.blobs_written) == (2, 2)
    assert again.blobs_kept == len(first.snapshot.manifest.blobs) - 2
    # The older backup names the same blobs.
    for each in (first, again):
        each.snapshot.check()


def test_every_backup_of_a_folder_is_read_and_shared_blobs_once(filled, store, folder, monkeypatch):
    made = [make(filled, store, folder, now_ms=MADE_MS + number).snapshot for number in range(3)]
    real, read = backup._check_file, []
    monkeypatch.setattr(backup, "_check_file", lambda path, *words: (read.append(path), real(path, *words)))
    whole = [found for _, found in backup.checked(folder)]
    assert [each.path for each in whole] == [each.path for each in reversed(made)]
    blobs = {each.blob(part) for each in made for part in each.manifest.blobs}
    tables = {each.table(part) for each in made for part in each.manifest.tables}
    assert len(blobs) > 4
    assert sorted(read) == sorted(blobs | tables)
    flip(made[1].path)

    def damaged():
        return {path for path, found in backup.checked(folder) if isinstance(found, BackupDamaged)}

    assert damaged() == {made[1].path}
    # Nothing changed between the three, so they share the journal's rows, too.
    flip(made[0].table(next(part for part in made[0].manifest.tables if part.name == "journal")))
    assert damaged() == {each.path for each in made}


def test_a_backup_that_a_newer_one_removes_meanwhile_is_not_damaged(filled, store, folder):
    for number in range(3):
        make(filled, store, folder, now_ms=MADE_MS + number)
    found = backup.checked(folder)
    next(found)
    assert make(filled, store, folder, now_ms=MADE_MS + 3, keep=1).removed == 3
    assert list(found) == []


def test_a_folder_without_a_backup_is_not_whole(folder):
    folder.mkdir()
    with pytest.raises(BackupDamaged, match="no complete backup"):
        next(backup.checked(folder))


def test_a_broken_journal_is_not_backed_up(filled, store, folder):
    engine = create_engine(filled)
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER journal_only_grows_update"))
        connection.execute(text("UPDATE journal SET subject = 'other' WHERE id = 2"))
    engine.dispose()
    with pytest.raises(BackupRefused, match="entry 2 does not follow"):
        make(filled, store, folder)


def test_a_folder_with_other_files_is_left_alone(filled, store, folder):
    folder.mkdir()
    (folder / "letters.txt").write_text("dear bank")
    with pytest.raises(BackupRefused, match=r"letters.txt, which is not part of a backup"):
        make(filled, store, folder)
    assert [path.name for path in folder.iterdir()] == ["letters.txt"]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_folder_of_another_federation_is_left_alone(filled, store, folder, damaged):
    """Both would count for `keep`, and the backups of one would push out those of the other."""
    make(filled, store, folder, keep=1)
    if damaged:
        # The newest one that can be read says whose folder it is.
        make(filled, store, folder, keep=2, now_ms=MADE_MS + 1).snapshot.path.write_bytes(b"{}")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BackupRefused, match=rf"backups of federation {FEDERATION.hex()[:16]}, and .* another folder"):
        make(filled, store, folder, keep=1, federation=b"o" * 32)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    make(filled, store, folder)


def test_two_backups_cannot_write_one_folder_at_once(filled, store, folder, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    real = backup._head

    def waiting(connection):
        inside.set()
        assert go_on.wait(20)
        return real(connection)

    monkeypatch.setattr(backup, "_head", waiting)
    first = threading.Thread(target=make, args=(filled, store, folder))
    first.start()
    assert inside.wait(20)
    with pytest.raises(BackupRefused, match="another backup is being written"):
        make(filled, store, folder)
    go_on.set()
    first.join()
    backup.newest(folder).check()


def test_keys_are_backed_up_only_if_requested(filled, store, folder, tmp_path):
    assert make(filled, store, folder).snapshot.manifest.keys == ()
    (tmp_path / "root.key").write_bytes(b"the key")
    made = make(filled, store, folder, keys={"authority/root.key": tmp_path / "root.key"}, now_ms=MADE_MS + 1)
    made.snapshot.check()
    (part,) = made.snapshot.manifest.keys
    path = made.snapshot.key(part)
    assert (part.path, path.read_bytes(), path.stat().st_mode & 0o777) == ("authority/root.key", b"the key", 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700


# ---- kill -9 --------------------------------------------------------------------------------------------------------

_KILLED = """
    import os, signal, sys
    from pathlib import Path
    from coordinator.storage import backup, restore
    from coordinator.storage.blobs import open_blobs
    from coordinator.storage.database import open_database
    what, url, target, store, folder = sys.argv[1:]
    module, name = (backup, "_name") if what == "backup" else (restore, "insert")
    real = getattr(module, name)

    def work(last):
        calls = 0
        def dying(*given):
            nonlocal calls
            calls += 1
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given)
        setattr(module, name, dying)
        blobs = open_blobs(store)
        if what == "backup":
            backup.make(url, blobs, Path(folder), federation=b"f" * 32, software="0.1.0", now_ms=1_800_000_000_000)
        else:
            database = open_database(target)
            found = backup.newest(Path(folder))
            restore.restore_blobs(found, blobs)
            restore.restore_rows(found, database, revoke=(), now_ms=1_800_000_000_000, by="op")
            database.close()
        os._exit(0)

    # Killed before its first step, its second, ... and finally not at all.
    last, status = 0, None
    while status != 0:
        last += 1
        child = os.fork()
        if child == 0:
            work(last)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        whole = sorted(Path(folder).glob("snapshot-*"))
        if what == "backup":
            assert bool(whole) == (status == 0), (last, whole)
    print(last - 1)
"""


def run_killed(what: str, url: str, target: str, store: Path, folder: Path) -> int:
    words = [sys.executable, "-c", textwrap.dedent(_KILLED), what, url, target, f"file://{store}", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_backup_killed_at_any_step_leaves_nothing_that_passes_for_one(filled, folder, tmp_path):
    kills = run_killed("backup", filled, "", tmp_path / "store", folder)
    # Tables, blobs, and finally the snapshot itself.
    assert kills > 15
    backup.newest(folder).check()
    assert list(folder.glob(".partial-*")) == []


def test_a_restore_killed_at_any_step_can_be_repeated(filled, store, folder, tmp_path):
    make(filled, store, folder)
    target = f"sqlite:///{tmp_path / 'restored.db'}"
    kills = run_killed("restore", filled, target, tmp_path / "elsewhere", folder)
    assert kills >= 11
    database = open_database(target)
    assert database.run_now(lambda s: records.load_job(s, "desk")).version_number == 2
    # Killed after the commit, it is repeated too, and everything is there exactly once.
    before, found = rows(target), backup.newest(folder)
    check_target(database, found)
    done = restore_rows(found, database, revoke=(), now_ms=MADE_MS + HOUR_MS, by="op")
    assert (done.rows, done.jobs, done.revoked) == (
        sum(part.rows for part in found.manifest.tables),
        (("desk", 2),),
        (),
    )
    assert rows(target) == before
    assert [entry.kind for entry in database.run_now(records.journal)].count("restored") == 1
    # It stands for this backup alone, as its rows were.
    digest = found.manifest.head
    for other in (
        dataclasses.replace(found, path=found.path.with_stem("snapshot-000009-other")),
        dataclasses.replace(found, manifest=found.manifest.model_copy(update={"head": digest[::-1]})),
    ):
        for act in (check_target, lambda database, of: restore_rows(of, database, revoke=(), now_ms=1, by="op")):
            with pytest.raises(BackupRefused, match="not empty"):
                act(database, other)
    with pytest.raises(BackupRefused, match=r"already restored .* desk-north was not revoked"):
        check_target(database, found, ("desk-north",))
    database.close()


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink], ids=["bit", "short", "gone"]
)
@pytest.mark.parametrize("what", ["members", "journal", "blob", "snapshot"])
def test_damage_is_named_and_nothing_is_restored(made, folder, what, harm):
    tables = {part.name: made.table(part) for part in made.manifest.tables}
    path = {"blob": made.blob(made.manifest.blobs[0]), "snapshot": made.path, **tables}[what]
    harm(path)
    expected = path.name if path.exists() or what != "snapshot" else "no complete backup"
    with pytest.raises(BackupDamaged, match=expected):
        backup.newest(folder).check()


def with_journal(made, folder, change):
    """A backup whose journal somebody changed, with correct digests."""
    part = next(part for part in made.manifest.tables if part.name == "journal")
    forged = change(made.table(part).read_bytes())
    digest = hashlib.sha256(forged).digest()
    (folder / "parts" / digest.hex()).write_bytes(forged)
    tables = tuple(
        each.model_copy(update={"sha256": digest, "size": len(forged)}) if each is part else each
        for each in made.manifest.tables
    )
    return backup._reveal(folder, made.manifest.model_copy(update={"tables": tables, "made_ms": MADE_MS + 1}))


def test_a_number_that_no_float_holds_is_damage(made, folder):
    """JSON has it, and what only a loss may be, an infinite float, is written so."""
    fake = with_journal(made, folder, lambda rows: b'[{"float":1' + b"0" * 400 + b"}," + rows.split(b",", 1)[1])
    with pytest.raises(BackupDamaged, match=r"table journal\) is damaged"):
        fake.check()


def test_forged_rows_with_correct_digests_are_refused(made, folder, tmp_path):
    """A forger who can write digests still cannot make the journal's chain hold."""
    fake = with_journal(made, folder, lambda rows: rows.replace(b'"desk-north"', b'"desk-southX"'))
    with pytest.raises(BackupDamaged, match="is broken"):
        fake.check()
    database = open_database(f"sqlite:///{tmp_path / 'restored.db'}")
    with pytest.raises(BackupDamaged, match="is broken"):
        restore_rows(fake, database, revoke=(), now_ms=MADE_MS, by="op")
    check_target(database, fake)
    database.close()


def test_a_database_that_is_not_empty_is_left_alone(filled, store, folder, target_url):
    made = make(filled, store, folder)
    database = open_database(target_url)
    database.run_now(lambda s: records.note(s, "test", "north", 1))
    for act in (lambda: check_target(database, made.snapshot), lambda: restored(made.snapshot, target_url)):
        with pytest.raises(BackupRefused, match="not empty"):
            act()
    assert [entry.kind for entry in database.run_now(records.journal)] == ["test"]
    database.close()


def test_a_restore_is_refused_while_a_coordinator_serves(filled, target_url, monkeypatch):
    monkeypatch.setattr("coordinator.storage.database.TAKEOVER_MS", 100)
    serving = open_database(target_url, sole=True)
    with pytest.raises(DatabaseInUse):
        open_database(target_url, sole=True)
    serving.close()


def test_a_backup_by_newer_software_is_refused(made, folder, tmp_path):
    newer = backup._reveal(folder, made.manifest.model_copy(update={"revision": "9999", "software": "7.0"}))
    with pytest.raises(BackupRefused, match=r"newer software wrote .* \(its database is at 9999\); .* 7\.0"):
        restored(newer, f"sqlite:///{tmp_path / 'restored.db'}")


def test_a_backup_of_the_first_schema_is_restored_into_the_next_one(
    filled, store, folder, target_url, tmp_path, monkeypatch
):
    made = make(filled, store, folder)
    assert made.snapshot.manifest.revision == "0001"
    monkeypatch.setattr("coordinator.storage.database.MIGRATIONS", with_next_schema(tmp_path))
    target, done = restored(made.snapshot, target_url)
    assert done.jobs == (("desk", 2),)
    assert target.run_now(lambda s: s.execute(text("SELECT DISTINCT region FROM tokens ORDER BY 1")).all()) == [
        (f"of desk-{where}",) for where in ("east", "north", "south")
    ]
    assert target.run_now(lambda s: chain.verify(pages(s))).entries > 10
    target.close()


# ---- what it means for members --------------------------------------------------------------------------------------


def test_no_round_or_attempt_number_is_used_again(made, target_url):
    database, done = restored(made, target_url)
    assert done.jobs == (("desk", 2),)
    job = database.run_now(lambda s: records.load_job(s, "desk"))
    # Round 3 with attempt 3 was open. It is over, and so is the gap; neither counts as a failure.
    assert (job.round, job.attempt, job.round_open, job.failed_rounds) == (3 + GAP, 3 + GAP, False, 0)
    assert (job.version_number, job.status) == (2, JobStatus.PAUSED)
    found = database.run_now(lambda s: records.rounds(s, "desk"))
    assert [(each.number, each.outcome) for each in found[2:]] == [(3, "abandoned"), (3 + GAP, "abandoned")]
    (entry,) = [entry for entry in database.run_now(records.journal) if entry.kind == "restored"]
    assert entry.fields["versions"] == ["desk 2"]
    assert entry.fields["head"] == made.manifest.head.hex()
    assert entry.fields["withdrawn"] == ["desk-south"]
    database.close()


def test_a_finished_job_is_unchanged(filled, store, folder, tmp_path):
    database = open_database(filled)
    database.run_now(lambda s: records.abandon_open_attempts(s, 1, Reason.REASON_INTERNAL))
    database.run_now(lambda s: records.set_job_status(s, "desk", JobStatus.ABORTED, None, 1))
    database.close()
    target, done = restored(make(filled, store, folder).snapshot, f"sqlite:///{tmp_path / 'restored.db'}")
    assert done.jobs == ()
    assert target.run_now(lambda s: records.load_job(s, "desk")).round == 3
    target.close()


def test_an_open_invitation_is_withdrawn(filled, store, folder, tmp_path):
    """It may have been redeemed after the backup, and a token is redeemed once."""
    with snapshot.of_database(filled) as connection:
        token = connection.scalar(text("SELECT token_id FROM tokens WHERE member = 'desk-south'"))
    target, _ = restored(make(filled, store, folder).snapshot, f"sqlite:///{tmp_path / 'restored.db'}")
    at = datetime(2026, 3, 1, 12, 10, tzinfo=UTC)
    outcome = target.run_now(lambda s: spend_token(s, token, SECRET, b"k" * 32, at))
    assert isinstance(outcome, Refused)
    target.close()


def test_a_member_revoked_since_is_revoked_in_the_same_step(made, tmp_path):
    with pytest.raises(NotFound, match="nobody"):
        restored(made, f"sqlite:///{tmp_path / 'a.db'}", revoke=("nobody",))
    target, done = restored(made, f"sqlite:///{tmp_path / 'b.db'}", revoke=("desk-north",))
    assert done.revoked == ("desk-north",)
    assert target.run_now(lambda s: records.enrolled(s, "desk-north")) is None
    assert target.run_now(lambda s: records.enrolled(s, "desk-east")) is not None
    target.close()


def test_a_certificate_renewed_since_is_let_in_once(made, target_url):
    database, _ = restored(made, target_url)

    def try_(name: str, tag: str, begins_ms: int) -> bool:
        der, now_ms = f"{name} {tag}".encode(), MADE_MS + 2 * HOUR_MS
        given = {"begins_ms": begins_ms, "expires_ms": begins_ms + HOUR_MS, "now_ms": now_ms}
        found = database.run_now(lambda s: records.let_in(s, name, der, key=b"k" * 32, **given))
        return found is not None and found.admits(hashlib.sha256(der).digest(), now_ms)

    # Issued before the backup, so the backup would contain it.
    assert not try_("desk-north", "stolen long ago", MADE_MS - HOUR_MS)
    # Issued right after it, and backdated five minutes.
    assert try_("desk-north", "renewed", MADE_MS - 5 * 60 * 1000 + 1)
    now = database.run_now(lambda s: served(s, "desk-north"))
    assert now is not None
    assert now.certificate == b"desk-north renewed"
    # A second one from the forgotten time is not believed.
    assert not try_("desk-north", "renewed by a thief", MADE_MS + 1)
    assert not try_("nobody", "made up", MADE_MS + 1)
    assert not try_("desk-south", "only invited", MADE_MS + 1)
    # Revoked in the meantime.
    database.run_now(lambda s: records.revoke_member(s, "desk-east", MADE_MS + HOUR_MS))
    assert not try_("desk-east", "renewed", MADE_MS + 1)
    # Each refused certificate is noted once.
    assert not try_("desk-east", "renewed", MADE_MS + 1)
    told = [(e.kind, e.subject, e.fields.get("reason")) for e in database.run_now(records.journal)]
    at = told.index(("restored", "coordinator", None))
    unknown, revoked = "client_certificate_unknown", "client_certificate_revoked"
    assert told[at + 1 :] == [
        ("member_refused", "desk-north", unknown),
        ("member_adopted", "desk-north", None),
        ("member_refused", "desk-north", unknown),
        ("member_refused", "nobody", revoked),
        ("member_refused", "desk-south", revoked),
        ("member_revoked", "desk-east", None),
        ("member_refused", "desk-east", revoked),
    ]
    database.close()


def test_after_a_member_has_renewed_nothing_older_is_believed(made, tmp_path):
    """The member came with the backup's certificate and renewed. A certificate from between the two is a thief's."""
    database, _ = restored(made, f"sqlite:///{tmp_path / 'restored.db'}")
    times = {"begins_ms": MADE_MS, "expires_ms": MADE_MS + 9 * HOUR_MS}
    using = hashlib.sha256(b"certificate of desk-north").digest()
    assert database.run_now(
        lambda s: records.keep_next(
            s,
            "desk-north",
            using=using,
            using_expires_ms=MADE_MS + 9 * HOUR_MS,
            certificate=b"the next",
            expires_ms=MADE_MS + 9 * HOUR_MS,
            key="00" * 32,
            software_version="0.1.0",
            now_ms=MADE_MS + HOUR_MS,
        )
    )
    stolen = database.run_now(
        lambda s: records.let_in(s, "desk-north", b"from between", key=b"k" * 32, **times, now_ms=MADE_MS + 2 * HOUR_MS)
    )
    assert stolen is not None
    assert not stolen.admits(hashlib.sha256(b"from between").digest(), MADE_MS + 2 * HOUR_MS)
    database.close()


def test_a_member_that_is_heard_again_reports_its_ledger(made, tmp_path):
    target, _ = restored(made, f"sqlite:///{tmp_path / 'restored.db'}")
    # The backup knows 40, and the member is at 55 by now. That is no reason to refuse it.
    assert target.run_now(lambda s: records.heard_ledger(s, "desk-north", b"l" * 16, 55)) == 40
    assert target.run_now(lambda s: records.heard_ledger(s, "desk-north", b"l" * 16, 41)) == 55
    target.close()


def test_a_blob_half_restored_before_a_kill_is_continued(made, tmp_path):
    elsewhere = open_blobs(f"file://{tmp_path / 'elsewhere'}")
    part = made.manifest.blobs[0]
    elsewhere.incoming(part.sha256, part.size).append(0, made.blob(part).read_bytes()[:7])
    assert restore_blobs(made, elsewhere) == len(made.manifest.blobs)
    assert restore_blobs(made, elsewhere) == 0
    assert elsewhere.get(part.sha256) == made.blob(part).read_bytes()


def test_a_missing_backup_is_a_sentence(tmp_path, filled, store, folder):
    with pytest.raises(BackupDamaged, match="no complete backup"):
        backup.newest(tmp_path / "nowhere")
    made = make(filled, store, folder)
    assert backup.newest(folder, made.snapshot.path.stem).path == made.snapshot.path
    with pytest.raises(BackupDamaged, match="no snapshot other"):
        backup.newest(folder, "other")
    made.snapshot.path.unlink()
    with pytest.raises(BackupDamaged, match="no complete backup"):
        backup.newest(folder)
