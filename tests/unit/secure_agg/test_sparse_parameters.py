"""The parameter finder, compared with the published tables and with exact integers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from secure_agg.parameters import (
    MAX_MEMBERS,
    NoParameters,
    corrupt_neighbours,
    evaluate,
    find,
    find_counts,
    of_millionths,
    surviving_neighbours,
    to_millionths,
)

# Bell et al. 2020, semi-malicious: (gamma, delta, sigma) -> n -> (k, t). The rows at 80 bits are the specification's.
TABLE = {
    (0.05, 0.05, 40): {100: (16, 11), 300: (38, 27), 1000: (52, 37), 10000: (62, 44)},
    (0.1, 0.1, 40): {100: (32, 22), 300: (66, 46), 1000: (96, 67), 10000: (122, 85)},
    (0.1, 0.2, 40): {100: (52, 32), 300: (118, 75), 1000: (194, 124), 10000: (280, 179)},
    (0.33, 0.1, 40): {100: (54, 44), 300: (130, 103), 1000: (218, 171), 10000: (310, 242)},
    (0.1, 0.1, 80): {100: (32, 22), 300: (76, 54), 1000: (120, 87), 10000: (156, 113)},
}
ROWS = [(*numbers, n, expected) for numbers, row in TABLE.items() for n, expected in row.items()]


@pytest.mark.parametrize(("gamma", "delta", "sigma", "n", "expected"), ROWS)
def test_the_published_table(gamma: float, delta: float, sigma: int, n: int, expected: tuple[int, int]) -> None:
    found = find(n, gamma, delta, sigma)
    assert (found.neighbours, found.threshold) == expected


@pytest.mark.parametrize(("n", "honest"), [(300, 24), (1000, 34), (10000, 44)])
def test_the_honest_inputs_of_a_sum_at_80_bits(n: int, honest: int) -> None:
    found = find(n, 0.1, 0.1)
    assert found.honest == honest == found.threshold - found.corrupt_neighbours


def test_a_neighbourhood_never_holds_two_thresholds() -> None:
    """2t > k + t1: neighbours that are told different survivors cannot reveal both secrets of one member."""
    for gamma, delta, sigma, n, _ in ROWS:
        found = find(n, gamma, delta, sigma)
        assert 2 * found.threshold > found.neighbours + found.corrupt_neighbours >= 2 * (found.threshold - 1)


def exact(n: int, marked: int, k: int) -> list[Fraction]:
    """P[Hyp(n, marked, k) = x] for x = 0 .. k, in integers."""
    return [Fraction(math.comb(marked, x) * math.comb(n - marked, k - x), math.comb(n, k)) for x in range(k + 1)]


def exact_find(n: int, corrupt: int, lost: int, sigma: int, semi_malicious: bool, absent: int = 0) -> tuple | None:
    """The specification's rules in integers: (k, t, t1) or None."""
    removed = corrupt + lost
    for k in range(2, n - absent, 2):
        if k <= removed:
            cut = Fraction(
                math.factorial(removed) * math.factorial(n - k), math.factorial(n) * math.factorial(removed - k)
            )
            if Fraction(n * (n - k - 1), 2) * cut >= Fraction(1, 2 ** (sigma + 1)):
                continue
        roster = n - absent
        bad = exact(roster, corrupt, k)
        t1 = next(x for x in range(k + 1) if sum(bad[x + 1 :]) <= Fraction(1, 2 ** (sigma + 1) * roster))
        raised = math.ceil((t1 + k - Fraction(5, 4)) / 2) if semi_malicious else t1
        good = exact(n, n - lost, k)
        t2 = next(x for x in range(k + 1) if sum(good[: x + 1]) >= Fraction(1, 2**20 * n))
        if t2 > raised:
            return k, max(raised + 1, 2), t1
    return None


