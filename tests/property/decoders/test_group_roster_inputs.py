"""Any roster of a group is accepted or refused, whatever it contains, and never takes memory out of proportion."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secure_agg import GroupRoster, Refusal
from tests.property.decoders.test_wire_decoders import peak
from tests.support.group_fleet import GroupFleet
from tests.support.made_inputs import changed, leaves_of

ME = "m1"


@functools.cache
def about_to_hear() -> tuple[Any, GroupRoster, tuple[Any, ...]]:
    """A member, its group's roster, and what to put in places of that roster."""
    fleet, other = GroupFleet(12, 3), GroupFleet(12, 3, seed="another attempt")
    for each in (fleet, other):
        assert each.play() is None
    session = fleet.server.session
    roster = session.roster_of(session.group_of(ME))
    strange = other.server.session.roster_of(0)
    return fleet.states[ME], roster, tuple(leaves_of(strange))


def _explained(refusal: Refusal) -> None:
    assert refusal.reason.sentence
    assert len(str(refusal)) < 1000


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_bent_roster_of_a_group_is_refused_with_a_sentence(seed: int, times: int) -> None:
    state, roster, others = about_to_hear()
    chance, bent = random.Random(seed), roster
    pool = [*leaves_of(roster)[:100], *others]
    for _ in range(times):
        chance.shuffle(pool)
        bent = changed(bent, chance.getrandbits(32), pool)
    try:
        state.missing(bent)
    except Refusal as refusal:
        _explained(refusal)
        return
    # Other names make another draw, which may by chance give this member the same group. Nothing else may change.
    assert bent == roster or bent.names != roster.names


def test_rosters_that_are_far_too_large_cost_no_memory() -> None:
    state, roster, _ = about_to_hear()
    for large in (
        dataclasses.replace(roster, names=roster.names * 10_000),
        dataclasses.replace(roster, names=tuple(f"x{number:06}" for number in range(100_000))),
        dataclasses.replace(roster, advertisements=roster.advertisements * 10_000),
        dataclasses.replace(roster, paths=roster.paths * 10_000),
        dataclasses.replace(roster, paths=((bytes(32),) * 100_000, *roster.paths[1:])),
    ):

        def hear(roster: GroupRoster = large) -> None:
            with pytest.raises(Refusal):
                state.missing(roster)

        assert peak(hear) < 4_000_000
