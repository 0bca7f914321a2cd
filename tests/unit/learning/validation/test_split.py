"""The division of a member's rows into training and validation data."""

import hashlib

import numpy as np
import pytest

from learning.text.examples import Example
from learning.validation.split import Split, unit_of

KEY = bytes(range(32))
SHARE = 0.2


def units(count, name="text"):
    return [f"{name} {at}".encode() for at in range(count)]


def test_a_row_stays_on_its_side_whatever_other_rows_there_are():
    rows = units(400)
    alone = {row: bool(Split(KEY, SHARE).kept_back([row])[0]) for row in rows}
    together = Split(KEY, SHARE).kept_back(rows[::-1] + units(100, "new"))
    assert together[:400].tolist() == [alone[row] for row in rows[::-1]]


def test_the_division_is_fixed_for_good():
    """Another digest would move rows that were trained on to the other side."""
    kept = Split(KEY, SHARE).kept_back(units(64))
    assert np.packbits(kept).tobytes().hex() == "88511000c0d03308"


def test_the_share_is_kept_back_and_a_larger_one_keeps_back_the_same_rows_too():
    rows = units(20_000)
    small, large = Split(KEY, 0.2).kept_back(rows), Split(KEY, 0.3).kept_back(rows)
    # Four standard deviations of a binomial number.
    assert abs(int(small.sum()) - 4000) < 4 * 57
    assert abs(int(large.sum()) - 6000) < 4 * 65
    assert not bool((small & ~large).any())


def test_another_member_divides_the_same_rows_otherwise():
    rows = units(200)
    other = Split(hashlib.sha256(KEY).digest(), SHARE).kept_back(rows)
    assert other.tolist() != Split(KEY, SHARE).kept_back(rows).tolist()


def test_all_rows_of_a_unit_are_on_one_side():
    people = [f"person {at % 50}".encode() for at in range(1000)]
    kept = Split(KEY, SHARE).kept_back(people)
    assert 0 < kept.sum() < 1000
    assert all(len(set(kept[person::50].tolist())) == 1 for person in range(50))


def test_a_text_under_two_labels_is_one_unit_and_a_pair_is_another():
    assert unit_of(Example("good", "yes")) == unit_of(Example("good", "no"))
    pairs = {unit_of(Example("ab", None)), unit_of(Example("a", None, "b")), unit_of(Example("", None, "ab"))}
    assert len(pairs | {unit_of(Example("ab", None, ""))}) == 4


def test_an_edited_text_is_another_unit_and_moves_no_other_row():
    rows = units(300)
    split = Split(KEY, SHARE)
    before, moved = split.kept_back(rows), 0
    for at in range(50):
        edited = [*rows[:at], rows[at] + b", corrected", *rows[at + 1 :]]
        after = split.kept_back(edited)
        moved += bool(after[at] != before[at])
        assert np.delete(after, at).tolist() == np.delete(before, at).tolist()
    # Some edits change sides, at the rate of two independent draws (2 * 0.2 * 0.8).
    assert 5 < moved < 30


def test_no_more_units_are_measured_than_the_vector_has_room_for():
    rows = units(30_000)
    split = Split(KEY, SHARE)
    kept, measured = split.kept_back(rows), split.measured(rows, 1000)
    assert not bool((measured & ~kept).any())
    assert 700 < measured.sum() <= 1000
    # The rest is kept back all the same.
    assert kept.sum() > 5000


def test_a_row_is_measured_whatever_the_other_rows_are():
    """A rule such as "the first thousand units" would let one row push another out: twice the sensitivity."""
    rows = units(6_000)
    split = Split(KEY, SHARE)
    before = split.measured(rows, 200)
    # Fewer than are kept back.
    assert 0 < before.sum() < 200 < split.kept_back(rows).sum()
    for at in range(20):
        after = split.measured([*rows[:at], b"another row", *rows[at + 1 :]], 200)
        assert np.delete(after, at).tolist() == np.delete(before, at).tolist()


def test_few_units_are_all_measured():
    rows = units(100)
    split = Split(KEY, SHARE)
    assert split.measured(rows, 1000).tolist() == split.kept_back(rows).tolist()
    assert split.measured([], 1000).shape == (0,)


@pytest.mark.parametrize("max_units", [1, 2, 10, 30, 36, 50, 100, 2000])
def test_all_units_are_measured_where_the_vector_has_room_for_all_of_them(max_units):
    rows = units(max_units)
    split = Split(KEY, SHARE)
    assert split.measured(rows, max_units, everything=True).all()
    assert split.measured(rows, max_units).tolist() == split.kept_back(rows).tolist()


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("max_units", [1, 2, 10, 30, 36, 37, 50, 100])
def test_of_more_units_at_least_half_of_what_the_vector_has_room_for_are_measured(max_units, everything):
    """A charge for noise alone would tell nobody anything. Mean over many keys: one key may find no unit at all."""
    rows = units(max(10 * max_units, 100))
    keys = [hashlib.sha256(b"%d" % at).digest() for at in range(200)]
    found = [int(Split(key, SHARE).measured(rows, max_units, everything=everything).sum()) for key in keys]
    # Four standard errors of a mean of Poisson numbers.
    error = 4 * np.sqrt(max_units / 2 / len(keys))
    assert max_units / 2 - error < np.mean(found) < max_units
    assert max(found) <= max_units + 6 * np.sqrt(max_units)


@pytest.mark.parametrize("max_units", [20, 30])
@pytest.mark.parametrize("everything", [False, True])
def test_no_row_moves_another_also_where_the_vector_is_small(max_units, everything):
    """The threshold is a function of N, the share and `max_units`, whichever units there are."""
    split = Split(KEY, SHARE)
    for count in (max_units, max_units + 1, 10 * max_units):
        rows = units(count)
        before = split.measured(rows, max_units, everything=everything)
        for at in range(0, count, 7):
            for other in (b"another row", rows[0]):
                after = split.measured(
                    [*rows[:at], other, *rows[at + 1 :]], max_units, population=count, everything=everything
                )
                assert np.delete(after, at).tolist() == np.delete(before, at).tolist()


def test_rows_of_one_unit_are_never_too_many():
    rows = units(5_000)
    split = Split(KEY, SHARE)
    assert split.measured(rows, None).tolist() == split.kept_back(rows).tolist()
    assert split.measured(rows, None, everything=True).all()


@pytest.mark.parametrize(
    ("key", "share", "said"), [(b"short", 0.2, "32 bytes"), (KEY, 0.0, "share"), (KEY, 0.6, "0.5")]
)
def test_a_split_refuses_numbers_out_of_range(key, share, said):
    with pytest.raises(ValueError, match=said):
        Split(key, share)
