"""A cohort in groups through both real machines: each group has its own sum, and the job's rule combines them."""

import dataclasses

import numpy as np
import pytest

import secure_agg
from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from edge_client.policy.policy import Policy
from secure_agg.member import share
from tacit.job import Aggregation
from tacit.mechanism import DistributedGaussian, GaussianUpdate
from tacit.messages import AttemptMessage, AttemptOpened, AttemptRefusal, Decline
from tacit.reason import Reason
from tests.support.fleet import VALUES, Fleet, job_document

POLICY = Policy(mechanisms=("none",), assumed_corrupt=1)
# Group 0 of twelve members in three groups has four; with n_C = 1, three of them make a sum.
PHASES = {
    AttemptOpened: "advertise",
    secure_agg.GroupRoster: "share",
    secure_agg.ReceivedDealings: "mask",
    secure_agg.Survivors: "confirm",
    secure_agg.Confirmations: "unmask",
}


def grouped(members=12, groups=3, policy=POLICY, *, numbers=None, **rounds):
    aggregation = Aggregation(groups=groups, assumed_corrupt=1, **(numbers or {"min_groups": 2}))
    job = job_document(aggregation, **{"count": 1, "min_members": members, **rounds})
    return Fleet(members, policy=policy, job=job)


def groups_of(fleet):
    """The present split, as the coordinator computed it."""
    return fleet.state.phase.protocol.session.groups


def counted(fleet, what):
    return [count.fields for count in fleet.counts if count.what == what]


def test_a_job_in_groups_runs_to_its_end_with_a_sum_for_each_group():
    fleet = grouped(count=3).connect().run()
    fleet.check()
    assert fleet.state.status is JobStatus.FINISHED
    assert fleet.state.version_number == 3
    assert not fleet.results
    draws = []
    for groups in fleet.group_results.values():
        assert sorted(groups) == [0, 1, 2]
        assert sorted(name for survivors, _ in groups.values() for name in survivors) == sorted(fleet.members)
        draws.append(tuple(survivors for survivors, _ in groups.values()))
    assert len(set(draws)) == 3  # Drawn anew in every attempt.
    assert all(fields == {"combined": 3, "lost": 0, "invalid": 0, "outliers": 0} for fields in counted(fleet, "groups"))


def test_the_mean_over_groups_is_the_mean_of_one_sum():
    # With max_weight 1 every member's examples count as one, so one sum weighs its members alike too.
    grouped_fleet = grouped(10).connect().run()
    one = Fleet(
        10, policy=POLICY, job=job_document(Aggregation(assumed_corrupt=1, max_weight=1), count=1, min_members=10)
    )
    one.connect().run()
    assert not np.array_equal(one.versions[one.state.version], np.zeros(6))
    assert np.allclose(grouped_fleet.versions[grouped_fleet.state.version], one.versions[one.state.version], atol=1e-5)
    # A group's sum holds nothing else about the members' data.
    assert all(len(vector) == VALUES for vector in grouped_fleet.inputs.values())
    assert grouped_fleet.ends()[0].training is None


@pytest.mark.parametrize("message", PHASES, ids=PHASES.values())
def test_one_member_lost_in_any_phase_costs_no_group(message):
    fleet = grouped()

    def lose(name, arriving):
        if name == "m2" and isinstance(getattr(arriving, "payload", None), message):
            fleet.kill(name)

    fleet.before = lose
    fleet.connect().run()
    fleet.check()
    end = fleet.ends()[0]
    assert end.published
    (groups,) = fleet.group_results.values()
    assert len(groups) == 3
    assert ("m2" in end.survivors) == (PHASES[message] in ("confirm", "unmask"))
    assert sorted(name for survivors, _ in groups.values() for name in survivors) == sorted(end.survivors)


