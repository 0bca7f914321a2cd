"""Marks of examples: they show the same example in two ledgers, and reveal nothing without the key."""

import hmac
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_client.ledger.ledger import Ledger, LedgerDamaged, LedgerMissing, ledger_path
from edge_client.ledger.overlap import marks_key, marks_of
from edge_client.ledger.verification import verify
from learning.accounting.spend import Limit

LIMIT = Limit(4.0, 1e-5)


def opened(home, name: str) -> Ledger:
    return Ledger.open(ledger_path(home, name), name, LIMIT)


def test_overlap_of_two_ledgers_is_counted(tmp_path):
    key = marks_key(tmp_path / "ledgers")
    with opened(tmp_path, "one") as one, opened(tmp_path, "two") as two:
        assert one.overlap([two.path]) == {"two": 0}
        assert one.data_seen(marks_of(key, ["a", "b", "c", "c"])) == 3
        assert two.data_seen(marks_of(key, ["c", "d", "a"])) == 3
        assert one.overlap([one.path, two.path]) == {"two": 2}
        assert two.overlap([one.path]) == {"one": 2}


def test_only_new_data_adds_a_record(tmp_path):
    key = marks_key(tmp_path / "ledgers")
    with opened(tmp_path, "one") as ledger:
        ledger.data_seen(marks_of(key, ["a", "b"]))
        sequence = ledger.sequence
        assert ledger.data_seen(marks_of(key, ["b", "a"])) == 0
        assert ledger.sequence == sequence
        assert ledger.data_seen(marks_of(key, ["b", "a", "c"])) == 1
        assert ledger.sequence == sequence + 1
    assert verify(ledger_path(tmp_path, "one")).sound


def test_marks_under_another_key_cannot_be_compared(tmp_path):
    with opened(tmp_path / "here", "one") as one, opened(tmp_path / "there", "two") as two:
        one.data_seen(marks_of(marks_key(tmp_path / "here" / "ledgers"), ["a"]))
        two.data_seen(marks_of(marks_key(tmp_path / "there" / "ledgers"), ["a"]))
        assert one.overlap([two.path]) == {"two": None}


def test_first_calls_at_once_have_one_key(tmp_path):
    """Two data sets of a home may start together; with keys of their own, their examples could never be compared."""
    threads = 8
    start = threading.Barrier(threads)

    def key_of(folder: Path) -> bytes:
        start.wait()
        return marks_key(folder)

    with ThreadPoolExecutor(threads) as pool:
        for attempt in range(20):
            folder = tmp_path / str(attempt)
            assert len(set(pool.map(key_of, [folder] * threads))) == 1


def test_a_mark_is_computed_as_documented(tmp_path):
    key = marks_key(tmp_path)
    assert key == marks_key(tmp_path)
    assert len(key) == 32
    assert (tmp_path / "marks.key").stat().st_mode & 0o777 == 0o600
    (mark,) = marks_of(key, ["Grüße"]).values
    whole = hmac.new(key, "Grüße".encode(), "sha256").digest()[:8]
    assert mark.to_bytes(8, "big", signed=True) == whole[:7] + bytes([whole[7] & 0xFE])
    ((with_person, same),) = marks_of(key, ["Grüße"], [b"ann"]).of_persons
    framed = b"\xfe" + (3).to_bytes(8, "big") + b"ann" + "Grüße".encode()
    whole = hmac.new(key, framed, "sha256").digest()[:8]
    assert with_person.to_bytes(8, "big", signed=True) == whole[:7] + bytes([whole[7] | 1])
    assert same == mark
    assert marks_of(bytes(32), ["Grüße"]).values != {mark}
    assert "Gr" not in repr(marks_of(key, ["Grüße"]))
    assert str(mark) not in repr(marks_of(key, ["Grüße"]))
    (tmp_path / "marks.key").write_bytes(b"short")
    with pytest.raises(LedgerDamaged, match=r"marks\.key is damaged"):
        marks_key(tmp_path)


def test_marks_that_were_changed_are_named(tmp_path):
    with opened(tmp_path, "one") as ledger:
        ledger.data_seen(marks_of(bytes(32), ["a", "b", "c"]))
    path = ledger_path(tmp_path, "one")
    for statement in ("DELETE FROM marks WHERE mark = (SELECT MIN(mark) FROM marks)", "INSERT INTO marks VALUES (1)"):
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()
        assert [problem.where for problem in verify(path).problems] == ["marks"]


def test_a_missing_ledger_raises(tmp_path):
    with opened(tmp_path, "one") as ledger, pytest.raises(LedgerMissing):
        ledger.overlap([ledger_path(tmp_path, "two")])


def test_a_hundred_thousand_examples_take_a_moment(tmp_path):
    texts = [f"example {number}" for number in range(100_000)]
    started = time.process_time()
    marks = marks_of(bytes(32), texts)
    with opened(tmp_path, "one") as one, opened(tmp_path, "two") as two:
        assert one.data_seen(marks) == 100_000
        assert two.data_seen(marks_of(bytes(32), texts[50_000:])) == 50_000
        assert one.data_seen(marks) == 0
        assert one.overlap([two.path]) == {"two": 50_000}
    # About 1.5 s on one core of this machine; a quadratic algorithm would take hours.
    assert time.process_time() - started < 15
