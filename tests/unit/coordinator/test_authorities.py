"""The list of a federation's authorities: what proves the next one, and every way to fail that."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import serialization

from coordinator import authority as book
from coordinator import pki
from coordinator.authority import check_not_behind, load_authorities, retire, rotate
from coordinator.pki import Authority, AuthorityUnusable
from tacit.authorities import MAX_AUTHORITIES_BYTES, MAX_ROOTS, Authorities, AuthoritiesInvalid
from tacit.identity import federation_of, sign
from tests.support import party


def _of(number: int) -> Authority:
    return party.authority(number)


def _read(listed: Authorities) -> Authorities:
    return Authorities.read(listed.canonical(), federation=_of(0).federation)


@pytest.fixture(scope="module")
def first() -> Authorities:
    return Authorities.first(_of(0).certificate)


@pytest.fixture(scope="module")
def second(first) -> Authorities:
    return first.succeeded_by(_of(1).certificate, old=_of(0).key, new=_of(1).key)


@pytest.fixture(scope="module")
def retired(second) -> Authorities:
    return second.without(1, key=_of(1).key)


def test_each_state_proves_itself_and_follows_the_previous_one(first, second, retired):
    states = (first, second, retired)
    assert [_read(state) for state in states] == list(states)
    for at, state in enumerate(states):
        assert [state.follows(other) for other in states] == [at > other for other in range(3)]
    roots = [_of(number).certificate for number in (0, 1)]
    assert first.trust.roots == (roots[0],)
    assert second.trust.roots == (roots[1], roots[0])
    assert retired.trust.roots == (roots[1],)
    assert retired.history.roots == (roots[1], roots[0])
    assert {state.trust.federation for state in states} == {federation_of(roots[0])}
    assert second.newest == federation_of(roots[1])


def test_a_root_that_the_previous_one_did_not_sign_is_refused(first):
    forged = first.succeeded_by(_of(1).certificate, old=_of(1).key, new=_of(1).key)
    with pytest.raises(AuthoritiesInvalid, match="authority 2 is not signed by the one before it"):
        _read(forged)


def test_a_list_that_the_newest_root_did_not_sign_is_refused(first, second):
    for other in (
        first.succeeded_by(_of(1).certificate, old=_of(0).key, new=_of(0).key),
        second.without(1, key=_of(0).key),
        second.model_copy(update={"oldest": 1}),
        second.model_copy(update={"number": 7}),
    ):
        with pytest.raises(AuthoritiesInvalid, match="not signed by the newest authority"):
            _read(other)
    with pytest.raises(AuthoritiesInvalid, match="is not signed"):
        _read(second.model_copy(update={"number": 0}))


def test_a_first_list_has_no_signature(first):
    """Anybody could make up one, and the list would contradict the true first one."""
    made = first.model_copy(update={"signature": b"made up"})
    with pytest.raises(AuthoritiesInvalid, match="the first one has none"):
        _read(made)


def test_a_succession_counts_only_in_its_place_and_federation(first, second):
    third = second.succeeded_by(_of(2).certificate, old=_of(1).key, new=_of(2).key)
    assert _read(third).trust.roots[0] == _of(2).certificate
    # The same signatures with other neighbours: 2 after 0, and 1 in a federation that begins with 1.
    skipped = third.model_copy(
        update={"roots": (third.roots[0], third.roots[2]), "successions": third.successions[1:]}
    )._signed({}, _of(2).key)
    with pytest.raises(AuthoritiesInvalid, match="not signed by the one before it"):
        _read(skipped)
    with pytest.raises(AuthoritiesInvalid, match="another federation"):
        Authorities.read(third.canonical(), federation=_of(1).federation)


def test_a_fork_is_refused_and_an_older_list_changes_nothing(first, second, retired):
    # The first authority's own key signed it, as a thief of the key could.
    other = first.succeeded_by(_of(2).certificate, old=_of(0).key, new=_of(2).key)
    assert _read(other) == other
    assert other.follows(first)
    for known in (second, retired):
        with pytest.raises(AuthoritiesInvalid, match="somebody has, or had, the key"):
            other.follows(known)
    assert not first.follows(retired)
    # A retired root stays retired, even if the newest key says otherwise.
    back = retired._signed({"oldest": 0, "number": 9}, _of(1).key)
    with pytest.raises(AuthoritiesInvalid, match="trusts a retired authority again"):
        _read(back).follows(retired)
    same = second._signed({"oldest": 1, "number": second.number}, _of(1).key)
    with pytest.raises(AuthoritiesInvalid, match="two different lists"):
        _read(same).follows(second)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"roots": []}, "1 entries or more"),
        ({"roots": ["AAAA"]}, "not a certificate"),
        ({"roots": ["%"]}, "not base64"),
        ({"oldest": 1}, "one root is trusted"),
        ({"successions": ["AAAA"]}, "signed by the one before"),
        ({"extra": 1}, "unknown key"),
        ({"kind": "tacit-receipt"}, "kind"),
    ],
    ids=["none", "no-certificate", "no-base64", "none-trusted", "one-too-many", "unknown", "kind"],
)
def test_a_malformed_list_is_refused_with_a_sentence(first, change, sentence):
    content = json.loads(first.canonical()) | change
    with pytest.raises(AuthoritiesInvalid, match=sentence):
        Authorities.read(json.dumps(content).encode(), federation=_of(0).federation)


def test_a_retired_key_does_not_return_under_another_certificate(first, retired):
    again = Authority.create(now=datetime.now(UTC), of=first.federation, number=3, key=_of(0).key)
    assert again.certificate != _of(0).certificate
    with pytest.raises(ValueError, match="has had its key"):
        retired.succeeded_by(again.certificate, old=_of(1).key, new=_of(0).key)
    # It does not return either if the newest authority signs for it, around that check.
    der = again.certificate.public_bytes(serialization.Encoding.DER)
    signature = sign(_of(1).key, retired._succession(2, der))
    forged = retired._signed(
        {"roots": (*retired.roots, der), "successions": (*retired.successions, signature), "number": 9}, _of(0).key
    )
    with pytest.raises(AuthoritiesInvalid, match="two roots with the same key"):
        _read(forged)


def test_a_list_has_a_maximum_size(first):
    with pytest.raises(AuthoritiesInvalid, match="more than"):
        Authorities.read(b"[" * (MAX_AUTHORITIES_BYTES + 1), federation=_of(0).federation)
    with pytest.raises(AuthoritiesInvalid, match="not JSON"):
        Authorities.read(b"{", federation=_of(0).federation)
    full = first.model_copy(update={"roots": first.roots * MAX_ROOTS})
    with pytest.raises(ValueError, match="at most"):
        full.succeeded_by(_of(1).certificate, old=_of(0).key, new=_of(1).key)


# ---- in the coordinator's folder -------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Reuses keys of this test run for new authorities."""
    numbers = iter(range(101, 110))
    real = Authority.create
    monkeypatch.setattr(
        Authority, "create", classmethod(lambda _, **how: real(**{**how, "key": party.key(next(numbers))}))
    )


