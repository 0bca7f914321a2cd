"""`edge_client job` and `steward`: what people and scripts see, the exit codes, and the key's file."""

import asyncio
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from edge_client.approval.desk import Desk
from edge_client.approval.folder import ApprovalFolder
from edge_client.approval.statement import SignedStatement
from edge_client.approval.steward import StewardKeyUnusable, open_key
from edge_client.cli import app
from edge_client.ledger.ledger import Ledger, ledger_path
from edge_client.policy.policy import Policy
from edge_client.private_store.sealing import StoreKey
from learning.accounting.filter import Limit
from tacit.manifest import Manifest
from tests.unit.edge_client.approval.test_desk import Recorder
from tests.unit.learning.mechanisms.test_mechanisms import GAUSSIAN, job
from toolkit.console import CommandFailed, ExitCode

PASSPHRASE = "a long passphrase"
JOB = job(GAUSSIAN, tags=["oncology"])
DIGEST = JOB.digest().hex()
MANIFEST = Manifest.of({"w": np.zeros((2, 2), np.float32)})


def ended(*words: object, passphrase: str = PASSPHRASE) -> tuple[int, str]:
    """Runs a command line; returns its exit code and what it printed."""
    env = {"COLUMNS": "120", "TACIT_STEWARD_PASSPHRASE": passphrase}
    result = CliRunner().invoke(app, [str(word) for word in words], env=env)
    if isinstance(result.exception, CommandFailed):
        return int(result.exception.code), result.exception.sentence
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A steward's key, which takes a while to lock with its passphrase, and what the command said."""
    path = tmp_path_factory.mktemp("steward") / "mary.key"
    code, said = ended("steward", "key", path)
    assert code == 0
    return path, said.strip()


@pytest.fixture
def key(made, tmp_path):
    """A copy that a test may change."""
    shutil.copy(made[0], tmp_path / "mary.key")
    return tmp_path / "mary.key", made[1]


