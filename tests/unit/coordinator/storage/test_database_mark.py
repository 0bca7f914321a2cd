"""Which database a coordinator's folder belongs to."""

import sqlite3

import pytest

from coordinator.storage import mark, open_database, records
from coordinator.storage.database import words_of
from coordinator.storage.errors import DatabaseUnexpected, DatabaseUnusable
from coordinator.storage.snapshot import of_database

ANOTHER = "postgresql+psycopg://tacit:hidden-word@elsewhere/tacit"


@pytest.fixture
def marked(database_url, tmp_path):
    """A database with a journal, and the folder's mark of it."""
    database = open_database(database_url)
    newest = database.run_now(lambda s: mark.begin(s, 1))
    mark.keep(tmp_path / "database.json", database_url, newest)
    database.close()
    return tmp_path / "database.json"


def note(url, *subjects):
    database = open_database(url)
    for subject in subjects:
        database.run_now(lambda s, subject=subject: records.note(s, "test", subject, 2))
    head = database.run_now(records.head)
    database.close()
    return head


def test_the_same_database_passes_and_so_does_an_older_mark(marked, database_url):
    mark.check(marked, database_url)
    mark.keep(marked, database_url, note(database_url, "one"))
    note(database_url, "two", "three")
    mark.check(marked, database_url)
    assert marked.stat().st_mode & 0o777 == 0o600


def test_without_a_mark_any_database_passes(tmp_path):
    mark.check(tmp_path / "database.json", f"sqlite:///{tmp_path / 'none.db'}")
    assert list(tmp_path.iterdir()) == []


def test_another_place_is_refused_with_the_variable_to_set(marked, tmp_path):
    other = f"sqlite:///{tmp_path / 'other.db'}"
    note(other, "somebody", "else")
    for look in (mark.check, mark.check_place):
        with pytest.raises(DatabaseUnexpected, match=r"other\.db; set TACIT_DATABASE_URL as the service has it"):
            look(marked, other)


def test_a_missing_database_file_is_not_created(marked, tmp_path, database_url, sqlite_only):
    (tmp_path / "tacit.db").unlink()
    with pytest.raises(DatabaseUnexpected, match=r"is not there.* restore a backup.*--new-database"):
        mark.check(marked, database_url)
    assert not (tmp_path / "tacit.db").exists()
    sqlite3.connect(tmp_path / "tacit.db").close()
    with pytest.raises(DatabaseUnexpected, match="is empty"):
        mark.check(marked, database_url)
    open_database(database_url).close()
    with pytest.raises(DatabaseUnexpected, match="is empty"):
        mark.check(marked, database_url)
    # A database to restore into may be empty.
    mark.check_place(marked, database_url)


def test_an_older_state_or_another_history_is_refused(marked, database_url):
    head = note(database_url, "one")
    mark.keep(marked, database_url, records.Head(head.id + 1, bytes(32)))
    with pytest.raises(DatabaseUnexpected, match="an older copy"):
        mark.check(marked, database_url)
    mark.keep(marked, database_url, records.Head(head.id, bytes(32)))
    with pytest.raises(DatabaseUnexpected, match="is another one"):
        mark.check(marked, database_url)


def test_two_new_databases_are_never_the_same(tmp_path):
    heads = set()
    for number in range(2):
        database = open_database(f"sqlite:///{tmp_path / f'{number}.db'}")
        heads.add(database.run_now(lambda s: mark.begin(s, 1)))
        # A journal with an entry gets no other first one.
        assert database.run_now(lambda s: mark.begin(s, 2)).id == 1
        database.close()
    assert len(heads) == 2


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("sqlite:////data/tacit.db", "sqlite:////data/tacit.db"),
        (ANOTHER, "postgresql://elsewhere/tacit"),
        ("postgres://elsewhere:5433/tacit?sslmode=require", "postgresql://elsewhere:5433/tacit"),
        ("postgresql:///tacit?host=/run/pg&password=hidden-word", "postgresql:///tacit?host=/run/pg"),
    ],
    ids=["sqlite", "driver", "port", "socket"],
)
def test_a_place_has_one_spelling_and_never_a_password(url, place):
    assert mark.place(url) == place


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"schema":1}'], ids=["empty", "nothing", "half"])
def test_a_damaged_mark_is_refused_in_a_sentence(marked, database_url, damage):
    marked.write_bytes(damage)
    with pytest.raises(DatabaseUnusable, match="--new-database"):
        mark.check(marked, database_url)


def test_a_server_that_does_not_answer_is_a_readable_error():
    for opening in (lambda: open_database("postgresql+psycopg://tacit@127.0.0.1:1/tacit"), _read_away):
        with pytest.raises(DatabaseUnusable, match=r"refused\. Is the server running .*connections\?; check the URL"):
            opening()


def _read_away():
    with of_database("postgresql+psycopg://tacit@127.0.0.1:1/tacit"):
        pass


def test_the_words_of_a_driver_fit_on_one_line():
    from sqlalchemy.exc import OperationalError

    said = OperationalError("SELECT", {}, Exception("first\n\tSecond?\nthird:\n fourth"))
    assert words_of(said) == "first. Second? third: fourth"
