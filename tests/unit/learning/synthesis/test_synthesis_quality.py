"""How much a synthetic corpus resembles its texts, on corpora where the answer is obvious."""

import math

import pytest

from learning.synthesis.quality import (
    canaries_reproduced,
    exposure,
    longest_verbatim,
    ngram_overlap,
    words_of,
)

TRAINING = ["The ship is on the sea.", "my code is 7 3 9", "a dog"]


def test_words_are_lower_case_with_marks_apart():
    assert words_of("Don't, SHE said") == ("don", "'", "t", ",", "she", "said")


@pytest.mark.parametrize(("n", "share"), [(1, 5 / 6), (2, 3 / 4), (3, 2 / 3), (4, 1.0)], ids=["1", "2", "3", "4"])
def test_overlap_counts_runs_that_occur_in_training_texts(n, share):
    # "the ship is on" occurs as it is; of "cat dog" only one word does.
    synthetic = ["the ship is on", "cat dog"] if n < 3 else ["the ship is on", "is on fire"][: 2 if n == 3 else 1]
    assert ngram_overlap(synthetic, TRAINING, n) == pytest.approx(share)


def test_runs_do_not_cross_texts():
    assert ngram_overlap(["sea . my code"], TRAINING, 3) == 0
    assert longest_verbatim(["sea . my code"], TRAINING).words == 2


def test_an_overlap_without_ngrams_is_nan():
    assert math.isnan(ngram_overlap(["a dog"], TRAINING, 3))
    with pytest.raises(ValueError, match="at least one word"):
        ngram_overlap(["a dog"], TRAINING, 0)


def test_the_longest_run_is_found():
    found = longest_verbatim(["no run", "see MY code is 7 3 here", "the ship"], TRAINING)
    assert (found.words, found.run) == (5, "my code is 7 3")
    assert longest_verbatim([], TRAINING).words == 0
    assert longest_verbatim(["nothing shared"], TRAINING).run == ""


def test_canaries_are_counted_by_text_and_as_whole_runs():
    made = ["so my code is 7 3 9 .", "my code is 7 3 9", "my code is 7 3", "code my is 7 3 9"]
    assert canaries_reproduced(made, ["My code is 7 3 9", "a dog", ""]) == [2, 0, 0]


def test_exposure_is_the_rank_among_all_candidates():
    assert exposure(0.5, [1.0] * 63) == 6
    assert exposure(2.0, [1.0] * 63) == 0
    assert exposure(1.0, [1.0, *[2.0] * 62]) == 5  # A tie counts against it.
