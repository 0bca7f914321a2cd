"""Secrets stay where they belong: the tests plant canaries in real processes and search everything that these show.

They search logs of every level including gRPC's own, arguments of every process, metrics, the output of commands that
succeed and that fail, the database with its journal, a backup, and a member's folder. They search for each secret as
bytes, in hexadecimal and in both forms of base64.
"""

import base64
import json
import os
import re
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tacit.token import JoinToken
from tests.support.processes import BIN, PATIENCE, Federation, Process, command, free_ports

PASSPHRASE = "canary-passphrase-7d1f"
DATABASE_PASSWORD = "canary-database-93ab"
PROXY_PASSWORD = "canary-proxy-5c20"
TEXT = "canary sentence of a patient number 4711"
MEMBERS = ("aster", "birch", "cedar")

# Runs a program unchanged except for its log level, which no option lowers to debug.
LOUD = """
import sys
import toolkit.logs
quiet = toolkit.logs.configure
toolkit.logs.configure = lambda format, level="", **more: quiet(format, "debug", **more)
from {room}.cli import main
sys.argv[0] = "{room}"
main()
"""


def loud(room: str, *words: str | Path) -> list[str]:
    return [sys.executable, "-c", LOUD.format(room=room), *map(str, words)]


class Canaries:
    """Named secrets, and a search that fails if it finds one."""

    def __init__(self) -> None:
        self._forms: dict[str, list[bytes]] = {}

    def plant(self, name: str, secret: bytes) -> None:
        plain, safe = base64.b64encode(secret), base64.urlsafe_b64encode(secret)
        # Leave out the padding and the last character, which depends on the bytes that follow.
        forms = {secret, secret.hex().encode(), plain.rstrip(b"=")[:-1], safe.rstrip(b"=")[:-1]}
        self._forms[name] = [form for form in forms if len(form) >= 12]

    def plant_key(self, name: str, pem: Path) -> None:
        """Plants a private key, by the lines of its PEM file and by the bytes that they encode."""
        lines = [line for line in pem.read_bytes().splitlines() if line and not line.startswith(b"-")]
        der = base64.b64decode(b"".join(lines))
        # Only the second half, which holds primes and exponents: the first half holds the key's format and public part.
        middle = len(der) // 2
        self._forms[name] = [
            *lines[len(lines) // 2 :],
            der[middle : middle + 32],
            der[middle : middle + 32].hex().encode(),
        ]

    def found_in(self, what: bytes) -> set[str]:
        return {name for name, forms in self._forms.items() if any(form in what for form in forms)}

    def assert_none(self, where: str, what: bytes) -> None:
        assert not (found := self.found_in(what)), f"{', '.join(sorted(found))} in {where}"

    def assert_none_below(self, folder: Path, *, but: tuple[str, ...] = ()) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and str(path.relative_to(folder)) not in but:
                self.assert_none(str(path), path.read_bytes())


@pytest.fixture
def canaries() -> Canaries:
    return Canaries()


def test_the_search_finds_a_secret_in_every_encoding(canaries):
    canaries.plant("token", b"\x00\xff-secret-bytes-of-a-token")
    for form in (
        b"\x00\xff-secret-bytes-of-a-token",
        b"\x00\xff-secret-bytes-of-a-token".hex().encode(),
        base64.b64encode(b"\x00\xff-secret-bytes-of-a-token"),
        base64.urlsafe_b64encode(b"\x00\xff-secret-bytes-of-a-token"),
    ):
        assert canaries.found_in(b"before " + form + b" after") == {"token"}
    assert canaries.found_in(b"nothing") == set()


def arguments() -> bytes:
    """The arguments of all descendants of this process."""
    lines = []
    for child in psutil.Process().children(recursive=True):
        try:
            lines.append(" ".join(child.cmdline()))
        except psutil.Error:
            continue
    return "\n".join(lines).encode()


def spoken(words: list[str], told: str = "", **environment: str) -> tuple[int, bytes]:
    """Runs a command with a secret on its standard input. Returns the exit code and both outputs."""
    done = subprocess.run(
        words,
        input=told,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, (done.stdout + done.stderr).encode()


def enrolled(federation: Federation, name: str, canaries: Canaries) -> str:
    token = federation.token(name)
    canaries.plant(f"token of {name}", JoinToken.parse(token).secret)
    code, output = spoken(loud("edge_client", "enrol", "--home", federation.home(name)), token, GRPC_VERBOSITY="DEBUG")
    assert code == 0, output
    canaries.assert_none(f"what enrol prints for {name}", output)
    if name != MEMBERS[0]:
        return token
    # Another machine uses it again: the refusal does not repeat the secret.
    code, output = spoken(
        loud("edge_client", "enrol", "--home", federation.folder / f"thief-{name}"), token, GRPC_VERBOSITY="DEBUG"
    )
    assert code == 4, output
    canaries.assert_none("a refused enrolment", output)
    # A damaged token: the error shows no part of it.
    code, output = spoken(
        loud("edge_client", "enrol", "--home", federation.folder / "third"), token[:-3], GRPC_VERBOSITY="DEBUG"
    )
    assert code == 2, output
    canaries.assert_none("a damaged token's sentence", output)
    canaries.plant_key(f"key of {name}", federation.home(name) / "identity" / "key.pem")
    return token


def test_no_log_argument_metric_journal_or_backup_shows_a_secret(tmp_path, canaries, monkeypatch):
    canaries.plant("passphrase", PASSPHRASE.encode())
    canaries.plant("a text of the data", TEXT.encode())
    federation = Federation(tmp_path)
    federation.coordinator.stop()
    words = loud("coordinator", "serve", "--dir", federation.dir, "--log-format", "json")
    with monkeypatch.context() as its:
        # Only where it is searched: a command with this variable starts cold.
        its.setenv("GRPC_VERBOSITY", "DEBUG")
        coordinator = Process("coordinator", words, tmp_path / "coordinator-loud.log")
    federation.processes.append(coordinator)
    try:
        coordinator.wait_for("serving")
        for part in ("authority/root.key", "server/key.pem", "operator/key.pem"):
            canaries.plant_key(part, federation.dir / part)
        tokens = [enrolled(federation, name, canaries) for name in MEMBERS]
        for name in MEMBERS:
            policy = federation.home(name) / "policy.toml"
            policy.write_text('schema = 1\nmechanisms = ["none"]\n')
            row = json.dumps({"text": TEXT, "label": "billing"})
            federation.data(name).write_text(federation.data(name).read_text() + row + "\n")
        federation.job("quiet", count=1)
        monkeypatch.setenv("TACIT_PASSPHRASE", PASSPHRASE)
        (port,) = free_ports(1)
        members = []
        for name in MEMBERS:
            more = ["--metrics-port", str(port)] if name == "aster" else []
            words = loud("edge_client", "run", "--data", federation.data(name), "--home", federation.home(name))
            log = tmp_path / f"{name}-loud.log"
            with monkeypatch.context() as its:
                its.setenv("GRPC_VERBOSITY", "DEBUG")
                members.append(Process(name, [*words, "--log-format", "json", *more], log))
            federation.processes.append(members[-1])
        federation.finished("quiet")
        for member in members:
            member.wait_for("job_over")
        seen = arguments()
        assert b"edge_client" in seen, "the arguments that are looked at are those of the members"
        canaries.assert_none("arguments of processes", seen)
        for where in (federation.metrics_port, port):
            text = urllib.request.urlopen(f"http://127.0.0.1:{where}/metrics").read()
            assert b"tacit_" in text
            canaries.assert_none("metrics", text)
        journal = federation.operator("audit", "show", "--json").encode()
        assert b"member_enrolled" in journal
        canaries.assert_none("the journal", journal)
        backup = tmp_path / "backup"
        federation.operator("backup", backup)
        assert any(backup.rglob("*"))
        canaries.assert_none_below(backup)
    finally:
        federation.close()
    for log in (tmp_path / "coordinator-loud.log", *(tmp_path / f"{name}-loud.log" for name in MEMBERS)):
        # gRPC's own lines, which are no JSON, are among them.
        assert any(not line.startswith(b"{") for line in log.read_bytes().splitlines()), log
        canaries.assert_none(str(log), log.read_bytes())
    # The coordinator keeps no secret of a token. Keys are in their own files and nowhere else.
    canaries.assert_none_below(federation.dir, but=("authority/root.key", "server/key.pem", "operator/key.pem"))
    for name in MEMBERS:
        canaries.assert_none_below(federation.home(name), but=("identity/key.pem",))
    assert len(set(tokens)) == len(MEMBERS)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://tacit:{DATABASE_PASSWORD}@127.0.0.1:1/tacit",
        f"postgresql+nothing://tacit:{DATABASE_PASSWORD}@127.0.0.1:1/tacit",
        f"postgresql+psycopg://tacit:{DATABASE_PASSWORD}@127.0.0.1:port/tacit",
    ],
    ids=["nobody-there", "no-driver", "no-port"],
)
def test_a_database_error_does_not_show_the_password(tmp_path, canaries, monkeypatch, url):
    canaries.plant("database password", DATABASE_PASSWORD.encode())
    folder = tmp_path / "federation"
    assert command("coordinator", "init", folder).returncode == 0
    monkeypatch.setenv("TACIT_DATABASE_URL", url)
    for words in (("serve", "--dir", folder), ("backup", tmp_path / "backup", "--dir", folder)):
        code, output = spoken(loud("coordinator", *words), GRPC_VERBOSITY="DEBUG")
        assert code in (1, 2), output
        assert re.search(rb"error: .*database", output), output
        canaries.assert_none(f"what {words[0]} says", output)
    done = command("coordinator", "audit", "show", "--database", url)
    assert done.returncode != 0
    canaries.assert_none("what audit says", (done.stdout + done.stderr).encode())


def test_a_proxy_error_does_not_show_the_password(tmp_path, canaries, monkeypatch):
    canaries.plant("proxy password", PROXY_PASSWORD.encode())
    with_token = JoinToken.create(
        address="coordinator.invalid:7440",
        federation=bytes(32),
        member="aster",
        expires=datetime.now(UTC) + timedelta(hours=1),
    ).format()
    for value in (f"http://u:{PROXY_PASSWORD}@127.0.0.1:1", f"https://u:{PROXY_PASSWORD}@127.0.0.1:1"):
        monkeypatch.setenv("https_proxy", value)
        code, output = spoken([str(BIN / "edge_client"), "enrol", "--home", str(tmp_path / "home")], with_token)
        assert code == 3, output
        assert b"proxy" in output
        canaries.assert_none("what enrol says of a proxy", output)
