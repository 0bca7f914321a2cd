"""A coordinator that opens two sums of the same updates and subtracts them.

Without noise nothing but the members' own rules stands against it: the attack succeeds on members that allow close sums
(the unprotected baseline) and fails on those that do not.
"""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

import secure_agg
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from edge_client.contribution import Update
from edge_client.journal import Journal
from edge_client.privacy.policy import Policy, PolicyRefusal
from edge_client.session import states
from tacit.attempt import AttemptId
from tacit.context import application_digest
from tacit.messages import Assignment, AttemptMessage, AttemptOpened, AttemptRefusal
from tacit.reason import Reason
from tacit.vector import layout_of
from tests.support.fleet import VALUES, Fleet, job_document
from tests.unit.secure_agg.sum_fleet import FEDERATION


def subtracting(policy):
    """Attempt 1 over five, said to have failed; attempt 2 over the same updates without m4. What both sums give."""
    fleet = Fleet(5, policy=policy)
    sums = {}
    carry_out = fleet._effect

    def effect(wanted):
        if isinstance(wanted, fx.Compute) and len(sums) < 2:
            total = fleet._totals[wanted.attempt][0].copy()
            wanted.opened.unmask(total)
            sums[wanted.survivors] = total
            fleet.cut("m4")
            fleet.post(ev.ComputeFailed(wanted.attempt, Reason.REASON_INTERNAL, "so it says"))
        else:
            carry_out(wanted)

    fleet._effect = effect
    fleet.connect().run(lambda: bool(sums))
    victims = fleet.members["m4"].update
    fleet.run(lambda: len(sums) == 2, hours=2)
    return fleet, sums, victims


def test_the_baseline_gives_away_one_members_update():
    open_hearted = Policy(mechanisms=("none",), allow_close_sums=True)
    fleet, sums, victim = subtracting(open_hearted)
    (first, second) = sums.values()
    one, two = layout_of(fleet.job, 5).decode(first), layout_of(fleet.job, 4).decode(second)
    leaked = (one["update"] - two["update"]) * fleet.job.aggregation.max_weight / victim.examples
    assert np.allclose(leaked, victim.change, atol=1e-3)
    assert one["weight"][0] - two["weight"][0] == victim.examples


def test_members_do_not_confirm_a_second_sum_that_differs_by_one():
    fleet, sums, _ = subtracting(Policy(mechanisms=("none",)))
    assert len(sums) == 1
    refused = [
        message.payload.reason
        for member in fleet.members.values()
        for message in member.said
        if isinstance(getattr(message, "payload", None), AttemptRefusal)
    ]
    # After as many tries as their policies allow they decline altogether.
    assert refused.count(Reason.REASON_POLICY_CLOSE_SUMS) >= 4
    assert set(refused) <= {Reason.REASON_POLICY_CLOSE_SUMS, Reason.REASON_POLICY_ATTEMPTS}


def test_the_same_members_again_is_no_second_sum():
    Policy().check_sum("abcde", ["abcde"], 1)
    with pytest.raises(PolicyRefusal):
        Policy().check_sum("abcd", ["abcde"], 1)
    with pytest.raises(PolicyRefusal):
        Policy().check_sum("abcdf", ["abcde"], 1)
    Policy().check_sum("abfgh", ["abcde"], 1)
    with pytest.raises(PolicyRefusal):
        Policy().check_sum("abcdeghi", ["abcdef", "abcdeghijk"], 3)
    Policy(allow_close_sums=True).check_sum("abcd", ["abcde"], 1)


def test_a_restart_does_not_forget_which_sums_there_were(tmp_path):
    attempt = AttemptId("questions", 1, 1)
    journal = Journal(tmp_path / "journal.db", FEDERATION)
    journal.joined(attempt, bytes(32), bytes(32))
    journal.opened(attempt)
    journal.signed(attempt, ("a", "b", "c"))
    # No close: the process was killed.
    sent = Journal(tmp_path / "journal.db", FEDERATION).memory().sent_for("questions", 1, b"other")
    assert [each.survivors for each in sent] == [frozenset("abc")]


