"""A search for combinations of opened sums of one version that hold too few honest members' inputs.

An abstract coordinator opens k attempts, in order, over members that send one vector each and follow a rule on what
they confirm. It chooses rosters, survivors, and the members that are asked to confirm. A *region* is the set of members
that are in the same ones of the k lists of survivors (U3). A plan is the number of members in each region. Members of a
region are interchangeable, so a plan represents all its renamings. The attack succeeds if a linear combination of the
sums, with no coefficient zero, holds the inputs of at least one honest member and of fewer than h, where h is the
smallest number that one of the attempts promises.

Corrupt members confirm everything, and their inputs are known. Numbers are `secure_agg.default_thresholds`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from secure_agg import default_thresholds

__all__ = ["Found", "Rule", "plans", "random_plans", "search"]

Counts = NDArray[np.int64]


class Rule(Enum):
    """The rule on what a member confirms."""

    # Any U3 that differs from each U3 that it confirmed in no member or in at least n_C + 2 members.
    PAIRS = "pairs"
    # One U3.
    ONE_SUM = "one sum"
    # One U3, after which it sends a vector again only if the roster is that U3.
    ONE_SUM_AND_ROSTER = "one sum and roster"


@dataclass(frozen=True)
class Found:
    """An attack.

    Attributes:
        honest: honest members of each region, by the region's bits.
        corrupt: corrupt members of each region, by the region's bits.
        rosters: sizes of the attempts' rosters.
        combination: coefficients of the sums.
        isolated: number of honest members whose inputs the combination holds.
    """

    honest: tuple[int, ...]
    corrupt: tuple[int, ...]
    rosters: tuple[int, ...]
    combination: tuple[int, ...]
    isolated: int


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` whole numbers."""
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(right - left - 1 for left, right in itertools.pairwise(edges))


def plans(members: int, attempts: int, corrupt: int) -> tuple[Counts, Counts]:
    """Every plan of a federation of `members`, up to renaming: (honest, corrupt), each (plans, 2^attempts)."""
    regions = 2**attempts
    honest = np.array(list(_compositions(members - corrupt, regions)), dtype=np.int64)
    liars = np.array(list(_compositions(corrupt, regions)), dtype=np.int64)
    return np.repeat(honest, len(liars), axis=0), np.tile(liars, (len(honest), 1))


def random_plans(members: int, attempts: int, corrupt: int, count: int, seed: int) -> tuple[Counts, Counts]:
    """`count` random plans that fill few regions, where attacks are likeliest."""
    random, regions = np.random.default_rng(seed), 2**attempts
    chances = random.dirichlet(np.full(regions, 0.2), size=count)
    return random.multinomial(members - corrupt, chances), random.multinomial(corrupt, chances)


