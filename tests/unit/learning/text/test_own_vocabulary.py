"""A member's own vocabulary comes from its texts alone, in a form that every other part accepts."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.text.encoder import TextEncoder, VocabularyInvalid, check_own_form
from learning.text.vocabulary import own_tokenizer

TEXTS = ["The cat sat, the cat ran.", "A dog ran!", "the END", "Zebra zebra"]


def entries(tokenizer: bytes) -> list[str]:
    """The entries by id."""
    vocabulary = json.loads(tokenizer)["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    return sorted(vocabulary, key=vocabulary.__getitem__)


def test_words_are_the_most_frequent_ones_in_order():
    # "the" occurs three times; then words that occur twice, then once, by spelling.
    expected = ["[PAD]", "[UNK]", "the", "cat", "ran", "zebra", "!", ",", ".", "a", "dog", "end", "sat"]
    assert entries(own_tokenizer(TEXTS, "words", 100)) == expected
    assert entries(own_tokenizer(TEXTS, "words", 5)) == expected[:5]
    assert entries(own_tokenizer(TEXTS, "words", 100, 2)) == expected[:6]


def test_known_words_follow_those_of_the_texts_in_their_own_order():
    found = entries(own_tokenizer(TEXTS, "words", 100))
    known = ["the", "owl", "don't", "Paris", "new york", "", "heron", "owl", "[PAD]", "\u2028", "wren"]
    assert entries(own_tokenizer(TEXTS, "words", 100, 1, known)) == [*found, "owl", "heron", "wren"]
    # It takes only as many as there is room for, and reads no further.
    endless = (f"w{number}" for number in itertools.count())
    assert entries(own_tokenizer(TEXTS, "words", len(found) + 2, 1, endless)) == [*found, "w0", "w1"]
    assert next(endless) == "w2"
    assert entries(own_tokenizer(TEXTS, "words", 5, 1, known)) == found[:5]
    # A word of the texts that is too rare for an entry gets one from the known words.
    assert entries(own_tokenizer(TEXTS, "words", 100, 2, ["sat"])) == [
        *entries(own_tokenizer(TEXTS, "words", 6)),
        "sat",
    ]


def test_known_words_stop_at_thirty_thousand_and_texts_words_do_not():
    endless = (f"w{number}" for number in itertools.count())
    assert len(entries(own_tokenizer(TEXTS, "words", 1_000_000, 1, endless))) == 30_000
    many = [" ".join(f"t{number}" for number in range(30_500))]
    assert len(entries(own_tokenizer(many, "words", 1_000_000, 1, ["owl"]))) == 30_502
    long = ["q" * 101, "owl"]
    assert entries(own_tokenizer(TEXTS, "words", 100, 1, long))[-2:] == ["sat", "owl"]


def test_a_vocabulary_may_have_known_words_alone():
    """Then it does not refuse because the texts' words are too rare, which others would hear of."""
    assert entries(own_tokenizer(["the heron sat"], "words", 100, 2, ["owl", "sat"])) == [
        "[PAD]",
        "[UNK]",
        "owl",
        "sat",
    ]


def test_known_words_do_not_replace_texts_and_pieces_ignore_them():
    with pytest.raises(VocabularyInvalid, match="the texts have no words"):
        own_tokenizer([" "], "words", 100, 1, ["owl"])
    assert "xylophone" not in entries(own_tokenizer(TEXTS * 9, "wordpiece", 200, 1, ["xylophone"]))


def test_words_do_not_depend_on_the_order_of_texts():
    texts = [f"w{number % 50} w{number % 7} w{number}" for number in range(500)]
    shuffled = random.Random(3).sample(texts, len(texts))
    for size in (10, 60, 10_000):
        assert own_tokenizer(texts, "words", size) == own_tokenizer(shuffled, "words", size)


