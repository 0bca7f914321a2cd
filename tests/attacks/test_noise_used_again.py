"""An attacker that makes a member take a step twice with the same noise takes the noise off. Ours never does.

The attacker is a coordinator that knows all examples except whether one is there, and serves the weights. It gets a
home back to where it stood before a step (a copy, a restored snapshot, a crash), asks for the step again at other
weights, and subtracts. If z comes from a lasting key and the step's number, as a member that stores nothing else would
make it, both steps have the same noise, and the difference is that of the two sums: one example stands out in it,
whatever the multiplier is. Here z is drawn when the step is taken, so two such steps have noise of their own; and what
may have left is over, so that a member that was not put back sends no second vector for a step at all
(`tests/unit/edge_client/ledger/test_correlated_steps.py` does that at every kill point).
"""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from learning.mechanisms.banded import best_coefficients
from learning.mechanisms.correlated import CorrelatedSteps, classes_of
from learning.training.head import clipped_sums, train_private_head
from secure_agg.randomness import SystemRandom
from tacit.job import Training
from tacit.mechanism import DpSgd
from tests.support.heads import arrays
from tests.support.random_sources import Seeded

ROWS, WIDTH, LABELS, BAND, NOISE = 60, 6, 3, 4, 8.0
C = best_coefficients(BAND, 20)
KEY = bytes(32)
MECHANISM = DpSgd(noise_multiplier=NOISE, clip=1.0, lot=ROWS, steps=1, coefficients=C)
RECIPE = Training(optimiser="sgd", learning_rate=1.0)


def data():
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    y = random.integers(0, LABELS, ROWS)
    # The first example is right at weights 1 and wrong at weights 2, as a coordinator can arrange that knows it.
    y[0] = int((weights() @ x[0]).argmax())
    return x, np.arange(1, ROWS + 1)[:, None], y


def weights():
    return 2 * np.random.default_rng(1).standard_normal((LABELS, WIDTH)).astype(np.float32)


def served(number):
    """Weights that the coordinator chooses: under the second the first example's gradient is another one."""
    made = nn.Linear(WIDTH, LABELS)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(weights() if number == 1 else -weights()))
        made.bias.zero_()
    return made


def flat(weight, bias):
    return np.concatenate([weight.astype(np.float64).ravel(), bias.astype(np.float64)])


def step(home, number, x, ids, y, source):
    """The noisy sum of one step, in clips, as the coordinator reads it from the change of the weights."""
    head = served(number)
    before = flat(*arrays(head).trained)
    train_private_head(arrays(head), x, y, RECIPE, MECHANISM, random=source, rate=1.0, ids=ids, correlated=home)
    return (before - flat(*arrays(head).trained)) * ROWS


def taken_twice(there, source_of):
    """What the coordinator sees of one step that a home takes twice: at weights 1, put back, and at weights 2."""
    x, ids, y = data()
    home = CorrelatedSteps.begun(C, NOISE, 1.0, KEY, LABELS * (WIDTH + 1))
    # Steps before, so that the rows are not zero; the next step draws the first example's class.
    classes = classes_of(KEY, BAND, ids, np.ones(ROWS, dtype=np.int64), y)
    home.skip(BAND + int(classes[0]), SystemRandom())
    first, again = home, home.copy()
    part = slice(0, None) if there else slice(1, None)
    seen = [
        step(each, number, x[part], ids[part], y[part], source_of(each.step))
        for number, each in ((1, first), (2, again))
    ]
    drawn = np.flatnonzero(classes == classes[0])
    sums = {
        guess: [
            flat(*clipped_sums(arrays(served(number)), x, y, drawn if guess else drawn[1:], 1.0)[:2])
            for number in (1, 2)
        ]
        for guess in (True, False)
    }
    return seen, sums


def guessed(seen, sums):
    """The attacker's guess: which of the two differences is nearer."""
    difference = seen[0] - seen[1]
    far = {guess: float(np.linalg.norm(difference - (each[0] - each[1]))) for guess, each in sums.items()}
    return min(far, key=far.__getitem__), far


def lasting(trial):
    """The baseline: z follows from the home's key and the step's number."""
    return lambda number: Seeded(hashlib.sha256(f"{trial}/{number}".encode()).hexdigest())


@pytest.mark.parametrize("there", [True, False])
def test_with_a_lasting_key_the_noise_cancels_and_the_example_stands_out(there):
    for trial in range(5):
        guess, far = guessed(*taken_twice(there, lasting(trial)))
        assert guess == there
        # Nothing is left but rounding to the lattice and of float32, beside noise of 8 clips.
        assert far[there] < 0.1
        assert far[not there] > 3 * far[there]


def test_drawn_noise_does_not_cancel():
    right, trials, left = 0, 60, []
    for trial in range(trials):
        there = trial % 2 == 0
        seen, sums = taken_twice(there, lambda _: SystemRandom())
        right += guessed(seen, sums)[0] == there
        left.append(seen[0] - seen[1] - (sums[there][0] - sums[there][1]))
    # Two fresh rows given the same rows before: independent, each of standard deviation sigma / c_0.
    assert np.std(left) == pytest.approx(np.sqrt(2) * NOISE / C[0], rel=0.1)
    # Guessing is right in half the trials; 45 of 60 has a chance of 7e-5, and what sqrt(2) steps allow adds little.
    assert right < 45
