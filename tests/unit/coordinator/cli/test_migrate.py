"""`coordinator migrate`: makes the schema while nobody serves, and is refused while somebody does."""

import contextlib
import json

import pytest

from coordinator.storage.database import open_database, scripts
from tests.support.processes import command, succeed
from toolkit.console import ExitCode


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "federation"
    succeed("coordinator", "init", made)
    return made


def test_an_empty_database_gets_the_newest_schema(folder):
    (folder / "tacit.db").unlink()
    # The folder has served from a database that held something.
    lost = command("coordinator", "migrate", "--dir", folder)
    assert (lost.returncode, "is not there" in lost.stderr) == (ExitCode.FAILED, True)
    (folder / "database.json").unlink()
    told = json.loads(succeed("coordinator", "migrate", "--dir", folder, "--json"))
    _, directory = scripts()
    assert told == {"revision": directory.get_current_head()}
    assert (folder / "tacit.db").stat().st_mode & 0o077 == 0


def test_it_is_refused_while_a_coordinator_serves(folder):
    with contextlib.closing(open_database(f"sqlite:///{folder / 'tacit.db'}", sole=True)):
        refused = command("coordinator", "migrate", "--dir", folder)
    assert refused.returncode == ExitCode.REFUSED
    assert command("coordinator", "migrate", "--dir", folder).returncode == 0


def test_a_missing_folder_is_a_sentence(tmp_path):
    done = command("coordinator", "migrate", "--dir", tmp_path / "none")
    assert (done.returncode, "does not exist" in done.stderr) == (ExitCode.USAGE, True)
