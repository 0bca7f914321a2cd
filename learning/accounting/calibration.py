"""Accounting in reverse: the noise that a budget needs, and the rounds that it allows. Pure.

Everything is about events. The caller gives a function from a noise multiplier to an event, and so decides whose
multiplier it is (the job's sigma, a share's, an inverse epsilon). A larger multiplier must never cost more. Answers are
those of the gate, which a member's ledger applies, except for `calibrate_fixed`.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from learning.accounting.events import Adjacency, PrivacyEvent, measuring, metrics_beside, planned
from learning.accounting.filter import Limit, RenyiFilter, cost
from learning.accounting.gate import epsilon_counted, epsilon_homogeneous
from learning.accounting.spend import merged, spend, total

__all__ = [
    "MAX_ROUNDS",
    "NotAffordable",
    "calibrate",
    "calibrate_fixed",
    "epsilon_at_gate",
    "repeated",
    "rounds_affordable",
]

EventAt = Callable[[float], PrivacyEvent]
Vector = NDArray[np.float64]

# Nobody trains longer. A mechanism that costs almost nothing gets this answer.
MAX_ROUNDS: Final = 1_000_000_000
# Beyond this many rounds, the Rényi filter alone decides: a PLD would gain nothing that anybody needs.
_MAX_BY_PLD: Final = 1_000_000
# A plan and a ledger add up the same numbers in another order. So plans stay below each cap by this share.
_SLACK: Final = 1e-9
# Multipliers tried: all numbers of three significant digits from 0.01 to 10,000, the largest that a job may name.
_FIRST_DECADE: Final = -2
_DECADES: Final = 6


class NotAffordable(ValueError):
    """No multiplier that a job may name stays within the limit; the text says what to change."""


def repeated(event: PrivacyEvent, rounds: int) -> PrivacyEvent:
    """The event repeated for `rounds` rounds, as one event, measured as often as it may be.

    Raises:
        ValueError: There is less than one round.
    """
    if rounds < 1:
        raise ValueError(f"a job has at least one round, got {rounds}")
    return planned(event, event.steps * rounds)


def epsilon_at_gate(event: PrivacyEvent, delta: float, adjacency: Adjacency) -> float:
    """The smallest epsilon at which the gate of an empty ledger admits the whole event; inf if none does.

    Raises:
        EventUnaccountable: The event has no formula under this adjacency.
    """
    return epsilon_counted([event], Limit(1.0, delta, adjacency, event.unit))


def rounds_affordable(
    event_a_round: PrivacyEvent, limit: Limit, spent: Sequence[PrivacyEvent] = (), most: int = MAX_ROUNDS
) -> int:
    """The number of rounds that the gate admits one after another.

    Args:
        event_a_round: The event of one round.
        limit: The budget.
        spent: Everything charged and reserved before.
        most: A larger number of rounds is not needed.

    Raises:
        EventUnaccountable: An event is about another unit than the limit, or has no formula under its adjacency.
    """
    low = min(_rounds_mixed(event_a_round, limit, spent), most)
    kinds = merged([*spent, event_a_round])
    most = min(most, _MAX_BY_PLD)
    if len(kinds) > 1 or low >= most:
        return low

    def passes(rounds: int) -> bool:
        (whole,) = merged([*spent, repeated(event_a_round, rounds)])
        return epsilon_homogeneous(whole, limit.delta, limit.adjacency) <= limit.epsilon

    # The homogeneous filter rarely admits more than twice as much as the Rényi filter.
    high = min(most, 2 * low + 1)
    while passes(high):
        if high == most:
            return most
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def _rounds_mixed(event_a_round: PrivacyEvent, limit: Limit, spent: Sequence[PrivacyEvent]) -> int:
    """The number of rounds that the Rényi filter admits."""
    caps = RenyiFilter(limit).caps
    room = caps * (1 - _SLACK) - total(spent, limit)
    beside = metrics_beside(event_a_round)
    bare = event_a_round if beside is None else measuring(event_a_round, 0)
    each = cost(bare, limit)
    usable = (caps > 0) & (room > 0) & np.isfinite(each)
    if not usable.any():
        return 0
    with np.errstate(divide="ignore", over="ignore"):
        most = math.floor(min(float((room[usable] / each[usable]).max()), MAX_ROUNDS))
    if beside is None:
        return most
    return bisect_right(
        range(1, most + 1), 0, key=lambda rounds: _over(cost(repeated(bare, rounds), limit), room, caps)
    )


def _over(spent: Vector, room: Vector, caps: Vector) -> int:
    """1 if no order has room for what is spent, else 0."""
    return int(not np.any((caps > 0) & (spent <= room)))


def calibrate(event_at: EventAt, rounds: int, limit: Limit, spent: Sequence[PrivacyEvent] = ()) -> float:
    """The smallest noise multiplier of three digits at which all rounds pass the gate.

    Args:
        event_at: Gives the event of one round at a multiplier.
        rounds: Rounds that must pass.
        limit: The budget.
        spent: What was charged and reserved before; the rounds are taken to be of another kind.

    Raises:
        NotAffordable: No multiplier up to 10,000 is enough.
        EventUnaccountable: As in `rounds_affordable`.
    """

    def passes(index: int) -> bool:
        return _rounds_mixed(event_at(_multiplier(index)), limit, spent) >= rounds

    def epsilon(index: int) -> float:
        whole = repeated(event_at(_multiplier(index)), rounds)
        return epsilon_homogeneous(whole, limit.delta, limit.adjacency)

    low, high = -1, 900 * _DECADES
    if not passes(high) and (spent or epsilon(high) > limit.epsilon):
        raise NotAffordable(
            f"epsilon {limit.epsilon:g} at delta {limit.delta:g} is not enough for {rounds} rounds at any noise; "
            "raise epsilon, or lower the rounds, the steps or the lot"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            high = middle
        else:
            low = middle
    return _multiplier(high if spent else _lowest(epsilon, high, limit.epsilon))


def calibrate_fixed(event_at: EventAt, rounds: int, limit: Limit) -> float:
    """The smallest noise multiplier of three digits that a plan fixed beforehand needs, by PLD where there is one.

    No gate applies it: it is what others report.

    Raises:
        NotAffordable, EventUnaccountable: As in `calibrate`.
    """

    def epsilon(index: int) -> float:
        return spend([repeated(event_at(_multiplier(index)), rounds)], limit).epsilon

    return _multiplier(_lowest(epsilon, _index(calibrate(event_at, rounds, limit)), limit.epsilon))


def _lowest(epsilon_at: Callable[[int], float], start: int, target: float) -> int:
    """The lowest index up to `start` with an epsilon of at most `target`, or `start`. Epsilon falls with the index.

    It searches down from `start`, which is never far away: a PLD is slowest to compute at little noise.
    """
    epsilons: dict[int, float] = {}

    def epsilon(index: int) -> float:
        if index not in epsilons:
            epsilons[index] = epsilon_at(index)
        return epsilons[index]

    low, high, stride = start, start, 30
    while epsilon(low) <= target:
        if low == 0:
            return 0
        high, low, stride = low, max(0, low - stride), 2 * stride
    while high - low > 1:
        guess = _between(low, high, epsilons, target)
        if epsilon(guess) <= target:
            high = guess
        else:
            low = guess
    return high


def _between(low: int, high: int, epsilons: dict[int, float], target: float) -> int:
    """The index where a straight line through the logarithms meets the target: rounded up, strictly between the two."""
    above, below = epsilons[low], epsilons[high]
    if not math.isfinite(above) or below <= 0:
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
