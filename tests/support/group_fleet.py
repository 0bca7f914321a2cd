"""`sum_fleet.Fleet` over a cohort in groups, with a sum for each group.

`GroupFleet(12, 3).run(lose={Phase.MASK: {"m2"}})` plays a whole attempt. Then `opened` holds every group's survivors
and sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from secure_agg import Abandoned, Accumulator, Dropped, Phase, RoundContext, grouped_thresholds, pack_in_place
from tests.support.sum_fleet import Fleet, make_context


def grouped_context(n: int, groups: int, corrupt: int | None = None, **more: Any) -> RoundContext:
    """The context of an attempt over `n` members in `groups` groups, with its graph, threshold and corrupt bound."""
    split = {name: more.pop(name) for name in ("least", "sigma", "absent") if name in more}
    graph, threshold, assumed = grouped_thresholds(n, groups, corrupt, **split)
    return make_context(n, threshold, assumed, graph=graph, **more)


class GroupFleet(Fleet):
    """A fleet in groups. By group number, `sums` holds the masked sums and `opened` the (survivors, opened sum)."""

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
        """The members of each group, as the server drew them."""
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
        """Plays every phase. Returns `opened`, or why the attempt was abandoned."""
        for phase in Phase:
            abandoned = self.play((lose or {}).get(phase, ()))
            if abandoned is not None:
                return abandoned
        for number, opened in self.server.by_group():
            total = self.sums[number].total
            opened.unmask(total)
            self.opened[number] = (opened.survivors, total)
        return self.opened
