"""The Rényi divergence of every kind of event in a ledger, at a fixed set of orders.

Each number is an upper bound on the Rényi divergence between what a member sends on two neighbouring data sets, in the
worse of the two directions. All formulas are published; `renyi` says which one holds under which adjacency. Nothing
here knows a budget. The module imports no scientific library but numpy, so a member's ledger opens at once.

Every multiplier is the standard deviation of the noise divided by the distance between the two neighbours' outputs,
under either adjacency, as the events say. This module adds a single factor of two: where another member replaces one.
"""

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learning.accounting.events import (
    Adjacency,
    DiscreteGaussian,
    DiscreteGaussianSum,
    FixedLotGaussian,
    Laplace,
    PrivacyEvent,
    SampledGaussian,
    metrics_beside,
)
from secure_agg import ddg_renyi

__all__ = ["ORDERS", "EventUnaccountable", "renyi"]

# Fixed for good: a filter's guarantee is about orders chosen before the first event. Fractional orders decide a large
# epsilon. Orders 10 to 25 per cent apart follow, up to those that decide epsilon 0.1, and then a few large ones for
# Laplace noise, whose divergence stays below its epsilon at every order. Each order adds to the filter's ln m. A third
# of them would be enough on average, but bad where a small rate makes the divergence jump from one order to the next.
# fmt: off
ORDERS: Final[tuple[float, ...]] = (
    1.25, 1.35, 1.5, 1.65, 1.8, 2.0, 2.2, 2.5, 2.75, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0, 9.0, 10.0, 11.0,
    12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 25.0, 28.0, 32.0, 36.0, 40.0, 46.0, 52.0, 60.0, 68.0, 76.0, 88.0, 100.0, 116.0,
    136.0, 160.0, 192.0, 224.0, 256.0, 320.0, 400.0, 512.0, 768.0, 1024.0, 2048.0, 4096.0, 16384.0,
)
# fmt: on
_ALPHA: Final = np.array(ORDERS)

# The highest forward difference that is computed. A term beyond it uses the other side of its minimum.
_MAX_DIFFERENCE: Final = 256
# Standard deviations at which an integral over the Gaussian is cut off: the rest is below 1e-37 of it.
_TAIL: Final = 13.0
# Width between the nodes of the integral for a Poisson draw, in standard deviations.
_NODE: Final = 1 / 32
_HIGHEST_FRACTION: Final = max(order for order in ORDERS if not order.is_integer())

Vector = NDArray[np.float64]


class EventUnaccountable(ValueError):
    """An event has no formula under this adjacency or unit; the text says which, and what to do."""


def renyi(event: PrivacyEvent, adjacency: Adjacency) -> Vector:
    """The Rényi divergence of the whole event, with all its steps and the metrics beside them, at ORDERS.

    Returns:
        (m,) float64, never negative; inf where no finite bound is known. The array is the caller's own.

    Raises:
        EventUnaccountable: The event has no formula under that adjacency.

    Source:
        | event | adjacency | formula |
        | --- | --- | --- |
        | SampledGaussian | add-remove | exact: Mironov, Talwar, Zhang 2019 |
        | FixedLotGaussian | replace-one | Wang, Balle, Kasiviswanathan 2019, Theorem 27; at most the plain Gaussian |
        | Laplace | both | exact for one coordinate, the worst case: Mironov 2017, Table II |
        | DiscreteGaussianSum | both | Kairouz, Liu, Steinke 2021, Proposition 14 |
        | DiscreteGaussian, metrics | both | alpha / (2 multiplier^2): Canonne, Kamath, Steinke 2020, Proposition 5 |
    """
    divergences = event.steps * _one_step(event, adjacency)
    beside = metrics_beside(event)
    if beside is not None and beside.measured:
        divergences += beside.measured * _discrete_gaussian(beside.multiplier)
    return divergences


