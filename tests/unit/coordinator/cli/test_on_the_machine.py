"""Commands on the coordinator's own machine: they use the right database and user, and the server logs them."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sqlite3
import sys
from datetime import UTC, datetime
from pathlib import Path

import grpc.aio
import pytest
import structlog
from prometheus_client import generate_latest
from typer.testing import CliRunner

from coordinator.authority import retire, rotate
from coordinator.cli import app
from coordinator.config import CoordinatorFolder, load_config
from coordinator.storage import mark, open_blobs, open_database, records
from coordinator.storage.backup import make, newest, read_journal
from coordinator.storage.errors import DatabaseUnexpected
from coordinator.storage.mark import Mark
from coordinator.upkeep import Upkeep
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.housed import housed
from tests.support.stored_job import fill
from toolkit.console import CommandFailed, ExitCode


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Reuses keys of this test run, and keeps the commands' log settings out of this process."""
    monkeypatch.setattr("toolkit.logs.configure", lambda *_: None)
    structlog.reset_defaults()
    for where in ("coordinator.operators", "coordinator.services.credentials"):
        monkeypatch.setattr(f"{where}.new_key", lambda: party.key(6))
    # Every authority has its own key.
    numbers = itertools.count(6)
    monkeypatch.setattr("coordinator.pki.new_key", lambda: party.key(next(numbers)))


@pytest.fixture
def fed(tmp_path):
    _run("init", tmp_path / "fed")
    return tmp_path / "fed"


def _run(*words, code=ExitCode.OK):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, CommandFailed):
        assert result.exception.code is code, result.exception
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.output


def _mark(folder) -> Mark:
    return Mark.from_json(CoordinatorFolder(folder).database_mark.read_bytes())


COMMANDS = {
    "revoke": ("operator", "revoke", "operator", "--yes"),
    "issue": ("operator", "issue", "anna", "--role", "operator", "--out", "OUT"),
    "rotate": ("authority", "rotate", "--yes"),
    "backup": ("backup", "OUT"),
}


def _words(fed, name):
    return [str(fed.parent / "out") if word == "OUT" else word for word in COMMANDS[name]] + ["--dir", str(fed)]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_another_database_is_refused(fed, tmp_path, monkeypatch, name):
    """The server's environment has the URL, but this shell has none or another one."""
    other = f"sqlite:///{tmp_path / 'other.db'}"
    monkeypatch.setenv("TACIT_DATABASE_URL", other)
    said = _run(*_words(fed, name), code=ExitCode.FAILED)
    assert "tacit.db, and this command was told" in said
    assert "set TACIT_DATABASE_URL as the service has it" in said
    assert not (tmp_path / "other.db").exists()
    assert not (tmp_path / "out").exists()
    assert not (fed / "authority" / "root-2.pem").exists()
    monkeypatch.delenv("TACIT_DATABASE_URL")
    _run(*_words(fed, name))


@pytest.mark.parametrize("name", [*COMMANDS, "restore", "init"])
def test_a_user_other_than_the_owner_is_told_what_to_run(fed, monkeypatch, name):
    words = ["restore", "nowhere", "--dir", str(fed)] if name == "restore" else ["init", str(fed)]
    words = _words(fed, name) if name in COMMANDS else words
    before = sorted(fed.rglob("*"))
    monkeypatch.setattr(os, "geteuid", lambda: fed.stat().st_uid + 1)
    monkeypatch.setattr(sys, "argv", ["coordinator", "with a space"])
    said = _run(*words, code=ExitCode.USAGE)
    assert "sudo -u " in said
    assert said.endswith("coordinator 'with a space'`")
    assert sorted(fed.rglob("*")) == before


