"""Members, invitations, and the token desk over the database."""

import asyncio
import hashlib
import itertools
import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event

from coordinator.domain.tokens import Granted, GrantedBefore, Refused
from coordinator.storage import records as r
from coordinator.storage.database import open_database
from coordinator.storage.members import spend_token
from tacit.token import secret_hash
from tacit.v1 import reason_pb2
from tests.support.token_desk import TokenDeskSuite

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
HOUR_MS = 3_600_000
HASH = secret_hash(b"s" * 32)
KEY, OTHER = b"k" * 32, b"o" * 32
CHAIN = (b"leaf", b"root")


class TestDatabaseTokenDesk(TokenDeskSuite):
    """The suite that every desk passes."""

    @pytest.fixture
    def now(self):
        return NOW

    @pytest.fixture
    def desk(self, database):
        return r.DatabaseTokenDesk(database)

    @pytest.fixture
    def invite(self, database):
        numbers = itertools.count()

        def invite(member, hashed, expires):
            token = f"{next(numbers):024x}"
            database.run_now(lambda s: r.invite(s, member, token, hashed, int(expires.timestamp() * 1000), NOW_MS))
            return token

        return invite


class Steps:
    """One member's enrolment, step by step."""

    def __init__(self, database) -> None:
        self.database = database
        self.desk = r.DatabaseTokenDesk(database)

    def invite(self, id="t1", name="north", at=NOW_MS):
        self.database.run_now(lambda s: r.invite(s, name, id, HASH, at + HOUR_MS, at, by="op"))

    def spend(self, id="t1", key=KEY, at=NOW):
        return asyncio.run(self.desk.spend(id, HASH, key, at))

    def record(self, id="t1", name="north", chain=CHAIN, expires=NOW + timedelta(days=90)):
        return asyncio.run(self.desk.record(id, name, chain, expires, "0.1.0", NOW))

    def join(self, id="t1", name="north", **how):
        self.invite(id, name)
        assert self.spend(id) == Granted(name)
        return self.record(id, name, **how)

    def revoke(self, name="north", at=NOW_MS):
        return self.database.run_now(lambda s: r.revoke_member(s, name, at, by="op"))

    def fingerprint(self, name="north"):
        return self.database.run_now(lambda s: r.enrolled(s, name))

    def member(self, name="north"):
        return self.database.run_now(lambda s: r.member(s, name))

    def members(self):
        return self.database.run_now(r.members)


@pytest.fixture
def steps(database) -> Steps:
    return Steps(database)


def test_a_member_goes_from_invited_to_enrolled(steps):
    steps.invite()
    (member,) = steps.members()
    assert (member.status, member.fingerprint) == (r.MemberStatus.INVITED, None)
    assert member.invitation_expires_ms == NOW_MS + HOUR_MS
    assert steps.fingerprint() is None
    steps.spend()
    assert steps.fingerprint() is None
    assert steps.record() == CHAIN
    assert steps.fingerprint() == hashlib.sha256(b"leaf").digest()
    (member,) = steps.members()
    assert member == steps.member()
    assert (member.status, member.software_version) == (r.MemberStatus.ENROLLED, "0.1.0")
    assert member.certificate_expires_ms == NOW_MS + 90 * 24 * HOUR_MS
    assert (member.invited_ms, member.enrolled_ms, member.revoked_ms) == (NOW_MS, NOW_MS, None)
    assert member.invitation_expires_ms is None


def test_an_unknown_name_is_a_sentence(steps):
    assert steps.fingerprint("nobody") is None
    assert steps.member("nobody") is None
    with pytest.raises(r.NotFound, match="no member named nobody"):
        steps.revoke("nobody")


def test_an_enrolled_name_is_taken(steps):
    steps.join()
    with pytest.raises(r.NameTaken, match="member revoke north"):
        steps.invite("t2")
    assert steps.member().status is r.MemberStatus.ENROLLED
    assert steps.spend("t2") != Granted("north")


def test_a_name_whose_certificate_expired_can_be_invited_again(steps):
    steps.join(expires=NOW + timedelta(hours=1))
    steps.invite("t2", at=NOW_MS + HOUR_MS)
    assert steps.member().status is r.MemberStatus.INVITED
    assert steps.fingerprint() is None
    assert steps.spend("t2", OTHER, NOW + timedelta(hours=1)) == Granted("north")
    steps.record("t2", chain=(b"new leaf", b"root"))
    assert steps.fingerprint() == hashlib.sha256(b"new leaf").digest()


def test_a_second_invitation_replaces_the_first(steps):
    steps.invite("t1")
    steps.invite("t2")
    first = steps.spend("t1")
    assert isinstance(first, Refused)
    assert first.reason == reason_pb2.REASON_TOKEN_UNKNOWN
    assert steps.spend("t2") == Granted("north")


def test_a_token_replaced_while_it_is_redeemed_certifies_nobody(steps):
    steps.invite("t1")
    steps.spend("t1")
    steps.invite("t2")
    with pytest.raises(r.TokenWithdrawn, match="member invite"):
        steps.record("t1")
    assert steps.fingerprint() is None
    assert steps.spend("t2", OTHER) == Granted("north")


# ---- revoking --------------------------------------------------------------------------------------------------


def test_a_revoked_member_is_no_longer_served(steps):
    steps.join()
    member = steps.revoke(at=NOW_MS + 5)
    assert (member.status, member.fingerprint, member.revoked_ms) == (r.MemberStatus.REVOKED, None, NOW_MS + 5)
    assert steps.fingerprint() is None
    # Its own token and key would have got the same certificate again; now they are refused.
    again = steps.spend()
    assert isinstance(again, Refused)
    assert again.reason == reason_pb2.REASON_CLIENT_CERTIFICATE_REVOKED


