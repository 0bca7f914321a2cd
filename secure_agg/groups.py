"""Splits a cohort at random into groups, each a complete graph with a secure sum of its own.

Guarantees: the split is a function of the roster alone, group sizes differ by at most one, and every member is in
exactly one group. The split depends on every member's nonce, so nobody can know it before the last nonce is chosen. One
threshold t, that of the largest group, applies to all groups, so every sum that can be opened holds at least t inputs,
at least t - c of them honest.

c is the maximum number of corrupt members in any group. A group of s, drawn at random from m members of whom n_C are
corrupt, has more than x corrupt ones with probability P[Hyp(m, n_C, s) > x]; c is the smallest x for which g times that
is at most 2^-sigma. Assumption: the corrupt members are chosen before any honest member of the attempt chooses its
nonce. A coordinator that answers last can try 2^k rosters and pick one, which costs k of the sigma bits; that is why
sigma is 80. For small groups no probability is involved: c is then n_C or the whole group, and trying rosters gains
nothing.

This module does not decide how a group's sum is used, or how large a group must be for a member's policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from secure_agg.graph import alternate, ring_order
from secure_agg.identity import MemberId
from secure_agg.parameters import CORRECTNESS, MAX_COMPLETE_GRAPH, MIN_SIGMA, SIGMA, NoParameters
from secure_agg.transcript import Purpose, digest

__all__ = [
    "MAX_GROUPED_COHORT",
    "GroupedGraph",
    "GroupsOf",
    "check_split",
    "corrupt_in_group",
    "draw_groups",
    "drawn",
    "find_groups",
    "find_split",
    "largest_group",
    "likely_in_group",
    "max_corrupt",
    "whole_groups",
]

# The limit exists because every member gets all names, whatever the size of its group, and because the bound takes
# exact binomials.
MAX_GROUPED_COHORT = 10_000
_MAX_SIGMA = 256
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GroupedGraph:
    """The numbers of a split. `RoundContext` checks them together with the cohort and threshold.

    Args:
        groups: g, the number of groups into which the roster is split.
        least: how many groups must be opened for the attempt to count.
        sigma: bits; except with probability 2^-sigma, no group has more corrupt members than assumed.
        absent: how many members of the cohort may be missing from the roster with that still true.
    """

    groups: int
    least: int
    sigma: int = SIGMA
    absent: int = 0


class GroupsOf:
    """A graph in which every member is a neighbour of all others in its group. `groups` hold their members sorted."""

    __slots__ = ("_number", "_ranks", "groups")

    def __init__(self, groups: tuple[tuple[MemberId, ...], ...]) -> None:
        self.groups = groups
        self._number = {member: number for number, group in enumerate(groups) for member in group}
        self._ranks = {member: rank for group in groups for rank, member in enumerate(group)}

    def number(self, member: MemberId) -> int:
        """The number of the group of `member`, from 0."""
        return self._number[member]

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """The members with which `member` shares a pairwise mask, sorted."""
        return tuple(other for other in self.receivers(member) if other != member)

    def receivers(self, dealer: MemberId) -> tuple[MemberId, ...]:
        """The members for which `dealer` makes shares, sorted: its whole group, including itself."""
        return self.groups[self._number[dealer]]

    def chooses(self, member: MemberId, other: MemberId) -> bool:
        """Whether `member` chooses the seed of its pair with `other`, who is in its group."""
        return alternate(self._ranks[member], self._ranks[other])

    def short(self, gone: Iterable[MemberId], threshold: int) -> frozenset[MemberId]:
        """Nobody: within a group one count of answers holds for every dealer, and the phases enforce it."""
        return frozenset()


def draw_groups(root: bytes, members: Iterable[MemberId], groups: int) -> tuple[tuple[MemberId, ...], ...]:
    """Splits a roster: its members, in the order of HMAC-SHA256(seed, name), go to the groups in turn.

    Sizes differ by at most one; the first groups are the larger ones.

    Args:
        root: the roster root, 32 bytes. It covers every member's nonce.
        members: all members.
        groups: number of groups.
    """
    order = ring_order(digest(Purpose.GROUPS, root), members)
    return tuple(tuple(sorted(order[number::groups])) for number in range(groups))


# Cached, because a member draws when it asks for what it lacks of a roster, and again when it has that.
@lru_cache(maxsize=4)
def drawn(root: bytes, members: tuple[MemberId, ...], groups: int) -> GroupsOf:
    """The graph of `draw_groups`."""
    return GroupsOf(draw_groups(root, members, groups))


def largest_group(members: int, groups: int) -> int:
    """Size of the largest group: ceil(members / groups)."""
    return -(-members // groups)


def whole_groups(members: int, groups: int, threshold: int) -> int:
    """How many groups in a split of `members` have at least `threshold` members."""
    return min(groups, max(0, members - groups * (threshold - 1)))


def find_split(
    n: int, groups: int, corrupt: int, *, least: int | None = None, sigma: int = SIGMA, absent: int | None = None
) -> tuple[GroupedGraph, int]:
    """Finds the numbers of a split, and t for the largest group: floor((s + c) / 2) + 1, but at least c + 2.

    Args:
        n: size of the cohort.
        groups: g.
        corrupt: n_C of the whole cohort.
        least: groups that must be opened; by default more than half.
        sigma: bits of the guarantee.
        absent: members that may be missing from the roster; by default as many as leave `least` groups their threshold
            and do not change c.

    Raises:
        NoParameters: no threshold is sufficient.
    """
    bare = GroupedGraph(groups, groups // 2 + 1 if least is None else least, sigma, absent or 0)
    _check_numbers(n, corrupt, bare)
    size, worst = largest_group(n, groups), max_corrupt(n, corrupt, bare)
    threshold = max((size + worst) // 2 + 1, worst + 2 if worst else 2)
    graph = bare if absent is not None else replace(bare, absent=_absent(n, corrupt, threshold, bare))
    check_split(n, threshold, corrupt, graph)
    return graph, threshold


def find_groups(
    n: int, corrupt: int, lost: int, honest: int, *, sigma: int = SIGMA, correctness: int = CORRECTNESS
) -> tuple[GroupedGraph, int]:
    """Finds the largest number of groups in which every member hides among enough, and that dropouts do not stop.

    The more groups, the less each member computes and sends, and the fewer its input hides among. The result satisfies:

    1. `check_split`: c bounds the corrupt members of every group at once, except with probability 2^-sigma.
    2. t - c >= `honest`.
    3. No group loses more members than it can spare, except with probability 2^-correctness, and as many may be missing
       from the roster. This matters for progress only. It assumes that members are lost independently of the draw.

    Args:
        n: size of the cohort.
        corrupt: n_C of the whole cohort.
        lost: members of the whole cohort that may drop out, before the roster or after.
        honest: least h of each group.
        sigma: bits of the guarantee.
        correctness: bits of the guarantee of progress.

    Returns:
        (graph, t), as `find_split`.

    Raises:
        NoParameters: no number of groups is sufficient.
    """
    if not 4 <= n <= MAX_GROUPED_COHORT:
        raise NoParameters(f"4 to {MAX_GROUPED_COHORT} members can be split into groups, not {n}")
    for name, count in (("corrupt", corrupt), ("lost", lost)):
        if not 0 <= count < n:
            raise NoParameters(f"{name} counts members: 0 to {n - 1} in a cohort of {n}, got {count}")
    for groups in range(n // max(2, honest), 1, -1):
        try:
            graph, threshold = find_split(n, groups, corrupt, sigma=sigma)
            if graph.absent < lost:
                # A smaller roster may have a larger c.
                graph, threshold = find_split(n, groups, corrupt, sigma=sigma, absent=lost)
        except NoParameters:
            continue
        # The smallest group can spare the fewest.
        spare = n // groups - threshold
        if (
            threshold - max_corrupt(n, corrupt, graph) >= honest
            and corrupt_in_group(n, lost, largest_group(n, groups), groups, correctness) <= spare
        ):
            return graph, threshold
    raise NoParameters(
        f"no split of {n} members, {corrupt} of them corrupt and {lost} lost, has {honest} honest ones in every group "
        f"with {sigma} bits; form a larger cohort, ask for fewer honest members, or use one sum"
    )


def _absent(n: int, corrupt: int, threshold: int, graph: GroupedGraph) -> int:
    """Maximum number of members that may be missing from the roster with `least` groups whole and c unchanged."""
    low, high = 0, max(0, n - graph.groups * (threshold - 1) - graph.least)
    worst = max_corrupt(n, corrupt, graph)
    while low < high:
        middle = (low + high + 1) // 2
        if max_corrupt(n, corrupt, replace(graph, absent=middle)) <= worst:
            low = middle
        else:
            high = middle - 1
    return low


def max_corrupt(n: int, corrupt: int, graph: GroupedGraph) -> int:
    """c for a cohort of n members, `corrupt` of them corrupt, and for every roster that it may have."""
    # The smallest roster and the largest group: both make more corrupt members likelier.
    members = n - graph.absent
    return corrupt_in_group(
        members, min(corrupt, members), min(largest_group(n, graph.groups), members), graph.groups, graph.sigma
    )


def likely_in_group(n: int, corrupt: int, graph: GroupedGraph) -> int:
    """How many of `corrupt` members one group has at most, except with probability 2^-20, for every roster that it may
    have. Smaller than c, which bounds all groups at once with sigma bits.
    """
    members = n - graph.absent
    return corrupt_in_group(
        members, min(corrupt, members), min(largest_group(n, graph.groups), members), 1, CORRECTNESS
    )


def _check_numbers(n: int, corrupt: int, graph: GroupedGraph) -> None:
    for name in ("groups", "least", "sigma", "absent"):
        number = getattr(graph, name)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST:
            raise NoParameters(f"{name} is a whole number from 0 to 2^63 - 1, got {number!r}")
    if n > MAX_GROUPED_COHORT:
        raise NoParameters(f"a cohort of {n} is too large to be split into groups; the limit is {MAX_GROUPED_COHORT}")
    if not MIN_SIGMA <= graph.sigma <= _MAX_SIGMA:
        raise NoParameters(f"sigma {graph.sigma} is not within {MIN_SIGMA} to {_MAX_SIGMA} bits; 80 are usual")
    if not 2 <= graph.groups <= n // 2:
        possible = "no groups" if n < 4 else "2 groups" if n < 6 else f"2 to {n // 2} groups"
        raise NoParameters(
            f"{n} members make {possible} of at least two, and {graph.groups} are asked for; ask for fewer groups, or "
            "form a larger cohort"
        )
    if not 1 <= graph.least <= graph.groups:
        raise NoParameters(f"the number of groups that must be opened is 1 to {graph.groups}, got {graph.least}")
    if not 0 <= corrupt < n:
        raise NoParameters(f"assumed_corrupt counts members: 0 to {n - 1} in a cohort of {n}, got {corrupt}")
    if graph.absent >= n:
        raise NoParameters(f"{graph.absent} of {n} members cannot be missing from the roster")
    if largest_group(n, graph.groups) > MAX_COMPLETE_GRAPH:
        raise NoParameters(
            f"{graph.groups} groups of {n} members are too large for a complete graph each, whose limit is "
            f"{MAX_COMPLETE_GRAPH}; ask for more groups"
        )


def check_split(n: int, t: int, corrupt: int, graph: GroupedGraph) -> None:
    """Checks that t is sufficient in every group of a cohort of n: 2t > s + c, t - c >= 2 (t >= 2 if nobody is
    corrupt), and enough groups can reach it.

    Raises:
        NoParameters: it is not.
    """
    _check_numbers(n, corrupt, graph)
    size, worst = largest_group(n, graph.groups), max_corrupt(n, corrupt, graph)
    group = f"a group of {size} with up to {worst} of the {corrupt} assumed corrupt"
    larger = "form a larger cohort, ask for fewer groups, or let every member's policy assume fewer corrupt ones"
    if 2 * t <= size + worst:
        raise NoParameters(f"threshold {t} is too low for {group}: 2t > s + c needs at least {(size + worst) // 2 + 1}")
    if t < 2 or (worst and t - worst < 2):
        raise NoParameters(
            f"threshold {t} less {worst} corrupt members of a group leaves fewer than 2 honest inputs in its sum; at "
            "least 2 are needed, so that one cannot be told from the other"
        )
    if t > size:
        raise NoParameters(f"threshold {t} is above {group}; no sum could ever be opened: {larger}")
    left = whole_groups(n - graph.absent, graph.groups, t)
    if left < graph.least:
        raise NoParameters(
            f"with {n - graph.absent} members in {graph.groups} groups, only {left} of these have the {t} that {group} "
            f"needs, but at least {graph.least} must; {larger}"
        )


@lru_cache(maxsize=4096)
def corrupt_in_group(members: int, corrupt: int, size: int, groups: int, sigma: int = SIGMA) -> int:
    """c: the smallest x such that, with probability at most 2^-sigma, any group has more than x corrupt members.

    There are `groups` groups of `size`, drawn from `members` of whom `corrupt` are corrupt (union bound over groups).
    It computes in whole numbers, so exactly.

    Raises:
        ValueError: the counts are impossible.
    """
    if not (0 <= corrupt <= members and 1 <= size <= members and groups >= 1 and sigma >= 0):
        raise ValueError(f"no group of {size} of {members} members with {corrupt} corrupt, {groups} times")
    min_drawn, most = max(0, size - (members - corrupt)), min(corrupt, size)
    # Ways to draw `size` members with x corrupt ones among them, from the largest x down; each follows from the one
    # before.
    ways = math.comb(corrupt, most) * math.comb(members - corrupt, size - most)
    tail, every = 0, math.comb(members, size)
    for x in range(most, min_drawn, -1):
        tail += ways
        # The tail counts draws with x or more; x - 1 would be sufficient only if these were rare enough.
        if (groups * tail) << sigma > every:
            return x
        ways = ways * x * (members - corrupt - size + x) // ((corrupt - x + 1) * (size - x + 1))
    return min_drawn
