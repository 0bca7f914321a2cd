"""The gate: whether one more event fits into a budget of (epsilon, delta). Pure; nothing here reads or writes a ledger.

A Rényi filter over the fixed orders alpha_1 ... alpha_m. Each order has a cap of epsilon - ln(m / delta) / (alpha -
1); an event passes while the divergences spent, it included, stay under the cap of at least one order.

Why that is (epsilon, delta)-differential privacy. For one order, stopping before the sum passes its cap gives a
mechanism whose Rényi divergence at that order is at most the cap, even though every later event is chosen knowing all
earlier releases (Feldman, Zrnic 2021, "Individual Privacy Accounting via a Rényi Filter"; filters: Rogers, Roth,
Ullman, Vadhan 2016). By Markov's inequality its privacy loss exceeds epsilon with probability at most delta / m. The
union over the m orders leaves delta, whichever order it is that lets the last event pass. The conversions that are
sharper for one order do not bound the tail of the loss and are no gate; they make the reports
(`accounting.epsilon_renyi`).

Assumptions: the orders and the limit were fixed before the first event; every event is charged before anything it
stands for can be seen; what an event says of its mechanism is what the mechanism did.
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
    """A budget, and what it is a statement about: neighbours (`adjacency`) that differ in one `unit`."""

    epsilon: float
    delta: float
    adjacency: Adjacency = "add-remove"
    unit: Unit = "example"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(f"epsilon must be a positive number, and is {self.epsilon}; 1 to 10 is usual")
        if not 0 < self.delta < 1:
            raise ValueError(
                f"delta must lie between 0 and 1, and is {self.delta}; take one well below 1 / (number of examples)"
            )
        if self.adjacency not in get_args(Adjacency):
            raise ValueError(f"adjacency must be add-remove or replace-one, and is {self.adjacency!r}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be example or member, and is {self.unit!r}")


def cost(event: PrivacyEvent, limit: Limit) -> Vector:
    """What an event takes from a budget: its Rényi divergences at ORDERS, (m,).

    Raises:
        EventUnaccountable: it protects another unit than the limit is about, or has no formula under its adjacency.
    """
    if event.unit != limit.unit:
        raise EventUnaccountable(
            f"the event ({event.kind}) is about one {event.unit}, and this ledger about one {limit.unit}; "
            "keep them in two ledgers"
        )
    return renyi(event, limit.adjacency)


def epsilon_counted(spent: Vector, delta: float) -> float:
    """The epsilon that the gate counts: the smallest limit at which everything in `spent` passes.

    min over the orders of spent + ln(m / delta) / (alpha - 1). A release passes a limit of epsilon exactly if this,
    with the release in `spent`, is at most epsilon. So what was spent is (epsilon_counted, delta)-differentially
    private where a limit of that size was fixed beforehand; see the module's assumptions.

    Args:
        spent: Rényi divergences at ORDERS, shape (m,).
        delta: The limit's delta.

    Returns:
        0 where nothing was spent, inf where no order is finite.

    Raises:
        ValueError: an array that is not (m,), or holds what no divergence can be.
    """
    if not np.any(_checked(spent, "spent")):
        return 0.0
    return float((spent + math.log(len(ORDERS) / delta) / (_ALPHA - 1)).min())


class RenyiFilter:
    """The rule by which events pass. It holds no state: what was spent is the ledger's."""

    caps: Vector
    """(m,) what each order may add up to; an order whose cap is not positive never lets anything pass."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.caps = limit.epsilon - math.log(len(ORDERS) / limit.delta) / (_ALPHA - 1)
        self.caps.setflags(write=False)

    def admits(self, spent: Vector, cost: Vector) -> bool:
        """Whether an event of this cost, (m,), passes after `spent`, (m,): some order stays at its cap or under.

        Raises:
            ValueError: an array that is not (m,), or holds what no divergence can be.
        """
        after = _checked(spent, "spent") + _checked(cost, "cost")
        return bool(np.any((self.caps > 0) & (after <= self.caps)))

    def remaining(self, spent: Vector) -> float:
        """Share of the limit's epsilon that is left: 1 - epsilon_counted / epsilon, from 1 (untouched) to 0.

        A figure to read. It falls fastest at the first release: epsilon grows more slowly the more is spent.

        Raises:
            ValueError: as `admits`.
        """
        if not np.any(self.caps > 0):
            return 0.0
        return max(0.0, 1 - epsilon_counted(spent, self.limit.delta) / self.limit.epsilon)


def _checked(divergences: Vector, what: str) -> Vector:
    # A NaN or a negative number would let everything pass, silently.
    if divergences.shape != (len(ORDERS),) or not bool(np.all(divergences >= 0)):
        raise ValueError(f"{what} must be {len(ORDERS)} Rényi divergences, none of them negative")
    return divergences