@pytest.mark.parametrize("message", list(PHASES)[1:], ids=list(PHASES.values())[1:])
def test_a_group_below_its_threshold_is_lost_alone(message):
    fleet = grouped()
    lost = set()

    def lose(name, arriving):
        if isinstance(getattr(arriving, "payload", None), message):
            doomed = groups_of(fleet)[1][:2]
            if name in doomed:
                lost.add(name)
                fleet.kill(name)

    fleet.before = lose
    fleet.connect().run()
    fleet.check()
    end = fleet.ends()[0]
    assert end.published
    assert len(lost) == 2
    (groups,) = fleet.group_results.values()
    assert sorted(groups) == [0, 2]
    assert len(end.survivors) == 8
    of_the_group = {dropout.member: dropout.reason for dropout in end.dropouts}
    assert len(of_the_group) == 4
    # The rest of the group loses the attempt with it, is told so, and gets no blame.
    beside = {name for name, reason in of_the_group.items() if reason == Reason.REASON_GROUP_TOO_SMALL}
    assert beside == of_the_group.keys() - lost
    for name in beside:
        assert fleet.members[name].ended[0][1].reason == Reason.REASON_GROUP_TOO_SMALL
        assert fleet.state.members[name].faults == 0
    assert [(fields["phase"], fields["lost"]) for fields in counted(fleet, "groups_lost")] == [(PHASES[message], 1)]
    assert counted(fleet, "groups") == [{"combined": 2, "lost": 1, "invalid": 0, "outliers": 0}]


@pytest.mark.parametrize("message", list(PHASES)[1:], ids=list(PHASES.values())[1:])
def test_with_too_few_groups_left_the_attempt_is_abandoned(message):
    fleet = grouped(max_attempts=1, max_failed_rounds=1)

    def lose(name, arriving):
        if isinstance(getattr(arriving, "payload", None), message):
            first, second, _ = groups_of(fleet)
            if name in (*first[:2], *second[:2]):
                fleet.kill(name)

    fleet.before = lose
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    end = fleet.ends()[0]
    assert not end.published
    assert end.reason == Reason.REASON_THRESHOLD_LOST
    assert not fleet.group_results


def test_a_robust_rule_waits_for_all_the_groups_it_needs():
    # A median of two is their mean, so of three groups none may be lost.
    fleet = grouped(numbers={"combine": "median"}, max_attempts=1, max_failed_rounds=1)
    assert fleet.job.aggregation.groups_needed == 3

    def lose(name, arriving):
        if isinstance(getattr(arriving, "payload", None), secure_agg.GroupRoster) and name in groups_of(fleet)[2][:2]:
            fleet.kill(name)

    fleet.before = lose
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert fleet.ends()[0].reason == Reason.REASON_THRESHOLD_LOST


def test_members_missing_from_the_roster_leave_smaller_groups():
    fleet = grouped(10)
    fleet.lose = lambda name, message: (
        name in ("m3", "m7") and isinstance(getattr(message, "payload", None), secure_agg.Advertisement)
    )
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    end = fleet.ends()[0]
    # Eight members make groups of 3, 3 and 2. The last is too small for a sum, and its members never dealt.
    assert end.published
    (groups,) = fleet.group_results.values()
    assert sorted(len(survivors) for survivors, _ in groups.values()) == [3, 3]
    small = [dropout for dropout in end.dropouts if dropout.reason == Reason.REASON_GROUP_TOO_SMALL]
    assert [dropout.phase for dropout in small] == ["advertise", "advertise"]
    for dropout in small:
        said = [type(getattr(message, "payload", None)) for message in fleet.members[dropout.member].said]
        assert secure_agg.Dealing not in said


def test_a_dishonest_dealer_costs_at_most_its_own_group(monkeypatch):
    fleet = grouped()
    honest = share.deal_secret  # type: ignore[attr-defined]

    def dishonest(secret, threshold, points, random):
        dealt = honest(secret, threshold, points, random)
        if random is fleet.members["m2"].environment.random:
            # No two shares are on one polynomial, and each has a commitment to itself.
            return tuple(bytes([0, each[1] ^ (17 * at + 1)]) + each[2:] for at, each in enumerate(dealt))
        return dealt

    monkeypatch.setattr(share, "deal_secret", dishonest)
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    end = fleet.ends()[0]
    assert end.published
    (groups,) = fleet.group_results.values()
    assert len(groups) == 2
    assert "m2" not in end.survivors
    reasons = {dropout.member: dropout.reason for dropout in end.dropouts}
    assert reasons.pop("m2") == Reason.REASON_DEALER_SEED_INCONSISTENT
    assert set(reasons.values()) == {Reason.REASON_RECONSTRUCTION_FAILED}
    assert fleet.state.members["m2"].faults == 1
    assert all(fleet.state.members[name].faults == 0 for name in reasons)


