"""Adafactor, FedPrompt's optimiser for T5: its step, and a new start in every training."""

import numpy as np
import torch
from torch.nn import functional

from learning.models import build
from learning.models.division import shared_parameters
from learning.training.local import make_optimiser, train
from tacit.job import Training
from tacit.model import TextCNNModel
from tests.support.tiny_prompts import prompted, texts

torch.set_num_threads(1)
RECIPE = Training(optimiser="adafactor", learning_rate=0.3, batch=6, epochs=1)


def test_a_step_is_that_of_shazeer_and_stern_with_the_jobs_rate() -> None:
    """Algorithm 4 without momentum, relative steps and parameter scale; the update is clipped to RMS 1."""
    module = prompted("t5")
    values = module.prompt.vectors.weight
    start = values.detach().clone().double()
    optimiser = make_optimiser(module, RECIPE)
    random = torch.Generator().manual_seed(1)
    rows, columns = torch.zeros(4, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    expected = start
    for step in (1, 2, 3):
        g = torch.randn(4, 16, generator=random)
        values.grad = g.clone()
        optimiser.step()
        decay = 1 - step**-0.8
        square = g.double().square() + 1e-30
        rows = decay * rows + (1 - decay) * square.mean(dim=1)
        columns = decay * columns + (1 - decay) * square.mean(dim=0)
        update = g.double() / (rows[:, None] * columns[None] / rows.mean()).sqrt()
        update /= max(1.0, float(update.square().mean().sqrt()))
        expected = expected - 0.3 * update
        torch.testing.assert_close(values.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_it_starts_new_in_every_training() -> None:
    ids, labels = (each.numpy() for each in texts("t5"))
    twice = prompted("t5")
    train(twice, ids, labels, RECIPE, seed=1)
    train(twice, ids, labels, RECIPE, seed=2)
    first = prompted("t5")
    train(first, ids, labels, RECIPE, seed=1)
    second = prompted("t5", seed=None)
    with torch.no_grad():
        second.prompt.vectors.weight.copy_(first.prompt.vectors.weight)
    train(second, ids, labels, RECIPE, seed=2)
    for name, values in shared_parameters(twice).items():
        np.testing.assert_array_equal(values, shared_parameters(second)[name])


def test_it_trains_a_whole_embedding_without_narrowing_it() -> None:
    """Its moments are means over a whole matrix; the rows that texts use would have others alone."""
    model = TextCNNModel(embedding=6, widths=(2,), maps=4, dropout=0.0, max_tokens=8)
    ids = np.random.default_rng(1).integers(1, 12, size=(6, 8))
    labels = np.arange(6) % 2
    module, by_hand = build(model, 30, 2, 0, seed=1), build(model, 30, 2, 0, seed=1).train()
    train(module, ids, labels, RECIPE, seed=1)
    optimiser = make_optimiser(by_hand, RECIPE)
    functional.cross_entropy(by_hand(torch.from_numpy(ids)), torch.from_numpy(labels)).backward()
    optimiser.step()
    for name, parameter in by_hand.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    untouched = torch.ones(30, dtype=torch.bool)
    untouched[np.unique(ids)] = False
    start = build(model, 30, 2, 0, seed=1)
    assert torch.equal(module.embedding.weight[untouched], start.embedding.weight[untouched])