def _one_step(event: PrivacyEvent, adjacency: Adjacency) -> Vector:
    match event:
        case SampledGaussian():
            if adjacency != "add-remove":
                raise EventUnaccountable(
                    "a Poisson draw (sampled-gaussian) is accounted for under add-remove adjacency, and this ledger "
                    f"is kept under {adjacency}; use a fixed lot, or another ledger"
                )
            return _sampled_gaussian(event.multiplier, event.rate)
        case FixedLotGaussian():
            if adjacency != "replace-one":
                raise EventUnaccountable(
                    "a lot of fixed size (fixed-lot-gaussian) is accounted for under replace-one adjacency, and this "
                    f"ledger is kept under {adjacency}; use a Poisson draw, or another ledger"
                )
            if event.lot > event.population:
                raise EventUnaccountable(
                    f"a lot of {event.lot} cannot be drawn without replacement from {event.population} units; "
                    "lower the lot"
                )
            return _fixed_lot_gaussian(event.multiplier, event.lot / event.population)
        case Laplace():
            return _laplace(event.epsilon)
        case DiscreteGaussianSum():
            # For a member, `distance` is from its vector to no vector, so a replacement is twice as far. For an
            # example, `distance` is between any two vectors already.
            far = 2 if event.unit == "member" and adjacency == "replace-one" else 1
            return _discrete_gaussian_sum(event.honest, event.std, far * event.distance, event.values)
        case DiscreteGaussian():
            return _discrete_gaussian(event.multiplier)


def _check_finite(*numbers: float) -> None:
    # An infinite multiplier would cost nothing.
    if not all(math.isfinite(number) for number in numbers):
        raise EventUnaccountable("an event has an infinite number and cannot be accounted for; correct the mechanism")


def _finished(divergence: Vector) -> Vector:
    """The divergences without rounding below zero, each at most the bound at any higher order.

    Rényi divergence never falls as its order grows, so a bound at one order holds at every lower one (van Erven,
    Harremoës 2014, Theorem 3).
    """
    result: Vector = np.minimum.accumulate(np.maximum(divergence, 0.0)[::-1])[::-1]
    return result


def _gaussian(multiplier: float) -> Vector:
    """alpha / (2 sigma^2) (Mironov 2017, Table II)."""
    with np.errstate(over="ignore", divide="ignore"):
        return _ALPHA / 2 / np.float64(multiplier) / np.float64(multiplier)


# --- Poisson draw -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _sampled_gaussian(multiplier: float, rate: float) -> Vector:
    """The sampled Gaussian mechanism under add-remove: log A(alpha) / (alpha - 1) with A = E[((1 - q) + q e^y)^alpha]
    over y = (2x - 1) / (2 sigma^2), x from N(0, sigma^2) (Mironov, Talwar, Zhang 2019, sections 3.2 and 3.3).

    The other direction is never worse (ibid.). Assumes that each unit is drawn independently with exactly this rate.
    """
    _check_finite(multiplier)
    plain = _gaussian(multiplier)
    if rate == 1:
        return _finished(plain)
    logs = [_log_moment(order, multiplier, rate) for order in ORDERS]
    # Sampling never makes it worse (joint quasi-convexity), so the minimum only removes rounding.
    return _finished(np.minimum(np.array(logs) / (_ALPHA - 1), plain))


def _log_moment(order: float, multiplier: float, rate: float) -> float:
    if order.is_integer():
        return _log_moment_integer(int(order), multiplier, rate)
    # At very little noise the integral needs too many nodes. log A is convex in the order, so interpolation is a bound.
    if multiplier < 0.05:
        below, above = math.floor(order), math.ceil(order)
        low, high = (_log_moment_integer(end, multiplier, rate) for end in (below, above))
        return (above - order) * low + (order - below) * high
    return _log_moment_fraction(order, multiplier, rate)


def _log_moment_integer(order: int, multiplier: float, rate: float) -> float:
    """log A by the binomial sum minus one: A - 1 = sum_{k >= 2} Bin(k; alpha, q) (e^(k(k-1) / 2 sigma^2) - 1).

    All terms are positive, so a tiny divergence keeps all its digits.
    """
    if order == 1:
        return 0.0
    k = np.arange(2.0, order + 1)
    moments = _log_excess_moments(multiplier)[: order - 1]
    terms = _log_choose(order) + k * math.log(rate) + (order - k) * math.log1p(-rate) + moments
    return float(np.logaddexp(0.0, _log_sum(terms)))


@lru_cache(maxsize=1)
def _log_excess_moments(multiplier: float) -> Vector:
    """log(e^(k(k-1) / 2 sigma^2) - 1) for k = 2 ... the highest order. All orders of one event use a part of it."""
    k = np.arange(2.0, max(ORDERS) + 1)
    with np.errstate(over="ignore", divide="ignore"):
        exponent = k * (k - 1) / 2 / np.float64(multiplier) / np.float64(multiplier)
    return _log_expm1(exponent)


