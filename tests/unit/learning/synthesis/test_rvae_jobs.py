"""A job for synthetic text, from its file to the member's change, and what policy, dry run and plan say of it."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from coordinator.services.job_check import check_job
from coordinator.services.live import OperatorRefused
from coordinator.storage.blobs import open_blobs
from edge_client.agent.dry_run import _show, plan_of
from edge_client.agent.runner import Member
from edge_client.cli import app
from edge_client.policy.policy import Policy, PolicyRefusal
from learning.accounting.calibration import epsilon_at_gate
from learning.models.assembly import assembled
from learning.synthesis.labels import histogram_event
from learning.synthesis.setting import NO_GUARANTEE
from learning.synthesis.training import measure
from learning.synthesis.words import VocabularyNotPublic
from learning.text.corpus import EncodedExamples, words_of
from learning.text.examples import Example
from learning.training.local import TrainingCancelled
from learning.training.update import TrainingLost
from tacit.manifest import Manifest
from tacit.reason import Reason
from tacit.rounding import rounded_up
from tests.support import party
from tests.support.toy_jobs import DP_SGD, bundle_of, examples_of, trained
from tests.support.toy_texts import LABELS, Seeded
from toolkit.console import CommandFailed

torch.set_num_threads(1)

HOLD = {"texts": 40, "histogram_std": 4.0}


def measured(bundle, values, examples):
    """The perplexity of these texts under the model with these values."""
    corpus = EncodedExamples(examples, bundle.document, bundle.public_tokenizer)
    module, _ = assembled(bundle.document, corpus, bundle.manifest, values, {})
    return measure(module, corpus.read().ids.copy(), seed=5).prior_perplexity


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"learning_rate": 0.02, "epochs": 6, "batch": 16}},
        {"mechanism": DP_SGD | {"noise_multiplier": 0.01, "steps": 40}},
        {"model": {"variant": "published"}, "training": {"learning_rate": 0.05, "epochs": 6, "batch": 16}},
    ],
    ids=["none", "dp-sgd", "published"],
)
def test_a_members_change_makes_texts_it_never_saw_likelier(changes):
    bundle = bundle_of(**changes)
    base = bundle.manifest.decode(bundle.weights)
    update = trained(bundle, examples_of())
    others = examples_of(60, seed=9)
    assert update.change.shape == (bundle.document.values,)
    assert measured(bundle, base + update.change, others) < 0.7 * measured(bundle, base, others)


def test_a_model_without_labels_sends_no_accuracy():
    for changes in ({}, {"model": {"variant": "published"}}, {"mechanism": DP_SGD}):
        update = trained(bundle_of(**changes), examples_of(40))
        assert (update.loss_sum, update.correct, update.count) == (0.0, 0, 0)
        # The weight of the change is still the number of examples.
        assert update.examples == 40


def test_a_bundle_of_another_release_is_refused_when_created(tmp_path):
    """A release without label bias: every member would refuse the job, and the operator would never hear of it."""
    bundle, store = bundle_of(), open_blobs(f"file://{tmp_path / 'store'}")
    store.put(bundle.tokenizer)

    def created(manifest, weights):
        names = {"manifest": manifest.digest(), "weights": store.put(weights), "values": manifest.values}
        document = bundle.document.model_copy(update=names)
        store.put(manifest.canonical())
        return check_job(store, store.put(document.canonical()))

    assert created(bundle.manifest, bundle.weights).values == bundle.document.values
    arrays = bundle.manifest.unflatten(bundle.manifest.decode(bundle.weights))
    del arrays["label_bias.weight"]
    older = Manifest.of(arrays)
    with pytest.raises(OperatorRefused, match="another release made it; create the bundle again"):
        created(older, older.encode(older.flatten(arrays)))


def test_a_texts_ids_are_its_label_and_then_the_jobs_words():
    bundle = bundle_of()
    job = bundle.document
    words = words_of(job, bundle.public_tokenizer)
    read = EncodedExamples(
        [Example("the sea is great .", "good"), Example("the sea is great .", "bad"), Example("the sea", "other")],
        job,
        bundle.public_tokenizer,
    ).read()
    assert read.ids[:, 0].tolist() == words.label_ids(np.array([LABELS.index("good"), LABELS.index("bad")])).tolist()
    assert (read.ids[0, 1:] == read.ids[1, 1:]).all()
    assert words.text(read.ids[0, 1:].tolist()) == "the sea is great."
    # The loss is at index 0 of the model's output, whatever the label is.
    assert read.labels.tolist() == [0, 0]
    assert read.usable.tolist() == [0, 1]


def test_a_job_with_fewer_words_reads_others_as_unknown():
    few = bundle_of(model={"words": 6})
    read = EncodedExamples([Example("the zero zero zero", "good")], few.document, few.public_tokenizer).read()
    assert set(read.ids[0, 2:5].tolist()) == {1}


def test_words_that_are_not_the_jobs_are_refused():
    bundle = bundle_of()
    other = bundle_of(model={"hidden": 24}).document.model_copy(update={"tokenizer": bytes(32)})
    with pytest.raises(VocabularyNotPublic, match="not the job's"):
        words_of(other, bundle.public_tokenizer)


def test_the_published_training_stops_when_told_and_reports_failure():
    bundle = bundle_of(model={"variant": "published"})
    steps = []
    with pytest.raises(TrainingCancelled):
        trained(
            bundle,
            examples_of(),
            progress=lambda step, steps_, loss: steps.append((step, steps_, loss)),
            cancelled=lambda: len(steps) == 2,
        )
    assert [step for step, _, _ in steps] == [1, 2]
    assert all(0 < loss < 100 for _, _, loss in steps)
    with pytest.raises(TrainingLost, match="no texts"):
        trained(bundle, [Example("a text", "no label of the job")])


def test_the_published_variant_draws_its_noise_from_the_given_source():
    bundle = bundle_of(model={"variant": "published"})
    once, again, other = (trained(bundle, examples_of(40), random=Seeded(each)).change for each in ("a", "a", "b"))
    assert (once == again).all()
    assert (once != other).any()


# ---- what else looks at a job ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


def of_histogram():
    """The epsilon that the gate counts for the histogram alone, at the default delta."""
    event = histogram_event(HOLD["histogram_std"], len(LABELS), "add-remove")
    return epsilon_at_gate(event, Policy().delta, "add-remove")


def refusal(policy, bundle):
    with pytest.raises(PolicyRefusal) as refused:
        policy.check_job(bundle.document)
    return refused.value


def test_the_policy_refuses_texts_that_it_does_not_release():
    ordered = bundle_of(mechanism=DP_SGD, corpus=HOLD)
    Policy().check_job(ordered.document)
    never = refusal(Policy(corpora="never"), ordered)
    assert never.reason == Reason.REASON_POLICY_CORPUS
    assert never.detail.startswith(
        "corpora: the job orders 40 synthetic texts from each member, differentially private"
    )
    fewer = refusal(Policy(max_corpus_texts=39), ordered)
    assert fewer.reason == Reason.REASON_POLICY_CORPUS
    assert fewer.detail == "max_corpus_texts: the job orders 40 synthetic texts from each member; the policy allows 39"
    # Texts that the operator generates are not the member's.
    operators = bundle_of(mechanism=DP_SGD, corpus={"source": "operator"})
    Policy(corpora="never", max_corpus_texts=1).check_job(operators.document)


@pytest.mark.parametrize("variant", ["sound", "published"])
def test_a_policy_that_requires_a_mechanism_refuses_a_job_without_one(variant):
    bundle = bundle_of(model={"variant": variant})
    refused = refusal(Policy(), bundle)
    assert refused.reason == Reason.REASON_POLICY_MECHANISM
    assert (NO_GUARANTEE in refused.detail) == (variant == "published")
    Policy(mechanisms=("none",)).check_job(bundle.document)


def test_policy_check_says_which_variant_makes_the_texts():
    bundle = bundle_of(model={"variant": "published"})
    said = {each.rule: each.sentence for each in Policy(mechanisms=("none",)).explain(bundle.document)}
    assert f"by the published variant, with {NO_GUARANTEE}" in said["corpora"]
    assert NO_GUARANTEE in said["mechanisms"]


def test_a_dry_run_says_how_many_texts_are_generated_and_their_cost(tmp_path, identity, capsys):
    member = Member(tmp_path, identity, Policy(), examples_of(200), "cpu")
    bundle = bundle_of(mechanism=DP_SGD, corpus=HOLD)
    plan = plan_of(bundle.document, bundle.manifest, member)
    assert plan.as_json()["orders_texts"] == 40
    assert plan.refusals == ()
    _show(plan, member)
    said = capsys.readouterr().out
    assert "the model trained here makes 40 synthetic texts, which are released once you approve" in said
    assert f"the histogram of your labels is charged too: epsilon {rounded_up(of_histogram()):g} alone" in said
    plain = bundle_of(model={"variant": "published"})
    lenient = dataclasses.replace(member, policy=Policy(mechanisms=("none",), corpora="always"))
    notes = plan_of(plain.document, plain.manifest, lenient).notes
    assert [NO_GUARANTEE in note for note in notes] == [True, False]
    assert "released without asking" in notes[1]


def test_a_plan_names_the_charge_for_the_histogram(tmp_path):
    path = tmp_path / "job.json"
    path.write_bytes(bundle_of(mechanism=DP_SGD, corpus=HOLD).document.canonical())
    done = CliRunner().invoke(app, ["privacy", "plan", str(path), "--examples", "500", "--epsilon", "8"])
    assert done.exit_code == 0, done.output
    beside = f"is charged too: alone it costs epsilon {rounded_up(of_histogram()):g}."
    assert f"When the job is finished, the histogram of your labels {beside}" in done.output
    path.write_bytes(bundle_of(mechanism=DP_SGD).document.canonical())
    without = CliRunner().invoke(app, ["privacy", "plan", str(path), "--examples", "500", "--epsilon", "8"])
    assert "histogram" not in without.output
    path.write_bytes(bundle_of().document.canonical())
    plain = CliRunner().invoke(app, ["privacy", "plan", str(path), "--examples", "500"])
    assert isinstance(plain.exception, CommandFailed)
    assert "adds no noise" in str(plain.exception)


def test_policy_check_of_a_job_file_on_the_command_line(tmp_path):
    path = tmp_path / "job.json"
    path.write_bytes(bundle_of(mechanism=DP_SGD, corpus=HOLD).document.canonical())
    rules = tmp_path / "policy.toml"
    rules.write_text('schema = 1\ncorpora = "never"\n')
    asked = ["policy", "check", str(path), "--policy", str(rules), "--home", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 4, done.output
    (refused,) = [each for each in json.loads(done.output)["verdicts"] if each["outcome"] == "refused"]
    assert (refused["rule"], refused["reason"]) == ("corpora", "policy_corpus")
