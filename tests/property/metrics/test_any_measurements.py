"""However rounds, repeats and measurements are mixed: what the gate counts, and what any rows add up to."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.accounting.events import Beside, SampledGaussian, measuring, metrics_beside
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_homogeneous, homogeneous, plan_of
from learning.accounting.renyi import renyi
from learning.validation.contribution import metrics_of, noised
from tacit.validation import HALF, MetricNoise
from tests.support.random_sources import Seeded

LIMIT = Limit(8.0, 1e-6)


@st.composite
def ledgers(draw: st.DrawFn) -> list[SampledGaussian]:
    """Rounds of one job as a member's ledger holds them: any of them measured, repeated or missed."""
    every, steps = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    # Without a lot, so that a plan is one Gaussian and its distribution takes no time.
    kind = SampledGaussian(
        multiplier=draw(st.sampled_from([8.0, 20.0])),
        rate=1,
        steps=steps,
        metrics=Beside(multiplier=draw(st.sampled_from([4.0, 28.0])), every=every),
    )
    return [measuring(kind, int(each)) for each in draw(st.lists(st.booleans(), min_size=1, max_size=12))]


@settings(max_examples=25, deadline=None)
@given(ledgers(), st.integers(0, 2**32))
def test_a_plan_holds_what_was_spent_and_grows_with_it_in_any_order(events: list[SampledGaussian], seed: int) -> None:
    whole = homogeneous(events)
    assert whole is not None
    plan = plan_of(whole)
    held, spent = metrics_beside(plan), metrics_beside(whole)
    assert held is not None
    assert spent is not None
    assert plan.steps >= whole.steps == sum(each.steps for each in events)
    assert held.measured == -(-plan.steps // held.every) >= spent.measured
    # It is the smallest that does: one step less does not hold them, or there were no fewer steps.
    assert plan.steps == whole.steps or -(-(plan.steps - 1) // held.every) < spent.measured
    assert plan_of(plan) == plan
    shuffled = events[:]
    random.Random(seed).shuffle(shuffled)
    assert homogeneous(shuffled) == whole
    # Nothing that is added is ever for free, and a release gives back what it took.
    before = homogeneous(events[:-1])
    if before is not None:
        assert plan_of(before).steps <= plan.steps
        less, more = (epsilon_homogeneous(each, LIMIT.delta, LIMIT.adjacency) for each in (before, whole))
        assert less <= more * (1 + 1e-3)
    assert (renyi(whole, "add-remove") <= renyi(plan, "add-remove") * (1 + 1e-12)).all()


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], list[bool], list[int]]:
    """Losses, answers and units of some rows."""
    count = draw(st.integers(0, 30))
    losses = draw(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=count, max_size=count))
    answers = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return losses, answers, draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))


@settings(max_examples=80, deadline=None)
@given(rows(), st.integers(1, 40), st.floats(0.01, 50))
def test_any_rows_fit_the_vector_and_each_unit_adds_at_most_half(
    found: tuple[list[float], list[bool], list[int]], max_units: int, multiplier: float
) -> None:
    losses, answers, units = found
    sums = metrics_of(np.array(losses, dtype=np.float64), np.array(answers, dtype=np.bool_), units, 5.0, Seeded("any"))
    distinct = len(set(units))
    assert sums[2] == HALF * distinct
    assert np.abs(sums).max() <= HALF * distinct
    noise = MetricNoise(multiplier, max_units)
    sent = noised(sums, noise, Seeded("noise"))
    assert np.abs(sent).max() <= noise.largest
    # Cut after the noise, which is what it is without the rows.
    bare = noised(None, noise, Seeded("noise"))
    assert (sent == np.clip(bare + sums, -noise.largest, noise.largest)).all()
