"""How far a budget reaches is what the ledger's own gate lets pass, one round after another."""

from contextlib import nullcontext
from datetime import UTC, datetime

import pytest

from edge_client.ledger.budget import Budget
from edge_client.ledger.ledger import BudgetSpent, Ledger, Purpose
from edge_client.ledger.outlook import Outlook, outlook, stored_state
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.policy.policy import Policy, PolicyRefusal
from learning.accounting.events import SampledGaussian
from tacit.job import JobDocument
from tacit.mechanism import DpSgd
from tacit.messages import Assignment
from tests.support import party
from tests.support.fleet import job_document

MARCH = datetime(2026, 3, 30, tzinfo=UTC).timestamp()
APRIL = datetime(2026, 4, 2, tzinfo=UTC).timestamp()
DP_SGD = DpSgd(noise_multiplier=2.0, lot=5, steps=5)
EXAMPLES = 100
EVENT = SampledGaussian(multiplier=2.0, rate=0.05, steps=5)
OTHER = SampledGaussian(multiplier=4.0, rate=0.1, steps=3)
OURS, THEIRS = b"o" * 32, b"t" * 32


def a_job(count: int) -> JobDocument:
    return job_document(count=count).model_copy(update={"mechanism": DP_SGD})


def purpose(job="questions", round=1, federation=OURS, mechanism="dp-sgd") -> Purpose:
    return Purpose(
        federation=federation,
        job=job,
        round=round,
        version=bytes(32),
        document=bytes(32),
        mechanism=mechanism,
        data=bytes(32),
    )


class Data:
    """A ledger under a clock of its own, and what its gate lets pass."""

    def __init__(self, folder, policy: Policy) -> None:
        self.home, self.policy, self.now, self.federation = folder, policy, MARCH, OURS
        path = folder / "ledgers" / "data.db"
        path.parent.mkdir()
        self.ledger = Ledger.open(path, "data", policy.limit(), monthly=policy.epsilon_a_month, clock=lambda: self.now)

    def charge(self, rounds, event=EVENT, **what) -> None:
        for round in rounds:
            held = self.ledger.reserve(event, purpose(round=round, **{"federation": self.federation, **what}))
            self.ledger.charge(held.number, round)

    def outlook(self, count: int) -> Outlook:
        state = stored_state(self.home, "data")
        return outlook(self.policy, a_job(count), EVENT, state, federation=self.federation, now=self.now)

    def passes(self, first: int) -> int:
        """How many more rounds the gate lets pass now. They are charged."""
        for count in range(1000):
            try:
                self.charge([first + count])
            except BudgetSpent:
                return count
        raise AssertionError("the budget has no end")


@pytest.fixture
def data(tmp_path):
    opened = []

    def make(**policy) -> Data:
        opened.append(Data(tmp_path, Policy(**policy)))
        return opened[-1]

    yield make
    for each in opened:
        each.ledger.close()


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("others", [0, 2])
def test_rounds_are_those_that_the_gate_lets_pass(data, before, others):
    made = data(epsilon=3.0)
    made.charge(range(1, before + 1))
    made.charge(range(1, others + 1), OTHER, job="another")
    told = made.outlook(1000)
    assert (told.rounds, told.paid, told.spent_by, told.this_month) == (1000, before, "epsilon", None)
    further = made.passes(before + 1)
    assert 0 < told.further == further
    assert told.possible == before + further
    # Now that they are charged, nothing is left, and as many are paid.
    after = made.outlook(1000)
    assert (after.paid, after.further, after.refused_by) == (before + further, 0, "epsilon")
    # A job of exactly as many rounds is covered.
    whole = made.outlook(before + further)
    assert (whole.possible, whole.spent_by, whole.refused_by) == (before + further, None, None)


def test_a_month_stops_a_job_only_until_its_end(data):
    made = data(epsilon=3.0, epsilon_a_month=2.0)
    made.charge([1, 2])
    march = made.outlook(1000)
    assert march.refused_by is None
    assert 0 < march.this_month < march.further
    assert march.sentence.startswith(
        f"the budget lets this member take part in {march.possible} of 1000 rounds, of which"
    )
    assert f"epsilon_a_month allows {march.this_month} of the other {march.further} in 2026-03" in march.sentence
    assert march.this_month == made.passes(3)
    spent = made.outlook(1000)
    assert (spent.this_month, spent.refused_by, spent.possible) == (0, "epsilon_a_month", march.possible)
    made.now = APRIL
    april = made.outlook(1000)
    assert (april.refused_by, april.month, april.possible) == (None, "2026-04", march.possible)
    assert april.this_month > 0


def test_a_job_of_its_own_limit_stops_first(data, tmp_path):
    identity = party.member(tmp_path / "north", "localhost:7441")
    made = data(epsilon=8.0, epsilon_a_job=2.0)
    made.federation = identity.federation
    # Of these, only the job's own in this federation count against it.
    made.charge([1, 2])
    made.charge([1, 2, 3], federation=THEIRS)
    made.charge([1, 2, 3], job="another")
    made.charge([0], OTHER, mechanism="histogram")
    told = made.outlook(60)
    assert (told.paid, told.spent_by) == (2, "epsilon_a_job")
    assert "then epsilon_a_job is spent, and the job pauses if fewer than 3 members are left" in told.sentence
    # The session's own check agrees.
    budget = Budget(made.ledger, made.policy, identity, ReceiptBook(tmp_path / "receipts"), bytes(32))
    protection = budget.protection(a_job(60), EXAMPLES)
    assert protection.event == EVENT
    for count in range(told.further + 1):
        assignment = Assignment("questions", 10 + count, bytes(32), bytes(32), 0, 1000)
        with nullcontext() if count < told.further else pytest.raises(PolicyRefusal, match="limit for its data"):
            budget.reserve(assignment, a_job(60), protection)
    assert told.further > 0


def test_released_reservations_and_repeated_rounds_do_not_count_twice(data):
    made = data(epsilon=3.0)
    held = made.ledger.reserve(EVENT, purpose(round=1))
    made.ledger.release(held.number, "training did not end")
    assert made.outlook(5).paid == 0
    # An abandoned attempt that was charged again is one round of the job, and costs two.
    made.charge([1, 1])
    told = made.outlook(1000)
    assert told.paid == 1
    assert told.further == made.passes(2)


def test_without_a_ledger_the_policy_alone_counts(tmp_path):
    assert stored_state(tmp_path, "data") is None
    told = outlook(Policy(epsilon=0.01), a_job(20), EVENT, None)
    assert (told.possible, told.refused_by) == (0, "epsilon")
    assert told.sentence == (
        "the budget lets this member take part in 0 of 20 rounds; then epsilon is spent, and the job pauses if fewer "
        "than 3 members are left"
    )
    assert outlook(Policy(epsilon=100.0), a_job(20), EVENT, None).sentence == (
        "the budget lets this member take part in all 20 rounds"
    )
