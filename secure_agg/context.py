"""The numbers and digests that define an attempt, checked once.

Guarantees: every `RoundContext` is consistent, its threshold leaves at least `honest` honest inputs in every sum that
can be opened, and its digest covers every field. Every key, mask, seal and signature of the attempt is bound to that
digest, so two members with different contexts never contribute to the same sum.

It does not decide whether the numbers are good enough. `assumed_corrupt = 0`, a sum of two members and a sparse graph
with sigma 40 are all representable; the member's own policy decides whether to allow them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from secure_agg.groups import GroupedGraph, check_split, find_split, largest_group, max_corrupt
from secure_agg.parameters import (
    MAX_COMPLETE_GRAPH,
    MIN_SIGMA,
    SIGMA,
    NoParameters,
    SparseParameters,
    corrupt_neighbours,
    evaluate,
    find,
    find_counts,
    of_millionths,
    to_millionths,
)
from secure_agg.transcript import Field, Purpose, digest

__all__ = [
    "COMPLETE_GRAPH_LIMIT",
    "MAX_COMPLETE_GRAPH",
    "MIN_SIGMA",
    "ContextInvalid",
    "Graph",
    "GroupedGraph",
    "RoundContext",
    "SparseGraph",
    "default_thresholds",
    "grouped_thresholds",
    "sparse_thresholds",
    "thresholds_for",
]

# Largest cohort for which `thresholds_for` chooses the complete graph. Beyond it, every member would deal and mask with
# hundreds.
COMPLETE_GRAPH_LIMIT = 200
_LARGEST_COUNTER = 2**63 - 1
_MILLION = 10**6
# Default of gamma and delta.
_SHARE = Fraction(1, 10)
_LONGEST_NAME = 256


class ContextInvalid(ValueError):
    """The numbers of an attempt contradict each other. The text says which, and what would be valid."""


class Graph(StrEnum):
    """Who shares masks and secrets with whom."""

    COMPLETE = "complete"
    SPARSE = "sparse"
    GROUPED = "grouped"


@dataclass(frozen=True, slots=True)
class SparseGraph:
    """The numbers of a sparse graph. `RoundContext` checks them together with the cohort and threshold.

    Args:
        degree: k, the number of neighbours of each member.
        corrupt_millionths: gamma in millionths of the cohort, a whole number, so that all participants count and hash
            the same.
        lost_millionths: delta in millionths of the cohort.
        sigma: bits; the graph's guarantees hold except with probability 2^-sigma.
        absent: how many of the floor(delta n) members that may drop out may already be missing from the roster with
            `honest` still true.
    """

    degree: int
    corrupt_millionths: int
    lost_millionths: int
    sigma: int = SIGMA
    absent: int = 0

    @property
    def kind(self) -> Graph:
        return Graph.SPARSE


@dataclass(frozen=True, slots=True)
class RoundContext:
    """One attempt, as every participant must see it.

    Args:
        federation: fingerprint of the federation's first root, 32 bytes.
        job: name of the job.
        round: number of the round.
        attempt: number of the attempt.
        application: digest of everything else that an update depends on (job document, recipe, layout, bundle, ...),
            32 bytes.
        model: digest of the starting version, 32 bytes.
        cohort: n, the size of U0. The roster U1 may be smaller, but not below `min_roster`.
        threshold: t. On a sparse graph it counts among a member's k neighbours, with groups within each group.
        assumed_corrupt: n_C. Like n, it always refers to the whole cohort.
        values: d, the length of the whole vector.
        bits: b, the width of the ring Z_{2^b}.
        graph: the complete graph, or the numbers of a sparse one or of a split into groups.

    Raises:
        ContextInvalid: the numbers contradict each other.
    """

    federation: bytes
    job: str
    round: int
    attempt: int
    application: bytes
    model: bytes
    cohort: int
    threshold: int
    assumed_corrupt: int
    values: int
    bits: int
    graph: Graph | SparseGraph | GroupedGraph = Graph.COMPLETE

    def __post_init__(self) -> None:
        for name in ("federation", "application", "model"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != 32:
                raise ContextInvalid(f"{name} is a digest of 32 bytes; hash what it stands for with SHA-256")
        if not isinstance(self.job, str) or not 0 < len(self.job) <= _LONGEST_NAME:
            raise ContextInvalid(f"job is a name of 1 to {_LONGEST_NAME} characters")
        for name in ("round", "attempt", "cohort", "threshold", "assumed_corrupt", "values", "bits"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST_COUNTER:
                raise ContextInvalid(f"{name} is a whole number from 0 to 2^63 - 1, got {number!r}")
        if not isinstance(self.graph, Graph | SparseGraph | GroupedGraph):
            raise ContextInvalid(f"graph is one of {', '.join(Graph)}, got {self.graph!r}")
        if self.graph is Graph.SPARSE:
            raise ContextInvalid("a sparse graph comes with its numbers: give a SparseGraph")
        if self.graph is Graph.GROUPED:
            raise ContextInvalid("groups come with their numbers: give a GroupedGraph")
        if self.values < 1:
            raise ContextInvalid("values is the length of the vector: at least 1")
        if not 2 <= self.bits <= 32:
            raise ContextInvalid(f"bits is the width of the ring: 2 to 32, got {self.bits}")
        self._check_thresholds()

    def _check_thresholds(self) -> None:
        n, t, corrupt = self.cohort, self.threshold, self.assumed_corrupt
        if n < 2:
            raise ContextInvalid(f"a cohort of {n} would reveal its only member's input; form one of at least 2")
        if isinstance(self.graph, SparseGraph):
            _check_sparse(n, t, corrupt, self.graph)
            return
        if isinstance(self.graph, GroupedGraph):
            try:
                check_split(n, t, corrupt, self.graph)
            except NoParameters as error:
                raise ContextInvalid(str(error)) from error
            return
        if n > MAX_COMPLETE_GRAPH:
            raise ContextInvalid(
                f"a cohort of {n} is too large for the complete graph, which ends at {MAX_COMPLETE_GRAPH}; "
                "give a SparseGraph"
            )
        if t > n:
            raise ContextInvalid(f"threshold {t} is above the cohort of {n}; no sum could ever be opened")
        # Answers to two different lists of survivors need t each, and only the n_C corrupt members answer both.
        if 2 * t <= n + corrupt:
            raise ContextInvalid(
                f"threshold {t} is too low for a cohort of {n} with {corrupt} assumed corrupt: "
                f"2t > n + n_C needs at least {(n + corrupt) // 2 + 1}"
            )
        if corrupt and self.honest < 2:
            raise ContextInvalid(
                f"threshold {t} less {corrupt} assumed corrupt leaves {self.honest} honest input in a sum; "
                "at least 2 are needed, so that one cannot be told from the other"
            )

    @property
    def sparse(self) -> SparseGraph | None:
        """The numbers of the sparse graph; None for another graph."""
        return self.graph if isinstance(self.graph, SparseGraph) else None

    @property
    def grouped(self) -> GroupedGraph | None:
        """The numbers of the split into groups; None if there is one sum."""
        return self.graph if isinstance(self.graph, GroupedGraph) else None

    @property
    def largest_sum(self) -> int:
        """Maximum number of inputs in one sum of this attempt: n or, with groups, the size of the largest one."""
        graph = self.grouped
        return self.cohort if graph is None else largest_group(self.cohort, graph.groups)

    @property
    def corrupt_in_sum(self) -> int:
        """Maximum number of corrupt members in one sum: n_C or, with groups, the bound c for any group, which holds
        except with probability 2^-sigma. (On a sparse graph there is one sum, over all members.)
        """
        graph = self.grouped
        return self.assumed_corrupt if graph is None else max_corrupt(self.cohort, self.assumed_corrupt, graph)

    @property
    def honest(self) -> int:
        """h: every sum that can be opened holds at least this many honest members' inputs.

        On the complete graph it is t - n_C. On a sparse graph it is t minus the maximum number of corrupt neighbours of
        any member, with groups t minus the maximum number of corrupt members of any group. Those two maxima hold except
        with probability 2^-sigma.
        """
        graph = self.sparse
        return self.threshold - (self.corrupt_in_sum if graph is None else self._worth(graph).corrupt_neighbours)

    @property
    def max_complainants(self) -> int:
        """How many of a dealer's receivers can be corrupt: n_C on the complete graph, t1 on a sparse one, c in groups.

        An honest receiver never complains about an honest dealer, so nobody else ever does.
        """
        return self.threshold - self.honest

    @property
    def min_roster(self) -> int:
        """Minimum size of U1. On a sparse graph and with groups, a smaller one would weaken `honest`, because the
        corrupt members would make up a larger share.
        """
        if self.grouped is not None:
            return self.cohort - self.grouped.absent
        graph = self.sparse
        if graph is None:
            return self.threshold
        most = self._worth(graph).corrupt_neighbours
        return _min_roster(
            self.cohort, self.cohort - self._lost(graph), self.assumed_corrupt, graph.degree, graph.sigma, most
        )

    @property
    def min_survivors(self) -> int:
        """Minimum size of U2 and U3: t (in each group); on a sparse graph n - floor(delta n)."""
        graph = self.sparse
        return self.threshold if graph is None else self.cohort - self._lost(graph)

    @property
    def min_confirmations(self) -> int:
        """How many members of U3 must sign it: t (in each group); on a sparse graph more than (n + n_C) / 2."""
        return self.threshold if self.sparse is None else (self.cohort + self.assumed_corrupt) // 2 + 1

    def _lost(self, graph: SparseGraph) -> int:
        return of_millionths(self.cohort, graph.lost_millionths)

    def _worth(self, graph: SparseGraph) -> SparseParameters:
        return _worth(self.cohort, self.assumed_corrupt, self._lost(graph), graph)

    def digest(self) -> bytes:
        """A digest of every field, framed: 32 bytes."""
        return _digest(self)


def default_thresholds(cohort: int, assumed_corrupt: int | None = None) -> tuple[int, int]:
    """Returns (threshold, assumed_corrupt) for a cohort on the complete graph.

    t is floor((n + n_C) / 2) + 1, the smallest that satisfies 2t > n + n_C.

    Args:
        cohort: n.
        assumed_corrupt: n_C. By default 1 for 3 to 5 members and floor(n/5) above.

    Raises:
        ContextInvalid: no threshold is sufficient.
    """
    if not 2 <= cohort <= MAX_COMPLETE_GRAPH:
        raise ContextInvalid(f"the complete graph serves cohorts of 2 to {MAX_COMPLETE_GRAPH}, got {cohort}")
    corrupt = max(1, cohort // 5) if assumed_corrupt is None else assumed_corrupt
    if corrupt < 0:
        raise ContextInvalid(f"assumed_corrupt counts members: 0 or more, got {corrupt}")
    threshold = (cohort + corrupt) // 2 + 1
    if corrupt:
        threshold = max(threshold, corrupt + 2)
    if threshold > cohort:
        raise ContextInvalid(
            f"a cohort of {cohort} with {corrupt} assumed corrupt would need {threshold} answers; "
            "form a larger cohort, or let every member's policy assume fewer corrupt ones"
        )
    return threshold, corrupt


def sparse_thresholds(
    cohort: int,
    corrupt: Fraction | float,
    lost: Fraction | float,
    sigma: int = SIGMA,
    absent: int = 0,
) -> tuple[SparseGraph, int, int]:
    """Returns (graph, threshold, assumed_corrupt) for a cohort, with a sparse graph of the smallest sufficient degree.

    Args:
        cohort: n.
        corrupt: gamma, a share of the cohort with at most six decimals.
        lost: delta; as gamma.
        sigma: bits of the guarantee.
        absent: how many of the members that may drop out may already be missing from the roster.

    Raises:
        ContextInvalid: no sparse graph is sufficient.
    """
    try:
        found = find(cohort, corrupt, lost, sigma, absent=absent)
        millionths = to_millionths(corrupt)
        graph = SparseGraph(found.neighbours, millionths, to_millionths(lost), sigma, absent)
    except NoParameters as error:
        raise ContextInvalid(str(error)) from error
    return graph, found.threshold, of_millionths(cohort, millionths)


def thresholds_for(
    cohort: int,
    *,
    assumed_corrupt: int | None = None,
    corrupt: Fraction | float = _SHARE,
    lost: Fraction | float = _SHARE,
    sigma: int = SIGMA,
    absent: int | None = None,
) -> tuple[Graph | SparseGraph, int, int]:
    """Returns (graph, threshold, assumed_corrupt) for a cohort, as both sides of an attempt compute it.

    Up to `COMPLETE_GRAPH_LIMIT` members it is the complete graph with `default_thresholds(cohort, assumed_corrupt)`,
    and the other arguments are ignored. Beyond that it is the result of `sparse_thresholds`. The same arguments give
    the same result on every machine, and a process searches for them once.

    Args:
        cohort: n.
        assumed_corrupt: n_C, a count; on a sparse graph it replaces `corrupt`.
        corrupt: gamma, a share of the cohort with at most six decimals.
        lost: delta; as gamma.
        sigma: bits of the guarantee.
        absent: how many of the floor(delta n) members that may drop out may already be missing from the roster. By
            default half of them, which costs a few neighbours and leaves the other half for later phases.

    Raises:
        ContextInvalid: no threshold is sufficient.
    """
    if cohort <= COMPLETE_GRAPH_LIMIT:
        return (Graph.COMPLETE, *default_thresholds(cohort, assumed_corrupt))
    try:
        lost_millionths = to_millionths(lost)
        if assumed_corrupt is None:
            gamma = Fraction(to_millionths(corrupt), _MILLION)
        else:
            gamma = _share_of(assumed_corrupt, cohort)
    except NoParameters as error:
        raise ContextInvalid(str(error)) from error
    if absent is None:
        absent = of_millionths(cohort, lost_millionths) // 2
    return sparse_thresholds(cohort, gamma, Fraction(lost_millionths, _MILLION), sigma, absent)


def grouped_thresholds(
    cohort: int,
    groups: int,
    assumed_corrupt: int | None = None,
    *,
    least: int | None = None,
    sigma: int = SIGMA,
    absent: int | None = None,
) -> tuple[GroupedGraph, int, int]:
    """Returns (graph, threshold, assumed_corrupt) for a cohort that is split into groups.

    The same arguments give the same result on every machine.

    Args:
        cohort: n.
        groups: number of groups.
        assumed_corrupt: n_C of the whole cohort; by default as in `default_thresholds`.
        least: groups that must be opened; see `groups.find_split` for the default.
        sigma: bits of the guarantee.
        absent: members that may be missing from the roster; see `groups.find_split` for the default.

    Raises:
        ContextInvalid: no threshold is sufficient.
    """
    corrupt = max(1, cohort // 5) if assumed_corrupt is None else assumed_corrupt
    try:
        graph, threshold = find_split(cohort, groups, corrupt, least=least, sigma=sigma, absent=absent)
    except NoParameters as error:
        raise ContextInvalid(str(error)) from error
    return graph, threshold, corrupt


def _share_of(count: int, cohort: int) -> Fraction:
    """The smallest share, in whole millionths, that makes `count` members of a cohort of at most a million."""
    if not 0 <= count < cohort:
        raise ContextInvalid(f"assumed_corrupt counts members: 0 to {cohort - 1} in a cohort of {cohort}, got {count}")
    return Fraction(-(-count * _MILLION // cohort), _MILLION)


def _check_sparse(n: int, t: int, corrupt: int, graph: SparseGraph) -> None:
    for name in ("degree", "corrupt_millionths", "lost_millionths", "sigma", "absent"):
        number = getattr(graph, name)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST_COUNTER:
            raise ContextInvalid(f"{name} is a whole number from 0 to 2^63 - 1, got {number!r}")
    if graph.sigma < MIN_SIGMA:
        raise ContextInvalid(f"sigma {graph.sigma} is below {MIN_SIGMA} bits, the minimum for a sparse graph")
    assumed = of_millionths(n, graph.corrupt_millionths)
    if corrupt != assumed:
        raise ContextInvalid(
            f"{corrupt} assumed corrupt, but {graph.corrupt_millionths} millionths of {n} members are {assumed}; "
            "the confirmations and the graph must assume the same"
        )
    lost = of_millionths(n, graph.lost_millionths)
    worth = _worth(n, corrupt, lost, graph)
    if t < worth.threshold:
        raise ContextInvalid(
            f"threshold {t} is too low for {graph.degree} neighbours in a cohort of {n} with {corrupt} assumed corrupt "
            f"and sigma {graph.sigma}: it needs at least {worth.threshold}"
        )
    if t > worth.largest_threshold:
        raise ContextInvalid(
            f"threshold {t} is out of reach for {graph.degree} neighbours in a cohort of {n} that may lose {lost}: "
            f"at most {worth.largest_threshold} are sure to be left"
        )
    if corrupt and t - worth.corrupt_neighbours < 2:
        raise ContextInvalid(
            f"threshold {t} less {worth.corrupt_neighbours} corrupt neighbours leaves one honest input in a sum; "
            "at least 2 are needed, so that one cannot be told from the other"
        )


def _worth(n: int, corrupt: int, lost: int, graph: SparseGraph) -> SparseParameters:
    try:
        worth = evaluate(n, corrupt, lost, graph.degree, graph.sigma, absent=graph.absent)
        if worth is not None:
            return worth
        least = find_counts(n, corrupt, lost, graph.sigma, absent=graph.absent)
    except NoParameters as error:
        raise ContextInvalid(str(error)) from error
    raise ContextInvalid(
        f"{graph.degree} neighbours do not do for a cohort of {n} with {corrupt} assumed corrupt, {lost} lost and "
        f"sigma {graph.sigma}; the least that do are {least.neighbours}, with threshold {least.threshold}"
    )


# Cached, because every statement of every roster entry holds it: a thousand times for one context.
@lru_cache(maxsize=64)
def _digest(context: RoundContext) -> bytes:
    graph: Field
    match context.graph:
        case SparseGraph(k, corrupt, lost, sigma, absent):
            graph = (Graph.SPARSE.value, k, corrupt, lost, sigma, absent)
        case GroupedGraph(groups, least, sigma, absent):
            graph = (Graph.GROUPED.value, groups, least, sigma, absent)
        case kind:
            graph = kind.value
    return digest(
        Purpose.CONTEXT,
        context.federation,
        context.job,
        context.round,
        context.attempt,
        context.application,
        context.model,
        context.cohort,
        context.threshold,
        context.assumed_corrupt,
        context.values,
        context.bits,
        graph,
    )


@lru_cache(maxsize=256)
def _min_roster(n: int, min_survivors: int, corrupt: int, k: int, sigma: int, most: int) -> int:
    size = n
    while size > max(min_survivors, k + 1) and corrupt_neighbours(size - 1, corrupt, k, sigma) <= most:
        size -= 1
    return size