def test_rotate_and_retire_in_a_folder(folder, now, quick):
    before = load_authorities(folder, now=now)
    assert before.document == b""
    rotated = rotate(folder, now=now)
    assert load_authorities(folder, now=now).authorities == rotated.authorities
    assert rotated.issuing.federation == rotated.serving.federation == before.issuing.federation
    assert rotated.issuing.certificate != before.issuing.certificate
    # Members that were away know the server's issuer as long as possible.
    assert rotated.serving.certificate == before.issuing.certificate
    with pytest.raises(AuthorityUnusable, match="finish that change first"):
        rotate(folder, now=now)
    done = retire(folder, now=now)
    assert done.serving.certificate == done.issuing.certificate == rotated.issuing.certificate
    assert not folder.authority_of(1)[1].exists()
    assert folder.authority_of(1)[0].exists()
    assert folder.authority_of(2)[1].stat().st_mode & 0o777 == 0o600
    assert load_authorities(folder, now=now).trust.roots == (rotated.issuing.certificate,)
    assert retire(folder, now=now).authorities == done.authorities
    third = rotate(folder, now=now)
    assert third.authorities.number == done.authorities.number + 1
    assert len(third.authorities.roots) == 3
    assert third.trust.federation == before.trust.federation


def test_a_copy_of_the_folder_that_lacks_a_change_is_refused(folder, now, quick):
    """The journal has each change; the folders of several coordinators are copies of one another."""
    told = []
    first = load_authorities(folder, now=now).authorities
    check_not_behind(first, None, None)
    rotated = rotate(folder, now=now, tell=lambda following, before: told.append((following, before))).authorities
    ((following, before),) = told
    check_not_behind(rotated, following, None)
    with pytest.raises(AuthorityUnusable, match="older than the journal says"):
        check_not_behind(first, following, None)
    retired = retire(folder, now=now).authorities
    check_not_behind(retired, following, before)
    # It would trust the authority that was retired, perhaps because its key was stolen.
    with pytest.raises(AuthorityUnusable, match="Copy DIR/authority"):
        check_not_behind(rotated, following, before)


def test_the_only_authority_cannot_be_retired(folder, now):
    with pytest.raises(AuthorityUnusable, match="coordinator authority rotate"):
        retire(folder, now=now)


@pytest.fixture
def outlived(folder, now, monkeypatch):
    """A folder after `rotate` without `retire`, and a moment at which only its first authority has ended."""
    monkeypatch.setattr(pki, "AUTHORITY_LIFETIME", 2 * pki.AUTHORITY_LIFETIME)
    following = Authority.create(now=now, key=party.key(101))
    rotate(folder, now=now, own=following)
    return following.certificate, party.authority().certificate.not_valid_after_utc + timedelta(days=1)


