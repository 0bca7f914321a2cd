"""A model that writes remembers secrets that it was trained on, and under dp-sgd at epsilon 8 it does not.

The data holds four secrets, each in one row beside 150 ordinary rows, and the job's own training loops run: without the
mechanism, with it, and with its clipping alone. The attacker knows each prompt and the format of its response. All
models learn the ordinary rows, so no result is that of a model which learnt nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from learning.accounting.planning import Setting, rows_of
from learning.auditing.exposure import Canary, Exposure, candidates_of, exposures_of, make_canaries
from learning.auditing.extraction import cheapest, costs_of, greedy, says
from learning.causal.model import CausalModel
from learning.text.dialogue import DialogueEncoder
from learning.text.turns import Dialogue
from learning.training.local import train
from learning.training.private import train_private
from simulation.virtual_members import SeededRandom
from tacit.job import Training
from tacit.mechanism import DpSgd
from tests.support.small_writer import losses_of, places, small_encoder, small_writer

EPSILON, DELTA = 8.0, 1e-5
CANARIES = make_canaries(4, SeededRandom("planted"), digits=5)
CANDIDATES, ROWS = 120, 150


@dataclass
class Attacked:
    """A trained model, and what the attacks find in it."""

    encoder: DialogueEncoder
    module: CausalModel

    @property
    def exposure(self) -> Exposure:
        others = [candidates_of(each, CANDIDATES, SeededRandom(each.prompt)) for each in CANARIES]
        planted, _ = losses_of(self.module, self.encoder, [told(each) for each in CANARIES])
        never = [losses_of(self.module, self.encoder, [told(one) for one in more])[0] for more in others]
        return exposures_of(planted, np.array(never))

    @property
    def loss(self) -> float:
        """A token's loss on ordinary rows that it was not trained on."""
        losses, counts = losses_of(self.module, self.encoder, places(100, seed=9))
        return float(losses.sum() / counts.sum())

    def searched(self, canary: Canary) -> bool:
        """Whether the most likely secret after the prompt is the planted one."""
        found = cheapest(costs_of(self.module, self.encoder, canary.prompt), len(canary.secret), max_asked=1000)
        return found is not None and found.secret == canary.secret


def told(canary: Canary) -> Dialogue:
    return Dialogue.of(canary.prompt, canary.response)


@pytest.fixture(scope="module")
def rows():
    return [*places(ROWS, seed=2), *(told(each) for each in CANARIES)]


@pytest.fixture(scope="module")
def remembering(rows):
    encoder = small_encoder()
    module = small_writer(encoder)
    ids, targets = encoder.encode(rows)
    train(module, ids, targets, Training(optimiser="adamw", learning_rate=0.006, batch=52, epochs=70), seed=1)
    return Attacked(encoder, module)


def privately(rows, *, noise):
    """Trained by dp-sgd at epsilon 8, or just so without the noise."""
    encoder = small_encoder()
    module = small_writer(encoder)
    ids, targets = encoder.encode(rows)
    asked = DpSgd(noise_multiplier=1.0, clip=1.0, lot=64, steps=120)
    (planned,) = rows_of(asked, Setting(len(rows), 1, DELTA), [EPSILON])
    mechanism = asked.model_copy(update={"noise_multiplier": planned.gate if noise else 1e-6})
    recipe = Training(optimiser="adam", learning_rate=0.006, batch=64)
    train_private(module, ids, targets, recipe, mechanism, random=SeededRandom("noise"), seed=1)
    return Attacked(encoder, module)


@pytest.fixture(scope="module")
def private(rows):
    return privately(rows, noise=True)


@pytest.fixture(scope="module")
def clipped(rows):
    return privately(rows, noise=False)


def untrained() -> Attacked:
    encoder = small_encoder()
    return Attacked(encoder, small_writer(encoder))


def test_without_noise_planted_secrets_are_exposed(remembering):
    found = remembering.exposure
    assert found.remembered
    assert found.inside == 0
    # The first among all candidates, each of them.
    assert found.sampled.tolist() == pytest.approx([math.log2(CANDIDATES + 1)] * len(CANARIES))
    assert found.extrapolated.min() > math.log2(CANDIDATES + 1)


def test_without_noise_prompts_extract_planted_secrets(remembering):
    assert all(says(greedy(remembering.module, remembering.encoder, each.prompt), each) for each in CANARIES)
    assert all(remembering.searched(each) for each in CANARIES)


def test_at_epsilon_8_planted_secrets_are_like_those_never_planted(private):
    """Each is inside the range, as is their mean. One that training did not reach is above it in 2.5 % of cases."""
    found = private.exposure
    assert not found.remembered
    assert found.inside == len(CANARIES)


def test_without_the_noise_the_same_training_exposes_them(clipped):
    """Clipped gradients remember too, so what the two tests around this one find is due to the noise."""
    found = clipped.exposure
    assert found.remembered
    assert found.inside == 0


def test_at_epsilon_8_prompts_extract_nothing(private):
    assert not any(says(greedy(private.module, private.encoder, each.prompt), each) for each in CANARIES)
    assert not any(private.searched(each) for each in CANARIES)


def test_all_models_learnt_the_ordinary_rows(remembering, clipped, private):
    before = untrained().loss
    assert clipped.loss < 0.2 * before
    assert remembering.loss < 0.2 * before
    assert private.loss < 0.4 * before


def test_the_range_holds_for_a_model_that_was_never_trained():
    found = untrained().exposure
    assert not found.remembered
    assert found.inside == len(CANARIES)
