"""What the journal asks of the serving process, on both kinds of database."""

from datetime import UTC, datetime, timedelta

from coordinator.domain.jobs import JobStatus
from coordinator.storage import missed as module
from coordinator.storage import records
from coordinator.storage.members import record_certificate, spend_token
from coordinator.storage.missed import Missed, missed
from tacit.token import secret_hash

NOW = datetime(2026, 3, 1, tzinfo=UTC)
MS = int(NOW.timestamp() * 1000)


def enrolled(s, name):
    hashed = secret_hash(name.encode())
    records.invite(s, name, f"t-{name}", hashed, MS + 1, MS)
    spend_token(s, f"t-{name}", hashed, b"k" * 32, NOW)
    record_certificate(s, f"t-{name}", name, (name.encode(),), NOW + timedelta(days=1), "0.1.0", NOW)


def created(s, name):
    records.create_job(s, name=name, document=bytes(32), rounds_total=1, version=bytes(32), now_ms=MS)


def since(database, after=0):
    return database.run_now(lambda s: missed(s, after))


def test_an_empty_journal_asks_for_nothing(database):
    assert since(database) == Missed(0)


def test_what_was_written_is_asked_for_once(database):
    def work(s):
        for name in ("north", "south", "east", "west"):
            enrolled(s, name)
        records.revoke_member(s, "north", MS)
        records.withdraw(s, "south", None, MS)
        created(s, "desk")
        created(s, "over")
        records.set_job_status(s, "over", JobStatus.ABORTED, "job_aborted", MS)

    database.run_now(work)
    newest = database.run_now(records.head).id
    found = since(database)
    assert found == Missed(newest, frozenset({"north"}), frozenset({"south"}), False, frozenset({"desk"}))
    assert since(database, newest) == Missed(newest)
    # An expired certificate lets a name be invited anew.
    expired = MS + int(timedelta(days=2).total_seconds() * 1000)
    database.run_now(lambda s: records.invite(s, "east", "t2", secret_hash(b"again"), expired + 1, expired))
    assert since(database, newest).ended == {"east"}


def test_many_entries_are_looked_at_in_parts(database, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 3)

    def work(s):
        for name in ("north", "south"):
            enrolled(s, name)
            records.revoke_member(s, name, MS)

    database.run_now(work)
    newest, after, ended = database.run_now(records.head).id, 0, []
    assert since(database).entry == 3
    while (found := since(database, after)).entry != after:
        after, ended = found.entry, [*ended, *sorted(found.ended)]
    assert after == newest
    # Those whose part has an invitation or a revocation of them; they are revoked by now.
    assert set(ended) == {"north", "south"}
