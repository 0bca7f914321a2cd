"""How far one row moves an answer to a measurement, over every small data set and every neighbour of it."""

import itertools

import numpy as np
import pytest

from learning.validation.contribution import by_label, metrics_of
from tacit.measurement import Measurement
from tacit.question import distance_of
from tacit.validation import HALF

BOUND = 4.0
LABELS = ("a", "b")
# One row for each label, unit and extreme of loss and answer.
ROWS = [
    (label, unit, loss, right)
    for label in range(2)
    for unit in ("one text", "another")
    for loss, right in ((0.0, True), (BOUND, False), (BOUND, True))
]
WHOLE = Measurement(job="desk", document=bytes(32), weights=bytes(32), manifest=bytes(32), values=1)
BROKEN_DOWN = WHOLE.model_copy(update={"breakdown": LABELS})


class Always:
    """A source of one number: every unit's coin is the same in all data sets, as in the proof."""

    def __init__(self, share):
        self.word = int(share * 2**64).to_bytes(8, "little")

    def bytes(self, n, /):
        return self.word * (n // 8)


def answer(question, rows, coin):
    losses = np.array([loss for _, _, loss, _ in rows], dtype=np.float64)
    right = np.array([answered for _, _, _, answered in rows], dtype=bool)
    units = [unit for _, unit, _, _ in rows]
    if not question.breakdown:
        return metrics_of(losses, right, units, BOUND, Always(coin))
    labels = np.array([label for label, _, _, _ in rows], dtype=np.int64)
    return by_label(losses, right, labels, len(LABELS), units, BOUND, Always(coin))


def answers(question, coin):
    """The answer to every data set of up to three rows, whose order does not matter."""
    sets = (each for size in range(4) for each in itertools.combinations_with_replacement(range(len(ROWS)), size))
    return {each: answer(question, [ROWS[at] for at in each], coin) for each in sets}


def furthest(found, pairs):
    return max(int(((found[one] - found[other]) ** 2).sum()) for one, other in pairs)


@pytest.mark.parametrize("coin", [0.0, 0.4, 0.999])
@pytest.mark.parametrize("question", [WHOLE, BROKEN_DOWN], ids=["whole", "by-label"])
def test_no_neighbour_is_further_away_than_the_charge_assumes(question, coin):
    found = answers(question, coin)
    assert all(len(each) == question.bins for each in found.values())
    less = [(each, each[:at] + each[at + 1 :]) for each in found for at in range(len(each))]
    largest = furthest(found, less)
    assert largest <= distance_of(question, "add-remove", "example") ** 2
    # The bounds are reached, so less noise would not do.
    assert largest == 3 * HALF**2
    others = [
        (each, tuple(sorted((*each[:at], other, *each[at + 1 :]))))
        for each in found
        for at in range(len(each))
        for other in range(len(ROWS))
    ]
    largest = furthest(found, others)
    assert largest <= distance_of(question, "replace-one", "example") ** 2
    assert largest == 9 * HALF**2


def test_a_replacement_can_move_six_numbers_of_a_breakdown():
    """So the pair of distributions of metrics, which moves three, is not used for it."""
    one, other = ((0, "one text", 0.0, True),), ((1, "one text", 0.0, True),)
    moved = answer(BROKEN_DOWN, one, 0.0) - answer(BROKEN_DOWN, other, 0.0)
    assert np.abs(moved).tolist() == [HALF] * 6
    assert np.abs(answer(WHOLE, one, 0.0) - answer(WHOLE, other, 0.0)).max() == 0


def test_a_text_of_several_labels_would_move_a_breakdown_further_if_it_were_one_unit():
    """Why a breakdown is refused where a whole member, or anything of several rows, is what the ledger protects."""
    both = ((0, "one text", 0.0, True), (1, "one text", 0.0, True))
    moved = int((answer(BROKEN_DOWN, both, 0.0) ** 2).sum())
    assert moved > distance_of(BROKEN_DOWN, "add-remove", "example") ** 2
