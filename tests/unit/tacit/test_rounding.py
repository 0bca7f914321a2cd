"""Epsilons for people: a cost is never printed too low, and what is left never too high."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.rounding import apart, percent_left, rounded_down, rounded_up

EPSILONS = st.floats(min_value=0, max_value=1e12, allow_nan=False)


@pytest.mark.parametrize(
    ("epsilon", "up", "down"),
    [
        (5.57495, 5.58, 5.57),
        (0.11173, 0.112, 0.111),
        (5.57, 5.57, 5.57),
        (0.07, 0.07, 0.07),
        (0.1 + 0.2, 0.301, 0.3),
        (8.0, 8.0, 8.0),
        (9.999, 10.0, 9.99),
        (1234.5, 1240.0, 1230.0),
        (7.001e-7, 7.01e-7, 7.0e-7),
        (0.0, 0.0, 0.0),
        (math.inf, math.inf, math.inf),
    ],
)
def test_three_digits(epsilon, up, down):
    assert (rounded_up(epsilon), rounded_down(epsilon)) == (up, down)


@given(EPSILONS, st.integers(1, 6))
def test_neither_crosses_the_number_and_both_are_near(epsilon, digits):
    up, down = rounded_up(epsilon, digits), rounded_down(epsilon, digits)
    assert down <= epsilon <= up
    for each in (up, down):
        # What is printed is what was rounded.
        assert float(f"{each:g}") == each == float(f"{each:.{digits}g}")
        assert abs(each - epsilon) <= epsilon * 10.0 ** (1 - digits) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("epsilon", "rounded"),
    [(0, 0.0), (1.0, 1.0), (1.01, 2.0), (0.083, 0.09), (9.5, 10.0), (0.3, 0.3), (123.0, 200.0), (7e-7, 7e-7)],
)
def test_a_reported_epsilon_is_rounded_up_to_one_digit(epsilon, rounded):
    assert rounded_up(epsilon, 1) == rounded


@pytest.mark.parametrize("epsilon", [-1.0, math.nan])
def test_what_is_no_epsilon_is_refused(epsilon):
    with pytest.raises(ValueError, match="cannot be rounded"):
        rounded_up(epsilon)


@pytest.mark.parametrize(
    ("share", "said"), [(1.0, "100%"), (0.9996, "99%"), (0.29, "29%"), (0.5, "50%"), (0.009, "0%"), (0.0, "0%")]
)
def test_a_share_that_is_left_is_rounded_down(share, said):
    assert percent_left(share) == said


@pytest.mark.parametrize(
    ("bound", "claim", "said"),
    [
        (4.567, 2.0, ("4.56", "2")),
        (3.0049, 3.001, ("3.004", "3.001")),
        (3.002, 3.0, ("3.002", "3")),
        (1.00000002, 1.00000001, ("1.00000002", "1.00000001")),
        (12345.6, 12.0, ("12300", "12")),
        # No order to show.
        (2.999, 3.001, ("2.99", "3.01")),
        (3.0, 3.0, ("3", "3")),
    ],
)
def test_a_bound_above_a_claim_is_shown_above_it(bound, claim, said):
    assert apart(bound, claim) == said


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_no_sentence_contradicts_its_verdict(bound, claim):
    down, up = map(float, apart(bound, claim))
    assert down <= bound
    assert up >= claim
    assert (down > up) == (bound > claim)
