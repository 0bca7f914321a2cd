"""Ledger files that are damaged, older than they were, or cannot be written."""

import json
import os
import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_client.ledger import verification
from edge_client.ledger.chain import ZERO, Purpose, Released, record_after, record_from
from edge_client.ledger.history import LedgerRolledBack
from edge_client.ledger.ledger import (
    Ledger,
    LedgerDamaged,
    LedgerError,
    LedgerNewer,
    LedgerUnwritable,
    ledger_path,
)
from edge_client.ledger.pin import pin_path
from edge_client.ledger.store import reading
from edge_client.ledger.verification import verify, verify_export
from learning.accounting.events import SampledGaussian
from learning.accounting.spend import Limit

LIMIT = Limit(4.0, 1e-5)
EVENT = SampledGaussian(multiplier=1.2, rate=0.02, steps=20)
PURPOSE = Purpose(
    federation=bytes(32),
    job="desk",
    round=1,
    version=bytes(32),
    document=bytes(32),
    mechanism="dp-sgd",
    data=bytes(32),
)


def opened(home: Path, **how) -> Ledger:
    return Ledger.open(ledger_path(home, "data"), "data", LIMIT, **how)


def lived(home: Path, releases: int = 2) -> Path:
    """A closed ledger with three records for each release."""
    with opened(home) as ledger:
        release(ledger, releases)
    return ledger_path(home, "data")


def release(ledger: Ledger, count: int = 1) -> None:
    for _ in range(count):
        held = ledger.reserve(EVENT, PURPOSE)
        ledger.charge(held.number, held.number)
        ledger.settle(held.number, held.number, "published", b"")


def rewritten(path: Path, change: Callable[[list[tuple[int, bytes, bytes]]], list[tuple[int, bytes, bytes]]]) -> None:
    """Replaces the records behind the ledger's back, without the triggers."""
    with sqlite3.connect(path) as connection:
        connection.text_factory = bytes
        rows = change(connection.execute("SELECT sequence, line, digest FROM records ORDER BY sequence").fetchall())
        connection.execute("DROP TRIGGER records_kept")
        connection.execute("DROP TRIGGER records_appended")
        connection.execute("DELETE FROM records")
        # As a damaged disk would leave them: bytes that need not be text.
        connection.executemany("INSERT INTO records VALUES (?, CAST(? AS TEXT), ?)", rows)
    connection.close()


def forged(rows: list[tuple[int, bytes, bytes]]) -> list[tuple[int, bytes, bytes]]:
    """Links the contents with hashes that fit, as anyone can who lacks only the pin."""
    found, previous = [], ZERO
    for sequence, (_, line, _) in enumerate(rows, start=1):
        record = record_from(line)
        record = record_after(previous, sequence, record.at_ms, record.body)
        found.append((sequence, record.line, record.digest))
        previous = record.digest
    return found


# ---- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("grown")
    lived(home)
    return home


def copied(home: Path) -> Path:
    target = Path(tempfile.mkdtemp(dir=home.parent))
    shutil.copytree(home, target, dirs_exist_ok=True)
    return target


