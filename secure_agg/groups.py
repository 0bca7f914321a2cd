"""A cohort split at random into groups, each a complete graph and a secure sum of its own.

Guarantees: the split is a function of the roster alone, even to one member, and everybody is in exactly one group;
nobody who advertised knew it when choosing what to advertise, since it hangs on everybody's nonce. One threshold t
holds for all groups, that of the largest, so that every sum that can be opened holds at least t inputs, t - c of them
honest.

c is the most corrupt members of any group: of m members, n_C of them corrupt, a group of s drawn at random has more
than x with P[Hyp(m, n_C, s) > x], and c is the least x for which g times that is at most 2^-sigma. It assumes that the
corrupt members are chosen before the draw. A coordinator that answers last can try 2^k rosters and take one, at a cost
of k of the sigma bits; that is why they are 80. In small groups no probability enters: c is then n_C or the whole
group, and nothing can be ground.

What it leaves to others: how a group's sum is used, and how large a group must be for somebody's policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from secure_agg.graph import ring_order
from secure_agg.identity import MemberId
from secure_agg.parameters import MAX_COMPLETE_GRAPH, MIN_SIGMA, SIGMA, NoParameters
from secure_agg.transcript import Purpose, digest

__all__ = [
    "MAX_GROUPED_COHORT",
    "GroupedGraph",
    "GroupsOf",
    "check_split",
    "corrupt_in_group",
    "draw_groups",
    "find_split",
    "largest_group",
    "max_corrupt",
    "whole_groups",
]

# A roster goes to every member, whatever the size of its group, and the bound is made of exact binomials: no larger.
MAX_GROUPED_COHORT = 10_000
_MAX_SIGMA = 256
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GroupedGraph:
    """The numbers of a split. They are checked with the cohort and threshold they are used with.

    groups: g, into which the roster is split. least: how many of them must be opened for the attempt to count. sigma:
    in bits; no group has more corrupt members than assumed but for 2^-sigma. absent: how many members of the cohort may
    be missing from the roster with that still true.
    """

    groups: int
    least: int
    sigma: int = SIGMA
    absent: int = 0


class GroupsOf:
    """Everybody with everybody of the same group. `groups` hold their members sorted."""

    __slots__ = ("_number", "groups")

    def __init__(self, groups: tuple[tuple[MemberId, ...], ...]) -> None:
        self.groups = groups
        self._number = {member: number for number, group in enumerate(groups) for member in group}

    def number(self, member: MemberId) -> int:
        """The group that `member` is in, from 0."""
        return self._number[member]

    def neighbours(self, member: MemberId) -> tuple[MemberId, ...]:
        """The members that `member` shares a pairwise mask with, sorted."""
        return tuple(other for other in self.receivers(member) if other != member)

    def receivers(self, dealer: MemberId) -> tuple[MemberId, ...]:
        """The members that `dealer` makes shares for, sorted: its whole group, itself included."""
        return self.groups[self._number[dealer]]

    def short(self, gone: Iterable[MemberId], threshold: int) -> frozenset[MemberId]:
        """Nobody: within a group one count of answers holds for every dealer, and the phases keep it."""
        return frozenset()


def draw_groups(
    root: bytes, nonces: Iterable[bytes], members: Iterable[MemberId], groups: int
) -> tuple[tuple[MemberId, ...], ...]:
    """The split of a roster: its members in the order of HMAC-SHA256(seed, name), dealt out one by one to the groups.

    root: the roster root, 32 bytes. nonces: all the members', in the order of names. Sizes differ by one at most, the
    first groups being the larger ones.
    """
    order = ring_order(digest(Purpose.GROUPS, root, tuple(nonces)), members)
    return tuple(tuple(sorted(order[number::groups])) for number in range(groups))


def largest_group(members: int, groups: int) -> int:
    """Members of the largest group of so many: ceil(members / groups)."""
    return -(-members // groups)


def whole_groups(members: int, groups: int, threshold: int) -> int:
    """How many groups of a split of so many members have `threshold` or more."""
    return min(groups, max(0, members - groups * (threshold - 1)))


def find_split(
    n: int, groups: int, corrupt: int, *, least: int | None = None, sigma: int = SIGMA, absent: int | None = None
) -> tuple[GroupedGraph, int]:
    """The numbers of a split of n members, and t of the largest group: floor((s + c) / 2) + 1, and c + 2 at least.

    corrupt: n_C of the whole cohort. least: groups that must be opened, more than half unless given. absent: members
    that may be missing from the roster; unless given, as many as leave `least` groups their threshold, and c as it is.
    Raises NoParameters where no threshold would do.
    """
    bare = GroupedGraph(groups, groups // 2 + 1 if least is None else least, sigma, absent or 0)
    _check_numbers(n, corrupt, bare)
    size, worst = largest_group(n, groups), max_corrupt(n, corrupt, bare)
    threshold = max((size + worst) // 2 + 1, worst + 2 if worst else 2)
    graph = bare if absent is not None else replace(bare, absent=_absent(n, corrupt, threshold, bare))
    check_split(n, threshold, corrupt, graph)
    return graph, threshold


def _absent(n: int, corrupt: int, threshold: int, graph: GroupedGraph) -> int:
    """The most members that may be missing from the roster with `least` groups whole and c as it is."""
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
    """c of a cohort of n with `corrupt` of them corrupt, for every roster that it may have."""
    # The smallest roster and the largest group of all: both make more corrupt ones likelier.
    members = n - graph.absent
    return corrupt_in_group(
        members, min(corrupt, members), min(largest_group(n, graph.groups), members), graph.groups, graph.sigma
    )


def _check_numbers(n: int, corrupt: int, graph: GroupedGraph) -> None:
    for name in ("groups", "least", "sigma", "absent"):
        number = getattr(graph, name)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST:
            raise NoParameters(f"{name} is a whole number from 0 to 2^63 - 1, got {number!r}")
    if n > MAX_GROUPED_COHORT:
        raise NoParameters(f"a cohort of {n} is too large to be split into groups; that ends at {MAX_GROUPED_COHORT}")
    if not MIN_SIGMA <= graph.sigma <= _MAX_SIGMA:
        raise NoParameters(f"sigma {graph.sigma} is not within {MIN_SIGMA} to {_MAX_SIGMA} bits; 80 are usual")
    if not 2 <= graph.groups <= n // 2:
        raise NoParameters(
            f"{n} members make 2 to {n // 2} groups of at least two, not {graph.groups}; ask for fewer groups, or form "
            "a larger cohort"
        )
    if not 1 <= graph.least <= graph.groups:
        raise NoParameters(f"of {graph.groups} groups at least 1 and at most all are opened, not {graph.least}")
    if not 0 <= corrupt < n:
        raise NoParameters(f"assumed_corrupt counts members: 0 to {n - 1} in a cohort of {n}, got {corrupt}")
    if graph.absent >= n:
        raise NoParameters(f"{graph.absent} of {n} members cannot be missing from the roster")
    if largest_group(n, graph.groups) > MAX_COMPLETE_GRAPH:
        raise NoParameters(
            f"{graph.groups} groups of {n} members are too large for a complete graph each, which ends at "
            f"{MAX_COMPLETE_GRAPH}; ask for more groups"
        )


def check_split(n: int, t: int, corrupt: int, graph: GroupedGraph) -> None:
    """Raise NoParameters unless t keeps the promise in every group of a cohort of n: 2t > s + c, t - c >= 2 (t >= 2
    with nobody corrupt), and enough groups that can reach it.
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
            f"of {graph.groups} groups of {n - graph.absent} members only {left} have the {t} that {group} needs, and "
            f"at least {graph.least} must; {larger}"
        )


@lru_cache(maxsize=4096)
def corrupt_in_group(members: int, corrupt: int, size: int, groups: int, sigma: int = SIGMA) -> int:
    """c: the least x such that any of `groups` groups of `size` of the `members`, `corrupt` of whom are, has more than
    x corrupt ones with probability at most 2^-sigma (the union bound over groups). In whole numbers, so exactly.

    Raises ValueError for counts that make no sense.
    """
    if not (0 <= corrupt <= members and 1 <= size <= members and groups >= 1 and sigma >= 0):
        raise ValueError(f"no group of {size} of {members} members with {corrupt} corrupt, {groups} times")
    min_drawn, most = max(0, size - (members - corrupt)), min(corrupt, size)
    # Ways to draw `size` members with x corrupt ones among them, from the largest x down; each follows from the last.
    ways = math.comb(corrupt, most) * math.comb(members - corrupt, size - most)
    tail, every = 0, math.comb(members, size)
    for x in range(most, min_drawn, -1):
        tail += ways
        # The tail counts draws with x or more, and x - 1 would do only if these were rare enough.
        if (groups * tail) << sigma > every:
            return x
        ways = ways * x * (members - corrupt - size + x) // ((corrupt - x + 1) * (size - x + 1))
    return min_drawn
