"""Tokens: BERT's own word pieces, whole words, and matrices padded and cut as the model needs."""

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learning.text.coverage import Coverage
from learning.text.encoder import (
    TextEncoder,
    TokenizerInvalid,
    VocabularyInvalid,
    read_vocabulary,
    word_tokenizer,
    wordpiece_tokenizer,
)
from tests.support.places import SHARED_DATA

SHARED = SHARED_DATA
PIECES = ["[PAD]", "[UNK]", "play", "##ing", "##s", "cafe", ",", "!", "the"]
WORDS = ["the", "cat", "sat", "Cat", ",", "the 0.1 0.2"]


def test_word_pieces_are_berts() -> None:
    encoder = TextEncoder(wordpiece_tokenizer(PIECES), 16, 1)
    # Lower case without accents, punctuation apart, the longest piece first; a word that does not fit is unknown.
    assert encoder.encode(["The Playing, CAFÉ! plays xyzzy"]).tolist() == [[8, 2, 3, 6, 5, 7, 2, 4, 1]]
    assert (encoder.vocabulary_size, encoder.pad_id) == (9, 0)


def test_words_are_whole_and_lower_case() -> None:
    encoder = TextEncoder(word_tokenizer(WORDS), 16, 1)
    # [PAD] and [UNK] come first; "Cat" and the second "the" are already in the list.
    assert encoder.encode(["The CAT,sat dog"]).tolist() == [[2, 3, 5, 4, 1]]
    assert (encoder.vocabulary_size, encoder.pad_id) == (6, 0)


def test_batches_are_padded_to_their_longest_and_to_the_widest_filter() -> None:
    encoder = TextEncoder(word_tokenizer(WORDS), max_tokens=4, min_tokens=3)
    ids = encoder.encode(["the cat sat the cat sat", "cat", ""])
    assert ids.tolist() == [[2, 3, 4, 2], [3, 0, 0, 0], [0, 0, 0, 0]]
    assert ids.dtype == np.int64
    assert encoder.encode(["cat"]).tolist() == [[3, 0, 0]]
    assert encoder.encode([]).shape == (0, 3)


def test_special_tokens_are_not_recognised_in_text() -> None:
    """Padding inside a text would let its author end it early."""
    words = TextEncoder(word_tokenizer(WORDS), 16, 1).encode(["the [PAD] cat [pad]"])
    pieces = TextEncoder(wordpiece_tokenizer(PIECES), 16, 1).encode(["the [PAD] play"])
    assert 0 not in words
    assert 0 not in pieces


def test_half_a_surrogate_pair_does_not_end_a_prediction() -> None:
    assert TextEncoder(word_tokenizer(WORDS), 16, 1).encode(["cat \udcff"]).tolist() == [[3, 1]]


@given(st.lists(st.text(alphabet=st.characters(), max_size=80), min_size=1, max_size=5))
def test_any_text_becomes_ids_within_the_vocabulary(texts: list[str]) -> None:
    for encoder in ENCODERS:
        ids = encoder.encode(texts)
        assert ids.shape[0] == len(texts)
        assert encoder.min_tokens <= ids.shape[1] <= encoder.max_tokens
        assert ids.min() >= 0
        assert ids.max() < encoder.vocabulary_size
        # Padding is after a text and nowhere else.
        assert all(not row[np.argmin(row != 0) :].any() for row in ids if (row == 0).any())


ENCODERS = [TextEncoder(word_tokenizer(WORDS), 8, 2), TextEncoder(wordpiece_tokenizer(PIECES), 8, 2)]


@pytest.mark.parametrize("kind", ["word", "wordpiece"])
def test_the_same_list_gives_the_same_bytes_in_every_process(kind: str) -> None:
    program = (
        f"import hashlib; from learning.text.encoder import {kind}_tokenizer as t; "
        "print(hashlib.sha256(t(['[PAD]', '[UNK]'] + [f'w{n}' for n in range(500)])).hexdigest())"
    )
    # Different seeds of Python's hashing and of the library's tables.
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment(seed)
        ).stdout
        for seed in ("1", "2")
    }
    make = word_tokenizer if kind == "word" else wordpiece_tokenizer
    here = hashlib.sha256(make(["[PAD]", "[UNK]"] + [f"w{n}" for n in range(500)])).hexdigest()
    assert digests == {here + "\n"}


def environment(seed: str) -> dict[str, str]:
    return {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["[PAD]", "a", "", "[UNK]"], "line 3: the entry is empty"),
        (["[PAD]", "a", "[UNK]", "a"], "line 4: the entry is already on line 2"),
        (["a", "[UNK]"], r"need a \[PAD\] line"),
        (["[PAD]", "a"], r"need a \[UNK\] line"),
    ],
)
def test_a_vocabulary_whose_line_numbers_cannot_be_ids_is_refused(lines: list[str], says: str) -> None:
    with pytest.raises(VocabularyInvalid, match=says):
        wordpiece_tokenizer(lines)


