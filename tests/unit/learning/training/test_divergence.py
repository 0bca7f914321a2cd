"""A diverged version is recognised before anybody trains on it, and no sound version is taken for one."""

import numpy as np
import pytest
import torch

from learning.models import build
from learning.training.divergence import VersionDiverged, check_not_diverged
from learning.training.local import TrainingDiverged, train
from learning.training.private import train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tacit.model import BiLSTMModel, TextCNNModel
from tests.support.random_sources import Seeded

MODEL = TextCNNModel(embedding=8, widths=(1, 2), maps=8, dropout=0.0, max_tokens=12)
RECIPE = Training(optimiser="sgd", learning_rate=0.5, batch=16)


def data(count=60, labels=3, seed=0):
    random = np.random.default_rng(seed)
    ids = random.integers(1, 40, size=(count, 10))
    return ids, ids[:, 0] % labels


@pytest.mark.parametrize("made", [TextCNNModel, BiLSTMModel])
def test_versions_before_and_after_long_training_have_not_diverged(made):
    module = build(made(embedding=8, dropout=0.0, max_tokens=12), 40, 3, 0, seed=1)
    check_not_diverged(module, RECIPE, 0)
    ids, labels = data()
    train(module, ids, labels, Training(learning_rate=0.01, batch=16, epochs=60), seed=0)
    for seed in range(20):
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
