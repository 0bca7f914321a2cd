"""What a member must not forget, across processes."""

import sqlite3

import pytest

from edge_client.journal import Journal, JournalUnusable
from tacit.attempt import AttemptId

FEDERATION, OTHER = bytes(32), bytes([1]) * 32
DOCUMENT = bytes([4]) * 32
V1, V2 = bytes([2]) * 32, bytes([3]) * 32


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


def test_a_journal_of_the_first_schema_is_brought_up(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path, FEDERATION).close()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE attempts DROP COLUMN staged")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    journal = Journal(path, FEDERATION)
    journal.joined(AttemptId("a", 1, 1), V1, DOCUMENT)
    journal.signed(AttemptId("a", 1, 1), ["north"], "1-ab")
    journal.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT staged FROM attempts").fetchall() == [("1-ab",)]
    connection.close()


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
