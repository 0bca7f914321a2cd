"""The database: one writer, whole transactions, and migrations that agree with the models."""

import asyncio
import math
import re
import sqlite3
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from coordinator.storage import chain, open_blobs, records
from coordinator.storage.database import open_database
from coordinator.storage.errors import DatabaseTooNew, DatabaseUnusable, StoreUnusable
from coordinator.storage.journal import pages
from coordinator.storage.models import Base, JobRow, JournalRow
from tests.support.next_schema import NEXT, with_next_schema
from tests.support.small_disk import SmallDisk, needs_small_disks
from tests.support.stored_job import fill


def note(number: int):
    return lambda s: records.note(s, "test", "subject", number, number=number)


def numbers(database) -> list[int]:
    return [entry.at_ms for entry in database.run_now(lambda s: records.journal(s, limit=100_000))]


def test_work_is_committed_before_run_returns(database, database_url):
    async def scenario() -> None:
        await database.run(note(1))
        engine = create_engine(database_url)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM journal")) == 1
        engine.dispose()

    asyncio.run(scenario())


def test_a_failed_call_leaves_nothing(database):
    def half(s):
        records.note(s, "test", "subject", 1)
        s.flush()
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        database.run_now(half)
    assert numbers(database) == []


def test_calls_run_in_the_order_they_were_made(database):
    async def scenario() -> None:
        await asyncio.gather(*(database.run(note(number)) for number in range(200)))

    asyncio.run(scenario())
    assert numbers(database) == list(range(200))


