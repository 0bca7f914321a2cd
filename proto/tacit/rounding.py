"""Rounds epsilons for people so that no sentence promises too much.

What a release costs, what a plan needs and what bounds a loss are rounded up; what is left of a budget, and a lower
bound, are rounded down. People copy such numbers into limits, and a ledger's limit can never be raised.

Digits are those of the shortest decimal number that is this float, so a number of few digits stays what it is.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

__all__ = ["apart", "percent_left", "rounded_down", "rounded_up"]


def rounded_up(epsilon: float, digits: int = 3) -> float:
    """The smallest number of so many significant digits that is not below epsilon; infinity stays.

    Raises:
        ValueError: epsilon is negative or no number.
    """
    return _rounded(epsilon, digits, ROUND_CEILING)


def rounded_down(epsilon: float, digits: int = 3) -> float:
    """The largest number of so many significant digits that is not above epsilon; infinity stays.

    Raises:
        ValueError: epsilon is negative or no number.
    """
    return _rounded(epsilon, digits, ROUND_FLOOR)


def percent_left(share: float) -> str:
    """A share of a budget that is left, from 0 to 1, in whole per cent rounded down: `"88%"`."""
    return f"{math.floor(Decimal(repr(float(share))) * 100)}%"


def apart(bound: float, claim: float) -> tuple[str, str]:
    """A lower bound rounded down and a claim rounded up, as text.

    They have three digits, or as many as show that the bound is above the claim, if it is.
    """
    for digits in range(3, 18):
        down, up = rounded_down(bound, digits), rounded_up(claim, digits)
        if bound <= claim or down > up:
            break
    form = f".{max(6, digits)}g"
    return format(down, form), format(up, form)


def _rounded(epsilon: float, digits: int, rounding: str) -> float:
    if not epsilon >= 0:
        raise ValueError(f"an epsilon of {epsilon} cannot be rounded")
    return float(Context(prec=digits, rounding=rounding).create_decimal(repr(float(epsilon))))
