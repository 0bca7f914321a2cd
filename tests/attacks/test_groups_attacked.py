"""Groups under attack: a member scales its update, a coordinator picks its groups or subtracts their sums.

Each attack succeeds on the unprotected baseline and fails on ours.
"""

import numpy as np
import pytest

from edge_client.policy.policy import Policy, PolicyRefusal
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from secure_agg import Abandoned, ContextInvalid, Phase, grouped_thresholds, session
from secure_agg.groups import GroupsOf, corrupt_in_group, draw_groups
from tacit.job import Aggregation
from tacit.mechanism import GaussianUpdate
from tacit.reason import Reason
from tacit.vector import layout_of
from tests.support import fleet as support
from tests.support.fleet import VALUES, Fleet, job_document
from tests.support.group_fleet import GroupFleet
from tests.support.sum_fleet import names

POLICY = Policy(mechanisms=("none",), assumed_corrupt=1)


# ---- a lying member --------------------------------------------------------------------------------------------------


def trained_with_a_liar(rule, scale, *, groups=5, members=15, count=1, liars=("m6",)):
    """Honest members change every value by about 0.01. The liar says `scale`, and claims the largest weight."""
    numbers = {"combine": rule} if groups else {}
    job = job_document(
        Aggregation(groups=groups, assumed_corrupt=1, coordinate_bound=100.0, max_weight=1000, **numbers),
        count=count,
        min_members=members,
        target_members=members,
    )
    fleet = fleet_of(job, members, scale, liars).connect().run()
    fleet.check()
    assert fleet.state.version_number == count
    return fleet.versions[fleet.state.version]


def fleet_of(job, members, scale, liars, policy=POLICY):
    fleet = Fleet(members, policy=policy, job=job)

    def trained(member, assignment):
        liar = member.name in liars
        change = np.full(VALUES, scale) if liar else fleet.random.normal(0.01, 0.001, VALUES)
        examples = 1000 if liar else 50
        fleet.hand_over(
            member, assignment, Update(change.astype(np.float32), examples, examples, examples // 2, examples)
        )

    fleet._trained = trained
    return fleet


@pytest.mark.parametrize("scale", [1.0, 10.0, 99.0])
def test_one_member_moves_the_baselines_at_will(scale):
    # One sum moves most of the way, by the weight that the liar claims. The mean over groups moves by a fifteenth of
    # it, since the liar weighs as much as everybody else, and so as far as it likes.
    assert trained_with_a_liar("mean", scale, groups=None).min() > 0.5 * scale
    moved = trained_with_a_liar("mean", scale)
    assert moved.min() > scale / 16
    assert moved.min() > 0.05


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "reject-outliers"])
@pytest.mark.parametrize("scale", [1.0, 10.0, 99.0, -99.0])
def test_a_robust_version_stays_near_the_others_however_far_one_scales(rule, scale):
    moved = trained_with_a_liar(rule, scale)
    # Within the range of the good groups' means, up to a step of the grid.
    assert 0.008 < moved.min() <= moved.max() < 0.012


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_liars_in_most_groups_break_every_rule(rule):
    # The assumption is needed: nine of fifteen are in at least three groups of five, wherever they are drawn.
    liars = tuple(f"m{number}" for number in range(9))
    assert trained_with_a_liar(rule, 99.0, liars=liars).min() > 10


class OutOfBounds:
    """A liar's own software: the first value of its vector is as far out as the ring goes."""

    def __init__(self, real):
        self.real = real

    def encode(self, job, update, cohort, random):
        vector = self.real.encode(job, update, cohort, random)
        vector[0] = 2 ** (layout_of(job, cohort).bits - 1) - 1
        return vector


def lying(job, examples):
    """Replaces `protection_of` on every machine. The liar is recognised by its number of examples."""
    real = protection_of(job, examples)
    return OutOfBounds(real) if examples == 1000 else real


@pytest.mark.parametrize("mechanism", ["none", "gaussian-update"])
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "reject-outliers"])
def test_a_coordinate_out_of_bounds_stops_no_job_and_moves_no_version(rule, mechanism, monkeypatch):
    # The rule needs all three groups. If the liar's were discarded, no attempt would give a version.
    job = job_document(Aggregation(groups=3, assumed_corrupt=1, combine=rule), count=3, min_members=12)
    if mechanism != "none":
        job = job.model_copy(update={"mechanism": GaussianUpdate(noise_multiplier=1e-5, clip=1.0)})
    policy = POLICY.model_copy(update={"mechanisms": (mechanism,)})
    fleet = fleet_of(job, 12, 0.01, ("m6",), policy)

    monkeypatch.setattr(support, "protection_of", lying)
    fleet.connect().run()
    fleet.check()
    assert fleet.state.version_number == 3
    groups = [count.fields for count in fleet.counts if count.what == "groups"]
    assert groups == [{"combined": 2, "lost": 0, "invalid": 1, "outliers": 0}] * 3
    moved = fleet.versions[fleet.state.version]
    assert 0.024 < moved.min() <= moved.max() < 0.036


