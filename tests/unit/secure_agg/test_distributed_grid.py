"""The numbers of the mechanism: grid, bounds, ring, and the divergence bound against exact divergences."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from secure_agg import (
    DiscreteGaussian,
    Grid,
    Layout,
    LayoutInvalid,
    ddg_renyi,
    decode_distributed,
    inflation,
)

SIXTY_MILLION = 60_000_000


def test_the_grid_is_the_papers() -> None:
    grid = Grid(clip=2.0, noise_multiplier=0.5, honest=9, values=1000, members=20)
    # sigma = z C = 1, sigma_local = 1/3, gamma = sigma_local / 4096, c = C / gamma.
    assert grid.std == 4096
    assert grid.gamma == pytest.approx(1 / 3 / 4096, rel=1e-15)
    assert grid.scale == pytest.approx(3 * 4096, rel=1e-15)
    assert grid.radius == pytest.approx(2 * 3 * 4096, rel=1e-15)
    # The variance of h shares, in real units.
    assert 9 * (grid.std * grid.gamma) ** 2 == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize(
    ("values", "members", "steps"),
    [(10**7, 10, 4096), (10**7 + 1, 10, 16384), (10**7 + 1, 11, 4096), (1, 2, 4096), (10**8, 2, 16384)],
)
def test_the_grid_is_finer_for_large_vectors_of_few_members(values: int, members: int, steps: int) -> None:
    assert Grid(1.0, 1.0, 1, values, members).std == steps


@pytest.mark.parametrize("radius", [0.01, 0.9, 30.0, 4096.0, 36636.0])
@pytest.mark.parametrize("values", [1, 2, 1000, 16_384, SIXTY_MILLION])
def test_the_bound_is_the_smaller_of_the_two(radius: float, values: int) -> None:
    grid = Grid(1.0, 4096 / radius, 1, values, 20)
    with localcontext() as context:
        context.prec = 50
        c, d = Decimal(grid.radius), Decimal(values)
        # sqrt(2 ln(1 / beta)) is 1 for beta = e^-1/2.
        likely = (c * c + d / 4 + (c + d.sqrt() / 2)).sqrt()
        expected = min(c + d.sqrt(), likely)
    assert grid.bound == pytest.approx(float(expected), rel=1e-14)
    assert grid.largest_square <= Fraction(grid.bound) ** 2 < grid.largest_square + 1
    assert grid.distance(replaced=False) == grid.bound
    assert grid.distance(replaced=True) == 2 * grid.bound


def test_the_cost_of_rounding_at_central_multiplier_one() -> None:
    # B / c = sqrt(1 + d / (4 c^2) + 1 / c + sqrt(d) / (2 c^2)) with c = sqrt(h) s and h = n, where shares, the grid's
    # step and the cost of rounding are smallest. With h = t - n_C it costs more.
    assert round(inflation(Grid(1.0, 1.0, 5, 16_384, 5)), 4) == 1.0001
    assert round(inflation(Grid(1.0, 1.0, 100, SIXTY_MILLION, 100)), 4) == 1.0045
    assert round(inflation(Grid(1.0, 1.0, 5, SIXTY_MILLION, 5)), 4) == 1.0056
    # Five shares on the coarse grid, which cohorts of more than ten have. 1.0856 is the figure of some 59.85 million
    # values; for 60 million it is 1.0858.
    assert round(inflation(Grid(1.0, 1.0, 5, 59_850_000, 11)), 4) == 1.0856
    assert round(inflation(Grid(1.0, 1.0, 5, SIXTY_MILLION, 11)), 4) == 1.0858
    # Three of five, which an attempt of five with default thresholds guarantees.
    assert round(inflation(Grid(1.0, 1.0, 3, SIXTY_MILLION, 5)), 4) == 1.0093


@pytest.mark.parametrize("members", [2, 5, 10, 100])
@pytest.mark.parametrize("multiplier", [0.01, 1.0, 100.0])
def test_the_ring_is_the_narrowest_that_holds_the_worst_sum(members: int, multiplier: float) -> None:
    grid = Grid(1.0, multiplier, 2, 4, members)
    bits = grid.bits_needed(members)
    worst = members * grid.largest
    assert worst <= 2 ** (bits - 1) - 1
    for sign in (1, -1):
        total = np.full(4, (sign * worst) % 2**bits, dtype="<u4")
        np.testing.assert_array_equal(decode_distributed(total, grid, bits), sign * worst / grid.scale)
    # With one bit less, it decodes with the wrong sign.
    wrapped = np.full(4, worst % 2 ** (bits - 1), dtype="<u4")
    assert decode_distributed(wrapped, grid, bits - 1)[0] < 0


def test_rounding_and_noise_alone_stay_below_the_largest_value() -> None:
    grid = Grid(1.0, 1.0, 1, 1, 2)
    # c = 4096 and d = 1: B^2 = c^2 + 1/4 + c + 1/2, just below (c + 1)^2.
    assert grid.largest == 4096 + DiscreteGaussian(4096.0).largest


@pytest.mark.parametrize("clip", [0.3, 1.0, 7e-3, 123.4])
def test_the_segment_holds_every_encoding(clip: float) -> None:
    for honest, members in ((1, 3), (3, 5), (64, 100)):
        grid = Grid(clip, 0.77, honest, 12, members)
        segment = grid.segment("update")
        assert (segment.name, segment.length, segment.scale) == ("update", 12, grid.scale)
        assert grid.largest <= segment.largest < grid.largest + Fraction(1, 10**6)
        layout = Layout((segment,), 32)
        layout.check_no_wrap(members)
        total = np.arange(12, dtype="<u4") - np.uint32(6)
        np.testing.assert_array_equal(layout.decode(total)["update"], decode_distributed(total, grid, 32))


@pytest.mark.parametrize(
    "change",
    [
        {"clip": 0.0},
        {"clip": -1.0},
        {"clip": math.nan},
        {"clip": math.inf},
        {"clip": True},
        {"clip": "1"},
        {"clip": 1e-320},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.inf},
        {"noise_multiplier": 1e300},
        {"noise_multiplier": None},
        {"honest": 0},
        {"honest": 1.0},
        {"honest": True},
        {"honest": 6},
        {"values": 0},
        {"members": 0},
        {"members": 2.0},
        # 5 members with 4096 / z steps or more exceed 2^31.
        {"noise_multiplier": 9e-6},
        {"noise_multiplier": 1e-300},
    ],
    ids=repr,
)
def test_numbers_that_make_no_grid_are_refused(change: dict[str, object]) -> None:
    fine = {"clip": 1.0, "noise_multiplier": 1.0, "honest": 1, "values": 10, "members": 5}
    Grid(**fine)
    with pytest.raises(LayoutInvalid):
        Grid(**{**fine, **change})


def test_a_sum_of_no_members_is_refused() -> None:
    with pytest.raises(LayoutInvalid, match="at least one member"):
        Grid(1.0, 1.0, 1, 1, 2).bits_needed(0)


# The divergence bound.


def log_law(std: float, honest: int, reach: int) -> np.ndarray:
    """log P[X_1 + ... + X_h = k] for k from -reach to reach, summed term by term in logarithms."""
    values = np.arange(-reach, reach + 1)
    single = -(values.astype(np.float64) ** 2) / (2 * std**2)
    single -= np.logaddexp.reduce(single)
    law = single
    for _ in range(honest - 1):
        terms = np.full((law.size, law.size), -np.inf)
        for row, total in enumerate(values):
            others = total - values
            inside = np.abs(others) <= reach
            terms[row, inside] = law[inside] + single[others[inside] + reach]
        law = np.logaddexp.reduce(terms, axis=1)
    return law


def divergence(law: np.ndarray, shift: int, alpha: float) -> float:
    """D_alpha(X || X + shift), exact except for what is beyond the law's reach."""
    here, moved = (law[shift:], law[:-shift]) if shift else (law, law)
    return float(np.logaddexp.reduce(alpha * here + (1 - alpha) * moved)) / (alpha - 1)


