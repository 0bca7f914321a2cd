"""A version that explodes is noticed from norms alone, and no sound training is taken for one."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from coordinator.domain.explosion import WINDOW, explosion
from coordinator.domain.jobs import Exploded, Norms
from coordinator.rounds.publish import norms_of
from learning.models import build
from learning.training.local import evaluate, train
from learning.training.private import train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tacit.model import TextCNNModel
from tests.support.random_sources import Seeded

MODEL = TextCNNModel(embedding=16, widths=(1, 2), maps=16, dropout=0.0, max_tokens=16)
VALUES = 10_000  # A root mean square of 0.1 is a norm of 10.


def first(steps, values=VALUES):
    """The first explosion in a row of steps, as the coordinator finds it."""
    for number, norms in enumerate(steps, 1):
        if (found := explosion(number, values, tuple(steps[: number - 1]), norms)) is not None:
            return found
    return None


def row(*norms, change=1.0):
    return [Norms(before, after, change) for before, after in pairwise(norms)]


def test_norms_are_those_of_whole_vectors():
    random = np.random.default_rng(0)
    base, values = (random.normal(size=200_001).astype(np.float32) for _ in range(2))
    norms = norms_of(base, values)
    wide = [each.astype(np.float64) for each in (base, values)]
    expected = [np.linalg.norm(each) for each in (*wide, wide[1] - wide[0])]
    assert [norms.base, norms.version, norms.change] == pytest.approx(expected, rel=1e-12)


def test_a_norm_that_grows_fivefold_within_the_window_is_an_explosion():
    assert first(row(20, 99)) is None
    assert first(row(20, 101)) == Exploded(1, "norm", 101 / 20, 0)
    # Over five steps as over one, and not over six.
    assert first(row(20, 30, 45, 65, 90, 101)) == Exploded(5, "norm", 101 / 20, 0)
    assert first(row(90, 20, 30, 101)) == Exploded(3, "norm", 101 / 20, 1)
    assert first(row(10, 20, 30, 40, 45, 49, 100)) is None
    assert first(row(10, 20, 30, 40, 45, 49, 101)) == Exploded(6, "norm", 101 / 20, 1)
    assert first(row(20, 30, 45, 65, 90, 95, 101)) is None


def test_a_norm_that_is_small_for_its_values_may_grow():
    assert first(row(0.0, 0.001, 4, 20, 49)) is None
    assert first(row(0.0, 0.001, 4, 20, 51)) == Exploded(4, "norm", 5.1, 0)
    assert first(row(1, 51), values=100) == Exploded(1, "norm", 51, 0)


def test_a_change_ten_times_as_long_as_those_before_is_an_explosion():
    steps = [Norms(50.0, 50.0, change) for change in (5.0, 0.6, 0.5, 0.7, 5.9, 0.6)]
    assert first(steps) is None
    assert first([*steps, Norms(50.0, 60.0, 40.0)]) == Exploded(7, "change", 40.0 / 0.6, 6)
    # Not against one step, nor where it hardly moves the version.
    assert first([Norms(50.0, 50.0, 0.1), Norms(50.0, 60.0, 40.0)]) is None
    assert first([Norms(50.0, 50.0, 0.25)] * 3 + [Norms(50.0, 50.0, 4.9)]) is None
    assert first([Norms(50.0, 50.0, 0.25)] * 3 + [Norms(50.0, 50.0, 5.5)]) == Exploded(4, "change", 22.0, 3)


def test_steps_before_the_window_do_not_count():
    steps = [Norms(50.0, 50.0, 0.5)] * 4 + [Norms(50.0, 60.0, 30.0)] * (WINDOW + 1)
    assert first(steps[:4] + steps[4:5]) == Exploded(5, "change", 60.0, 4)
    assert explosion(10, VALUES, tuple(steps[:-1]), steps[-1]) is None


def test_the_sentence_says_what_to_do():
    assert Exploded(3, "norm", 12.345, 0).sentence == (
        "version 3 has exploded: its norm is 12.3 times that of version 0. Compare it with version 0 by "
        "`coordinator evaluate`; if it is worse, abort the job and create one with a lower training.learning_rate or "
        "clip"
    )
    assert "its change is 40 times as long as those before it" in Exploded(3, "change", 40.0, 2).sentence


def trained(recipe, mechanism, rounds=6):
    """The steps of a member's training alone, and its loss at the end."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = random.integers(1, 400, size=(120, 16))
    labels = ((ids < 200).sum(axis=1) > 8).astype(np.int64)
    module = build(MODEL, 400, 2, 0, seed=1)

    def flat():
        return np.concatenate([each.detach().numpy().ravel() for each in module.parameters()])

    steps = []
    for number in range(rounds):
        before = flat()
        if mechanism is None:
            train(module, ids, labels, recipe, seed=number)
        else:
            train_private(module, ids, labels, recipe, mechanism, random=Seeded(f"{number}"), seed=0)
        steps.append(norms_of(before, flat()))
    return steps, len(before), evaluate(module, ids, labels).loss


@pytest.mark.parametrize(
    ("optimiser", "rate", "private"),
    [("sgd", 0.5, True), ("adam", 0.01, True), ("sgd", 1.0, False), ("adam", 0.01, False)],
)
def test_training_that_works_is_no_explosion(optimiser, rate, private):
    recipe = Training(optimiser=optimiser, learning_rate=rate, batch=32, epochs=2)
    mechanism = DpSgd(noise_multiplier=1.0, clip=1.0, lot=32, steps=10) if private else None
    steps, values, loss = trained(recipe, mechanism)
    assert first(steps, values) is None, steps
    assert loss < 0.75


@pytest.mark.parametrize(("optimiser", "rate"), [("sgd", 10.0), ("adam", 1.0)])
def test_dp_sgd_whose_loss_explodes_is_an_explosion(optimiser, rate):
    recipe = Training(optimiser=optimiser, learning_rate=rate, batch=32)
    steps, values, loss = trained(recipe, DpSgd(noise_multiplier=1.0, clip=1.0, lot=32, steps=10))
    assert loss > 7
    found = first(steps, values)
    assert found is not None, steps
    assert found.measure == "norm"
