"""A coordinator that gathers its own members around a victim: by picking the cohort, by grinding, by dropping members.

Each attack succeeds on the unprotected baseline and fails on ours, or succeeds no more often than the stated bound.
"""

import dataclasses
import hmac
import itertools
from fractions import Fraction

import numpy as np
import pytest

from secure_agg import (
    Abandoned,
    ContextInvalid,
    Dealing,
    GroupRoster,
    Phase,
    Reason,
    Refusal,
    advertise,
    grouped_thresholds,
    merkle,
    session,
)
from secure_agg.certificates import by_digest
from secure_agg.groups import GroupsOf, corrupt_in_group, draw_groups
from secure_agg.session import Session, grouped_root, roster_entry
from secure_agg.transcript import Purpose, digest
from tests.support.group_fleet import GroupFleet, grouped_context
from tests.support.sum_fleet import SeededRandom, TestIdentity, key_of, names, verify

SYBILS = frozenset({"m0", "m1", "m2"})
VICTIM = "m9"


def around(root, members, groups):
    """The split that the coordinator picks: its three members and the victim are one group."""
    own = {name for name in members if name in SYBILS}
    others = sorted(set(members) - own - {VICTIM})
    return GroupsOf((tuple(sorted({*own, VICTIM})), tuple(others[:4]), tuple(others[4:])))


class Apart(GroupFleet):
    """A fleet whose members get the rosters of their groups."""

    def act(self, member, phase):
        if phase is not Phase.SHARE:
            return super().act(member, phase)
        found = self.server.session
        parts = [*found.certificates.values(), *found.keys.values()]
        self.states[member], sent = self.states[member].on_roster(found.roster_of(found.group_of(member)), parts)
        return sent


# ---- picking the cohort ----------------------------------------------------------------------------------------------


def test_a_cohort_that_the_coordinator_picks_gives_it_the_victims_vector(monkeypatch):
    # The baseline: members take the group that they are given.
    monkeypatch.setattr(session, "drawn", around)
    fleet = Apart(12, 3)
    opened = fleet.run()
    assert not isinstance(opened, Abandoned)
    survivors, total = next(each for each in opened.values() if VICTIM in each[0])
    for sybil in SYBILS:
        total -= fleet.inputs[sybil]
    assert set(survivors) - SYBILS == {VICTIM}
    assert np.array_equal(total, fleet.inputs[VICTIM])


def test_a_cohort_that_the_nonces_draw_does_not():
    fleet = Apart(12, 3)
    assert fleet.play() is None
    real = fleet.server.session
    # The same roster with the coordinator's choice of its group: every entry is proven, and the draw is another.
    group = around(real.root, real.members, 3).groups[0]
    paths = tuple(real.tree.path(real.rank(name)) for name in group)
    roster = GroupRoster(real.members, tuple(real.entries[name] for name in group), paths)
    parts = [*real.certificates.values(), *real.keys.values()]
    with pytest.raises(Refusal) as caught:
        fleet.states[VICTIM].on_roster(roster, parts)
    assert caught.value.reason is Reason.ROSTER_MALFORMED
    assert "the group that the roster draws" in caught.value.detail


def test_sybils_at_many_places_of_a_roster_are_refused():
    # One entry at many places would fill most places of every group: a victim sees only its own group's.
    fleet = Apart(12, 3)
    assert fleet.play() is None
    real = fleet.server.session
    many = tuple(sorted((*SYBILS, *SYBILS, *SYBILS, *sorted(set(real.members) - SYBILS)[-3:])))
    assert VICTIM in many
    assert len(many) == 12
    # Without the check that names are distinct, the victim's group holds hardly anybody else.
    crowded = [draw_groups(number.to_bytes(32, "big"), many, 3) for number in range(50)]
    shares = [sum(name in SYBILS for name in group) for drawn in crowded for group in drawn if VICTIM in group]
    assert sum(shares) / len(shares) > 2
    tree = merkle.Tree([roster_entry(real.entries[name]) for name in many], Purpose.ROSTER_NODE)
    drawn = GroupsOf(draw_groups(grouped_root(many, tree.root), many, 3))
    group = drawn.receivers(VICTIM)
    paths = tuple(tree.path(many.index(name)) for name in group)
    with pytest.raises(Refusal) as caught:
        fleet.states[VICTIM].missing(GroupRoster(many, tuple(real.entries[name] for name in group), paths))
    assert "distinct" in caught.value.detail


def test_names_that_are_invented_once_the_draw_is_known_gather_nobody():
    # 11 sybils and a victim among 48 names, in four groups. The other 36 belong to nobody, and the coordinator chooses
    # them last: three between each two of its own in the order of the draw, so that all of these fall into one group.
    own = [f"a{number:02}" for number in range(11)] + ["b-victim"]
    leaves = [bytes([place]) * 32 for place in range(48)]
    tree = merkle.Tree(leaves, Purpose.ROSTER_NODE).root
    known = grouped_root((*own, *(f"c{number:02}" for number in range(36))), tree)

    def order(name):
        return hmac.digest(digest(Purpose.GROUPS, known), name.encode(), "sha256")

    ranks = sorted(map(order, own))
    gaps = [at for at, _ in enumerate(ranks) for _ in range(3)]
    invented = []
    for number, at in enumerate(gaps):
        # The name's place in the tree stays, since its beginning decides that.
        candidates = (f"c{number:02}-{tried}" for tried in itertools.count())
        above = ranks[at + 1] if at + 1 < len(ranks) else bytes([255]) * 33
        invented.append(next(name for name in candidates if ranks[at] < order(name) < above))
    names_then = (*own, *invented)
    assert list(names_then) == sorted(names_then)
    # The baseline: a seed that does not depend on the names of other groups.
    (group,) = (group for group in draw_groups(known, names_then, 4) if "b-victim" in group)
    assert set(group) == set(own)
    # Ours: other names are another root, so another draw, in which they are as good as any.
    (group,) = (group for group in draw_groups(grouped_root(names_then, tree), names_then, 4) if "b-victim" in group)
    assert len(set(group) & set(own)) < 8


