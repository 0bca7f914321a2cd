"""What a member counts: each row once a histogram, the question's bins alone, everything else as other."""

import numpy as np
import pytest

from learning.survey.counts import counts_of
from learning.text.encoder import word_tokenizer
from learning.text.examples import Example
from tacit.survey import MAX_LENGTH, LabelHistogram, LengthHistogram, RowHistogram, Survey, UnknownHistogram

TOKENIZER = word_tokenizer(["one", "two", "three"])
LABELS = LabelHistogram(labels=("a", "b"))
LENGTHS = LengthHistogram(at_most=(1, 3))
UNKNOWN = UnknownHistogram(at_most=(0, 25, 50))
ROWS = RowHistogram(at_most=(0, 2, 5))


def counted(histogram, *examples, unit="example"):
    question = Survey(histograms=(histogram,))
    return counts_of(question, examples, TOKENIZER if question.reads_tokens else None, unit).tolist()


def test_labels_that_nobody_asked_about_and_rows_without_one_are_other():
    rows = [Example("x", label) for label in ("a", "b", "a", "A", "secret", None, "other")]
    assert counted(LABELS, *rows) == [2, 1, 4]
    # No bin depends on what the data holds.
    assert len(counted(LABELS)) == len(counted(LABELS, *rows)) == 3


def test_lengths_fall_into_the_bin_whose_bound_they_do_not_exceed():
    texts = ("", "one", "one two", "one two three", "one two three one", "one " * 6000)
    assert counted(LENGTHS, *(Example(text, "a") for text in texts)) == [2, 2, 2]
    largest = LengthHistogram(at_most=(MAX_LENGTH,))
    for words, expected in ((MAX_LENGTH, [1, 0]), (MAX_LENGTH + 1, [0, 1]), (3 * MAX_LENGTH, [0, 1])):
        assert counted(largest, Example("one " * words, "a")) == expected


def test_a_pair_counts_once_with_the_tokens_of_both_texts():
    assert counted(LENGTHS, Example("one", "a", "two three")) == [0, 1, 0]
    assert counted(LENGTHS, Example("one two", "a", "three one")) == [0, 0, 1]
    assert counted(UNKNOWN, Example("one nobody", "a", "two three")) == [0, 1, 0, 0]


def test_shares_of_unknown_words_are_compared_in_whole_numbers():
    texts = {"": 0, "one": 0, "one two three nobody": 1, "one nobody": 2, "one nobody knows": 3, "nobody": 3}
    for text, place in texts.items():
        found = counted(UNKNOWN, Example(text, "a"))
        assert found == [int(at == place) for at in range(4)], text
    # 29 of 100 in floating point: 0.29 * 100 is 28.999999999999996.
    exact = UnknownHistogram(at_most=(28, 29))
    assert counted(exact, Example("nobody " * 29 + "one " * 71, "a")) == [0, 1, 0]


def test_the_member_counts_once_in_the_histogram_of_rows():
    for rows, expected in ((0, [1, 0, 0, 0]), (2, [0, 1, 0, 0]), (3, [0, 0, 1, 0]), (6, [0, 0, 0, 1])):
        assert counted(ROWS, *[Example("x", "a")] * rows) == expected


def test_as_one_unit_a_member_counts_once_in_each_histogram_where_most_of_its_rows_are():
    rows = [Example("one", "b"), Example("two", "b"), Example("one two three one", "a")]
    question = Survey(histograms=(LABELS, LENGTHS, ROWS))
    assert counts_of(question, rows, TOKENIZER, "member").tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 1, 0]
    # Of equal bins the first counts.
    assert counted(LABELS, Example("x", "b"), Example("x", "a"), unit="member") == [1, 0, 0]
    # A member without a row is not there.
    assert not counts_of(question, [], TOKENIZER, "member").any()


def test_a_person_counts_once_in_each_histogram_of_rows_where_most_of_its_rows_are():
    ann = [
        Example("one", "b", None, "ann"),
        Example("two", "b", None, "ann"),
        Example("one two three one", "a", None, "ann"),
    ]
    ben = [Example("one two", "a", None, "ben")]
    question = Survey(histograms=(LABELS, LENGTHS, ROWS))
    assert counts_of(question, [ann[0], *ben, *ann[1:]], TOKENIZER, "person").tolist() == [1, 1, 0, 1, 1, 0, 0, 0, 1, 0]
    assert counts_of(question, [], TOKENIZER, "person").tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_histograms_follow_one_another_in_the_questions_order():
    rows = [Example("one nobody", "b")]
    whole = counts_of(Survey(histograms=(ROWS, UNKNOWN, LABELS, LENGTHS)), rows, TOKENIZER, "example")
    parts = [counted(each, *rows) for each in (ROWS, UNKNOWN, LABELS, LENGTHS)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert whole.sum() == 4


def test_a_question_about_tokens_needs_a_tokenizer():
    with pytest.raises(ValueError, match="no tokenizer"):
        counts_of(Survey(histograms=(LENGTHS,)), [Example("x", "a")], None, "example")
