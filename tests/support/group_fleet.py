"""`sum_fleet.Fleet` over a cohort in groups, with a sum of each.

`GroupFleet(12, 3).run(lose={Phase.MASK: {"m2"}})` plays a whole attempt; `opened` then has every group's sum beside the
members it is of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from secure_agg import Abandoned, Accumulator, Dropped, Phase, RoundContext, grouped_thresholds, pack_in_place
from tests.support.sum_fleet import Fleet, make_context


def grouped_context(n: int, groups: int, corrupt: int | None = None, **more: Any) -> RoundContext:
    """The context of an attempt over `n` members in so many groups, with the numbers that are found for it."""
    split = {name: more.pop(name) for name in ("least", "sigma", "absent") if name in more}
    graph, threshold, assumed = grouped_thresholds(n, groups, corrupt, **split)
    return make_context(n, threshold, assumed, graph=graph, **more)


class GroupFleet(Fleet):
    """`sums`: the masked sum of each group. `opened`: (survivors, opened sum) of each group, by its number."""

    def __init__(
        self,
        n: int,
        groups: int,
        corrupt: int | None = 1,
        *,
        seed: str = "groups",
        least: int | None = None,
        **more: Any,
    ) -> None:
        graph, threshold, assumed = grouped_thresholds(n, groups, corrupt, least=least)
        super().__init__(n, seed=seed, threshold=threshold, corrupt=assumed, graph=graph, **more)
        self.sums: dict[int, Accumulator] = {}
        self.opened: dict[int, tuple[tuple[str, ...], np.ndarray]] = {}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Who is in which group, as the server has drawn it."""
        return self.server.session.groups

    def deliver(self, member: str, message: Any) -> Any:
        masking = self.server.phase is Phase.MASK
        answer = super().deliver(member, message)
        if masking and not isinstance(answer, Dropped):
            number = self.server.session.group_of(member)
            total = self.sums.setdefault(number, Accumulator(self.context.values, self.context.bits))
            total.add(pack_in_place(self.masked[member].copy(), self.context.bits), 0)
        return answer

    def run(self, lose: Mapping[Phase, Collection[str]] | None = None) -> Abandoned | Any:
        """Play everything; `opened`, or why there is nothing."""
        for phase in Phase:
            abandoned = self.play((lose or {}).get(phase, ()))
            if abandoned is not None:
                return abandoned
        for number, opened in self.server.by_group():
            total = self.sums[number].total
            opened.unmask(total)
            self.opened[number] = (opened.survivors, total)
        return self.opened
