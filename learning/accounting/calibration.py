"""Accounting in reverse: the noise that a budget needs, and the rounds that it allows. Pure.

Everything is about events. The caller gives a function from a noise multiplier to an event, and so decides whose
multiplier it is (the job's sigma, a share's, an inverse epsilon). A larger multiplier must never cost more. Two answers
stay apart throughout: by the gate, which a member's ledger applies, and by the PLD, with which people compare.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learning.accounting.events import Adjacency, PrivacyEvent
from learning.accounting.filter import epsilon_counted
from learning.accounting.renyi import renyi
from learning.accounting.spend import ORDERS, Limit, RenyiFilter, cost, epsilon_pld

__all__ = [
    "MAX_ROUNDS",
    "NotAffordable",
    "calibrate",
    "calibrate_pld",
    "epsilon_at_gate",
    "repeated",
    "rounds_affordable",
]

Vector = NDArray[np.float64]
EventAt = Callable[[float], PrivacyEvent]

# Nobody trains longer. A mechanism that costs almost nothing gets this answer.
MAX_ROUNDS: Final = 1_000_000_000
# A ledger adds one round at a time, and each addition rounds. So plans stay below each cap by this share.
_SLACK: Final = 1e-9
# Multipliers tried: all numbers of three significant digits from 0.01 to 10,000, the largest that a job may name.
_FIRST_DECADE: Final = -2
_DECADES: Final = 6


class NotAffordable(ValueError):
    """No multiplier that a job may name stays within the limit; the text says what to change."""


def repeated(event: PrivacyEvent, rounds: int) -> PrivacyEvent:
    """The event repeated for `rounds` rounds, as one event. Raises ValueError for fewer than one round."""
    if rounds < 1:
        raise ValueError(f"a job has at least one round, got {rounds}")
    return event.model_copy(update={"steps": event.steps * rounds})


def epsilon_at_gate(event: PrivacyEvent, delta: float, adjacency: Adjacency) -> float:
    """The smallest epsilon at which the filter of an empty ledger admits the whole event; inf if none does.

    Raises:
        EventUnaccountable: The event has no formula under this adjacency.
    """
    return epsilon_counted(renyi(event, adjacency), delta)


def rounds_affordable(event_a_round: PrivacyEvent, limit: Limit, spent: Vector | None = None) -> int:
    """The number of rounds that the gate admits one after another.

    Args:
        event_a_round: The event of one round.
        limit: The budget.
        spent: Rényi divergences spent before, shape (m,); by default none.

    Raises:
        EventUnaccountable: The event is about another unit than the limit, or has no formula under its adjacency.
    """
    before = np.zeros(len(ORDERS)) if spent is None else spent
    caps = RenyiFilter(limit).caps
    room = caps * (1 - _SLACK) - before
    each = cost(event_a_round, limit)
    usable = (caps > 0) & (room > 0) & np.isfinite(each)
    if not usable.any():
        return 0
    with np.errstate(divide="ignore", over="ignore"):
        most = float((room[usable] / each[usable]).max())
    return math.floor(min(most, MAX_ROUNDS))


def calibrate(event_at: EventAt, rounds: int, limit: Limit, spent: Vector | None = None) -> float:
    """The smallest noise multiplier of three digits at which all rounds pass the gate.

    Args:
        event_at: Gives the event of one round at a multiplier.
        rounds: Rounds that must pass.
        limit: The budget.
        spent: Rényi divergences spent before, shape (m,); by default none.

    Raises:
        NotAffordable: No multiplier up to 10,000 is enough.
        EventUnaccountable: As in `rounds_affordable`.
    """

    def passes(multiplier: float) -> bool:
        return rounds_affordable(event_at(multiplier), limit, spent) >= rounds

    low, high = -1, 900 * _DECADES
    if not passes(_multiplier(high)):
        raise NotAffordable(
            f"epsilon {limit.epsilon:g} at delta {limit.delta:g} is not enough for {rounds} rounds at any noise; "
            "raise epsilon, or lower the rounds, the steps or the lot"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if passes(_multiplier(middle)):
            high = middle
        else:
            low = middle
    return _multiplier(high)


def calibrate_pld(event_at: EventAt, rounds: int, limit: Limit) -> float | None:
    """The smallest noise multiplier of three digits at which the PLD of all rounds is at most the limit's epsilon.

    A plan fixed beforehand needs this much: nothing in it is chosen from earlier results.

    Returns:
        The multiplier; None where the PLD has no formula.

    Raises:
        NotAffordable, EventUnaccountable: As in `calibrate`.
    """
    epsilons: dict[int, float | None] = {}

    def epsilon(index: int) -> float | None:
        if index not in epsilons:
            event = repeated(event_at(_multiplier(index)), rounds)
            epsilons[index] = epsilon_pld([event], limit.delta, limit.adjacency)
        return epsilons[index]

    # Searches down from the gate's answer, which is never far away: a PLD is slowest to compute at little noise.
    high = _index(calibrate(event_at, rounds, limit))
    at_high = epsilon(high)
    if at_high is None:
        return None
    while at_high is not None and at_high > limit.epsilon and high < 900 * _DECADES:
        high = min(high + 90, 900 * _DECADES)
        at_high = epsilon(high)
    low, stride = high, 30
    while (at_low := epsilon(low)) is not None and at_low <= limit.epsilon and low > 0:
        high, low, stride = low, max(0, low - stride), 2 * stride
    if low == 0 and at_low is not None and at_low <= limit.epsilon:
        return _multiplier(0)
    while high - low > 1:
        guess = _between(low, high, epsilons, limit.epsilon)
        found = epsilon(guess)
        if found is not None and found <= limit.epsilon:
            high = guess
        else:
            low = guess
    return _multiplier(high)


def _between(low: int, high: int, epsilons: dict[int, float | None], target: float) -> int:
    """The index where a straight line through the logarithms meets the target: rounded up, strictly between the two."""
    above, below = epsilons[low], epsilons[high]
    if above is None or below is None or not math.isfinite(above) or below <= 0:
        return (low + high) // 2
    at_low, at_high = math.log(_multiplier(low)), math.log(_multiplier(high))
    share = math.log(above / target) / math.log(above / below)
    meets = math.exp(at_low + share * (at_high - at_low))
    guess = _index(meets)
    return min(max(guess, low + 1), high - 1)


def _multiplier(index: int) -> float:
    """The three-digit number at this index: 0.0100, 0.0101, ... 0.0999, 0.100, ... 10000."""
    decade, digits = divmod(index, 900)
    return float(f"{100 + digits}e{decade + _FIRST_DECADE - 2}")


def _index(multiplier: float) -> int:
    """The index of the smallest three-digit number that is at least `multiplier`."""
    decade = math.floor(math.log10(multiplier))
    index = 900 * (decade - _FIRST_DECADE) + round((multiplier / 10.0**decade - 1) * 100)
    index = min(max(index, 0), 900 * _DECADES)
    while index > 0 and _multiplier(index - 1) >= multiplier:
        index -= 1
    while index < 900 * _DECADES and _multiplier(index) < multiplier:
        index += 1
    return index
