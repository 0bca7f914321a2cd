"""A cohort in groups: the bound on corrupt members, the draw, every group's own sum, and attacks on it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg import (
    Abandoned,
    Confirmations,
    ContextInvalid,
    Graph,
    GroupedGraph,
    Phase,
    Reason,
    ReceivedDealings,
    Refusal,
    Roster,
    Survivors,
    grouped_thresholds,
)
from secure_agg.groups import corrupt_in_group, draw_groups, find_groups, largest_group, max_corrupt, whole_groups
from secure_agg.parameters import NoParameters, _log_probabilities
from secure_agg.server import OpenedSum
from secure_agg.session import Session, advertisement_statement
from tests.support.group_fleet import GroupFleet, grouped_context
from tests.support.sum_fleet import make_context, names

# ---- the bound -------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_bound_on_corrupt_members_matches_counting_every_draw(data: st.DataObject) -> None:
    members = data.draw(st.integers(2, 9))
    corrupt, size = data.draw(st.integers(0, members)), data.draw(st.integers(1, members))
    groups, sigma = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 8))
    draws = list(itertools.combinations(range(members), size))

    def more_than(x: int) -> Fraction:
        return Fraction(sum(sum(member < corrupt for member in draw) > x for draw in draws), len(draws))

    least = next(x for x in range(size + 1) if groups * more_than(x) <= Fraction(1, 2**sigma))
    # Every draw has at least the unavoidable number of corrupt members, so the result starts there.
    surely = max(0, size - (members - corrupt))
    assert corrupt_in_group(members, corrupt, size, groups, sigma) == max(least, surely)


def test_partitions_have_a_worse_group_at_most_as_often_as_bounded() -> None:
    # All 280 ways to split nine members, three of them corrupt, into three groups of three.
    bad = {"m0", "m1", "m2"}
    rest, worst = frozenset(names(9)), []
    for first in itertools.combinations(sorted(rest), 3):
        for second in itertools.combinations(sorted(rest - set(first)), 3):
            third = rest - set(first) - set(second)
            worst.append(max(len(bad.intersection(group)) for group in (first, second, third)))
    for sigma in range(7):
        bound = corrupt_in_group(9, 3, 3, 3, sigma)
        assert Fraction(sum(each > bound for each in worst), len(worst)) <= Fraction(1, 2**sigma)
    # A group of all three corrupt members occurs in 1 of 28 draws, which 4 bits allow and 5 bits do not.
    assert [corrupt_in_group(9, 3, 3, 3, sigma) for sigma in (4, 5)] == [2, 3]


@pytest.mark.parametrize(("n", "groups", "corrupt"), [(12, 3, 4), (12, 4, 3), (13, 3, 5), (10, 2, 4)])
def test_every_group_at_once_has_at_most_c_corrupt_as_often_as_promised(n: int, groups: int, corrupt: int) -> None:
    # Exact: the number of ways to deal the corrupt members to the groups with at most x in each.
    sizes = [n // groups + (number < n % groups) for number in range(groups)]

    def at_most(x: int) -> Fraction:
        ways = {0: 1}
        for size in sizes:
            ways_here: dict[int, int] = {}
            for dealt, count in ways.items():
                for here in range(min(x, size, corrupt - dealt) + 1):
                    ways_here[dealt + here] = ways_here.get(dealt + here, 0) + count * math.comb(size, here)
            ways = ways_here
        return Fraction(ways.get(corrupt, 0), math.comb(n, corrupt))

    for sigma in range(12):
        c = corrupt_in_group(n, corrupt, sizes[0], groups, sigma)
        assert 1 - at_most(c) <= Fraction(1, 2**sigma)
        # It is not loose for one group alone: one corrupt member fewer breaks the bound that was asked for.
        alone = sum(
            Fraction(math.comb(corrupt, x) * math.comb(n - corrupt, sizes[0] - x), math.comb(n, sizes[0]))
            for x in range(c, min(corrupt, sizes[0]) + 1)
        )
        if c > max(0, sizes[0] - (n - corrupt)):
            assert groups * alone > Fraction(1, 2**sigma)


def test_the_protocols_own_draws_exceed_the_bound_no_more_often_than_promised() -> None:
    # Monte Carlo over roots, with so few bits that it happens: 60 members, 12 corrupt, in five groups.
    bad, often = set(names(60)[:12]), {}
    draws = [draw_groups(number.to_bytes(32, "big"), names(60), 5) for number in range(1500)]
    worst = [max(len(bad.intersection(group)) for group in drawn) for drawn in draws]
    for sigma in (1, 2, 3, 4):
        c = corrupt_in_group(60, 12, 12, 5, sigma)
        often[sigma] = sum(each > c for each in worst)
        # Four standard deviations of a frequency at the bound.
        assert often[sigma] <= 1500 / 2**sigma + 4 * math.sqrt(1500 / 2**sigma)
    # The bound is of use: it is exceeded at times, and one less is exceeded too often.
    assert often[1] > 0
    assert sum(each > corrupt_in_group(60, 12, 12, 5, 4) - 2 for each in worst) > 1500 / 2**4


@pytest.mark.parametrize(
    ("n", "corrupt", "lost", "honest"),
    [(10_000, 500, 200, 10), (10_000, 500, 50, 30), (1000, 50, 20, 10), (1000, 20, 5, 25), (60, 3, 2, 3)],
)
def test_the_finder_takes_the_most_groups_that_keep_every_promise(n: int, corrupt: int, lost: int, honest: int) -> None:
    graph, threshold = find_groups(n, corrupt, lost, honest)

    def keeps(groups: int) -> bool:
        try:
            found, t, _ = grouped_thresholds(n, groups, corrupt)
        except ContextInvalid:
            return False
        h = t - max_corrupt(n, corrupt, found)
        # The probability that a group loses more than the smallest can spare, over all groups.
        tail = more_than(n, lost, math.ceil(n / groups), n // groups - t)
        return h >= honest and groups * tail <= Fraction(1, 2**20)

    assert threshold - max_corrupt(n, corrupt, graph) >= honest
    assert keeps(graph.groups)
    assert not any(keeps(more) for more in range(graph.groups + 1, min(n // 2, graph.groups + 25)))


def more_than(members: int, marked: int, drawn: int, x: int) -> Fraction:
    """P[Hyp(members, marked, drawn) > x]."""
    if x < 0:
        return Fraction(1)
    ways = sum(
        math.comb(marked, here) * math.comb(members - marked, drawn - here)
        for here in range(x + 1, min(marked, drawn) + 1)
    )
    return Fraction(ways, math.comb(members, drawn))


def test_the_finder_says_what_to_do_where_no_split_is_good_enough() -> None:
    with pytest.raises(NoParameters, match="30 of them corrupt and 2 lost, has 20 honest ones in every group"):
        find_groups(60, 30, 2, 20)


def test_the_bound_is_small_in_large_groups_and_everybody_in_small_ones() -> None:
    # The sparse graph's tail in another arithmetic: 100 members of a group correspond to 100 neighbours.
    more_than = np.logaddexp.accumulate(_log_probabilities(1000, 100, 100)[::-1])[::-1][1:]
    for sigma in (0, 40, 80):
        least = int(np.argmax(more_than <= -sigma * math.log(2) - math.log(10)))
        assert corrupt_in_group(1000, 100, 100, 10, sigma) == least
    assert corrupt_in_group(1000, 100, 100, 10, 80) == 47
    # At most 32 of the thousand may be missing from the roster without changing c.
    graph, threshold, _ = grouped_thresholds(1000, 10, 100)
    assert (graph.absent, threshold) == (32, 74)
    assert corrupt_in_group(968, 100, 100, 10, 80) == 47
    assert corrupt_in_group(967, 100, 100, 10, 80) == 48
    for absent, worst in ((32, 47), (33, 48)):
        assert max_corrupt(1000, 100, dataclasses.replace(graph, absent=absent)) == worst
    with pytest.raises(ContextInvalid, match="2t > s \\+ c needs at least 75"):
        make_context(1000, threshold, 100, graph=dataclasses.replace(graph, absent=33))
    assert corrupt_in_group(30, 6, 3, 10, 80) == 3
    assert corrupt_in_group(10, 1, 4, 3, 80) == 1
    assert corrupt_in_group(10, 0, 4, 3, 80) == 0
    # Nine of ten are corrupt, so any four include at least three of them.
    assert corrupt_in_group(10, 9, 4, 3, 0) >= 3


@given(st.integers(4, 400), st.integers(2, 12), st.integers(0, 40), st.integers(40, 90))
@settings(max_examples=120, deadline=None)
def test_found_numbers_keep_the_guarantee_for_every_roster(n: int, groups: int, corrupt: int, sigma: int) -> None:
    try:
        graph, threshold, assumed = grouped_thresholds(n, groups, corrupt, sigma=sigma)
    except ContextInvalid:
        return
    context = make_context(n, threshold, assumed, graph=graph)
    assert assumed == corrupt
    assert context.largest_sum == largest_group(n, groups) == math.ceil(n / groups)
    c = context.corrupt_in_sum
    assert context.honest == threshold - c >= 2
    assert context.min_roster == n - graph.absent
    for members in {n, context.min_roster, (n + context.min_roster) // 2}:
        size = math.ceil(members / groups)
        assert corrupt_in_group(members, corrupt, size, groups, sigma) <= c
        assert 2 * threshold > size + c
        sizes = [len(group) for group in draw_groups(bytes(32), names(members), groups)]
        assert sum(each >= threshold for each in sizes) == whole_groups(members, groups, threshold) >= graph.least


def test_a_context_states_its_groups_guarantee_and_digests_the_split() -> None:
    context = grouped_context(12, 3, 1)
    assert (context.threshold, context.honest, context.corrupt_in_sum, context.largest_sum) == (3, 2, 1, 4)
    assert (context.min_roster, context.min_survivors, context.min_confirmations) == (8, 3, 3)
    assert context.sparse is None
    assert context.grouped == GroupedGraph(3, 2, 80, 4)
    others = [
        dataclasses.replace(context, graph=dataclasses.replace(context.graph, **change))  # type: ignore[type-var]
        for change in ({"groups": 4, "absent": 2}, {"least": 1}, {"sigma": 79}, {"absent": 3})
    ]
    others.append(make_context(12))
    assert len({each.digest() for each in (context, *others)}) == 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threshold": 2}, "2t > s \\+ c needs at least 3"),
        ({"threshold": 5}, "no sum could ever be opened"),
        ({"assumed_corrupt": 2}, "threshold 3 is too low"),
        ({"graph": GroupedGraph(7, 2)}, "12 members make 2 to 6 groups"),
        ({"graph": GroupedGraph(1, 1)}, "and 1 are asked for"),
        ({"graph": GroupedGraph(3, 4)}, "groups that must be opened is 1 to 3, got 4"),
        ({"graph": GroupedGraph(3, 2, 39)}, "sigma 39"),
        ({"graph": GroupedGraph(3, 2, 80, 5)}, "with 7 members in 3 groups, only 1 of these have the 3"),
        ({"graph": GroupedGraph(3, 2, 80, 12)}, "cannot be missing"),
        ({"graph": GroupedGraph(3, 2, 80, -1)}, "absent is a whole number"),
        ({"graph": Graph.GROUPED}, "give a GroupedGraph"),
        ({"assumed_corrupt": 0, "threshold": 1, "graph": GroupedGraph(6, 4)}, "too low"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_context_refuses_group_numbers_without_a_guarantee(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ContextInvalid, match=says):
        dataclasses.replace(grouped_context(12, 3, 1), **change)


def test_a_cohort_that_cannot_be_split_is_refused_with_the_reason() -> None:
    with pytest.raises(ContextInvalid, match="let every member's policy assume fewer"):
        grouped_thresholds(30, 10, 3)
    for members, possible in ((3, "no groups"), (5, "2 groups"), (6, "2 to 3 groups")):
        with pytest.raises(ContextInvalid, match=f"{members} members make {possible} of at least two, and 4 are asked"):
            grouped_thresholds(members, 4, 1)
    with pytest.raises(ContextInvalid, match="too large for a complete graph"):
        grouped_thresholds(5000, 4, 1)
    with pytest.raises(ContextInvalid, match="the limit is 10000"):
        grouped_thresholds(20_000, 100, 1)


# ---- the draw --------------------------------------------------------------------------------------------------------


@given(st.integers(4, 60), st.integers(2, 9), st.binary(min_size=32, max_size=32))
@settings(max_examples=80, deadline=None)
def test_every_member_is_in_one_group_and_groups_are_even(n: int, groups: int, root: bytes) -> None:
    drawn = draw_groups(root, names(n), groups)
    assert sorted(itertools.chain(*drawn)) == sorted(names(n))
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1
    assert all(list(group) == sorted(group) for group in drawn)


def test_two_members_share_a_group_as_often_as_by_chance() -> None:
    met = 0
    for number in range(2000):
        drawn = draw_groups(number.to_bytes(32, "big"), names(12), 3)
        met += any({"m0", "m1"} <= set(group) for group in drawn)
    # 3 of 11 others: 545 expected, with a standard deviation of 20.
    assert 465 < met < 625


def test_the_draw_depends_on_every_members_nonce() -> None:
    session = GroupFleet(12, 3).until(Phase.SHARE).server.session
    draws = {session.groups}
    for changed in session.members:
        entries = {
            **session.entries,
            changed: dataclasses.replace(session.entries[changed], nonce=bytes(32)),
        }
        draws.add(Session.by_digest(session.context, entries.values(), {}, {}).groups)
    assert len(draws) == 13


def test_members_and_server_draw_the_same_groups_and_deal_within_them() -> None:
    fleet = GroupFleet(12, 3).until(Phase.MASK)
    for name, state in fleet.states.items():
        assert state.seat.session.groups == fleet.groups  # type: ignore[attr-defined]
        dealing = fleet.sent[Phase.SHARE][name]
        group = fleet.groups[fleet.server.session.group_of(name)]  # type: ignore[attr-defined]
        assert tuple(share.receiver for share in dealing.shares) == group
        assert {dealt.dealer for dealt in fleet.inbox[name].dealings} == set(group) - {name}


# ---- every group's own sum -------------------------------------------------------------------------------------------


any_losses = given(
    st.sampled_from([(8, 2), (12, 3), (13, 3), (15, 4)]),
    st.dictionaries(st.sampled_from(list(Phase)), st.sets(st.integers(0, 14), max_size=4), max_size=5),
    st.integers(0, 2**16),
    st.sampled_from([32, 20, 13]),
)


@settings(max_examples=20, deadline=None)
@any_losses
def test_after_any_losses_every_opened_sum_is_its_survivors(
    shape: tuple[int, int], lost: dict[Phase, set[int]], seed: int, bits: int
) -> None:
    each_sum_is_its_survivors(shape, lost, seed, bits)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@any_losses
def test_after_any_losses_every_opened_sum_is_its_survivors_at_length(
    shape: tuple[int, int], lost: dict[Phase, set[int]], seed: int, bits: int
) -> None:
    each_sum_is_its_survivors(shape, lost, seed, bits)


def each_sum_is_its_survivors(shape: tuple[int, int], lost: dict[Phase, set[int]], seed: int, bits: int) -> None:
    n, groups = shape
    fleet = GroupFleet(n, groups, seed=f"groups {seed}", bits=bits)
    lose = {phase: {f"m{number}" for number in numbers if number < n} for phase, numbers in lost.items()}
    outcome = fleet.run(lose)
    gone, grouped, least = set().union(*lose.values()), fleet.context.grouped, fleet.context.threshold
    assert grouped is not None
    if n - len(lose.get(Phase.ADVERTISE, ())) < fleet.context.min_roster:
        assert isinstance(outcome, Abandoned)
        return
    # A group is opened if t of its members stay to the end, and the attempt counts if enough groups are opened.
    expected = {number for number, group in enumerate(fleet.groups) if len(set(group) - gone) >= least}
    assert isinstance(outcome, Abandoned) == (len(expected) < grouped.least)
    if isinstance(outcome, Abandoned):
        assert outcome.reason is Reason.THRESHOLD_LOST
        return
    assert outcome.keys() == expected
    before_masked = set().union(*(lose.get(phase, set()) for phase in (Phase.ADVERTISE, Phase.SHARE, Phase.MASK)))
    for number, (survivors, total) in outcome.items():
        assert len(survivors) >= fleet.context.threshold
        assert set(survivors) == set(fleet.server.session.groups[number]) - before_masked
        assert np.array_equal(total, fleet.plain_sum(survivors))
    # Every member that is in no sum was dropped with a reason.
    in_sum = {name for survivors, _ in outcome.values() for name in survivors}
    assert set(names(n)) - in_sum <= {dropped.member for dropped in fleet.dropped} | set().union(*lose.values(), set())


def test_a_group_is_lost_alone_and_all_its_members_are_named() -> None:
    fleet = GroupFleet(12, 3).until(Phase.MASK)
    first, second, third = fleet.groups  # type: ignore[attr-defined]
    fleet.play(lose=second[:2])
    assert {dropped.member: dropped.reason for dropped in fleet.dropped} == {
        **dict.fromkeys(second[:2], Reason.PHASE_DEADLINE),
        **dict.fromkeys(second[2:], Reason.GROUP_TOO_SMALL),
    }
    assert fleet.inbox.keys() == {*first, *third}
    assert fleet.server.lost_groups == 1
    assert {message.members for message in fleet.inbox.values()} == {first, third}


def test_hopeless_only_when_too_few_groups_can_still_answer() -> None:
    fleet = GroupFleet(12, 3).until(Phase.SHARE)
    first, second, _ = fleet.groups  # type: ignore[attr-defined]
    server = fleet.server
    for member in first[:2]:
        server = server.drop(member, Reason.DISCONNECTED)
    assert not server.hopeless
    server = server.drop(second[0], Reason.DISCONNECTED)
    assert not server.hopeless
    assert server.drop(second[1], Reason.DISCONNECTED).hopeless


def test_sums_open_once_every_group_that_can_has_answered() -> None:
    fleet = GroupFleet(12, 3).until(Phase.UNMASK)
    server, groups = fleet.server, fleet.groups  # type: ignore[attr-defined]
    for group in groups[:2]:
        for member in group[:3]:
            assert not server.enough
            server = server.receive(member, fleet.act(member, Phase.UNMASK))
    # Two groups are enough for the attempt, but the third may still answer, so none of it is discarded.
    assert not server.enough
    assert server.drop(groups[2][0], Reason.DISCONNECTED).drop(groups[2][1], Reason.DISCONNECTED).enough
    for member in groups[2][:3]:
        server = server.receive(member, fleet.act(member, Phase.UNMASK))
    assert server.enough
    closed = server.close()
    assert not isinstance(closed, Abandoned)
    assert isinstance(closed[0], OpenedSum)
    assert [number for number, _ in closed[0].by_group()] == [0, 1, 2]


def test_the_secrets_of_one_group_open_no_other() -> None:
    fleet = GroupFleet(12, 3)
    for _ in Phase:
        assert fleet.play() is None
    (_, first), (_, second), _ = fleet.server.by_group()
    total = fleet.sums[1].total.copy()
    first.unmask(total)
    assert not np.array_equal(total, fleet.plain_sum(second.survivors))
    assert set(first.survivors).isdisjoint(second.survivors)


# ---- lies ------------------------------------------------------------------------------------------------------------


def refusal(call: Any, *given: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*given)
    return caught.value


def test_a_coordinator_that_chooses_the_groups_itself_is_refused() -> None:
    fleet = GroupFleet(12, 3).until(Phase.MASK)
    first, second, _ = fleet.groups  # type: ignore[attr-defined]
    victim = first[0]
    # The coordinator wants the victim in a group of its choice, but by the draw those members did not deal to it.
    chosen = ReceivedDealings(
        (*fleet.inbox[victim].dealings[:2], dataclasses.replace(fleet.inbox[second[1]].dealings[0], dealer=second[0]))
    )
    refused = refusal(fleet.states[victim].on_dealings, chosen)
    assert (refused.reason, refused.member) == (Reason.DEALINGS_FOREIGN_DEALER, second[0])


def test_a_second_roster_cannot_put_a_member_into_another_group() -> None:
    fleet = GroupFleet(12, 3)
    assert fleet.play() is None
    name = "m0"
    roster = fleet.inbox[name]
    state = fleet.states[name]
    state.on_roster(roster)
    # A roster with fewer members gives another draw.
    another = Roster(tuple(entry for entry in roster.advertisements if entry.member != "m5"))
    assert refusal(state.on_roster, another).reason is Reason.SECOND_ROSTER
    other = GroupFleet(12, 3, seed="groups")
    other.play()
    changed = other.states[name].on_roster(another)[0]
    assert changed.seat.session.groups != fleet.server.session.groups


@pytest.mark.parametrize("seed", ["shown two rosters", "again", "once more"])
def test_members_that_were_shown_different_rosters_share_no_sum(seed: str) -> None:
    fleet = GroupFleet(12, 3, seed=seed)
    fleet.play()
    liar = Roster(tuple(entry for entry in fleet.inbox["m0"].advertisements if entry.member != "m5"))
    state, _ = fleet.states["m0"].on_roster(liar)
    fleet.inbox.pop("m0")
    fleet.gone.add("m0")
    fleet.server = fleet.server.drop("m0", Reason.DISCONNECTED)
    fleet.play()
    theirs = [dealing for received in fleet.inbox.values() for dealing in received.dealings]
    beside = next(dealing for dealing in theirs if dealing.dealer in state.seat.session.neighbours("m0"))
    refused = refusal(state.on_dealings, ReceivedDealings((beside,)))
    assert refused.reason in (Reason.DEALINGS_SIGNATURE_INVALID, Reason.DEALINGS_MALFORMED)


def test_a_group_shrunk_below_the_minimum_is_refused() -> None:
    # In the roster: so many members are left out that the member's group is too small for a sum.
    fleet = GroupFleet(12, 3)
    fleet.play()
    entries = fleet.inbox["m0"].advertisements
    others = [entry.member for entry in entries if entry.member != "m0"]

    def without(left_out: tuple[str, ...]) -> Roster:
        return Roster(tuple(entry for entry in entries if entry.member not in left_out))

    # Eight members make groups of 3, 3 and 2; the draw decides whether the victim is in the last.
    small = next(
        roster
        for roster in map(without, itertools.combinations(others, 4))
        if "m0" in Session.of(fleet.context, roster.advertisements).groups[2]
    )
    assert refusal(fleet.states["m0"].on_roster, small).reason is Reason.GROUP_TOO_SMALL
    fewer = without(("m1", "m2", "m3", "m4", "m5"))
    assert refusal(fleet.states["m0"].on_roster, fewer).reason is Reason.ROSTER_TOO_SMALL
    # Among the dealers, and among the survivors.
    fleet = GroupFleet(12, 3).until(Phase.MASK)  # type: ignore[assignment]
    name = fleet.groups[0][0]
    one = ReceivedDealings(fleet.inbox[name].dealings[:1])
    assert refusal(fleet.states[name].on_dealings, one).reason is Reason.DEALINGS_TOO_FEW
    fleet.play()
    two = Survivors(fleet.groups[0][:2])
    assert refusal(fleet.states[name].on_survivors, two).reason is Reason.SURVIVORS_TOO_FEW


def test_survivors_of_another_group_do_not_count() -> None:
    fleet = GroupFleet(12, 3).until(Phase.CONFIRM)
    first, second, _ = fleet.groups  # type: ignore[attr-defined]
    mixed = Survivors((*first[:2], second[0]))
    refused = refusal(fleet.states[first[0]].on_survivors, mixed)
    assert (refused.reason, refused.member) == (Reason.SURVIVORS_NOT_DEALT, second[0])


def test_confirmations_of_another_group_do_not_count() -> None:
    fleet = GroupFleet(12, 3).until(Phase.UNMASK)
    first, second, _ = fleet.groups  # type: ignore[attr-defined]
    own, others = fleet.inbox[first[0]].confirmations, fleet.inbox[second[0]].confirmations
    mixed = Confirmations((*own[:2], others[0]))
    refused = refusal(fleet.states[first[0]].on_confirmations, mixed)
    assert (refused.reason, refused.member) == (Reason.CONFIRMATIONS_FOREIGN_MEMBER, second[0])
    # Two of the member's own group are too few, although enough of the cohort have signed.
    few = Confirmations(own[:2])
    assert refusal(fleet.states[first[0]].on_confirmations, few).reason is Reason.CONFIRMATIONS_TOO_FEW


def test_two_lists_of_survivors_of_a_group_are_never_both_confirmed() -> None:
    # One of four members is corrupt and signs both lists. However the lists are shown to the three honest ones, both
    # can be confirmed only if an honest member signs both.
    (corrupt, *honest), _, _ = GroupFleet(12, 3).until(Phase.CONFIRM).groups  # type: ignore[attr-defined]
    seen = set()
    for shown in itertools.product((0, 1), repeat=3):
        # The same attempt twice, byte by byte; one list is signed in each.
        answered = []
        for number, left_out in enumerate((honest[-1], None)):
            fleet = GroupFleet(12, 3).until(Phase.CONFIRM)
            group = fleet.groups[0]  # type: ignore[attr-defined]
            survivors = Survivors(tuple(name for name in group if name != left_out))
            told = [name for name, each in zip(honest, shown, strict=True) if each == number and name != left_out]
            signed = {name: fleet.states[name].on_survivors(survivors) for name in (corrupt, *told)}
            confirmations = Confirmations(tuple(confirmation for _, confirmation in signed.values()))
            answered.append(0)
            for name in told:
                try:
                    signed[name][0].on_confirmations(confirmations)
                    answered[-1] += 1
                except Refusal as refused:
                    seen.add(refused.reason)
        assert not all(answered), shown
        seen.update(number for number in (0, 1) if answered[number])
    # Each of the two lists alone would have been unmasked; only the count prevents it.
    assert seen == {0, 1, Reason.CONFIRMATIONS_TOO_FEW}
    # A member that signed one list does not sign the other.
    fleet = GroupFleet(12, 3).until(Phase.CONFIRM)
    state = fleet.states[honest[0]]
    state.on_survivors(Survivors(fleet.groups[0]))  # type: ignore[attr-defined]
    assert refusal(state.on_survivors, Survivors(fleet.groups[0][:3])).reason is Reason.SECOND_SURVIVORS  # type: ignore[attr-defined]


def test_an_unusable_key_is_refused_by_its_group() -> None:
    fleet = GroupFleet(12, 3)
    liar = fleet.identities["m5"]
    honest = fleet.act("m5", Phase.ADVERTISE)
    unsigned = dataclasses.replace(honest, keys=b"\xff" * 3 + honest.keys[3:])
    weak = dataclasses.replace(unsigned, signature=liar.sign(advertisement_statement(fleet.context, unsigned)))
    entries = {name: fleet.act(name, Phase.ADVERTISE) for name in names(12)}
    roster = Roster(tuple((entries | {"m5": weak}).values()))
    beside = Session.of(fleet.context, roster.advertisements).neighbours("m5")
    for name in names(12):
        if name in beside:
            refused = refusal(fleet.states[name].on_roster, roster)
            assert (refused.reason, refused.member) == (Reason.ROSTER_KEY_INVALID, "m5")
        elif name != "m5":
            fleet.states[name].on_roster(roster)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((3, 0, 0, 1), "4 to 10000 members can be split into groups, not 3"),
        ((10_001, 10, 0, 2), "4 to 10000 members can be split into groups, not 10001"),
        ((10, 10, 0, 2), "corrupt counts members: 0 to 9 in a cohort of 10, got 10"),
        ((100, 10, -1, 2), "lost counts members: 0 to 99 in a cohort of 100, got -1"),
        ((100, 10, 100, 2), "lost counts members: 0 to 99 in a cohort of 100, got 100"),
    ],
)
def test_impossible_counts_of_members_are_named(numbers, says):
    with pytest.raises(NoParameters, match=f"^{says}$"):
        find_groups(*numbers)


def test_as_many_as_may_be_lost_may_be_missing_from_the_roster():
    for numbers in ((240, 30, 10, 2), (1000, 50, 50, 10)):
        graph, _ = find_groups(*numbers)
        assert graph.absent >= numbers[2]
