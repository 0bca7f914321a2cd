"""After a restore, the roster log that a member kept says who was revoked since the backup."""

import hashlib

import pytest

from coordinator.storage import chain, records, roster
from coordinator.storage.certificates import keep_first, served
from coordinator.storage.import_log import BroughtBack, LogContradicts, bring_back
from coordinator.storage.models import MemberRow, RestoredMemberRow
from secure_agg.transparency import Tree
from tacit.identity import Role
from tacit.roster import Entry, Kind
from tests.support.databases import empty_database

BACKUP = 10**12
NOW = BACKUP + 20_000
EXPIRES = BACKUP + 10**10


def sha256(text):
    return hashlib.sha256(text.encode()).digest()


def entry(name, number=1, kind=Kind.ISSUED, *, key_of=None, at=BACKUP + 5000):
    """The entry for the certificate `name number`. The key is one and the same unless `key_of` names another."""
    return Entry(sha256(f"{name} {number}"), sha256(key_of or name), name, Role.MEMBER, kind, at)


@pytest.fixture
def database(tmp_path):
    """A database that was restored from a backup in which east, north and south were enrolled."""
    found = empty_database(tmp_path)
    for name in ("east", "north", "south"):
        found.run_now(lambda s: enrolled(s, name))  # noqa: B023  run now
    yield found
    found.close()


def enrolled(s, name, *, number=1, since=BACKUP):
    made = entry(name, number, at=BACKUP - 1000)
    row = MemberRow(name=name, status="enrolled", invited_ms=1, enrolled_ms=BACKUP - 1000)
    row.fingerprint, row.certificate_expires_ms = made.certificate, EXPIRES
    s.add(row)
    s.flush()
    keep_first(s, name, f"{name} {number}".encode(), BACKUP - 1000)
    leaf = roster.append(s, made.certificate, made.key, name, Role.MEMBER, Kind.ISSUED, made.at_ms)
    records.note(s, "member_enrolled", name, BACKUP - 1000, leaf=leaf)
    s.add(RestoredMemberRow(member=name, since_ms=since))


def brought_back(database, *lost):
    """What an import of the log does that goes on with these entries."""
    known = [*database.run_now(lambda s: roster.entries(s, 0)), *lost]
    return database.run_now(lambda s: bring_back(s, known, NOW, by="root"))


def let_in(database, name, number, *, key_of=None, begins=BACKUP + 5000):
    """Whether a member with the certificate `name number` is let in."""
    certificate, key = f"{name} {number}".encode(), sha256(key_of or name)
    given = {"begins_ms": begins, "expires_ms": EXPIRES, "now_ms": NOW + 1000}
    found = database.run_now(lambda s: records.let_in(s, name, certificate, key=key, **given))
    return found is not None and found.admits(hashlib.sha256(certificate).digest(), NOW + 1000)


def status(database, name):
    return database.run_now(lambda s: s.get_one(MemberRow, name).status)


def journal_of(database, name, kind):
    return [e.fields for e in database.run_now(records.journal) if (e.subject, e.kind) == (name, kind)]


def in_step(database):
    """Whether the journal leads to the log's root, as `coordinator audit verify` checks."""
    told = chain.RosterOfJournal()
    for each in database.run_now(records.journal):
        told.take(each)
    return told.root == Tree(each.leaf for each in database.run_now(lambda s: roster.entries(s, 0))).root()


def test_a_member_that_the_log_revokes_is_revoked_and_its_renewed_certificate_is_refused(database):
    renewed, gone = entry("north", 2, Kind.RENEWED), entry("north", 2, Kind.REVOKED)
    kept = entry("south", 2, Kind.RENEWED)
    assert brought_back(database, renewed, gone, kept) == BroughtBack(3, ("north",), 6)
    assert status(database, "north") == "revoked"
    assert database.run_now(lambda s: served(s, "north")) is None
    assert not let_in(database, "north", 1)
    assert not let_in(database, "north", 2)
    (told,) = journal_of(database, "north", "member_revoked")
    # The log has the revocation already.
    assert (told["before"], told["by"], told["leaf"]) == ("enrolled", "root", None)
    assert len(database.run_now(lambda s: roster.entries(s, 0))) == 6
    # The others stay: one renewed, and one did nothing.
    assert let_in(database, "south", 2)
    assert let_in(database, "east", 1)
    # Again, it brings nothing back and revokes nobody.
    assert brought_back(database) == BroughtBack(0, (), 6)


