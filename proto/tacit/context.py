"""The round context of an attempt: graph, threshold and n_C that a cohort gets, and what they promise of honest inputs.

Member and coordinator work the numbers out from the job document and the cohort's size.
"""

import hashlib
import math
from fractions import Fraction

from secure_agg import (
    COMPLETE_GRAPH_LIMIT,
    ContextInvalid,
    Graph,
    GroupedGraph,
    Layout,
    RoundContext,
    SparseGraph,
    grouped_thresholds,
    thresholds_for,
)
from tacit.job_parts import Aggregation, Numbers, Sized
from tacit.mechanism import DistributedGaussian
from tacit.vector import WIDEST_RING, layout_of

__all__ = [
    "application_digest",
    "context_of",
    "largest_cohort",
    "min_honest_between",
    "promise_of",
    "promised",
    "thresholds_of",
]

# In any sum: one could not be told from another.
_MIN_HONEST = 2


def thresholds_of(job: Numbers, members: int) -> tuple[Graph | SparseGraph | GroupedGraph, int, int]:
    """(graph, t, n_C) of an attempt of this job over a cohort of `members`.

    Raises:
        ContextInvalid: there are none for so many.
    """
    return _thresholds(job.aggregation, members)


def _thresholds(numbers: Aggregation, members: int) -> tuple[Graph | SparseGraph | GroupedGraph, int, int]:
    if numbers.groups is not None:
        corrupt = _corrupt_of_groups(numbers, members)
        return grouped_thresholds(members, numbers.groups, corrupt, least=numbers.groups_needed)
    return thresholds_for(
        members, assumed_corrupt=numbers.assumed_corrupt, corrupt=numbers.max_corrupt_share, lost=numbers.max_lost_share
    )


def _corrupt_of_groups(numbers: Aggregation, members: int) -> int:
    """n_C of a cohort in groups: the job's, else a fifth, and of a large cohort a share, as for a sparse graph."""
    if numbers.assumed_corrupt is not None:
        return numbers.assumed_corrupt
    if members > COMPLETE_GRAPH_LIMIT:
        return math.floor(Fraction(str(numbers.max_corrupt_share)) * members)
    return max(1, members // 5)


def min_honest_between(numbers: Aggregation, least: int, most: int, found: tuple[int, int]) -> tuple[int, int]:
    """(h, n) of the cohort in groups with the least h, of those between that have a split; `found` at the ends.

    By halves. From the fewest members and the largest n_C of a half follows a bound on all its sizes: s - c does not
    fall as s grows (one more member in a group brings at most one more corrupt one), and c does not grow with the
    members that groups are drawn from. Halves that cannot go below what was found are not looked into.
    """
    halves = [(least + 1, most - 1)]
    while halves:
        low, high = halves.pop()
        if low > high:
            continue
        worst = max(_corrupt_of_groups(numbers, size) for size in (high, min(high, COMPLETE_GRAPH_LIMIT)))
        # Two is the least that there is; numbers that make no split bound nothing.
        if (_honest_in_group(numbers, low, worst) or _MIN_HONEST) >= found[0]:
            continue
        middle = (low + high) // 2
        honest = _honest_in_group(numbers, middle, _corrupt_of_groups(numbers, middle))
        if honest is not None:
            found = min(found, (honest, middle))
        halves += [(low, middle - 1), (middle + 1, high)]
    return found


def _honest_in_group(numbers: Aggregation, members: int, corrupt: int) -> int | None:
    """h of a cohort in groups of which so many are corrupt; None where it has no split."""
    if numbers.groups is None:
        return None
    try:
        # How many may be missing from the roster is chosen so that h stays: it need not be worked out.
        split = grouped_thresholds(members, numbers.groups, corrupt, least=numbers.groups_needed, absent=0)
    except ContextInvalid:
        return None
    return _context_of_nothing(members, *split).honest


def promise_of(job: Numbers, members: int) -> RoundContext:
    """A context with the numbers that a cohort of `members` gets, and of no attempt: for what those numbers promise.

    Raises:
        ContextInvalid: there are none for so many.
    """
    return promised(job.aggregation, members)


def promised(numbers: Aggregation, members: int) -> RoundContext:
    """`promise_of` by a job's numbers alone, for who checks a job that is none yet.

    Raises:
        ContextInvalid: there are none for so many.
    """
    return _context_of_nothing(members, *_thresholds(numbers, members))


def _context_of_nothing(
    members: int, graph: Graph | SparseGraph | GroupedGraph, threshold: int, corrupt: int
) -> RoundContext:
    return RoundContext(
        federation=bytes(32),
        job="none",
        round=0,
        attempt=0,
        application=bytes(32),
        model=bytes(32),
        cohort=members,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=1,
        bits=WIDEST_RING,
        graph=graph,
    )


def largest_cohort(job: Sized, members: int) -> int:
    """The most of so many members that make a cohort whose sum holds the honest inputs that the noise counts on; 0
    where no cohort of this job does. All of them but for `distributed-gaussian` on sparse graphs, where h falls and
    rises by one from size to size, and for groups, of which not every size has thresholds: a few members then wait for
    the next attempt.
    """
    counted = job.mechanism.honest if isinstance(job.mechanism, DistributedGaussian) else 0
    if not counted and job.aggregation.groups is None:
        return members
    for size in range(members, job.rounds.min_members - 1, -1):
        try:
            if promise_of(job, size).honest >= counted:
                return size
        except ContextInvalid:
            if job.aggregation.groups is None:
                raise
    return 0


def context_of(job: Sized, *, federation: bytes, round: int, attempt: int, model: bytes, members: int) -> RoundContext:
    """The context of an attempt of this job: what the coordinator opens, and what a member expects.

    federation: 32 bytes, the fingerprint of its root; model: 32 bytes, the starting version's digest; members: n.

    Raises:
        ContextInvalid: there are no thresholds for so many members.
        LayoutInvalid: their sum could wrap.
    """
    layout = layout_of(job, members)
    graph, threshold, corrupt = thresholds_of(job, members)
    return RoundContext(
        federation=federation,
        job=job.name,
        round=round,
        attempt=attempt,
        application=application_digest(job, layout),
        model=model,
        cohort=members,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=layout.values,
        bits=layout.bits,
        graph=graph,
    )


def application_digest(job: Sized, layout: Layout) -> bytes:
    """Digest of all that an update depends on besides the starting version: 32 bytes for the round's context."""
    return hashlib.sha256(b"tacit/application/v1" + job.digest() + layout.digest()).digest()