@settings(max_examples=150, deadline=None, derandomize=True)
@given(record=st.integers(0, 6), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_of_any_record_is_found_and_named(grown, record, place, flip):
    home = copied(grown)
    path = ledger_path(home, "data")

    def change(rows):
        sequence, line, digest = rows[record]
        at = int(place * len(line))
        rows[record] = (sequence, line[:at] + bytes([line[at] ^ flip]) + line[at + 1 :], digest)
        return rows

    rewritten(path, change)
    with pytest.raises(LedgerDamaged, match=f"at record {record + 1}:"):
        opened(home)
    verdict = verify(path)
    assert verdict.record == record + 1
    assert verdict.problems[0].where == f"record {record + 1}"
    shutil.rmtree(home)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@example(place=0.0, flip=1)
def test_a_changed_byte_of_the_file_is_harmless_or_found(grown, place, flip):
    home = copied(grown)
    path = ledger_path(home, "data")
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= flip
    path.write_bytes(data)
    with reading(ledger_path(grown, "data")) as store:
        before = list(store.rows())
    try:
        with opened(home) as ledger:
            assert [(record.sequence, record.line, record.digest) for record in ledger.records()] == before
    except LedgerError:
        pass
    try:
        verdict = verify(path)
        assert not verdict.sound or verdict.state.sequence == 7
    except LedgerError:
        pass
    shutil.rmtree(home)


@pytest.mark.parametrize("kept", [0, 1, 50, 4096, 5000, 8000, 0.5, 0.6])
def test_a_file_that_was_cut_is_refused(grown, kept):
    home = copied(grown)
    path = ledger_path(home, "data")
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises((LedgerDamaged, LedgerRolledBack)):
        opened(home)
    assert path.stat().st_size == (int(kept * len(data)) if isinstance(kept, float) else kept), "it was left as it is"


def test_swapped_records_are_named(grown):
    home = copied(grown)

    def swap(rows):
        rows[2], rows[5] = (3, *rows[5][1:]), (6, *rows[2][1:])
        return rows

    rewritten(ledger_path(home, "data"), swap)
    with pytest.raises(LedgerDamaged, match="at record 3:"):
        opened(home)
    assert verify(ledger_path(home, "data")).record == 3


def test_a_changed_record_with_a_good_hash_breaks_the_next_link(grown):
    home = copied(grown)

    def change(rows):
        sequence, line, _ = rows[3]
        other = line.replace(b"published", b"abandoned")
        rows[3] = (sequence, other, sha256(other).digest())
        return rows

    rewritten(ledger_path(home, "data"), change)
    with pytest.raises(LedgerDamaged, match="at record 5: it does not hold the hash of the record before"):
        opened(home)
    assert verify(ledger_path(home, "data")).record == 5


def test_a_record_missing_in_the_middle_is_named(grown):
    home = copied(grown)
    rewritten(ledger_path(home, "data"), lambda rows: rows[:3] + rows[4:])
    with pytest.raises(LedgerDamaged, match="the next number is 4"):
        opened(home)


def test_only_the_pin_finds_a_missing_last_record(grown):
    home = copied(grown)
    path = ledger_path(home, "data")
    rewritten(path, lambda rows: rows[:-1])
    with pytest.raises(LedgerRolledBack, match="ends at record 6, but it was at record 7"):
        opened(home)
    assert [problem.where for problem in verify(path).problems] == ["pin"]
    pin_path(path).unlink()
    assert verify(path).sound, "nothing else can tell: that is what the pin is for"
    opened(home).close()


def test_only_the_pin_finds_a_chain_that_was_made_anew(grown):
    home = copied(grown)
    path = ledger_path(home, "data")

    def forge(rows):
        sequence, line, digest = rows[3]
        changed = line.replace(b"published", b"abandoned")
        assert changed != line
        return forged([*rows[:3], (sequence, changed, digest), *rows[4:]])

    rewritten(path, forge)
    with pytest.raises(LedgerRolledBack, match="another record 7"):
        opened(home)
    pin_path(path).unlink()
    assert verify(path).sound


def test_contradictory_records_are_refused_even_with_good_hashes(grown):
    home = copied(grown)
    # Releases what was charged: a refund, which must not be possible.
    with reading(ledger_path(home, "data")) as store:
        rows = list(store.rows())
    body = record_from(rows[3][1]).body
    last = record_from(rows[-1][1])
    refund = record_after(last.digest, 8, last.at_ms, Released(reservation=body.reservation, why="a gift"))
    rewritten(ledger_path(home, "data"), lambda rows: [*rows, (8, refund.line, refund.digest)])
    with pytest.raises(LedgerDamaged, match=r"at record 8: .*never given back"):
        opened(home)
    assert verify(ledger_path(home, "data")).record == 8


def test_reservations_beyond_the_limit_are_named(tmp_path):
    """The chain has good hashes, but software without a gate wrote it."""
    path = lived(tmp_path, 8)

    def smaller(rows):
        first = rows[0][1].replace(b'"epsilon":4.0', b'"epsilon":0.9')
        assert first != rows[0][1]
        return forged([(1, first, b""), *rows[1:]])

    rewritten(path, smaller)
    pin_path(path).unlink()
    problems = verify(path).problems
    # Epsilon 0.9 has room for four events, with three records each, after the first record.
    assert [problem.where for problem in problems] == [f"record {number}" for number in (14, 17, 20, 23)]
    assert all("should have been refused" in problem.what for problem in problems)


def test_a_ledger_of_newer_software_is_refused(grown):
    home = copied(grown)
    path = ledger_path(home, "data")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(LedgerNewer, match="upgrade edge_client"):
        opened(home)
    with pytest.raises(LedgerNewer):
        verify(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database at all" * 100, None])
def test_another_file_in_the_ledgers_place_is_refused(tmp_path, content):
    path = ledger_path(tmp_path, "data")
    path.parent.mkdir()
    if content is None:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE other (x)")
        connection.close()
    else:
        path.write_bytes(content)
    with pytest.raises(LedgerDamaged):
        opened(tmp_path)


# ---- copied back ---------------------------------------------------------------------------------------------------


def test_an_older_copy_is_noticed_and_named(tmp_path):
    path = lived(tmp_path)
    copy = path.read_bytes()
    with opened(tmp_path) as ledger:
        release(ledger)
        assert ledger.sequence == 10
    newest = path.read_bytes()
    path.write_bytes(copy)
    with pytest.raises(LedgerRolledBack, match=r"ends at record 7, but it was at record 10.*newer one back"):
        opened(tmp_path)
    path.write_bytes(newest)
    opened(tmp_path).close()


def test_an_older_copy_that_continued_elsewhere_is_noticed(tmp_path):
    path = lived(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for home in (tmp_path / "here", tmp_path / "there"):
        with opened(home) as ledger:
            release(ledger, 1 if home.name == "here" else 2)
    shutil.copy(ledger_path(tmp_path / "there", "data"), path)
    with pytest.raises(LedgerRolledBack, match="another record 10"):
        opened(tmp_path / "here")


def test_a_removed_ledger_does_not_start_anew(tmp_path):
    path = lived(tmp_path)
    path.unlink()
    with pytest.raises(LedgerRolledBack, match="holds no record, but it had 7"):
        opened(tmp_path)
    # The failed attempt leaves nothing behind that would make the next one pass.
    with pytest.raises(LedgerRolledBack, match="holds no record"):
        opened(tmp_path)


def test_another_ledger_in_the_place_of_this_one_is_noticed(tmp_path):
    path = lived(tmp_path / "here")
    shutil.copy(lived(tmp_path / "there", 4), path)
    with pytest.raises(LedgerRolledBack, match="but the one last used here was"):
        opened(tmp_path / "here")


def test_a_copy_without_its_wal_file_is_an_older_one(tmp_path):
    path = lived(tmp_path)
    with opened(tmp_path) as ledger:
        release(ledger)
        # As `cp` of this one file would copy it while the ledger is open.
        copy = path.read_bytes()
    path.write_bytes(copy)
    with pytest.raises(LedgerRolledBack, match="-wal file is missing"):
        opened(tmp_path)


def test_a_pin_may_lag_behind(tmp_path):
    path = lived(tmp_path, 1)
    old = pin_path(path).read_bytes()
    with opened(tmp_path) as ledger:
        release(ledger)
        newest = ledger.sequence
    pin_path(path).write_bytes(old)
    opened(tmp_path).close()
    assert json.loads(pin_path(path).read_bytes())["sequence"] == newest, "and is brought up at the next start"
    pin_path(path).unlink()
    opened(tmp_path).close()


def test_a_damaged_pin_is_named(tmp_path):
    path = lived(tmp_path)
    pin_path(path).write_bytes(b"{")
    with pytest.raises(LedgerDamaged, match=r"pins/data\.json is not JSON.*names the newest record"):
        opened(tmp_path)


def test_the_coordinators_number_reveals_a_copied_ledger_and_pin(tmp_path):
    lived(tmp_path / "home")
    shutil.copytree(tmp_path / "home", tmp_path / "backup")
    with opened(tmp_path / "home") as ledger:
        release(ledger)
        told = ledger.sequence
        ledger.check_reported(0)
        ledger.check_reported(told)
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "backup").rename(tmp_path / "home")
    with opened(tmp_path / "home") as ledger:
        with pytest.raises(
            LedgerRolledBack, match=r"heard of record 10 .* ends at record 7.*cannot make it spend more"
        ):
            ledger.check_reported(told)
        # A number that is too low has no effect.
        ledger.check_reported(3)


# ---- the disk ------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], str]) -> str:
    """Runs `work` in a process of its own and returns what it says, or its error's name and sentence."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = work()
        except BaseException as error:  # noqa: BLE001  the child must not continue in pytest
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_full_disk_gives_a_sentence_and_loses_nothing(tmp_path):
    """A limit on the size of files stands in for a full disk: writes beyond it fail, here during a release."""
    path = lived(tmp_path)

    def work() -> str:
        with opened(tmp_path) as ledger:
            held = ledger.reserve(EVENT, PURPOSE)
            size = path.with_name("data.db-wal").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            failures = 0
            for _ in range(2):
                with pytest.raises(LedgerUnwritable, match="cannot be written"):
                    ledger.charge(held.number, 1)
                failures += 1
            assert failures == 2
            assert not ledger.reservation(held.number).charged, "not believed either"
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            ledger.charge(held.number, 1)
            return f"charged at {ledger.sequence}"

    assert in_child(work) == "charged at 9"
    with opened(tmp_path) as ledger:
        assert ledger.sequence == 9
        assert verify(path).sound


def test_sqlites_own_size_limit_gives_the_same_error(tmp_path):
    path = lived(tmp_path)
    with opened(tmp_path) as ledger:
        connection = ledger._writer._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LedgerUnwritable, match="full"):
            release(ledger, 40)
        connection.execute("PRAGMA max_page_count = 100000")
        sequence = ledger.sequence
        ledger.reserve(EVENT, PURPOSE)
        assert ledger.sequence == sequence + 1
    assert verify(path).sound


def test_a_charge_that_cannot_be_pinned_fails_and_can_be_repeated(tmp_path):
    path = lived(tmp_path)
    with opened(tmp_path) as ledger:
        held = ledger.reserve(EVENT, PURPOSE)
        # A folder where the pin's temporary file belongs makes the write fail, even for root.
        obstacle = pin_path(path).with_name(".data.json.partial")
        obstacle.mkdir()
        with pytest.raises(LedgerUnwritable, match=r"pins/data\.json cannot be written"):
            ledger.charge(held.number, 1)
        # The charge is spent, since it is on the disk; but nothing may leave before it is pinned too.
        assert ledger.reservation(held.number).charged
        with pytest.raises(LedgerUnwritable):
            ledger.charge(held.number, 1)
        # Only a charge waits for the pin.
        ledger.settle(held.number, 1, "published", b"")
        obstacle.rmdir()
        ledger.charge(held.number, 1)
        assert json.loads(pin_path(path).read_bytes())["sequence"] == ledger.sequence
    assert verify(path).sound


@pytest.fixture
def open_folder():
    """A folder that any user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="tacit-ledger-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_read_only_folder_gives_a_sentence_and_can_be_verified(open_folder):
    path = lived(open_folder)
    content = sha256(path.read_bytes()).digest()
    for made in (path, pin_path(path), path.with_suffix(".lock")):
        made.chmod(0o444)
    for made in (path.parent, pin_path(path).parent):
        made.chmod(0o555)

    def work() -> str:
        # Permissions do not bind root.
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        assert verify(path).sound
        opened(open_folder)
        return "opened"

    said = in_child(work)
    assert said.startswith("LedgerUnwritable:"), said
    assert "cannot be written" in said
    assert sha256(path.read_bytes()).digest() == content


def test_another_process_that_writes_without_the_lock_is_noticed(tmp_path):
    """The lock is advisory: a process that does not take it must still not make two records with one number."""
    path = lived(tmp_path)
    with opened(tmp_path) as ledger:
        last = ledger.head
        with sqlite3.connect(path) as other:
            record = record_after(last, 8, 0, Released(reservation=1, why=""))
            other.execute("INSERT INTO records VALUES (8, ?, ?)", (record.line.decode(), record.digest))
        other.close()
        with pytest.raises(LedgerUnwritable, match="another process wrote to"):
            ledger.reserve(EVENT, PURPOSE)
        assert ledger.sequence == 7


@pytest.mark.parametrize(
    "attack",
    [
        "INSERT OR REPLACE INTO records SELECT 4, line, digest FROM records WHERE sequence = 5",
        "REPLACE INTO records (rowid, line, digest) SELECT 4, line, digest FROM records WHERE sequence = 5",
        "REPLACE INTO records (_rowid_, line, digest) SELECT 4, line, digest FROM records WHERE sequence = 5",
        "UPDATE OR REPLACE records SET sequence = 4 WHERE sequence = 5",
        "UPDATE OR IGNORE records SET line = '{}' WHERE sequence = 4",
        "INSERT INTO records SELECT * FROM records WHERE sequence = 4 ON CONFLICT (sequence) DO UPDATE SET line = '{}'",
        "INSERT INTO records SELECT -1, line, digest FROM records WHERE sequence = 4",
        "INSERT INTO records SELECT 99, line, digest FROM records WHERE sequence = 4",
        "DELETE FROM records WHERE sequence = 7",
    ],
    ids=["replace", "rowid", "_rowid_", "update-replace", "update-ignore", "upsert", "before", "gap", "delete"],
)
def test_a_foreign_connection_cannot_rewrite_the_records(tmp_path, attack):
    """With SQLite's default pragmas, REPLACE removes the row that it conflicts with and fires no DELETE trigger."""
    path = lived(tmp_path)
    foreign = sqlite3.connect(path, isolation_level=None)
    assert foreign.execute("PRAGMA recursive_triggers").fetchone() == (0,)
    before = foreign.execute("SELECT * FROM records ORDER BY sequence").fetchall()
    with pytest.raises(sqlite3.IntegrityError, match=r"records are (never|only)"):
        foreign.execute(attack)
    assert foreign.execute("SELECT * FROM records ORDER BY sequence").fetchall() == before
    # A second unique index, or a missing one on the row's number, would open another way to remove a row.
    assert [row for row in foreign.execute("PRAGMA index_list(records)") if row[2]] == []
    foreign.close()
    with opened(tmp_path) as ledger:
        release(ledger)


def test_a_ledger_that_grows_while_it_is_verified_is_sound(tmp_path, monkeypatch):
    """The member goes on meanwhile, so its pin may be ahead of the records that were read."""
    check = verification._check_marks
    with opened(tmp_path) as ledger:
        release(ledger)

        def grown(*found):
            release(ledger)
            check(*found)

        monkeypatch.setattr(verification, "_check_marks", grown)
        verdict = verify(ledger.path)
        assert verdict.problems == ()
        assert verdict.state.sequence < ledger.sequence


def test_an_export_without_a_record_is_no_export():
    assert [str(problem) for problem in verify_export([]).problems] == [
        "file: there is no record; export the ledger again"
    ]
