"""Decides whether a ledger's limits admit an event: the gate over counted events, lifetime and monthly.

Pure. The month has a gate of its own, with its own epsilon at the same delta, over what was charged in the month and
everything that is reserved. A lowered limit admits nothing that the former one refused, so the earlier promise still
holds. The lowered limit holds over all events too, if what was spent before lies within it and nobody chose it by
looking at what the releases showed.
"""

from collections import Counter
from dataclasses import replace

from edge_client.ledger.chain import LimitNumbers
from edge_client.ledger.replay import LedgerState, as_events
from learning.accounting.events import PrivacyEvent
from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter, epsilon_counted
from tacit.rounding import rounded_up

__all__ = ["Gate"]


class Gate:
    """The gate of a ledger's limits: what counted events spend, and whether one more is admitted."""

    def __init__(self, numbers: LimitNumbers, monthly: float | None) -> None:
        self.numbers = numbers
        self.monthly = monthly
        self.limit = Limit(numbers.epsilon, numbers.delta, numbers.adjacency, numbers.unit)
        self._lifetime = PrivacyFilter(self.limit)
        self._monthly = None if monthly is None else PrivacyFilter(replace(self.limit, epsilon=monthly))

    def refusal(self, state: LedgerState, event: PrivacyEvent, month: str) -> str | None:
        """Says why the event may not be reserved now. None: it may.

        Raises:
            EventUnaccountable: no formula, or another unit than the limit's.
        """
        spent = as_events(state.spent().items())
        if not self._lifetime.admits([*spent, event]):
            return _refusal("the limit", self._lifetime, spent, event)
        if self._monthly is not None:
            spent = as_events(state.spent_in(month).items())
            if not self._monthly.admits([*spent, event]):
                return _refusal(f"the limit of {month}", self._monthly, spent, event)
        return None

    def overdrawn(self, state: LedgerState, month: str) -> str | None:
        """Says why what counts as spent is more than a limit admits. None: it is not."""
        named = [("the limit", self._lifetime, state.spent())]
        if self._monthly is not None:
            named.append((f"the limit of {month}", self._monthly, state.spent_in(month)))
        for what, gate, counts in named:
            spent = as_events(counts.items())
            if not gate.admits(spent):
                limit = gate.limit
                return (
                    f"{what} is epsilon {limit.epsilon:g} at delta {limit.delta:g} for one {limit.unit}, and what was "
                    f"charged counts as {rounded_up(epsilon_counted(spent, limit), 4):g}"
                )
        return None

    def epsilon(self, counts: Counter[PrivacyEvent]) -> float:
        """The epsilon that counted events have spent, at the limit's delta.

        Raises:
            EventUnaccountable: no formula, or another unit than the limit's.
        """
        return epsilon_counted(as_events(counts.items()), self.limit)

    def share_left(self, state: LedgerState, month: str) -> float:
        """The share of epsilon that is left, 0 to 1: the smaller of lifetime and month."""
        left = self._lifetime.remaining(as_events(state.spent().items()))
        if self._monthly is not None:
            left = min(left, self._monthly.remaining(as_events(state.spent_in(month).items())))
        return left


def _refusal(what: str, gate: PrivacyFilter, spent: list[PrivacyEvent], event: PrivacyEvent) -> str:
    limit = gate.limit

    def counted(events: list[PrivacyEvent]) -> str:
        return f"{rounded_up(epsilon_counted(events, limit), 4):g}"

    return (
        f"{what} is epsilon {limit.epsilon:g} at delta {limit.delta:g} ({limit.adjacency}, one {limit.unit}); charged "
        f"and reserved count as {counted(spent)}, the next event alone as {counted([event])}, both together as "
        f"{counted([*spent, event])}. This member still receives models, but contributes no more to such jobs"
    )
