"""The rules that combine the groups' means: what they compute, what they withstand, and what they do not."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coordinator.robust import add_gaussian, combine, shares
from secure_agg import SystemRandom
from tacit.job import Aggregation
from tests.support.sum_fleet import SeededRandom

ROBUST = {
    "median": Aggregation(groups=5, combine="median"),
    "trimmed-mean": Aggregation(groups=5, combine="trimmed-mean", trim=2),
    "reject-outliers": Aggregation(groups=5, combine="reject-outliers"),
}
values = st.floats(-10, 10, width=32)


def combined(rows, numbers, width=4):
    """Combines rows as a caller does: it first measures the groups, then combines blocks of coordinates."""
    blocks = [rows[:, at : at + width] for at in range(0, rows.shape[1], width)]
    kept = shares(blocks) if numbers.combine == "reject-outliers" else ()
    return np.concatenate([combine(block, numbers, kept) for block in blocks])


def inliers(blocks):
    return tuple(share > 0 for share in shares(blocks))


def test_the_rules_by_hand():
    rows = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0], [100.0, -500.0]])
    assert combine(rows, Aggregation(groups=5)).tolist() == [22.0, -80.0]
    assert combine(rows, ROBUST["median"]).tolist() == [3.0, 20.0]
    assert combine(rows, Aggregation(groups=5, combine="trimmed-mean", trim=1)).tolist() == [3.0, 20.0]
    assert combine(rows, ROBUST["trimmed-mean"]).tolist() == [3.0, 20.0]
    # Distances from (3, 20): 10.2, 1, 10, 20.0, 529. Their median is 10.2 (index 2 after 1 and 10), of the first group.
    kept = shares([rows])
    assert kept == pytest.approx((1, 1, 1, math.hypot(2, 10) / math.hypot(1, 20), 0))
    # The fourth, at (1, 20) from there, is clipped to the median distance; the mean is over four groups.
    drawn = kept[3] * np.array([1, 20])
    assert combine(rows, ROBUST["reject-outliers"], kept) == pytest.approx([3 + (-3 + drawn[0]) / 4, 20 + drawn[1] / 4])


@given(arrays(np.float64, (5, 9), elements=values), st.integers(0, 2), st.permutations(range(5)), st.data())
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_two_bad_groups_of_five_cannot_leave_the_good_ones_range(rule, good, bad, order, data):
    rows = good.copy()
    rows[:bad] = data.draw(arrays(np.float64, (bad, 9), elements=st.floats(-1e30, 1e30)))
    result = combined(rows[list(order)], ROBUST[rule])
    assert (result >= good[bad:].min(axis=0) - 1e-9).all()
    assert (result <= good[bad:].max(axis=0) + 1e-9).all()


@given(arrays(np.float64, (5, 9), elements=values), st.integers(0, 2), st.permutations(range(5)), st.data())
@settings(max_examples=100, deadline=None)
def test_rejection_stays_within_the_furthest_good_groups_distance(good, bad, order, data):
    rows = good.copy()
    rows[:bad] = data.draw(arrays(np.float64, (bad, 9), elements=st.floats(-1e6, 1e6)))
    median = np.median(rows, axis=0)
    result = combined(rows[list(order)], ROBUST["reject-outliers"])
    furthest = max(np.linalg.norm(row - median) for row in rows[bad:])
    assert np.linalg.norm(result - median) <= furthest * (1 + 1e-9) + 1e-9


def test_a_group_just_short_of_rejection_gains_nothing():
    random = np.random.default_rng(5)
    rows = random.normal(0, 1, (5, 400))
    # Moving as far away as the rule allows gains nothing.
    aim = random.normal(0, 1, 400)
    aim /= np.linalg.norm(aim)
    pulls = []
    for by in (0.5, 1.0, 1.5, 1.9, 2.5):
        rows[2] = by * 20 * aim
        kept = shares([rows])
        pulls.append(float(combine(rows, ROBUST["reject-outliers"], kept) @ aim))
    assert inliers([rows]) == (True, True, False, True, True)
    # Without clipping, the third would pull half as much again as the second, and the fourth nearly twice as much.
    assert pulls[0] < pulls[1]
    assert pulls[2] < 1.15 * pulls[1]
    assert pulls[3] < 1.2 * pulls[1]
    assert pulls[4] < pulls[0]


def test_one_group_moves_the_mean_at_will():
    rows = np.zeros((5, 9))
    rows[3] = 1e9
    assert combined(rows, Aggregation(groups=5)).min() == pytest.approx(2e8)
    for numbers in ROBUST.values():
        assert not combined(rows, numbers).any()


def test_three_bad_groups_of_five_defeat_every_rule():
    # The guarantees assume that fewer than half of the groups are bad. This shows that they need it.
    rows = np.zeros((5, 9))
    rows[:3] = 50.0
    for numbers in ROBUST.values():
        assert combined(rows, numbers).min() == pytest.approx(50)


@given(arrays(np.float64, st.tuples(st.integers(3, 8), st.integers(1, 12)), elements=values))
@settings(max_examples=100, deadline=None)
def test_some_group_is_always_kept_and_order_and_blocks_do_not_matter(rows):
    kept = inliers([rows])
    assert any(kept)
    assert all(0 <= share <= 1 for share in shares([rows]))
    split = [rows[:, at : at + 1] for at in range(rows.shape[1])]
    near = np.sqrt((rows**2).sum(axis=1)), np.sqrt(((rows - np.median(rows, axis=0)) ** 2).sum(axis=1))
    # A rounding error of one bit may decide a borderline group either way, but no other.
    for one, other, *measures in zip(kept, inliers(split), *near, strict=True):
        middles = [np.sort(each)[len(each) // 2] for each in near]
        if all(abs(measure - 2 * middle) > 1e-9 for measure, middle in zip(measures, middles, strict=True)):
            assert one == other
    assert inliers([rows[::-1]])[::-1] == kept


def test_groups_that_agree_are_all_kept():
    random = np.random.default_rng(3)
    rows = random.normal(0.3, 1, (10, 5000))
    assert inliers([rows]) == (True,) * 10
    rows[4] *= 3
    assert inliers([rows]) == (*(True,) * 4, False, *(True,) * 5)
    # This group is opposite and no longer than the others, so its distance reveals it, not its length.
    rows = np.full((5, 100), 1.0) + random.normal(0, 0.1, (5, 100))
    rows[2] *= -1
    assert inliers([rows]) == (True, True, False, True, True)


@pytest.mark.parametrize(
    ("numbers", "groups"),
    [(ROBUST["median"], 2), (ROBUST["trimmed-mean"], 4), (Aggregation(groups=2), 0)],
    ids=["median", "trimmed-mean", "mean"],
)
def test_fewer_groups_than_a_rule_needs_are_refused(numbers, groups):
    with pytest.raises(ValueError, match="the rule needs"):
        combine(np.zeros((groups, 3)), numbers)
    with pytest.raises(ValueError, match="needs 3"):
        shares([np.zeros((2, 3))])
    with pytest.raises(ValueError, match="no block"):
        shares([])
    for kept in ((), (1.0, 1.0), (0.0, 0.0, 0.0)):
        with pytest.raises(ValueError, match="shares for 3 groups"):
            combine(np.zeros((3, 3)), ROBUST["reject-outliers"], kept)


def test_noise_is_gaussian_with_the_given_std_and_fresh_each_time():
    size = 200_001
    one, other = np.zeros(size), np.zeros(size)
    source = SeededRandom("noise after")
    add_gaussian(one, 0.25, source)
    add_gaussian(other, 0.25, source)
    for values_ in (one, other):
        # Five standard deviations of each estimate.
        assert abs(values_.mean()) < 5 * 0.25 / math.sqrt(size)
        assert abs(values_.std() - 0.25) < 5 * 0.25 / math.sqrt(2 * size)
        kurtosis = float((values_**4).mean()) / 0.25**4
        assert abs(kurtosis - 3) < 5 * math.sqrt(96 / size)
        # The two of a pair are independent, as are neighbours.
        half = (size + 1) // 2
        assert abs(np.corrcoef(values_[: size - half], values_[half:])[0, 1]) < 5 / math.sqrt(half)
        assert abs(np.corrcoef(values_[:-1], values_[1:])[0, 1]) < 5 / math.sqrt(size)
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size)


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_noise_is_added_to_every_value(size):
    values_ = np.full(size, 5.0)
    add_gaussian(values_, 1.0, SystemRandom())
    assert (values_ != 5).all()
    still = np.full(size, 5.0)
    add_gaussian(still, 0.0, SystemRandom())
    assert (still == 5).all()
    with pytest.raises(ValueError, match="standard deviation"):
        add_gaussian(still, math.nan, SystemRandom())
    with pytest.raises(ValueError, match="standard deviation"):
        add_gaussian(still, -1, SystemRandom())
