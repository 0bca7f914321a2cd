"""From opened sums to the next version: pure arithmetic on vectors.

Members sent w * (new - base) / W, w, and their metrics (`tacit.vector.layout_of`). The result is their mean weighted by
number of examples (McMahan et al. 2017, FedAvg), and the server optimiser (`coordinator.rounds.optimiser`) steps the
base by it. Under a privacy mechanism, and in groups, they sent the change alone, and the mean is over members. The work
goes block by block, and the next version takes the sum's place in memory: there is no second vector besides the base.
The optimiser's state passes in blocks too, and is in memory only if the caller holds it there.

A cohort in groups has one sum and one mean for each group, over members of equal weight. `coordinator.robust` combines
the means by the job's rule, and the optimiser steps by the result. A sum that no valid inputs produce proves a bad
group, but must not stop a job: median and trimmed-mean keep it as one more bad row, clipped to what valid inputs reach;
reject-outliers and mean leave it out. Besides the g sums and the base there is no further vector.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coordinator import robust
from coordinator.domain.jobs import GroupsSeen, Norms, TrainingMetrics
from coordinator.rounds.optimiser import ServerState, StateNeeded, state_names, step_of
from secure_agg import Layout, RandomSource, SystemRandom
from tacit.job import Aggregation, JobDocument
from tacit.vector import layout_of, sends_weight

__all__ = ["GroupSum", "ResultInvalid", "Step", "next_version", "next_version_of_groups", "norms_of"]

_BLOCK = 64 * 1024


class ResultInvalid(ValueError):
    """No valid inputs produce the opened sum."""


@dataclass(frozen=True)
class Step:
    """The next version's values, float32 (d,), the round's training metrics, and what became of its groups."""

    values: NDArray[np.float32]
    training: TrainingMetrics | None
    groups: GroupsSeen | None = None
    # Members sent metrics, and no valid inputs produce their sum.
    metrics_invalid: bool = False


@dataclass(frozen=True)
class GroupSum:
    """One group's opened sum: its number of members, and its values as in `next_version`."""

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
    """Decodes a sum and steps the base by the members' mean.

    Args:
        job: the job's document.
        cohort: the cohort size that the attempt's context fixed.
        survivors: the number of members in the sum.
        total: uint32 (d + 4,), under a mechanism (d,) or, with metrics, (d + 3,); contiguous and writable. It is
            overwritten: the returned values are a view of it.
        base: float32 (d,), the version that the round started from.
        random: source of the noise after aggregation; the system's unless given.
        state: the server optimiser's; not needed for plain averaging.

    Raises:
        ResultInvalid: a weight is outside what that many members can send, or a value is beyond what members of these
            weights can. Then discard `total`, and what `state` was given.
        StateNeeded: the job's optimiser has a state, and none was given.
    """
    stepping = _Stepping(job, random, state)
    layout = layout_of(job, cohort)
    update, *rest = layout.segments
    share, training, metrics_invalid, bound = 1 / survivors, None, False, _bound(layout, survivors)
    if sends_weight(job):
        told = Layout(tuple(rest), layout.bits)
        sums = told.decode(total[update.length :])
        share = _share(job, survivors, sums)
        # Each update is within its bound times its weight. So the mean is within the bound, but for the grid.
        bound = update.bound / share + survivors / update.scale
        training, metrics_invalid = _metrics(job, survivors, sums, _step_of(told, "loss_sum"))
    values = total.view("<f4")[: update.length]
    for start in range(0, update.length, _BLOCK):
        here = slice(start, min(start + _BLOCK, update.length))
        block = _decoded(layout, total, here)
        if np.abs(block).max() > bound:
            raise ResultInvalid(f"a coordinate of the sum is beyond {bound:g}")
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
    """Combines the sums of the opened groups by the job's rule, and steps the base as `next_version` does.

    A group is invalid if its sum has a value beyond what that many valid inputs reach. It was opened, so it counts
    towards the groups that a robust rule needs. It is bad, so it counts towards those that the rule withstands. For
    median and trimmed-mean it is a row clipped to the bound; reject-outliers leaves it out before measuring anything.
    What the rules promise (`coordinator.robust`) holds with it among the f bad groups. `mean` needs valid groups.

    The first sum that is kept is overwritten: the returned values are a view of it.

    Raises:
        ResultInvalid: there are fewer groups than the job needs (for `mean`: valid ones), or more invalid ones than the
            rule withstands, or the next version would not be finite.
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
            # As in one sum: the mean over members, whatever their group.
            rows *= _shares(kept)
        # `values` is a view of the first kept sum. Its coordinates here were just read, and nobody reads them again.
        stepping.into(values[here], base[here], robust.combine(rows, numbers, shares))
    return Step(values, None, seen)


def norms_of(base: NDArray[np.float32], values: NDArray[np.float32]) -> Norms:
    """Returns the norms of a step.

    Args:
        base: float32 (d,), the version that the round started from.
        values: float32 (d,), the version that it made.
    """
    squares = np.zeros(3)
    for here in _slices(len(values)):
        before, after = base[here].astype(np.float64), values[here].astype(np.float64)
        squares += [float(each @ each) for each in (before, after, after - before)]
    return Norms(*(float(each) for each in np.sqrt(squares)))


class _Stepping:
    """The server optimiser of one round, block by block from the first coordinate to the last.

    The coordinator's noise, if the job has any, is added before it, so the optimiser's state is noisy too.
    """

    def __init__(self, job: JobDocument, random: RandomSource | None, state: ServerState | None) -> None:
        self._server, self._names = job.server, state_names(job.server)
        if self._names and state is None:
            raise StateNeeded(
                f"{job.server.optimiser} needs its state from earlier rounds ({', '.join(self._names)}), but none was "
                "given; pass the state of the version that the round starts from"
            )
        self._state = state
        self._std = job.aggregation.noise_after
        self._random = random

    def into(self, values: NDArray[np.float32], base: NDArray[np.float32], change: NDArray[np.float64]) -> None:
        """Writes the new values of the next coordinates. Overwrites `change`."""
        if self._std:
            robust.add_gaussian(change, self._std, self._random or SystemRandom())
        before = self._state.take(change.size) if self._names and self._state is not None else {}
        # Values that are not finite are refused below, so no warning is needed.
        with np.errstate(over="ignore", invalid="ignore"):
            step, after = step_of(self._server, change, before)
            values[:] = base + step
            kept = {name: block.astype(np.float32) for name, block in after.items()}
        if not all(np.isfinite(block).all() for block in (values, *kept.values())):
            raise ResultInvalid("the next version would hold a value that is not finite")
        if self._names and self._state is not None:
            self._state.give(kept)


def _check_groups(numbers: Aggregation, valid: Sequence[bool]) -> None:
    """Checks that the rule has the groups it needs. Raises: ResultInvalid."""
    opened, needed = len(valid), numbers.groups_needed
    if (sum(valid) if numbers.combine == "mean" else opened) < needed:
        raise ResultInvalid(
            f"{opened} groups were opened, {sum(valid)} of them with a valid sum, but the job needs {needed}"
        )
    withstood = {"mean": opened, "trimmed-mean": numbers.trimmed}.get(numbers.combine, (opened - 1) // 2)
    if opened - sum(valid) > withstood:
        raise ResultInvalid(
            f"{opened - sum(valid)} of {opened} groups have a sum that no valid inputs produce, but {numbers.combine} "
            f"withstands {withstood}"
        )


def _valid(layout: Layout, group: GroupSum) -> bool:
    """Whether that many valid inputs can produce the sum."""
    bound = _bound(layout, group.members)
    blocks = (_decoded(layout, group.total, here) for here in _slices(layout.segments[0].length))
    return all(np.abs(block).max() <= bound for block in blocks)


def _shares(groups: Sequence[GroupSum]) -> NDArray[np.float64]:
    """(g, 1): the factors that turn a mean over the groups' means into the mean over members."""
    members = np.array([[group.members] for group in groups], dtype=np.float64)
    return np.asarray(members * (len(groups) / members.sum()))