def test_a_restore_to_another_database_needs_new_database(fed, tmp_path, monkeypatch):
    backup = tmp_path / "backup"
    _run("backup", backup, "--dir", fed)
    monkeypatch.setenv("TACIT_DATABASE_URL", f"sqlite:///{tmp_path / 'other.db'}")
    restore = ("restore", backup, "--dir", fed, "--yes")
    assert "add --new-database" in _run(*restore, code=ExitCode.FAILED)
    assert not (tmp_path / "other.db").exists()
    told = _run(*restore, "--new-database")
    assert _mark(fed).place.endswith("other.db")
    # The commands in the order of their time: the coordinator answers `member revoke` only when it serves.
    steps = [line.split("  ")[1] for line in told.splitlines() if line.startswith("  coordinator ")]
    assert [" ".join(step.split()[1:3]) for step in steps] == [
        "member import-log",
        "serve --dir",
        "operator revoke",
        "member revoke",
        "member invite",
    ]
    monkeypatch.delenv("TACIT_DATABASE_URL")
    # The original database is now the wrong one.
    assert "set TACIT_DATABASE_URL" in _run("operator", "list", "--dir", fed, code=ExitCode.FAILED)


def test_a_restore_that_cannot_be_is_refused_before_the_question(fed, tmp_path):
    backup, other = tmp_path / "backup", tmp_path / "other"
    _run("backup", backup, "--dir", fed)
    _run("init", other)
    assert "the database is not empty" in _run("restore", backup, "--dir", fed, code=ExitCode.FAILED)
    assert "belongs to federation" in _run("restore", backup, "--dir", other, code=ExitCode.REFUSED)
    file = fed / "tacit.db"
    for each in fed.glob("tacit.db*"):
        each.unlink()
    # There is no terminal to ask.
    assert "Confirm with --yes" in _run("restore", backup, "--dir", fed, code=ExitCode.USAGE)
    assert not file.exists()


def test_a_backup_from_the_future_is_pointed_out_before_the_question(fed, tmp_path):
    backup, config = tmp_path / "backup", load_config(fed)
    _run("backup", backup, "--dir", fed)
    for each in fed.glob("tacit.db*"):
        each.rename(tmp_path / each.name)
    restore = ("restore", backup, "--dir", fed)
    manifest, url = newest(backup).manifest, f"sqlite:///{tmp_path / 'tacit.db'}"
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    for ahead_s, told in ((60, False), (3600, True)):
        given = {"federation": manifest.federation, "software": "0.1.0", "now_ms": now_ms + ahead_s * 1000}
        name = make(url, open_blobs(config.store_url), backup, **given).snapshot.path.name
        with pytest.raises(CommandFailed, match="Confirm with --yes"):
            app([str(word) for word in restore], standalone_mode=False)
        said = CliRunner().invoke(app, [str(word) for word in restore]).stderr
        assert (f"{name} shows a time that is still to come" in said) is told
    assert not (fed / "tacit.db").exists()


