"""A member's copy of the roster log: what it accepts, what it refuses, and what it answers."""

import hashlib
import sqlite3
from dataclasses import replace
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.services.credentials import SERVER_NAME
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.roster.book import Contradiction, RosterBook, RosterUnusable
from secure_agg.transparency import Tree
from tacit.authorities import Authorities
from tacit.identity import Role, Trust
from tacit.limits import LAST_MS
from tacit.reason import Reason
from tacit.roster import Cosignature, Entry, Head, HeadInvalid, Kind, SignedHead
from tacit.roster_copy import Copy, CopyInvalid, Split, compare, read_copy, write_copy
from tacit.roster_wire import entry_from_pb, entry_to_pb, head_from_pb, head_to_pb
from tests.support.party import authority, key, present

DER = serialization.Encoding.DER
TRUST = Trust.in_root(authority().certificate)
SERVER = (
    authority()
    .issue(key(1).public_key(), Role.SERVER, SERVER_NAME, host_names=("localhost",), now=present())
    .public_bytes(DER)
)
NOW = present()
MS = int(NOW.timestamp() * 1000)
DAY = 24 * 3600 * 1000


def digest(text):
    return hashlib.sha256(text.encode()).digest()


def entry(name, number=1, kind=Kind.ISSUED, *, key_of=None, at=MS):
    return Entry(digest(f"{name} {number}"), digest(f"key of {key_of or name}"), name, Role.MEMBER, kind, at)


def signed(entries, *, at=MS, size=None, root=None, certificate=SERVER, with_key=1, federation=TRUST.federation):
    size = len(entries) if size is None else size
    head = Head(federation, size, root or Tree(e.leaf for e in entries).root(size), at)
    return SignedHead.made(head, key(with_key), certificate)


@pytest.fixture
def book(tmp_path):
    made = RosterBook(tmp_path / "roster.db", TRUST)
    yield made
    made.close()


def take(book, entries, *, now=NOW, **how):
    head = signed(entries, **how)
    book.take(head, entries, 0, now)
    return head


def roster_of(*entries):
    return {each.name: (each.certificate, each.key) for each in entries}


def check(book, roster, head, policy=None, *, corrupt=1, now=NOW):
    book.check_roster(roster, head, policy or Policy(), max_doubtful=corrupt, own="north", now=now)


LOG = [entry("north"), entry("east"), entry("south")]


def test_heads_that_continue_the_last_one_are_accepted_and_outlive_the_process(book, tmp_path):
    take(book, LOG[:1])
    head = take(book, LOG, at=MS + 1)
    take(book, LOG, at=MS + 2)
    book.check_head(head, NOW)
    again = RosterBook(tmp_path / "roster.db", TRUST)
    assert again.size == 3
    assert [seen.entry for seen in again.entries()] == LOG
    assert again.mark("newest_ms") == MS + 2
    # Two processes of one member: each sees what the other took.
    more = [*LOG, entry("west")]
    again.take(signed(more, at=MS + 3), more[3:], 3, NOW)
    assert book.size == 4
    again.close()


