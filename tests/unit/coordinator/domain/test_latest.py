"""The largest and the median of the newest numbers."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.latest import Latest

FINITE = st.floats(min_value=0, max_value=1e300)


@given(st.lists(st.tuples(st.sampled_from("abcdefg"), FINITE | st.sampled_from([1.0, 2.0])), min_size=1, max_size=40))
def test_it_is_as_if_all_numbers_were_looked_at(taken):
    latest, numbers = Latest(), {}
    for key, number in taken:
        latest.take(key, number)
        numbers[key] = number
        assert latest.largest == max(numbers.values())
        assert latest.median == statistics.median(numbers.values())


def test_there_is_no_largest_of_nothing():
    for look in (lambda: Latest().largest, lambda: Latest().median):
        with pytest.raises(IndexError):
            look()
