"""Heads of the roster log: the first one after a takeover, when the clocks of the machines differ; and for anybody.

And how much of the log the witnesses have signed.
"""

import asyncio
import hashlib
import math
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from coordinator.domain.witnessed import Witnessed
from coordinator.metrics import Metrics
from coordinator.services.acts import Acts
from coordinator.services.roster import RosterLog
from coordinator.storage import records, roster
from coordinator.storage.database import open_database
from tacit.identity import Role, Trust
from tacit.roster import MAX_COSIGNATURE_AGE, MAX_SKEW, Cosignature, Kind
from tacit.roster_wire import cosignature_to_pb
from tests.support.clock import Clock
from tests.support.databases import migrated

NOW = 1_800_000_000_000
KEY = rsa.generate_private_key(65537, 2048)


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "tacit.db"
    path.write_bytes(migrated())
    found = open_database(f"sqlite:///{path}")
    yield found
    found.close()


def coordinator(database, ahead_ms):
    """A started coordinator's log, on a machine whose clock is ahead by so much, and its clock."""
    clock = [NOW + ahead_ms]
    log = RosterLog(
        database, b"f" * 32, lambda: (KEY, b"certificate"), acts=Acts(), trust=lambda: None, now_ms=lambda: clock[0]
    )
    asyncio.run(log.refresh())
    return log, clock


def journalled(database, at_ms):
    database.run_now(lambda s: records.note(s, "attempt_opened", "desk", at_ms))


def test_a_machine_whose_clock_is_behind_begins_where_the_other_one_was(database):
    first, _ = coordinator(database, 40_000)
    journalled(database, NOW + 40_000)
    before = first.head().head.at_ms
    second, clock = coordinator(database, -20_000)
    # An entry that the takeover itself writes, by the database's clock.
    journalled(database, NOW)
    assert second.head().head.at_ms == before == NOW + 40_000
    # Its own clock goes on from there.
    clock[0] += 200_000
    assert second.head().head.at_ms == clock[0] > before


def test_a_journal_from_the_future_is_not_believed(database):
    """Members refuse a head that is so far ahead of their clocks, whoever signs it."""
    journalled(database, NOW + int(MAX_SKEW.total_seconds() * 1000) + 1)
    with capture_logs() as said:
        log, _ = coordinator(database, 0)
    assert log.head().head.at_ms == NOW
    assert [each["event"] for each in said] == ["clock_behind"]


def test_a_clock_that_was_ahead_at_the_start_and_is_set_back_dates_heads_anew(database):
    journalled(database, NOW + 3_600_000)
    log, clock = coordinator(database, 3_600_000)
    assert log.head().head.at_ms == NOW + 3_600_000
    clock[0] = NOW
    with capture_logs() as said:
        assert log.head().head.at_ms == NOW
        clock[0] += 100_000
        assert log.head().head.at_ms == NOW + 100_000
    assert [each["event"] for each in said] == ["clock_behind"]


def test_an_empty_journal_leaves_the_clock_alone(database):
    assert coordinator(database, 5)[0].head().head.at_ms == NOW + 5


def test_a_flood_asks_the_database_once_a_second(database, monkeypatch):
    asked, clock, run = [], Clock(), database.run

    async def counted(work):
        asked.append(work)
        return await run(work)

    monkeypatch.setattr(database, "run", counted)
    log = RosterLog(
        database, b"f" * 32, lambda: (KEY, b"certificate"), acts=Acts(), trust=lambda: None, clock=lambda: clock.now
    )

    async def flood():
        found = await asyncio.gather(*(log.since(0) for _ in range(50)))
        assert {each.head.size for each in found} == {0}

    async def scenario():
        await flood()
        assert len(asked) == 1
        clock.now += 0.9
        await flood()
        assert len(asked) == 1
        clock.now += 0.2
        await flood()
        assert len(asked) == 2
        # A caller that needs the newest head gets it.
        await log.refresh()
        assert len(asked) == 3

    asyncio.run(scenario())


# ---- what the witnesses have signed ---------------------------------------------------------------------------------

WITNESSES = [Ed25519PrivateKey.generate() for _ in range(2)]
KEYS = [each.public_key().public_bytes_raw() for each in WITNESSES]
FEDERATION = b"f" * 32
AGE_MS = int(MAX_COSIGNATURE_AGE.total_seconds() * 1000)


def sha256(text):
    return hashlib.sha256(text.encode()).digest()


def enter(database, name, number=1, kind=Kind.ISSUED):
    """Adds an entry for the certificate `name number`."""
    given = sha256(f"{name} {number}"), sha256(f"key of {name}"), name, Role.MEMBER, kind, NOW
    database.run_now(lambda s: roster.append(s, *given))


