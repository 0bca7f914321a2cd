"""What a member must not forget, across processes."""

import sqlite3

import pytest

from edge_client.journal import Journal
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
