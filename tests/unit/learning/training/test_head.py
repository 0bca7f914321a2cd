"""A head on computed features: its closed form beside autograd, DP-SGD's, and what an example can add at most."""

import copy
import sys
from contextlib import contextmanager
from typing import ClassVar, get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from learning.mechanisms.noise import noised_on_lattice
from learning.models.classifier import Dropout, TextClassifier
from learning.training.clipping import clip_factors
from learning.training.head import clipped_sums, make_head_optimiser, train_head, train_private_head
from learning.training.local import make_optimiser, train
from learning.training.outcome import TrainingCancelled, TrainingDiverged
from learning.training.phases import Phase
from learning.training.private import add_noise
from secure_agg.randomness import SystemRandom
from tacit.job import Training
from tacit.mechanism import DpSgd
from tests.support.heads import arrays

torch.set_num_threads(1)
ROWS, WIDTH, LABELS = 37, 12, 5


def head(seed=0):
    made = nn.Linear(WIDTH, LABELS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 1, generator=generator)
    return made


def data(seed=0, rows=ROWS):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, WIDTH)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True), random.integers(0, LABELS, size=rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clip", [0.05, 0.7, 100.0])
def test_the_closed_form_is_autograds(clip, bias):
    made, (x, y) = head(), data()
    made.bias.requires_grad_(bias)
    drawn = np.array([0, 3, 4, 9, 30])
    expected, expected_bias, losses = torch.zeros(LABELS, WIDTH).double(), torch.zeros(LABELS).double(), 0.0
    exact = copy.deepcopy(made).double()
    for row in drawn:
        exact.zero_grad()
        loss = functional.cross_entropy(
            exact(torch.from_numpy(x[row : row + 1]).double()), torch.from_numpy(y[row : row + 1])
        )
        loss.backward()
        squared = sum(each.grad.square().sum() for each in exact.parameters() if each.requires_grad)
        factor = clip_factors(squared, clip) / clip
        expected += factor * exact.weight.grad
        if bias:
            expected_bias += factor * exact.bias.grad
        losses += float(loss.detach())
    weight, bias_sum, loss_sum = clipped_sums(arrays(made), x, y, drawn, clip)
    assert torch.allclose(torch.from_numpy(weight), expected, rtol=1e-10, atol=1e-12)
    if bias:
        assert torch.allclose(torch.from_numpy(bias_sum), expected_bias, rtol=1e-10, atol=1e-12)
    assert loss_sum == pytest.approx(losses)


def test_an_example_adds_at_most_one_clip_whatever_its_features_are():
    made, (x, y) = head(), data()
    for scale in (1e-30, 1.0, 1e30):
        weight, bias, _ = clipped_sums(arrays(made), (x * np.float32(scale)), y, np.array([7]), 0.3)
        assert float(np.linalg.norm(np.append(weight.ravel(), bias))) <= 1 + 1e-12
    x = x.copy()
    x[7] = np.nan
    x[8, 0] = np.inf
    both = clipped_sums(arrays(made), x, y, np.array([5, 7, 8, 9]), 0.3)
    sound = clipped_sums(arrays(made), x, y, np.array([5, 9]), 0.3)
    assert np.array_equal(both[0], sound[0])
    assert np.array_equal(both[1], sound[1])


def test_blocks_make_no_difference(monkeypatch):
    made, (x, y) = head(), data()
    whole = clipped_sums(arrays(made), x, y, np.arange(ROWS), 0.5)
    monkeypatch.setattr("learning.training.head._BLOCK", 4)
    parts = clipped_sums(arrays(made), x, y, np.arange(ROWS), 0.5)
    assert np.allclose(whole[0], parts[0], rtol=1e-12, atol=1e-14)
    assert whole[2] == pytest.approx(parts[2])


class NoNoise(SystemRandom):
    """Draws that are real; the noise is too small to see."""


def test_private_steps_are_plain_gradient_descent_without_noise_and_clip():
    """With every example drawn, a huge clip and hardly any noise, DP-SGD is gradient descent over the lot."""
    x, y = data()
    mechanism = DpSgd(noise_multiplier=1e-9, clip=100.0, lot=ROWS, steps=4)
    recipe = Training(optimiser="sgd", learning_rate=0.5)
    found, expected = head(), head()
    train_private_head(arrays(found), x, y, recipe, mechanism, random=NoNoise(), rate=1.0)
    optimiser = torch.optim.SGD(expected.parameters(), lr=0.5)
    for _ in range(4):
        optimiser.zero_grad()
        functional.cross_entropy(expected(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimiser.step()
    assert torch.allclose(found.weight, expected.weight, atol=1e-5)
    assert torch.allclose(found.bias, expected.bias, atol=1e-5)


def test_the_noise_is_what_is_charged():
    """Two trainings from one start differ by the noise alone: rate * multiplier * clip / lot, in each coordinate."""
    x, y = data()
    mechanism = DpSgd(noise_multiplier=3.0, clip=0.5, lot=ROWS, steps=1)
    moved = []
    for _ in range(60):
        made = head()
        train_private_head(
            arrays(made), x, y, Training(optimiser="sgd", learning_rate=2.0), mechanism, random=SystemRandom(), rate=1.0
        )
        moved.append(torch.cat([made.weight.detach().flatten(), made.bias.detach()]))
    std = float(torch.stack(moved).std(dim=0).pow(2).mean().sqrt())
    assert std == pytest.approx(2.0 * 3.0 * 0.5 / ROWS, rel=0.05)


def test_a_frozen_bias_stays_and_the_matrix_is_noised():
    made, start, (x, y) = head(), head(), data()
    made.bias.requires_grad_(False)
    mechanism = DpSgd(noise_multiplier=1.0, lot=4, steps=3)
    train_private_head(arrays(made), x, y, Training(), mechanism, random=SystemRandom(), rate=1.0)
    train_head(arrays(made), x, y, Training(), seed=1)
    assert torch.equal(made.bias, start.bias)
    assert bool((made.weight != start.weight).all())


def test_without_examples_every_step_is_noise():
    made, start = head(), head()
    mechanism = DpSgd(noise_multiplier=1.0, lot=4, steps=3)
    result = train_private_head(
        arrays(made),
        np.empty((0, WIDTH), dtype=np.float32),
        np.empty(0, dtype=np.int64),
        Training(),
        mechanism,
        random=SystemRandom(),
        rate=1.0,
    )
    assert result.steps == 3
    assert not torch.equal(made.weight, start.weight)


def test_a_training_stops_when_asked_and_a_diverged_one_says_so():
    x, y = data()
    mechanism = DpSgd(noise_multiplier=1.0, lot=4, steps=5)
    seen = []
    with pytest.raises(TrainingCancelled, match="after step 2 of 5"):
        train_private_head(
            arrays(head()),
            x,
            y,
            Training(),
            mechanism,
            random=SystemRandom(),
            rate=1.0,
            progress=seen.append,
            cancelled=lambda: len(seen) == 2,
        )
    made = head()
    with torch.no_grad():
        made.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match=r"training\.learning_rate"):
        train_private_head(arrays(made), x, y, Training(), mechanism, random=SystemRandom(), rate=1.0)
    with pytest.raises(ValueError, match="expected features"):
        train_private_head(arrays(head()), x, y[:-1], Training(), mechanism, random=SystemRandom(), rate=1.0)


def test_plain_steps_learn_and_move_only_the_head():
    x, y = data(rows=200)
    y = x[:, :LABELS].argmax(axis=1)
    before, made = x.copy(), head()
    result = train_head(arrays(made), x, y, Training(epochs=30, batch=20, learning_rate=0.05), seed=1)
    assert result.correct / result.count > 0.8
    assert (x == before).all()


def test_plain_steps_are_those_of_the_whole_module():
    """One full batch of plain descent beside torch's."""
    x, y = data()
    found, expected = head(), head()
    train_head(arrays(found), x, y, Training(epochs=3, batch=ROWS, optimiser="sgd", learning_rate=0.3), seed=1)
    optimiser = torch.optim.SGD(expected.parameters(), lr=0.3)
    for _ in range(3):
        optimiser.zero_grad()
        functional.cross_entropy(expected(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimiser.step()
    assert torch.allclose(found.weight, expected.weight, atol=1e-6)


# Every optimiser that a job's document can name: a head may be all that the job trains.
@pytest.mark.parametrize(
    ("optimiser", "decay"),
    [*((each, None) for each in get_args(Training.model_fields["optimiser"].annotation)), ("adamw", 0.6)],
)
def test_the_optimisers_are_those_that_torch_trains_a_whole_module_with(optimiser, decay):
    recipe = Training(optimiser=optimiser, learning_rate=0.05, weight_decay=decay)
    found, expected = arrays(head()), head()
    expected.embedding = None
    ours, theirs = make_head_optimiser(found, recipe), make_optimiser(expected, recipe)
    random = np.random.default_rng(4)
    for _ in range(25):
        gradients = [random.standard_normal(each.shape).astype(np.float32) for each in found.trained]
        gradients[0][1] *= 1e-3
        for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient)
        theirs.step()
        ours.step(gradients)
    assert np.allclose(found.weight, expected.weight.detach().numpy(), atol=2e-6)
    assert np.allclose(found.bias, expected.bias.detach().numpy(), atol=2e-6)
    assert not np.allclose(found.weight, head().weight.detach().numpy(), atol=0.01)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_plain_steps_are_those_of_torch_for_the_same_seed(mu):
    """The whole recipe beside `local.train` on a module that is only a head: batches, epochs, distance."""
    x, y = data(rows=100)
    y[:60] = 0
    recipe = Training(epochs=3, batch=16, learning_rate=0.05)
    found, expected = head(), OnRows(head(), x)
    ours = train_head(arrays(found), x, y, recipe, seed=11, mu=mu)
    phase = Phase(3, frozenset(name for name, _ in expected.named_parameters()), mu=mu)
    theirs = train(expected, np.arange(100)[:, None], y, recipe, seed=11, phases=(phase,))
    assert np.allclose(found.weight.detach(), expected.output.weight.detach(), atol=2e-5)
    assert np.allclose(found.bias.detach(), expected.output.bias.detach(), atol=2e-5)
    assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-4)
    assert (ours.steps, ours.count, ours.correct) == (theirs.steps, theirs.count, theirs.correct)


def test_noise_on_arrays_is_noise_on_tensors_from_the_same_coins():
    """A head's noise is what `add_noise` gives a module of the same shapes, to the bit."""
    # So large that float32 would move some to another cell of the lattice.
    sums = np.random.default_rng(1).standard_normal((300, 120)) * 1000
    layer = nn.Linear(120, 300, bias=False)
    add_noise(layer, {"weight": torch.from_numpy(sums)}, 0.01, 0.02, Recorded(5))
    assert np.array_equal(noised_on_lattice(sums, 0.01, 0.02, Recorded(5)), layer.weight.grad.numpy())


def test_without_torch_the_noise_is_the_same_on_the_lattice(monkeypatch):
    sums = np.zeros((300, 120))
    with_torch = noised_on_lattice(sums, 0.01, 0.02, Recorded(5))
    monkeypatch.setitem(sys.modules, "torch", None)
    without = noised_on_lattice(sums, 0.01, 0.02, Recorded(5))
    assert np.array_equal(with_torch, without)
    assert without.std() == pytest.approx(0.02, rel=0.02)


class OnRows(TextClassifier):
    """A head whose texts are the numbers of rows of features."""

    parts: ClassVar = {"output": "head"}

    def __init__(self, output, features):
        super().__init__()
        self.pad_id, self.min_tokens = len(features), 1
        self.features = torch.from_numpy(features)
        self.embedding = nn.Embedding(len(features) + 1, 1)
        self.embedding.requires_grad_(False)
        self.dropout = Dropout(0.0)
        self.output = output

    def forward(self, ids):
        return self.output(self.features[ids[:, 0]])

    @contextmanager
    def narrowed(self, ids):
        yield ids


class Recorded:
    """Coins that can be drawn twice."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)

    def bytes(self, count):
        return self._random.bytes(count)