def test_a_group_is_kept_while_other_shares_may_rebuild_a_secret(monkeypatch):
    # Four answers of a group of five can open its sum. Here the first four cannot, and the fifth makes it possible.
    fleet = grouped(15)
    honest = share.deal_secret  # type: ignore[attr-defined]

    def dishonest(secret, threshold, points, random):
        dealt = honest(secret, threshold, points, random)
        if random is fleet.members["m2"].environment.random:
            return (bytes([0, dealt[0][1] ^ 1]) + dealt[0][2:], *dealt[1:])
        return dealt

    monkeypatch.setattr(share, "deal_secret", dishonest)

    def delays(name, message):
        # The other groups are done by then. This one has as many answers as it needs, but one of them is bad.
        if isinstance(getattr(message, "payload", None), secure_agg.Unmasking):
            (group,) = (group for group in groups_of(fleet) if "m2" in group)
            return (5000,) if name == group[-1] else (5,)
        return (5,)

    fleet.delays = delays
    fleet.connect().run(lambda: bool(fleet.ends()))
    fleet.check()
    end = fleet.ends()[0]
    assert end.published
    (groups,) = fleet.group_results.values()
    assert len(groups) == 3
    assert [(lost.member, lost.reason) for lost in end.dropouts] == [("m2", Reason.REASON_DEALER_SEED_INCONSISTENT)]


# ---- a coordinator that lies about groups ----------------------------------------------------------------------------


def refused_by(fleet, name):
    return [
        message.payload.reason
        for message in fleet.members[name].said
        if isinstance(getattr(message, "payload", None), AttemptRefusal)
    ]


@pytest.mark.parametrize(
    "change",
    [{"groups": 2}, {"groups": 4, "absent": 2}, {"least": 1}, {"sigma": 40}, {"absent": 0}],
    ids=["fewer groups", "more and smaller groups", "fewer needed", "weaker promise", "another roster"],
)
def test_another_split_than_the_jobs_is_refused_before_a_key_is_shown(change):
    fleet = grouped(max_attempts=1)

    def bend(name, message):
        payload = getattr(message, "payload", None)
        if name == "m0" and isinstance(payload, AttemptOpened):
            graph = dataclasses.replace(payload.context.graph, **change)  # type: ignore[type-var]
            threshold = 4 if change == {"groups": 2} else 3
            context = dataclasses.replace(payload.context, graph=graph, threshold=threshold)
            return AttemptMessage(message.attempt, AttemptOpened(context))
        return message

    fleet.bend = bend
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert refused_by(fleet, "m0") == [Reason.REASON_CONTEXT_UNEXPECTED]
    kinds = [type(getattr(message, "payload", None)) for message in fleet.members["m0"].said]
    assert secure_agg.Advertisement not in kinds


def test_one_sum_instead_of_groups_is_refused_and_vice_versa():
    fleet = grouped(max_attempts=1)

    def bend(name, message):
        payload = getattr(message, "payload", None)
        if name == "m0" and isinstance(payload, AttemptOpened):
            context = dataclasses.replace(payload.context, graph=secure_agg.Graph.COMPLETE, threshold=7)
            return AttemptMessage(message.attempt, AttemptOpened(context))
        return message

    fleet.bend = bend
    fleet.connect().run(lambda: bool(fleet.ends()))
    assert refused_by(fleet, "m0") == [Reason.REASON_CONTEXT_UNEXPECTED]

    whole = Fleet(12, policy=POLICY, job=job_document(Aggregation(assumed_corrupt=1), count=1, max_attempts=1))

    def split(name, message):
        payload = getattr(message, "payload", None)
        if name == "m0" and isinstance(payload, AttemptOpened):
            graph, threshold, _ = secure_agg.grouped_thresholds(12, 3, 1)
            context = dataclasses.replace(payload.context, graph=graph, threshold=threshold)
            return AttemptMessage(message.attempt, AttemptOpened(context))
        return message

    whole.bend = split
    whole.connect().run(lambda: bool(whole.ends()))
    assert refused_by(whole, "m0") == [Reason.REASON_CONTEXT_UNEXPECTED]