def test_a_restore_that_ended_before_the_mark_is_repeated(fed, tmp_path):
    """The disk became full between the commit and database.json, so the folder still names the lost database."""
    names, url, backup = CoordinatorFolder(fed), load_config(fed).database_url, tmp_path / "backup"

    def journal():
        with contextlib.closing(open_database(url)) as database:
            return database.run_now(records.journal)

    with contextlib.closing(open_database(url)) as database:
        fill(database, open_blobs(load_config(fed).store_url))
        _run("backup", backup, "--dir", fed)
        first = newest(backup)
        _run("backup", backup, "--dir", fed)
        mark.keep(names.database_mark, url, database.run_now(records.head))
    for each in fed.glob("tacit.db*"):
        each.unlink()
    restore = ("restore", backup, "--dir", fed, "--yes", "--json", "--snapshot", first.path.name)
    revoke = ("--revoke", "desk-north")
    # A file cannot be written where a folder is.
    blocking = fed / ".database.json.partial"
    blocking.mkdir(mode=0o700)
    said = _run(*restore, *revoke, code=ExitCode.FAILED)
    assert "database.json cannot be written: Is a directory" in said
    assert said.endswith("then type the restore again")
    committed = journal()
    assert committed[-1].kind == "restored"
    with pytest.raises(DatabaseUnexpected):
        mark.check(names.database_mark, url)
    blocking.rmdir()
    # What it would leave undone is refused, and so is another backup.
    assert "desk-east was not revoked" in _run(*restore, *revoke, "--revoke", "desk-east", code=ExitCode.FAILED)
    other = tuple(word if word != first.path.name else newest(backup).path.name for word in restore)
    assert "the database is not empty" in _run(*other, *revoke, code=ExitCode.FAILED)
    with pytest.raises(DatabaseUnexpected):
        mark.check(names.database_mark, url)
    # The end of the command may be lost too, so it can be repeated as often as one likes.
    for words in (revoke, revoke, ()):
        said = json.loads(_run(*restore, *words))
        assert said == {
            "snapshot": first.path.name,
            "rows": sum(part.rows for part in first.manifest.tables),
            "blobs": 0,
            "keys": 0,
            "jobs": {"desk": 2},
            "revoked": ["desk-north"],
        }
        mark.check(names.database_mark, url)
        assert _mark(fed).head == committed[-1].hash
        assert journal() == committed
    # A database that went on is not that backup any more.
    with contextlib.closing(open_database(url)) as database:
        database.run_now(lambda s: records.note(s, "member_enrolled", "north", 1))
    assert "the database is not empty" in _run(*restore, *revoke, code=ExitCode.FAILED)


def test_a_restore_leaves_another_programs_database_as_it_is(fed, tmp_path, monkeypatch):
    backup, other = tmp_path / "backup", tmp_path / "other.db"
    _run("backup", backup, "--dir", fed)
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    other.chmod(0o600)
    before = other.read_bytes()
    monkeypatch.setenv("TACIT_DATABASE_URL", f"sqlite:///{other}")
    for more in ((), ("--yes",)):
        said = _run("restore", backup, "--dir", fed, "--new-database", *more, code=ExitCode.FAILED)
        assert "another program's table customers" in said
        assert other.read_bytes() == before


def test_a_restore_beside_a_running_server_is_refused(fed, tmp_path):
    backup = tmp_path / "backup"
    _run("backup", backup, "--dir", fed)
    database = open_database(load_config(fed).database_url, sole=True)
    said = _run("restore", backup, "--dir", fed, "--yes", code=ExitCode.FAILED)
    database.close()
    assert f"a coordinator serves from the database of {fed}; stop it, then restore into an empty database" in said


def test_init_names_the_database_and_creates_no_other(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("TACIT_DATABASE_URL", url)
    said = _run("init", tmp_path / "one")
    assert (url in said, "tacit.db" in said, "set it for the server" in said) == (True, False, True)
    assert not (tmp_path / "one" / "tacit.db").exists()
    monkeypatch.delenv("TACIT_DATABASE_URL")
    second = f"sqlite:///{tmp_path / 'second.db'}"
    assert second in _run("init", tmp_path / "two", "--database-url", second)
    assert not (tmp_path / "two" / "tacit.db").exists()
    assert load_config(tmp_path / "two").database_url == second
    for url in ("postgresql://tacit:hidden-word@host/tacit", "postgresql://host/tacit?password=hidden-word", "host"):
        said = _run("init", tmp_path / "three", "--database-url", url, code=ExitCode.USAGE)
        assert "hidden-word" not in said
    assert not (tmp_path / "three").exists()


def test_a_lost_database_does_not_become_an_empty_federation(tmp_path, monkeypatch):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            identity = await house.enrol("north", 2, monkeypatch)
        path = house.folder.database
        for file in path.parent.glob("tacit.db*"):
            file.rename(tmp_path / file.name)
        with pytest.raises(DatabaseUnexpected, match="is not there"):
            async with housed(tmp_path, monkeypatch, again=True):
                pass
        assert not path.exists()
        # With --new-database it starts over, and then the old database no longer belongs to the folder.
        again = housed(tmp_path, monkeypatch, again=True, new_database=True)
        async with again as house, house.stub(identity) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="has no member north") as refused:
                await stub.OpenJobs(pb.OpenJobsRequest())
            assert reason_of(refused.value)[0] == Reason.REASON_CLIENT_CERTIFICATE_UNKNOWN
            assert "revoked" not in refused.value.details()
        async with housed(tmp_path, monkeypatch, again=True):
            pass
        for file in tmp_path.glob("tacit.db*"):
            file.replace(path.parent / file.name)
        with pytest.raises(DatabaseUnexpected, match="another one"):
            async with housed(tmp_path, monkeypatch, again=True):
                pass

    asyncio.run(scenario())


