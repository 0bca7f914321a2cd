"""Correlated steps: the noise is C^-1 z, its covariance, skipped steps, classes, and what one example can move."""

import numpy as np
import pytest
import torch
from torch import nn

from learning.mechanisms.banded import best_coefficients
from learning.mechanisms.correlated import CorrelatedSteps, classes_of
from learning.mechanisms.noise import lattice_step
from learning.mechanisms.protection import protection_of
from learning.training.head import HeadTraining, LinearHead, train_private_head
from learning.training.private import add_noise
from secure_agg.randomness import SystemRandom
from tacit.job import Training
from tacit.mechanism import DpSgd
from tests.support.heads import arrays
from tests.support.random_sources import Seeded
from tests.unit.learning.mechanisms.test_banded import dense
from tests.unit.learning.mechanisms.test_mechanisms import job

BAND, STEPS = 3, 8
C = best_coefficients(BAND, STEPS)
KEY = bytes(range(32))


def begun(values=5, rate=1.0, coefficients=C):
    return CorrelatedSteps.begun(coefficients, 1.0, rate, KEY, values)


def test_the_rows_are_those_of_the_inverse():
    z = np.random.default_rng(0).standard_normal((STEPS, 5))
    steps, rows = begun(), []
    for t in range(STEPS):
        whole = z[t].copy()
        # In two parts, as blocks of parameters come.
        steps.correlate(whole[:2], 0)
        steps.correlate(whole[2:], 2)
        steps.taken()
        rows.append(whole)
    assert np.allclose(rows, np.linalg.inv(dense(C, STEPS)) @ z)
    assert steps.step == STEPS
    assert np.allclose(steps.rows[(STEPS - 1) % (BAND - 1)], rows[-1])


def nothing_of(module):
    """The sums of a step that drew no example."""
    return {name: torch.zeros_like(each, dtype=torch.float64) for name, each in module.named_parameters()}


def test_the_covariance_of_what_a_training_adds():
    # Many coordinates of a bias are many draws of the noise. No example: each step is its noise alone.
    values, std, unit = 20_000, 0.7 * 0.25, 0.25
    module = nn.Linear(1, values)
    module.weight.requires_grad_(False)
    steps, random, rows = begun(values), Seeded("covariance"), []
    for _ in range(STEPS):
        add_noise(module, {"bias": torch.zeros(values, dtype=torch.float64)}, unit, std, random, steps)
        rows.append(module.bias.grad.double().numpy() / std)
    seen = np.array(rows)
    inverse = np.linalg.inv(dense(C, STEPS))
    expected = inverse @ inverse.T
    found = seen @ seen.T / values
    # The largest of 36 errors of about sqrt(2 / 20,000) standard deviations.
    assert np.abs(found - expected).max() < 4.5 * np.sqrt(2 / values) * expected.max()
    # The sum over all steps is what the matrix is made for, and independent rows would have more of it.
    assert seen.sum(axis=0).var() == pytest.approx(expected.sum(), rel=0.05)
    assert seen.sum(axis=0).var() < 0.75 * np.trace(expected)
    assert np.all(np.rint(seen * std / lattice_step(std)) * lattice_step(std) == pytest.approx(seen * std))


def test_a_long_parameter_is_made_block_by_block_each_in_its_place():
    module = nn.Linear(1, 40_000)
    module.weight.requires_grad_(False)
    steps = begun(40_000)
    for _ in range(BAND - 1):
        add_noise(module, {"bias": torch.zeros(40_000, dtype=torch.float64)}, 0.5, 0.5, SystemRandom(), steps)
    assert np.count_nonzero(steps.rows) == steps.rows.size
    newest = steps.rows[(BAND - 2) % (BAND - 1)]
    assert np.allclose(module.bias.grad.double().numpy(), 0.5 * newest, atol=lattice_step(0.5))