@pytest.mark.parametrize("mechanism", ["none", "gaussian-update"])
def test_a_coordinate_out_of_bounds_stops_one_sum(mechanism, monkeypatch):
    # The baseline: no attempt with the liar in its cohort gives a version.
    job = job_document(Aggregation(assumed_corrupt=1), count=1, min_members=12, max_attempts=1, max_failed_rounds=1)
    if mechanism != "none":
        job = job.model_copy(update={"mechanism": GaussianUpdate(noise_multiplier=1e-5, clip=1.0)})
    fleet = fleet_of(job, 12, 0.01, ("m6",), POLICY.model_copy(update={"mechanisms": (mechanism,)}))
    monkeypatch.setattr(support, "protection_of", lying)
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert fleet.ends()[0].reason == Reason.REASON_RESULT_INVALID


# ---- a coordinator that picks groups ---------------------------------------------------------------------------------

CORRUPT = frozenset({"m0", "m1", "m2"})
VICTIM = "m9"


def opened_around_the_victim(monkeypatch, draw):
    """What the coordinator learns about the victim if the victim's group holds its own three members."""
    if draw is not None:
        monkeypatch.setattr(session, "drawn", draw)
    fleet = GroupFleet(12, 3)
    groups = fleet.run()
    assert not isinstance(groups, Abandoned)
    survivors, total = next(each for each in groups.values() if VICTIM in each[0])
    honest = set(survivors) - CORRUPT
    rest = total.copy()
    for name in set(survivors) & CORRUPT:
        rest -= fleet.inputs[name]
    return fleet, honest, rest


def chosen(root, members, groups):
    """The coordinator's choice: its own members around the victim."""
    others = sorted(set(members) - CORRUPT - {VICTIM})
    return (tuple(sorted({*CORRUPT, VICTIM})), tuple(others[:4]), tuple(others[4:]))


def given(root, members, groups):
    """The graph of the coordinator's choice."""
    return GroupsOf(chosen(root, members, groups))


def test_groups_chosen_by_the_coordinator_reveal_a_member(monkeypatch):
    fleet, honest, rest = opened_around_the_victim(monkeypatch, given)
    assert honest == {VICTIM}
    assert np.array_equal(rest, fleet.inputs[VICTIM])


def test_drawn_groups_reveal_nobody_and_weak_numbers_are_refused(monkeypatch):
    fleet, honest, rest = opened_around_the_victim(monkeypatch, None)
    assert len(honest) >= 2
    assert not np.array_equal(rest, fleet.inputs[VICTIM])
    # With three assumed corrupt, groups of four guarantee nothing, so there is no such attempt.
    assert corrupt_in_group(12, 3, 4, 3, 80) == 3
    with pytest.raises(ContextInvalid):
        grouped_thresholds(12, 3, 3)


def test_members_draw_groups_themselves_and_follow_no_coordinator(monkeypatch):
    # The members' draw is the real one, the server's is not, and it accepts none of their dealings.
    fleet = GroupFleet(12, 3)
    assert fleet.play() is None
    states = {name: state.on_roster(fleet.inbox[name]) for name, state in fleet.states.items()}
    groups = draw_groups(fleet.server.session.root, names(12), 3)
    wanted = chosen(None, names(12), 3)
    assert set(groups) != set(wanted)
    monkeypatch.setattr(session, "drawn", given)
    liar = GroupFleet(12, 3)
    assert liar.play() is None
    assert liar.server.session.groups == wanted
    for name, (_, dealing) in states.items():
        answer = liar.server.receive(name, dealing)
        assert answer.reason == "dealing_receivers_wrong", name


# ---- a coordinator that subtracts ------------------------------------------------------------------------------------


def test_sums_over_two_draws_reveal_a_member_so_no_second_vector_is_sent():
    # The same updates twice, drawn anew, the second time without the victim. Each member's own groups look different.
    first, second = GroupFleet(12, 3), GroupFleet(12, 3, attempt=2)
    one, two = first.run(), second.run({Phase.ADVERTISE: {VICTIM}})
    assert not isinstance(one, Abandoned)
    assert not isinstance(two, Abandoned)
    assert np.array_equal(first.inputs["m3"], second.inputs["m3"])
    leaked = sum(total for _, total in one.values()) - sum(total for _, total in two.values())
    assert np.array_equal(leaked, first.inputs[VICTIM])
    # No rule on the survivors of one's own group can see that: many members' groups differ in more than n_C + 2.
    own = {
        name: [set(survivors) for groups in (one, two) for survivors, _ in groups.values() if name in survivors]
        for name in names(12)
    }
    apart = [name for name, sets in own.items() if len(sets) == 2 and len(sets[0] ^ sets[1]) >= 3]
    assert len(apart) > 6
    # So without noise the second vector is not sent.
    update = bytes(32)
    POLICY.check_vector(update, (), grouped=True)
    with pytest.raises(PolicyRefusal, match="allow_second_sum"):
        POLICY.check_vector(update, (update,), grouped=True)
    POLICY.check_vector(update, (update,), grouped=False)
    POLICY.model_copy(update={"allow_second_sum": True}).check_vector(update, (update,), grouped=True)