def _log_moment_fraction(order: float, multiplier: float, rate: float) -> float:
    """log A by the trapezoid rule on A - 1 = E[(1 + u)^alpha - 1 - alpha u], where u = q (e^y - 1) has mean zero.

    In units of sigma the integrand is analytic for |Im x| < pi sigma, so the rule's error falls as
    exp(-2 pi * strip / step): under 1e-13 of the integral from a multiplier of 0.05 up. (The series of section 3.3
    converges slowly at large q. Summed without its signs, it is well above the integral at orders below 5.)
    """
    nodes = math.ceil((order / multiplier + 2 * _TAIL) / _NODE)
    x, u, log_ratio = (each[:nodes] for each in _nodes(multiplier, rate))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        large = order * log_ratio + np.log1p(-(1 + order * u) * np.exp(-order * log_ratio))
    # Near u = 0 the three parts cancel. The binomial series takes over there; its ten terms are exact to rounding.
    near = np.abs(u) < 0.01
    little = np.where(near, u, 0.0)
    series, power, coefficient = np.zeros_like(u), little, order
    for k in range(2, 12):
        power = power * little
        coefficient *= (order - k + 1) / k
        series += coefficient * power
    with np.errstate(divide="ignore"):
        small = np.log(series)
    logs = np.where(near, small, large)
    return float(np.logaddexp(0.0, _log_sum(logs - x * x / 2) + math.log(_NODE / math.sqrt(2 * math.pi))))


@lru_cache(maxsize=1)
def _nodes(multiplier: float, rate: float) -> tuple[Vector, Vector, Vector]:
    """x, u and log((1 - q) + q e^y) at the nodes of the highest fractional order, whose first ones lower orders use."""
    scale = 1 / multiplier
    x = np.arange(-_TAIL, _HIGHEST_FRACTION * scale + _TAIL, _NODE)
    y = scale * x - scale * scale / 2
    u = rate * np.expm1(np.minimum(y, 600.0))
    log_ratio = np.where(
        y < 30, np.log1p(rate * np.expm1(np.minimum(y, 30.0))), np.logaddexp(math.log1p(-rate), math.log(rate) + y)
    )
    return x, u, log_ratio


# --- Lot of a fixed size ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _fixed_lot_gaussian(multiplier: float, share: float) -> Vector:
    """Gaussian noise on a lot drawn without replacement, under replace-one (Wang, Balle, Kasiviswanathan 2019, Theorem
    27).

    log A <= log(1 + sum_{j=2}^{alpha} gamma^j C(alpha, j) min{4 sqrt(B(2 floor(j/2)) B(2 ceil(j/2))), 2 e^(j(j-1) / 2
    sigma^2)}) where B(l) = E_q[(p/q - 1)^l] is the forward difference of the moments. Fractional orders follow by
    convexity (Corollary 10). A mixture over equal lots is never worse than its worst part, so the plain Gaussian's
    divergence is a bound as well. Assumes that the lot is drawn uniformly, and anew for every step.
    """
    _check_finite(multiplier)
    plain = _gaussian(multiplier)
    if share == 1:
        return _finished(plain)
    moments = {order: _log_moment_lot(order, multiplier, share) for order in _neighbours_of_orders()}
    logs = [
        (math.ceil(order) - order) * moments[math.floor(order)]
        + (order - math.floor(order)) * moments[math.ceil(order)]
        if not order.is_integer()
        else moments[int(order)]
        for order in ORDERS
    ]
    return _finished(np.minimum(np.array(logs) / (_ALPHA - 1), plain))


@lru_cache(maxsize=1)
def _neighbours_of_orders() -> tuple[int, ...]:
    return tuple(sorted({math.floor(order) for order in ORDERS} | {math.ceil(order) for order in ORDERS}))


