"""The epsilon of events that were all fixed beforehand: by PLD where there is one, else by Rényi divergences.

It is what other tools report. The gate (`gate`) uses it for equal steps only, since it promises nothing if later events
are chosen knowing earlier results.

Only `_pair` says what a noise multiplier means to a PLD. dp-accounting's accountants, which the tests compare, differ
(0.6.0):

- `RdpAccountant` reads `GaussianDpEvent(z)` as noise over the distance between the two neighbours' outputs, under every
  adjacency.
- `PLDAccountant` reads it as noise over the norm that one record is clipped to. Under REPLACE_ONE the outputs are then
  two norms apart, and the same z gives the privacy of z / 2.

Our events divide by the distance, under either adjacency. A PLD is a statement about a pair of distributions, and two
Gaussians at distance one are the same pair under either adjacency. So every event is a pair at distance one, which
dp-accounting calls ADD_OR_REMOVE_ONE. Events that have no such pair are refused or left to Rényi.

A vector of metrics has three coordinates with discrete Gaussian noise, each shifted by at most so many steps. The pair
of the largest shifts dominates all others, since the noise is log-concave (docs/validation.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final, Literal

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
    measuring,
    metrics_beside,
)
from learning.accounting.filter import Limit, cost
from learning.accounting.pld import Pld, discrete_gaussian_pld, gaussian_pld, laplace_pld
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi
from tacit.validation import METRICS, distance_of, shifts_of

__all__ = [
    "ORDERS",
    "EventUnaccountable",
    "Limit",
    "Spend",
    "composed_steps",
    "cost",
    "epsilon_pld",
    "epsilon_renyi",
    "is_plain",
    "merged",
    "renyi",
    "spend",
    "total",
]

Vector = NDArray[np.float64]

_ALPHA: Final = np.array(ORDERS)
# Metrics with less noise are left to Rényi divergences. One vector then costs more than any budget, and the library has
# no distribution of noise that is far narrower than its shift.
_MIN_METRICS_MULTIPLIER: Final = 0.25
# Up to this multiplier, the rounding of a table of probabilities is below that of a Fourier transform.
_WIDE_METRICS: Final = 50.0


@dataclass(frozen=True)
class Spend:
    """What was spent, as if it had been fixed beforehand.

    Attributes:
        epsilon: At the limit's delta, by the accountant that `by` names.
        by: The accountant.
        renyi: The epsilon by Rényi divergences.
    """

    epsilon: float
    by: Literal["pld", "renyi"]
    renyi: float


def total(events: Sequence[PrivacyEvent], limit: Limit) -> Vector:
    """What several events take from a budget together.

    Rényi divergences add up, even if each event is chosen after the ones before it.

    Returns:
        The sum of their costs, shape (m,).

    Raises:
        EventUnaccountable: One of them is about another unit, or has no formula under the limit's adjacency.
    """
    spent = np.zeros(len(ORDERS))
    for event in merged(events):
        spent += cost(event, limit)
    return spent


def spend(events: Sequence[PrivacyEvent], limit: Limit) -> Spend:
    """The epsilon of the events at the limit's delta: by PLD if all of them have one, else by Rényi.

    Raises:
        EventUnaccountable: As in `total`.
    """
    by_renyi = epsilon_renyi(total(events, limit), limit.delta)
    by_pld = epsilon_pld(events, limit.delta, limit.adjacency)
    if by_pld is None:
        return Spend(by_renyi, "renyi", by_renyi)
    return Spend(by_pld, "pld", by_renyi)


def epsilon_renyi(spent: Vector, delta: float) -> float:
    """The smallest epsilon that Rényi divergences give at `delta`. A report, not the gate.

    Args:
        spent: Rényi divergences R at ORDERS, shape (m,).
        delta: The delta of the statement.

    Returns:
        The least of R + ln(1 - 1/alpha) - ln(alpha delta) / (alpha - 1) over the orders; inf where no order is finite.

    Source:
        Canonne, Kamath, Steinke 2020, Proposition 12; Balle et al. 2020, Theorem 21.
    """
    if not np.any(spent):
        return 0.0
    epsilons = spent + np.log1p(-1 / _ALPHA) - np.log(_ALPHA * delta) / (_ALPHA - 1)
    # Total variation is at most sqrt(1 - e^-KL) (Bretagnolle, Huber 1979), and KL is the divergence at order 1.
    if math.sqrt(-math.expm1(-float(spent.min()))) <= delta:
        return 0.0
    return max(0.0, float(epsilons.min()))


def epsilon_pld(events: Sequence[PrivacyEvent], delta: float, adjacency: Adjacency) -> float | None:
    """The epsilon of all events together at `delta`, by privacy loss distributions (`learning.accounting.pld`).

    The result is an upper bound: the loss is rounded up onto a grid. The grid chosen here adds less than one
    per cent, unless there are dozens of different events. Equal events are merged before they are composed, and all
    plain Gaussians become one.

    Returns:
        The epsilon; None if one of the events has no PLD (lots of a fixed size, sums of discrete Gaussian shares,
            surveys' answers, metrics with hardly any noise).

    Raises:
        EventUnaccountable: An event has no formula at all under this adjacency.
    """
    kinds = merged(events)
    spent = np.zeros(len(ORDERS))
    for event in kinds:
        spent += renyi(event, adjacency)
    if not kinds or not all(_has_pair(event) for event in kinds):
        return None if kinds else 0.0
    rough = epsilon_renyi(spent, delta)
    # Such an epsilon promises nothing, and a distribution of such losses does not fit into memory.
    if not math.isfinite(rough) or rough > 1e5:
        return math.inf

    width = _interval(spent, rough, [steps for event in kinds for steps in _composed(event) if steps])
    parts = []
    plain = sum(_precision(event) for event in kinds)
    if plain:
        parts.append(gaussian_pld(plain**-0.5, width))
    for event in kinds:
        if not is_plain(event) and not isinstance(event, DiscreteGaussian):
            parts.append(_pair(event, width).times(event.steps))
        for multiplier, count in _metrics(event):
            for shift, coordinates in shifts_of(adjacency).items():
                # One coordinate of a vector of metrics, which one unit moves by `shift` steps.
                one = discrete_gaussian_pld(multiplier * distance_of(adjacency), shift, width)
                parts.append(one.times(coordinates * count))
    # A lone part is taken as it is: a transform rounds, even if the other side is no release.
    return reduce(Pld.plus, parts).epsilon(delta)


def composed_steps(event: PrivacyEvent) -> float:
    """How many distributions a PLD of the event composes by Fourier transforms, for what rounding may take of delta.

    A coordinate of metrics counts for more if its noise is wide: its table of probabilities is a longer sum.
    """
    steps, _ = _composed(event)
    return steps + METRICS * sum(count * max(1.0, multiplier / _WIDE_METRICS) for multiplier, count in _metrics(event))


def _composed(event: PrivacyEvent) -> tuple[int, int]:
    alike = 0 if is_plain(event) or isinstance(event, DiscreteGaussian) else event.steps
    return alike, METRICS * sum(count for _, count in _metrics(event))


def _metrics(event: PrivacyEvent) -> list[tuple[float, int]]:
    """Multiplier and number of the vectors of metrics in an event."""
    if isinstance(event, DiscreteGaussian):
        return [(event.multiplier, event.steps)] if event.vector == "metrics" else []
    beside = metrics_beside(event)
    return [(beside.multiplier, beside.measured)] if beside is not None and beside.measured else []


def merged(events: Sequence[PrivacyEvent]) -> list[PrivacyEvent]:
    """Merges equal events into one with all their steps and measurements, in the order of first appearance."""
    steps: dict[tuple[object, ...], int] = {}
    measured: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], PrivacyEvent] = {}
    for event in events:
        key, beside = _parameters(event), metrics_beside(event)
        steps[key] = steps.get(key, 0) + event.steps
        measured[key] = measured.get(key, 0) + (0 if beside is None else beside.measured)
        first.setdefault(key, event)
    return [measuring(event.model_copy(update={"steps": steps[key]}), measured[key]) for key, event in first.items()]


def _parameters(event: PrivacyEvent) -> tuple[object, ...]:
    beside = metrics_beside(event)
    kind = (event.kind, event.unit, None if beside is None else (beside.multiplier, beside.every))
    match event:
        case SampledGaussian():
            return (*kind, event.multiplier, event.rate)
        case FixedLotGaussian():
            return (*kind, event.multiplier, event.lot, event.population)
        case Laplace():
            return (*kind, event.epsilon)
        case DiscreteGaussianSum():
            return (*kind, event.honest, event.std, event.distance, event.values)
        case DiscreteGaussian():
            return (*kind, event.vector, event.multiplier)


def is_plain(event: PrivacyEvent) -> bool:
    """Whether the event is Gaussian noise on all units, so that its steps are one release with less noise."""
    match event:
        case SampledGaussian():
            return event.rate == 1
        case FixedLotGaussian():
            return event.lot == event.population
        case _:
            return False


def _precision(event: PrivacyEvent) -> float:
    """steps / multiplier^2 of a plain Gaussian, else 0. Several releases equal one with the sum of their precisions."""
    match event:
        case SampledGaussian() | FixedLotGaussian() if is_plain(event):
            return event.steps / event.multiplier**2
        case _:
            return 0.0


def _has_pair(event: PrivacyEvent) -> bool:
    """Whether the event has a pair of distributions that dominates it, and a PLD."""
    if any(multiplier < _MIN_METRICS_MULTIPLIER for multiplier, _ in _metrics(event)):
        return False
    if isinstance(event, DiscreteGaussian):
        return event.vector == "metrics"
    return is_plain(event) or isinstance(event, SampledGaussian | Laplace)


def _pair(event: PrivacyEvent, width: float) -> Pld:
    """The PLD of one step, a pair of distributions at distance one, on a grid of this width."""
    match event:
        case SampledGaussian(rate=rate):
            return gaussian_pld(event.multiplier, width, rate)
        case Laplace():
            # One coordinate moved by the whole L1 distance is the worst case. The trade-off function of a shift by
            # a + b is that of two shifts in a row (the ratio of Laplace densities is monotone), and chaining bounds
            # two coordinates moved by a and b (Dong, Roth, Su 2022, section 2.5).
            return laplace_pld(event.epsilon, width)
        case _:
            raise TypeError(f"{event.kind} has no pair of distributions for one step")


def _interval(spent: Vector, rough: float, composed: Sequence[int]) -> float:
    """The width of the grid for the privacy loss.

    Rounding onto a grid of width w adds up to w^2 / 4 to the variance of one step's loss (connect-the-dots keeps the
    mean right). The whole variance is about twice the divergence over its order, at low orders. Rounding gets 0.2 per
    cent of it, within the bounds of memory and patience.
    """
    steps = sum(composed)
    if not steps:
        return max(1e-3, rough / 1e5)
    variance = 2 * float(spent[0]) / ORDERS[0]
    wanted = math.sqrt(4 * 0.002 * variance / steps)
    patience = max(1e-6, 2e-5 * len(composed), rough / 1e5)
    return max(min(wanted, 1e-3), min(patience, 1e-3), rough / 1e5)
