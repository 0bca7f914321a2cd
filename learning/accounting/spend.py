"""The epsilon of events that were all fixed beforehand: by PLD where there is one, else by Rényi divergences.

It is what other tools report. The gate (`gate`) uses it for equal steps only, since it promises nothing if later events
are chosen knowing earlier results.

Only `_library_event` says what a noise multiplier means to dp-accounting, whose accountants differ (0.6.0):

- `RdpAccountant` reads `GaussianDpEvent(z)` as noise over the distance between the two neighbours' outputs, under every
  adjacency.
- `PLDAccountant` reads it as noise over the norm that one record is clipped to. Under REPLACE_ONE the outputs are then
  two norms apart, and the same z gives the privacy of z / 2.

Our events divide by the distance, under either adjacency. A PLD is a statement about a pair of distributions, and two
Gaussians at distance one are the same pair under either adjacency. So the library gets every event as a pair at
distance one, which it calls ADD_OR_REMOVE_ONE. Events that have no such pair are refused or left to Rényi.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

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
)
from learning.accounting.filter import Limit, cost
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi

__all__ = [
    "ORDERS",
    "EventUnaccountable",
    "Limit",
    "Spend",
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
    """The epsilon of all events together at `delta`, by dp-accounting's privacy loss distributions.

    The result is an upper bound: the library rounds the loss up onto a grid. The grid chosen here adds less than one
    per cent, unless there are dozens of different events. Equal events are merged before they are composed, and all
    plain Gaussians become one.

    Returns:
        The epsilon; None if one of the events has no PLD (lots of a fixed size, discrete Gaussians and their sums).

    Raises:
        EventUnaccountable: An event has no formula at all under this adjacency.
    """
    kinds = merged(events)
    spent = np.zeros(len(ORDERS))
    for event in kinds:
        spent += renyi(event, adjacency)
    pairs = [_library_event(event) for event in kinds]
    if not kinds or any(pair is None for pair in pairs):
        return None if kinds else 0.0
    rough = epsilon_renyi(spent, delta)
    # Such an epsilon promises nothing, and a distribution of such losses does not fit into memory.
    if not math.isfinite(rough) or rough > 1e5:
        return math.inf

    from dp_accounting.pld import PLDAccountant

    composed = [event.steps for event in kinds if not is_plain(event)]
    accountant = PLDAccountant(value_discretization_interval=_interval(spent, rough, composed))
    plain = sum(_precision(event) for event in kinds)
    if plain:
        accountant.compose(_library_gaussian(plain**-0.5))
    for event, pair in zip(kinds, pairs, strict=True):
        if not is_plain(event):
            accountant.compose(pair, event.steps)
    return float(accountant.get_epsilon(delta))


def merged(events: Sequence[PrivacyEvent]) -> list[PrivacyEvent]:
    """Merges equal events into one with all their steps, in the order of first appearance."""
    steps: dict[tuple[object, ...], int] = {}
    first: dict[tuple[object, ...], PrivacyEvent] = {}
    for event in events:
        key = _parameters(event)
        steps[key] = steps.get(key, 0) + event.steps
        first.setdefault(key, event)
    return [event.model_copy(update={"steps": steps[key]}) for key, event in first.items()]


def _parameters(event: PrivacyEvent) -> tuple[object, ...]:
    match event:
        case SampledGaussian():
            return (event.kind, event.unit, event.multiplier, event.rate)
        case FixedLotGaussian():
            return (event.kind, event.unit, event.multiplier, event.lot, event.population)
        case Laplace():
            return (event.kind, event.unit, event.epsilon)
        case DiscreteGaussianSum():
            return (event.kind, event.unit, event.honest, event.std, event.distance, event.values)
        case DiscreteGaussian():
            return (event.kind, event.unit, event.multiplier)


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


def _library_event(event: PrivacyEvent) -> Any:
    """dp-accounting's event for one step as a pair of distributions at distance one; None if it has no such pair."""
    from dp_accounting import dp_event

    match event:
        case SampledGaussian(rate=rate) if rate < 1:
            return dp_event.PoissonSampledDpEvent(rate, _library_gaussian(event.multiplier))
        case SampledGaussian():
            return _library_gaussian(event.multiplier)
        case FixedLotGaussian() if is_plain(event):
            return _library_gaussian(event.multiplier)
        case Laplace():
            # One coordinate moved by the whole L1 distance is the worst case. The trade-off function of a shift by
            # a + b is that of two shifts in a row (the ratio of Laplace densities is monotone), and chaining bounds
            # two coordinates moved by a and b (Dong, Roth, Su 2022, section 2.5).
            return dp_event.LaplaceDpEvent(1 / event.epsilon)
        case _:
            return None


def _library_gaussian(multiplier: float) -> Any:
    from dp_accounting import dp_event

    return dp_event.GaussianDpEvent(multiplier)


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
