"""Tests of what a member must not forget, across processes.

A separate light interpreter forks the processes that are killed, because this one may have threads.
"""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from edge_client.session.journal import Journal, JournalUnusable
from tacit.attempt import AttemptId
from tests.support.places import ROOT

FEDERATION, OTHER = bytes(32), bytes([1]) * 32
DOCUMENT = bytes([4]) * 32
V1, V2 = bytes([2]) * 32, bytes([3]) * 32
UPDATE = bytes([5]) * 32

_KILLED = """
import functools, json, os, shutil, signal, sqlite3, sys
from pathlib import Path
from edge_client.session.journal import Journal

before, work = Path(sys.argv[1]), Path(sys.argv[2])

class Dying(sqlite3.Connection):
    left = 0

    def execute(self, *statement):
        if Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        Dying.left -= 1
        return super().execute(*statement)

    def executescript(self, script):
        # Statement by statement, as sqlite3 does it; a trigger's body has semicolons of its own.
        statement = ""
        for piece in script.split(";")[:-1]:
            statement += piece + ";"
            if sqlite3.complete_statement(statement):
                self.execute(statement)
                statement = ""

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


def test_a_new_process_knows_the_highest_attempt_and_the_vectors(tmp_path):
    path = tmp_path / "journal.db"
    journal = Journal(path, FEDERATION)
    journal.joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    journal.opened(AttemptId("a", 1, 1))
    journal.joined(AttemptId("a", 2, 2), V2, DOCUMENT)
    journal.joined(AttemptId("a", 2, 5), V2, DOCUMENT)
    journal.opened(AttemptId("a", 2, 5))
    journal.ended(AttemptId("a", 2, 5), "published", bytes(32))
    journal.joined(AttemptId("b", 7, 9), V1, DOCUMENT)
    # The journal is not closed, as if the process was killed.
    memory = Journal(path, FEDERATION).memory()
    assert memory.highest == {"a": (2, 5), "b": (7, 9)}
    assert [(str(sent.attempt), sent.version) for sent in memory.sent] == [("a/1.1", V1), ("a/2.5", V2)]
    # A vector counts by its round or by its version. Changing only one of them makes no new update.
    assert [str(sent.attempt) for sent in memory.sent_for("a", 1, V2)] == ["a/1.1", "a/2.5"]
    assert memory.sent_for("b", 7, V1) == ()


def test_an_attempt_is_joined_at_most_once_ever(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION).joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    with pytest.raises(sqlite3.IntegrityError):
        Journal(path, FEDERATION).joined(AttemptId("a", 1, 1), V1, DOCUMENT)


def test_federations_do_not_mix(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION).joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    assert Journal(path, OTHER).memory().highest == {}


def test_it_remembers_the_state_staged_with_a_confirmed_vector(tmp_path):
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


def signed_journal(path):
    """Returns a journal with one sent vector whose U3 is signed."""
    journal = Journal(path, FEDERATION)
    journal.joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    journal.opened(AttemptId("a", 1, 1), UPDATE)
    journal.signed(AttemptId("a", 1, 1), ["north", "south"])
    return journal


def test_a_signed_list_of_survivors_is_never_overwritten(tmp_path):
    journal = signed_journal(tmp_path / "journal.db")
    with pytest.raises(sqlite3.IntegrityError, match="already has this record"):
        journal.signed(AttemptId("a", 1, 1), ["north"])
    with pytest.raises(sqlite3.IntegrityError, match="already has this record"):
        journal.opened(AttemptId("a", 1, 1), bytes(32))
    # The end of the attempt may still be recorded.
    journal.ended(AttemptId("a", 1, 1), "published", bytes(32))
    (sent,) = journal.memory().sent
    assert (sent.survivors, sent.update) == (frozenset({"north", "south"}), UPDATE)


def test_an_attempt_that_was_not_joined_cannot_be_signed(tmp_path):
    journal = Journal(tmp_path / "journal.db", FEDERATION)
    with pytest.raises(sqlite3.IntegrityError, match="already has this record"):
        journal.signed(AttemptId("a", 1, 1), ["north"])


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM attempts",
        "INSERT OR REPLACE INTO attempts SELECT federation, job, round, attempt, version, document, joined_ms, NULL, "
        "NULL, NULL, NULL, NULL, NULL, NULL FROM attempts",
        "UPDATE OR REPLACE attempts SET attempt = attempt + 1",
        "UPDATE attempts SET survivors = NULL",
        "UPDATE attempts SET opened_ms = NULL",
    ],
)
def test_no_other_program_makes_the_journal_forget(tmp_path, statement):
    path = tmp_path / "journal.db"
    signed_journal(path).close()
    with closing(sqlite3.connect(path)) as foreign, pytest.raises(sqlite3.IntegrityError), foreign:
        foreign.execute(statement)
    (sent,) = Journal(path, FEDERATION).memory().sent
    assert sent.survivors == frozenset({"north", "south"})


def test_a_kill_at_any_statement_of_a_start_leaves_a_usable_journal(tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    said = subprocess.run(
        [sys.executable, "-c", _KILLED, before, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    killed = json.loads(said.stdout)
    # The kills came before the first statement and between any two.
    assert len(killed) >= 4
    for home in killed:
        with closing(Journal(Path(home) / "journal.db", FEDERATION)) as journal:
            assert journal.memory().highest == {}


def test_a_journal_of_newer_software_is_left_alone(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="other software"):
        Journal(path, FEDERATION)


def test_only_the_owner_may_read_it(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("state", ["no folder", "no database"])
def test_an_unusable_file_is_an_error_and_stays_unchanged(tmp_path, state):
    path = tmp_path / "home" / "journal.db"
    if state == "no database":
        path.parent.mkdir()
        path.write_bytes(b"something else " * 100)
    with pytest.raises(JournalUnusable, match="free space and the permissions of"):
        Journal(path, FEDERATION)
    if state == "no database":
        assert path.read_bytes() == b"something else " * 100