@pytest.mark.parametrize("kind", ["words", "wordpiece"])
def test_every_text_of_the_member_is_known(kind):
    tokenizer = own_tokenizer(TEXTS, kind, 200)
    check_own_form(tokenizer)
    encoder = TextEncoder(tokenizer, 32, 1)
    assert encoder.pad_id == 0
    for row, text in zip(encoder.encode(TEXTS), TEXTS, strict=True):
        known = [number for number in row if number != 0]
        assert len(known) >= len(text.split())
        assert 1 not in known


def test_pieces_can_be_framed():
    tokenizer = own_tokenizer(TEXTS, "wordpiece", 200)
    assert entries(tokenizer)[:4] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    ids = TextEncoder(tokenizer, 16, 3, frame=True).encode(["the cat"])
    assert ids[0, 0] == 2
    assert ids[0][ids[0] != 0][-1] == 3


def test_pieces_learn_what_occurs_together():
    """A frequent word is one piece, and a new word of known parts is known."""
    tokenizer = own_tokenizer(["playing played player plays"] * 20 + ["swing"], "wordpiece", 60)
    assert "playing" in entries(tokenizer)
    assert TextEncoder(tokenizer, 16, 1).encode(["PLAYING"]).shape == (1, 1)
    # Half as many entries are not enough for all.
    assert "playing" not in entries(own_tokenizer(["playing played player plays"] * 20, "wordpiece", 25))
    assert "swing" not in entries(own_tokenizer(["playing"] * 20 + ["swing"], "wordpiece", 60, 2))


@pytest.mark.parametrize("kind", ["words", "wordpiece"])
@pytest.mark.parametrize("size", [5, 6, 9, 30])
def test_the_size_is_never_exceeded(kind, size):
    texts = [*TEXTS, "値段 électro Ω ß 12345 abcdefghijklmnopqrstuvwxyz"]
    assert 5 <= len(entries(own_tokenizer(texts, kind, size))) <= size


def test_a_word_too_long_to_be_known_teaches_nothing():
    tokenizer = own_tokenizer(["short words", "q" * 101], "wordpiece", 100)
    assert not any("q" in entry for entry in entries(tokenizer))


def test_spelled_special_tokens_are_text():
    for kind in ("words", "wordpiece"):
        tokenizer = own_tokenizer(["[PAD] [cls] text"], kind, 100)
        check_own_form(tokenizer)
        assert 0 not in TextEncoder(tokenizer, 16, 1).encode(["a [PAD] b"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.text(alphabet=st.characters(), max_size=40), min_size=1, max_size=6), st.integers(5, 40))
def test_any_texts_give_a_tokenizer_of_our_form_or_a_refusal(texts, size):
    for kind in ("words", "wordpiece"):
        try:
            tokenizer = own_tokenizer(texts, kind, size)
        except VocabularyInvalid:
            # Then the texts have only white space and control characters.
            assert not any(character.isalnum() for text in texts for character in text)
            continue
        check_own_form(tokenizer)
        assert TextEncoder(tokenizer, 16, 3).vocabulary_size <= size


@pytest.mark.parametrize("kind", ["words", "wordpiece"])
@pytest.mark.parametrize("texts", [[], [""], ["  \n\t "]])
def test_texts_without_words_are_refused(kind, texts):
    with pytest.raises(VocabularyInvalid, match="the texts have no words"):
        own_tokenizer(texts, kind, 100)


def test_too_high_a_count_or_too_small_a_size_is_refused():
    with pytest.raises(VocabularyInvalid, match=r"no word occurs 4 times.*occurs 3 times.*min_count") as caught:
        own_tokenizer(TEXTS, "words", 100, 4)
    assert "cat" not in str(caught.value)
    with pytest.raises(VocabularyInvalid, match=r"2 entries .* no room after the 2"):
        own_tokenizer(TEXTS, "words", 2)
    with pytest.raises(VocabularyInvalid, match=r"4 entries .* no room after the 4"):
        own_tokenizer(TEXTS, "wordpiece", 4)
