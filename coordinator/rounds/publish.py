"""From opened sums to the next version: pure arithmetic on vectors.

The members sent w * (new - base) / W, w, and their metrics (`tacit.vector.layout_of`); what comes out is their mean
weighted by number of examples (McMahan et al. 2017, FedAvg), stepped onto the base by the server optimiser
(`coordinator.rounds.optimiser`). Under a privacy mechanism, and in groups, they sent the change alone, and the mean is
over members. It goes block by block, and the next version takes the sum's place in memory: besides the base there is no
second vector. The optimiser's state goes by in blocks, too, and is in memory only where its caller holds it there.

Of a cohort in groups there is a sum of each over members that weigh alike, and a mean of each; `coordinator.robust`
makes them one, by the job's rule, and the optimiser steps by that one. A sum that no valid inputs make is proof of a
bad group, and is no way to stop a job: median and trimmed-mean keep it as one more bad row, cut to what valid inputs
reach; reject-outliers and mean leave it out. Besides the g sums and the base there is no further vector.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coordinator import robust
from coordinator.domain.jobs import GroupsSeen, TrainingMetrics
from coordinator.rounds.optimiser import ServerState, StateNeeded, state_names, step_of
from secure_agg import Layout, RandomSource, SystemRandom
from tacit.job import Aggregation, JobDocument
from tacit.vector import layout_of

__all__ = ["GroupSum", "ResultInvalid", "Step", "next_version", "next_version_of_groups"]

_BLOCK = 64 * 1024


class ResultInvalid(ValueError):
    """The opened sum cannot be a sum of valid inputs."""


@dataclass(frozen=True)
class Step:
    """The next version's values, float32 (d,), the round's training metrics, and what became of groups."""

    values: NDArray[np.float32]
    training: TrainingMetrics | None
    groups: GroupsSeen | None = None
    # Metrics travelled, and no valid inputs make them.
    metrics_invalid: bool = False


@dataclass(frozen=True)
class GroupSum:
    """One group's opened sum: of how many members, and its values as in `next_version`."""

    members: int
    total: NDArray[np.uint32]


def next_version(
    job: JobDocument,
    cohort: int,
    survivors: int,
    total: NDArray[np.uint32],
    base: NDArray[np.float32],
    random: RandomSource | None = None,
    state: ServerState | None = None,
) -> Step:
    """Decodes a sum over `survivors` members of an attempt whose context fixed `cohort`.

    total: uint32 (d + 4,), under a mechanism (d,), contiguous and writable. It is overwritten: the returned values are
    a view of it. random: where noise after aggregation comes from, the system's unless given. state: the server
    optimiser's, which a job with plain averaging does not need.

    Raises:
        ResultInvalid: a weight outside what that many members can have sent, a value beyond the bound. What is left of
            `total`, and was given to `state`, is of no use then.
        StateNeeded: the job's optimiser has a state, and there is none.
    """
    stepping = _Stepping(job, random, state)
    layout = layout_of(job, cohort)
    update, *rest = layout.segments
    share, training, metrics_invalid = 1 / survivors, None, False
    if rest:
        sums = Layout(tuple(rest), layout.bits).decode(total[update.length :])
        share = _share(job, survivors, sums)
        training, metrics_invalid = _metrics(job, survivors, sums)
    bound = _bound(layout, survivors)
    values = total.view("<f4")[: update.length]
    for start in range(0, update.length, _BLOCK):
        here = slice(start, min(start + _BLOCK, update.length))
        block = _decoded(layout, total, here)
        if np.abs(block).max() > bound:
            raise ResultInvalid(f"a coordinate of the sum lies beyond {bound:g}")
        stepping.into(values[here], base[here], share * block)
    return Step(values, training, metrics_invalid=metrics_invalid)


