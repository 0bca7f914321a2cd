"""A member lies, without a mechanism, to learn more about the others' numbers than a published version tells.

A version is divided by the sum of the weights. So a member that knows what it sent can solve for that sum: the number
of examples that the others hold together is not hidden from a member (docs/threat-model.md). The number of their
correct answers would be, because it is in no version. What a refused sum holds is for the operator alone.
"""

import numpy as np
import pytest

from coordinator.rounds.publish import ResultInvalid, next_version
from edge_client.policy.policy import Policy
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from tacit.job import Aggregation
from tacit.messages import AttemptEnded, AttemptMessage
from tacit.reason import Reason, sentence
from tacit.vector import layout_of
from tests.support import fleet as support
from tests.support.fleet import VALUES, Fleet, job_document
from tests.support.sum_fleet import SeededRandom

LIAR, OWN = "m2", 1000
HELD = {"m0": 51, "m1": 73, "m3": 60, LIAR: OWN}
RIGHT = {"m0": 17, "m1": 52, "m3": 33}
JOB = job_document(
    Aggregation(assumed_corrupt=1, max_weight=1000), count=1, min_members=4, max_attempts=1, max_failed_rounds=1
)


# ---- correct answers, learned from whether a sum is refused ----------------------------------------------------------


def opened(boast: int) -> np.ndarray:
    """The sum over all four, where the liar claims this many more correct answers than it has examples."""
    layout = layout_of(JOB, 4)
    start = {segment.name: at for segment, at in zip(layout.segments, starts(layout), strict=True)}
    total = np.zeros(layout.values, np.uint32)
    for name, held in HELD.items():
        update = Update(np.full(VALUES, 0.01, np.float32), held, float(held), RIGHT.get(name, held), held)
        total += protection_of(JOB, held).encode(JOB, update, 4, SeededRandom(name))
    total[start["correct"]] += np.uint32(boast)
    return total


def starts(layout):
    return np.cumsum([0, *(segment.length for segment in layout.segments)])[:-1].tolist()


def bisected(refused) -> int:
    """The most that a liar can claim before it hears that the sum was refused."""
    low, high = 0, 2 * sum(HELD.values())
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refused(middle) else (middle, high)
    return low


def test_refusing_more_correct_answers_than_examples_reveals_the_others():
    # The baseline: no valid inputs produce such a sum, so a rule might refuse it.
    layout = layout_of(JOB, 4)

    def refused(boast):
        sums = layout.decode(opened(boast))
        return not 0 <= sums["correct"][0] <= sums["count"][0]

    assert bisected(refused) == sum(HELD[name] - right for name, right in RIGHT.items())


def test_we_publish_the_same_version_whatever_a_liar_claims():
    def heard(boast):
        try:
            return next_version(JOB, 4, 4, opened(boast), np.zeros(VALUES, np.float32)).values.tobytes()
        except ResultInvalid:
            return None

    most = 2 * sum(HELD.values())
    assert heard(0) is not None
    assert {heard(boast) for boast in (0, 1, 81, 82, 83, 500, most)} == {heard(0)}
    assert bisected(lambda boast: heard(boast) is None) == most - 1


# ---- a weight that takes the others' away ----------------------------------------------------------------------------


def taken_away(weight: int) -> np.ndarray:
    """The sum over all four, where the liar's weight is such that all weights together are this."""
    layout = layout_of(JOB, 4)
    total = np.zeros(layout.values, np.uint32)
    for name, held in HELD.items():
        update = Update(np.full(VALUES, 0.5, np.float32), held, float(held), held, held)
        total += protection_of(JOB, held).encode(JOB, update, 4, SeededRandom(name))
    at = {segment.name: at for segment, at in zip(layout.segments, starts(layout), strict=True)}["weight"]
    total[at] = np.uint32(weight)
    return total


@pytest.mark.parametrize("weight", [1, 100, sum(HELD.values()) // 2 - 10])
def test_a_weight_below_zero_does_not_multiply_the_others_updates(weight):
    # No mean of updates within the bound is beyond it.
    base = np.zeros(VALUES, np.float32)
    with pytest.raises(ResultInvalid, match="beyond"):
        next_version(JOB, 4, 4, taken_away(weight), base)


def test_a_mean_that_valid_weights_give_is_published():
    step = next_version(JOB, 4, 4, taken_away(sum(HELD.values())), np.zeros(VALUES, np.float32))
    assert np.allclose(step.values, 0.5, atol=1e-4)


# ---- what members hear of a refused sum ------------------------------------------------------------------------------


class Lying:
    """A liar's own software: one number of its vector is what no member may send."""

    def __init__(self, real, segment):
        self.real, self.segment = real, segment

    def encode(self, job, update, cohort, random):
        vector = self.real.encode(job, update, cohort, random)
        layout = layout_of(job, cohort)
        names = [segment.name for segment in layout.segments]
        vector[starts(layout)[names.index(self.segment)]] = 2 ** (layout.bits - 1) - 2 * OWN
        return vector


def played(segment, monkeypatch):
    """Returns (fleet, everything sent to members) for a cohort whose liar sends that in a segment."""

    def lying(job, examples):
        # On every machine. The liar is recognised by its number of examples.
        real = protection_of(job, examples)
        return Lying(real, segment) if examples == OWN else real

    monkeypatch.setattr(support, "protection_of", lying)
    fleet, told = Fleet(4, policy=Policy(mechanisms=("none",), assumed_corrupt=1), job=JOB), []

    def trained(member, assignment):
        held = HELD[member.name]
        fleet.hand_over(member, assignment, Update(np.full(VALUES, 0.01, np.float32), held, held, held // 2, held))

    send = fleet._send
    fleet._trained = trained
    fleet._send = lambda member, message: (told.append((member, message)), send(member, message))  # type: ignore[assignment]
    return fleet.connect().run(), told


@pytest.mark.parametrize("segment", ["weight", "update"])
def test_a_refused_sum_tells_no_member_its_numbers(segment, monkeypatch):
    fleet, told = played(segment, monkeypatch)
    (end,) = fleet.ends()
    assert end.reason == Reason.REASON_RESULT_INVALID
    # The operator's record says it. With weights it is a number of the sum.
    assert end.detail
    if segment == "weight":
        number = float(end.detail.removeprefix("the weights sum to ").split(";")[0])
        assert number > len(HELD) * 1000
    assert not [message for _, message in told if end.detail in repr(message)]
    endings = {
        member: message.payload
        for member, message in told
        if isinstance(message, AttemptMessage) and isinstance(message.payload, AttemptEnded)
    }
    assert set(endings) == set(HELD)
    assert {ending.detail for ending in endings.values()} == {sentence(Reason.REASON_RESULT_INVALID)}


@pytest.mark.parametrize("segment", ["correct", "count"])
def test_impossible_metrics_cost_no_version_and_the_operator_hears(segment, monkeypatch):
    fleet, _ = played(segment, monkeypatch)
    (end,) = fleet.ends()
    assert end.published
    assert end.training is None
    counted = {count.what: count.fields for count in fleet.counts}
    assert counted["metrics_invalid"] == {"number": 1}
    assert "training" not in counted
