"""How much noise a budget asks for, and how many rounds noise affords: the accounting the other way round. Pure.

Everything is about events. The caller says how an event follows from a noise multiplier, and with that whose
multiplier it is (the job's sigma, a share's, an inverse epsilon); more of it must never cost more. Two answers are
kept apart throughout: by the gate, which is what a member's ledger will go by, and by the PLD, which is what people
compare with.
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

# Nobody trains longer; a mechanism that costs next to nothing affords this many.
MAX_ROUNDS: Final = 1_000_000_000
# A ledger adds round after round, and every addition rounds: plans stay this share below each cap.
_SLACK: Final = 1e-9
# Multipliers tried: all numbers of three digits from 0.01 to 10,000, the largest that a job may name.
_FIRST_DECADE: Final = -2
_DECADES: Final = 6


class NotAffordable(ValueError):
    """No multiplier that a job may name keeps within the limit; the text says what to change."""


def repeated(event: PrivacyEvent, rounds: int) -> PrivacyEvent:
    """The event `rounds` times over, as one. Raises: ValueError: fewer than one round."""
    if rounds < 1:
        raise ValueError(f"a job has one round at least, and this one {rounds}")
    return event.model_copy(update={"steps": event.steps * rounds})


def epsilon_at_gate(event: PrivacyEvent, delta: float, adjacency: Adjacency) -> float:
    """The smallest epsilon at which an empty ledger's filter lets the whole event pass; inf where none does.

    Raises:
        EventUnaccountable: no formula under this adjacency.
    """
    return epsilon_counted(renyi(event, adjacency), delta)


def rounds_affordable(event_a_round: PrivacyEvent, limit: Limit, spent: Vector | None = None) -> int:
    """Rounds that the gate lets pass, one after another, after `spent`, (m,) (an empty ledger if not given).

    Raises:
        EventUnaccountable: another unit than the limit's, or no formula under its adjacency.
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
    """The smallest noise multiplier, of three digits, with which all `rounds` pass the gate after `spent`.

    event_at: the event of one round at a multiplier.

    Raises:
        NotAffordable: none up to 10,000 does.
        EventUnaccountable: as `rounds_affordable`.
    """

    def passes(multiplier: float) -> bool:
        return rounds_affordable(event_at(multiplier), limit, spent) >= rounds

    low, high = -1, 900 * _DECADES
    if not passes(_multiplier(high)):
        raise NotAffordable(
            f"epsilon {limit.epsilon:g} at delta {limit.delta:g} is not enough for {rounds} rounds, whatever the "
            "noise; raise epsilon, or lower the rounds, the steps or the lot"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if passes(_multiplier(middle)):
            high = middle
        else:
            low = middle
    return _multiplier(high)


def calibrate_pld(event_at: EventAt, rounds: int, limit: Limit) -> float | None:
    """The smallest noise multiplier, of three digits, at which the PLD of all `rounds` is at most the limit's epsilon.

    What a fixed plan would need, were nothing chosen from what came before. None where the PLD has no formula.

    Raises:
        NotAffordable, EventUnaccountable: as `calibrate`.
    """
    epsilons: dict[int, float | None] = {}

    def epsilon(index: int) -> float | None:
        if index not in epsilons:
            event = repeated(event_at(_multiplier(index)), rounds)
            epsilons[index] = epsilon_pld([event], limit.delta, limit.adjacency)
        return epsilons[index]

    # From the gate's answer downwards, which is never far: where there is little noise, a PLD costs most.
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
    """Where a straight line through the logarithms meets the target, rounded up, strictly between the two."""
    above, below = epsilons[low], epsilons[high]
    if above is None or below is None or not math.isfinite(above) or below <= 0:
        return (low + high) // 2
    at_low, at_high = math.log(_multiplier(low)), math.log(_multiplier(high))
    share = math.log(above / target) / math.log(above / below)
    meets = math.exp(at_low + share * (at_high - at_low))
    guess = _index(meets)
    return min(max(guess, low + 1), high - 1)


def _multiplier(index: int) -> float:
    """The number of three digits at this place: 0.0100, 0.0101, ... 0.0999, 0.100, ... 10000."""
    decade, digits = divmod(index, 900)
    return float(f"{100 + digits}e{decade + _FIRST_DECADE - 2}")


def _index(multiplier: float) -> int:
    """The place of the smallest number of three digits that is not below this one."""
    decade = math.floor(math.log10(multiplier))
    index = 900 * (decade - _FIRST_DECADE) + round((multiplier / 10.0**decade - 1) * 100)
    index = min(max(index, 0), 900 * _DECADES)
    while index > 0 and _multiplier(index - 1) >= multiplier:
        index -= 1
    while index < 900 * _DECADES and _multiplier(index) < multiplier:
        index += 1
    return index
