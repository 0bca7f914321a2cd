"""What a ledger's limits let pass: the Rényi filter over counted events, for all time and for one month.

Pure. The month's filter has an epsilon of its own at the same delta, over what was charged in the month and all that
is reserved. A lowered limit is a filter with lower caps at every order: it lets nothing pass that the former one
stopped, so what was promised before still holds; and it holds itself over all events wherever what was spent before
lies within it.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edge_client.ledger.chain import LimitNumbers
from edge_client.ledger.replay import LedgerState
from learning.accounting.events import PrivacyEvent
from learning.accounting.spend import ORDERS, Limit, RenyiFilter, cost, epsilon_counted

__all__ = ["Gate"]

_Vector = NDArray[np.float64]


class Gate:
    """The filters of a limit: what counted events use up, and whether one more passes."""

    def __init__(self, numbers: LimitNumbers, monthly: float | None) -> None:
        self.numbers = numbers
        self.monthly = monthly
        self.limit = Limit(numbers.epsilon, numbers.delta, numbers.adjacency, numbers.unit)
        self._lifetime = RenyiFilter(self.limit)
        self._monthly = None if monthly is None else RenyiFilter(replace(self.limit, epsilon=monthly))
        self._costs: dict[PrivacyEvent, _Vector] = {}

    def cost(self, event: PrivacyEvent) -> _Vector:
        """At each order, (m,). Raises: EventUnaccountable: no formula, or another unit than the limit's."""
        known = self._costs.get(event)
        if known is None:
            known = self._costs[event] = cost(event, self.limit)
        return known

    def total(self, counts: Counter[PrivacyEvent]) -> _Vector:
        """Of counted events, at each order, (m,)."""
        total = np.zeros(len(ORDERS))
        for event, count in counts.items():
            if count:
                total += count * self.cost(event)
        return total

    def refusal(self, state: LedgerState, event: PrivacyEvent, month: str) -> str | None:
        """Why the event may not be reserved now; None where it may. Raises: EventUnaccountable."""
        cost = self.cost(event)
        spent = self.total(state.spent())
        if not self._lifetime.admits(spent, cost):
            return _refusal("the limit", self._lifetime, spent, cost)
        if self._monthly is not None:
            spent = self.total(state.spent_in(month))
            if not self._monthly.admits(spent, cost):
                return _refusal(f"the limit of {month}", self._monthly, spent, cost)
        return None

    def epsilon(self, counts: Counter[PrivacyEvent]) -> float:
        """What counted events have spent, in the unit of the limit. Raises: EventUnaccountable."""
        return epsilon_counted(self.total(counts), self.limit.delta)

    def share_left(self, state: LedgerState, month: str) -> float:
        """The smaller of the two shares of epsilon, 0 to 1."""
        left = self._lifetime.remaining(self.total(state.spent()))
        if self._monthly is not None:
            left = min(left, self._monthly.remaining(self.total(state.spent_in(month))))
        return left


def _refusal(what: str, filter: RenyiFilter, spent: _Vector, cost: _Vector) -> str:
    limit = filter.limit

    def counted(used: _Vector) -> str:
        return f"{epsilon_counted(used, limit.delta):.4g}"

    return (
        f"{what} is epsilon {limit.epsilon:g} at delta {limit.delta:g} ({limit.adjacency}, one {limit.unit}); charged "
        f"and reserved count as {counted(spent)}, the next event alone as {counted(cost)}, both together as "
        f"{counted(spent + cost)}. This machine goes on receiving models and contributes no more to such jobs"
    )
