"""Forged backups and prepared target folders: a restore names the fault without a row's values, and writes no byte
outside its folder.

Digests are no obstacle, because whoever writes a backup writes them too.
"""

import hashlib
import json
import os
import shutil
import stat
import traceback
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import app
from coordinator.storage import backup, snapshot
from coordinator.storage.blobs import open_blobs
from coordinator.storage.database import open_database
from coordinator.storage.errors import BackupDamaged, BackupRefused, StorageError
from coordinator.storage.restore import check_target, restore_blobs, restore_rows
from coordinator.storage.target import check_no_links, write_secret
from tests.support.databases import migrated
from tests.support.stored_job import fill
from toolkit.console import CommandFailed

MADE_MS = 1_800_000_000_000
SECRET = "a-value-of-a-row"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of a database with rows in every table, and one of a coordinator with its keys."""
    place = tmp_path_factory.mktemp("whole")
    store = open_blobs(f"file://{place / 'store'}")
    url = f"sqlite:///{place / 'one.db'}"
    database = open_database(url)
    fill(database, store)
    database.close()
    given = {"federation": b"f" * 32, "software": "0.1.0", "now_ms": MADE_MS}
    backup.make(url, store, place / "rows", **given)
    _run("init", str(place / "federation"))
    _run("backup", str(place / "keys"), "--dir", str(place / "federation"), "--with-keys")
    return place


@pytest.fixture
def made(whole: Path, tmp_path: Path) -> backup.Snapshot:
    return backup.newest(shutil.copytree(whole / "rows", tmp_path / "backup"))


@pytest.fixture
def with_keys(whole: Path, tmp_path: Path) -> backup.Snapshot:
    return backup.newest(shutil.copytree(whole / "keys", tmp_path / "backup"))


def _run(*words: str) -> None:
    app(list(words), standalone_mode=False)


def forged(of: backup.Snapshot, table: str, change) -> backup.Snapshot:
    """The backup with changed lines in one table and correct digests. `change` makes lines from the rows."""
    part = next(part for part in of.manifest.tables if part.name == table)
    rows = [json.loads(line) for line in of.table(part).read_bytes().splitlines()]
    lines = b"".join(line + b"\n" for line in change(rows, [column.name for column in part.columns]))
    digest = hashlib.sha256(lines).digest()
    (of.folder / "parts" / digest.hex()).write_bytes(lines)
    new = part.model_copy(update={"sha256": digest, "size": len(lines), "rows": lines.count(b"\n")})
    tables = tuple(new if each is part else each for each in of.manifest.tables)
    return backup._reveal(of.folder, of.manifest.model_copy(update={"tables": tables, "made_ms": MADE_MS + 1}))


def with_value(column: str, value: Any):
    def change(rows, names):
        rows[0][names.index(column)] = value
        return [json.dumps(row).encode() for row in rows]

    return change


def restored(of: backup.Snapshot, folder: Path) -> None:
    of.check()
    path = folder / "restored.db"
    path.write_bytes(migrated())
    url = f"sqlite:///{path}"
    database = open_database(url)
    try:
        restore_rows(of, database, revoke=(), now_ms=MADE_MS, by="op")
    except StorageError:
        check_target(database, of)
        raise
    finally:
        database.close()


CRAFTED = {
    "text for a number": ("jobs", with_value("rounds_total", SECRET)),
    "a table for a text": ("members", with_value("name", {"float": SECRET})),
    "null where none may be": ("members", with_value("name", None)),
    "a number beyond the column": ("jobs", with_value("rounds_total", 2**70)),
    "half a character": ("members", with_value("name", "\ud800" + SECRET)),
    "no status": ("jobs", with_value("status", SECRET)),
    "a row twice": ("members", lambda rows, _: [json.dumps(row).encode() for row in [*rows, rows[0]]]),
    "a row of nobody": ("versions", with_value("job", SECRET)),
    "a row too short": ("members", lambda rows, _: [json.dumps(row[:-1]).encode() for row in rows]),
    "no list": ("members", lambda _rows, __: [json.dumps({"name": SECRET}).encode()]),
    "no JSON": ("members", lambda _rows, __: [SECRET.encode()]),
    "nested without end": ("members", lambda _rows, __: [b"[" * 100_000]),
    "a journal of other types": ("journal", with_value("kind", [SECRET])),
    "a journal with no number": ("journal", with_value("fields", {SECRET: float("nan")})),
    "a journal nested deep": ("journal", lambda rows, _: [b'[1,1,"' + SECRET.encode() + b'","",' + b"[" * 90_000]),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_forged_rows_are_refused_without_showing_their_values(made, tmp_path, name):
    with pytest.raises(BackupDamaged) as refused:
        restored(forged(made, *CRAFTED[name]), tmp_path)
    shown = "".join(traceback.format_exception(refused.value))
    assert SECRET not in shown
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


def listed(made: backup.Snapshot, change: dict[str, Any]) -> Path:
    """A snapshot with a changed list, under the name that fits its digest."""
    data = json.dumps({**json.loads(made.manifest.canonical()), **change}).encode()
    path = made.folder / f"snapshot-999999-29990101T000000.000Z-{hashlib.sha256(data).hexdigest()[:16]}.json"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"tables": [{"name": SECRET}]},
        {"tables": SECRET},
        {"blobs": [{"sha256": SECRET, "size": 1}] * 200_000},
        {SECRET * 1000: 1},
        {"made_ms": 10**30},
        {"keys": [{"path": "../outside", "sha256": "00" * 32, "size": 1}]},
        {"keys": [{"path": "authority/../../outside", "sha256": "00" * 32, "size": 1}]},
        {"keys": [{"path": "spool/outside", "sha256": "00" * 32, "size": 1}]},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_forged_list_is_refused_in_a_short_sentence(made, change):
    listed(made, change)
    with pytest.raises(BackupDamaged) as refused:
        backup.newest(made.folder).check()
    assert len(str(refused.value)) < 700 + len(str(made.folder))


@pytest.mark.parametrize("table", ["jobs", "journal"])
def test_a_backup_without_a_table_or_column_is_refused(made, tmp_path, table):
    tables = json.loads(made.manifest.canonical())["tables"]
    listed(made, {"tables": [each for each in tables if each["name"] != table]})
    with pytest.raises(BackupDamaged, match=table):
        restored(backup.newest(made.folder), tmp_path)
    for each in tables:
        if each["name"] == table:
            each["columns"][0]["name"] = "elsewhere"
    newest = listed(made, {"tables": tables})
    with pytest.raises(BackupDamaged, match=table):
        restored(backup.newest(made.folder, newest.name), tmp_path)


# ---- links ----------------------------------------------------------------------------------------------------------


def test_a_backup_with_links_is_refused(made, tmp_path):
    """As root, a restore could read what the backup's author cannot, and a pipe would keep it waiting."""
    blob = made.blob(made.manifest.blobs[0])
    elsewhere = tmp_path / "elsewhere"
    blob.rename(elsewhere)
    blob.symlink_to(elsewhere)
    target = open_blobs(f"file://{tmp_path / 'another-store'}")
    for use in (made.check, lambda: restore_blobs(made, target)):
        with pytest.raises(BackupDamaged, match="symbolic link"):
            use()
    blob.unlink()
    os.mkfifo(blob)
    for use in (made.check, lambda: restore_blobs(made, target)):
        with pytest.raises(BackupDamaged, match="is not a file"):
            use()
    blob.unlink()
    elsewhere.rename(blob)
    made.check()
    (made.folder / "parts").rename(tmp_path / "parts")
    (made.folder / "parts").symlink_to(tmp_path / "parts")
    with pytest.raises(BackupDamaged, match="parts is a symbolic link"):
        made.check()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that the attacker wants to have overwritten."""
    path = tmp_path / "outside" / "root.key"
    path.parent.mkdir()
    path.write_bytes(b"untouched")
    return path


LINKS = {
    "a folder": ("authority", lambda outside: outside.parent),
    "a file": ("authority/root.key", lambda outside: outside),
    "a file that is being written": ("authority/root.key.partial", lambda outside: outside),
    "the configuration": (".coordinator.toml.partial", lambda outside: outside),
    "the database": ("tacit.db", lambda outside: outside),
    "the store": ("store", lambda outside: outside.parent),
}


@pytest.mark.parametrize("link", LINKS)
def test_a_link_in_the_target_leads_nowhere(with_keys, tmp_path, outside, link):
    """The attacker can write into the target folder, and points a name there at somebody else's file."""
    name, where = LINKS[link]
    target = tmp_path / "new"
    (target / name).parent.mkdir(parents=True)
    (target / name).symlink_to(where(outside))
    with pytest.raises((CommandFailed, SystemExit, StorageError)) as refused:
        _run("restore", str(with_keys.folder), "--dir", str(target), "--yes")
    assert "is a symbolic link" in str(refused.value)
    assert outside.read_bytes() == b"untouched"
    assert [path.name for path in outside.parent.iterdir()] == ["root.key"]


