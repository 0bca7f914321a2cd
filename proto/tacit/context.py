"""The round context of an attempt: a cohort's graph, threshold and n_C, and the honest inputs that they guarantee.

Member and coordinator compute the numbers from the job document and the cohort's size.
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

# Honest members in any sum: a single one would not be hidden among others.
_MIN_HONEST = 2


def thresholds_of(job: Numbers, members: int) -> tuple[Graph | SparseGraph | GroupedGraph, int, int]:
    """Returns (graph, t, n_C) for an attempt of this job over a cohort of `members`.

    Raises:
        ContextInvalid: there are none for this many.
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
    """n_C of a cohort in groups: the job's number. By default a fifth, or for a large cohort `max_corrupt_share`."""
    if numbers.assumed_corrupt is not None:
        return numbers.assumed_corrupt
    if members > COMPLETE_GRAPH_LIMIT:
        return math.floor(Fraction(str(numbers.max_corrupt_share)) * members)
    return max(1, members // 5)


def min_honest_between(numbers: Aggregation, least: int, most: int, found: tuple[int, int]) -> tuple[int, int]:
    """Returns (h, n) of the grouped cohort with the smallest h, among sizes from `least` to `most` that have a split.

    It searches by bisection. The fewest members and the largest n_C of a half give a bound on all its sizes: s - c does
    not fall as s grows (one more member in a group brings at most one more corrupt one), and c does not grow with the
    number of members from which groups are drawn. Halves that cannot fall below the result so far are skipped.

    Args:
        numbers: the job's numbers.
        least: the smallest size.
        most: the largest size.
        found: the smallest (h, n) at the two ends.
    """
    halves = [(least + 1, most - 1)]
    while halves:
        low, high = halves.pop()
        if low > high:
            continue
        worst = max(_corrupt_of_groups(numbers, size) for size in (high, min(high, COMPLETE_GRAPH_LIMIT)))
        # h is never below two. If these numbers have no split, they give no bound.
        if (_honest_in_group(numbers, low, worst) or _MIN_HONEST) >= found[0]:
            continue
        middle = (low + high) // 2
        honest = _honest_in_group(numbers, middle, _corrupt_of_groups(numbers, middle))
        if honest is not None:
            found = min(found, (honest, middle))
        halves += [(low, middle - 1), (middle + 1, high)]
    return found


def _honest_in_group(numbers: Aggregation, members: int, corrupt: int) -> int | None:
    """h of a grouped cohort of which `corrupt` members are corrupt; None if it has no split."""
    if numbers.groups is None:
        return None
    try:
        # The number that may be missing from the roster is chosen so that h stays the same; 0 saves computing it.
        split = grouped_thresholds(members, numbers.groups, corrupt, least=numbers.groups_needed, absent=0)
    except ContextInvalid:
        return None
    return _context_of_nothing(members, *split).honest


def promise_of(job: Numbers, members: int) -> RoundContext:
    """A context with the numbers of a cohort of `members`, but of no attempt, to see what those numbers guarantee.

    Raises:
        ContextInvalid: there are no thresholds for this many.
    """
    return promised(job.aggregation, members)


def promised(numbers: Aggregation, members: int) -> RoundContext:
    """Does what `promise_of` does with a job's numbers alone, to check a job before it exists.

    Raises:
        ContextInvalid: there are no thresholds for this many.
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
    """The size of the largest cohort, at most `members`, whose sum holds the honest inputs that the noise needs. It is
    0 if there is none.

    That is usually all members. On sparse graphs under `distributed-gaussian`, h falls and rises by one from size to
    size, and with groups not every size has thresholds. A few members then wait for the next attempt.
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


def context_of(
    job: Sized, *, federation: bytes, round: int, attempt: int, model: bytes, members: int, head: bytes = b""
) -> RoundContext:
    """The context of an attempt: the one that the coordinator opens and the one that a member expects.

    Args:
        job: the job.
        federation: the fingerprint of its first root, 32 bytes.
        round: number of the round.
        attempt: number of the attempt.
        model: digest of the starting version, 32 bytes.
        members: size n of the cohort.
        head: digest of the roster log's head (`tacit.roster.Head.digest`), 32 bytes; empty without a log.

    Raises:
        ContextInvalid: there are no thresholds for this many members.
        LayoutInvalid: their sum could wrap.
    """
    layout = layout_of(job, members)
    graph, threshold, corrupt = thresholds_of(job, members)
    return RoundContext(
        federation=federation,
        job=job.name,
        round=round,
        attempt=attempt,
        application=application_digest(job, layout, head),
        model=model,
        cohort=members,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=layout.values,
        bits=layout.bits,
        graph=graph,
    )


def application_digest(job: Sized, layout: Layout, head: bytes = b"") -> bytes:
    """Digest of everything that an update depends on besides the starting version: 32 bytes for the round's context.

    Args:
        job: the job.
        layout: how an update is laid out as one vector.
        head: digest of the roster log's head, 32 bytes; empty without a log.
    """
    return hashlib.sha256(b"tacit/application/v1" + job.digest() + layout.digest() + head).digest()