def _combinations(attempts: int) -> list[tuple[int, ...]]:
    """Every combination without zeros whose support can be minimal: orthogonal to attempts - 1 independent regions."""
    vectors = [np.array(each) for each in itertools.product((0, 1), repeat=attempts) if any(each)]
    found = set()
    for rows in itertools.combinations(vectors, attempts - 1):
        matrix = np.array(rows, dtype=float).reshape(attempts - 1, attempts)
        minors = (np.delete(matrix, column, axis=1) for column in range(attempts))
        cofactors = [round((-1) ** at * float(np.linalg.det(minor))) for at, minor in enumerate(minors)]
        if all(cofactors):
            scale = int(np.gcd.reduce(cofactors)) * (1 if cofactors[0] > 0 else -1)
            found.add(tuple(each // scale for each in cofactors))
    return sorted(found)


def search(rule: Rule, members: int, attempts: int, honest: Counts, corrupt: Counts) -> Found | None:
    """The first attack among these plans, or None. `members` is the federation's size, which bounds rosters."""
    bits = np.array(list(itertools.product((0, 1), repeat=attempts)), dtype=np.int64)
    sizes, liars = (honest + corrupt) @ bits, corrupt @ bits
    numbers = {n: default_thresholds(n) for n in range(3, members + 1)}
    threshold = np.array([10**6] * 3 + [numbers[n][0] for n in numbers])
    assumed = np.array([0] * 3 + [numbers[n][1] for n in numbers])
    promised = np.where(threshold < 10**6, threshold - assumed, 0)
    for combination in _combinations(attempts):
        isolated = honest @ (bits @ np.array(combination) != 0).astype(np.int64)
        likely = (isolated > 0) & (isolated < promised.max()) & (sizes.min(axis=1) >= 3)
        chosen = _Plans(honest[likely], corrupt[likely], sizes[likely], liars[likely], isolated[likely])
        for claims in _claims(rule, attempts):
            rosters, possible = _rosters(chosen, claims, bits, promised, members)
            possible &= chosen.isolated < promised[rosters].min(axis=1)
            possible &= chosen.corrupt.sum(axis=1) <= assumed[rosters].min(axis=1)
            if not possible.any():
                continue
            needed = threshold[rosters] - chosen.liars
            possible &= _confirmed(rule, bits, chosen, needed, assumed[rosters], claims)
            if possible.any():
                at = int(np.argmax(possible))
                return Found(
                    tuple(chosen.honest[at].tolist()),
                    tuple(chosen.corrupt[at].tolist()),
                    tuple(rosters[at].tolist()),
                    combination,
                    int(chosen.isolated[at]),
                )
    return None


@dataclass(frozen=True)
class _Plans:
    """Plans.

    Attributes:
        honest: honest members, by region.
        corrupt: corrupt members, by region.
        sizes: all members of each U3.
        liars: corrupt members of each U3.
        isolated: honest inputs left in the combination.
    """

    honest: Counts
    corrupt: Counts
    sizes: Counts
    liars: Counts
    isolated: Counts


def _rosters(
    plans: _Plans, claims: tuple[int | None, ...], bits: Counts, promised: Counts, members: int
) -> tuple[Counts, NDArray[np.bool_]]:
    """The size of each attempt's roster, and which plans have rosters for all attempts."""
    rosters, possible = np.empty_like(plans.sizes), np.ones(len(plans.sizes), dtype=bool)
    for at, claimed in enumerate(claims):
        if claimed is None:
            rosters[:, at] = _min_roster(plans.sizes[:, at], plans.isolated, promised, members)
        else:
            # The roster is an earlier U3, and the attempt's own U3 is a proper subset of it.
            outside = (bits[:, at] == 1) & (bits[:, claimed] == 0)
            possible &= (plans.honest + plans.corrupt) @ outside == 0
            possible &= plans.sizes[:, at] < plans.sizes[:, claimed]
            rosters[:, at] = plans.sizes[:, claimed]
    possible &= (rosters <= members).all(axis=1)
    return np.minimum(rosters, members), possible


def _min_roster(sizes: Counts, isolated: Counts, promised: Counts, members: int) -> Counts:
    """The smallest n >= |U3| whose h exceeds the isolated inputs; members + 1 if there is none. A larger n only demands
    more.
    """
    best = np.full_like(sizes, members + 1)
    for n in range(members, 2, -1):
        best = np.where((n >= sizes) & (promised[n] > isolated), n, best)
    return best


def _claims(rule: Rule, attempts: int) -> Iterator[tuple[int | None, ...]]:
    """For each attempt, the earlier one whose U3 is its roster, or None. Members that confirmed that U3 may send."""
    if rule is not Rule.ONE_SUM_AND_ROSTER:
        yield (None,) * attempts
        return
    yield from itertools.product(*((None, *range(at)) for at in range(attempts)))


def _confirmed(
    rule: Rule,
    bits: Counts,
    plans: _Plans,
    needed: Counts,
    assumed: Counts,
    claims: tuple[int | None, ...],
) -> NDArray[np.bool_]:
    """Whether enough honest members can confirm each attempt.

    If nobody may confirm two attempts, this is a matching with demands. By Hall's theorem, it exists if and only if,
    for every set of attempts, at least as many members may confirm one of them as these attempts need together.
    """
    attempts = bits.shape[1]
    may = []
    for at in range(attempts):
        eligible = bits[:, at] == 1
        if rule is Rule.ONE_SUM_AND_ROSTER:
            for later in range(at + 1, attempts):
                if claims[later] != at:
                    # A member that confirmed this sum is in no later, different one.
                    eligible &= bits[:, later] == 0
        may.append(eligible)
    enough = np.ones(len(plans.honest), dtype=bool)
    for size in range(1, attempts + 1):
        for chosen in itertools.combinations(range(attempts), size):
            either = np.logical_or.reduce([may[at] for at in chosen])
            hall = plans.honest @ either >= needed[:, chosen].sum(axis=1)
            if rule is Rule.PAIRS and size > 1:
                # The same members may confirm sums that are far apart. For other sums, the test above demands no less
                # than it must.
                hall |= _all_far(bits, plans.honest + plans.corrupt, assumed, chosen)
            enough &= hall
    return enough


def _all_far(bits: Counts, counts: Counts, assumed: Counts, chosen: tuple[int, ...]) -> NDArray[np.bool_]:
    far = np.ones(len(counts), dtype=bool)
    for one, other in itertools.combinations(chosen, 2):
        far &= counts @ (bits[:, one] != bits[:, other]) >= assumed[:, other] + 2
    return far
