"""Commands on the coordinator's own machine: they use the right database and user, and the server logs them."""

import asyncio
import itertools
import os
import sys
from datetime import UTC, datetime

import grpc.aio
import pytest
import structlog
from prometheus_client import generate_latest
from typer.testing import CliRunner

from coordinator.authority import retire, rotate
from coordinator.cli import app
from coordinator.config import CoordinatorFolder, load_config
from coordinator.storage import open_database, records
from coordinator.storage.errors import DatabaseUnexpected
from coordinator.storage.mark import Mark
from coordinator.upkeep import Upkeep
from tacit.reason import Reason
from tacit.status import reason_of
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.housed import housed
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
    _run(*restore, "--new-database")
    assert _mark(fed).place.endswith("other.db")
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


def test_a_restore_beside_a_running_server_is_refused(fed, tmp_path):
    backup = tmp_path / "backup"
    _run("backup", backup, "--dir", fed)
    database = open_database(load_config(fed).database_url, sole=True)
    said = _run("restore", backup, "--dir", fed, "--yes", code=ExitCode.FAILED)
    database.close()
    assert "end that one first), then restore into an empty database" in said
    assert "of its own" not in said


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
    real, queues = Upkeep.look, []

    async def look(self, **which):
        mine = list(queues)
        failures = await real(self, **which)
        for queue in mine:
            queue.put_nowait(None)
        return failures

    async def wait():
        queue = asyncio.Queue()
        queues.append(queue)
        await asyncio.wait_for(queue.get(), 20)
        queues.remove(queue)

    monkeypatch.setattr(Upkeep, "look", look)
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
                assert told(logs) == [await head()] * 2
            (made,) = await house.journal("backup_made")
            assert (before, _figure(house, "backup_timestamp_seconds")) == (0.0, made.at_ms / 1000)
        async with housed(tmp_path, monkeypatch, again=True) as house:
            assert _figure(house, "backup_timestamp_seconds") == made.at_ms / 1000

    asyncio.run(scenario())


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
