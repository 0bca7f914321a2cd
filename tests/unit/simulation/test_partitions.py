"""Every row is dealt once, a seed gives the same partition, and every member gets enough rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.partitions import Partition, by_column, by_label, by_quantity, by_ratios, split

LABELS = [("sport", "world", "trade")[number % 3] for number in range(590)] + ["rare"] * 10


def dealt_once(partition, rows):
    return np.array_equal(np.sort(np.concatenate(partition.members)), np.arange(rows))


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one.members, other.members, strict=True))


@pytest.mark.parametrize("alpha", [0.05, 1.0, 100.0])
def test_by_label_deals_each_row_once_in_equal_parts(alpha):
    partition = by_label(LABELS, 7, alpha, 0)
    assert dealt_once(partition, 600)
    assert {len(rows) for rows in partition.members} == {85, 86}


def test_a_small_alpha_makes_members_differ_and_a_large_one_alike():
    def purity(alpha):
        _, counts = by_label(LABELS, 20, alpha, 3).counts(LABELS)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert purity(0.05) > 0.75 > purity(1.0) > 0.5 > purity(1000.0)


def test_a_seed_decides_the_partition():
    makes = (
        lambda seed: by_label(LABELS, 6, 1.0, seed),
        lambda seed: by_quantity(600, 6, 1.0, seed),
        lambda seed: by_ratios(600, (1, 2, 3), seed),
    )
    for make in makes:
        assert same(make(5), make(5))
        assert not same(make(5), make(6))


@pytest.mark.parametrize("seed", range(5))
def test_by_quantity_gives_everybody_the_minimum_and_draws_the_rest(seed):
    partition = by_quantity(600, 10, 0.1, seed, least=12)
    sizes = [len(rows) for rows in partition.members]
    assert dealt_once(partition, 600)
    assert min(sizes) >= 12
    assert max(sizes) > 100, "an alpha of 0.1 leaves most of the rows with few members"


def test_ratios_hold_to_within_a_row_over_all_rows():
    partition = by_ratios(1001, (1, 1, 3), 0)
    assert dealt_once(partition, 1001)
    assert sorted(len(rows) for rows in partition.members) == [200, 200, 601]
    assert np.ptp(partition.members[0]) > 900


def test_a_column_makes_a_member_of_each_value_and_joins_rare_ones():
    values = ["b"] * 5 + ["a"] * 9 + ["tiny"] + ["small"] * 2
    partition = by_column(values, least=3)
    assert partition.names == ("a", "b", "small+tiny")
    assert dealt_once(partition, 17)
    assert {values[row] for row in partition.members[2]} == {"tiny", "small"}


def test_leftover_values_join_the_last_member():
    assert by_column(["a", "a", "b", "b", "c"], least=3).names == ("a+b+c",)
    assert [len(rows) for rows in by_column(["a", "a", "b", "b", "c", "c"], least=4).members] == [6]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60),
    least=st.integers(1, 8),
    members=st.integers(1, 8),
    alpha=st.floats(0.05, 50),
    seed=st.integers(0, 2**32),
)
def test_no_row_is_lost_or_doubled_and_no_member_is_short(values, least, members, alpha, seed):
    rows = len(values)
    if rows >= least:
        column = by_column(values, least=least)
        assert dealt_once(column, rows)
        assert min(map(len, column.members)) >= least
    if rows < least * members:
        with pytest.raises(ValueError, match="rows are too few"):
            by_label(values, members, alpha, seed, least=least)
        with pytest.raises(ValueError, match="rows are too few"):
            by_quantity(rows, members, alpha, seed, least=least)
        return
    for partition in (
        by_label(values, members, alpha, seed, least=least),
        by_quantity(rows, members, alpha, seed, least=least),
    ):
        assert len(partition.members) == members
        assert dealt_once(partition, rows)
        assert min(map(len, partition.members)) >= least


def test_counts_are_rows_by_label():
    names, counts = Partition((np.array([0, 1, 4]), np.array([2, 3]))).counts(["x", "y", "x", "x", "y"])
    assert names == ("x", "y")
    assert counts.tolist() == [[1, 2], [2, 0]]


def test_a_split_uses_every_row_once_and_follows_its_seed():
    rows = np.arange(100, 154)
    parts = split(rows, 7)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [38, 5, 11]
    assert np.array_equal(np.sort(np.concatenate([parts.train, parts.validation, parts.test])), rows)
    assert np.array_equal(parts.test, split(rows, 7).test)
    assert not np.array_equal(parts.test, split(rows, 8).test)


@pytest.mark.parametrize("size", [3, 4, 5, 10])
def test_the_smallest_members_have_a_row_in_each_part(size):
    parts = split(np.arange(size), 0)
    assert min(len(parts.train), len(parts.validation), len(parts.test)) >= 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: by_label(LABELS, 7, 0.0, 0), "alpha = 0 must be a number above 0"),
        (lambda: by_label(LABELS, 7, float("inf"), 0), "alpha = inf must be a number above 0"),
        (lambda: by_label(LABELS, 0, 1.0, 0), "both numbers must be 1 or more"),
        (lambda: by_quantity(9, 10, 1.0, 0), "9 rows are too few for 10 members"),
        (lambda: by_ratios(10, (), 0), "one for each member"),
        (lambda: by_ratios(10, (1, -1), 0), "each above 0"),
        (lambda: by_ratios(10, (1, 99), 0), r"ratios 1, 99 leave a member 0 of 10 rows"),
        (lambda: by_ratios(10, range(1, 100), 0), r"ratios 1, 2, 3, 4, 5, 6, 7, 8 \.\.\. \(99 in all\) leave a member"),
        (lambda: by_ratios(10, (1.0,) * 100, 0), r"^100 equal shares leave a member 0 of 10 rows"),
        (lambda: by_column(["a"], least=2), "too few"),
        (lambda: split(np.arange(2), 0), "cannot be split in three"),
        (lambda: split(np.arange(9), 0, validation=0.5, test=0.5), "leave a part empty"),
    ],
)
def test_an_impossible_partition_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
