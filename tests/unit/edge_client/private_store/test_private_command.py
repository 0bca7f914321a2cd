"""`edge_client private`: what people and scripts see, the exit codes, and that it prints nothing private."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from edge_client.cli.private import app
from edge_client.identity.home import IdentityDocument
from learning.text.encoder import word_tokenizer
from tests.support.private_states import FEDERATION, file_key, kept, loaded, made, store_of
from toolkit.console import CommandFailed, ExitCode

PASSPHRASE = "correct horse battery"
WORD, VALUE = "myelodysplasia", 0.12345


@pytest.fixture
def member(home):
    """A home with an identity, one state with a vocabulary of its own, and a sealed one."""
    named(home, "north")
    arrays = {"embedding.weight": np.full((3, 2), VALUE, dtype=np.float32)}
    flags = frozenset({"personalised"})
    kept(home, 4, arrays=arrays, tokenizer=word_tokenizer([WORD]), flags=flags)
    kept(home, 2, job="ward", key=file_key())
    return home


def named(home, name):
    folder = home / "identity"
    folder.mkdir()
    document = IdentityDocument(federation=FEDERATION, member=name, address="localhost:7441")
    (folder / "identity.json").write_bytes(document.canonical())


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(bytes([1]) * 32)
    path.chmod(0o600)
    return path


def ended(*words: object, **environment: str) -> tuple[int, str]:
    """Runs a command line; returns its exit code and what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120", **environment})
    if isinstance(result.exception, CommandFailed):
        return int(result.exception.code), result.exception.sentence
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_list_needs_no_key(member):
    code, said = ended("list", "--home", member)
    assert code == 0
    assert said.splitlines()[0].startswith("desk: round 4, ")
    assert said.splitlines()[0].endswith("not sealed, personalised")
    assert said.splitlines()[1].endswith("sealed with a key file")
    found = [json.loads(line) for line in ended("list", "--home", member, "--json")[1].splitlines()]
    assert [(each["job"], each["round"], each["sealed"], each["staged"]) for each in found] == [
        ("desk", 4, None, 0),
        ("ward", 2, "key-file", 0),
    ]


def test_list_names_damaged_and_staged_states(member):
    (member / "private" / "desk" / "state").write_bytes(b"x")
    with store_of(member, file_key()) as store:
        store.stage("clinic", "1-aa", made(1))
    code, said = ended("list", "--home", member)
    assert code == 0
    assert "clinic: nothing committed yet, 1 staged" in said
    assert "desk: " in said
    assert "is not a private state" in said


def test_show_prints_names_and_shapes_but_no_values_or_words(member, key):
    code, said = ended("show", "desk", "--home", member)
    assert code == 0
    assert all(word in said for word in ("embedding.weight", "3 x 2", "own, 3 entries", "personalised"))
    code, printed = ended("show", "desk", "--home", member, "--json")
    found = json.loads(printed)
    assert found["arrays"] == {"embedding.weight": [3, 2]}
    assert (found["values"], found["tokenizer"]["entries"], found["round"]) == (6, 3, 4)
    for text in (said, printed, ended("list", "--home", member)[1]):
        assert WORD not in text
        assert "0.123" not in text
    code, said = ended("show", "ward", "--home", member)
    assert code == 0
    assert "Give the passphrase or the key file to see the arrays" in said
    assert "embedding" not in said
    assert "output.bias" in ended("show", "ward", "--home", member, "--private-key-file", key)[1]


def test_a_backup_moves_to_another_home(member, tmp_path, key):
    file = tmp_path / "backup"
    code, said = ended("backup", file, "--home", member)
    assert code == 0
    assert "Not sealed: desk. Anyone who has the file can read your vocabulary" in said
    assert ended("backup", file, "--home", member)[0] == ExitCode.USAGE
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    code, said = ended("restore", file, "--home", other)
    assert code == ExitCode.USAGE
    assert "holds no identity" in said
    named(other, "north")
    code, said = ended("restore", file, "--home", other)
    assert (code, said.splitlines()) == (0, ["Restored desk.", "Restored ward."])
    assert loaded(other, file_key(), "ward") == 2
    found = json.loads(ended("restore", file, "--home", other, "--json")[1])
    assert found == {"restored": [], "unchanged": ["desk", "ward"]}
    third = tmp_path / "third"
    third.mkdir(mode=0o700)
    named(third, "south")
    assert ended("restore", file, "--home", third)[0] == ExitCode.USAGE