def test_a_list_without_words_is_refused() -> None:
    with pytest.raises(VocabularyInvalid, match="there are no words"):
        word_tokenizer(["", "[pad]", " "][:1])


def test_bytes_that_are_no_tokenizer_are_refused() -> None:
    with pytest.raises(TokenizerInvalid, match=r"not a tokenizer\.json"):
        TextEncoder(b"{}", 8, 2)
    content = json.loads(word_tokenizer(WORDS))
    del content["model"]["vocab"]["[PAD]"]
    with pytest.raises(TokenizerInvalid, match=r"no \[PAD\] entry"):
        TextEncoder(json.dumps(content).encode(), 8, 2)
    with pytest.raises(ValueError, match="must lie between 1 and max_tokens"):
        TextEncoder(word_tokenizer(WORDS), 2, 3)


def test_the_files_padding_truncation_and_special_tokens_are_ignored() -> None:
    content = json.loads(word_tokenizer(WORDS))
    content["truncation"] = {"direction": "Left", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 7},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "cat",
    }
    content["post_processor"] = {"type": "BertProcessing", "sep": ["sat", 4], "cls": ["cat", 3]}
    encoder = TextEncoder(json.dumps(content).encode(), 3, 1)
    assert encoder.encode(["the cat sat the", "sat"]).tolist() == [[2, 3, 4], [4, 0, 0]]


def test_ids_with_gaps_need_rows_up_to_the_largest() -> None:
    content = json.loads(word_tokenizer(WORDS))
    content["model"]["vocab"]["far"] = 40
    assert TextEncoder(json.dumps(content).encode(), 3, 1).vocabulary_size == 41


def test_vocabulary_files_are_plain_or_gz(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("a\nb\u2028c\r\nd", encoding="utf-8", newline="")
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress("a\nb\u2028c\r\nd\n".encode()))
    expected = ["a", "b\u2028c", "d"]
    assert read_vocabulary(tmp_path / "plain.txt") == read_vocabulary(tmp_path / "packed.txt.gz") == expected


def test_a_missing_vocabulary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VocabularyInvalid, match=r"none\.txt does not exist"):
        read_vocabulary(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(VocabularyInvalid, match="is empty"):
        read_vocabulary(tmp_path / "empty.txt")


def test_berts_vocabulary_agrees_with_berts_tokenizer() -> None:
    path = SHARED / "bert_vocab" / "bert-base-uncased-vocab.txt.gz"
    if not path.exists():
        pytest.skip("BERT's vocabulary is not beside the repository")
    from tokenizers import BertWordPieceTokenizer

    lines = read_vocabulary(path)
    encoder = TextEncoder(wordpiece_tokenizer(lines), 64, 5)
    assert (encoder.vocabulary_size, encoder.pad_id) == (30522, 0)
    peer = BertWordPieceTokenizer({piece: number for number, piece in enumerate(lines)}, lowercase=True)
    texts = [
        "What 's the average age of Bjørn Borg 's coaches ?",
        "Unbelievably, électroencéphalographie costs £37.50 -- 値段!",
        "pneumonoultramicroscopicsilicovolcanoconiosis " + "x" * 101,
    ]
    for text in texts:
        expected = peer.encode(text, add_special_tokens=False).ids
        assert encoder.encode([text])[0, : len(expected)].tolist() == expected


@pytest.mark.parametrize("frame", [False, True])
def test_coverage_counts_unknown_tokens_and_texts_that_are_cut(frame: bool) -> None:
    tokenizer = wordpiece_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "heron"])
    encoder = TextEncoder(tokenizer, 4 + 2 * frame, 1, frame=frame)
    # The second has exactly as many tokens as there is room for; the third has one more.
    found = encoder.coverage(["a heron", "an owl , heron", "a a a a owl", ""])
    assert found == Coverage(texts=4, cut=1, tokens=10, unknown=3)
    assert (found.cut_share, found.unknown_share) == (0.25, 0.3)
    assert found.sentence(4).startswith("30.0 % of the tokens are unknown words, and 25.0 % of the texts are cut")
    assert encoder.coverage([]).as_json(4)["unknown_share"] == 0.0


@given(st.lists(st.lists(st.sampled_from(["a", "heron", "owl", "reed"]), max_size=9), max_size=5))
def test_coverage_is_what_a_longer_encoder_shows(texts: list[list[str]]) -> None:
    """Counted again word by word."""
    encoder = TextEncoder(word_tokenizer(["a", "heron"]), 4, 1)
    found = encoder.coverage([" ".join(words) for words in texts])
    kept = [word for words in texts for word in words[:4]]
    unknown = sum(word in ("owl", "reed") for word in kept)
    assert found == Coverage(len(texts), sum(len(words) > 4 for words in texts), len(kept), unknown)