# ---- grinding --------------------------------------------------------------------------------------------------------


def ground(fleet, tries):
    """The draws that a coordinator can choose from: it advertises last, and varies the nonce of one of its members."""
    real = fleet.server.session
    for number in range(tries):
        own = dataclasses.replace(real.entries["m0"], nonce=number.to_bytes(32, "big"))
        yield Session.by_digest(real.context, {**real.entries, "m0": own}.values(), {}, {}).groups


def test_grinding_gathers_the_sybils_where_a_group_may_hold_them_all():
    # 12 members in three groups: all three sybils are in one of them in 3 * 9 of 495 draws. Tries help, as stated.
    fleet = GroupFleet(12, 3)
    assert fleet.play() is None
    tries = 600
    together = sum(any(set(group) >= SYBILS for group in groups) for groups in ground(fleet, tries))
    chance = Fraction(27, 495)
    assert together > 0
    assert abs(together - tries * chance) < 4 * float(tries * chance) ** 0.5
    # With one victim beside them, the fleet's numbers would give it away. So nobody accepts such numbers: c would be
    # three of four at 80 bits, and no threshold leaves two honest members.
    assert corrupt_in_group(12, 3, 4, 3, 80) == 3
    with pytest.raises(ContextInvalid):
        grouped_thresholds(12, 3, 3)


@pytest.mark.parametrize("bits", [0, 3, 6])
def test_the_best_of_many_draws_exceeds_the_bound_no_more_often_than_stated(bits):
    # 2^k tries cost k of the sigma bits. At sigma = 9, the best of 2^k draws has a group above c in at most 2^(k - 9).
    sigma, repeats = 9, 48
    bad, c = set(names(48)[:10]), corrupt_in_group(48, 10, 12, 4, sigma)
    broken = 0
    for repeat in range(repeats):
        tries = (
            draw_groups(bytes([repeat, bits]) + number.to_bytes(30, "big"), names(48), 4) for number in range(2**bits)
        )
        broken += any(len(bad.intersection(group)) > c for drawn in tries for group in drawn)
    bound = repeats * 2.0 ** (bits - sigma)
    assert broken <= bound + 4 * bound**0.5 + 1


# ---- dropping members after the draw ---------------------------------------------------------------------------------


def test_members_dropped_after_the_draw_leave_h_honest_inputs_or_no_sum():
    # 15 members in three groups of five, one of them corrupt: t = 4, h = 3.
    for lost, opens in ((1, True), (2, False)):
        fleet = Apart(15, 3)
        assert fleet.play() is None
        (group,) = (each for each in fleet.groups if "m0" in each)
        dropped = [name for name in group if name != "m0"][:lost]
        number = fleet.server.session.group_of("m0")
        for phase in list(Phase)[1:]:
            assert fleet.play(dropped if phase is Phase.MASK else ()) is None
        sums = {at: opened.survivors for at, opened in fleet.server.by_group()}
        assert (number in sums) == opens
        if opens:
            assert len(set(sums[number]) - {"m0"}) == fleet.context.honest == 3


def test_members_corrupted_after_a_victims_nonce_are_beyond_the_theorem():
    """Its assumption is needed: corrupt members are chosen before any honest nonce, not before the last one."""
    context = grouped_context(120, 4, 30)
    everybody = tuple(sorted(names(120)))
    victim, silent = everybody[0], everybody[-1]
    states, sent = {}, {}
    for name in everybody[:-1]:
        random = SeededRandom(name)
        states[name], sent[name] = advertise(context, TestIdentity(name), verify, random, key_of=key_of)
    # One honest member has not spoken. Any bytes in its place make a root, and nobody outside its group looks at them.
    for tried in itertools.count():
        junk = digest(Purpose.ROSTER_NODE, tried.to_bytes(4, "big"))
        leaves = [junk if name == silent else roster_entry(sent[name]) for name in everybody]
        tree = merkle.Tree(leaves, Purpose.ROSTER_NODE)
        groups = draw_groups(grouped_root(everybody, tree.root), everybody, 4)
        group = next(each for each in groups if victim in each)
        if silent not in group:
            break
    # Only now the coordinator chooses whom it corrupts: n_C members, as many as fit beside the victim.
    corrupt = set(group) - {victim}
    assert context.corrupt_in_sum < len(corrupt) <= context.assumed_corrupt
    paths = tuple(tree.path(everybody.index(name)) for name in group)
    roster = GroupRoster(everybody, tuple(by_digest(sent[name]) for name in group), paths)
    parts = [part for name in group for part in (sent[name].certificate, sent[name].keys)]
    _, dealing = states[victim].on_roster(roster, parts)
    assert isinstance(dealing, Dealing)
    # The threshold promises t - c honest inputs. Here all others of the group are corrupt.
    assert context.threshold - len(corrupt) < context.honest