def test_without_noise_a_second_vector_of_a_version_goes_into_no_group():
    # Every sum fails in its last phase, because nobody's confirmation arrives.
    fleet = grouped(max_attempts=3, max_failed_rounds=1)
    fleet.lose = lambda name, message: isinstance(getattr(message, "payload", None), secure_agg.Confirmation)
    fleet.connect().run()
    assert not fleet.group_results
    assert all(len(member.opened) == 1 for member in fleet.members.values())
    # The member declines before it shows a second key, so nobody masks for an attempt that it is not in.
    (declined,) = [message for message in fleet.members["m0"].said if isinstance(message, Decline)]
    assert declined.reason == Reason.REASON_POLICY_SECOND_SUM
    assert len(fleet.members["m0"].joined) == 1
    trusting = grouped(policy=POLICY.model_copy(update={"allow_second_sum": True}), max_attempts=2, max_failed_rounds=1)
    trusting.lose = fleet.lose
    trusting.connect().run()
    assert all(len(member.opened) == 2 for member in trusting.members.values())


NOISE = {
    "gaussian-update": GaussianUpdate(noise_multiplier=0.01, clip=10),
    "distributed-gaussian": DistributedGaussian(noise_multiplier=0.01, clip=10, honest=2),
}


@pytest.mark.parametrize("late", [secure_agg.Confirmation, secure_agg.Unmasking], ids=["confirm", "unmask"])
@pytest.mark.parametrize("mechanism", NOISE)
@pytest.mark.parametrize(
    ("members", "groups"),
    [
        pytest.param(9, 3, id="9/3"),
        # Close groups are rarer there, so more seeds are tried.
        pytest.param(12, 3, id="12/3", marks=pytest.mark.long),
        pytest.param(15, 5, id="15/5"),
    ],
)
def test_with_noise_a_failed_round_is_repeated_even_with_close_groups(members, groups, mechanism, late):
    numbers = Aggregation(groups=groups, assumed_corrupt=1, combine="median")
    job = job_document(numbers, count=1, min_members=members, max_attempts=2, max_failed_rounds=1)
    job = job.model_copy(update={"mechanism": NOISE[mechanism]})
    close = False
    seeds = iter(range(20))
    # Tries seeds until some groups differ in fewer than n_C + 2 members, which the rule for one sum would refuse.
    while not close:
        seed = next(seeds)
        fleet = Fleet(members, seed=seed, policy=POLICY.model_copy(update={"mechanisms": (mechanism,)}), job=job)
        fleet.lose = lambda name, message: (
            isinstance(message, AttemptMessage) and message.attempt.attempt == 1 and isinstance(message.payload, late)
        )
        fleet.connect().run()
        fleet.check()
        assert fleet.state.version_number == 1
        assert [(end.attempt.attempt, end.published) for end in fleet.ends()] == [(1, False), (2, True)]
        signed = [[sent.survivors for sent in member.state.memory.sent] for member in fleet.members.values()]
        assert all(len(each) == 2 for each in signed)
        close = any(0 < len(first ^ second) < 3 for first, second in signed)


def test_the_policys_minimum_group_is_checked_before_anything_is_fetched():
    fleet = grouped()
    strict = fleet.members["m0"]
    strict.environment = dataclasses.replace(
        strict.environment, policy=POLICY.model_copy(update={"min_group": 4, "min_cohort": 3})
    )
    fleet.connect().run(lambda: fleet.now_ms > 5_000)
    declined = fleet.state.members["m0"].declined
    assert declined is not None
    assert declined[0] == Reason.REASON_POLICY_COHORT
    assert "min_group" in declined[1]
    assert strict.joined == []


def test_an_attempt_in_groups_is_recorded():
    fleet = grouped().connect().run()
    end = fleet.ends()[0]
    assert isinstance(end, fx.EndAttempt)
    assert end.result is not None
    assert len(end.result) == 32
    assert end.survivors == tuple(sorted(fleet.members))