def test_only_one_thread_ever_touches_the_database(database):
    seen = set()

    def look(s):
        seen.add(threading.get_ident())

    threads = [threading.Thread(target=database.run_now, args=(look,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1
    assert seen.isdisjoint({threading.get_ident()})


def test_a_cancelled_caller_does_not_tear_its_work_apart(database):
    begun, go_on = threading.Event(), threading.Event()

    def slow(s):
        records.note(s, "test", "subject", 1)
        s.flush()
        begun.set()
        assert go_on.wait(10)
        records.note(s, "test", "subject", 2)

    async def scenario() -> None:
        task = asyncio.create_task(database.run(slow))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(scenario())
    assert numbers(database) == [1, 2]


def test_the_event_loop_runs_while_the_database_works(database):
    release = threading.Event()

    async def scenario() -> None:
        task = asyncio.create_task(database.run(lambda s: release.wait(10)))
        # Only a loop that is not blocked gets here.
        release.set()
        assert await task

    asyncio.run(scenario())


def test_a_closed_database_says_so(database_url):
    database = open_database(database_url)
    database.close()
    with pytest.raises(DatabaseUnusable, match="is closed"):
        database.run_now(note(1))


def test_sqlite_is_set_up_to_survive_a_power_cut(database, sqlite_only):
    def pragmas(s):
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return {name: s.scalar(text(f"PRAGMA {name}")) for name in names}

    found = database.run_now(pragmas)
    assert found["journal_mode"] == "wal"
    assert found["synchronous"] == 2  # FULL
    assert found["foreign_keys"] == 1
    assert found["busy_timeout"] >= 10_000


def test_a_killed_process_loses_nothing_that_was_committed(tmp_path, sqlite_only):
    url = f"sqlite:///{tmp_path / 'tacit.db'}"
    script = """
        import os, signal, sys
        from coordinator.storage import open_database, records
        database = open_database(sys.argv[1])
        for number in range(1, 10_000):
            database.run_now(lambda s: records.note(s, "test", "subject", number))
            print(number, flush=True)
            if number == 50:
                def half(s):
                    records.note(s, "test", "subject", 51)
                    s.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                database.run_now(half)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -9, done.stderr
    database = open_database(url)
    assert numbers(database) == list(range(1, 51))
    assert done.stdout.split()[-1] == "50"
    database.close()


def test_a_second_process_waits_its_turn(tmp_path, sqlite_only):
    path = tmp_path / "tacit.db"
    database = open_database(f"sqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, lambda: other.execute("COMMIT")).start()
    database.run_now(note(1))
    assert numbers(database) == [1]
    database.close()


# ---- the schema ------------------------------------------------------------------------------------------------


def test_models_and_migrations_agree(database_url):
    open_database(database_url).close()
    engine = create_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_migrations_and_models_have_the_same_checks_and_indexes(database_url, another_url):
    # compare_metadata compares neither checks nor partial indexes.
    open_database(database_url).close()
    migrated, direct = create_engine(database_url), create_engine(another_url)
    Base.metadata.create_all(direct)

    def built(engine):
        found = inspect(engine)
        return {
            table: (
                sorted((check["name"], check["sqltext"]) for check in found.get_check_constraints(table)),
                sorted(
                    (index["name"], index["unique"], sorted((k, str(v)) for k, v in index["dialect_options"].items()))
                    for index in found.get_indexes(table)
                ),
            )
            for table in Base.metadata.tables
        }

    assert built(migrated) == built(direct)
    assert sum(len(checks) for checks, _ in built(direct).values()) > 20
    migrated.dispose()
    direct.dispose()


def test_opening_again_changes_nothing(database_url):
    first = open_database(database_url)
    first.run_now(note(1))
    first.close()
    second = open_database(database_url)
    assert numbers(second) == [1]
    second.close()


def test_the_next_schema_keeps_the_content_of_the_database(database_url, tmp_path, monkeypatch):
    first = open_database(database_url)
    fill(first, open_blobs(f"file://{tmp_path / 'store'}"))
    first.close()
    monkeypatch.setattr("coordinator.storage.database.MIGRATIONS", with_next_schema(tmp_path))
    database = open_database(database_url)
    assert schema_of(database) == (NEXT,)
    regions = database.run_now(lambda s: list(s.execute(text("SELECT member, region FROM tokens ORDER BY member"))))
    assert [tuple(row) for row in regions] == [
        (f"desk-{where}", f"of desk-{where}") for where in ("east", "north", "south")
    ]
    job = database.run_now(lambda s: records.load_job(s, "desk"))
    assert (job.version_number, job.round, job.round_open, job.attempt) == (2, 3, True, 3)
    first_round, second, _ = database.run_now(lambda s: records.rounds(s, "desk"))
    assert math.isinf(first_round.attempts[0].training.loss)
    assert [lost.member for lost in second.attempts[0].dropouts] == ["desk-north"]
    assert database.run_now(lambda s: records.enrolled(s, "desk-north")) is not None
    # The journal is intact and takes new entries.
    database.run_now(note(1))
    assert database.run_now(lambda s: chain.verify(pages(s))).entries > 15
    database.run_now(lambda s: records.heard_ledger(s, "desk-north", b"l" * 16, 60))
    database.close()
    # The program without the next migration does not know that schema.
    monkeypatch.undo()
    with pytest.raises(DatabaseTooNew, match=f"{NEXT} by newer software"):
        open_database(database_url)


def schema_of(database):
    return database.run_now(lambda s: MigrationContext.configure(s.connection()).get_current_heads())


# Killed after its first statement, its second, ... and finally not at all.
_KILLED = """
    import os, signal, sys
    from sqlalchemy import event
    from sqlalchemy.engine import Engine
    from coordinator.storage import database

    url, migrations = sys.argv[1:]
    database.MIGRATIONS = migrations

    def work(last):
        done = 0

        def dying(*_):
            nonlocal done
            done += 1
            if done == last:
                os.kill(os.getpid(), signal.SIGKILL)

        event.listen(Engine, "after_cursor_execute", dying)
        database.open_database(url).close()
        os._exit(0)

    last, status = 0, None
    while status != 0:
        last += 1
        child = os.fork()
        if child == 0:
            work(last)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        print(last if status else "done", flush=True)
        if status:
            sys.stdin.readline()
"""


def test_a_migration_killed_at_any_step_can_be_repeated(database_url, tmp_path):
    """After each kill the database is at the first schema, complete, and this program serves from it."""
    first = open_database(database_url)
    fill(first, open_blobs(f"file://{tmp_path / 'store'}"))
    first.close()
    words = [sys.executable, "-c", textwrap.dedent(_KILLED), database_url, with_next_schema(tmp_path)]
    kills = 0
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == "done":
                break
            kills += 1
            database = open_database(database_url)
            assert schema_of(database) == ("0001",)
            assert "region" not in database.run_now(columns_of_tokens)
            assert len(database.run_now(lambda s: s.execute(text("SELECT member FROM tokens")).all())) == 3
            assert database.run_now(lambda s: records.load_job(s, "desk")).version_number == 2
            database.close()
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    assert kills > 5
    with pytest.raises(DatabaseTooNew):
        open_database(database_url)


def columns_of_tokens(s):
    return {column["name"] for column in inspect(s.connection()).get_columns("tokens")}


def test_two_processes_that_start_at_once_migrate_once(database_url):
    opened, barrier = [], threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        opened.append(open_database(database_url))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    for number, database in enumerate(opened):
        database.run_now(note(number))
        database.close()


def test_opening_waits_for_another_process_that_writes_a_new_file(tmp_path):
    """SQLite refuses to switch such a file to WAL at once, whatever its timeout."""
    path = tmp_path / "tacit.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    switching = sqlite3.connect(path)
    switching.execute("PRAGMA busy_timeout = 30000")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        switching.execute("PRAGMA journal_mode = WAL")
    switching.close()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_database, f"sqlite:///{path}")
        with pytest.raises(TimeoutError):
            opening.result(0.2)
        other.execute("COMMIT")
        other.close()
        opening.result(30).close()


def test_a_database_by_newer_software_is_refused_and_left_alone(database_url):
    open_database(database_url).close()
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        connection.execute(text("CREATE TABLE of_the_future (id INTEGER)"))
    with pytest.raises(DatabaseTooNew, match="9999 by newer software"):
        open_database(database_url)
    assert inspect(engine).has_table("of_the_future")
    engine.dispose()


OTHERS_SCHEMAS = {
    "lacks jobs.measured_job": "ALTER TABLE jobs RENAME COLUMN measured_job TO measures_job",
    "lacks withdrawals": "ALTER TABLE withdrawals RENAME TO leavers",
    "needs restored_members.weather": """
        DROP TABLE restored_members;
        CREATE TABLE restored_members (member VARCHAR(63) PRIMARY KEY, since_ms BIGINT, weather INTEGER NOT NULL)
    """,
}


@pytest.mark.parametrize("change", OTHERS_SCHEMAS)
def test_a_schema_of_other_software_under_the_same_number_is_refused(database_url, change):
    open_database(database_url).close()
    engine = create_engine(database_url)
    with engine.begin() as connection:
        for statement in OTHERS_SCHEMAS[change].split(";"):
            connection.execute(text(statement))
    engine.dispose()
    with pytest.raises(DatabaseUnusable, match=f"is at 0001 and {re.escape(change)}.*: other software made it"):
        open_database(database_url)


def test_columns_that_need_no_value_are_left_alone(database_url):
    open_database(database_url).close()
    engine = create_engine(database_url)
    with engine.begin() as connection:
        for column in ("weather INTEGER", "wind INTEGER NOT NULL DEFAULT 1"):
            connection.execute(text(f"ALTER TABLE rounds ADD COLUMN {column}"))
    engine.dispose()
    open_database(database_url).close()


def test_a_failed_migration_leaves_nothing(tmp_path, sqlite_only, monkeypatch):
    from alembic import op

    real = op.create_table

    def failing(name, *columns, **options):
        if name == "versions":
            raise RuntimeError("in the middle")
        return real(name, *columns, **options)

    monkeypatch.setattr(op, "create_table", failing)
    path = tmp_path / "tacit.db"
    with pytest.raises(RuntimeError, match="in the middle"):
        open_database(f"sqlite:///{path}")
    assert sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall() == []


def test_the_journal_cannot_be_rewritten(database):
    database.run_now(note(1))

    def change(s):
        s.scalars(select(JournalRow)).one().kind = "other"

    def remove(s):
        s.delete(s.scalars(select(JournalRow)).one())

    for act in (change, remove):
        # Each driver has its own name for a trigger's refusal.
        with pytest.raises((IntegrityError, DatabaseUnusable, DBAPIError), match="the journal only grows"):
            database.run_now(act)
    assert [entry.kind for entry in database.run_now(records.journal)] == ["test"]


@pytest.mark.parametrize(
    "attack",
    [
        "INSERT OR REPLACE INTO journal SELECT id, at_ms, 'other', subject, fields, hash FROM journal WHERE id = 2",
        "REPLACE INTO journal (rowid, at_ms, kind, subject, fields, hash) "
        "SELECT 2, at_ms, 'other', subject, fields, hash FROM journal WHERE id = 2",
        "REPLACE INTO journal (_rowid_, at_ms, kind, subject, fields, hash) "
        "SELECT 2, at_ms, 'other', subject, fields, hash FROM journal WHERE id = 2",
        "UPDATE OR REPLACE journal SET id = 2 WHERE id = 1",
        "UPDATE OR IGNORE journal SET kind = 'other' WHERE id = 2",
        "INSERT INTO journal SELECT * FROM journal WHERE id = 2 ON CONFLICT (id) DO UPDATE SET kind = 'other'",
        "INSERT INTO journal SELECT -1, at_ms, kind, subject, fields, hash FROM journal WHERE id = 2",
        "INSERT INTO journal SELECT 9, at_ms, kind, subject, fields, hash FROM journal WHERE id = 2",
        "DELETE FROM journal WHERE id = 3",
    ],
    ids=["replace", "rowid", "_rowid_", "update-replace", "update-ignore", "upsert", "before", "gap", "delete"],
)
def test_a_foreign_connection_cannot_rewrite_the_journal(database, tmp_path, sqlite_only, attack):
    """With SQLite's default pragmas a REPLACE removes the row it conflicts with and runs no DELETE trigger."""
    for number in (1, 2, 3):
        database.run_now(note(number))
    foreign = sqlite3.connect(tmp_path / "tacit.db", isolation_level=None)
    assert foreign.execute("PRAGMA recursive_triggers").fetchone() == (0,)
    before = foreign.execute("SELECT * FROM journal ORDER BY id").fetchall()
    with pytest.raises(sqlite3.IntegrityError, match="the journal only grows"):
        foreign.execute(attack)
    assert foreign.execute("SELECT * FROM journal ORDER BY id").fetchall() == before
    foreign.close()
    database.run_now(note(4))


def test_no_upsert_rewrites_the_journal(database):
    """On both databases: PostgreSQL has no REPLACE, and its ON CONFLICT is an update."""
    database.run_now(note(1))
    upsert = "INSERT INTO journal SELECT * FROM journal WHERE id = 1 ON CONFLICT (id) DO UPDATE SET kind = 'other'"
    with pytest.raises((IntegrityError, DatabaseUnusable, DBAPIError), match="the journal only grows"):
        database.run_now(lambda s: s.execute(text(upsert)))
    assert [entry.kind for entry in database.run_now(records.journal)] == ["test"]


def test_the_journal_has_one_unique_key(database, tmp_path, sqlite_only):
    """A second unique index would be a second way for a REPLACE to remove a row."""
    connection = sqlite3.connect(tmp_path / "tacit.db")
    assert [name for _, name, unique, *_ in connection.execute("PRAGMA index_list(journal)") if unique] == []
    assert (
        "WITHOUT ROWID" not in connection.execute("SELECT sql FROM sqlite_schema WHERE name = 'journal'").fetchone()[0]
    )
    connection.close()


def test_the_schema_refuses_a_digest_of_the_wrong_length(database):
    def write(s):
        s.add(
            JobRow(
                name="a",
                document=b"short",
                rounds_total=1,
                status="running",
                created_ms=0,
                changed_ms=0,
                forgiven_round=0,
            )
        )

    with pytest.raises(IntegrityError):
        database.run_now(write)


# ---- sentences -------------------------------------------------------------------------------------------------


def test_a_wrong_database_url_is_a_sentence():
    with pytest.raises(DatabaseUnusable, match="is not a database URL"):
        open_database("the usual place")


def test_a_missing_folder_is_a_sentence(tmp_path):
    with pytest.raises(DatabaseUnusable, match=r"cannot be opened: unable to open database file"):
        open_database(f"sqlite:///{tmp_path / 'nowhere' / 'tacit.db'}")


def test_another_file_than_a_database_is_a_sentence(tmp_path):
    path = tmp_path / "tacit.db"
    path.write_bytes(b"this is a letter to my bank, not a database" * 100)
    with pytest.raises(DatabaseUnusable, match="file is not a database"):
        open_database(f"sqlite:///{path}")


def test_a_missing_driver_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseUnusable, match="pip install"):
        open_database("postgresql://tacit:secret@localhost/tacit")


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://someone:secret@/nowhere/tacit.db",
        "postgresql://someone:secret@127.0.0.1:1/tacit",
        "postgresql://someone@127.0.0.1:1/tacit?password=secret",
        # No URLs of a database.
        "postgresql://someone:secret@127.0.0.1:port/tacit",
        "postgresql://someone:a/secret@127.0.0.1:port/tacit",
        "postgresql://someone:secret?a@127.0.0.1:port/tacit",
        "postgresql://someone@127.0.0.1:port/tacit?password=secret",
        "postgresql:/someone:secret@127.0.0.1/tacit",
        "someone:secret@127.0.0.1/tacit",
    ],
)
def test_a_password_in_the_url_is_never_shown(url):
    with pytest.raises(DatabaseUnusable, match=r"tacit") as caught:
        open_database(url)
    assert "secret" not in str(caught.value)


