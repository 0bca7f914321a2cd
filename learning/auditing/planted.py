"""The test of a version by planted canaries in numbers: what a member signs, and what the operator computes again.

Everything here is fixed, so that a signed result has one meaning and says nothing of the member's data: the confidence,
the number of tests that it is corrected for, and how many canaries are guessed.
"""

import math

from learning.auditing.statistics import Guesses, Shares, each_confidence, one_run_bound

__all__ = ["CONFIDENCE", "EACH", "PLANTED", "TESTS", "UPDATE_TESTS", "bound_of", "largest_bound", "planted_guesses"]

# Of all bounds of an audit that decide together.
CONFIDENCE = 0.95
# Tests of a rehearsal's updates: canaries, loss, rmia.
UPDATE_TESTS = 3
# With that of the version. Tests that do not apply are counted too: which do may depend on the data.
TESTS = UPDATE_TESTS + 1
EACH = each_confidence(CONFIDENCE, TESTS)

# Shares of the planted canaries that are guessed to be in and out.
PLANTED = Shares(0.2, 0.2)


def bound_of(guesses: Guesses, delta: float) -> float:
    """The lower bound on epsilon that guesses of planted canaries prove at delta."""
    return one_run_bound(guesses, delta, EACH)


def planted_guesses(canaries: int) -> int:
    """How many of this many planted canaries are guessed."""
    high, low = (math.ceil(share * canaries) for share in (PLANTED.high, PLANTED.low))
    return min(canaries, high + low)


def largest_bound(canaries: int, delta: float) -> float:
    """The bound that this many planted canaries would prove at delta if all guesses were right."""
    made = planted_guesses(canaries)
    return bound_of(Guesses(canaries, made, made), delta)