@pytest.fixture
def home(tmp_path, key):
    """A member's home that has asked about one job."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    policy = Policy(jobs="ask", stewards={"mary": key[1]})
    with Ledger.open(ledger_path(home, "data"), "data", Limit(4.0, 1e-5)) as ledger:
        desk = Desk(
            home,
            policy,
            Recorder(ledger),
            federation=bytes(32),
            member="north",
            data="data",
            describe=lambda *_: (["reads notes.csv: the columns text, label\x1b[2J"], {"epsilon_a_round": 0.5}),
        )
        asyncio.run(desk.ask(JOB, MANIFEST, None))
    return home


def test_a_key_is_made_once_and_is_useless_without_its_passphrase(tmp_path, key, home):
    file, public = key
    assert file.stat().st_mode & 0o077 == 0
    # The public half needs no passphrase, and the file is not made anew.
    assert ended("steward", "key", file, passphrase="") == (0, f"{public}\n")
    assert json.loads(ended("steward", "key", file, "--json")[1]) == {"file": str(file), "key": public}
    words = ("job", "approve", "questions", "--key", file, "--digest", DIGEST, "--yes", "--home", home)
    code, said = ended(*words, passphrase="another passphrase")
    assert (code, "passphrase is another one" in said) == (ExitCode.USAGE, True)
    assert ended("steward", "key", tmp_path / "new.key", passphrase="short")[0] == ExitCode.USAGE
    file.chmod(0o644)
    code, said = ended(*words)
    assert (code, "chmod 600" in said) == (ExitCode.USAGE, True)


def test_a_key_whose_public_half_was_exchanged_signs_nothing(key, home):
    file, public = key
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "public": "11" * 32}))
    with pytest.raises(StewardKeyUnusable, match="does not open"):
        open_key(file, StoreKey.from_passphrase(PASSPHRASE))
    assert ended("job", "withdraw", "questions", "--key", file, "--digest", DIGEST, "--yes", "--home", home)[0] == 4
    file.write_text(json.dumps({**content, "public": public, "sealed": "00" + content["sealed"][2:]}))
    assert ended("job", "withdraw", "questions", "--key", file, "--digest", DIGEST, "--yes", "--home", home)[0] == 2


def test_show_prints_the_dry_run_and_the_digest(home, key):
    code, said = ended("job", "show", "questions", "--home", home)
    assert code == 0
    assert f"digest      {DIGEST}" in said
    assert "tags        oncology" in said
    assert "reads notes.csv: the columns text, label\N{REPLACEMENT CHARACTER}[2J" in said
    assert "So far: 0 of 1 approvals." in said
    assert f"job approve questions --digest {DIGEST[:16]}" in said
    shown = json.loads(ended("job", "show", "questions", "--home", home, "--json")[1])
    assert (shown["digest"], shown["stage"], shown["plan"]) == (DIGEST, "awaited", {"epsilon_a_round": 0.5})
    assert ended("job", "list", "--home", home) == (0, "questions (data data): 0 of 1 approvals\n")


def test_show_prints_a_long_dry_run_to_its_end(home, key):
    folder = ApprovalFolder(home, "data", "questions")
    long = tuple(f"parameter {number} {'x' * 60}" for number in range(2000))
    folder.ask(folder.request().model_copy(update={"lines": long}))
    code, said = ended("job", "show", "questions", "--home", home)
    assert code == 0
    assert all(line in said for line in long)
    assert "To approve it" in said


@pytest.mark.timeout(60)
def test_a_pipe_in_the_folder_hangs_nobody(home, key):
    folder = ApprovalFolder(home, "data", "questions")
    os.mkfifo(folder.path / f"{'ab' * 32}.json")
    assert ended("job", "list", "--home", home) == (0, "questions (data data): 0 of 1 approvals\n")
    (folder.path / "request.json").unlink()
    os.mkfifo(folder.path / "request.json")
    assert ended("job", "list", "--home", home)[0] == 0
    assert ended("job", "show", "questions", "--home", home)[0] == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("show", "other"), ExitCode.NOT_FOUND, "asked nobody about job other"),
        (("show", "../x"), ExitCode.NOT_FOUND, "asked nobody"),
        (("show",), ExitCode.USAGE, "name the job"),
        (("approve", "questions", "--yes"), ExitCode.USAGE, "--yes needs --digest"),
        (("approve", "questions", "--digest", DIGEST[:16]), ExitCode.USAGE, "no terminal to confirm on"),
        (("approve", "questions", "--digest", "ab" * 32, "--yes"), ExitCode.REFUSED, "was changed since you read it"),
        (("approve", "questions", "--digest", DIGEST[:15], "--yes"), ExitCode.REFUSED, "fewer than 16 digits"),
        (("approve", "questions", "--digest", DIGEST, "--yes", "--days", "91"), ExitCode.REFUSED, "90 days at most"),
        (("approve", "questions", "--digest", DIGEST, "--yes", "--out", "x"), ExitCode.USAGE, "--request and --out"),
    ],
    ids=str,
)
def test_refusals_say_what_to_do(home, key, words, code, why):
    more = ("--key", key[0]) if words[0] == "approve" else ()
    found, said = ended("job", *words, *more, "--home", home)
    assert (found, why in said) == (code, True), said
    assert ApprovalFolder(home, "data", "questions").names() == ()


def test_a_stranger_is_told_that_the_key_does_not_count(home, tmp_path):
    ended("steward", "key", tmp_path / "mallory.key")
    words = ("--key", tmp_path / "mallory.key", "--digest", DIGEST, "--yes", "--home", home)
    code, said = ended("job", "approve", "questions", *words)
    assert (code, "not one of the stewards" in said) == (ExitCode.REFUSED, True)
    code, said = ended("job", "approve", "questions", "--key", tmp_path / "none.key", "--home", home)
    assert (code, "steward key" in said) == (ExitCode.NOT_FOUND, True)


def test_a_decision_on_the_members_machine_is_put_into_its_home(home, key):
    words = ("--key", key[0], "--digest", DIGEST[:16], "--yes", "--home", home)
    code, said = ended("job", "approve", "questions", "--days", "7", *words)
    assert code == 0
    assert f"Approved: job questions, digest {DIGEST[:16]} until " in said
    assert "1 of 1 approvals (mary); valid until" in ended("job", "list", "--home", home)[1]
    assert ended("job", "decline", "questions", "--reason", "no consent", *words)[0] == 0
    assert "declined by mary (no consent)" in ended("job", "list", "--home", home)[1]
    assert ended("job", "withdraw", "questions", *words)[0] == 0
    assert ended("job", "list", "--home", home)[1] == "questions (data data): 0 of 1 approvals\n"


@pytest.mark.parametrize(("typed", "code"), [("y", 0), ("n", ExitCode.REFUSED)])
def test_a_person_at_a_terminal_reads_what_is_signed_and_for_how_long(home, key, typed, code):
    words = ["job", "approve", "questions", "--key", str(key[0]), "--home", str(home)]
    person, terminal = os.openpty()
    env = {**os.environ, "TACIT_STEWARD_PASSPHRASE": PASSPHRASE}
    command = [sys.executable, "-c", "from edge_client.cli import main; main()", *words]
    os.write(person, f"{typed}\n".encode())
    done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, env=env, timeout=120, check=False)
    os.close(terminal)
    os.close(person)
    assert done.returncode == code, done.stderr
    assert DIGEST in done.stdout
    assert "Approve questions as mary, for 30 days?" in done.stderr
    assert len(ApprovalFolder(home, "data", "questions").names()) == (1 if typed == "y" else 0)


def test_a_decision_on_another_machine_travels_as_two_files(home, key, tmp_path):
    request, signed = tmp_path / "request.json", tmp_path / "signed.json"
    assert ended("job", "show", "questions", "--home", home, "--out", request)[0] == 0
    # There, nobody has the member's home.
    code, said = ended("job", "show", "--request", request)
    assert (code, DIGEST in said, "So far" in said) == (0, True, False)
    assert f"job approve --request {request} --out SIGNED --digest {DIGEST[:16]} --key FILE" in said
    words = ("--key", key[0], "--request", request, "--out", signed, "--digest", DIGEST, "--yes")
    code, said = ended("job", "approve", *words)
    assert (code, f"job import {signed}" in said) == (0, True)
    assert SignedStatement.from_file(signed).statement.document == JOB.digest()
    assert ended("job", "approve", *words)[0] == ExitCode.USAGE  # The file exists.
    assert "1 of 1" not in ended("job", "list", "--home", home)[1]
    assert ended("job", "import", signed, "--home", home)[0] == 0
    assert "1 of 1 approvals (mary)" in ended("job", "list", "--home", home)[1]
    signed.write_text(signed.read_text().replace('"data":"data"', '"data":"more"'))
    assert ended("job", "import", signed, "--home", home)[0] == ExitCode.REFUSED
    assert ended("job", "import", request, "--home", home)[0] == ExitCode.USAGE
    assert ended("job", "import", tmp_path / "none", "--home", home)[0] == ExitCode.NOT_FOUND


def test_the_ledger_shows_who_approved_what(home, key):
    ended("job", "approve", "questions", "--key", key[0], "--digest", DIGEST, "--yes", "--home", home)
    policy = Policy(jobs="ask", stewards={"mary": key[1]})
    with Ledger.open(ledger_path(home, "data"), "data", Limit(4.0, 1e-5)) as ledger:
        desk = Desk(home, policy, Recorder(ledger), federation=bytes(32), member="north", data="data")
        assert desk.check(JOB) == 1
    code, said = ended("ledger", "show", "--home", home)
    assert code == 0
    assert all(word in said for word in (DIGEST[:16], key[1][:16], "approve"))
    (shown,) = json.loads(ended("ledger", "show", "--home", home, "--json")[1])["approvals"]
    assert (shown["decision"], shown["document"], shown["lapsed"]) == ("approve", DIGEST, False)