def test_a_restore_into_an_empty_folder_brings_the_keys(whole, with_keys, tmp_path):
    target = tmp_path / "new"
    _run("restore", str(with_keys.folder), "--dir", str(target), "--yes")
    key = target / "authority" / "root.key"
    assert key.read_bytes() == (whole / "federation" / "authority" / "root.key").read_bytes()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with snapshot.of_database(f"sqlite:///{target / 'tacit.db'}") as connection:
        assert snapshot.revision_of(connection)


def test_a_link_that_appears_during_the_restore_is_not_followed(tmp_path, outside):
    """`check_no_links` ran before it appeared; key files are safe without that check."""
    target = tmp_path / "new"
    target.mkdir()
    check_no_links(target)
    (target / "authority").symlink_to(outside.parent)
    with pytest.raises(BackupRefused, match="authority is a symbolic link"):
        write_secret(target, "authority/root.key", b"theirs")
    (target / "authority").unlink()
    (target / "authority").mkdir()
    (target / "authority" / "root.key.partial").symlink_to(outside)
    write_secret(target, "authority/root.key", b"ours")
    (target / "authority" / "other.key").symlink_to(outside)
    with pytest.raises(BackupRefused, match=r"other\.key is a symbolic link"):
        write_secret(target, "authority/other.key", b"theirs")
    assert (target / "authority" / "root.key").read_bytes() == b"ours"
    assert outside.read_bytes() == b"untouched"
    # Again, as after a killed restore. Other content is not overwritten.
    write_secret(target, "authority/root.key", b"ours")
    with pytest.raises(BackupRefused, match="exists with other content"):
        write_secret(target, "authority/root.key", b"new!")
