"""Tests of the member's folder: what is refused, and that a change of identity is one step."""

import os
from datetime import timedelta

import pytest

from coordinator.pki import key_pem, pem
from edge_client.identity.home import Home, HomeUnusable, IdentityDocument, MemberIdentity, NotEnrolled, home_path
from tacit.identity import Role, verify_signature
from tests.support import party

ADDRESS = "localhost:7441"


@pytest.fixture
def home(tmp_path):
    return party.member_home(tmp_path / "home", ADDRESS)


def test_a_complete_identity_loads_and_signs(home, authority, now):
    identity = MemberIdentity.load(home, now=now)
    assert (identity.member, identity.address) == ("north", ADDRESS)
    assert identity.federation == authority.federation
    assert identity.root == authority.certificate
    verify_signature(party.key(2).public_key(), b"statement", identity.sign(b"statement"))
    assert identity.key_pem == key_pem(party.key(2))
    assert identity.root_pem == pem(authority.certificate)
    assert b"BEGIN CERTIFICATE" in identity.certificate_pem
    assert "PRIVATE" not in repr(identity)
    assert str(party.key(2).private_numbers().d) not in repr(identity)


def test_nobody_is_enrolled_in_an_empty_folder(tmp_path):
    with pytest.raises(NotEnrolled, match="edge_client enrol"):
        MemberIdentity.load(tmp_path)


def test_the_folder_is_the_option_or_the_variable_or_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TACIT_HOME", raising=False)
    assert home_path() == tmp_path / ".tacit"
    monkeypatch.setenv("TACIT_HOME", str(tmp_path / "other"))
    assert home_path() == tmp_path / "other"
    assert home_path(tmp_path / "third") == tmp_path / "third"


def test_the_folder_is_made_for_its_owner_only(tmp_path):
    Home(tmp_path / "a" / "b").prepare()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_key_that_others_may_use_is_refused(home, now, mode):
    Home(home).identity.key.chmod(mode)
    with pytest.raises(HomeUnusable, match="chmod 600"):
        MemberIdentity.load(home, now=now)


def test_a_folder_that_others_may_read_is_refused(home, now):
    home.chmod(0o750)
    with pytest.raises(HomeUnusable, match="chmod 700"):
        MemberIdentity.load(home, now=now)
    with pytest.raises(HomeUnusable, match="chmod 700"):
        Home(home).prepare()


def test_somebody_elses_folder_is_refused(home, now, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    with pytest.raises(HomeUnusable, match="another user"):
        MemberIdentity.load(home, now=now)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(HomeUnusable, match="cannot be made"):
        Home(tmp_path / "home").prepare()


@pytest.mark.parametrize("name", ["key", "certificate", "root", "document"])
def test_a_missing_or_broken_part_is_named(home, now, name):
    path = getattr(Home(home).identity, name)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(HomeUnusable, match="--force"):
        MemberIdentity.load(home, now=now)
    path.unlink()
    with pytest.raises(HomeUnusable, match="cannot be read"):
        MemberIdentity.load(home, now=now)


def test_an_expired_certificate_says_what_to_do(home, now):
    with pytest.raises(HomeUnusable, match=r"expired on .* new join token"):
        MemberIdentity.load(home, now=now + timedelta(days=91))


def test_a_clock_that_is_behind_is_named(home, now):
    with pytest.raises(HomeUnusable, match="check the clock"):
        MemberIdentity.load(home, now=now - timedelta(minutes=6))


def test_parts_that_do_not_belong_together_are_refused(home, authority, stranger, now):
    names = Home(home).identity

    def with_(path, content, sentence):
        kept = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(HomeUnusable, match=sentence):
            MemberIdentity.load(home, now=now)
        path.write_bytes(kept)

    with_(names.key, key_pem(party.key(3)), "is not the key of")
    with_(names.root, pem(stranger.certificate), "is not the authority")
    other = authority.issue(party.key(2).public_key(), Role.MEMBER, "south", now=now)
    with_(names.certificate, pem(other), "belongs to south")
    operator = authority.issue(party.key(2).public_key(), Role.OPERATOR, "north", now=now)
    with_(names.certificate, pem(operator), "role operator, not member")
    foreign = stranger.issue(party.key(2).public_key(), Role.MEMBER, "north", now=now)
    with_(names.certificate, pem(foreign), "not issued by")
    document = IdentityDocument(federation=authority.federation, member="north", address=ADDRESS)
    newer = document.canonical().replace(b'"schema":1', b'"schema":2')
    with_(names.document, newer, "schema = 2")
    MemberIdentity.load(home, now=now)


def _pending(home, name, token="a" * 24):
    """Makes another complete identity that waits to be adopted."""
    made = party.member_home(home.parent / f"made-{name}-{token[0]}", ADDRESS, name=name, number=3)
    folder = Home(home).pending(token)
    Home(made).identity.path.rename(folder.path)
    return folder


def test_an_identity_is_adopted_in_one_step(home, now):
    Home(home).adopt(_pending(home, "south"))
    assert MemberIdentity.load(home, now=now).member == "south"
    assert sorted(path.name for path in home.iterdir()) == ["identity", "identity.lock"]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_adopting_leaves_the_old_or_the_new(home, now, monkeypatch, renames):
    from pathlib import Path

    class Crash(Exception):
        pass

    done = []
    really = Path.rename

    def rename(path, target):
        if len(done) == renames:
            raise Crash
        done.append(target)
        return really(path, target)

    folder = _pending(home, "south")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Crash):
        Home(home).adopt(folder)
    monkeypatch.setattr(Path, "rename", really)
    # Before the first rename nothing has changed. After it, only the new identity is left to adopt.
    assert MemberIdentity.load(home, now=now).member == ("north", "south")[renames]
    Home(home).settle()
    assert MemberIdentity.load(home, now=now).member == ("north", "south")[renames]


def test_the_next_load_finishes_an_enrolment_that_crashed(home, now):
    folder = _pending(home, "south")
    import shutil

    shutil.rmtree(Home(home).identity.path)
    assert folder.document.exists()
    assert MemberIdentity.load(home, now=now).member == "south"


def test_an_incomplete_enrolment_is_never_adopted(home, now):
    import shutil

    folder = _pending(home, "south")
    folder.document.unlink()
    shutil.rmtree(Home(home).identity.path)
    with pytest.raises(NotEnrolled):
        MemberIdentity.load(home, now=now)
    assert folder.key.exists()


def test_an_old_identity_without_a_new_one_comes_back(home, now):
    Home(home).identity.path.rename(home / "identity.old")
    assert MemberIdentity.load(home, now=now).member == "north"


def test_adopting_twice_is_harmless(home, now):
    folder = _pending(home, "south")
    Home(home).adopt(folder)
    Home(home).adopt(folder)
    assert MemberIdentity.load(home, now=now).member == "south"


def test_a_member_may_be_told_other_addresses_for_a_while(home, now):
    stored = MemberIdentity.load(home, now=now)
    told = stored.at(["a.example.org:1", "b.example.org:2"])
    assert told.addresses == ("a.example.org:1", "b.example.org:2")
    assert (told.member, told.certificate) == (stored.member, stored.certificate)
    assert MemberIdentity.load(home, now=now).addresses == stored.addresses
    with pytest.raises(HomeUnusable, match="host:port"):
        stored.at(["a.example.org:1", "nowhere"])
