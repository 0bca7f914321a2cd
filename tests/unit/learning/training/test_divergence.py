"""A diverged version is recognised before anybody trains on it, and a member hears of its own loss that explodes."""

import math

import numpy as np
import pytest
import torch

from export.bundle import make_job_bundle, read_job_bundle
from learning.models import build
from learning.training.divergence import check_not_diverged
from learning.training.local import TrainingDiverged, train
from learning.training.outcome import LossWatch, VersionDiverged
from learning.training.private import train_private
from tacit.job import JobSpec, Training
from tacit.mechanism import DpSgd, GaussianUpdate
from tacit.model import BiLSTMModel, RvaeModel, TextCNNModel
from tests.support.fleet import job_document
from tests.support.random_sources import Seeded
from tests.support.toy_jobs import examples_of, trained
from tests.support.toy_texts import LABELS, LIST

MODEL = TextCNNModel(embedding=8, widths=(1, 2), maps=8, dropout=0.0, max_tokens=12)
RECIPE = Training(optimiser="sgd", learning_rate=0.5, batch=16)


def data(count=60, labels=3, seed=0):
    random = np.random.default_rng(seed)
    ids = random.integers(1, 40, size=(count, 10))
    return ids, ids[:, 0] % labels


@pytest.mark.parametrize("made", [TextCNNModel, pytest.param(BiLSTMModel, marks=pytest.mark.long)])
def test_versions_before_and_after_long_training_have_not_diverged(made):
    module = build(made(embedding=8, dropout=0.0, max_tokens=12), 40, 3, 0, seed=1)
    check_not_diverged(module, RECIPE, 0)
    ids, labels = data()
    train(module, ids, labels, Training(learning_rate=0.02, batch=16, epochs=30), seed=0)
    for seed in range(10):
        check_not_diverged(module, RECIPE, seed)


def test_a_version_of_dp_sgd_at_too_high_a_rate_has_diverged():
    module = build(MODEL, 40, 3, 0, seed=1)
    ids, labels = data()
    recipe = RECIPE.model_copy(update={"learning_rate": 10.0})
    mechanism = DpSgd(noise_multiplier=2.0, clip=1.0, lot=8, steps=20)
    for round in range(4):
        # The self-check of gradients finds no fault meanwhile.
        train_private(module, ids, labels, recipe, mechanism, random=Seeded(f"{round}"), seed=0)
    with pytest.raises(VersionDiverged, match=r"new one with a lower training\.learning_rate \(it is 10\)"):
        check_not_diverged(module, recipe, 0)


def test_a_version_with_logits_that_are_not_finite_has_diverged():
    module = build(MODEL, 40, 3, 0, seed=1)
    with torch.no_grad():
        module.output.weight.fill_(torch.nan)
    with pytest.raises(VersionDiverged):
        check_not_diverged(module, RECIPE, 0)


def test_a_loss_that_explodes_and_stays_finite_is_divergence():
    module = build(MODEL, 40, 3, 0, seed=1)
    ids, labels = data()
    with pytest.raises(
        TrainingDiverged, match=r"training diverged: the mean loss was .* lower training\.learning_rate"
    ):
        train(module, ids, labels, RECIPE.model_copy(update={"learning_rate": 10.0, "optimiser": "adam"}), seed=0)


# ---- what a member sees of its own loss ------------------------------------------------------------------------------


def watched(losses, *, failed=None, **changes):
    watch = LossWatch(job_document().model_copy(update=changes))
    for step, loss in enumerate(losses, 1):
        watch.step(step, len(losses), loss)
    if failed is not None:
        watch.failed(failed)
    return watch.warning()


def test_a_loss_is_compared_with_guessing():
    # Two labels: guessing costs 0.693.
    assert watched([0.7] * 3 + [6.9]) is None
    said = watched([0.7] * 3 + [97.0])
    assert said == (
        "training is exploding: the loss ended at 97, and guessing costs 0.693. Ask the operator to compare this "
        "version with earlier ones, and for a new job with a lower training.learning_rate (it is 0.001)"
    )
    assert "ended at inf" in watched([0.7] * 3 + [math.inf])
    # It may have exploded in an earlier round.
    assert "ended at 97" in watched([97.0] * 4)
    assert watched([20.0] * 4, labels=tuple(f"label-{number}" for number in range(20))) is None


def test_only_the_last_quarter_of_the_steps_counts():
    assert watched([97.0] * 6 + [0.7] * 2) is None
    assert watched([0.7] * 6 + [97.0, 0.7]) is not None
    assert watched([0.7] * 7 + [13.0]) is None, "one hard batch of two"


def test_draws_without_an_example_say_nothing():
    assert watched([math.nan] * 8) is None
    assert watched([0.7] * 6 + [math.nan] * 2) is None
    assert "ended at 97" in watched([0.7] * 6 + [math.nan, 97.0])


def test_a_model_that_generates_is_compared_with_its_own_first_loss():
    model = RvaeModel(embedding=8, hidden=8, latent=2)
    assert watched([math.nan, 150.0] + [140.0] * 6, model=model) is None
    assert "it was at first 150" in watched([math.nan, 150.0] + [1600.0] * 6, model=model)


def test_a_training_that_failed_unseen_is_said_with_its_error():
    assert watched([0.7] * 2, failed=TrainingDiverged("the loss was not a finite number")) == (
        "the loss was not a finite number. The update is sent all the same, clipped and with noise. If every round "
        "ends like this, ask the operator for a new job with a lower training.learning_rate (it is 0.001)"
    )


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (KeyError("lion"), "KeyError: 'lion'"),
        (RuntimeError("the plugin's check failed"), "RuntimeError: the plugin's check failed"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_lower_rate_is_not_advised_against_what_is_no_divergence(error, what):
    assert watched([0.7] * 2, failed=error) == (
        f"training failed ({what}). The update is sent all the same, clipped and with noise. If every round ends like "
        "this, stop this member, which pays for each, and tell the operator why"
    )


def test_noise_on_whole_updates_may_be_the_cause():
    noise = "or with a smaller clip, fewer shared parameters or more members"
    drowned = GaussianUpdate(noise_multiplier=4.0)
    assert noise in watched([97.0] * 4, mechanism=drowned)
    assert noise in watched([97.0] * 4, mechanism=drowned, failed=TrainingDiverged("the mean loss was 9e+03 nats"))
    assert noise not in watched([97.0] * 4, mechanism=DpSgd(noise_multiplier=4.0))


@pytest.mark.parametrize(("rate", "warns"), [(0.1, False), (10.0, True)])
def test_a_member_is_warned_of_dp_sgd_at_too_high_a_rate(tmp_path, rate, warns):
    (tmp_path / "words.txt").write_text("\n".join(LIST) + "\n")
    spec = {
        "schema": 1,
        "name": "stories",
        "labels": list(LABELS),
        "vocabulary": {"kind": "words", "file": "words.txt"},
        "model": {"embedding": 8, "widths": (1, 2), "maps": 8, "dropout": 0.0},
        "mechanism": {"name": "dp-sgd", "noise_multiplier": 4.0, "clip": 1.0, "lot": 8, "steps": 8},
        "training": {"optimiser": "sgd", "learning_rate": rate},
    }
    make_job_bundle(JobSpec.model_validate(spec), tmp_path, tmp_path / "bundle")
    heard = []
    trained(read_job_bundle(tmp_path / "bundle"), examples_of(), warn=heard.append)
    assert bool(heard) == warns, heard
    if warns:
        assert "guessing costs" in heard[0]