@pytest.fixture
def looked(monkeypatch):
    """Returns a function that waits for the end of an upkeep check that began after the call."""
    real, queues = Upkeep._look, []

    async def look(self, patience):
        mine = list(queues)
        failures = await real(self, patience)
        for queue in mine:
            queue.put_nowait(None)
        return failures

    async def wait():
        queue = asyncio.Queue()
        queues.append(queue)
        await asyncio.wait_for(queue.get(), 20)
        queues.remove(queue)

    monkeypatch.setattr(Upkeep, "_look", look)
    return wait


def test_the_server_logs_and_counts_what_commands_beside_it_do(tmp_path, monkeypatch, looked):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            where = ("--dir", str(house.folder.path))

            async def head():
                return (await house.database.run(records.head)).hash.hex()

            def told(logs):
                return [line["head"] for line in logs if line["event"] == "journal_head"]

            await looked()
            with structlog.testing.capture_logs() as logs:
                await asyncio.to_thread(
                    _run, "operator", "issue", "anna", "--role", "viewer", "--out", str(tmp_path / "anna"), *where
                )
                await looked()
                assert told(logs) == [await head()]
                # Entries that the server wrote itself cause no journal_head line.
                now_ms = int(datetime.now(UTC).timestamp() * 1000)
                await house.database.run(lambda s: records.note(s, "member_enrolled", "east", now_ms))
                await looked()
                assert len(told(logs)) == 1
                assert _mark(house.folder.path).head.hex() == await head()
            with structlog.testing.capture_logs() as logs:
                before = _figure(house, "backup_timestamp_seconds")
                await asyncio.to_thread(_run, "backup", str(tmp_path / "backup"), *where)
                await looked()
                # Both the command, whose log nobody keeps, and the server log the head.
                *earlier, first, second = told(logs)
                assert (first, second) == (await head(), await head())
            # The server may have looked between the backup's beginning and its end.
            (begun,) = await house.journal("backup_begun")
            assert set(earlier) <= {begun.hash.hex()}
            (made,) = await house.journal("backup_made")
            at = made.fields["made_ms"] / 1000
            assert (before, _figure(house, "backup_timestamp_seconds")) == (0.0, at)
        async with housed(tmp_path, monkeypatch, again=True) as house:
            assert _figure(house, "backup_timestamp_seconds") == at

    asyncio.run(scenario())


def _full(folder):
    """Makes a folder that takes no backup, because something else is in it."""
    folder.mkdir()
    (folder / "letters.txt").write_text("dear bank")
    return folder


