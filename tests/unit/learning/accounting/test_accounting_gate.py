"""The gate: what each of its two filters admits, and that a PLD's rounding never makes it admit more."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.accounting import gate as module
from learning.accounting import pld
from learning.accounting.calibration import rounds_affordable
from learning.accounting.events import DiscreteGaussianSum, FixedLotGaussian, Laplace, PrivacyEvent, SampledGaussian
from learning.accounting.filter import RENYI_SHARE, Limit, RenyiFilter, epsilon_mixed
from learning.accounting.gate import (
    HOMOGENEOUS_SHARE,
    PrivacyFilter,
    epsilon_counted,
    epsilon_homogeneous,
    homogeneous,
)
from learning.accounting.renyi import EventUnaccountable
from learning.accounting.spend import epsilon_pld, epsilon_renyi, renyi, spend, total

LIMIT = Limit(3.0, 1e-6)
STEP = SampledGaussian(multiplier=1.5, rate=0.1)


def steps(event: PrivacyEvent, count: int) -> PrivacyEvent:
    return event.model_copy(update={"steps": count * event.steps})


def test_the_two_filters_share_delta():
    assert HOMOGENEOUS_SHARE + RENYI_SHARE == 1
    assert HOMOGENEOUS_SHARE > 0 < RENYI_SHARE


def test_equal_steps_are_one_event_however_they_are_grouped():
    assert homogeneous([]) is None
    assert homogeneous([STEP, steps(STEP, 4), STEP]) == steps(STEP, 6)
    for other in (
        SampledGaussian(multiplier=1.5, rate=0.1001),
        SampledGaussian(multiplier=1.501, rate=0.1),
        SampledGaussian(multiplier=1.5, rate=0.1, unit="member"),
        Laplace(epsilon=0.1),
    ):
        assert homogeneous([STEP, other]) is None


def test_equal_steps_pass_by_their_pld_and_others_only_by_the_renyi_filter():
    most = rounds_affordable(STEP, LIMIT)
    alone = [steps(STEP, most)]
    assert not RenyiFilter(LIMIT).admits(total(alone, LIMIT))
    gate = PrivacyFilter(LIMIT)
    assert gate.admits(alone)
    assert not gate.admits([steps(STEP, most + 1)])
    # The smallest step of another kind leaves it to the Rényi filter, which then counts everything.
    other = SampledGaussian(multiplier=10_000, rate=0.1)
    assert not gate.admits([*alone, other])
    fewer = max(count for count in range(most) if RenyiFilter(LIMIT).admits(total([steps(STEP, count)], LIMIT)))
    assert gate.admits([steps(STEP, fewer - 1), other])
    assert epsilon_counted([*alone, other], LIMIT) > LIMIT.epsilon >= epsilon_counted(alone, LIMIT)


def test_the_share_of_delta_is_what_the_steps_may_use():
    """The same steps at the whole delta have a smaller epsilon. The gate uses the larger one."""
    event = steps(STEP, 50)
    whole, share = (epsilon_pld([event], part * LIMIT.delta, "add-remove") for part in (1, HOMOGENEOUS_SHARE))
    counted = epsilon_homogeneous(event, LIMIT.delta, LIMIT.adjacency)
    assert whole is not None
    assert share is not None
    assert whole < share <= counted < 1.001 * share


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [
        (FixedLotGaussian(multiplier=2, lot=10, population=100, steps=20), "replace-one"),
        (DiscreteGaussianSum(honest=2, std=100, distance=60, values=50, steps=20), "add-remove"),
    ],
)
def test_steps_without_a_pld_count_by_the_best_order(event, adjacency):
    limit = Limit(3.0, 1e-6, adjacency)
    best = epsilon_renyi(renyi(event, adjacency), HOMOGENEOUS_SHARE * limit.delta)
    assert epsilon_counted([event], limit) == best < epsilon_mixed(total([event], limit), limit)


def test_a_delta_that_rounding_may_exceed_leaves_it_to_renyi():
    event, delta = steps(STEP, 1000), 2e-8
    assert HOMOGENEOUS_SHARE * delta < module._ROUNDING_A_STEP * 1000
    best = epsilon_renyi(renyi(event, "add-remove"), HOMOGENEOUS_SHARE * delta)
    assert epsilon_homogeneous(event, delta, "add-remove") == best
    # One Gaussian instead of many needs no transform, so its PLD counts at any delta.
    plain = SampledGaussian(multiplier=30, rate=1, steps=1000)
    assert epsilon_homogeneous(plain, delta, "add-remove") < epsilon_renyi(
        renyi(plain, "add-remove"), HOMOGENEOUS_SHARE * delta
    )


def test_nothing_spent_counts_as_nothing():
    assert epsilon_counted([], LIMIT) == 0
    assert PrivacyFilter(LIMIT).remaining([]) == 1
    assert PrivacyFilter(LIMIT).admits([])


def test_the_counted_epsilon_grows_with_every_step_and_the_share_left_falls():
    counted = [epsilon_counted([steps(STEP, count)], LIMIT) for count in (1, 2, 5, 20, 21, 60)]
    assert all(before < after for before, after in pairwise(counted))
    gate = PrivacyFilter(LIMIT)
    assert gate.remaining([steps(STEP, 20)]) == 1 - counted[3] / LIMIT.epsilon
    assert gate.remaining([steps(STEP, 10_000)]) == 0


def test_another_unit_or_adjacency_is_refused():
    for call in (PrivacyFilter(LIMIT).admits, lambda events: epsilon_counted(events, LIMIT)):
        with pytest.raises(EventUnaccountable, match="member"):
            call([SampledGaussian(multiplier=1, rate=0.1, unit="member")])
        with pytest.raises(EventUnaccountable, match="adjacency"):
            call([FixedLotGaussian(multiplier=1, lot=1, population=10)])


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.tuples(st.floats(0.6, 8), st.floats(0.005, 1)), min_size=1, max_size=3),
    st.floats(0.3, 10),
    st.sampled_from([1e-5, 1e-7, 1e-9]),
    st.randoms(use_true_random=False),
)
def test_what_passes_is_within_the_limit_by_every_other_accountant(kinds, epsilon, delta, choice):
    limit = Limit(epsilon, delta)
    gate, passed = PrivacyFilter(limit), []
    for _ in range(60):
        multiplier, rate = choice.choice(kinds)
        event = SampledGaussian(multiplier=multiplier, rate=rate)
        if gate.admits([*passed, event]):
            passed.append(event)
    found = spend(passed, limit)
    assert found.by == "pld"
    assert found.epsilon <= epsilon
    assert epsilon_counted(passed, limit) <= epsilon * (1 + 1e-9)


# ---- rounding --------------------------------------------------------------------------------------------------------

SETTINGS = [
    (0.5, 0.001, 5000),
    (0.8, 0.01, 1000),
    (1.2, 0.01, 5000),
    (3.0, 0.1, 50),
    (0.7, 0.3, 30),
    (15.0, 0.256, 5000),
]


@pytest.mark.parametrize(("multiplier", "rate", "count"), SETTINGS)
def test_the_transforms_of_a_pld_are_no_larger_than_the_bound_assumes(multiplier, rate, count, monkeypatch):
    sizes, real = [], pld._fast

    def sized(target: int) -> int:
        sizes.append(real(target))
        return sizes[-1]

    monkeypatch.setattr(pld, "_fast", sized)
    event = SampledGaussian(multiplier=multiplier, rate=rate, steps=count)
    assert epsilon_pld([event], 0.75e-6, "add-remove") is not None
    assert sizes
    most = max(sizes)
    assert most <= 2**20
    # The bound of docs/accounting.md: 7e-16 log2 N for each transform, times sqrt(N) in the sum over the grid.
    assert 7e-16 * math.log2(most) * math.sqrt(most) <= module._ROUNDING_A_STEP


@pytest.mark.parametrize("count", [8, 64])
def test_losses_compose_as_direct_summation_does(count):
    """Direct summation adds positive terms only, so that it keeps its digits. The difference is below the allowance."""
    random = np.random.default_rng(7)
    one = random.random(400) ** 8
    one /= one.sum()
    found = pld.Losses(1.0, 0, one, 0.0).times(count)
    direct = one
    for _ in range(int(math.log2(count))):
        direct = np.convolve(direct, direct)
    first, kept = found.low, found.mass
    # Chernoff's bound cuts the tails, whose mass is below the allowance too.
    assert direct[:first].sum() + direct[first + len(kept) :].sum() < pld._CUT
    assert np.abs(kept - direct[first : first + len(kept)]).sum() < module._ROUNDING_A_STEP * count