def test_another_version_for_the_same_round_is_refused_once_a_vector_has_left():
    fleet = Fleet(5)
    fleet.connect().run(lambda: bool(fleet.ends()))
    victim = fleet.members["m0"]
    assert len(victim.opened) == 1
    version = bytes([5]) * 32
    assignment = Assignment("questions", 1, fleet.job.digest(), version, 0, 1000)
    fleet.tell("m0", states.Received(assignment))
    fleet.tell("m0", states.Prepared(assignment, fleet.job))
    layout = layout_of(fleet.job, 5)
    threshold, corrupt = secure_agg.default_thresholds(5)
    context = secure_agg.RoundContext(
        federation=FEDERATION,
        job="questions",
        round=1,
        attempt=9,
        application=application_digest(fleet.job, layout),
        model=version,
        cohort=5,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=layout.values,
        bits=layout.bits,
    )
    opened = AttemptMessage(AttemptId("questions", 1, 9), AttemptOpened(context))
    fleet.tell("m0", states.Received(opened))
    refusals = [
        message.payload for message in victim.said if isinstance(getattr(message, "payload", None), AttemptRefusal)
    ]
    assert refusals[-1].reason == Reason.REASON_CONTEXT_UNEXPECTED
    assert "another version" in refusals[-1].detail
    assert len(victim.opened) == 1


def test_a_cohort_that_no_attempt_of_the_job_can_have_is_refused_and_does_not_end_the_member():
    fleet = Fleet(5).connect()
    fleet.run(lambda: isinstance(fleet.members["m0"].state.phase("questions"), states.Holding))
    context = secure_agg.RoundContext(
        FEDERATION, "questions", 1, 1, bytes(32), fleet.job.weights, 2, 2, 0, layout_of(fleet.job, 5).values, 32
    )
    fleet.tell("m0", states.Received(AttemptMessage(AttemptId("questions", 1, 1), AttemptOpened(context))))
    said = [getattr(message, "payload", None) for message in fleet.members["m0"].said]
    refusals = [payload.reason for payload in said if isinstance(payload, AttemptRefusal)]
    assert refusals == [Reason.REASON_CONTEXT_UNEXPECTED]


def next_round(policy):
    """Round 1 over five, said to have failed; then round 2 without m4, from a version that differs in one bit. The same
    data gives the same change: batches in another order are all that would blur it.
    """
    fleet = Fleet(5, policy=policy, job=job_document(attempts=1))
    updates = {
        name: Update(np.random.default_rng(number).uniform(-0.5, 0.5, VALUES).astype(np.float32), 10, 1.0, 1, 10)
        for number, name in enumerate(fleet.members)
    }

    def trained(member, assignment):
        member.update = updates[member.name]
        fleet.tell(member.name, states.Prepared(assignment, fleet.job))

    nearly = np.zeros(VALUES, np.float32)
    nearly[0] = 1e-45
    digest = hashlib.sha256(nearly.tobytes()).digest()
    fleet.versions[digest] = nearly
    sums, carry_out = {}, fleet._effect

    def effect(wanted):
        if isinstance(wanted, fx.Compute) and len(sums) < 2:
            total = fleet._totals[wanted.attempt][0].copy()
            wanted.opened.unmask(total)
            sums[wanted.survivors] = total
            fleet.state = replace(fleet.state, version=digest)
            fleet.cut("m4")
            fleet.post(ev.ComputeFailed(wanted.attempt, Reason.REASON_INTERNAL, "so it says"))
        else:
            carry_out(wanted)

    fleet._trained, fleet._effect = trained, effect
    fleet.connect().run(lambda: len(sums) == 2, hours=2)
    return fleet, sums, updates["m4"]


def test_nearly_the_same_version_in_the_next_round_is_what_no_member_sees():
    """What docs/threat-model.md does not promise: without noise the rule holds within a version or round."""
    fleet, sums, victim = next_round(Policy(mechanisms=("none",)))
    (first, second) = sums.values()
    one, two = layout_of(fleet.job, 5).decode(first), layout_of(fleet.job, 4).decode(second)
    leaked = (one["update"] - two["update"]) * fleet.job.aggregation.max_weight / victim.examples
    # But for the rounding of nine vectors.
    assert np.allclose(leaked, victim.change, atol=0.01)
