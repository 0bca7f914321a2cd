"""A lying coordinator puts entries into the roster log that rosters accept and `edge_client members` would not show."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.roster.book import RosterBook, book_path
from tacit.identity import Role
from tacit.roster import Entry, HeadInvalid, Kind
from tacit.roster_copy import CopyInvalid, read_copy, write_copy
from tacit.roster_wire import entry_from_pb
from tacit.v1 import federation_pb2 as pb
from tacit.verification import verifiers
from tests.support import party
from tests.unit.edge_client.roster.test_book import LOG, MS, NOW, TRUST, copy_of, digest, entry, signed

EVIL = digest("the coordinator's own key")


@pytest.fixture
def identity(tmp_path):
    return party.member(tmp_path / "home", "localhost:1", name="north")


def holding(identity, *entries):
    """Lets the member accept a log of these entries."""
    book = RosterBook(book_path(identity.home, identity.federation), TRUST)
    book.take(signed(entries), entries, 0, NOW)
    return book


def shown(identity):
    done = CliRunner().invoke(app, ["members", "--offline", "--home", str(identity.home)])
    as_json = CliRunner().invoke(app, ["members", "--offline", "--json", "--home", str(identity.home)])
    assert (done.exit_code, as_json.exit_code) == (0, 0), done.output
    return done.stdout, done.stderr, json.loads(as_json.stdout)


def certificate(identity, number, kind):
    _, key_of = verifiers(TRUST)
    key = hashlib.sha256(key_of(identity.certificate)).digest()
    return Entry(digest(f"certificate {number}"), key, "north", Role.MEMBER, kind, MS)


def evil(number, name="north", kind=Kind.RENEWED):
    return Entry(digest(f"evil {number}"), EVIL, name, Role.MEMBER, kind, MS)


def test_a_second_key_under_a_members_name_is_shown_although_the_member_renewed_since(identity):
    first, again = certificate(identity, 1, Kind.ISSUED), certificate(identity, 2, Kind.RENEWED)
    book = holding(identity, first, evil(1), again)
    # A roster may have the coordinator's certificate as north's.
    assert book._number("north", digest("evil 1"), EVIL, 3) == 2
    out, err, found = shown(identity)
    assert EVIL.hex()[:16] in out
    assert out.count("ONE OF 2 KEYS") == 2
    assert "WARNING: the log has another key under this member's own name" in err
    assert found["own_name_has_another_key"] is True
    assert {each["key"] for each in found["members"]} == {first.key.hex(), EVIL.hex()}


def test_a_key_from_before_renew_new_key_is_shown_without_a_warning(identity):
    old = Entry(digest("old"), digest("old key"), "north", Role.MEMBER, Kind.ISSUED, MS)
    holding(identity, old, certificate(identity, 2, Kind.RENEWED))
    out, err, found = shown(identity)
    assert old.key.hex()[:16] in out
    assert "WARNING" not in err
    assert found["own_name_has_another_key"] is False


def test_a_revocation_ends_all_keys_of_a_name(identity):
    revoked = Entry(digest("x"), digest("x"), "north", Role.MEMBER, Kind.REVOKED, MS)
    holding(identity, evil(1), revoked, certificate(identity, 2, Kind.ISSUED))
    out, err, _ = shown(identity)
    assert EVIL.hex()[:16] not in out
    assert "WARNING" not in err


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.MEMBER])
@pytest.mark.parametrize("kind", list(Kind))
def test_an_entry_of_another_role_is_refused_wherever_it_comes_from(tmp_path, role, kind):
    """Its revocation would take an invented member off the list, and not out of rosters."""
    with pytest.raises(ValueError, match="the log has members alone"):
        Entry(digest("a"), digest("b"), "eve", role, kind, MS)
    message = pb.LogEntry(
        certificate=digest("a"), key=digest("b"), name="eve", role=role.value, kind=kind.value, at_ms=MS
    )
    with pytest.raises(HeadInvalid, match="the log has members alone"):
        entry_from_pb(message)
    path = tmp_path / "copy"
    write_copy(path, copy_of("copy", LOG))
    path.write_text(path.read_text().replace('"member","issued"', f'"{role.value}","{kind.value}"', 1))
    with pytest.raises(CopyInvalid, match="the log has members alone"):
        read_copy(path)


NAMES, HOLDERS = ("east", "west", "north"), ("k", "l", "m")


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(HOLDERS), st.sampled_from(list(Kind))), max_size=12))
def test_the_list_has_every_key_that_a_roster_may_have_and_no_other(tmp_path_factory, acts):
    log = [entry(name, number, kind, key_of=f"{key}") for number, (name, key, kind) in enumerate(acts)]
    book = RosterBook(tmp_path_factory.mktemp("book") / "roster.db", TRUST)
    book.take(signed(log), log, 0, NOW)
    listed = {(name, key) for name, keys in book.holders().items() for key in keys}
    accepted = {
        (each.name, each.key)
        for each in log
        if book._number(each.name, each.certificate, each.key, len(log)) is not None
    }
    assert listed == accepted
    for name, keys in book.holders().items():
        for key, (first, _) in keys.items():
            assert first.seen_ms == book.since(name, key)
    book.close()
