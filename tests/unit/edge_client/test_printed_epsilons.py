"""Each sentence of a member rounds what something costs up, and what is left down."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from edge_client.agent.auditing import _signed
from edge_client.agent.own_model import Fetched
from edge_client.agent.runner import Member
from edge_client.agent.watching import LogWatcher
from edge_client.cli.ledger import _spent
from edge_client.cli.withdraw import _own_lines
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.budget import Figures
from edge_client.ledger.by_person import Counted
from edge_client.ledger.chain import LimitNumbers
from edge_client.ledger.gate import Gate
from edge_client.ledger.replay import LedgerState, month_of
from edge_client.policy.policy import Policy
from edge_client.withdrawal.record import OwnPart, Spent
from learning.accounting.events import DiscreteGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.auditing.report import Outcome, Report
from learning.auditing.statistics import Guesses
from learning.text.examples import Example
from tacit.manifest import Manifest
from tests.support import party
from tests.support.fleet import job_document


@pytest.mark.parametrize(
    ("epsilon", "said"),
    [
        (5.021, "epsilon 5.03 of 8; 37% left"),
        (7.999, "epsilon 8 of 8; 0% left"),
        (0.0001, "epsilon 0.0001 of 8; 99% left"),
        (0.0, "epsilon 0 of 8; 100% left"),
        (8.01, "epsilon 8.01 of 8; 0% left"),
    ],
)
def test_the_ledgers_statement(epsilon: float, said: str) -> None:
    assert _spent({"epsilon": epsilon}, 8.0) == said


def test_the_log() -> None:
    with capture_logs() as logged:
        LogWatcher().privacy(Figures(5.00001, 8.0, 0.12349))
    assert (logged[0]["epsilon"], logged[0]["share_left"]) == ("5.001", "0.1234")


def test_what_a_withdrawn_job_cost() -> None:
    part = OwnPart("desk", spent=[Spent("wards", 1.0001, 1e-6)])
    assert "the job alone cost epsilon 1.01 at delta 1e-06, which bounds" in "\n".join(_own_lines({"desk": part}, None))


def test_what_counts_for_a_person() -> None:
    counted = Counted("patient", 3, 3, 0, of_row=1.0001, of_person=3.0001, limit=8.0, recorded=True)
    assert "epsilon 1.01 for a row, and as epsilon 3.01 for a person with at most 3 rows" in counted.sentence


@pytest.mark.parametrize("multiplier", [2.2, 3.1])
def test_a_refusal_of_the_gate(multiplier: float) -> None:
    """It never says of what passes the limit that it counts as less."""
    event = DiscreteGaussian(multiplier=multiplier)
    exact = epsilon_counted([event], Limit(1.0, 1e-6))
    # Rounding to nearest would print less of the first.
    assert (float(f"{exact:.4g}") < exact) == (multiplier == 2.2)
    numbers = LimitNumbers(epsilon=exact * 0.99999, delta=1e-6, adjacency="add-remove", unit="example")
    said = Gate(numbers, None).refusal(LedgerState(), event, month_of(0))
    assert said is not None
    for printed in re.findall(r"(?:alone|together) as ([0-9]+\.[0-9]+)", said):
        assert exact <= float(printed) < exact * 1.001
        enough = Gate(numbers.model_copy(update={"epsilon": float(printed)}), None)
        assert enough.refusal(LedgerState(), event, month_of(0)) is None


def test_an_audit_that_leaves_says_what_was_charged_with_one_digit(tmp_path: Path) -> None:
    """All digits of it, with a known rate, would reveal how many rows this member has."""
    party.member_home(tmp_path, "localhost:7441")
    member = Member(tmp_path, MemberIdentity.load(tmp_path), Policy(), [Example("one", "a")], "cpu")
    job = job_document()
    fetched = Fetched(job, Manifest.of({"a": np.zeros(1, np.float32)}), b"", 2, bytes(32), b"", {}, {}, None)
    found = Outcome("canaries", "version-2", 1.2341, 0.3, 5.0, Guesses(40, 16, 9), 0.9875, 0.5, 0.0)
    report = Report(job.name, job.digest(), {2: bytes(32)}, 1e-6, 0.95, [found])
    statement = json.loads(_signed(report, fetched, member).statement)
    assert (statement["claim"], statement["lower_bound"]) == (2.0, 0.3)
