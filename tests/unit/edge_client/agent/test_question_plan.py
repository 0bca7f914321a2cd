"""The dry run of a question: exactly what is asked, what it costs, and nothing counted or charged."""

import hashlib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from edge_client.agent.dry_run import describing
from edge_client.agent.question_plan import question_plan
from edge_client.agent.runner import Member, RunOptions
from edge_client.cli import app
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from learning.accounting.gate import epsilon_counted
from learning.survey.answer import event_of_answer
from learning.text.encoder import word_tokenizer
from learning.text.examples import Example
from secure_agg import pack_in_place
from tacit.attempt import AttemptId
from tacit.manifest import Manifest, Tensor
from tacit.messages import Assignment
from tacit.rounding import rounded_up
from tacit.survey import LabelHistogram, LengthHistogram, Survey
from tests.support import party
from tests.support.surveys import ASKED, NOISE, survey_job

ALLOWS = Policy(surveys_epsilon=2.0)


@pytest.fixture
def member(tmp_path):
    party.member_home(tmp_path, "localhost:7441")
    return Member(tmp_path, MemberIdentity.load(tmp_path), ALLOWS, [Example("one", "a")] * 20, "cpu")


def shown(plan, member):
    lines = []
    plan.show(member, lines.append)
    return "\n".join(lines)


def test_it_shows_the_exact_question_and_its_price_and_charges_nothing(member):
    import numpy as np

    from tacit.vector import layout_of

    job = survey_job()
    plan = question_plan(job, ASKED, member)
    assert plan.refusals == ()
    assert plan.epsilon == epsilon_counted([event_of_answer(ASKED, NOISE, "add-remove")], ALLOWS.limit())
    assert plan.spent == 0
    told = plan.as_json()
    assert told["question"] == ASKED.model_dump(mode="json")
    layout = layout_of(job, 3)
    assert told["bytes_a_round"] == len(pack_in_place(np.zeros(layout.values, np.uint32), layout.bits))
    text = shown(plan, member)
    assert '    rows by label:\n      "a"\n      "b"\n      other\n' in text
    assert "    this member, by its number of rows:\n      0 to 10\n      11 to 100\n      more than 100\n" in text
    assert "noise of standard deviation 5 to each number, drawn once" in text
    assert f"epsilon {rounded_up(plan.epsilon):g} for the whole answer; the policy lets all surveys spend 2" in text
    assert text.endswith("`edge_client run` would answer")
    assert not ledger_path(member.home, member.data_name).exists()


def test_policy_check_says_the_same_of_a_surveys_document(member, tmp_path):
    document = tmp_path / "job.json"
    document.write_bytes(survey_job().canonical())
    for limit, code, said in (
        (2.0, 0, "all 1 rounds"),
        (0.1, 4, "This member would not take part: surveys_epsilon."),
        (0.0, 4, "surveys_epsilon: the job asks for histograms"),
    ):
        rules = tmp_path / "rules.toml"
        rules.write_text(f"schema = 1\nsurveys_epsilon = {limit}\n")
        words = [
            "policy",
            "check",
            str(document),
            "--policy",
            str(rules),
            "--examples",
            "20",
            "--home",
            str(member.home),
        ]
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, said in done.output) == (code, True), done.output
        assert f"the policy allows 8, {limit:g} for surveys" in done.output


def test_stewards_read_the_question_as_the_dry_run_prints_it(member, tmp_path):
    options = RunOptions(data=tmp_path / "rows.jsonl", text="note", label="kind")
    manifest = Manifest(tensors=(Tensor(name="histograms", shape=(ASKED.bins,)),))
    lines, told = describing(options)(member)(survey_job(), manifest, None)
    assert lines[0].endswith("the columns note, kind")
    assert "\n".join(lines[1:]) == shown(question_plan(survey_job(), ASKED, member), member)
    assert (told["question"], told["rows"]) == (ASKED.model_dump(mode="json"), 20)


def test_every_bin_is_shown_and_quoted(member):
    labels = tuple(f"label-{at}, and more" for at in range(300))
    question = Survey(histograms=(LabelHistogram(labels=labels),))
    text = shown(question_plan(survey_job(question), question, member), member)
    assert all(f'      "{label}"\n' in text for label in labels)


def test_a_short_vocabulary_is_shown_whole_and_a_long_one_by_its_digest_and_beginning(member):
    question = Survey(histograms=(LengthHistogram(at_most=(8,)),))
    job = survey_job(question)
    for size, listed in ((50, 50), (51, 20)):
        tokenizer = word_tokenizer([f"word{at}" for at in range(size)])
        plan = question_plan(job, question, member, tokenizer)
        text = shown(plan, member)
        assert f"by a vocabulary of {size} entries, {hashlib.sha256(tokenizer).hexdigest()[:16]}" in text
        assert [f'"word{at}"' in text for at in range(51)] == [at < listed for at in range(51)]
        assert plan.as_json()["vocabulary"]["size"] == size


def test_as_one_unit_it_says_that_the_member_counts(member):
    mine = replace(member, policy=Policy(surveys_epsilon=2.0, unit="member"))
    job = survey_job(noise=NOISE.model_copy(update={"unit": "member"}))
    text = shown(question_plan(job, ASKED, mine), mine)
    assert "this member counts once in each histogram" in text
    assert "this member, by the label of most of its rows:" in text
    assert "rows by label" not in text


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"surveys_epsilon": 0.0}, "surveys_epsilon: the job asks for histograms of labels, rows; "),
        ({"surveys_epsilon": 0.1}, "surveys_epsilon does not allow the answer now"),
        ({"epsilon": 0.1}, "epsilon does not allow the answer now"),
        ({"unit": "member"}, "unit: the job protects one example"),
        ({"min_cohort": 300}, "min_cohort"),
        ({"jobs": ("other",)}, "jobs: the job's name is asked"),
    ],
)
def test_what_the_policy_refuses_is_shown_before_anybody_asks(member, rules, said):
    strict = replace(member, policy=Policy(**{"surveys_epsilon": 2.0, **rules}))
    plan = question_plan(survey_job(), ASKED, strict)
    assert any(each.startswith(said) for each in plan.refusals), plan.refusals
    assert f"refused: {said}" in shown(plan, strict)
    assert not plan.as_json()["takes_part"]


def test_keys_about_models_do_not_apply_to_a_question(member):
    rules = {
        "architectures": ("textcnn",),
        "base_models": ("ab" * 32,),
        "mechanisms": ("dp-sgd",),
        "vocabularies": ("own",),
        "shared_parameters": ("head.*",),
        "own_noise_multiplier": 2.0,
    }
    question = Survey(histograms=(LengthHistogram(at_most=(8,)),))
    strict = replace(member, policy=Policy(**{"surveys_epsilon": 2.0, **rules}))
    assert question_plan(survey_job(question), question, strict).refusals == ()


def test_what_surveys_have_spent_is_shown_and_counts(member):
    job = survey_job()
    with open_budget(member.home, member.identity, ALLOWS, ["one"], name=member.data_name) as budget:
        answering = budget.answering(job, ASKED)
        reserved = budget.reserve_answer(Assignment(job.name, 1, job.digest(), job.weights, 0, 1), job, answering)
        budget.charge(AttemptId(job.name, 1, 1), reserved)
    other = survey_job(name="another")
    plan = question_plan(other, ASKED, member)
    assert plan.spent == plan.epsilon
    assert plan.refusals != ()
    assert "surveys_epsilon does not allow the answer now" in plan.refusals[0]
    # The survey that was answered costs nothing more, and is not refused.
    assert question_plan(job, ASKED, member).refusals == ()
