"""CUDA and the CPU train alike: per-example clipped sums, a whole dp-sgd training with its noise, and one without.

The noise and the draws come from the member's source on the CPU, so both devices add the same. Kernels add in another
order, which moves the last bits of a sum, and now and then a value to the next point of the noise's lattice.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from learning.causal.model import CausalModel
from learning.causal.sizes import IGNORED
from learning.models import TextClassifier, build
from learning.models.classifier import TextModel
from learning.prompts.setting import Head, NoInjection
from learning.training.clipping import check_examples_apart
from learning.training.local import logits_of, train
from learning.training.private import train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tacit.model import BiLSTMModel, TextCNNModel
from tests.support.apart import assert_same, by_hand, clipped_sum
from tests.support.random_sources import Seeded
from tests.support.tiny_causal import causal
from tests.support.tiny_prompts import prompted

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")

torch.set_num_threads(1)
PAD, WORDS, LABELS, BATCH = 0, 50, 3, 24


def plain(model: TextCNNModel | BiLSTMModel) -> TextClassifier:
    return build(model, WORDS, LABELS, PAD, seed=3)


MADE: dict[str, Callable[[], TextModel]] = {
    "textcnn": lambda: build(
        TextCNNModel(embedding=12, maps=5, dropout=0.0, max_tokens=16), WORDS, LABELS, PAD, seed=3
    ),
    "bilstm": lambda: build(
        BiLSTMModel(embedding=10, hidden=6, dropout=0.0, max_tokens=16), WORDS, LABELS, PAD, seed=3
    ),
    "head": lambda: prompted("bert", NoInjection(), Head(layers=(1, 2))),
    "lora": lambda: prompted("bert", "lora", Head()),
    "bitfit": lambda: prompted("bert", "bitfit", Head()),
    "prompt": lambda: prompted("bert", "prompt", Head()),
    "writer": lambda: causal("llama", "lora"),
    "writer-up": lambda: causal("qwen3", "lora-up"),
    "writer-gpt2": lambda: causal("gpt2", "lora"),
    "writer-prompt": lambda: causal("llama", "prompt"),
    "writer-prefix": lambda: causal("llama", "prefix"),
}
of_each = pytest.mark.parametrize("made", MADE.values(), ids=MADE)


def texts(module: TextModel, rows: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Texts of different lengths with labels, or for a model that writes with the words to come after the second."""
    random = np.random.default_rng(0)
    ids = random.integers(5, WORDS, size=(rows, 14))
    for row, length in enumerate(random.integers(3, 15, size=rows)):
        ids[row, length:] = PAD
    if not isinstance(module, CausalModel):
        return ids, random.integers(0, LABELS, size=rows)
    targets = np.full_like(ids, IGNORED)
    targets[:, 1:-1] = np.where(ids[:, 2:] != PAD, ids[:, 2:], IGNORED)
    return ids, targets


def on_device(module: TextModel, device: str, clip: float, rows: slice = slice(None)) -> dict[str, Tensor]:
    ids, targets = (torch.from_numpy(each[rows]).to(device) for each in texts(module))
    found = clipped_sum(module.to(device).train(), ids, targets, clip)
    return {name: each.cpu() for name, each in found.items()}


def trained_values(module: TextModel) -> Tensor:
    return torch.cat([each.detach().flatten() for each in module.parameters() if each.requires_grad])


@of_each
def test_clipped_gradients_are_those_of_the_cpu(made) -> None:
    """Each example's alone, and their sum: to a hundred-thousandth of the clip for each example."""
    module = made().train()
    ids, targets = map(torch.from_numpy, texts(module))
    _, norms = by_hand(module, ids, targets, 1.0)
    clip = float(np.median(norms))
    assert_same(on_device(made(), DEVICE, clip), on_device(made(), "cpu", clip), BATCH * clip)
    for row in range(6):
        alone = slice(row, row + 1)
        assert_same(on_device(made(), DEVICE, clip, alone), on_device(made(), "cpu", clip, alone), clip)


@of_each
def test_the_self_check_passes(made) -> None:
    module = made().to(DEVICE).train()
    module.seed(1)
    check_examples_apart(module, 1)


@of_each
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_private_training_ends_where_that_of_the_cpu_does(made, optimiser) -> None:
    """The same source, so the same draws and noise: to a thousandth of the way that the values went."""
    ids, targets = texts(made(), 200)
    mechanism = DpSgd(noise_multiplier=0.8, clip=0.5, lot=60, steps=12)
    recipe = Training(optimiser=optimiser, learning_rate=0.5 if optimiser == "sgd" else 0.01, batch=256)

    def end(device: str) -> Tensor:
        module = made()
        train_private(module, ids, targets, recipe, mechanism, random=Seeded("cuda"), seed=1, device=device)
        return trained_values(module)

    ours, theirs = end("cpu"), end(DEVICE)
    way = float((ours - trained_values(made())).norm())
    assert way > 0.01
    assert float((theirs - ours).norm()) <= 1e-3 * way


@of_each
def test_a_training_without_noise_ends_where_that_of_the_cpu_does(made) -> None:
    """To a thousandth of the way, and its logits to a thousandth."""
    ids, targets = texts(made(), 120)
    recipe = Training(optimiser="sgd", learning_rate=0.05, batch=16, epochs=2)

    def end(device: str) -> tuple[Tensor, np.ndarray]:
        module = made()
        train(module, ids, targets, recipe, seed=4, device=device)
        return trained_values(module), logits_of(module, ids, device=device)

    (ours, ours_logits), (theirs, theirs_logits) = end("cpu"), end(DEVICE)
    way = float((ours - trained_values(made())).norm())
    assert way > 0.01
    assert float((theirs - ours).norm()) <= 1e-3 * way
    assert np.allclose(theirs_logits, ours_logits, rtol=1e-3, atol=1e-3)
