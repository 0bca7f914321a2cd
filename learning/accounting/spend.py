"""Privacy accounting of one member: what gates, and what people read.

The gate is the Rényi filter (`filter`), which holds even though later jobs are chosen knowing earlier results. Its
epsilon (`epsilon_counted`) is the one that commands, logs and metrics show. `spend` is tighter and promises less:
dp-accounting's privacy loss distribution (PLD) where it has a formula, else the best conversion of the Rényi
divergences; both are about the events that happened, as if they had been fixed beforehand.

`_library_event` is the one place that says what a noise multiplier means to dp-accounting, whose accountants differ
(0.6.0):

- `RdpAccountant` reads `GaussianDpEvent(z)` as noise over the distance of the two neighbours' outputs, under every
  adjacency alike;
- `PLDAccountant` reads it as noise over the norm that one record is clipped to: under REPLACE_ONE the outputs are
  then two norms apart, and the same z gives the privacy of z / 2.

Our events divide by the distance, whatever the adjacency. A PLD is a statement about a pair of distributions, and two
Gaussians at distance one are the same pair under either adjacency; so everything goes to the library as a pair at
distance one, in the words it has for that (ADD_OR_REMOVE_ONE), and events that have no such pair are refused or left
to Rényi.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from learning.accounting.events import (
    Adjacency,
    DiscreteGaussianSum,
    FixedLotGaussian,
    Laplace,
    PrivacyEvent,
    SampledGaussian,
)
from learning.accounting.filter import Limit, RenyiFilter, cost, epsilon_counted
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi

__all__ = [
    "ORDERS",
    "EventUnaccountable",
    "Limit",
    "RenyiFilter",
    "Spend",
    "cost",
    "epsilon_counted",
    "epsilon_pld",
    "epsilon_renyi",
    "renyi",
    "spend",
    "total",
]

Vector = NDArray[np.float64]

_ALPHA: Final = np.array(ORDERS)


@dataclass(frozen=True)
class Spend:
    """The tighter figure of what was spent.

    epsilon: at the limit's delta, by the accountant named in `by`. renyi: by Rényi.
    """

    epsilon: float
    by: Literal["pld", "renyi"]
    renyi: float


def total(events: Sequence[PrivacyEvent], limit: Limit) -> Vector:
    """What events take from a budget together, (m,): Rényi divergences add up, also of events chosen one after another.

    Raises:
        EventUnaccountable: one of them is about another unit, or has no formula under the limit's adjacency.
    """
    spent = np.zeros(len(ORDERS))
    for event in _merged(events):
        spent += cost(event, limit)
    return spent


def spend(events: Sequence[PrivacyEvent], limit: Limit) -> Spend:
    """What the events give away at the limit's delta: PLD where it exists for all of them, else Rényi.

    Raises:
        EventUnaccountable: as `total`.
    """
    by_renyi = epsilon_renyi(total(events, limit), limit.delta)
    by_pld = epsilon_pld(events, limit.delta, limit.adjacency)
    if by_pld is None:
        return Spend(by_renyi, "renyi", by_renyi)
    return Spend(by_pld, "pld", by_renyi)


def epsilon_renyi(spent: Vector, delta: float) -> float:
    """The smallest epsilon that the divergences `spent`, (m,) at ORDERS, give at `delta`. A report, not the gate.

    R + ln(1 - 1/alpha) - ln(alpha delta) / (alpha - 1), the best over the orders (Canonne, Kamath, Steinke 2020,
    Proposition 12; Balle et al. 2020, Theorem 21). inf where no order is finite.
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

    An upper bound: the library rounds the loss up onto a grid, which is chosen here so that it adds less than one per
    cent, unless there are dozens of different events. Equal events are merged before they are composed, and plain
    Gaussians into one.

    Returns:
        None where one of the events has no formula there: lots of a fixed size, sums of discrete Gaussians.

    Raises:
        EventUnaccountable: an event has no formula under this adjacency at all.
    """
    merged = _merged(events)
    spent = np.zeros(len(ORDERS))
    for event in merged:
        spent += renyi(event, adjacency)
    pairs = [_library_event(event) for event in merged]
    if not merged or any(pair is None for pair in pairs):
        return None if merged else 0.0
    rough = epsilon_renyi(spent, delta)
    # Nothing is promised here at all, and a distribution of such losses does not fit into memory.
    if not math.isfinite(rough) or rough > 1e5:
        return math.inf

    from dp_accounting.pld import PLDAccountant

    composed = [event.steps for event in merged if not _is_plain(event)]
    accountant = PLDAccountant(value_discretization_interval=_interval(spent, rough, composed))
    plain = sum(_precision(event) for event in merged)
    if plain:
        accountant.compose(_library_gaussian(plain**-0.5))
    for event, pair in zip(merged, pairs, strict=True):
        if not _is_plain(event):
            accountant.compose(pair, event.steps)
    return float(accountant.get_epsilon(delta))


def _merged(events: Sequence[PrivacyEvent]) -> list[PrivacyEvent]:
    """Equal events as one with all their steps, in the order of their first appearance."""
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


def _is_plain(event: PrivacyEvent) -> bool:
    match event:
        case SampledGaussian():
            return event.rate == 1
        case FixedLotGaussian():
            return event.lot == event.population
        case _:
            return False


def _precision(event: PrivacyEvent) -> float:
    """steps / multiplier^2 of a plain Gaussian, which add up: releases of one distance are one of all precisions
    together."""
    match event:
        case SampledGaussian() | FixedLotGaussian() if _is_plain(event):
            return event.steps / event.multiplier**2
        case _:
            return 0.0


def _library_event(event: PrivacyEvent) -> Any:
    """One step as dp-accounting names the pair of distributions at distance one; None where it has no such pair."""
    from dp_accounting import dp_event

    match event:
        case SampledGaussian(rate=rate) if rate < 1:
            return dp_event.PoissonSampledDpEvent(rate, _library_gaussian(event.multiplier))
        case SampledGaussian():
            return _library_gaussian(event.multiplier)
        case FixedLotGaussian() if _is_plain(event):
            return _library_gaussian(event.multiplier)
        case Laplace():
            # One coordinate moved by the whole L1 distance is the worst case: the trade-off function of a shift by a
            # + b is that of two shifts after one another (the ratio of Laplace densities is monotone), and chaining
            # bounds two coordinates moved by a and b (Dong, Roth, Su 2022, section 2.5).
            return dp_event.LaplaceDpEvent(1 / event.epsilon)
        case _:
            return None


def _library_gaussian(multiplier: float) -> Any:
    from dp_accounting import dp_event

    return dp_event.GaussianDpEvent(multiplier)


def _interval(spent: Vector, rough: float, composed: Sequence[int]) -> float:
    """Width of the grid for the privacy loss.

    Rounding onto a grid of width w adds up to w^2 / 4 to the variance of one step's loss (connect-the-dots keeps the
    mean right). The whole variance is about twice the divergence over its order, at low orders. Let rounding be 0.2
    per cent of it; bounded by what memory and patience allow.
    """
    steps = sum(composed)
    if not steps:
        return max(1e-3, rough / 1e5)
    variance = 2 * float(spent[0]) / ORDERS[0]
    wanted = math.sqrt(4 * 0.002 * variance / steps)
    patience = max(1e-6, 2e-5 * len(composed), rough / 1e5)
    return max(min(wanted, 1e-3), min(patience, 1e-3), rough / 1e5)
