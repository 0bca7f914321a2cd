"""What a member must not forget, across processes.

Processes that are killed are forked by a light interpreter of its own: this one may have threads.
"""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from edge_client.journal import Journal, JournalUnusable
from tacit.attempt import AttemptId

FEDERATION, OTHER = bytes(32), bytes([1]) * 32
DOCUMENT = bytes([4]) * 32
V1, V2 = bytes([2]) * 32, bytes([3]) * 32
ROOT = Path(__file__).resolve().parents[3]

_KILLED = """
import functools, json, os, shutil, signal, sqlite3, sys
from pathlib import Path
from edge_client.journal import Journal

before, work = Path(sys.argv[1]), Path(sys.argv[2])

class Dying(sqlite3.Connection):
    left = 0

    def execute(self, *statement):
        if Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        Dying.left -= 1
        return super().execute(*statement)

killed, number = [], 0
while True:
    home = work / str(number)
    shutil.copytree(before, home)
    child = os.fork()
    if child == 0:
        Dying.left = number
        sqlite3.connect = functools.partial(sqlite3.connect, factory=Dying)
        Journal(home / "journal.db", bytes(32)).close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed.append(str(home))
    number += 1
print(json.dumps(killed))
"""


def test_a_new_process_knows_the_highest_attempt_and_what_was_sent(tmp_path):
    path = tmp_path / "journal.db"
    journal = Journal(path, FEDERATION)
    journal.joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    journal.opened(AttemptId("a", 1, 1))
    journal.joined(AttemptId("a", 2, 2), V2, DOCUMENT)
    journal.joined(AttemptId("a", 2, 5), V2, DOCUMENT)
    journal.opened(AttemptId("a", 2, 5))
    journal.ended(AttemptId("a", 2, 5), "published", bytes(32))
    journal.joined(AttemptId("b", 7, 9), V1, DOCUMENT)
    # No close: the process was killed.
    memory = Journal(path, FEDERATION).memory()
    assert memory.highest == {"a": (2, 5), "b": (7, 9)}
    assert [(str(sent.attempt), sent.version) for sent in memory.sent] == [("a/1.1", V1), ("a/2.5", V2)]
    # By round or by version: a new name for one of the two makes no new update of it.
    assert [str(sent.attempt) for sent in memory.sent_for("a", 1, V2)] == ["a/1.1", "a/2.5"]
    assert memory.sent_for("b", 7, V1) == ()


def test_an_attempt_is_joined_once_for_ever(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION).joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    with pytest.raises(sqlite3.IntegrityError):
        Journal(path, FEDERATION).joined(AttemptId("a", 1, 1), V1, DOCUMENT)


def test_federations_do_not_mix(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION).joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    assert Journal(path, OTHER).memory().highest == {}


def test_it_remembers_what_was_staged_with_a_vector_that_was_confirmed(tmp_path):
    path = tmp_path / "journal.db"
    journal = Journal(path, FEDERATION)
    for number in (1, 2):
        journal.joined(AttemptId("a", 1, number), V1, DOCUMENT)
        journal.opened(AttemptId("a", 1, number))
    journal.signed(AttemptId("a", 1, 2), ["north"], "1-0123456789abcdef")
    journal.close()
    again = Journal(path, FEDERATION).memory().sent
    assert [(each.survivors, each.staged) for each in again] == [
        (None, None),
        (frozenset({"north"}), "1-0123456789abcdef"),
    ]


def old_journal(path, *, staged=False, version=1):
    """As the first schema left it, with a vector of V1 that was sent; staged: its later column is there."""
    journal = Journal(path, FEDERATION)
    journal.joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    journal.opened(AttemptId("a", 1, 1))
    journal.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        if not staged:
            connection.execute("ALTER TABLE attempts DROP COLUMN staged")
        connection.execute(f"PRAGMA user_version = {version}")


def assert_serves(path):
    """It has what was sent, takes what this software writes, and says that it is of the present schema."""
    with closing(Journal(path, FEDERATION)) as journal:
        assert [str(sent.attempt) for sent in journal.memory().sent] == ["a/1.1"]
        journal.signed(AttemptId("a", 1, 1), ["north"], "1-ab")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT staged FROM attempts").fetchall() == [("1-ab",)]


# Older software wrote table and version, and later column and version, in two steps each, and may have died between.
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("staged", [False, True], ids=["without its column", "with its column"])
def test_a_journal_of_the_first_schema_is_brought_up_wherever_it_was_left(tmp_path, version, staged):
    path = tmp_path / "journal.db"
    old_journal(path, staged=staged, version=version)
    assert_serves(path)


@pytest.mark.parametrize("start", ["old", "new"])
def test_a_process_killed_at_any_statement_of_its_start_leaves_a_journal_that_serves(tmp_path, start):
    before = tmp_path / "before"
    before.mkdir()
    if start == "old":
        old_journal(before / "journal.db")
    said = subprocess.run(
        [sys.executable, "-c", _KILLED, before, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    killed = json.loads(said.stdout)
    # Before the first statement, and between any two.
    assert len(killed) >= 5
    for home in killed:
        path = Path(home) / "journal.db"
        if start == "old":
            # All of it or nothing: so says the file itself, before anything repairs it.
            with closing(sqlite3.connect(path)) as connection:
                columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(attempts)")]
                assert connection.execute("PRAGMA user_version").fetchone() == (1 + ("staged" in columns),)
            assert_serves(path)
        else:
            with closing(Journal(path, FEDERATION)) as journal:
                assert journal.memory().highest == {}


def test_a_journal_of_newer_software_is_left_alone(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="newer software"):
        Journal(path, FEDERATION)


def test_only_the_owner_may_read_it(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("state", ["no folder", "no database"])
def test_a_file_that_cannot_be_used_is_told_in_a_sentence_and_left_alone(tmp_path, state):
    path = tmp_path / "home" / "journal.db"
    if state == "no database":
        path.parent.mkdir()
        path.write_bytes(b"something else " * 100)
    with pytest.raises(JournalUnusable, match="free space and the rights of"):
        Journal(path, FEDERATION)
    if state == "no database":
        assert path.read_bytes() == b"something else " * 100