def test_an_earlier_authority_that_has_ended_counts_as_retired(folder, now, outlived):
    newest, later = outlived
    first = party.authority().certificate
    assert load_authorities(folder, now=now).trust.roots == (newest, first)
    ended = load_authorities(folder, now=later)
    assert ended.serving.certificate == ended.issuing.certificate == newest
    assert ended.trust.roots == (newest,)
    assert not ended.is_outlived(later)
    # In its last hour it can no longer issue a certificate for the server.
    soon = first.not_valid_after_utc - timedelta(minutes=59)
    assert load_authorities(folder, now=soon).serving.certificate == newest
    assert load_authorities(folder, now=soon - timedelta(minutes=2)).serving.certificate == first
    before = load_authorities(folder, now=now)
    assert (before.is_outlived(now), before.is_outlived(soon)) == (False, True)
    # Its key file may even be missing.
    folder.authority_of(1)[1].unlink()
    assert load_authorities(folder, now=later).trust.roots == (newest,)


def test_an_ended_authority_is_retired_by_command_or_by_the_next(folder, now, outlived, monkeypatch):
    newest, later = outlived
    told = []
    with monkeypatch.context() as patch:
        patch.setattr(book, "durable_file", lambda *_: None)
        assert retire(folder, now=later, tell=lambda *what: told.append(what)).trust.roots == (newest,)
    assert told == [(federation_of(newest), party.authority().federation)]
    folder.authority_of(1)[1].write_bytes(b"a key")
    third = rotate(folder, now=later, own=Authority.create(now=later, key=party.key(102)))
    assert not folder.authority_of(1)[1].exists()
    assert folder.authority_of(2)[1].exists()
    assert third.authorities.oldest == 1
    assert third.trust.roots == third.authorities.trust.roots == (third.issuing.certificate, newest)
    known = Authorities.read(folder.authorities.read_bytes(), federation=party.authority().federation)
    assert known.oldest == 1


def test_a_change_that_cannot_be_recorded_does_not_happen(folder, now, quick):
    def full(*_):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        rotate(folder, now=now, tell=full)
    assert load_authorities(folder, now=now).document == b""
    rotate(folder, now=now)
    with pytest.raises(OSError, match="no space"):
        retire(folder, now=now, tell=full)
    assert len(load_authorities(folder, now=now).trust.roots) == 2
    retire(folder, now=now)
    # Repeating it changes nothing, so `tell` is not called.
    retire(folder, now=now, tell=full)


@pytest.mark.parametrize("killed", ["store", "document", "unlink"])
def test_an_interrupted_change_can_be_repeated(folder, now, quick, monkeypatch, killed):
    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    if killed == "unlink":
        rotate(folder, now=now)
    with monkeypatch.context() as patch:
        match killed:
            case "store":
                patch.setattr(Authority, "store", die)
            case "document":
                patch.setattr(book, "durable_file", die)
            case "unlink":
                patch.setattr("pathlib.Path.unlink", die)
        with pytest.raises(Killed):
            (retire if killed == "unlink" else rotate)(folder, now=now)
    if killed == "unlink":
        # It is no longer trusted although its key is still there. The next try removes the key.
        assert len(load_authorities(folder, now=now).trust.roots) == 1
        retire(folder, now=now)
        assert not folder.authority_of(1)[1].exists()
    else:
        assert load_authorities(folder, now=now).document == b""
        assert len(rotate(folder, now=now).trust.roots) == 2


def test_an_institutions_next_authority_is_adopted(folder, now):
    own = party.authority(2)
    rotated = rotate(folder, now=now, own=own)
    assert rotated.issuing.certificate == own.certificate
    assert rotated.issuing.federation == party.authority().federation
    assert load_authorities(folder, now=now).issuing.certificate == own.certificate


def test_files_from_different_copies_are_refused(folder, now, quick):
    rotate(folder, now=now)
    party.authority(2).store(*folder.authority_of(2))
    with pytest.raises(AuthorityUnusable, match="is not the authority that"):
        load_authorities(folder, now=now)
    folder.authorities.write_bytes(b"{}")
    with pytest.raises(AuthorityUnusable, match="restore the authority's folder"):
        load_authorities(folder, now=now)


def test_a_passphrase_protects_every_key_of_the_folder(folder, now, quick):
    of, word = party.authority(), b"a passphrase of the clinic"
    of.store(folder.authority_certificate, folder.authority_key, passphrase=word)
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in folder.authority_key.read_bytes()
    with pytest.raises(AuthorityUnusable, match="TACIT_AUTHORITY_PASSPHRASE_FILE"):
        load_authorities(folder, now=now)
    with pytest.raises(AuthorityUnusable, match="the passphrase does not open"):
        load_authorities(folder, now=now, passphrase=b"another")
    rotate(folder, now=now, passphrase=word)
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in folder.authority_of(2)[1].read_bytes()
    assert load_authorities(folder, now=now, passphrase=word).issuing.key.public_key() == party.key(101).public_key()
