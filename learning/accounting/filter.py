"""The Rényi filter: decides whether one more event of any kind fits into a budget. Pure: it touches no ledger.

It is one of the two filters of the gate (`gate`), and the one that admits events of different kinds. Each of the fixed
orders alpha_1 ... alpha_m has a share of delta and a cap that follows from it. Events pass if the sum of their
divergences stays at or under the cap of at least one order. docs/accounting.md has the proof.

An order's share of delta depends on the limit alone. It is largest near the order that fits a limit best, which for
sums of many releases lies near 1 + 1.5 ln(1 / delta) / epsilon. A lower epsilon or delta never raises a cap.

Assumptions: the orders and the limit were fixed before the first event; every event is charged before anyone can see
what it releases; every event states what its mechanism really did.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from learning.accounting.events import Adjacency, PrivacyEvent
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi
from tacit.mechanism import Unit

__all__ = ["RENYI_NUMBERS", "RENYI_SHARE", "Limit", "RenyiFilter", "cost", "epsilon_mixed"]

Vector = NDArray[np.float64]

_ALPHA: Final = np.array(ORDERS)

# The share of the limit's delta that belongs to this filter. The rest is the homogeneous filter's (`gate`).
RENYI_SHARE: Final = 0.25
# The orders' shares fall off on either side of 1 + _CENTRE ln(1 / delta) / epsilon, as this power of the distance.
_CENTRE: Final = 1.5
_POWER: Final = 2.0
# Caps fall with the limit only if the logarithm is at least 2 _POWER / _CENTRE and 2 _POWER.
_MIN_LOG: Final = 4.5
# Whatever fixes the filter besides the limit. A ledger records their digest.
RENYI_NUMBERS: Final = (*ORDERS, RENYI_SHARE, _CENTRE, _POWER, _MIN_LOG)


@dataclass(frozen=True)
class Limit:
    """A budget, and the neighbours it is about: under `adjacency`, they differ in one `unit`."""

    epsilon: float
    delta: float
    adjacency: Adjacency = "add-remove"
    unit: Unit = "example"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(f"epsilon must be a positive number, got {self.epsilon}; 1 to 10 is usual")
        if not 0 < self.delta < 1:
            raise ValueError(
                f"delta must lie between 0 and 1, got {self.delta}; choose one well below 1 / (number of examples)"
            )
        if self.adjacency not in get_args(Adjacency):
            raise ValueError(f"adjacency must be add-remove or replace-one, got {self.adjacency!r}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be example, person or member, got {self.unit!r}")


def cost(event: PrivacyEvent, limit: Limit) -> Vector:
    """What an event takes from a budget: its Rényi divergences at ORDERS, shape (m,).

    Raises:
        EventUnaccountable: The event is about another unit than the limit, or has no formula under its adjacency.
    """
    if event.unit != limit.unit:
        raise EventUnaccountable(
            f"the event ({event.kind}) protects one {event.unit}, but the unit of this ledger is one {limit.unit}; "
            "what is spent of one is no bound for the other"
        )
    return renyi(event, limit.adjacency)


def epsilon_mixed(spent: Vector, limit: Limit) -> float:
    """The smallest epsilon at which a filter of the limit's delta admits `spent`: 0 if nothing, inf if none does.

    Args:
        spent: Rényi divergences at ORDERS, shape (m,).
        limit: Its delta counts. Its epsilon does not.

    Raises:
        ValueError: The array is not (m,), or has a number that no divergence can be.
    """
    if not np.any(_checked(spent, "spent")):
        return 0.0
    low, high = 1e-9, 1e9

    def admits(epsilon: float) -> bool:
        return RenyiFilter(replace(limit, epsilon=epsilon)).admits(spent)

    if not admits(high):
        return math.inf
    while high > low * (1 + 1e-12):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        if admits(middle):
            high = middle
        else:
            low = middle
    return high


class RenyiFilter:
    """The rule that admits events. It has no state: the ledger keeps what was spent."""

    caps: Vector
    """(m,) The most that each order may add up to. An order whose cap is not positive never admits anything."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        shares = RENYI_SHARE * limit.delta * _weights(limit)
        # An order within its cap bounds the hockey-stick divergence at epsilon by its share of delta (Canonne, Kamath,
        # Steinke 2020, Proposition 12).
        self.caps = limit.epsilon - np.log1p(-1 / _ALPHA) + np.log(_ALPHA * shares) / (_ALPHA - 1)
        self.caps.setflags(write=False)

    def admits(self, spent: Vector) -> bool:
        """Whether events pass: at least one order with a positive cap stays at or under it.

        Args:
            spent: The Rényi divergences of all of them, shape (m,).

        Raises:
            ValueError: The array is not (m,), or has a number that no divergence can be.
        """
        return bool(np.any((self.caps > 0) & (_checked(spent, "spent") <= self.caps)))


def _weights(limit: Limit) -> Vector:
    """(m,) Each order's part of the filter's delta. They add up to 1."""
    centre = _CENTRE * max(_MIN_LOG, -math.log(limit.delta)) / limit.epsilon
    logs = -_POWER * np.abs(np.log((_ALPHA - 1) / centre))
    weights: Vector = np.exp(logs - logs.max())
    weights /= weights.sum()
    return weights


def _checked(divergences: Vector, what: str) -> Vector:
    # A NaN or a negative number would silently let everything pass.
    if divergences.shape != (len(ORDERS),) or not bool(np.all(divergences >= 0)):
        raise ValueError(f"{what} must be {len(ORDERS)} Rényi divergences, none of them negative")
    return divergences
