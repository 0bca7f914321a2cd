"""Public words are refused if not the job's, split by the list alone, and joined to plain text again."""

import hashlib

import numpy as np
import pytest

from learning.synthesis.words import PAD_ID, UNKNOWN_ID, VocabularyNotPublic, public_words
from learning.text.coverage import Coverage
from learning.text.encoder import TokenizerInvalid, word_tokenizer, wordpiece_tokenizer
from tests.support.toy_texts import LIST, toy_words


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_a_text_is_its_label_its_words_and_an_end():
    words = toy_words()
    ids = words.encode(["The sea, the SEA!", "", "one two"], np.array([1, 0, 1]))
    the, sea, comma = (words.entries.index(each) for each in ("the", "sea", ","))
    assert ids.tolist() == [
        [words.end_id + 2, the, sea, comma, the, sea, UNKNOWN_ID, words.end_id],
        [words.end_id + 1, words.end_id, *[PAD_ID] * 6],
        [words.end_id + 2, words.entries.index("one"), words.entries.index("two"), words.end_id, *[PAD_ID] * 4],
    ]
    assert words.rows == words.end_id + 3
    assert words.text(ids[0, 1:].tolist()) == "the sea, the sea [UNK]"


def test_long_texts_are_cut_and_end():
    words = toy_words(max_tokens=4)
    ids = words.encode(["the sea is the sea is the sea"], np.array([0]))
    assert ids.shape == (1, 6)
    assert ids[0, -1] == words.end_id


def test_a_list_from_the_members_texts_is_refused():
    own = word_tokenizer(["secret", "patient"])
    with pytest.raises(VocabularyNotPublic, match="build their vocabularies from their own texts"):
        public_words(own, None, labels=2, max_tokens=8)


def test_a_list_that_is_not_the_jobs_is_refused():
    public = word_tokenizer(LIST)
    # Like one from a member that adds the words it misses.
    own = word_tokenizer([*LIST, "secret"])
    with pytest.raises(VocabularyNotPublic, match="not the job's"):
        public_words(own, digest(public), labels=2, max_tokens=8)
    assert "secret" not in public_words(public, digest(public), labels=2, max_tokens=8).entries


def test_the_first_entries_are_kept_whatever_the_texts_are():
    tokenizer = word_tokenizer(LIST)
    words = public_words(tokenizer, digest(tokenizer), labels=2, max_tokens=8, most=6)
    assert words.entries == ("[PAD]", "[UNK]", *LIST[:4])
    assert words.encode(["the sea is it"], np.array([0]))[0].tolist() == [7, 2, 1, 4, 1, 6]
    assert words.coverage(["the sea is it"]) == Coverage(texts=1, cut=0, tokens=4, unknown=2)


@pytest.mark.parametrize(
    "tokenizer",
    [wordpiece_tokenizer(["[PAD]", "[UNK]", "sea"]), b"{}", word_tokenizer(LIST).replace(b"Lowercase", b"NFC")],
    ids=["word-pieces", "no-tokenizer", "another-form"],
)
def test_other_tokenizers_are_refused(tokenizer):
    with pytest.raises(TokenizerInvalid):
        public_words(tokenizer, digest(tokenizer), labels=2, max_tokens=8)


def test_labels_that_do_not_fit_the_texts_are_refused():
    words = toy_words()
    with pytest.raises(ValueError, match="as many labels"):
        words.encode(["the sea"], np.array([0, 1]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        words.encode(["the sea"], np.array([2]))


@pytest.mark.parametrize(
    ("cut", "joined"),
    [
        ("the sea , the ship .", "the sea, the ship."),
        ("don ' t run", "don't run"),
        ("the dog ' s ball", "the dog's ball"),
        ("do n't run", "don't run"),
        ("the ( sea ) is", "the (sea) is"),
        ("' the sea '", "' the sea '"),
        ("", ""),
    ],
    ids=["marks", "letters", "possessive", "treebank", "brackets", "quotes", "empty"],
)
def test_words_are_joined_as_people_write_them(cut, joined):
    tokenizer = word_tokenizer([*LIST, "s", "n't", "do", "(", ")"])
    entries = {
        word: at for at, word in enumerate(public_words(tokenizer, digest(tokenizer), labels=1, max_tokens=9).entries)
    }
    words = public_words(tokenizer, digest(tokenizer), labels=1, max_tokens=9)
    # A list of whole words may have n't, though the tokenizer never gives it.
    assert words.text([entries[word] for word in cut.split()]) == joined
