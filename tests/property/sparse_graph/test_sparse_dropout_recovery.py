"""For any sparse cohort and any losses in any phases, the result is the exact sum over U3 or the expected clean end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg import Abandoned, Phase, Reason
from secure_agg.graph import HararyGraph
from tests.support.sparse_fleet import SparseFleet
from tests.support.sum_fleet import names

SHAPES = [(12, 0.1, 0.1), (15, 0.0, 0.2), (24, 0.1, 0.1), (24, 0.1, 0.2), (30, 0.05, 0.2)]


@st.composite
def attempts(draw: st.DrawFn) -> tuple[tuple[int, float, float], dict[Phase, set[str]]]:
    shape = draw(st.sampled_from(SHAPES))
    members = names(shape[0])
    # Few losses, often of neighbours, because many losses end the attempt at once.
    count = draw(st.integers(0, max(2, shape[0] // 4)))
    lost = draw(st.lists(st.sampled_from(members), min_size=count, max_size=count, unique=True))
    lose: dict[Phase, set[str]] = {phase: set() for phase in Phase}
    for member in lost:
        lose[draw(st.sampled_from([*Phase, Phase.UNMASK, Phase.CONFIRM]))].add(member)
    return shape, lose


def expected_end(fleet: SparseFleet, lose: dict[Phase, set[str]]) -> Phase | None:
    """The phase in which too few members are left, altogether or around one member, computed without the server."""
    context = fleet.context
    n, corrupt = context.cohort, context.assumed_corrupt
    lost = n * context.sparse.lost_millionths // 10**6
    left = set(names(n)) - lose[Phase.ADVERTISE]
    if len(left) < context.min_roster:
        return Phase.ADVERTISE
    session = fleet.server.session
    around = {member: set(session.neighbours(member)) for member in left}

    def out_of_reach(needed: set[str], answering: set[str]) -> bool:
        return any(len(around[member] & answering) < context.threshold for member in needed)

    dealt = left - lose[Phase.SHARE]
    if len(dealt) < n - lost or out_of_reach(dealt, dealt):
        return Phase.SHARE
    masked = dealt - lose[Phase.MASK]
    needed = masked | {member for member in dealt if around[member] & masked}
    if len(masked) < n - lost or out_of_reach(needed, masked):
        return Phase.MASK
    confirmed = masked - lose[Phase.CONFIRM]
    if 2 * len(confirmed) <= n + corrupt or out_of_reach(needed, confirmed):
        return Phase.CONFIRM
    if out_of_reach(needed, confirmed - lose[Phase.UNMASK]):
        return Phase.UNMASK
    return None


@settings(max_examples=15, deadline=None)
@given(attempts())
def test_any_losses_give_the_exact_sum_over_u3_or_a_clean_end(attempt: tuple) -> None:
    exact_or_clean(attempt)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(attempts())
def test_any_losses_give_the_exact_sum_over_u3_or_a_clean_end_at_length(attempt: tuple) -> None:
    exact_or_clean(attempt)


def exact_or_clean(attempt: tuple) -> None:
    (n, corrupt, lost), lose = attempt
    fleet = SparseFleet(n, corrupt=corrupt, lost=lost)
    result = fleet.run(lose)
    end = expected_end(fleet, lose)
    if end is not None:
        assert isinstance(result, Abandoned)
        assert (result.phase, result.reason) == (end, Reason.THRESHOLD_LOST)
        return
    survivors = set(fleet.identities) - lose[Phase.ADVERTISE] - lose[Phase.SHARE] - lose[Phase.MASK]
    assert set(fleet.server.survivors) == survivors
    np.testing.assert_array_equal(result, fleet.plain_sum(survivors))


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 60), st.integers(1, 29), st.randoms(use_true_random=False))
def test_every_harary_graph_is_symmetric_and_regular(n: int, half: int, random) -> None:
    degree = 2 * min(half, (n - 1) // 2)
    ring = names(n)
    random.shuffle(ring)
    graph = HararyGraph(tuple(ring), degree)
    around = {member: set(graph.neighbours(member)) for member in ring}
    for place, member in enumerate(ring):
        assert len(around[member]) == degree
        assert all(member in around[other] for other in around[member])
        assert ring[(place + 1) % n] in around[member]
    gone = {member for member in ring if random.random() < 0.3}
    threshold = random.randint(1, degree)
    assert graph.short(gone, threshold) == {member for member in ring if len(around[member] - gone) < threshold}