def test_restoring_over_a_newer_state_needs_force(member, tmp_path):
    file = tmp_path / "backup"
    assert json.loads(ended("backup", file, "--job", "desk", "--home", member, "--json")[1])["jobs"] == ["desk"]
    kept(member, 5, key=file_key())
    code, said = ended("restore", file, "--home", member)
    assert code == ExitCode.USAGE
    assert "restore with --force" in said
    assert loaded(member, file_key()) == 5
    assert ended("restore", file, "--home", member, "--force")[0] == 0
    assert json.loads(ended("show", "desk", "--home", member, "--json")[1])["round"] == 4


def test_remove_needs_yes(member):
    code, said = ended("remove", "desk", "--home", member)
    assert code == ExitCode.USAGE
    assert "Confirm with --yes" in said
    assert (member / "private" / "desk" / "state").exists()
    assert ended("remove", "desk", "--home", member, "--yes")[0] == 0
    assert not (member / "private" / "desk").exists()
    assert ended("remove", "desk", "--home", member, "--yes")[0] == ExitCode.NOT_FOUND


def test_rekey_seals_changes_and_unseals(home, key):
    kept(home, 1)
    old, new = {"TACIT_PASSPHRASE": PASSPHRASE}, {"TACIT_NEW_PASSPHRASE": PASSPHRASE}
    code, said = ended("rekey", "--home", home, **new)
    assert code == 0
    assert "desk: sealed with the new passphrase from now on" in said
    assert PASSPHRASE not in said
    assert "Nothing to change" in ended("rekey", "--home", home, **new)[1]
    code, said = ended("rekey", "--home", home, "--unseal", TACIT_PASSPHRASE="another phrase")
    assert code == ExitCode.USAGE
    assert "is not the one it was sealed with" in said
    assert ended("rekey", "--home", home, "--new-private-key-file", key, **old)[0] == 0
    assert loaded(home, file_key()) == 1
    found = ended("rekey", "--home", home, "--private-key-file", key, "--unseal", "--json")[1]
    assert json.loads(found) == {"changed": ["desk"], "sealed": None}
    assert loaded(home) == 1


def test_a_wrong_command_ends_with_its_exit_code(member, tmp_path):
    for words in (("rekey",), ("rekey", "--unseal", "--new-private-key-file", tmp_path / "key")):
        assert ended(*words, "--home", member)[0] == ExitCode.USAGE
    assert "characters" in ended("show", "desk", "--home", member, TACIT_PASSPHRASE="short")[1]
    assert ended("show", "nothing", "--home", member)[0] == ExitCode.NOT_FOUND
    assert ended("show", "../desk", "--home", member)[0] == ExitCode.FAILED
    assert ended("backup", tmp_path / "file", "--job", "nothing", "--home", member)[0] == ExitCode.NOT_FOUND
    (member / "private" / "desk" / "state").write_bytes(b"x")
    assert ended("show", "desk", "--home", member)[0] == ExitCode.FAILED
    (member / "identity" / "identity.json").write_bytes(b"x")
    assert ended("backup", tmp_path / "file", "--home", member)[0] == ExitCode.FAILED
    assert "holds no private state" in ended("list", "--home", tmp_path / "nowhere")[1]


def test_help_imports_nothing_heavy():
    heavy = "('numpy', 'pydantic', 'cryptography', 'rich.table', 'safetensors')"
    program = f"import sys; import edge_client.cli.private; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_show_imports_no_training(member):
    program = (
        "import sys; from edge_client.cli.private import app; "
        "app(['show', 'desk'], standalone_mode=False); "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'grpc') if m in sys.modules])"
    )
    environment = {**os.environ, "TACIT_HOME": str(member)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"
