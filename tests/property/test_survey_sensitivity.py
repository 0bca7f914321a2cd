"""How far one unit moves an answer, in whole numbers, over every small data set and every neighbour of it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from learning.survey.counts import counts_of
from learning.text.encoder import word_tokenizer
from learning.text.examples import Example
from tacit.survey import LabelHistogram, LengthHistogram, RowHistogram, Survey, UnknownHistogram, distance_of

TOKENIZER = word_tokenizer(["one", "two"])
# One row for each combination of bins: label, length, and share of unknown words.
ROWS = [Example(text, label) for label in ("a", "b", "z") for text in ("one", "nobody", "one two one", "one nobody no")]
LABELS = LabelHistogram(labels=("a", "b"))
LENGTHS = LengthHistogram(at_most=(1, 2))
UNKNOWN = UnknownHistogram(at_most=(10, 70))
NUMBERS = RowHistogram(at_most=(0, 1, 2))
QUESTIONS = [
    Survey(histograms=chosen)
    for size in (1, 2, 3, 4)
    for chosen in itertools.combinations((LABELS, LENGTHS, UNKNOWN, NUMBERS), size)
]


def answers(question, unit):
    """The answer to every data set of up to three rows, whose order does not matter."""
    tokenizer = TOKENIZER if question.reads_tokens else None
    sets = (each for size in range(4) for each in itertools.combinations_with_replacement(range(len(ROWS)), size))
    return {each: counts_of(question, [ROWS[at] for at in each], tokenizer, unit) for each in sets}


def squares(found, pairs):
    return [int(((found[one] - found[other]) ** 2).sum()) for one, other in pairs]


def more_or_less(found):
    """Each data set with each that has one row less."""
    return [(each, each[:at] + each[at + 1 :]) for each in found for at in range(len(each))]


def replaced(found):
    return [
        (each, tuple(sorted((*each[:at], other, *each[at + 1 :]))))
        for each in found
        for at in range(len(each))
        for other in range(len(ROWS))
    ]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: "-".join(at.kind for at in each.histograms))
def test_no_neighbour_is_further_away_than_the_charge_assumes(question):
    asked, moved = len(question.histograms), NUMBERS in question.histograms
    rows = answers(question, "example")
    largest = max(squares(rows, more_or_less(rows)))
    assert largest <= distance_of(question, "add-remove", "example") ** 2
    # The bound is reached, so less noise would not do.
    assert largest == asked + moved
    largest = max(squares(rows, replaced(rows)))
    assert largest <= distance_of(question, "replace-one", "example") ** 2
    assert largest == 2 * (asked - moved)

    members = answers(question, "member")
    nothing = members[()]
    assert not nothing.any()
    found = [int((each**2).sum()) for each in members.values()]
    assert max(found) == asked
    assert max(found) <= distance_of(question, "add-remove", "member") ** 2
    # Any member in place of any other.
    distinct = np.unique(np.array(list(members.values())), axis=0)
    largest = max(int(((one - other) ** 2).sum()) for one in distinct for other in distinct)
    assert largest <= distance_of(question, "replace-one", "member") ** 2
    assert largest == 2 * asked


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: "-".join(at.kind for at in each.histograms))
def test_a_person_with_all_its_rows_moves_an_answer_no_further_than_the_charge_assumes(question):
    """Every data set of one row of somebody else and up to three rows of a person, against the same without them."""
    tokenizer, largest, by_rows = TOKENIZER if question.reads_tokens else None, 0, 0
    sets = (each for size in range(1, 4) for each in itertools.combinations_with_replacement(range(len(ROWS)), size))
    other = replace(ROWS[0], person="ben")
    without = {unit: counts_of(question, [other], tokenizer, unit) for unit in ("person", "example")}
    for each in sets:
        data = [other, *(replace(ROWS[at], person="ann") for at in each)]
        moved = {
            unit: int(((counts_of(question, data, tokenizer, unit) - before) ** 2).sum())
            for unit, before in without.items()
        }
        largest, by_rows = max(largest, moved["person"]), max(by_rows, moved["example"])
    bound = len(question.histograms) + (NUMBERS in question.histograms)
    assert largest == bound
    assert largest <= distance_of(question, "add-remove", "person") ** 2
    # Counting rows, the same person moves the answer further than a charge for a person covers.
    if question.histograms != (NUMBERS,):
        assert by_rows > bound


def test_a_distance_is_never_below_the_true_root():
    from fractions import Fraction

    for question in QUESTIONS:
        for adjacency, unit in itertools.product(("add-remove", "replace-one"), ("example", "person", "member")):
            moved = NUMBERS in question.histograms and adjacency == "add-remove" and unit != "member"
            squared = len(question.histograms) * (2 if adjacency == "replace-one" else 1) + moved
            assert Fraction(distance_of(question, adjacency, unit)) ** 2 >= squared