def next_version_of_groups(
    job: JobDocument,
    cohort: int,
    sums: Sequence[GroupSum],
    base: NDArray[np.float32],
    random: RandomSource | None = None,
    state: ServerState | None = None,
) -> Step:
    """As `next_version`, of the sums of the groups that were opened, combined by the job's rule.

    A group is invalid if a value of its sum lies beyond what so many valid inputs reach. It was opened, so it counts
    among the groups that a robust rule needs, and it is bad, so it counts among those that the rule withstands: to
    median and trimmed-mean it is a row cut to the bound, and from reject-outliers it is away before anything is
    measured. What the rules promise (`coordinator.robust`) holds with it among the f bad groups. `mean` needs its
    groups valid.

    The first sum that is kept is overwritten: the returned values are a view of it.

    Raises:
        ResultInvalid: fewer groups than the job needs (to `mean`: valid ones); more invalid ones than the rule
            withstands; or the next version would not be finite.
        StateNeeded: as in `next_version`.
    """
    stepping = _Stepping(job, random, state)
    layout, numbers = layout_of(job, cohort), job.aggregation
    valid = [_valid(layout, group) for group in sums]
    _check_groups(numbers, valid)
    keeps_invalid = numbers.combine in ("median", "trimmed-mean")
    kept = [group for group, can_be in zip(sums, valid, strict=True) if can_be or keeps_invalid]
    target, invalid = kept[0].total, len(valid) - sum(valid)
    size = max(1, _BLOCK // len(kept))
    slices = [slice(at, min(at + size, job.values)) for at in range(0, job.values, size)]
    shares: tuple[float, ...] = ()
    if numbers.combine == "reject-outliers":
        shares = robust.shares((_means(layout, kept, here) for here in slices), invalid=invalid)
    outliers = shares.count(0.0)
    seen = GroupsSeen(
        combined=len(kept) - outliers - (invalid if keeps_invalid else 0),
        lost=(numbers.groups or len(sums)) - len(sums),
        invalid=invalid,
        outliers=outliers,
    )
    values = target.view("<f4")[: job.values]
    for here in slices:
        rows = _means(layout, kept, here)
        if numbers.combine == "mean":
            # As if it were one sum: over members, wherever they are.
            rows *= _shares(kept)
        # Of the target these coordinates were read just now, and nobody reads them again.
        stepping.into(values[here], base[here], robust.combine(rows, numbers, shares))
    return Step(values, None, seen)


class _Stepping:
    """The server optimiser of one round, block by block from the first coordinate to the last.

    The noise that the job has the coordinator add comes before it: what an optimiser remembers is then blurred, too.
    """

    def __init__(self, job: JobDocument, random: RandomSource | None, state: ServerState | None) -> None:
        self._server, self._names = job.server, state_names(job.server)
        if self._names and state is None:
            raise StateNeeded(
                f"{job.server.optimiser} goes on from what it made of earlier rounds ({', '.join(self._names)}), and "
                "was given none of it; hand in the state of the version that the round starts from"
            )
        self._state = state
        self._std = job.aggregation.noise_after
        self._random = random

    def into(self, values: NDArray[np.float32], base: NDArray[np.float32], change: NDArray[np.float64]) -> None:
        """Writes the next coordinates' new values. The change is overwritten."""
        if self._std:
            robust.add_gaussian(change, self._std, self._random or SystemRandom())
        before = self._state.take(change.size) if self._names and self._state is not None else {}
        # What is not finite is refused below, and need not warn.
        with np.errstate(over="ignore", invalid="ignore"):
            step, after = step_of(self._server, change, before)
            values[:] = base + step
            kept = {name: block.astype(np.float32) for name, block in after.items()}
        if not all(np.isfinite(block).all() for block in (values, *kept.values())):
            raise ResultInvalid("the next version would hold a value that is not finite")
        if self._names and self._state is not None:
            self._state.give(kept)


def _check_groups(numbers: Aggregation, valid: Sequence[bool]) -> None:
    """That the rule has what it needs. Raises: ResultInvalid."""
    opened, needed = len(valid), numbers.groups_needed
    if (sum(valid) if numbers.combine == "mean" else opened) < needed:
        raise ResultInvalid(
            f"{sum(valid)} of {opened} groups have a sum that can be one of valid inputs, the job needs {needed}"
        )
    withstood = {"mean": opened, "trimmed-mean": numbers.trimmed}.get(numbers.combine, (opened - 1) // 2)
    if opened - sum(valid) > withstood:
        raise ResultInvalid(
            f"{opened - sum(valid)} of {opened} groups have a sum that no valid inputs make, and {numbers.combine} "
            f"withstands {withstood}"
        )


def _valid(layout: Layout, group: GroupSum) -> bool:
    """Whether the sum can be one of so many valid inputs."""
    bound = _bound(layout, group.members)
    blocks = (_decoded(layout, group.total, here) for here in _slices(layout.segments[0].length))
    return all(np.abs(block).max() <= bound for block in blocks)


def _shares(groups: Sequence[GroupSum]) -> NDArray[np.float64]:
    """(g, 1): what each group's mean is multiplied by for the mean over groups to be that over members."""
    members = np.array([[group.members] for group in groups], dtype=np.float64)
    return np.asarray(members * (len(groups) / members.sum()))


def _slices(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK))


def _means(layout: Layout, groups: Sequence[GroupSum], here: slice) -> NDArray[np.float64]:
    """Some coordinates of the groups' means, (g, k), cut to what valid inputs reach: only invalid sums change by it."""
    rows = np.empty((len(groups), here.stop - here.start))
    for row, group in zip(rows, groups, strict=True):
        bound = _bound(layout, group.members)
        np.clip(_decoded(layout, group.total, here), -bound, bound, out=row)
        np.divide(row, group.members, out=row)
    return rows


def _decoded(layout: Layout, total: NDArray[np.uint32], here: slice) -> NDArray[np.float64]:
    update = replace(layout.segments[0], length=here.stop - here.start)
    return Layout((update,), layout.bits).decode(total[here])["update"]


def _bound(layout: Layout, members: int) -> float:
    # Each input was rounded to the grid: a step of it a member beyond the bound is still honest.
    update = layout.segments[0]
    return members * (update.bound + 1 / update.scale)


def _share(job: JobDocument, survivors: int, sums: Mapping[str, NDArray[np.float64]]) -> float:
    """What the summed change is multiplied by to be a mean. Raises: ResultInvalid."""
    largest = float(job.aggregation.max_weight)
    weight = float(sums["weight"][0])
    if not 1 <= weight <= survivors * largest:
        raise ResultInvalid(f"the weights sum to {weight:g}; {survivors} members can send 1 to {survivors * largest:g}")
    return largest / weight


def _metrics(
    job: JobDocument, survivors: int, sums: Mapping[str, NDArray[np.float64]]
) -> tuple[TrainingMetrics | None, bool]:
    """The training metrics, None where there are no examples or no valid inputs make them; and whether it is that.

    The sum is not refused for them: else one member could stop a job by a number that moves no version, and hear by
    whether it is refused how many of the others' answers are right.
    """
    count, correct = float(sums["count"][0]), float(sums["correct"][0])
    if not 0 <= correct <= count <= survivors * float(job.aggregation.max_weight):
        return None, True
    return (TrainingMetrics(count, float(sums["loss_sum"][0]) / count, correct / count) if count else None), False