@pytest.mark.parametrize("honest", [1, 2, 3])
@pytest.mark.parametrize("std", [0.5, 0.7, 1.0, 2.0, 3.0])
def test_the_bound_holds_for_exact_divergences_and_is_tight_if_gaussian(honest: int, std: float) -> None:
    law = log_law(std, honest, reach=200)
    for shift, alpha in itertools.product((1, 2, 3), (1.25, 2.0, 4.0, 8.0)):
        exact = divergence(law, shift, alpha)
        bound = ddg_renyi(alpha, shift, honest, std, 1)
        assert exact <= bound * (1 + 1e-9)
        if std >= 2:
            assert bound <= exact * (1 + 1e-6)


@pytest.mark.parametrize("shifts", [(1, 1), (2, 0, 1), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("std", [0.5, 1.0, 2.0])
def test_the_bound_holds_over_several_coordinates(shifts: tuple[int, ...], std: float) -> None:
    law = log_law(std, 3, reach=120)
    for alpha in (1.25, 2.0, 6.0):
        # Coordinates are independent, so their divergences add up.
        exact = sum(divergence(law, shift, alpha) for shift in shifts)
        distance = math.sqrt(sum(shift**2 for shift in shifts))
        assert exact <= ddg_renyi(alpha, distance, 3, std, len(shifts)) * (1 + 1e-9)


def test_a_sum_is_not_gaussian_on_a_coarse_grid() -> None:
    # Without tau the claim would be false; this is why the grid must be fine.
    law = log_law(0.5, 2, reach=120)
    assert divergence(law, 1, 4.0) > 4.0 / (2 * 2 * 0.25) * 1.01


@pytest.mark.parametrize(("honest", "std"), [(2, 0.5), (7, 0.6), (100, 1.0), (3, 2.0)])
def test_both_terms_of_the_bound_are_the_papers(honest: int, std: float) -> None:
    with localcontext() as context:
        context.prec = 40
        pi, s = Decimal("3.14159265358979323846264338327950288419717"), Decimal(std)
        tau = 10 * sum((-2 * pi**2 * s**2 * k / (k + 1)).exp() for k in range(1, honest))
        for distance, values, alpha in itertools.product((0.5, 3, 40), (1, 50), (1, 2, 33.5)):
            ratio = Decimal(distance) / (Decimal(honest).sqrt() * s)
            expected = min(
                Decimal(alpha) * ratio**2 / 2 + tau * values,
                Decimal(alpha) / 2 * (ratio + tau * Decimal(values).sqrt()) ** 2,
            )
            assert ddg_renyi(alpha, distance, honest, std, values) == pytest.approx(float(expected), rel=1e-12)


def test_each_term_is_the_smaller_one_somewhere() -> None:
    # The first for a large ratio, the second for a small one.
    tau = 10 * math.exp(-2 * math.pi**2 * 0.25 / 2)
    ratio = 30 / math.sqrt(0.5)
    assert ddg_renyi(2.0, 30, 2, 0.5, 4) == pytest.approx(ratio**2 + 4 * tau)
    assert ddg_renyi(2.0, 0, 2, 0.5, 1) == pytest.approx(min(tau, tau**2))
    assert ddg_renyi(2.0, 0, 2, 0.5, 1) < tau


def test_on_a_jobs_grid_the_sum_is_gaussian_and_one_share_costs_h_times() -> None:
    grid = Grid(1.0, 1.0, 100, SIXTY_MILLION, 100)
    central = ddg_renyi(2.0, grid.distance(replaced=False), 100, grid.std, SIXTY_MILLION)
    # Noise multiplier 1 and an inflated sensitivity give alpha / 2 * inflation^2.
    assert central == pytest.approx(inflation(grid) ** 2, rel=1e-12)
    local = ddg_renyi(2.0, grid.distance(replaced=False), 1, grid.std, SIXTY_MILLION)
    assert local == pytest.approx(100 * central, rel=1e-12)
    replaced = ddg_renyi(2.0, grid.distance(replaced=True), 100, grid.std, SIXTY_MILLION)
    assert replaced == pytest.approx(4 * central, rel=1e-12)


def test_the_result_has_the_shape_of_the_orders() -> None:
    orders = np.array([[1.0, 2.0], [3.5, 64.0]])
    bounds = ddg_renyi(orders, 3.0, 4, 0.8, 7)
    assert bounds.shape == (2, 2)
    assert bounds.tolist() == [[ddg_renyi(float(a), 3.0, 4, 0.8, 7) for a in row] for row in orders]
    assert isinstance(ddg_renyi(2, 3.0, 4, 0.8, 7), float)
    # h = 10,000 on the coarsest grid is a sum of many terms and still finite.
    assert 0 < ddg_renyi(2.0, 1.0, 10_000, 0.5, 1) < math.inf


@pytest.mark.parametrize(
    ("alpha", "distance", "honest", "std", "values"),
    [
        (0.99, 1.0, 2, 1.0, 1),
        (math.nan, 1.0, 2, 1.0, 1),
        (np.array([2.0, math.nan]), 1.0, 2, 1.0, 1),
        (2.0, -1.0, 2, 1.0, 1),
        (2.0, math.nan, 2, 1.0, 1),
        (2.0, math.inf, 2, 1.0, 1),
        (2.0, 1.0, 0, 1.0, 1),
        (2.0, 1.0, 2, 0.0, 1),
        (2.0, 1.0, 2, math.nan, 1),
        (2.0, 1.0, 2, 0.49, 1),
        (2.0, 1.0, 2, 1.0, 0),
    ],
)
def test_numbers_outside_the_theorem_are_refused(alpha: float, distance: float, honest: int, std: float, values: int):
    with pytest.raises(ValueError):  # noqa: PT011
        ddg_renyi(alpha, distance, honest, std, values)


def test_one_share_is_bounded_for_any_standard_deviation() -> None:
    assert ddg_renyi(2.0, 1.0, 1, 0.1, 1) == pytest.approx(100.0)
