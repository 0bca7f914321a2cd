"""Noise on metrics is drawn once, and a repeated attempt sends it again. Then only a member's own noise counts.

The adversary is the coordinator. Its first attempt fails after the sum was opened, or in a phase that it says failed,
and the second has one member less. It subtracts the two sums. All noise that was sent twice cancels, and what is left
is one member's vector with one member's noise. A ledger that counted the noise of h honest members would be wrong by a
factor of h in every divergence.
"""

import functools
import math

import numpy as np
import pytest

from learning.accounting.costs import event_of_metrics
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.validation.contribution import metrics_of, noised
from tacit.validation import MetricNoise
from tests.support.random_sources import Seeded

MEMBERS, HONEST, RUNS = 9, 8, 1000
NOISE = MetricNoise(3.0, 1000)


@functools.cache
def measured(rows):
    """What a member measures once for a version."""
    return metrics_of(np.zeros(rows), np.ones(rows, dtype=bool), range(rows), 1.0, Seeded("rounding"))


def sent(run, member, there):
    return noised(measured(20 if member else there), NOISE, Seeded(f"{run}/{member}"))


@functools.cache
def differences(there):
    """The first sum less the second, in which member 0 is missing. `there` is the number of rows that it measures."""
    found = []
    for run in range(RUNS):
        vectors = [sent(run, member, there) for member in range(MEMBERS)]
        first, second = sum(vectors), sum(vectors[1:])
        found.append(first - second)
    return np.array(found, dtype=np.float64)


def test_two_sums_show_one_members_vector_with_its_own_noise_alone():
    left = differences(there=0)
    assert left.std() == pytest.approx(NOISE.std, rel=0.05)
    # Far below what the shares of the honest members would have left.
    assert left.std() < 0.5 * math.sqrt(HONEST) * NOISE.std


def test_the_charge_bounds_what_the_difference_shows_and_the_honest_members_noise_would_not():
    """The adversary's best test between a row that is there and one that is not: the projection on the row's vector."""
    direction = np.array([-1.0, 1.0, 1.0]) / math.sqrt(3)
    without, one = differences(there=0) @ direction, differences(there=1) @ direction
    # The standardised distance between the two, which is 1 / multiplier for Gaussian noise.
    shown = (one.mean() - without.mean()) / without.std()
    own = event_of_metrics(NOISE, "add-remove")
    assert shown == pytest.approx(1 / own.multiplier, rel=0.1)
    together = own.model_copy(update={"multiplier": own.multiplier * math.sqrt(HONEST)})
    assert shown > 2 / together.multiplier
    limit = Limit(8.0, 1e-6)
    assert epsilon_counted([together], limit) < 0.5 * epsilon_counted([own], limit)