def test_training_adds_the_noise_that_the_ledger_was_charged_for():
    document = job({"name": "dp-sgd", "noise_multiplier": 8.0, "lot": 50, "steps": 1, "coefficients": C})
    head = LinearHead(np.zeros((50, 400), np.float32), np.zeros(50, np.float32), trains_bias=False)
    features, ids = np.zeros((1, 400), np.float32), np.ones((1, 1), np.int64)
    steps = CorrelatedSteps.begun(C, 9.0, 1.0, KEY, 20_000)
    recipe = Training(optimiser="sgd", learning_rate=1.0)
    task = HeadTraining(head, features, np.zeros(1, np.int64), recipe, 0, 1, np.arange(1), ids=ids, correlated=steps)
    protection_of(document, 100).train(task, SystemRandom())
    assert np.std(head.weight.astype(float) * 50) == pytest.approx(9.0 / C[0], rel=0.03)


def test_every_parameter_has_a_part_of_the_row_of_its_own():
    module = nn.Linear(3, 4)
    steps = begun(16)
    for _ in range(BAND - 1):
        add_noise(module, nothing_of(module), 0.5, 0.5, SystemRandom(), steps)
    seen = torch.cat([each.grad.flatten() for each in module.parameters()]).double().numpy()
    assert np.allclose(seen, 0.5 * steps.rows[(BAND - 2) % (BAND - 1)], atol=lattice_step(0.5))
    assert len(np.unique(steps.rows)) == steps.rows.size


def test_a_skipped_step_leaves_the_rows_as_if_it_had_been_taken():
    taken, skipped = begun(), begun()
    random = Seeded("skipping")
    skipped.skip(2, random)
    assert skipped.step == 2
    z = np.array([np.array(dense(C, 2)[t, :2] @ [skipped.rows[0], skipped.rows[1]]) for t in range(2)])
    for t in range(2):
        row = z[t].copy()
        taken.correlate(row, 0)
        taken.taken()
    assert np.allclose(taken.rows, skipped.rows)
    assert np.abs(skipped.rows).min() > 0


def test_a_copy_takes_steps_of_its_own_with_noise_of_its_own():
    first = begun()
    first.skip(3, SystemRandom())
    second = first.copy()
    first.skip(1, SystemRandom())
    assert second.step == 3
    second.skip(1, SystemRandom())
    new = 3 % (BAND - 1)
    assert not np.any(first.rows[new] == second.rows[new])
    assert np.array_equal(first.rows[1 - new], second.rows[1 - new])


def test_an_example_is_drawn_at_most_once_in_b_steps():
    ids = np.arange(1, 601).reshape(200, 3)
    classes = classes_of(KEY, BAND, ids, np.full(200, 3), np.zeros(200, dtype=np.int64))
    steps, when = begun(rate=0.6), {row: [] for row in range(200)}
    for t in range(60):
        for row in steps.draw(classes, SystemRandom()):
            when[int(row)].append(t)
        steps.taken()
    assert all(np.diff(each).min() >= BAND for each in when.values() if len(each) > 1)
    assert all(len({t % BAND for t in each}) <= 1 for each in when.values())
    # Each of 20 chances with the rate: 4,000 coins.
    assert sum(map(len, when.values())) == pytest.approx(0.6 * 200 * 20, abs=5 * np.sqrt(4000 * 0.24))


def test_a_class_depends_on_the_example_alone():
    ids = np.array([[5, 6, 7, 0], [5, 6, 0, 0], [8, 9, 1, 2]])
    lengths, labels = np.array([3, 2, 4]), np.array([0, 1, 0])
    whole = classes_of(KEY, 97, ids, lengths, labels)
    order = [2, 0]
    assert np.array_equal(classes_of(KEY, 97, ids[order], lengths[order], labels[order]), whole[order])
    wider = np.pad(ids, ((0, 0), (0, 3)))
    assert np.array_equal(classes_of(KEY, 97, wider, lengths, labels), whole)
    # The label is told apart from a token, and another key gives other classes.
    many = np.arange(4000).reshape(1000, 4)
    full, zeros = np.full(1000, 4), np.zeros(1000, dtype=np.int64)
    same = classes_of(KEY, 97, many, full, zeros) == classes_of(bytes(32), 97, many, full, zeros)
    assert same.mean() < 0.05
    counts = np.bincount(classes_of(KEY, 10, many, full, zeros), minlength=10)
    assert counts.min() > 60


