"""What a member's vector of metrics holds, and how far one unit can move it."""

import math

import numpy as np
import pytest

from learning.validation.contribution import metrics_of, noised
from tacit.validation import HALF, METRICS, MetricNoise, distance_of
from tests.support.random_sources import Seeded

BOUND = 4.0
# Losses on whole steps, so that rounding draws nothing that differs between two neighbours.
EXTREMES = [(0.0, True), (0.0, False), (BOUND, True), (BOUND, False), (math.nan, False), (1e9, True), (-5.0, True)]


def vector(rows, units=None, seed="rounding"):
    losses = np.array([loss for loss, _ in rows], dtype=np.float64)
    correct = np.array([right for _, right in rows], dtype=bool)
    random = Seeded(seed) if isinstance(seed, str) else seed
    return metrics_of(losses, correct, range(len(rows)) if units is None else units, BOUND, random)


def test_one_unit_more_or_less_moves_the_vector_by_at_most_the_distance():
    others = [(1.0, True), (2.0, False), (3.0, True)]
    moves = [np.linalg.norm(vector([*others, row]) - vector(others)) for row in EXTREMES]
    assert max(moves) == pytest.approx(distance_of("add-remove"), rel=1e-12)
    assert max(moves) <= distance_of("add-remove")


def neighbours_of(present):
    """What one row can be: absent or training data (None), alone in its unit, or in the unit of one of the others."""
    return [None] + [(row, unit) for row in EXTREMES for unit in ("alone", "another", *present)]


def sums(rows, coin):
    """The vector of these (row, unit). Every unit's coin is the same, as in the proof."""
    return vector([row for row, _ in rows], [unit for _, unit in rows], seed=Always(coin))


class Always:
    """A source of one number."""

    def __init__(self, share):
        self.word = int(share * 2**64).to_bytes(8, "little")

    def bytes(self, n, /):
        return self.word * (n // 8)


@pytest.mark.parametrize("coin", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("rows_of_a_unit", [1, 2, 3])
def test_one_row_more_less_or_another_moves_the_vector_by_at_most_the_distance(rows_of_a_unit, coin):
    """Also where the row shares its unit with others, or an edit takes it to another unit or side."""
    moves = {"add-remove": [0.0], "replace-one": [0.0]}
    for row in [(0.0, True), (BOUND, False), (BOUND / 3, True)]:
        others = [(row, "first")] * rows_of_a_unit + [((1.0, False), "second")]
        found = [(at, sums([*others, *([at] if at else [])], coin)) for at in neighbours_of(["first", "second"])]
        absent = found[0][1]
        moves["add-remove"] += [float(np.linalg.norm(each - absent)) for _, each in found]
        moves["replace-one"] += [float(np.linalg.norm(one - other)) for _, one in found for _, other in found]
    for adjacency, each in moves.items():
        assert max(each) <= distance_of(adjacency)
    assert max(moves["add-remove"]) == pytest.approx(distance_of("add-remove"), rel=1e-12)
    if rows_of_a_unit == 1:
        # The worst case: a row that was alone joins a unit of one row, and turns over both of its means.
        assert max(moves["replace-one"]) == pytest.approx(distance_of("replace-one"), rel=1e-12)


def test_all_rows_of_a_unit_are_one_contribution():
    one = vector([(BOUND, True)])
    many = vector([(BOUND, True)] * 500, units=["person"] * 500)
    assert many.tolist() == one.tolist()
    half = vector([(BOUND, True), (0.0, False)], units=["person", "person"])
    assert half.tolist() == [0, 0, HALF]
    # Each row's loss is clipped, not their mean: one row of several moves its unit no further.
    assert vector([(3 * BOUND, True), (0.0, False)], units=["person", "person"]).tolist() == [0, 0, HALF]


def test_rounding_is_without_bias_and_stays_within_the_bounds():
    draws = np.array([vector([(BOUND / 3, True)], seed=f"{at}") for at in range(4000)])
    steps = draws[:, 0] + HALF
    assert set(steps.tolist()) == {math.floor(2 * HALF / 3), math.ceil(2 * HALF / 3)}
    # Four standard errors.
    assert abs(steps.mean() - 2 * HALF / 3) < 4 * 0.5 / math.sqrt(4000)


def test_the_noise_is_drawn_from_the_source_alone_and_has_its_standard_deviation():
    noise = MetricNoise(2.0, 1000)
    metrics = vector([(1.0, True)] * 100)
    assert noised(metrics, noise, Seeded("same")).tolist() == noised(metrics, noise, Seeded("same")).tolist()
    draws = np.array([noised(metrics, noise, Seeded(f"{at}")) - metrics for at in range(2000)]).ravel()
    # Four standard errors of a standard deviation.
    assert draws.std() == pytest.approx(noise.std, rel=4 / math.sqrt(2 * draws.size))


def test_a_member_that_measures_nothing_sends_noise_of_the_same_form():
    noise = MetricNoise(2.0, 1000)
    sent = noised(None, noise, Seeded("no"))
    assert sent.shape == (METRICS,)
    assert sent.tolist() == noised(np.zeros(3, dtype=np.int64), noise, Seeded("no")).tolist()
    assert np.any(sent != 0)


def test_a_vector_beyond_its_room_is_cut_after_the_noise():
    noise = MetricNoise(1.0, 5)
    assert noised(vector([(0.0, True)] * 50), noise, Seeded("full")).tolist() == [
        -noise.largest,
        noise.largest,
        noise.largest,
    ]


def test_no_sum_wraps_in_the_narrowest_ring():
    noise = MetricNoise(28.0, 1000)
    for members in (1, 10, 1000):
        assert members * noise.largest <= 2 ** (noise.bits_needed(members) - 1) - 1
        assert members * noise.largest > 2 ** (noise.bits_needed(members) - 2) - 1


@pytest.mark.parametrize(
    ("rows", "units", "bound"),
    [(np.zeros(3), ["a", "b"], 1.0), (np.zeros(2), ["a", "b"], 0.0), (np.zeros(2), ["a", "b"], math.nan)],
)
def test_arrays_that_do_not_fit_are_refused(rows, units, bound):
    with pytest.raises(ValueError, match=r"same rows|must be positive"):
        metrics_of(rows, np.zeros(2, dtype=bool), units, bound, Seeded("bad"))


@pytest.mark.parametrize(
    ("multiplier", "units", "said"),
    [(0.0, 10, "positive"), (math.nan, 10, "positive"), (1e4, 10, "1182"), (1.0, 0, "max_units")],
)
def test_noise_out_of_range_is_refused(multiplier, units, said):
    with pytest.raises(ValueError, match=said):
        MetricNoise(multiplier, units)