@pytest.mark.parametrize("n", [5, 12, 23, 40, 61, 90])
@pytest.mark.parametrize("sigma", [8, 20, 40])
@pytest.mark.parametrize("semi_malicious", [True, False])
def test_the_finder_against_exact_integers(n: int, sigma: int, semi_malicious: bool) -> None:
    for corrupt, lost, absent in [(0, 0, 0), (n // 10, n // 10, 0), (n // 5, n // 10, n // 20), (n // 3, n // 20, 0)]:
        expected = exact_find(n, corrupt, lost, sigma, semi_malicious, absent)
        try:
            found = find_counts(n, corrupt, lost, sigma, 20, semi_malicious, absent=absent)
        except NoParameters:
            assert expected is None
        else:
            assert (found.neighbours, found.threshold, found.corrupt_neighbours) == expected


@pytest.mark.parametrize(
    ("n", "corrupt", "lost", "sigma"),
    [(26, 8, 1, 2), (53, 0, 17, 20), (62, 0, 15, 20), (92, 0, 9, 20), (95, 0, 9, 20), (98, 0, 24, 20)],
)
def test_the_finder_where_connectivity_decides(n: int, corrupt: int, lost: int, sigma: int) -> None:
    """With semi-honest members and few corrupt ones, twice the bound would need two more neighbours."""
    found = find_counts(n, corrupt, lost, sigma, 20, False)
    expected = exact_find(n, corrupt, lost, sigma, False)
    assert (found.neighbours, found.threshold, found.corrupt_neighbours) == expected


@pytest.mark.parametrize(("n", "marked", "k"), [(30, 4, 10), (60, 20, 24), (200, 66, 80), (500, 50, 90)])
@pytest.mark.parametrize("bits", [1, 5, 20, 40, 80])
def test_the_tails_against_exact_integers(n: int, marked: int, k: int, bits: int) -> None:
    terms = exact(n, marked, k)
    beyond = next(x for x in range(k + 1) if sum(terms[x + 1 :]) <= Fraction(1, 2 ** (bits + 1) * n))
    assert corrupt_neighbours(n, marked, k, bits) == beyond
    kept = exact(n, n - marked, k)
    first = next(x for x in range(k + 1) if sum(kept[: x + 1]) >= Fraction(1, 2**bits * n))
    assert surviving_neighbours(n, marked, k, bits) == first


def test_semi_honest_graphs_need_fewer_neighbours() -> None:
    assert find(1000, 0.33, 0.1, 40, semi_malicious=False).neighbours < find(1000, 0.33, 0.1, 40).neighbours


def test_absent_members_raise_the_weight_of_corrupt_ones() -> None:
    whole, thinned = find(1000, 0.1, 0.1), find(1000, 0.1, 0.1, absent=100)
    assert (thinned.neighbours, thinned.threshold) == (126, 92)
    assert corrupt_neighbours(900, 100, thinned.neighbours, 80) == thinned.corrupt_neighbours
    assert corrupt_neighbours(900, 100, whole.neighbours, 80) > whole.corrupt_neighbours


def test_shares_are_counted_exactly() -> None:
    assert int(0.29 * 100) == 28
    assert of_millionths(100, to_millionths(0.29)) == 29
    assert find(100, 0.29, 0.05, 40) == find(100, Fraction(29, 100), 0.05, 40) == find_counts(100, 29, 5, 40)
    assert to_millionths(Fraction(1, 8)) == 125_000


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, Fraction(1, 3), 0.1234567])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(NoParameters, match="six decimals"):
        find(100, share, 0.1)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((2, 0, 0, 40), "serves 3 to"),
        ((MAX_MEMBERS + 1, 0, 0, 40), "serves 3 to"),
        ((100, 60, 40, 40), "some must remain"),
        ((100, 34, 33, 40), "not a majority"),
        ((100, -1, 0, 40), "some must remain"),
        ((100, 10, 10, 0), "at least 1"),
        ((20, 6, 6, 40), "no sparse graph"),
    ],
)
def test_impossible_requirements_are_refused(numbers: tuple[int, int, int, int], says: str) -> None:
    with pytest.raises(NoParameters, match=says):
        find_counts(*numbers)


@pytest.mark.parametrize("absent", [-1, 11])
def test_no_more_may_be_absent_than_lost(absent: int) -> None:
    with pytest.raises(NoParameters, match="absent"):
        find_counts(100, 10, 10, 40, absent=absent)


@pytest.mark.parametrize("k", [0, 1, 7, 30, 33, 100, 10**9])
def test_other_degrees_are_not_sufficient(k: int) -> None:
    assert evaluate(100, 10, 10, k, 40) is None


def test_a_larger_degree_needs_a_larger_threshold() -> None:
    least, wider = evaluate(1000, 100, 100, 120, 80), evaluate(1000, 100, 100, 200, 80)
    assert least is not None
    assert wider is not None
    assert least == find(1000, 0.1, 0.1)
    assert wider.threshold > least.threshold
    assert wider.threshold < wider.largest_threshold
