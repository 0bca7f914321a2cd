"""A member that makes the sum invalid, to hear of it what a published one does not tell.

Without a mechanism the numbers of examples and of right answers travel in the sum. They are for the operator alone.
"""

import re

import numpy as np
import pytest

from edge_client.contribution import Update
from edge_client.privacy.mechanisms import protection_of
from edge_client.privacy.policy import Policy
from edge_client.session import states
from tacit.job import Aggregation
from tacit.messages import AttemptEnded, AttemptMessage
from tacit.reason import Reason, sentence
from tacit.vector import layout_of
from tests.support import fleet as support
from tests.support.fleet import VALUES, Fleet, job_document

LIAR, OWN = "m2", 1000
HELD = {"m0": 51, "m1": 73, "m3": 60, LIAR: OWN}


class Boasting:
    """A liar's own software: more right answers than there are examples."""

    def __init__(self, real):
        self.real = real

    def encode(self, job, update, cohort, random):
        vector = self.real.encode(job, update, cohort, random)
        names = [segment.name for segment in layout_of(job, cohort).segments]
        vector[VALUES + names.index("correct") - 1] = 10 * OWN
        return vector


def boasting(job, examples):
    """`protection_of` on every machine: the liar's is known by its examples."""
    real = protection_of(job, examples)
    return Boasting(real) if examples == OWN else real


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.setattr(support, "protection_of", boasting)
    job = job_document(Aggregation(assumed_corrupt=1, max_weight=1000), count=1, min_members=4, attempts=1, failures=1)
    made = Fleet(4, policy=Policy(mechanisms=("none",), assumed_corrupt=1), job=job)

    def trained(member, assignment):
        held = HELD[member.name]
        member.update = Update(np.full(VALUES, 0.01, np.float32), held, held, held // 2, held)
        made.tell(member.name, states.Prepared(assignment, made.job))

    made._trained = trained
    return made


def test_a_sum_that_is_refused_tells_no_member_its_numbers(fleet):
    told, send = [], fleet._send

    def noted(member, message):
        if isinstance(message, AttemptMessage) and isinstance(message.payload, AttemptEnded):
            told.append((member, message.payload))
        send(member, message)

    fleet._send = noted
    fleet.connect().run(lambda: bool(fleet.ends()) and bool(told))
    (end,) = fleet.ends()
    assert end.reason == Reason.REASON_RESULT_INVALID
    # Whoever hears what the operator's record says has the others' number of examples.
    counted = float(re.search(r"of ([0-9.e+]+) examples", end.detail)[1])
    assert counted - OWN == sum(HELD.values()) - OWN
    assert {member for member, _ in told} == set(HELD)
    assert {payload.detail for _, payload in told} == {sentence(Reason.REASON_RESULT_INVALID)}
    assert not re.search(r"[0-9]", sentence(Reason.REASON_RESULT_INVALID))
