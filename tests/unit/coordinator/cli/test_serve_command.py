"""`coordinator serve` on a folder that it cannot serve from: a sentence and a code, and no traceback."""

from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from coordinator import server
from coordinator.cli import app
from coordinator.pki import AUTHORITY_LIFETIME, Authority
from tests.support import party
from tests.support.processes import command
from toolkit.console import ExitCode


def ends_soon(folder):
    """The authority ends in half an hour, and the server needs a certificate."""
    made = Authority.create(now=datetime.now(UTC) - AUTHORITY_LIFETIME + timedelta(minutes=30), key=party.key(100))
    made.store(folder.authority_certificate, folder.authority_key)


def no_place_to_spool(folder):
    folder.spool.write_bytes(b"")
    folder.spool.chmod(0o600)


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (ends_soon, ExitCode.USAGE, "the authority's certificate ends"),
        (no_place_to_spool, ExitCode.FAILED, "spool"),
    ],
)
def test_serve_ends_with_a_sentence(tmp_path, fault, code, says):
    folder = party.coordinator_folder(tmp_path / "coordinator")
    fault(folder)
    done = command("coordinator", "serve", "--dir", folder.path)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_of_ours_is_seen_as_it_is(tmp_path, monkeypatch):
    """Python calls a timeout an error of the operating system, too."""
    folder = party.coordinator_folder(tmp_path / "coordinator")
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setattr("toolkit.tls.tls_13_only", lambda: None)
    monkeypatch.setattr("toolkit.logs.configure", lambda *_, **__: None)

    async def late(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(server, "serve", late)
    assert isinstance(CliRunner().invoke(app, ["serve", "--dir", str(folder.path)]).exception, TimeoutError)
