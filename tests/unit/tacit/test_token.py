"""Join tokens: intact, cut off, altered, of another version."""

import base64
import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from tacit.authorities import Authorities
from tacit.token import MAX_OTHERS, JoinToken, TokenCutOff, TokenInvalid, join_address, secret_hash, split_address
from tests.support import party

EXPIRES = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


@pytest.fixture
def token() -> JoinToken:
    return JoinToken.create(
        address="coordinator.example.org:7440", federation=b"f" * 32, member="north", expires=EXPIRES
    )


@pytest.fixture(scope="module")
def replaced() -> Authorities:
    """A federation's authorities after the first one was replaced and retired."""
    old, new = party.authority(), party.authority(1)
    both = Authorities.first(old.certificate).succeeded_by(new.certificate, old=old.key, new=new.key)
    return both.without(1, key=new.key)


@pytest.fixture
def later(replaced) -> JoinToken:
    """A token made after that."""
    return JoinToken.create(
        address="coordinator.example.org:7440",
        federation=replaced.federation,
        member="north",
        expires=EXPIRES,
        authorities=replaced,
    )


def test_a_token_round_trips(token):
    text = token.format()
    assert text.startswith("tacit1.")
    assert JoinToken.parse(text) == token
    assert token.expires == datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert len(token.secret) == 32


def test_line_breaks_and_quotes_do_not_matter(token):
    text = token.format()
    folded = "\n  ".join(text[start : start + 40] for start in range(0, len(text), 40))
    for pasted in (f"  {text}\n", f"'{text}'", f'"{text}"', f"`{text}`", folded, f"{folded}\r\n"):
        assert JoinToken.parse(pasted) == token


def test_a_token_from_after_a_rotation_names_the_newest_authority_too(later, replaced):
    text = later.format()
    assert text.startswith("tacit1.")
    read = JoinToken.parse(text)
    assert read == later
    assert (read.federation, read.newest, read.number) == (replaced.federation, replaced.newest, 2)
    # People copy it, so it must be at most a quarter longer than another token.
    plain = JoinToken.create(address=later.address, federation=later.federation, member="north", expires=EXPIRES)
    assert len(text) <= 1.25 * len(plain.format())


def test_a_token_from_before_a_rotation_leaves_out_the_newest(token):
    first = Authorities.first(party.authority().certificate)
    made = JoinToken.create(
        address="a:1", federation=first.federation, member="north", expires=EXPIRES, authorities=first
    )
    for each in (token, made):
        assert (each.newest, each.number) == (None, 0)
        keys = "address expires federation id member schema secret"
        assert sorted(json.loads(each.canonical())) == keys.split()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        pytest.param(b'"number":2,', b"", "go together", id="no number"),
        pytest.param(b'"number":2,', b'"number":0,', "number", id="number 0"),
        pytest.param(b'"number":2,', b'"number":"2",', "number", id="a number as text"),
        pytest.param(b'"newest":"', b'"newest":null,"member":"', "fingerprint", id="null"),
        pytest.param(b'"newest":"', b'"newest":"A', "fingerprint", id="too long"),
        pytest.param(b'"newest":"', b'"newest":"!', "fingerprint", id="no base64url"),
    ],
)
def test_half_of_the_newest_authority_is_refused(later, old, new, sentence):
    assert old in later.canonical()
    with pytest.raises(TokenInvalid, match=sentence):
        JoinToken.parse(_sealed(later.canonical().replace(old, new)))


def test_a_fingerprint_has_one_encoding(later):
    body = json.loads(later.canonical())
    # 43 characters have two spare bits, so another last character could encode the same bytes.
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for spoilt in (body["newest"][:-1] + last[last.index(body["newest"][-1]) + 1], body["newest"] + "="):
        with pytest.raises(TokenInvalid, match="fingerprint"):
            JoinToken.parse(_sealed(json.dumps({**body, "newest": spoilt}).encode()))


def test_the_first_authority_is_not_named_as_the_newest(later):
    body = json.loads(later.canonical())
    newest = base64.urlsafe_b64encode(later.federation).rstrip(b"=").decode()
    with pytest.raises(TokenInvalid, match="must leave it out"):
        JoinToken.parse(_sealed(json.dumps({**body, "newest": newest}).encode()))


@pytest.mark.parametrize("kind", ["token", "later"])
def test_every_cut_is_recognised_as_a_cut(request, kind):
    text = request.getfixturevalue(kind).format()
    for end in range(1, len(text)):
        with pytest.raises(TokenCutOff, match="cut off"):
            JoinToken.parse(text[:end])


def test_every_altered_character_is_recognised(token):
    text = token.format()
    for place in range(len("tacit1."), len(text)):
        other = "A" if text[place] != "A" else "B"
        with pytest.raises(TokenInvalid):
            JoinToken.parse(text[:place] + other + text[place + 1 :])


@pytest.mark.parametrize("text", ["", "   ", "hello", "sk-live-123", "Tacit1.abc.def"])
def test_other_text_is_reported_as_no_token(text):
    with pytest.raises(TokenInvalid, match="not a join token"):
        JoinToken.parse(text)