def test_a_backup_that_fails_counts_as_none(tmp_path, monkeypatch, looked):
    """The alert TacitBackupMissing watches this figure."""

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            where = ("--dir", str(house.folder.path))
            await asyncio.to_thread(_run, "backup", _full(tmp_path / "full"), *where, code=ExitCode.FAILED)
            await looked()
            assert await house.journal("backup_made") == []
            assert _figure(house, "backup_timestamp_seconds") == 0.0
            # Somebody began one, and perhaps copied keys.
            (begun,) = await house.journal("backup_begun")
            assert begun.fields["keys"] is False
            await asyncio.to_thread(_run, "backup", tmp_path / "backup", "--with-keys", *where)
            (made,) = await house.journal("backup_made")
            _, begun = await house.journal("backup_begun")
        # The backup says that it was begun, by whom, and with the keys. Only the database says that it is complete.
        found = newest(tmp_path / "backup")
        kept = [entry for entry in read_journal(found) if entry.kind in ("backup_begun", "backup_made")]
        assert [entry.hash for entry in kept][1:] == [begun.hash]
        assert kept[-1].fields == {"keys": True, "by": made.fields["by"]}
        assert made.id == found.manifest.head_entry + 1
        assert made.fields == {
            "backup": found.path.stem,
            "made_ms": found.manifest.made_ms,
            "missing": 0,
            "keys": True,
            "by": begun.fields["by"],
        }
        assert made.at_ms >= found.manifest.made_ms
        # A database that is restored from it knows it, too.
        for file in house.folder.path.glob("tacit.db*"):
            file.unlink()
        _run("restore", tmp_path / "backup", "--yes", *where)
        async with housed(tmp_path, monkeypatch, again=True) as house:
            assert _figure(house, "backup_timestamp_seconds") == found.manifest.made_ms / 1000

    asyncio.run(scenario())


FIGURES = ("_verified_timestamp_seconds", "s_damaged")


def test_a_verification_is_counted_with_what_it_found(tmp_path, monkeypatch, looked):
    """The alerts TacitBackupDamaged and TacitBackupUnverified watch these figures."""

    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            where, folder = ("--dir", str(house.folder.path)), tmp_path / "backup"

            async def figures(*words, code=ExitCode.OK):
                said = await asyncio.to_thread(_run, "backup", folder, *words, *where, code=code)
                await looked()
                return said, tuple(_figure(house, f"backup{name}") for name in FIGURES)

            await asyncio.to_thread(_run, "backup", folder, *where)
            first = newest(folder)
            said, found = await figures("--verify")
            assert found == (first.manifest.made_ms / 1000, 0)
            assert f"{first.path.name}: whole" in said
            await asyncio.to_thread(_run, "backup", folder, *where)
            second = newest(folder)
            # The journal has grown since the first backup, so this table is the second one's alone.
            path = second.table(next(part for part in second.manifest.tables if part.name == "journal"))
            path.write_bytes(path.read_bytes()[:-1])
            said, found = await figures("--verify", code=ExitCode.FAILED)
            assert found == (first.manifest.made_ms / 1000, 1)
            assert f"1 of 2 backups in {folder} are damaged" in said
            assert f"the newest whole one is {first.path.name}" in said
            *_, entry = await house.journal("backup_verified")
            assert (entry.fields["whole"], entry.fields["damaged"]) == (1, 1)
        async with housed(tmp_path, monkeypatch, again=True) as house:
            assert tuple(_figure(house, f"backup{name}") for name in FIGURES) == found

    asyncio.run(scenario())


