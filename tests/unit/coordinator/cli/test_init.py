"""`coordinator init`, `edge_client enrol` and `edge_client doctor`, as a person runs them."""

import asyncio
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import typer
from cryptography import x509
from typer.testing import CliRunner

from coordinator.cli.init import init
from coordinator.config import CoordinatorFolder, load_config, load_operator
from coordinator.pki import Authority, key_pem, pem
from coordinator.services.credentials import load_root, refresh_server_certificate
from edge_client.cli.doctor import doctor
from edge_client.cli.enrol import enrol
from tacit.identity import Role, verify_certificate
from tacit.token import JoinToken
from tests.support import party
from tests.support.federation_port import FederationPort, serving
from toolkit.console import CommandFailed, ExitCode
from toolkit.durable import durable_file


def _app(command):
    app = typer.Typer()
    app.command()(command)
    return app


def _run(command, *arguments, stdin=None):
    """Runs a command that must succeed, and returns its standard output."""
    result = CliRunner().invoke(_app(command), [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def _fails(command, *arguments, code):
    with pytest.raises(CommandFailed) as raised:
        _run(command, *arguments)
    assert raised.value.code is code
    return raised.value.sentence


@pytest.fixture
def quick(monkeypatch):
    """Existing keys, one for each place that would create one."""
    monkeypatch.setattr("coordinator.pki.new_key", lambda: party.key(6))
    monkeypatch.setattr("coordinator.services.credentials.new_key", lambda: party.key(7))


def test_init_creates_a_complete_federation(tmp_path, quick):
    directory = tmp_path / "fed"
    now = datetime.now(UTC)
    out = _run(init, directory, "--host", "fed.example.org", "--host", "10.0.0.1", "--federation-port", 9441)
    folder = CoordinatorFolder(directory)
    authority = Authority.load(folder.authority_certificate, folder.authority_key, now=now + timedelta(minutes=1))
    assert authority.federation.hex() in out
    assert f"coordinator serve --dir {directory}" in out
    assert "coordinator member invite NAME" in out
    config = load_config(directory, {})
    assert config.advertise == ("fed.example.org", "10.0.0.1")
    assert (config.enrolment_port, config.federation_port, config.metrics_port) == (7440, 9441, 7442)
    assert folder.database.exists()
    assert folder.store.is_dir()
    # The server's certificate is ready, and needs no renewal.
    assert not refresh_server_certificate(folder, config, authority, now + timedelta(minutes=1))

    operator = load_operator(folder.operator)
    assert operator.config.address == "fed.example.org:9441"
    assert operator.config.federation == authority.federation
    assert operator.root_pem == folder.authority_certificate.read_bytes()
    certificate = x509.load_pem_x509_certificate(operator.certificate_pem)
    verified = verify_certificate(
        certificate.public_bytes(party.serialization.Encoding.DER),  # type: ignore[attr-defined]
        authority.certificate,
        federation=authority.federation,
        role=Role.ADMINISTRATOR,
        now=now + timedelta(minutes=1),
    )
    assert verified.identity.name == "operator"


def test_nothing_in_the_folder_is_open_to_others(tmp_path, quick):
    directory = tmp_path / "fed"
    _run(init, directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    keys = sorted(directory.rglob("*key*"))
    assert [str(path.relative_to(directory)) for path in keys] == [
        "authority/root.key",
        "operator/key.pem",
        "server/key.pem",
    ]
    for path in keys:
        assert path.stat().st_mode & 0o777 == 0o600, path
        assert path.parent.stat().st_mode & 0o777 == 0o700, path


def test_without_a_host_only_this_machine_can_join(tmp_path, quick):
    assert "Members on other machines cannot join yet" in _run(init, tmp_path / "fed")
    assert load_config(tmp_path / "fed", {}).advertise == ("localhost", "127.0.0.1")


def test_json(tmp_path, quick):
    made = json.loads(_run(init, tmp_path / "fed", "--host", "fed.example.org", "--json"))
    assert made["enrolment_address"] == "fed.example.org:7440"
    assert made["operator"] == str(tmp_path / "fed" / "operator")
    assert len(made["federation"]) == 64


def test_a_folder_with_content_is_refused_and_not_changed(tmp_path, quick):
    directory = tmp_path / "fed"
    directory.mkdir()
    (directory / "thesis.txt").write_text("do not lose")
    assert "is not empty" in _fails(init, directory, code=ExitCode.USAGE)
    assert [path.name for path in directory.iterdir()] == ["thesis.txt"]


def test_two_services_cannot_have_one_port(tmp_path, quick):
    said = _fails(init, tmp_path / "fed", "--enrolment-port", 17450, "--federation-port", 17450, code=ExitCode.USAGE)
    assert "enrolment_port and federation_port are both 17450; give each another port" in said
    assert not (tmp_path / "fed").exists()


def test_an_empty_folder_or_a_fresh_volume_is_accepted(tmp_path, quick):
    directory = tmp_path / "fed"
    (directory / "lost+found").mkdir(parents=True)
    _run(init, directory)
    assert (directory / "lost+found").exists()


def test_a_second_init_is_refused(tmp_path, quick):
    _run(init, tmp_path / "fed")
    before = (tmp_path / "fed" / "authority" / "root.pem").read_bytes()
    _fails(init, tmp_path / "fed", code=ExitCode.USAGE)
    assert (tmp_path / "fed" / "authority" / "root.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "fed.example.org:7441"], "without a port"),
        (["--host", "a", "--host", "a"], "twice"),
        (["--operator", "The Operator"], "not a valid operator name"),
        (["--authority-cert", "ca.pem"], "belong together"),
        (["--authority-cert", "nowhere.pem", "--authority-key", "nowhere.key"], "cannot be read"),
    ],
)
def test_mistakes_are_named_and_leave_no_folder(tmp_path, quick, arguments, sentence):
    assert sentence in _fails(init, tmp_path / "fed", *arguments, code=ExitCode.USAGE)
    assert not (tmp_path / "fed").exists()


def test_an_institutions_authority(tmp_path, quick, authority):
    (tmp_path / "ca.pem").write_bytes(pem(authority.certificate))
    durable_file(tmp_path / "ca.key", key_pem(authority.key))
    own = ["--authority-cert", tmp_path / "ca.pem", "--authority-key", tmp_path / "ca.key"]
    made = json.loads(_run(init, tmp_path / "fed", *own, "--json"))
    assert made["federation"] == authority.federation.hex()


def test_a_failure_halfway_leaves_nothing_behind(tmp_path, quick, monkeypatch):
    def broken(url):
        raise RuntimeError("no database today")

    monkeypatch.setattr("coordinator.storage.database.open_database", broken)
    with pytest.raises(RuntimeError):
        _run(init, tmp_path / "fed")
    assert not (tmp_path / "fed").exists()
    (tmp_path / "fed").mkdir()
    with pytest.raises(RuntimeError):
        _run(init, tmp_path / "fed")
    assert list((tmp_path / "fed").iterdir()) == []


# ---- the member's side ---------------------------------------------------------------------------------------------


def test_enrol_fails_with_a_sentence_and_an_exit_code(tmp_path):
    assert "not a join token" in _fails(enrol, "hello", "--home", tmp_path / "home", code=ExitCode.USAGE)
    token = JoinToken.create(
        address="coordinator.invalid:7440",
        federation=b"f" * 32,
        member="north",
        expires=datetime.now(UTC) + timedelta(hours=1),
    )
    sentence = _fails(enrol, token.format(), "--home", tmp_path / "home", code=ExitCode.UNREACHABLE)
    assert "cannot be resolved" in sentence


def test_a_token_can_come_from_standard_input_or_the_environment(tmp_path, monkeypatch):
    with pytest.raises(CommandFailed, match="newer than this software"):
        _run(enrol, "--home", tmp_path / "home", stdin="tacit4.a.b\n")
    with pytest.raises(CommandFailed, match="newer than this software"):
        _run(enrol, "-", "--home", tmp_path / "home", stdin="tacit4.a.b\n")
    monkeypatch.setenv("TACIT_JOIN_TOKEN", "tacit3.a.b")
    with pytest.raises(CommandFailed, match="newer than this software"):
        _run(enrol, "--home", tmp_path / "home")


def test_doctor_prints_a_line_per_check_and_exits_with_the_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_HOME", str(tmp_path / "nothing"))
    result = CliRunner().invoke(_app(doctor), [])
    assert result.exit_code == ExitCode.NOT_FOUND
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fail  identity")
    assert "edge_client enrol" in lines[0]
    assert len(lines) == 12
    result = CliRunner().invoke(_app(doctor), ["--json"])
    assert result.exit_code == ExitCode.NOT_FOUND
    answer = json.loads(result.stdout)
    assert answer["exit_code"] == ExitCode.NOT_FOUND
    assert answer["checks"][0]["check"] == "identity"
    assert answer["checks"][0]["status"] == "fail"


def test_doctor_exits_with_0_if_all_is_well(tmp_path, folder):
    """The command runs in its own process, as both it and the server here run an event loop."""
    code = "from tests.unit.coordinator.cli.test_init import _app, doctor; _app(doctor)()"

    async def run():
        # The command uses the machine's clock, not the moment at which this run's certificates were issued.
        service = FederationPort(load_root(folder), clock=lambda: datetime.now(UTC))
        async with serving(folder, service) as port:
            home = party.member_home(tmp_path / "home", f"localhost:{port.port}")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, "--home", str(home), stdout=subprocess.PIPE, env=os.environ
            )
            return (await process.communicate())[0].decode(), process.returncode

    out, returncode = asyncio.run(run())
    assert returncode == 0, out
    assert "fail" not in out


@pytest.mark.parametrize("module", ["coordinator.cli.init", "edge_client.cli.enrol", "edge_client.cli.doctor"])
def test_commands_import_heavy_modules_only_when_they_run(module):
    code = f"import sys, {module}\nsys.exit(any(name in sys.modules for name in ('grpc', 'cryptography', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