# ---- a disk that takes nothing more ------------------------------------------------------------------------------


@needs_small_disks
def test_a_full_disk_is_a_sentence_until_there_is_room(tmp_path):
    seen: list[bool] = []
    disk = SmallDisk(tmp_path / "small", 2**20)
    try:
        database = open_database(
            f"sqlite:///{disk.folder / 'tacit.db'}", observe=lambda _s, failed: seen.append(failed)
        )
        store = open_blobs(f"file://{disk.folder / 'store'}")
        database.run_now(note(1))
        disk.fill()
        with pytest.raises(DatabaseUnusable, match="full; check free space"):
            database.run_now(lambda s: [records.note(s, "test", "x" * 100, number) for number in range(100)])
        with pytest.raises(StoreUnusable, match="No space left on device; check free space"):
            store.put(bytes(100_000))
        # Reading still works.
        assert numbers(database) == [1]
        disk.empty()
        database.run_now(note(2))
        assert store.get(store.put(bytes(100_000))) == bytes(100_000)
        assert numbers(database) == [1, 2]
        assert seen.count(True) == 1
        database.close()
    finally:
        disk.close()


@needs_small_disks
def test_a_read_only_disk_is_a_sentence_at_the_start(tmp_path):
    disk = SmallDisk(tmp_path / "small", 2**20)
    url = f"sqlite:///{disk.folder / 'tacit.db'}"
    try:
        database = open_database(url)
        database.run_now(note(1))
        database.close()
        disk.read_only()
        for sole in (False, True):
            with pytest.raises(DatabaseUnusable, match=r"can be written|cannot be written"):
                open_database(url, sole=sole)
        with pytest.raises(StoreUnusable, match="Read-only file system"):
            open_blobs(f"file://{disk.folder / 'store'}")
        disk.read_only(False)
        database = open_database(url, sole=True)
        assert numbers(database) == [1]
        database.close()
    finally:
        disk.close()
