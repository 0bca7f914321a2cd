"""The gate: decides whether one more event fits into a budget of (epsilon, delta). Pure: it touches no ledger.

It is a Rényi filter over the fixed orders alpha_1 ... alpha_m. Each order has a cap of epsilon - ln(m / delta) / (alpha
- 1). An event passes if the divergences spent, with its own, stay at or under the cap of at least one order.

Why that is (epsilon, delta)-differential privacy: for one order, stopping before the sum passes its cap gives a
mechanism whose Rényi divergence at that order is at most the cap, even though every later event is chosen knowing all
earlier releases (Feldman, Zrnic 2021, "Individual Privacy Accounting via a Rényi Filter"; filters: Rogers, Roth,
Ullman, Vadhan 2016). By Markov's inequality, its privacy loss exceeds epsilon with probability at most delta / m. A
union bound over the m orders gives delta, whichever order lets the last event pass. The conversions that are sharper
for one order do not bound the tail of the loss, so they are no gate; reports use them (`spend.epsilon_renyi`).

Assumptions: the orders and the limit were fixed before the first event; every event is charged before anyone can see
what it releases; every event states what its mechanism really did.
"""

import math
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from learning.accounting.events import Adjacency, PrivacyEvent
from learning.accounting.renyi import ORDERS, EventUnaccountable, renyi
from tacit.mechanism import Unit

__all__ = ["Limit", "RenyiFilter", "cost", "epsilon_counted"]

Vector = NDArray[np.float64]

_ALPHA: Final = np.array(ORDERS)


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
            raise ValueError(f"unit must be example or member, got {self.unit!r}")


def cost(event: PrivacyEvent, limit: Limit) -> Vector:
    """What an event takes from a budget: its Rényi divergences at ORDERS, shape (m,).

    Raises:
        EventUnaccountable: The event is about another unit than the limit, or has no formula under its adjacency.
    """
    if event.unit != limit.unit:
        raise EventUnaccountable(
            f"the event ({event.kind}) protects one {event.unit}, but the unit of this ledger is one {limit.unit}; "
            "keep two ledgers"
        )
    return renyi(event, limit.adjacency)


def epsilon_counted(spent: Vector, delta: float) -> float:
    """The epsilon that the gate counts: the smallest limit at which everything in `spent` passes.

    A release passes a limit of epsilon exactly if this number, with the release in `spent`, is at most epsilon. So what
    was spent is (epsilon_counted, delta)-differentially private where a limit of that size was fixed beforehand, under
    the module's assumptions.

    Args:
        spent: Rényi divergences at ORDERS, shape (m,).
        delta: The limit's delta.

    Returns:
        The least of spent + ln(m / delta) / (alpha - 1) over the orders: 0 where nothing was spent, inf where no order
        is finite.

    Raises:
        ValueError: The array is not (m,), or has a number that no divergence can be.
    """
    if not np.any(_checked(spent, "spent")):
        return 0.0
    return float((spent + math.log(len(ORDERS) / delta) / (_ALPHA - 1)).min())


class RenyiFilter:
    """The rule that admits events. It has no state: the ledger keeps what was spent."""

    caps: Vector
    """(m,) The most that each order may add up to. An order whose cap is not positive never admits anything."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.caps = limit.epsilon - math.log(len(ORDERS) / limit.delta) / (_ALPHA - 1)
        self.caps.setflags(write=False)

    def admits(self, spent: Vector, cost: Vector) -> bool:
        """Whether an event passes: at least one order with a positive cap stays at or under it.

        Args:
            spent: Rényi divergences spent before, shape (m,).
            cost: Those of the event, shape (m,).

        Raises:
            ValueError: An array is not (m,), or has a number that no divergence can be.
        """
        after = _checked(spent, "spent") + _checked(cost, "cost")
        return bool(np.any((self.caps > 0) & (after <= self.caps)))

    def remaining(self, spent: Vector) -> float:
        """The share of the limit's epsilon that is left: 1 - epsilon_counted / epsilon, from 1 (untouched) to 0.

        It is for people to read. It falls fastest at the first release: epsilon grows more slowly the more is spent.

        Raises:
            ValueError: As in `admits`.
        """
        if not np.any(self.caps > 0):
            return 0.0
        return max(0.0, 1 - epsilon_counted(spent, self.limit.delta) / self.limit.epsilon)


def _checked(divergences: Vector, what: str) -> Vector:
    # A NaN or a negative number would silently let everything pass.
    if divergences.shape != (len(ORDERS),) or not bool(np.all(divergences >= 0)):
        raise ValueError(f"{what} must be {len(ORDERS)} Rényi divergences, none of them negative")
    return divergences