def test_a_revocation_without_a_renewal_counts_too(database):
    assert brought_back(database, entry("north", 1, Kind.REVOKED)) == BroughtBack(1, ("north",), 4)
    assert not let_in(database, "north", 1)


def test_a_member_that_enrolled_anew_since_needs_an_invitation_and_its_old_certificate_is_refused(database):
    """What the backup has of it was revoked, and the coordinator has never seen its new certificate."""
    again = entry("north", 2, key_of="another key")
    assert brought_back(database, entry("north", 1, Kind.REVOKED), again) == BroughtBack(2, ("north",), 6)
    assert not let_in(database, "north", 1)
    assert not let_in(database, "north", 2, key_of="another key")
    # The log says so, because no coordinator serves that certificate any more.
    newest = database.run_now(lambda s: roster.entries(s, 0))[-1]
    assert (newest.name, newest.kind) == ("north", Kind.REVOKED)
    assert in_step(database)


def test_a_second_import_of_the_same_copy_says_that_nothing_is_missing(database):
    """The first one has added an entry of its own to the log."""
    base = database.run_now(lambda s: roster.entries(s, 0))
    known = [*base, entry("north", 1, Kind.REVOKED), entry("north", 2, key_of="another key")]
    for added, revoked in ((2, ("north",)), (0, ())):
        done = database.run_now(lambda s: bring_back(s, known, NOW))
        assert done == BroughtBack(added, revoked, 6)
    other = [*base[:2], entry("west")]
    with pytest.raises(LogContradicts, match="of 6 entries, is not the beginning of that one, of 3"):
        database.run_now(lambda s: bring_back(s, other, NOW))


def test_an_old_copy_revokes_nobody_who_enrolled_since(database):
    for kind in (Kind.ISSUED, Kind.REVOKED):
        given = (sha256("west 1"), sha256("west"), "west", Role.MEMBER, kind, BACKUP)
        database.run_now(lambda s: roster.append(s, *given))  # noqa: B023  run now
    old = database.run_now(lambda s: roster.entries(s, 0))
    database.run_now(lambda s: enrolled(s, "west", number=2))
    assert database.run_now(lambda s: bring_back(s, old, NOW)) == BroughtBack(0, (), 6)
    assert status(database, "west") == "enrolled"


def test_journal_and_log_stay_in_step(database):
    brought_back(database, entry("north", 2, Kind.RENEWED), entry("north", 2, Kind.REVOKED))
    assert in_step(database)


@pytest.mark.parametrize(
    ("number", "key_of", "adopted"),
    [
        (2, "first key", False),
        (3, "first key", False),
        (4, "second key", False),
        (5, "third key", True),
        (6, "second key", True),
    ],
    ids=[
        "a certificate that the log revokes",
        "a certificate that the log has not, with a key that it revokes",
        "a revoked certificate whose key came back",
        "a certificate and a key that the log has not",
        "a certificate that the log has not, with a key that stands",
    ],
)
def test_no_certificate_is_adopted_that_the_log_revokes(database, number, key_of, adopted):
    """North was revoked and invited again minutes before the backup."""
    first, second = entry("west", 2, key_of="first key"), entry("west", 4, key_of="second key")
    for each, kind in ((first, Kind.ISSUED), (second, Kind.RENEWED), (second, Kind.REVOKED)):
        given = (each.certificate, each.key, "west", Role.MEMBER, kind, BACKUP - 2000)
        database.run_now(lambda s: roster.append(s, *given))  # noqa: B023  run now
    database.run_now(lambda s: enrolled(s, "west", number=7))
    stands = entry("west", 8, key_of="second key")
    given = (stands.certificate, stands.key, "west", Role.MEMBER, Kind.RENEWED, BACKUP - 900)
    database.run_now(lambda s: roster.append(s, *given))
    assert let_in(database, "west", number, key_of=key_of, begins=BACKUP - 2000) == adopted
