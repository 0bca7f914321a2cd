"""Three hundred members with 66 neighbours each and threshold 46: the exact sum, or a clean end."""

from __future__ import annotations

import random

import numpy as np
import pytest

from secure_agg import Abandoned, Phase, Reason
from tests.support.sparse_fleet import SparseFleet
from tests.support.sum_fleet import names


def losses(seed: int, **counts: int) -> dict[Phase, set[str]]:
    """Picks that many members at random to be lost in each phase."""
    picked = random.Random(seed).sample(names(300), sum(counts.values()))
    return {Phase(phase): {picked.pop() for _ in range(count)} for phase, count in counts.items()}


@pytest.mark.long
def test_three_hundred_members_with_losses_in_every_phase() -> None:
    lose = losses(1, advertise=2, share=9, mask=12, confirm=8, unmask=6)
    fleet = SparseFleet(300, bits=24)
    assert (fleet.context.sparse.degree, fleet.context.threshold) == (66, 46)
    total = fleet.run(lose)
    survivors = set(names(300)) - lose[Phase.ADVERTISE] - lose[Phase.SHARE] - lose[Phase.MASK]
    assert len(survivors) == 277
    assert set(fleet.server.survivors) == survivors
    np.testing.assert_array_equal(total, fleet.plain_sum(survivors))
    assert {entry.member for entry in fleet.dropped} == set().union(*lose.values())


def test_too_many_losses_around_one_member_end_the_attempt() -> None:
    """13 of 160 are fewer than the 16 that may be lost, but one member's 28 neighbours can spare only 12."""
    fleet = SparseFleet(160, corrupt=0.02).until(Phase.MASK)
    assert (fleet.context.sparse.degree, fleet.context.threshold) == (28, 16)
    around = fleet.server.session.neighbours("m7")
    # Their secrets are needed from now on.
    for member in ("m7", around[-1]):
        fleet.deliver(member, fleet.act(member, Phase.MASK))
    for member in around[:12]:
        fleet.server = fleet.server.drop(member, Reason.DISCONNECTED)
    assert not fleet.server.hopeless
    fleet.server = fleet.server.drop(around[12], Reason.DISCONNECTED)
    assert len(fleet.server.answers) + len(fleet.server.waiting) == 147 > fleet.server.least == 144
    assert fleet.server.hopeless


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_three_hundred_members_repeatedly(seed: int) -> None:
    lose = losses(seed, share=seed * 3, mask=15, confirm=seed * 2, unmask=12 - seed)
    fleet = SparseFleet(300, seed=str(seed))
    result = fleet.run(lose)
    if isinstance(result, Abandoned):
        assert result.reason is Reason.THRESHOLD_LOST
    else:
        np.testing.assert_array_equal(result, fleet.plain_sum(fleet.server.survivors))
        assert set(fleet.server.survivors) == set(names(300)) - lose[Phase.SHARE] - lose[Phase.MASK]
