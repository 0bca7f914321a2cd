"""The gate: decides whether events fit into a budget of (epsilon, delta), and counts what they spend. Pure.

Events pass if one of two filters admits all of them. Each has its share of delta, because which of the two admits them
may be chosen knowing earlier results:

- the homogeneous filter (3/4 of delta) admits equal steps only, up to the number at which a plan of these steps, and of
  the metrics beside them, would spend its share. Nothing is left to choose but when to stop and in which rounds to
  measure, so it may use their PLD;
- the Rényi filter (1/4 of delta, `filter`) admits events of any kind, in any order.

docs/accounting.md has the theorem, its proof and its assumptions.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from learning.accounting.events import Adjacency, DiscreteGaussian, PrivacyEvent, metrics_beside, planned
from learning.accounting.filter import RENYI_NUMBERS, RENYI_SHARE, Limit, RenyiFilter, epsilon_mixed
from learning.accounting.renyi import renyi
from learning.accounting.spend import composed_steps, epsilon_pld, epsilon_renyi, merged, total
from tacit.validation import HALF, METRICS

__all__ = [
    "GATE_NUMBERS",
    "HOMOGENEOUS_SHARE",
    "PrivacyFilter",
    "beside_what_is_spent",
    "epsilon_counted",
    "epsilon_homogeneous",
    "homogeneous",
    "plan_of",
]

HOMOGENEOUS_SHARE: Final = 1 - RENYI_SHARE
# What rounding in double precision may take from the delta of a PLD, for each step that a Fourier transform composes.
# Derived in docs/accounting.md for grids of at most 2^20 points.
_ROUNDING_A_STEP: Final = 2e-11
# Whatever fixes the gate besides the limit. A ledger records their digest.
GATE_NUMBERS: Final = (*RENYI_NUMBERS, HOMOGENEOUS_SHARE, _ROUNDING_A_STEP, float(METRICS), float(HALF))


def homogeneous(events: Sequence[PrivacyEvent]) -> PrivacyEvent | None:
    """All events as one, if they consist of equal steps. None: they do not, or there are none.

    Steps are equal only if the metrics beside them have the same numbers too, or if neither has any.
    """
    kinds = merged(events)
    return kinds[0] if len(kinds) == 1 else None


def plan_of(event: PrivacyEvent) -> PrivacyEvent:
    """The smallest plan that holds the event: K steps, with one measurement for each `every` of them, rounded up.

    A member that missed rounds may have measured more often than its steps allow. Then the plan has more steps.
    """
    beside = metrics_beside(event)
    if beside is None:
        return event
    return planned(event, max(event.steps, beside.every * (beside.measured - 1) + 1))


@lru_cache(maxsize=4096)
def epsilon_homogeneous(event: PrivacyEvent, delta: float, adjacency: Adjacency) -> float:
    """The smallest epsilon at which a homogeneous filter admits the event, with all its steps; inf if none does.

    It is that of the smallest plan that holds the event.

    Args:
        event: The event.
        delta: The limit's delta, of which the filter has its share.
        adjacency: The limit's adjacency.

    Raises:
        EventUnaccountable: The event has no formula under this adjacency.
    """
    share, plan = HOMOGENEOUS_SHARE * delta, plan_of(event)
    by_renyi = epsilon_renyi(renyi(plan, adjacency), share)
    certain = share - _ROUNDING_A_STEP * composed_steps(plan)
    by_pld = epsilon_pld([plan], certain, adjacency) if certain > 0 else None
    return by_renyi if by_pld is None else min(by_renyi, by_pld)


def epsilon_counted(events: Sequence[PrivacyEvent], limit: Limit) -> float:
    """The epsilon that the gate counts: the smallest limit at which all these events pass.

    They pass a limit exactly if this number is at most its epsilon. So they are (epsilon_counted, delta)-differentially
    private where a limit of that size was fixed beforehand.

    Args:
        events: Everything charged and reserved, in any order.
        limit: Its epsilon does not count.

    Returns:
        The epsilon: 0 if there are no events, inf if no limit is enough.

    Raises:
        EventUnaccountable: An event is about another unit than the limit, or has no formula under its adjacency.
    """
    counted = epsilon_mixed(total(events, limit), limit)
    alike = homogeneous(events)
    if alike is None:
        return counted
    return min(counted, epsilon_homogeneous(alike, limit.delta, limit.adjacency))


def beside_what_is_spent(event: PrivacyEvent, spent: Sequence[PrivacyEvent]) -> PrivacyEvent:
    """The event as it is to be reserved: with the metrics of equal steps that were spent before, none of them measured.

    Equal steps with and without metrics are two kinds, which only the Rényi filter admits together. A plan of the first
    kind holds both, and it was fixed by the first of them. The reverse would not be sound: metrics that come later were
    chosen after something was released.

    Args:
        event: What is about to be released.
        spent: Everything charged and reserved before.
    """
    kinds = merged(spent)
    if len(kinds) != 1 or metrics_beside(event) is not None or isinstance(event, DiscreteGaussian):
        return event
    first = metrics_beside(kinds[0])
    if first is None or homogeneous([kinds[0].model_copy(update={"metrics": None}), event]) is None:
        return event
    return event.model_copy(update={"metrics": first.model_copy(update={"measured": 0})})


class PrivacyFilter:
    """The gate of one limit. It has no state: the ledger keeps what was spent."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._mixed = RenyiFilter(limit)

    def admits(self, events: Sequence[PrivacyEvent]) -> bool:
        """Whether all these events together pass.

        It tries the Rényi filter first, which takes microseconds. A PLD takes a tenth of a second.

        Raises:
            EventUnaccountable: As in `epsilon_counted`.
        """
        if self._mixed.admits(total(events, self.limit)):
            return True
        alike = homogeneous(events)
        if alike is None:
            return False
        return epsilon_homogeneous(alike, self.limit.delta, self.limit.adjacency) <= self.limit.epsilon

    def remaining(self, events: Sequence[PrivacyEvent]) -> float:
        """The share of the limit's epsilon that is left: 1 - epsilon_counted / epsilon, from 1 (untouched) to 0.

        It is for people to read, and about more steps equal to those in `events`, if all of them are equal. It falls
        fastest at the first release: epsilon grows more slowly the more is spent.

        Raises:
            EventUnaccountable: As in `epsilon_counted`.
        """
        return max(0.0, 1 - epsilon_counted(events, self.limit) / self.limit.epsilon)