class Watched:
    """A coordinator whose log has witnesses, with a clock; `told` counts what it passed on."""

    def __init__(self, database, witnesses=KEYS):
        self.now, self.told, self.heard, self.acts = NOW, 0, asyncio.Event(), Acts()
        self.metrics = Metrics("test")
        self.log = RosterLog(
            database,
            FEDERATION,
            lambda: (KEY, b"certificate"),
            acts=self.acts,
            trust=lambda: Trust(FEDERATION, ()),
            witnesses=witnesses,
            told=self._told,
            signed=self.metrics.witness_signed,
            now_ms=lambda: self.now,
        )
        self.refresh()

    def signed(self, number):
        """When a witness signed last, as the metrics have it."""
        return self.metrics.value("witness_signed_timestamp_seconds", witness=KEYS[number].hex())

    def _told(self):
        self.told += 1
        self.heard.set()

    def refresh(self):
        asyncio.run(self.log.refresh())

    def signs(self, number, head=None):
        """A witness signs the newest head, or this one."""
        made = Cosignature.by_witness(head or self.log.head().head, WITNESSES[number], self.now)
        asyncio.run(self.log.cosigned(cosignature_to_pb(made)))

    def entry_of(self, certificate, member):
        return asyncio.run(self.log.entry_of(sha256(certificate), member))


def test_a_signature_counts_although_its_witness_went_away_meanwhile(database, monkeypatch):
    """The database keeps it. So it must count here, too, and not only from the next start on."""
    enter(database, "north")
    watched = Watched(database, KEYS[:1])
    storing, go_on, real = asyncio.Event(), threading.Event(), roster.cosigned

    async def run():
        loop = asyncio.get_running_loop()

        def slow(*how):
            loop.call_soon_threadsafe(storing.set)
            assert go_on.wait(20)
            real(*how)

        monkeypatch.setattr(roster, "cosigned", slow)
        made = Cosignature.by_witness(watched.log.head().head, WITNESSES[0], watched.now)
        call = asyncio.create_task(watched.log.cosigned(cosignature_to_pb(made)))
        await storing.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go_on.set()
        await watched.acts.end()

    asyncio.run(run())
    assert watched.log.witnessed() == Witnessed(1, frozenset(), KEYS[0])


def test_a_signature_that_is_played_again_asks_no_database(database, monkeypatch):
    """Members see witnesses' signatures, and anybody may bring one."""
    enter(database, "north")
    watched = Watched(database, KEYS[:1])
    watched.signs(0)
    stored, real = [], roster.cosigned

    def counted(*how):
        stored.append(how)
        real(*how)

    monkeypatch.setattr(roster, "cosigned", counted)
    for _ in range(10):
        watched.signs(0)
    assert not stored
    watched.now += 1
    watched.signs(0)
    assert len(stored) == 1


def test_a_certificate_is_newer_until_every_witness_has_signed_it(database):
    enter(database, "north")
    watched = Watched(database)
    # Nobody has signed: members that pin a witness refuse everything, and others need none.
    assert watched.log.witnessed() == Witnessed()
    watched.signs(0)
    enter(database, "east")
    enter(database, "north", 2, Kind.RENEWED)
    watched.refresh()
    assert watched.log.witnessed() == Witnessed(1, frozenset({"north", "east"}), KEYS[0])
    watched.signs(1)
    # The second witness has signed all three, the first one is behind.
    assert watched.log.witnessed() == Witnessed(1, frozenset({"north", "east"}), KEYS[0])
    assert watched.told == 0
    watched.signs(0)
    assert watched.log.witnessed() == Witnessed(3, frozenset(), min(KEYS))
    assert watched.told == 1
    # Signing the same head again tells nobody anything.
    watched.now += 60_000
    watched.signs(0)
    assert watched.told == 1
    # A revocation is no certificate.
    enter(database, "east", kind=Kind.REVOKED)
    watched.refresh()
    assert watched.log.witnessed() == Witnessed(3, frozenset(), min(KEYS))


def test_a_witness_that_is_silent_for_a_day_counts_no_longer(database):
    enter(database, "north")
    watched = Watched(database)
    watched.signs(0)
    enter(database, "east")
    watched.refresh()
    watched.now += AGE_MS
    assert watched.log.witnessed() == Witnessed(1, frozenset({"east"}), KEYS[0])
    watched.now += 1
    assert watched.log.witnessed() == Witnessed()
    # It comes back, and what it missed is covered at once.
    watched.signs(0)
    assert watched.log.witnessed() == Witnessed(2, frozenset(), KEYS[0])