def _slices(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK))


def _means(layout: Layout, groups: Sequence[GroupSum], here: slice) -> NDArray[np.float64]:
    """Some coordinates of the groups' means, (g, k), clipped to what valid inputs reach. Only invalid sums change."""
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
    # Each input was rounded to the grid, so a sum beyond the bound by one step for each member is still honest.
    update = layout.segments[0]
    return members * (update.bound + 1 / update.scale)


def _share(job: JobDocument, survivors: int, sums: Mapping[str, NDArray[np.float64]]) -> float:
    """The factor that turns the summed change into a mean. Raises: ResultInvalid."""
    largest = float(job.aggregation.max_weight)
    weight = float(sums["weight"][0])
    if not 1 <= weight <= survivors * largest:
        raise ResultInvalid(f"the weights sum to {weight:g}; {survivors} members can send 1 to {survivors * largest:g}")
    return largest / weight


def _step_of(layout: Layout, name: str) -> float:
    return next(1 / segment.scale for segment in layout.segments if segment.name == name)


def _metrics(
    job: JobDocument, survivors: int, sums: Mapping[str, NDArray[np.float64]], loss_step: float
) -> tuple[TrainingMetrics | None, bool]:
    """The training metrics, and whether they are invalid.

    The metrics are None if there are no examples, or if no valid inputs produce them. Invalid metrics do not refuse the
    sum. Otherwise one member could stop a job with a number that moves no version, and could learn from each refusal
    how many of the others' answers are right.
    """
    count, correct, loss = (float(sums[name][0]) for name in ("count", "correct", "loss_sum"))
    # Counts are whole. Each member's loss was rounded to the grid.
    largest_loss = count * job.aggregation.loss_bound + survivors * loss_step
    if not (0 <= correct <= count <= survivors * float(job.aggregation.max_weight) and 0 <= loss <= largest_loss):
        return None, True
    return (TrainingMetrics(count, loss / count, correct / count) if count else None), False
