"""For any order of answers and any liars, unmasking ends with the answer that completes the threshold.

It opens the same sum as all answers would, names every liar that had spoken, and blames nobody for having been slower.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg import Dropped, Phase, Reason
from secure_agg.server import OpenedSum
from tests.support.sum_fleet import Fleet, names


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[str], frozenset[str]]:
    n = draw(st.integers(4, 8))
    stayed = names(n)[:-1]
    order = draw(st.permutations(stayed))
    liars = draw(st.frozensets(st.sampled_from(stayed), max_size=2))
    return n, order, liars


def spoilt(message: Any) -> Any:
    first, *rest = message.seed_shares
    return dataclasses.replace(message, seed_shares=(dataclasses.replace(first, share=bytes(33)), *rest))


def closed_early(server: Any, order: list[str], answers: dict[str, Any]) -> tuple[Any, list[Dropped], list[str]]:
    """Gives the answers until the server has enough. Returns how it closes, the liars found and who has spoken."""
    named, heard = [], []
    for member in order:
        assert not server.enough
        heard.append(member)
        verdict = server.receive(member, answers[member])
        if isinstance(verdict, Dropped):
            named.append(verdict)
            server = server.drop(member, verdict.reason, verdict.detail)
        else:
            server = verdict
        if server.hopeless:
            return None, named, heard
        if server.enough:
            return server.close(), named, heard
    raise AssertionError("neither enough nor hopeless, although everybody has answered")


@settings(max_examples=40, deadline=None)
@given(cases())
def test_unmasking_ends_with_the_threshold_and_weakens_no_blame(case: tuple[int, list[str], frozenset[str]]) -> None:
    n, order, liars = case
    fleet = Fleet(n).until(Phase.UNMASK, {Phase.MASK: {names(n)[-1]}})
    honest = {member: fleet.act(member, Phase.UNMASK) for member in order}
    answers = {member: spoilt(said) if member in liars else said for member, said in honest.items()}
    closed, named, heard = closed_early(fleet.server, order, answers)
    assert [(each.member, each.reason) for each in named] == [
        (member, Reason.UNMASKING_SHARE_MISMATCH) for member in heard if member in liars
    ]
    good = [member for member in heard if member not in liars]
    if closed is None:
        assert len(order) - len(liars & set(heard)) < fleet.context.threshold
        return
    # The last one heard completed the threshold.
    assert len(good) == fleet.context.threshold
    assert heard[-1] == good[-1]
    opened, _, late = closed
    assert isinstance(opened, OpenedSum)
    # For the driver, these still had time: `coordinator.rounds.phases` drops nobody for it before the deadline.
    assert {(each.member, each.reason) for each in late} == {
        (member, Reason.PHASE_DEADLINE) for member in order if member not in heard
    }
    # Every answer in the same order gives the same, and so do all answers of honest members.
    again, _, _ = closed_early(fleet.server, order, answers)
    assert again == closed
    everybody = fleet.server
    for member in order:
        everybody = everybody.receive(member, honest[member])
    assert everybody.close()[0] == opened
    total = fleet.sum.total.copy()
    opened.unmask(total)
    np.testing.assert_array_equal(total, fleet.plain_sum(names(n)[:-1]))