def test_a_verification_elsewhere_reads_without_a_journal(fed, tmp_path, monkeypatch):
    folder = tmp_path / "backup"
    _run("backup", folder, "--dir", fed)

    def noted():
        with contextlib.closing(open_database(f"sqlite:///{fed / 'tacit.db'}")) as database:
            return [each.kind for each in database.run_now(records.journal)].count("backup_verified")

    # Another machine has no coordinator's folder.
    assert "whole" in _run("backup", folder, "--verify", "--dir", tmp_path / "nowhere")
    # Another federation's journal says nothing of these backups.
    other = tmp_path / "other"
    _run("init", other)
    assert "another federation's backups" in _run("backup", folder, "--verify", "--dir", other)
    # A database that cannot be written, or is not the coordinator's.
    with monkeypatch.context() as patched:
        patched.setattr("coordinator.storage.database.BUSY_TIMEOUT_MS", 50)
        with contextlib.closing(sqlite3.connect(fed / "tacit.db")) as busy:
            busy.execute("BEGIN IMMEDIATE")
            said = _run("backup", folder, "--verify", "--dir", fed)
    assert "the journal does not say that backups were verified" in said
    with monkeypatch.context() as patched:
        patched.setenv("TACIT_DATABASE_URL", f"sqlite:///{tmp_path / 'wrong.db'}")
        assert "set TACIT_DATABASE_URL" in _run("backup", folder, "--verify", "--dir", fed)
    # A folder whose database was lost stays without one, as a restore needs it.
    (lost := tmp_path / "lost").mkdir()
    for name in ("coordinator.toml", "authority"):
        (shutil.copytree if (fed / name).is_dir() else shutil.copy)(fed / name, lost / name)
    assert "not noted" in _run("backup", folder, "--verify", "--dir", lost)
    assert not (lost / "tacit.db").exists()
    # An older copy of the folder.
    shutil.copytree(folder, copied := tmp_path / "copied")
    _run("backup", folder, "--dir", fed)
    names = [newest(each).path.stem for each in (folder, copied)]
    said = _run("backup", copied, "--verify", "--dir", fed)
    assert f"its newest backup is {names[0]}, and the newest in this folder is {names[1]}" in said
    assert noted() == 0
    found = json.loads(_run("backup", folder, "--verify", "--json", "--dir", fed))
    assert found == {"whole": [f"{each}.json" for each in reversed(names)], "damaged": {}}
    assert noted() == 1


def test_a_backup_with_lost_blobs_says_so_in_the_journal(fed, tmp_path):
    database, store = open_database(load_config(fed).database_url), open_blobs(f"file://{fed / 'store'}")
    document = fill(database, store)
    Path(store._path(document.blobs[0])).unlink()

    def kinds():
        return [(each.kind, each.fields.get("missing")) for each in database.run_now(records.journal)][-2:]

    assert "--allow-missing" in _run("backup", tmp_path / "backup", "--dir", fed, code=ExitCode.FAILED)
    assert kinds()[-1] == ("backup_begun", None)
    _run("backup", tmp_path / "backup", "--dir", fed, "--allow-missing")
    assert kinds() == [("backup_begun", None), ("backup_made", 1)]
    database.close()


def test_a_database_that_cannot_be_written_is_backed_up(fed, tmp_path, monkeypatch):
    monkeypatch.setattr("coordinator.storage.database.BUSY_TIMEOUT_MS", 50)
    with contextlib.closing(sqlite3.connect(fed / "tacit.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        said = _run("backup", tmp_path / "backup", "--dir", fed)
    for what in ("was begun", "is complete"):
        assert f"the journal does not say that this backup {what}: the database " in said
    newest(tmp_path / "backup").check()


def test_the_next_authoritys_expiry_metric_ends_with_retirement(tmp_path, monkeypatch, looked):
    async def scenario():
        async with housed(tmp_path, monkeypatch) as house:
            series = 'certificate_expires_timestamp_seconds{kind="next_authority"}'
            for act, there in ((rotate, True), (retire, False)):
                act(house.folder, now=datetime.now(UTC))
                await looked()
                assert (_figure(house, series) is not None) is there

    asyncio.run(scenario())


def _figure(house, series):
    """Returns a value from the page that Prometheus reads, or None if the series is not on it."""
    for line in generate_latest(house.serving.metrics.registry).decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name == f"tacit_coordinator_{series}":
            return float(value)
    return None


def test_a_backup_does_not_go_into_the_store_that_it_copies(fed, tmp_path):
    (tmp_path / "link").symlink_to(fed / "store")
    for inside in (fed / "store" / "bk", fed / "store", tmp_path / "link" / "bk"):
        said = _run("backup", inside, "--dir", fed, code=ExitCode.USAGE)
        assert f"{inside} is in the store that it would copy; name a folder outside of {fed / 'store'}" in said
    assert not (fed / "store" / "bk").exists()
    # One beside the store, with a name that begins like it, is none in it.
    _run("backup", fed / "store-backup", "--dir", fed)