def test_revoking_withdraws_an_invitation(steps):
    steps.invite()
    steps.revoke()
    assert isinstance(steps.spend(), Refused)
    assert steps.member().invitation_expires_ms is None


def test_revoking_between_redeeming_and_certifying_gives_no_certificate(steps):
    steps.invite()
    assert steps.spend() == Granted("north")
    steps.revoke()
    with pytest.raises(r.TokenWithdrawn):
        steps.record()
    assert steps.fingerprint() is None
    assert steps.member().status is r.MemberStatus.REVOKED


def test_an_old_token_stays_withdrawn_when_the_member_is_invited_again(steps):
    steps.join("t1")
    steps.revoke()
    steps.invite("t2")
    assert steps.member().revoked_ms is None
    old = steps.spend("t1")
    assert isinstance(old, Refused)
    assert old.reason == reason_pb2.REASON_CLIENT_CERTIFICATE_REVOKED
    assert steps.spend("t2", OTHER) == Granted("north")


def test_revoking_twice_is_noted_once(steps):
    steps.join()
    first = steps.revoke(at=NOW_MS + 5)
    assert steps.revoke(at=NOW_MS + 9) == first
    entries = steps.database.run_now(lambda s: r.journal(s, subject="north"))
    assert [entry.kind for entry in entries] == [
        "member_invited",
        "token_redeemed",
        "member_enrolled",
        "member_revoked",
    ]
    assert entries[0].fields["by"] == entries[-1].fields["by"] == "op"


# ---- at once ---------------------------------------------------------------------------------------------------


def test_one_of_many_threads_with_one_token_becomes_the_member(database_url):
    # Opened twice, like two coordinator processes.
    databases = [open_database(database_url), open_database(database_url)]
    Steps(databases[0]).invite()
    barrier = threading.Barrier(16)
    outcomes, won = [], []

    def enrol(number: int) -> None:
        database, key = databases[number % 2], bytes([number]) * 32
        barrier.wait()
        outcome = database.run_now(lambda s: spend_token(s, "t1", HASH, key, NOW))
        outcomes.append(outcome)
        if isinstance(outcome, Granted):
            won.append(key)

    threads = [threading.Thread(target=enrol, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
    assert len(refused) == 15
    assert {outcome.reason for outcome in refused} == {reason_pb2.REASON_TOKEN_USED}
    assert Steps(databases[1]).spend(key=won[0]) == Granted("north")
    for database in databases:
        database.close()


def test_the_same_key_twice_at_once_gets_one_certificate(steps):
    steps.invite()

    async def twice():
        async def enrol(leaf):
            await steps.desk.spend("t1", HASH, KEY, NOW)
            return await steps.desk.record("t1", "north", (leaf, b"root"), NOW, "0.1.0", NOW)

        return await asyncio.gather(enrol(b"one"), enrol(b"two"))

    first, second = asyncio.run(twice())
    assert first == second
    assert steps.spend() == GrantedBefore("north", first)
    assert steps.fingerprint() == hashlib.sha256(first[0]).digest()


def test_a_long_software_version_is_cut(steps):
    steps.invite()
    steps.spend()
    asyncio.run(steps.desk.record("t1", "north", CHAIN, NOW, "v" * 10_000, NOW))
    assert steps.member().software_version == "v" * 64


def test_the_highest_sequence_of_a_ledger_is_kept_for_each_member(database):
    steps = Steps(database)
    for id, name in (("t1", "north"), ("t2", "east")):
        steps.invite(id=id, name=name)

    def heard(name, ledger, sequence):
        return database.run_now(lambda s: r.heard_ledger(s, name, ledger, sequence))

    one, two = b"1" * 16, b"2" * 16
    assert [heard("north", one, number) for number in (5, 9, 4, 9)] == [0, 5, 9, 9]
    # Nobody speaks for another member's ledger, and each ledger of a member counts alone.
    assert heard("east", one, 2**62) == 0
    assert heard("north", two, 1) == 0
    assert heard("north", one, 9) == 9


def test_a_member_has_a_limited_number_of_ledgers_and_keeps_them(database):
    steps = Steps(database)
    for id, name in (("t1", "north"), ("t2", "east")):
        steps.invite(id=id, name=name)

    def heard(name, number, sequence):
        return database.run_now(lambda s: r.heard_ledger(s, name, b"%016d" % number, sequence))

    assert [heard("north", number, 5) for number in range(16)] == [0] * 16
    assert [heard("north", number, 5) for number in (16, 17, 16)] == [None] * 3
    # Its known ledgers still count, and another member has its own limit.
    assert [heard("north", number, 6) for number in range(16)] == [5] * 16
    assert [heard("north", number, 1) for number in range(16)] == [6] * 16
    assert heard("east", 16, 1) == 0


def test_a_ledger_that_has_not_grown_is_not_written(database):
    Steps(database).invite()
    asked, written = [], []

    def executed(_connection, _cursor, statement, *_):
        asked.append(statement)
        if not statement.startswith(("SELECT", "BEGIN")):
            written.append(statement)

    def heard(sequence):
        return database.run_now(lambda s: r.heard_ledger(s, "north", b"1" * 16, sequence))

    event.listen(database._engine, "before_cursor_execute", executed)
    heard(5)
    assert len(written) == 1
    asked.clear()
    assert (heard(5), heard(3)) == (5, 5)
    assert len(written) == 1
    # The member's row is not locked for it either.
    assert not any("FROM members" in statement for statement in asked)
    assert (heard(6), heard(6)) == (5, 6)
    assert len(written) == 2