def _log_moment_lot(order: int, multiplier: float, share: float) -> float:
    if order == 1:
        return 0.0
    j = np.arange(2, order + 1)
    with np.errstate(over="ignore", divide="ignore"):
        bound = math.log(2) + j * (j - 1) / 2 / np.float64(multiplier) / np.float64(multiplier)
    differences = _log_differences(multiplier)
    there = j[: _MAX_DIFFERENCE - 1]
    ternary = math.log(4) + (differences[there // 2] + differences[(there + 1) // 2]) / 2
    bound[: len(there)] = np.minimum(bound[: len(there)], ternary)
    terms = j * math.log(share) + _log_choose(order) + bound
    return float(np.logaddexp(0.0, _log_sum(terms)))


@lru_cache(maxsize=64)
def _log_differences(multiplier: float) -> Vector:
    """log E[(e^y - 1)^l] for l = 0, 2, 4, ... 256, y = (2x - 1) / (2 sigma^2), x from N(0, sigma^2), at index l / 2.

    The alternating sum that defines the difference loses every digit once sigma is large. The integral loses none, as
    its integrand is positive. The integrand is entire, so the trapezoid rule is exact to rounding.
    """
    scale = 1 / multiplier
    powers = np.arange(0, _MAX_DIFFERENCE + 1, 2)
    if scale > 4:
        # Four times the square root then exceeds twice the moment for every j, so the minimum takes its other side.
        return np.full(len(powers), np.inf)
    step = 1 / 16
    logs = np.zeros(len(powers))
    for at, power in enumerate(powers[1:], start=1):
        tail = _TAIL + math.sqrt(power)
        x = np.arange(-tail, power * scale + tail, step)
        y = scale * x - scale * scale / 2
        with np.errstate(divide="ignore"):
            integrand = power * np.where(y < 40, np.log(np.abs(np.expm1(np.minimum(y, 40.0)))), y) - x * x / 2
        logs[at] = _log_sum(integrand) + math.log(step / math.sqrt(2 * math.pi))
    logs.setflags(write=False)
    return logs


# --- Laplace, and noise in the ring -----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _laplace(epsilon: float) -> Vector:
    """log(alpha/(2 alpha - 1) e^((alpha-1) eps) + (alpha-1)/(2 alpha - 1) e^(-alpha eps)) / (alpha - 1) (Mironov 2017,
    Table II), and never more than epsilon.

    The formula moves one coordinate by the whole sensitivity. A vector moved by the same L1 distance over several
    coordinates diverges less: the logarithm is convex in eps and zero at 0, so its parts add up to at most the whole.
    Assumes noise of the Laplace distribution: other mechanisms of the same epsilon can diverge more.
    """
    _check_finite(epsilon)
    alpha = _ALPHA
    with np.errstate(over="ignore"):
        excess = (alpha * np.expm1((alpha - 1) * epsilon) + (alpha - 1) * np.expm1(-alpha * epsilon)) / (2 * alpha - 1)
        great = (alpha - 1) * epsilon + np.log(alpha / (2 * alpha - 1))
        # Beyond 500 the second term vanishes, and the first may have overflowed.
        logs = np.where((alpha - 1) * epsilon > 500, great, np.log1p(np.maximum(excess, 0.0)))
    return _finished(np.minimum(logs / (alpha - 1), epsilon))


def _discrete_gaussian(multiplier: float) -> Vector:
    """For a shift by whole numbers, the bound is that of the continuous Gaussian, coordinate by coordinate."""
    _check_finite(multiplier)
    return _finished(_gaussian(multiplier))


@lru_cache(maxsize=4096)
def _discrete_gaussian_sum(honest: int, std: float, distance: float, values: int) -> Vector:
    """The bound of Kairouz, Liu, Steinke 2021, Proposition 14 (`secure_agg.ddg_renyi`).

    A sum of several shares needs s of at least 1/2: below that, no finite bound is known. Assumes that at least
    `honest` members draw their shares as the protocol says and keep them secret.
    """
    _check_finite(std, distance)
    nothing = np.full(len(ORDERS), np.inf)
    if honest > 1 and std < 0.5:
        return _finished(nothing)
    try:
        with np.errstate(over="ignore"):
            return _finished(ddg_renyi(_ALPHA, distance, honest, std, values))
    except OverflowError:
        return _finished(nothing)


# --- Numbers ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _log_factorials() -> Vector:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1.0, max(ORDERS) + 1)))])


@lru_cache(maxsize=2 * len(ORDERS))
def _log_choose(order: int) -> Vector:
    """log C(order, k) for k = 2 ... order."""
    logs = _log_factorials()
    k = np.arange(2, order + 1)
    chosen: Vector = logs[order] - logs[k] - logs[order - k]
    return chosen


def _log_expm1(x: Vector) -> Vector:
    """log(e^x - 1) for x >= 0, exact for small and large x."""
    with np.errstate(divide="ignore"):
        logs: Vector = x + np.log(-np.expm1(-x))
    return logs


def _log_sum(logs: Vector) -> float:
    most = float(logs.max())
    if not math.isfinite(most):
        return most
    return most + math.log(float(np.exp(logs - most).sum()))
