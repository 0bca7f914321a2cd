"""One string where several are asked for is refused: Python would take it letter by letter."""

import asyncio

import pytest

import tacit
from export.generating import TextStream
from export.predictor import Predictor
from learning.text.cloze import ClozeEncoder
from learning.text.cloze_tokenizer import own_form
from learning.text.encoder import TextEncoder, word_tokenizer, wordpiece_tokenizer
from learning.text.vocabulary import own_tokenizer
from tacit.prompt import parse_template
from tacit_api.local import LocalFederation
from tests.support.tiny_models import tokenizer_of

ROWS = [("the sun", "day")]


def encoder():
    return TextEncoder(word_tokenizer(["the", "sun"]), 8, 1)


def cloze():
    return ClozeEncoder(own_form(tokenizer_of("bert")), parse_template("{text} is {mask}."), 24)


def predictor():
    """Runs nothing: no text reaches the model."""
    return Predictor(lambda ids: pytest.fail("ran"), encoder(), ("day", "night"), None)


@pytest.mark.parametrize(
    "call",
    [
        lambda: predictor().predict("the sun"),
        lambda: predictor().predict(""),
        lambda: predictor().logits("the sun"),
        lambda: encoder().encode("the sun"),
        lambda: encoder().coverage("the sun"),
        lambda: encoder().counts("the sun"),
        lambda: cloze().encode("the sun"),
        lambda: cloze().coverage("the sun"),
        lambda: word_tokenizer("the sun"),
        lambda: wordpiece_tokenizer("the sun"),
        lambda: own_tokenizer("the sun", "words", 100),
        lambda: own_tokenizer("the sun", "wordpiece", 100),
        lambda: own_tokenizer(["the sun"], "words", 100, known="the sun"),
        lambda: TextStream(lambda _: "", "END"),
    ],
)
def test_a_text(call):
    with pytest.raises(ValueError, match="give a list, also of one"):
        call()


@pytest.mark.parametrize("more", [{"jobs": "wards*"}, {"backbones": "models"}])
def test_an_option_of_a_member(more, tmp_path):
    """The letters of wards* would be names of jobs, and the last one would admit every job."""
    member = tacit.Member(tmp_path / "nobody")
    (name,) = more
    with pytest.raises(ValueError, match=f"{name} is one string; give a list, also of one"):
        member.run(ROWS, ledger="own", **more)
    with pytest.raises(ValueError, match="give a list"):
        member.start(ROWS, ledger="own", **more)


def test_members_of_a_local_federation(tmp_path):
    """Members a, b and c."""
    with (
        pytest.raises(ValueError, match="members is one string; give a list, also of one"),
        tacit.local_federation("abc", folder=tmp_path / "town"),
    ):
        pytest.fail("it started")
    assert not (tmp_path / "town").exists()


def federation(tmp_path):
    """Of three members, whose coordinator is asked nothing."""
    return LocalFederation(tmp_path, None, {name: tacit.Member(tmp_path / name) for name in ("a", "b", "c")})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("xyz", "data is one string; give a list"),
        ([ROWS, ROWS], "2 sets of rows for 3 members: a, b, c; give each its own, in this order or by name"),
        ([ROWS] * 4, "4 sets of rows for 3 members"),
        (ROWS, "1 set of rows for 3 members"),
    ],
)
def test_rows_of_the_members_of_a_local_federation(data, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        federation(tmp_path).train("job.toml", data)


def test_members_that_are_waited_for(tmp_path):
    (tmp_path / "operator.toml").touch()
    with pytest.raises(ValueError, match="members is one string; give a list, also of one"):
        asyncio.run(tacit.AsyncCoordinator(tmp_path).finished("wards", members="north"))