def test_the_metrics_say_when_each_witness_signed_last_also_after_a_restart(database):
    enter(database, "north")
    first = Watched(database)
    assert [first.signed(0), first.signed(1)] == [0, 0]
    first.signs(0)
    first.now += 90_000
    first.signs(0)
    second = Watched(database, KEYS[:1])
    assert [first.signed(0), second.signed(0)] == [NOW / 1000 + 90] * 2
    assert first.signed(1) == 0
    # No longer in coordinator.toml.
    assert math.isnan(second.signed(1))


def test_a_head_from_before_a_renewal_leaves_that_one_out_whoever_signed_before(database):
    """The first witness, one that all others kept silent before, and one more that is behind the others."""
    for name in ("north", "east"):
        enter(database, name)
    watched = Watched(database)
    before = watched.log.head().head
    enter(database, "north", 2, Kind.RENEWED)
    watched.refresh()
    watched.signs(0, before)
    assert watched.log.witnessed() == Witnessed(2, frozenset({"north"}), KEYS[0])
    watched.signs(0)
    assert watched.log.witnessed() == Witnessed(3, frozenset(), KEYS[0])
    # The minimum falls.
    watched.signs(1, before)
    assert watched.log.witnessed() == Witnessed(2, frozenset({"north"}), KEYS[1])
    # Both are silent for a day, and one comes back with the head that it had fetched.
    watched.now += AGE_MS + 1
    assert watched.log.witnessed() == Witnessed()
    before = watched.log.head().head
    enter(database, "east", 2, Kind.RENEWED)
    enter(database, "south")
    enter(database, "south", kind=Kind.REVOKED)
    watched.refresh()
    watched.signs(0, before)
    # Of south nothing stands that could be seated.
    assert watched.log.witnessed() == Witnessed(3, frozenset({"east"}), KEYS[0])


def test_jobs_hear_of_a_witness_that_came_back_or_counts_no_longer(database):
    enter(database, "north")
    watched = Watched(database)
    watched.signs(0)
    enter(database, "east")
    watched.refresh()
    watched.now += AGE_MS + 1
    assert watched.told == 0
    watched.signs(0)
    assert watched.told == 1

    async def silent():
        enter(database, "east", 2, Kind.RENEWED)
        watched.heard = asyncio.Event()
        # Within 20 ms the day is over.
        watched.now += AGE_MS - 20
        await watched.log.refresh()
        assert watched.log.witnessed().newer == {"east"}
        watched.now += 21
        await asyncio.wait_for(watched.heard.wait(), 30)

    asyncio.run(silent())
    assert watched.told == 2
    assert watched.log.witnessed() == Witnessed()


def test_the_next_coordinator_knows_what_the_witnesses_have_signed(database):
    enter(database, "north")
    watched = Watched(database)
    watched.signs(0)
    enter(database, "east")
    following, without = Watched(database), Watched(database, KEYS[1:])
    assert following.log.witnessed() == Witnessed(1, frozenset({"east"}), KEYS[0])
    # The operator struck out the witness.
    assert without.log.witnessed() == Witnessed()


def test_an_entry_is_found_under_its_holders_name_while_it_stands(database):
    enter(database, "north")
    enter(database, "east")
    enter(database, "north", 2, Kind.RENEWED)
    watched = Watched(database)
    assert watched.entry_of("north 1", "north") == 1
    assert watched.entry_of("north 2", "north") == 3
    assert watched.entry_of("north 3", "north") is None
    assert watched.entry_of("north 2", "east") is None
    enter(database, "north", 2, Kind.REVOKED)
    enter(database, "north", 3)
    watched.refresh()
    # Invited again: what it had before stands no longer.
    assert watched.entry_of("north 1", "north") is watched.entry_of("north 2", "north") is None
    assert watched.entry_of("north 3", "north") == 5
    assert watched.entry_of("east 1", "east") == 2


def test_a_cosignature_takes_the_place_of_an_older_one_and_of_one_that_came_while_the_clock_was_ahead():
    made = Cosignature(b"w" * 32, 3, b"r" * 32, NOW, b"signature")
    skew = int(MAX_SKEW.total_seconds() * 1000)
    assert roster.is_newer(made, 2, NOW + 9 * skew)
    assert roster.is_newer(made, 3, NOW - 1)
    assert not roster.is_newer(made, 3, NOW)
    assert not roster.is_newer(made, 3, NOW + 2 * skew)
    assert roster.is_newer(made, 3, NOW + 2 * skew + 1)
    assert not roster.is_newer(made, 4, NOW + 9 * skew)