ALTERED = [LOG[0], replace(LOG[1], name="ghost"), LOG[2]]
LIES = {
    "another log of the same size": (signed(ALTERED, at=MS + 9), ALTERED, Reason.REASON_LOG_SPLIT),
    "an altered entry": (signed([*ALTERED, entry("west")], at=MS + 9), [*LOG, entry("west")], Reason.REASON_LOG_SPLIT),
    "another root": (signed([*LOG, entry("west")], root=bytes(32)), [*LOG, entry("west")], Reason.REASON_LOG_SPLIT),
    "a shorter log": (signed(LOG[:2], at=MS + 9), LOG[:2], Reason.REASON_LOG_ROLLED_BACK),
    "a shorter log that was altered": (signed(ALTERED[:2], at=MS + 9), ALTERED[:2], Reason.REASON_LOG_SPLIT),
    "an empty log": (signed([], at=MS + 9), [], Reason.REASON_LOG_ROLLED_BACK),
    "an entry withheld": (signed([*LOG, entry("west")]), LOG, Reason.REASON_LOG_WITHHELD),
    "times that go back": (
        signed([*LOG, entry("west", at=MS - DAY)]),
        [*LOG, entry("west", at=MS - DAY)],
        Reason.REASON_LOG_SPLIT,
    ),
    "a head from the future": (signed(LOG, at=MS + 400_000), LOG, Reason.REASON_LOG_HEAD_INVALID),
    "a signature by another key": (signed(LOG, with_key=2), LOG, Reason.REASON_LOG_HEAD_INVALID),
    "a member that signs as a server": (
        signed(
            LOG,
            certificate=authority().issue(key(1).public_key(), Role.MEMBER, "east", now=present()).public_bytes(DER),
        ),
        LOG,
        Reason.REASON_LOG_HEAD_INVALID,
    ),
    "another authority's server": (
        signed(
            LOG,
            certificate=authority(1)
            .issue(key(1).public_key(), Role.SERVER, SERVER_NAME, host_names=("localhost",), now=present())
            .public_bytes(DER),
        ),
        LOG,
        Reason.REASON_LOG_HEAD_INVALID,
    ),
    "another federation's head": (signed(LOG, federation=bytes(32)), LOG, Reason.REASON_LOG_HEAD_INVALID),
    "a time before the server's certificate": (signed(LOG, at=MS - 2 * DAY), LOG, Reason.REASON_LOG_HEAD_INVALID),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_about_the_log_ends_in_its_reason_and_changes_nothing(book, lie):
    take(book, LOG)
    head, entries, reason = LIES[lie]
    with pytest.raises(PolicyRefusal) as caught:
        book.take(head, entries, 0, NOW)
    assert caught.value.reason == reason
    with pytest.raises(PolicyRefusal) as caught:
        book.check_head(head, NOW)
    assert caught.value.reason == reason
    assert (book.size, [seen.entry for seen in book.entries()]) == (3, LOG)
    proved = reason in (Reason.REASON_LOG_SPLIT, Reason.REASON_LOG_ROLLED_BACK)
    assert book.contradictions() == ([head] if proved else [])
    # The true log goes on.
    take(book, [*LOG, entry("west")], at=MS + 10)


def test_an_attempts_head_may_be_a_little_older_than_the_newest_and_not_out_of_date(book):
    """Two jobs open attempts at once: the second head may overtake the first."""
    early = signed(LOG[:2], at=MS)
    take(book, LOG, at=MS + 5)
    book.check_head(early, NOW)
    with pytest.raises(PolicyRefusal, match="out of date"):
        book.check_head(early, NOW + timedelta(hours=2))


def test_a_roster_is_checked_against_the_log_of_its_head(book):
    head = take(book, LOG)
    check(book, roster_of(*LOG), head)
    for bad in (
        roster_of(*LOG, entry("ghost")),
        {**roster_of(*LOG), "ghost": (LOG[1].certificate, LOG[1].key)},
        {**roster_of(*LOG), "east": (LOG[1].certificate, digest("another key"))},
    ):
        with pytest.raises(PolicyRefusal) as caught:
            check(book, bad, head)
        assert caught.value.reason == Reason.REASON_LOG_CERTIFICATE_UNKNOWN
    # A certificate that was logged after the head is in no roster of that head.
    late = [*LOG, entry("west")]
    newer = take(book, late, at=MS + 1)
    with pytest.raises(PolicyRefusal, match="west"):
        check(book, roster_of(*late), head)
    check(book, roster_of(*late), newer)


def test_a_revoked_certificate_is_refused_and_a_new_invitation_begins_anew(book):
    back = [*LOG, entry("east", kind=Kind.REVOKED)]
    head = take(book, back)
    with pytest.raises(PolicyRefusal, match="east"):
        check(book, roster_of(*LOG), head)
    again = [*back, entry("east", 2)]
    head = take(book, again, at=MS + 1, now=NOW + timedelta(days=1))
    check(book, roster_of(LOG[0], again[-1], LOG[2]), head, now=NOW + timedelta(days=1))
    assert book.since("east", again[-1].key) == MS + DAY


def test_age_is_what_this_member_has_seen_and_survives_renewals(book):
    """The first head's times are the log's; later entries count from their arrival, whatever they say."""
    old = [entry(name, at=MS - 30 * DAY) for name in ("north", "east", "south")]
    head = take(book, old)
    policy = Policy(min_member_age_days=7)
    check(book, roster_of(*old), head, policy)
    # The coordinator claims that two members joined a month ago. This member sees them now.
    both = [entry("ghost", at=MS - 30 * DAY), entry("spectre", at=MS - 30 * DAY)]
    head = take(book, [*old, *both], at=MS + 1)
    check(book, roster_of(*old, both[0]), head, policy)
    with pytest.raises(PolicyRefusal) as caught:
        check(book, roster_of(*old, *both), head, policy)
    assert caught.value.reason == Reason.REASON_POLICY_MEMBER_AGE
    assert "ghost, spectre" in caught.value.detail
    check(book, roster_of(*old, *both), head, policy, now=NOW + timedelta(days=7))
    # A renewal of the same key keeps the age, another key begins anew.
    renewed = [
        *old,
        *both,
        entry("east", 2, Kind.RENEWED, at=MS + 2),
        entry("south", 2, Kind.RENEWED, key_of="x", at=MS + 2),
    ]
    head = take(book, renewed, at=MS + 3)
    check(book, roster_of(old[0], renewed[-2]), head, policy, corrupt=0)
    with pytest.raises(PolicyRefusal, match="south"):
        check(book, roster_of(old[0], renewed[-1]), head, policy, corrupt=0)


def test_what_was_seen_while_the_clock_was_ahead_ages_from_when_it_is_set_back(book, tmp_path):
    old = [entry(name, at=MS - 30 * DAY) for name in ("north", "east", "south")]
    take(book, old)
    policy = Policy(min_member_age_days=7)
    later = [*old, entry("west"), entry("centre")]
    # This member's clock was a year ahead when it saw them.
    head = take(book, later, at=MS + 1, now=NOW + timedelta(days=365))
    with pytest.raises(PolicyRefusal, match="centre, west"):
        check(book, roster_of(*later), head, policy)
    # A second look does not begin anew, nor does another process, nor the day at which the clock was.
    with pytest.raises(PolicyRefusal):
        check(book, roster_of(*later), head, policy, now=NOW + timedelta(days=6))
    again = RosterBook(tmp_path / "roster.db", TRUST)
    for days in (7, 365.5):
        check(again, roster_of(*later), head, policy, now=NOW + timedelta(days=days))
    again.close()


WITNESSES = [Ed25519PrivateKey.generate() for _ in range(3)]
KEYS = [each.public_key().public_bytes_raw() for each in WITNESSES]


def test_witnesses_count_while_they_are_pinned_fresh_and_cover_the_roster(book):
    head = take(book, LOG)
    policy = Policy(witnesses={"one": KEYS[0], "two": KEYS[1]})

    def refused(policy, *, now=NOW, roster=None, head=head):
        refusal = None
        try:
            check(book, roster or roster_of(*LOG), head, policy, now=now)
        except PolicyRefusal as error:
            refusal = error
        return refusal is not None and refusal.reason == Reason.REASON_POLICY_WITNESSES

    assert refused(policy)
    book.take_cosignatures([Cosignature.by_witness(head.head, each, MS) for each in WITNESSES[1:]], KEYS[:2])
    # One of two, and one that nobody pinned.
    assert refused(policy)
    assert not refused(policy.model_copy(update={"min_witnesses": 1}))
    forged = replace(Cosignature.by_witness(head.head, WITNESSES[2], MS), signer=KEYS[0])
    book.take_cosignatures([forged], KEYS[:2])
    assert refused(policy)
    book.take_cosignatures([Cosignature.by_witness(head.head, WITNESSES[0], MS)], KEYS[:2])
    assert not refused(policy)
    # A witness that is pinned no more does not count, although its signature was kept.
    assert refused(Policy(witnesses={"two": KEYS[1]}, min_witnesses=2))
    assert refused(policy, now=NOW + timedelta(days=2))
    late = [*LOG, entry("west")]
    newer = take(book, late, at=MS + 1)
    assert not refused(policy, head=newer)
    assert refused(policy, head=newer, roster=roster_of(*late))
    with pytest.raises(Contradiction, match="signed a roster log"):
        book.take_cosignatures([Cosignature.by_witness(signed(ALTERED).head, WITNESSES[0], MS + 1)], KEYS[:2])


def test_a_signature_made_while_clocks_were_ahead_is_replaced_by_the_next(book):
    head = take(book, LOG)
    policy = Policy(witnesses={"one": KEYS[0]})
    ahead, now, before = (Cosignature.by_witness(head.head, WITNESSES[0], MS + ms) for ms in (300 * DAY, 0, -60_000))
    book.take_cosignatures([ahead], KEYS[:1])
    with pytest.raises(PolicyRefusal):
        check(book, roster_of(*LOG), head, policy)
    book.take_cosignatures([now, before], KEYS[:1])
    check(book, roster_of(*LOG), head, policy)
    assert [each.at_ms for each in book.cosignatures()] == [MS]


def test_members_signatures_count_only_if_the_policy_says_so_and_their_keys_are_old(book):
    made = authority().issue(key(2).public_key(), Role.MEMBER, "east", now=present()).public_bytes(DER)
    public = key(2).public_key().public_bytes(DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    east = Entry(
        hashlib.sha256(made).digest(), hashlib.sha256(public).digest(), "east", Role.MEMBER, Kind.ISSUED, MS - 9 * DAY
    )
    log = [entry("north", at=MS - 9 * DAY), east]
    head = take(book, log)
    book.take_cosignatures([Cosignature.by_member(head.head, key(2), made, MS)], ())
    roster = roster_of(*log)
    check(book, roster, head, Policy(min_witnesses=1, members_witness=True, min_member_age_days=7))
    for policy in (
        Policy(min_witnesses=1),
        Policy(min_witnesses=1, members_witness=True, min_member_age_days=10),
        Policy(min_witnesses=2, members_witness=True),
    ):
        with pytest.raises(PolicyRefusal):
            check(book, roster, head, policy, corrupt=2)


def test_a_copy_that_somebody_wrote_to_does_not_open(book, tmp_path):
    take(book, LOG)
    path = tmp_path / "roster.db"
    with sqlite3.connect(path) as other:
        for table, act in (("entries", "UPDATE entries SET name = 'x'"), ("heads", "DELETE FROM heads")):
            with pytest.raises(sqlite3.IntegrityError, match="only grows"):
                other.execute(act)
            other.execute(f"DROP TRIGGER {table}_keep_{act[:6].lower()}")
        other.execute("UPDATE entries SET name = 'ghost' WHERE id = 2")
    other.close()
    with pytest.raises(RosterUnusable, match="was altered"):
        RosterBook(path, TRUST)
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 100)
    with pytest.raises(RosterUnusable, match="cannot be used"):
        RosterBook(damaged, TRUST)


@pytest.mark.parametrize("at", [LAST_MS + 1, 2**60, 2**63 - 1])
def test_a_time_after_the_year_9999_is_refused_where_it_arrives(book, at):
    """No calendar has it: a member that kept such an entry could never list its members again."""
    message = entry_to_pb(LOG[0])
    message.at_ms = at
    with pytest.raises(HeadInvalid, match="impossible time"):
        entry_from_pb(message)
    shown = head_to_pb(signed(LOG))
    shown.at_ms = at
    with pytest.raises(HeadInvalid, match="impossible size or time"):
        head_from_pb(shown, TRUST.federation)
    # The last date of all is a date, which no server's certificate covers.
    with pytest.raises(PolicyRefusal, match="validity of the server's certificate"):
        book.take(signed(LOG, at=LAST_MS), LOG, 0, NOW)
    assert book.size == 0


@pytest.mark.parametrize("column", ["role = 'operator'", "kind = 'x'", f"at_ms = {2**60}"])
def test_a_copy_with_an_entry_that_no_log_has_does_not_open(book, tmp_path, column):
    take(book, LOG)
    with sqlite3.connect(tmp_path / "roster.db") as other:
        other.execute("DROP TRIGGER entries_keep_update")
        other.execute(f"UPDATE entries SET {column} WHERE id = 2")  # noqa: S608
    other.close()
    with pytest.raises(RosterUnusable, match="was altered"):
        RosterBook(tmp_path / "roster.db", TRUST)


# ---- copies for others -----------------------------------------------------------------------------------------------


def copy_of(what, entries, *, heads=None, contradictions=(), cosignatures=()):
    heads = (signed(entries),) if heads is None else heads
    known = Authorities.first(authority().certificate)
    tree = Tree(e.leaf for e in entries)
    return Copy(what, known, tuple(entries), heads, contradictions, cosignatures, tree)


def written(path, copy):
    write_copy(path, copy)
    return read_copy(path)


def test_a_written_copy_is_read_again_and_proves_itself(tmp_path):
    cosignature = Cosignature.by_witness(signed(LOG).head, WITNESSES[0], MS)
    copy = copy_of("north.log", LOG, contradictions=(signed(ALTERED),), cosignatures=(cosignature,))
    path = tmp_path / "north.log"
    found = written(path, copy)
    assert (found.entries, found.heads, found.contradictions) == (copy.entries, copy.heads, copy.contradictions)
    assert found.cosignatures == (cosignature,)
    lines = path.read_text().splitlines()
    bent = {
        "an entry less": [lines[0], *lines[2:]],
        "another name": [line.replace('"east"', '"ghost"') for line in lines],
        "entries that change places": [lines[0], lines[2], lines[1], *lines[3:]],
        "no head": [line for line in lines if not line.startswith('{"head')],
        "a cosignature by nobody": [line.replace(cosignature.signature.hex(), "00" * 64) for line in lines],
        "an unknown line": [*lines, '{"x":1}'],
        "no first line": lines[1:],
        "nothing": [""],
    }
    for what, text in bent.items():
        path.write_text("\n".join(text) + "\n")
        assert not _reads(path), what
    with pytest.raises(CopyInvalid, match="cannot be read"):
        read_copy(tmp_path / "missing")


def _reads(path):
    try:
        read_copy(path)
    except CopyInvalid:
        return False
    return True


def test_two_copies_are_compared_whatever_their_sizes(tmp_path):
    longer = [*LOG, entry("west")]
    ours, theirs = copy_of("ours", LOG), copy_of("theirs", longer)
    assert "theirs is newer" in compare(ours, theirs)
    assert "of one log" in compare(ours, copy_of("same", LOG))
    for other in ([*ALTERED, entry("west")], ALTERED):
        with pytest.raises(Split, match="entry 2 is issued"):
            compare(ours, copy_of("other", other))
    # A witness has heads only.
    witness = copy_of("witness", (), heads=(signed(ALTERED),))
    with pytest.raises(Split, match="different logs of 3 entries"):
        compare(ours, witness)
    with pytest.raises(CopyInvalid, match="share no size"):
        compare(copy_of("one", (), heads=(signed(LOG),)), copy_of("two", (), heads=(signed(longer),)))
    # One file with two signed heads of one size is proof enough.
    with pytest.raises(Split, match="two heads of 3 entries"):
        compare(ours, copy_of("witness", (), heads=(signed(LOG),), contradictions=(signed(ALTERED),)))


def test_statements_for_one_purpose_or_federation_do_not_serve_another():
    head = signed(LOG).head
    made = Cosignature.by_witness(head, WITNESSES[0], MS)
    made.check(TRUST)
    for bad in (
        replace(made, at_ms=MS + 1),
        replace(made, size=2),
        replace(made, root=bytes(32)),
        replace(made, signer=KEYS[1]),
    ):
        with pytest.raises(HeadInvalid):
            bad.check(TRUST)
    with pytest.raises(HeadInvalid):
        made.check(Trust.in_root(authority(1).certificate))
    assert len({each.leaf for each in (*LOG, *(replace(each, kind=Kind.REVOKED) for each in LOG))}) == 6