def test_a_token_of_a_newer_version_asks_for_an_upgrade():
    with pytest.raises(TokenInvalid, match="newer than this software"):
        JoinToken.parse("tacit2.abc.00000000")


def _sealed(body: bytes) -> str:
    text = base64.urlsafe_b64encode(body).rstrip(b"=").decode()
    check = hashlib.sha256(b"tacit/join-token/check/1\x00" + text.encode()).hexdigest()[:8]
    return f"tacit1.{text}.{check}"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b'"schema":1', b'"schema":2', "schema"),
        (b'"member":"north"', b'"member":"North Clinic"', "member"),
        (b'"member":"north"', b'"member":"north","role":"operator"', "unknown key"),
        (b":7440", b"", "address"),
        (b'"schema":1', b'"schema":1,', "JSON"),
    ],
)
def test_an_intact_but_wrong_token_is_not_reported_as_cut_off(token, old, new, sentence):
    with pytest.raises(TokenInvalid, match=sentence) as raised:
        JoinToken.parse(_sealed(token.canonical().replace(old, new)))
    assert not isinstance(raised.value, TokenCutOff)


def test_a_body_that_is_not_base64_is_not_reported_as_cut_off():
    check = hashlib.sha256(b"tacit/join-token/check/1\x00!!!").hexdigest()[:8]
    with pytest.raises(TokenInvalid, match="cannot be read"):
        JoinToken.parse(f"tacit1.!!!.{check}")


def test_the_secret_is_never_shown(token):
    encoded = base64.urlsafe_b64encode(token.secret).rstrip(b"=").decode()
    for shown in (repr(token), str(token), f"{token}"):
        assert encoded not in shown
        assert repr(token.secret) not in shown
        assert "secret" not in shown
    with pytest.raises(TokenInvalid) as raised:
        JoinToken.parse(_sealed(token.canonical().replace(b'"schema":1', b'"schema":1,"extra":1')))
    assert encoded not in str(raised.value)


def test_the_hash_is_not_the_plain_hash_and_tokens_differ(token):
    assert secret_hash(token.secret) != hashlib.sha256(token.secret).digest()
    assert len(secret_hash(token.secret)) == 32
    other = JoinToken.create(address=token.address, federation=b"f" * 32, member="north", expires=EXPIRES)
    assert other.id != token.id
    assert other.secret != token.secret


def test_one_instant_has_one_form():
    from datetime import timezone

    east = EXPIRES.astimezone(timezone(timedelta(hours=5)))
    common = {"address": "a:1", "federation": b"f" * 32, "id": "0" * 24, "secret": b"s" * 32, "member": "north"}
    assert JoinToken(expires=east, **common).canonical() == JoinToken(expires=EXPIRES, **common).canonical()


def test_a_token_without_a_time_zone_is_refused():
    with pytest.raises(ValidationError):
        JoinToken.create(address="a:1", federation=b"f" * 32, member="north", expires=EXPIRES.replace(tzinfo=None))


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:7440", ("localhost", 7440)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
    ],
)
def test_addresses(address, parts):
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", ":7440", "host:", "host:port", "host:65536", "::1:7440", "http://host:80", "a b:1", "u@h:1", "h:-1"],
)
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


def test_a_token_names_the_other_coordinators_only_if_there_are_some(token):
    others = ("b.example.org:7440", "[2001:db8::1]:7440")
    made = JoinToken.create(
        address=token.address, federation=token.federation, member="north", expires=EXPIRES, others=others
    )
    assert JoinToken.parse(made.format()) == made
    assert made.addresses == (token.address, *others)
    assert json.loads(made.canonical())["others"] == list(others)
    assert "others" not in json.loads(token.canonical())
    assert token.addresses == (token.address,)


def test_a_token_with_the_longest_addresses_still_fits_where_tokens_go():
    longest = [f"{number}{'a' * 290}.org:7440" for number in range(20)]
    made = JoinToken.create(
        address=longest[0], federation=b"f" * 32, member="m" * 63, expires=EXPIRES, others=longest[1:]
    )
    assert made.others == tuple(longest[1 : 1 + MAX_OTHERS])
    # The longest text of a join token (docs/protocol.md).
    assert len(made.format()) <= 4096


@pytest.mark.parametrize(
    "others", [["no port"], ["a:99999"], ["coordinator.example.org:7440"], ["a:1", "a:1"], ["a:1"] * 9, "a:1", [7]]
)
def test_a_token_with_other_addresses_that_are_none_is_refused(token, others):
    content = json.loads(token.canonical()) | {"others": others}
    body = base64.urlsafe_b64encode(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    text = body.rstrip(b"=").decode()
    check = hashlib.sha256(b"tacit/join-token/check/1\x00" + text.encode()).hexdigest()[:8]
    with pytest.raises(TokenInvalid):
        JoinToken.parse(f"tacit1.{text}.{check}")
