"""Rows of a member's own entries, made from a base's pieces."""

import numpy as np

from learning.text.composed import composed_rows, pieces_of
from learning.text.encoder import wordpiece_tokenizer
from learning.text.tables import entries_of
from learning.text.vocabulary import own_tokenizer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "her", "he", "##on", "##r", "##o", "##n", "h", "##ed", "r"]
BASE = entries_of(wordpiece_tokenizer(PIECES))
TABLE = np.arange(3 * len(PIECES), dtype=np.float32).reshape(-1, 3)


def named(entry: str) -> list[str]:
    return [PIECES[at] for at in pieces_of(entry, BASE)]


def test_an_entry_is_split_longest_piece_first_and_stays_inside_a_word():
    assert named("heron") == ["her", "##on"]
    assert named("herono") == ["her", "##on", "##o"]
    assert named("her") == ["her"]
    assert named("##ron") == ["##r", "##on"]
    assert named("##on") == ["##on"]
    # The base has no such letter at this place.
    assert (named("zebra"), named("hez"), named("##h"), named("##")) == ([], [], [], [])


def test_the_split_is_that_of_the_bases_tokenizer():
    from tokenizers import Tokenizer

    base = Tokenizer.from_str(wordpiece_tokenizer(PIECES).decode())
    for word in ("heron", "her", "he", "heronr", "herr", "red", "hereder"):
        spelled = base.encode(word, add_special_tokens=False).tokens
        assert named(word) == ([] if spelled == ["[UNK]"] else spelled), word


def test_a_row_is_the_mean_of_its_pieces_rows():
    own = {"[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "heron": 4, "her": 5, "zebra": 7}
    rows = composed_rows(own, BASE, TABLE)
    assert rows.shape == (8, 3)
    assert np.array_equal(rows[4], (TABLE[4] + TABLE[6]) / 2)
    assert np.array_equal(rows[5], TABLE[4])
    # A word that the base cannot spell is one that it does not know.
    assert np.array_equal(rows[7], TABLE[1])
    assert np.array_equal(rows[1:4], TABLE[1:4])
    # The padding's row, and one without an entry.
    assert not rows[[0, 6]].any()


def test_every_piece_of_a_members_own_vocabulary_gets_a_row():
    tokenizer = own_tokenizer(["her heron", "heron red", "he"], "wordpiece", 40)
    own = entries_of(tokenizer)
    rows = composed_rows(own, BASE, TABLE)
    assert len(rows) == len(own) + 1
    for entry, at in own.items():
        assert np.allclose(rows[at], TABLE[pieces_of(entry, BASE) or [1]].mean(axis=0)), entry
