"""An attacker that guesses dropout's coins under DP-SGD sees more than was accounted for. A torch generator's coins can
be guessed.

The adversary knows all texts except whether one is present, sees the noised sum of one step in which every text is
drawn, and tries seeds. Coins come in the order of the batch, so one more text shifts the coins of all later ones, and
moves the sum by far more than its clip. So given the coins, noise calibrated to the clip hides neither the text nor the
seed. A generator on a CPU takes 32 bits of its seed, which many cores can try in an afternoon; here the adversary gets
a short list with the right seed on it.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from learning.models import build
from learning.models.classifier import TextClassifier
from learning.training.clipping import ClippedGradients
from learning.training.local import rows_at
from learning.training.private import equal_pieces, padded_lengths, train_private
from tacit.job import Training
from tacit.mechanism import DpSgd
from tacit.model import TextCNNModel
from tests.support.random_sources import Seeded

WORDS, LENGTH, TEXTS = 60, 12, 256
MODEL = TextCNNModel(embedding=16, maps=16, max_tokens=LENGTH)
MECHANISM = DpSgd(noise_multiplier=2.0, clip=1.0, lot=TEXTS, steps=1)
RECIPE = Training(optimiser="sgd", learning_rate=1.0, batch=128)


class Noted(Seeded):
    """A source that records what it gave."""

    def __init__(self, seed):
        super().__init__(seed)
        self.given = []

    def bytes(self, n, /):
        self.given.append(super().bytes(n))
        return self.given[-1]


def texts():
    """Returns (ids, labels). The first text is the shortest, so it comes first in its batch."""
    random = np.random.default_rng(0)
    ids = np.zeros((TEXTS, LENGTH), dtype=np.int64)
    for row, length in enumerate(np.sort(random.integers(6, LENGTH + 1, size=TEXTS))):
        ids[row, :length] = random.integers(2, WORDS, size=length)
    ids[0, 5:] = 0
    return ids, random.integers(2, size=TEXTS)


def values_of(module):
    return torch.cat([each.detach().flatten() for each in module.parameters()]).double()


def summed(ids, labels, start):
    """The sum of clipped gradients, in clips, with the module's coins begun by `start`."""
    module = build(MODEL, WORDS, 2, 0, seed=3).train()
    start(module)
    padded = padded_lengths(module, (ids != 0).sum(axis=1))
    with ClippedGradients(module) as clipped:
        for rows in equal_pieces(np.arange(len(ids)), padded, RECIPE.batch):
            inputs, target = rows_at(module, ids, labels, lengths=padded, rows=rows, device="cpu")
            clipped.add(functional.cross_entropy(module(inputs), target, reduction="none"), 1.0)
    return torch.cat([each.flatten() for each in clipped.sums.values()])


def attack(there, name):
    """Returns the log-likelihood of each guess, and that of the truth.

    A guess is (the seed's place on the list, whether the text is present). The right seed is at place 0.
    """
    ids, labels = texts()
    held = (ids, labels) if there else (ids[1:], labels[1:])
    module, source = build(MODEL, WORDS, 2, 0, seed=3), Noted(name)
    before = values_of(module)
    train_private(module, *held, RECIPE, MECHANISM, random=source, seed=0, rate=1.0)
    seen = (before - values_of(module)) * MECHANISM.lot

    def likelihood(total):
        return float((seen @ total - total @ total / 2) / MECHANISM.noise_multiplier**2)

    # The result of the second call began the coins, with all of it or its first 32 bits.
    key = source.given[1]
    seeds = [int.from_bytes(key[:4], "little"), *np.random.default_rng(1).integers(2**32, size=4).tolist()]
    guesses = {
        (place, guess): likelihood(
            summed(*((ids, labels) if guess else (ids[1:], labels[1:])), lambda m, s=seed: m.seed(s))
        )
        for place, seed in enumerate(seeds)
        for guess in (True, False)
    }

    def truly(module):
        if len(key) == 32:
            module.draw_from(_Given(key))
        else:
            module.seed(int.from_bytes(key, "little"))

    return guesses, likelihood(summed(*held, truly))


class _Given:
    def __init__(self, key):
        self._key = key

    def bytes(self, n, /):
        assert n == len(self._key)
        return self._key


@pytest.mark.parametrize("there", [True, False])
def test_a_guessable_seed_reveals_itself_and_the_text(there, monkeypatch):
    monkeypatch.setattr(
        TextClassifier, "draw_from", lambda self, random: self.seed(int.from_bytes(random.bytes(8), "little"))
    )
    guesses, truth = attack(there, f"baseline {there}")
    assert max(guesses, key=guesses.get) == (0, there)
    assert guesses[0, there] == pytest.approx(truth)
    # Far more than one clip's worth: the accounted epsilon of this step is 2.3 at a delta of 1e-6.
    assert guesses[0, there] - guesses[0, not there] > 10
    assert guesses[0, there] - max(each for (place, _), each in guesses.items() if place) > 10


@pytest.mark.parametrize("there", [True, False])
def test_the_coins_of_a_stream_cannot_be_guessed(there):
    guesses, truth = attack(there, f"ours {there}")
    # The truth would stand out as much as before, but no guess comes near it, with or without the text.
    assert truth - max(guesses.values()) > 10
