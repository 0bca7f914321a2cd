"""The audit journal's chain: what it notices, on both databases, and that nothing forks it."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from click.testing import Result
from sqlalchemy import text
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from coordinator.cli import audit
from coordinator.storage import chain, records, snapshot
from coordinator.storage.database import Database, open_database
from coordinator.storage.errors import DatabaseUnusable
from coordinator.storage.journal import note_seldom, pages
from tacit.heads import KeptHead
from toolkit.console import CommandFailed

FIELDS: tuple[dict[str, Any], ...] = (
    {"by": "op", "names": ["z", "a"], "none": None, "true": True},
    {"text": 'Ünïcode " \\ \n \U0001f642', "empty": "", "list": []},
    {"accuracy": 0.1, "loss": 1e-300, "big": 2**53 + 1, "whole": 2.0, "negative": -0.0},
    {"b": 1, "a": 2, "B": 3},
)


def noted(database: Database, count: int = len(FIELDS)) -> list[chain.JournalEntry]:
    for number in range(count):
        fields = FIELDS[number % len(FIELDS)]
        database.run_now(
            lambda s, number=number, fields=fields: records.note(s, f"kind_{number}", "north", 1000 + number, **fields)
        )
    return database.run_now(records.journal)


def held(database: Database, *heads: bytes) -> chain.JournalVerdict:
    return database.run_now(lambda s: chain.verify(pages(s), map(KeptHead, heads)))


def behind_the_back(database: Database, *statements: str) -> None:
    """Changes the database as its owner can: with the triggers removed."""

    def act(s: Session) -> None:
        if s.get_bind().dialect.name == "sqlite":
            s.execute(text("DROP TRIGGER journal_only_grows_update"))
            s.execute(text("DROP TRIGGER journal_only_grows_delete"))
        else:
            s.execute(text("DROP TRIGGER journal_only_grows ON journal"))
        for statement in statements:
            s.execute(text(statement))

    database.run_now(act)


def test_the_hash_of_an_entry_never_changes():
    """Heads are noted elsewhere, for years. If this number changes, all of them are worthless."""
    fields: dict[str, Any] = {"by": "ö", "names": ["a"], "loss": 0.1, "none": None}
    first = chain.entry_hash(chain.GENESIS, 1, 1_700_000_000_000, "member_invited", "north", fields)
    assert first.hex() == "9dd1ff1e211e99887d35430bcc880da0704af9dd5001f7f81616fc524600c201"
    assert (
        chain.entry_hash(first, 2, 1_700_000_000_001, "member_revoked", "north", {}).hex()
        == "e69c5821bbf81475e8a5883fe4750214badb2aab21b05cd9cea21890bb5974c3"
    )


def test_the_same_entries_have_the_same_head_on_every_database(database):
    entries = noted(database)
    expected, previous = [], chain.GENESIS
    for number, fields in enumerate(FIELDS):
        previous = chain.entry_hash(previous, number + 1, 1000 + number, f"kind_{number}", "north", fields)
        expected.append(previous)
    assert [entry.hash for entry in entries] == expected
    verdict = held(database, expected[1])
    assert (verdict.entries, verdict.head_id, verdict.head) == (4, 4, expected[3])
    assert verdict.found == {expected[1]: 2}


def test_an_empty_journal_holds(database):
    assert held(database) == chain.JournalVerdict(0, 0, chain.GENESIS)


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("UPDATE journal SET subject = 'south' WHERE id = 2", "entry 2"),
        ("UPDATE journal SET at_ms = at_ms + 1 WHERE id = 2", "entry 2"),
        ("UPDATE journal SET kind = 'other' WHERE id = 2", "entry 2"),
        ('UPDATE journal SET fields = \'{"by":"somebody"}\' WHERE id = 2', "entry 2"),
        ("DELETE FROM journal WHERE id = 2", "entry 3"),
        ("DELETE FROM journal WHERE id = 1", "entry 2"),
        ("UPDATE journal SET id = 9 WHERE id = 2", "entry 3"),
        ("INSERT INTO journal SELECT 5, at_ms, kind, subject, fields, hash FROM journal WHERE id = 4", "entry 5"),
    ],
    ids=["subject", "time", "kind", "fields", "removed", "first-removed", "moved", "put-in"],
)
def test_changes_made_without_the_triggers_are_noticed(database, statement, where):
    noted(database)
    behind_the_back(database, statement)
    with pytest.raises(chain.ChainBroken, match=where):
        held(database)


def test_a_kept_head_reveals_a_cut_off_tail(database):
    entries = noted(database)
    behind_the_back(database, "DELETE FROM journal WHERE id > 2")
    # On its own, the rest is an unbroken chain.
    assert held(database, entries[1].hash).head_id == 2
    with pytest.raises(chain.ChainBroken, match=r"is not in the journal, which ends at entry 2: entries were cut off"):
        held(database, entries[1].hash, entries[3].hash)


def test_a_kept_head_reveals_a_rewritten_journal(database):
    kept = noted(database)[-1].hash
    behind_the_back(database, "DELETE FROM journal")
    for number in range(9):
        database.run_now(lambda s, number=number: records.note(s, "innocent", "north", 1000 + number))
    assert held(database).entries == 9
    with pytest.raises(chain.ChainBroken, match="is not in the journal"):
        held(database, kept)


def test_writers_at_once_do_not_fork_the_chain(database_url):
    """As in several processes: on SQLite they wait for a transaction's end, on PostgreSQL for a lock."""
    opened = [open_database(database_url) for _ in range(3)]
    together = threading.Barrier(len(opened))

    def write(database: Database) -> None:
        together.wait(10)
        for number in range(25):
            database.run_now(lambda s, number=number: [records.note(s, "test", "north", number) for _ in range(2)])

    threads = [threading.Thread(target=write, args=(database,)) for database in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held(opened[0]).entries == 3 * 25 * 2
    for database in opened:
        database.close()


def test_a_number_that_json_cannot_express_is_refused_before_writing(database):
    with pytest.raises(ValueError, match="Out of range"):
        database.run_now(lambda s: records.note(s, "test", "north", 1, loss=float("inf")))
    assert held(database).entries == 0


def test_events_that_anybody_can_cause_are_noted_seldom(database):
    def seldom(now_ms: int, **fields: Any) -> bool:
        return database.run_now(lambda s: note_seldom(s, "refused", "north", now_ms, 1000, same=("why",), **fields))

    assert seldom(5000, why="revoked")
    assert not seldom(5001, why="revoked")
    assert seldom(5002, why="unknown")
    assert not seldom(5999, why="revoked")
    assert seldom(6000, why="revoked")
    # A clock that was set back must not silence it for years.
    assert seldom(100, why="revoked")
    assert held(database).entries == 4


def test_heads_go_to_the_log_with_every_round(database):
    def act(kind: str) -> Callable[[Session], None]:
        return lambda s: records.note(s, kind, "desk", 1)

    with structlog.testing.capture_logs() as logs:
        database.run_now(act("attempt_opened"))
        database.run_now(act("round_ended"))
        with pytest.raises(ZeroDivisionError):
            database.run_now(lambda s: (act("round_ended")(s), 1 / 0))
    last = database.run_now(records.journal)[-1]
    assert [(line["event"], line["entry"], line["head"]) for line in logs] == [("journal_head", 2, last.hash.hex())]


def test_an_unserved_database_is_read_at_one_moment(database, database_url, monkeypatch):
    # The journal takes more than two reads.
    monkeypatch.setattr(snapshot, "_AT_ONCE", 40)
    entries = noted(database, 100)
    with snapshot.of_database(database_url) as connection:
        read = list(snapshot.journal(connection))
        # Written after that moment.
        database.run_now(lambda s: records.note(s, "later", "north", 1))
        assert [entry.id for entry in snapshot.journal(connection)] == [entry.id for entry in read]
    assert len(read) == 100
    assert read[: len(entries)] == entries
    assert chain.verify(read).head_id == 100


def test_a_database_of_another_program_is_a_sentence(tmp_path):
    (tmp_path / "empty.db").touch()
    with snapshot.of_database(f"sqlite:///{tmp_path}/empty.db") as connection:
        assert snapshot.revision_of(connection) is None
        with pytest.raises(DatabaseUnusable, match="no journal"):
            list(snapshot.journal(connection))
    with (
        pytest.raises(DatabaseUnusable, match="cannot be read: unable to open"),
        snapshot.of_database(f"sqlite:///{tmp_path}/nowhere.db"),
    ):
        pass
    assert not (tmp_path / "nowhere.db").exists()


def test_the_canonical_form_is_json_in_ascii():
    form = chain.canonical_fields({"b": "ö", "a": [1, None]})
    assert form == '{"a":[1,null],"b":"\\u00f6"}'
    assert json.loads(form) == {"b": "ö", "a": [1, None]}


def test_verify_claims_no_more_about_a_cut_tail_than_a_chain_can(database, database_url):
    """The chain of the rest is unbroken. Only a head kept elsewhere shows that entries were cut off."""

    def verify(*options: str) -> Result:
        return CliRunner().invoke(audit.app, ["verify", "--database", database_url, *options])  # type: ignore[return-value]

    noted(database)
    said = "Keep this head elsewhere: "
    (kept,) = (line.removeprefix(said) for line in verify().output.splitlines() if line.startswith(said))
    assert kept.endswith(":4")
    whole = verify("--head", kept)
    assert f"the head {kept[:64]} belongs to entry 4" in whole.output
    assert "does not reveal" not in whole.output
    behind_the_back(database, "DELETE FROM journal WHERE id > 2")
    cut = verify()
    assert cut.exit_code == 0
    assert "2 entries, from the first one" in cut.output
    assert "whether entries after 0 were cut off or rewritten" in cut.output
    assert "none changed, removed or put in" not in cut.output
    for head in (kept, kept[:64]):
        found = verify("--head", head)
        assert isinstance(found.exception, CommandFailed)
        assert f"the head {head} is not in the journal, which ends at entry 2" in str(found.exception)
    assert isinstance(verify("--head", "abc").exception, CommandFailed)


def test_acts_are_what_somebody_changed_or_took_away(database: Database) -> None:
    """Names only entries with an author, on both databases, which read JSON in different ways."""

    def write(s: Session) -> None:
        records.note(s, "operator_act", "desk", 1, by="anna", act="create", document="0" * 64)
        records.note(s, "job_created", "desk", 2)
        records.note(s, "operator_act", "else", 3, by="anna", act="create")
        for exported in (False, True):
            records.note(s, "version_fetched", "desk", 4, by="bert", version="1" * 64, exported=exported)
        records.note(s, "version_withdrawn", "desk", 5, by="", members=1)
        records.note(s, "version_withdrawn", "desk", 6, by="carla", members=1)
        records.note(s, "versions_pruned", "desk", 7, by="machine:root", numbers="1", states=0)
        records.note(s, "operator_act", "desk", 8, by="bert", act="abort")

    database.run_now(write)
    acts = [(each.at_ms, each.by, each.act) for each in database.run_now(lambda s: records.acts(s, "desk"))]
    assert acts == [
        (1, "anna", "create"),
        (4, "bert", "export"),
        (6, "carla", "withdraw"),
        (7, "machine:root", "prune"),
        (8, "bert", "abort"),
    ]
    assert [each.act for each in database.run_now(lambda s: records.acts(s, "desk", last=2))] == ["prune", "abort"]