def test_one_example_moves_the_whole_job_by_the_root_of_its_steps():
    # Over all ways to be drawn in one class: |C e| with gradients of norm 1 in any direction, here all in the same.
    matrix = dense(C, STEPS)
    for cls in range(BAND):
        places = list(range(cls, STEPS, BAND))
        for chosen in range(1, 2 ** len(places)):
            u = np.zeros(STEPS)
            u[[p for i, p in enumerate(places) if chosen >> i & 1]] = 1
            assert np.linalg.norm(matrix @ u) <= np.sqrt(u.sum()) + 1e-12
    # Without the separation, it moves further.
    together = np.zeros(STEPS)
    together[:2] = 1
    assert np.linalg.norm(matrix @ together) > np.sqrt(2) * 1.1


def test_a_heads_row_is_that_of_a_modules_parameters():
    """From the same coins, a head gets the noise that `add_noise` gives a module of the same shapes, to the bit."""
    mechanism = DpSgd(noise_multiplier=0.5, clip=1.0, lot=4, steps=1, coefficients=C)
    ours, theirs = begun(10), begun(10)
    for number in range(BAND):
        head, module = nn.Linear(4, 2), nn.Linear(4, 2)
        for each in (*head.parameters(), *module.parameters()):
            each.data.zero_()
        nothing = np.zeros((0, 4), np.float32), np.zeros(0, np.int64), Training(optimiser="sgd", learning_rate=1.0)
        # Without examples the sum is zero, and nothing but the noise reads the source.
        given = {"random": Seeded(number), "rate": 1.0, "ids": np.zeros((0, 3), np.int64), "correlated": ours}
        train_private_head(arrays(head), *nothing, mechanism, **given)
        add_noise(module, nothing_of(module), 0.25, 0.125, Seeded(number), theirs)
        assert torch.equal(-head.weight, module.weight.grad)
        assert torch.equal(-head.bias, module.bias.grad)
    assert np.array_equal(ours.rows, theirs.rows)
    assert ours.step == theirs.step == BAND


def test_a_head_trains_on_its_class_and_goes_on_where_it_stood():
    random = np.random.default_rng(1)
    features = random.standard_normal((40, 4)).astype(np.float32)
    ids, labels = np.arange(1, 41)[:, None], random.integers(0, 2, 40)
    mechanism = DpSgd(noise_multiplier=0.5, clip=1.0, lot=40, steps=2, coefficients=C)
    steps = CorrelatedSteps.begun(C, 0.5, 1.0, KEY, 10)
    head = nn.Linear(4, 2)
    recipe = Training(optimiser="sgd", learning_rate=0.1)
    common = {"random": SystemRandom(), "rate": 1.0, "ids": ids}
    train_private_head(arrays(head), features, labels, recipe, mechanism, correlated=steps, **common)
    assert steps.step == 2
    with pytest.raises(ValueError, match="3 bands"):
        train_private_head(arrays(head), features, labels, recipe, mechanism, **common)
    independent = mechanism.model_copy(update={"coefficients": (1.0,)})
    with pytest.raises(ValueError, match="1 bands"):
        train_private_head(arrays(head), features, labels, recipe, independent, correlated=steps, **common)
    with pytest.raises(ValueError, match="another length"):
        train_private_head(arrays(head), features, labels, recipe, mechanism, correlated=begun(9), **common)
    with pytest.raises(ValueError, match="tokens of each example"):
        train_private_head(
            arrays(head), features, labels, recipe, mechanism, correlated=steps, random=SystemRandom(), rate=1.0
        )
