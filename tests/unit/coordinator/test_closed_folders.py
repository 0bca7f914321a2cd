"""The coordinator refuses keys, folders and databases that others may use or own, and names the command to type."""

import asyncio
import os
import re
import shlex
import stat
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import ports, server
from coordinator.cli import app
from coordinator.closed import database_file, store_folder
from coordinator.config import CoordinatorFolder, load_config, load_operator
from coordinator.pki import Authority, AuthorityUnusable, authority_passphrase
from edge_client.identity.home import HomeUnusable, MemberIdentity
from tacit.documents import DocumentInvalid
from tests.support import party
from tests.support.housed import housed
from toolkit import private_files
from toolkit.console import CommandFailed, ExitCode
from toolkit.durable import durable_file
from toolkit.private_files import NotPrivate, check_private, check_secret, check_unwritable

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX owners and modes")
root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files away")
pytestmark = posix
SOMEBODY = 54_321

FOLDERS = (".", "authority", "server", "operator", "store", "spool")
PRIVATE = ("authority/root.key", "server/key.pem", "operator/key.pem", "tacit.db", "tacit.db-wal", "tacit.db-shm")
READABLE = (
    *("coordinator.toml", "database.json", "authority/root.pem", "server/cert.pem"),
    *("operator/operator.toml", "operator/cert.pem", "operator/root.pem"),
)
COMMANDS = (
    ("authority", "rotate", "--yes"),
    ("operator", "list"),
    ("operator", "issue", "bert", "--role", "viewer", "--out", "bert"),
    ("backup", "backups"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> CoordinatorFolder:
    """A federation that `coordinator init` created and that was served once."""
    umask = os.umask(0o002)
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("closed") / "coordinator"
        numbers = iter(range(100))
        for where in ("coordinator.pki", "coordinator.operators", "coordinator.services.credentials"):
            patch.setattr(f"{where}.new_key", lambda: party.key(next(numbers) % 6))
        try:
            assert CliRunner().invoke(app, ["init", str(path), "--host", "localhost"]).exit_code == 0
            asyncio.run(_serve(path, patch))
        finally:
            os.umask(umask)
    for suffix in ("-wal", "-shm"):
        # A crash leaves these files.
        (path / f"tacit.db{suffix}").touch(mode=0o600)
    return CoordinatorFolder(path)


async def _serve(path: Path, patch) -> None:
    patch.setattr(ports, "speaks_tls_12", lambda *_: False)
    config = load_config(path).model_copy(
        update={"listen_host": "127.0.0.1", "enrolment_port": 0, "federation_port": 0, "metrics_port": 0}
    )
    async with AsyncExitStack() as stack:
        await server.start(CoordinatorFolder(path), config, stack)


@pytest.fixture
def restored(served):
    """Restores modes and owners afterwards."""
    before = [(path, path.stat()) for path in (served.path, *served.path.rglob("*"))]
    yield served
    for path, status in before:
        os.chown(path, status.st_uid, status.st_gid)
        path.chmod(stat.S_IMODE(status.st_mode))


def refused(folder: CoordinatorFolder) -> str:
    """Returns why a server does not start."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NotPrivate) as raised:
        asyncio.run(_serve(folder.path, patch))
    return str(raised.value)


def refusal(folder: CoordinatorFolder, *words: str) -> str:
    """Returns the sentence with which a command refuses."""
    result = CliRunner().invoke(app, [*words, "--dir", str(folder.path)])
    assert isinstance(result.exception, CommandFailed), result.output
    assert result.exception.code is ExitCode.USAGE
    return result.exception.sentence


def typed(sentence: str) -> list[str]:
    """Returns the command that the sentence names."""
    return shlex.split(re.search(r"`([^`]*)`", sentence)[1])


def test_a_folder_made_and_served_under_any_umask_is_closed(served):
    for name in ("store", "spool", "tacit.db"):
        assert (served.path / name).stat().st_mode & 0o077 == 0, name
    for path in served.path.rglob("*"):
        assert path.stat().st_mode & 0o022 == 0 or path.parent.parent == served.store, path
    assert load_operator(served.operator).config.address


@pytest.mark.parametrize("name", [*FOLDERS, *PRIVATE, *READABLE])
def test_a_file_that_others_may_change_is_refused_with_the_fix(restored, name):
    path = restored.path / name
    path.chmod(0o777 if path.is_dir() else 0o666)
    said = refused(restored)
    assert str(path.resolve()) in said or str(path) in said
    program, mode, where = typed(said)
    assert program == "chmod"
    assert Path(where) == path
    path.chmod({"700": 0o700, "600": 0o600, "go-w": path.stat().st_mode & 0o755}[mode])
    asyncio.run(_until_checked(restored))


async def _until_checked(folder: CoordinatorFolder) -> None:
    server.check_folder(folder)  # type: ignore[attr-defined]
    server.check_storage(load_config(folder.path))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PRIVATE)
def test_a_key_that_others_may_read_is_refused(restored, name):
    (restored.path / name).chmod(0o640)
    assert typed(refused(restored))[:2] == ["chmod", "600"]


@root
@pytest.mark.parametrize("name", [*FOLDERS, *PRIVATE, *READABLE])
def test_a_file_of_another_user_is_refused_with_the_fix(restored, name):
    path = restored.path / name
    os.chown(path, SOMEBODY, -1)
    said = refused(restored)
    assert typed(said)[:2] == ["sudo", "chown"]
    assert Path(typed(said)[-1]) == path
    assert f"#{SOMEBODY}" in said


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0] + words[-1])
def test_every_command_on_the_folder_checks_it_first(restored, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    restored.authority_key.chmod(0o666)
    before = sorted(restored.path.rglob("*"))
    assert typed(refusal(restored, *words)) == ["chmod", "600", str(restored.authority_key)]
    assert sorted(restored.path.rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_the_service_ends_with_the_sentence(restored):
    restored.authority_key.chmod(0o666)
    words = [sys.executable, "-c", "from coordinator.cli import main; main()", "serve", "--dir", str(restored.path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr.endswith(f"close it with `chmod 600 {restored.authority_key}`\n")


def test_operator_commands_check_the_operators_folder(restored):
    for path, mode in ((restored.operator / "key.pem", 0o666), (restored.operator, 0o755)):
        path.chmod(mode)
        assert typed(refusal(restored, "status"))[0] == "chmod"
        with pytest.raises(DocumentInvalid, match="chmod"):
            load_operator(restored.operator)
        path.chmod(0o700)


def test_the_server_checks_before_it_opens_anything(tmp_path, monkeypatch):
    folder = party.coordinator_folder(tmp_path / "coordinator")
    folder.server_key.chmod(0o666)

    async def scenario():
        async with housed(tmp_path, monkeypatch, again=True):
            raise AssertionError("it serves")

    with pytest.raises(NotPrivate, match="chmod 600"):
        asyncio.run(scenario())
    assert not folder.database.exists()


def test_a_member_checks_by_the_same_rules(tmp_path):
    party.member(tmp_path / "home", "localhost:7441")
    identity = tmp_path / "home" / "identity"
    identity.chmod(0o777)
    with pytest.raises(HomeUnusable, match=r"chmod 700 .*/identity`\. If somebody else uses this machine, enrol again"):
        MemberIdentity.load(tmp_path / "home")


# ---- secrets from a supervisor or a container ------------------------------------------------------------------------


def secret(path: Path, mode: int, owner: int | None = None) -> Path:
    durable_file(path, b"a passphrase\n")
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, -1)
    return path


def as_user(monkeypatch, uid: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)


def test_a_users_own_passphrase_file_must_be_private(tmp_path):
    file = secret(tmp_path / "word", 0o600)
    assert authority_passphrase({"TACIT_AUTHORITY_PASSPHRASE_FILE": str(file)}) == b"a passphrase"
    for mode in (0o666, 0o644, 0o640):
        file.chmod(mode)
        with pytest.raises(AuthorityUnusable, match="chmod 600"):
            authority_passphrase({}, file)


@root
def test_a_secret_that_root_mounts_for_a_group_is_accepted(tmp_path, monkeypatch):
    file = secret(tmp_path / "word", 0o440, 0)
    as_user(monkeypatch, 10_001)
    for mode in (0o440, 0o400, 0o640):
        file.chmod(mode)
        assert authority_passphrase({}, file) == b"a passphrase"
    for mode in (0o444, 0o660):
        file.chmod(mode)
        with pytest.raises(AuthorityUnusable, match="sudo chmod 440"):
            authority_passphrase({}, file)


@root
def test_a_containers_secret_may_be_readable_but_never_writable(tmp_path, monkeypatch):
    file = secret(tmp_path / "word", 0o444, 0)
    as_user(monkeypatch, 10_001)
    monkeypatch.setattr(private_files, "_MOUNTED", tmp_path)
    assert authority_passphrase({}, file) == b"a passphrase"
    file.chmod(0o446)
    with pytest.raises(AuthorityUnusable, match="chmod go-w"):
        authority_passphrase({}, file)


@root
def test_a_secret_that_a_third_user_owns_is_refused(tmp_path):
    file = secret(tmp_path / "word", 0o600, SOMEBODY)
    with pytest.raises(NotPrivate, match=f"belongs to another user, #{SOMEBODY}"):
        check_secret(file)


def test_an_institutions_key_that_everybody_may_read_is_refused(tmp_path):
    authority = party.authority()
    authority.store(tmp_path / "ca.pem", tmp_path / "ca.key")
    (tmp_path / "ca.key").chmod(0o644)
    with pytest.raises(AuthorityUnusable, match="chmod 600"):
        Authority.load(tmp_path / "ca.pem", tmp_path / "ca.key", now=party.present())


def test_a_missing_file_passes_these_checks(tmp_path):
    for check in (check_private, check_unwritable, check_secret):
        check(tmp_path / "nothing")


def test_a_system_without_file_owners_is_not_checked(tmp_path, monkeypatch):
    file = secret(tmp_path / "word", 0o666)
    monkeypatch.delattr(os, "geteuid")
    for check in (check_private, check_unwritable, check_secret):
        check(file)


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:////var/lib/tacit/tacit.db", "/var/lib/tacit/tacit.db"),
        ("sqlite+pysqlite:////var/tacit.db?mode=rw", "/var/tacit.db"),
        ("sqlite:///:memory:", None),
        ("sqlite://", None),
        ("postgresql+psycopg://tacit@postgres:5432/tacit", None),
    ],
)
def test_the_file_of_a_database_url(url, file):
    assert database_file(url) == (None if file is None else Path(file))


@pytest.mark.parametrize(
    ("url", "folder"),
    [("file:///var/lib/tacit/store", "/var/lib/tacit/store"), ("s3://bucket/prefix", None), ("memory://x", None)],
)
def test_the_folder_of_a_store_url(url, folder):
    assert store_folder(url) == (None if folder is None else Path(folder))
