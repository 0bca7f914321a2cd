"""The dry run of a measurement: which version, which rows, what leaves, and what it costs."""

import hashlib

import pytest
from typer.testing import CliRunner

from edge_client.agent.question_plan import question_plan
from edge_client.agent.runner import Member
from edge_client.cli import app
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.ledger import ledger_path
from edge_client.policy.policy import Policy
from learning.accounting.gate import epsilon_counted
from learning.survey.answer import event_of_answer
from learning.text.examples import Example
from tacit.rounding import rounded_up
from tests.support import party
from tests.support.measurements import bundled, measuring, varied

ALLOWS = Policy(metrics_epsilon=2.0)


@pytest.fixture
def member(tmp_path):
    party.member_home(tmp_path, "localhost:7441")
    return Member(tmp_path, MemberIdentity.load(tmp_path), ALLOWS, [Example("one", "a")] * 20, "cpu")


def asked(folder, **keys):
    subject, _ = bundled(folder)
    return measuring(subject, hashlib.sha256(varied(subject)).digest(), **{"noise": {"std": 150.0}, **keys})[0]


def shown(plan, member):
    lines = []
    plan.show(member, lines.append)
    return "\n".join(lines)


@pytest.mark.parametrize("by", [None, "label"])
def test_it_shows_the_version_the_rows_the_numbers_and_the_price_and_charges_nothing(member, tmp_path, by):
    job = asked(tmp_path, by=by)
    plan = question_plan(job, job.question, member, b"a tokenizer is a part of the model")
    assert plan.refusals == ()
    assert plan.epsilon == epsilon_counted([event_of_answer(job.question, job.mechanism, "add-remove")], ALLOWS.limit())
    assert plan.as_json()["question"]["kind"] == "measure"
    assert plan.as_json()["vocabulary"] is None
    text = shown(plan, member)
    assert text.startswith("asked: how well version 1 of desk does on rows here; nothing is trained")
    assert f"version: {job.question.weights.hex()[:16]}, a textcnn of {job.question.values:,} values" in text
    assert "those that it keeps back from every training (validation_share 0.1)" in text
    assert text.count("loss (cut to 5), right answers and number") == (3 if by else 1)
    assert ('of the rows of "b"' in text) == (by == "label")
    costs = f"epsilon {rounded_up(plan.epsilon):g} for the whole answer"
    assert f"{costs}; the policy lets all metrics and measurements spend 2" in text
    assert text.endswith("`edge_client run` would answer")
    assert not ledger_path(member.home, member.data_name).exists()


def test_it_says_where_all_rows_are_measured(member, tmp_path):
    job = asked(tmp_path, rows="all")
    assert "all of them, also those that models were trained on" in shown(
        question_plan(job, job.question, member), member
    )


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ("example", "  has room for 30 rows of a member; of more, a part is measured\n"),
        ("person", "  has room for 30 persons of a member; of more, a part is measured\n"),
        # All rows are one unit, for which there is always room.
        ("member", None),
    ],
)
def test_it_says_for_how_many_units_there_is_room(member, tmp_path, unit, said):
    job = asked(tmp_path, rows="all", noise={"std": 150.0, "unit": unit, "max_units": 30})
    text = shown(question_plan(job, job.question, member), member)
    assert (said in text) if said else ("room for" not in text)


def test_a_policy_without_metrics_and_one_whose_budget_is_too_small_refuse(member, tmp_path):
    job = asked(tmp_path)
    for limit, code, said in (
        (2.0, 0, "all 1 rounds"),
        (0.1, 4, "This member would not take part: metrics_epsilon."),
        (0.0, 4, "metrics_epsilon: the job measures a version on rows that this member keeps back"),
    ):
        document, rules = tmp_path / "job.json", tmp_path / "rules.toml"
        document.write_bytes(job.canonical())
        rules.write_text(f"schema = 1\nmetrics_epsilon = {limit}\n")
        words = ("policy", "check", document, "--policy", rules, "--examples", "20", "--home", member.home)
        done = CliRunner().invoke(app, [str(each) for each in words])
        assert (done.exit_code, said in done.output) == (code, True), done.output
        assert f"the policy allows 8, {limit:g} for metrics and measurements" in done.output
