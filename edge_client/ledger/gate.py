"""Decides whether a ledger's limits admit an event: the Rényi filter over counted events, lifetime and monthly.

Pure. The monthly filter has its own epsilon at the same delta, over what was charged in the month and everything that
is reserved. A lowered limit is a filter with lower caps at every order. It admits nothing that the former one refused,
so the earlier promise still holds. The lowered limit holds over all events too, if what was spent before lies within it
and nobody chose it by looking at what the releases showed.
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
    """The filters of a limit: what counted events spend, and whether one more is admitted."""

    def __init__(self, numbers: LimitNumbers, monthly: float | None) -> None:
        self.numbers = numbers
        self.monthly = monthly
        self.limit = Limit(numbers.epsilon, numbers.delta, numbers.adjacency, numbers.unit)
        self._lifetime = RenyiFilter(self.limit)
        self._monthly = None if monthly is None else RenyiFilter(replace(self.limit, epsilon=monthly))
        self._costs: dict[PrivacyEvent, _Vector] = {}

    def cost(self, event: PrivacyEvent) -> _Vector:
        """The event's cost at each order, shape (m,).

        Raises:
            EventUnaccountable: no formula, or another unit than the limit's.
        """
        known = self._costs.get(event)
        if known is None:
            known = self._costs[event] = cost(event, self.limit)
        return known

    def total(self, counts: Counter[PrivacyEvent]) -> _Vector:
        """The cost of counted events at each order, shape (m,)."""
        total = np.zeros(len(ORDERS))
        for event, count in counts.items():
            if count:
                total += count * self.cost(event)
        return total

    def refusal(self, state: LedgerState, event: PrivacyEvent, month: str) -> str | None:
        """Says why the event may not be reserved now. None: it may.

        Raises:
            EventUnaccountable: no formula, or another unit than the limit's.
        """
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
        """The epsilon that counted events have spent, at the limit's delta.

        Raises:
            EventUnaccountable: no formula, or another unit than the limit's.
        """
        return epsilon_counted(self.total(counts), self.limit.delta)

    def share_left(self, state: LedgerState, month: str) -> float:
        """The share of epsilon that is left, 0 to 1: the smaller of lifetime and month."""
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
        f"{counted(spent + cost)}. This member still receives models, but contributes no more to such jobs"
    )
