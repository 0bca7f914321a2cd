"""The sources of a module's own randomness: torch's generator, and a stream that nobody can guess."""

import numpy as np
import pytest
import torch

from learning.models.draws import SecretDraws, TorchDraws
from secure_agg.randomness import KeyStream, StreamScratch

CPU = torch.device("cpu")


class Keys:
    """Gives each call the next given bytes, and then bytes of a counter."""

    def __init__(self, *keys: bytes) -> None:
        self.keys, self.calls = list(keys), 0

    def bytes(self, n: int, /) -> bytes:
        self.calls += 1
        return self.keys.pop(0) if self.keys else self.calls.to_bytes(n, "big")


def sources():
    return [TorchDraws.seeded(5, CPU), SecretDraws(Keys())]


@pytest.mark.parametrize("draws", sources(), ids=["torch", "secret"])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.37])
def test_units_are_kept_independently_with_their_probability(draws, probability):
    like = torch.zeros(400, 500, dtype=torch.float32)
    kept = draws.kept(like, probability)
    assert kept.shape == like.shape
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    std = (probability * (1 - probability) / like.numel()) ** 0.5
    assert abs(kept.mean().item() - probability) < 5 * std
    # Neighbours in both directions, and the next draw: no correlation beyond five standard deviations.
    again = draws.kept(like, probability)
    centred = kept - probability
    for other in (centred.roll(1, 0), centred.roll(1, 1), again - probability):
        assert abs((centred * other).mean().item()) < 5 * probability * (1 - probability) / like.numel() ** 0.5


@pytest.mark.parametrize("draws", sources(), ids=["torch", "secret"])
def test_uniform_and_normal_draws_have_their_distributions(draws):
    uniform = draws.uniform(300, 400, device=CPU)
    assert uniform.shape == (300, 400)
    assert uniform.dtype == torch.float32
    assert 0 <= uniform.min() < uniform.max() < 1
    counts = torch.histc(uniform, bins=20, min=0, max=1)
    expected = uniform.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 60  # Chi-square with 19 degrees: a chance of 5e-6.
    normal = draws.normal(300, 400, device=CPU)
    assert normal.shape == (300, 400)
    assert abs(normal.mean().item()) < 5 / normal.numel() ** 0.5
    assert abs(normal.std().item() - 1) < 0.02


def test_a_secret_unit_is_kept_if_its_word_is_below_the_probability():
    key = bytes(range(32))
    like = torch.zeros(70_001)
    scratch = StreamScratch(4 * 70_001)
    words = KeyStream(key, scratch).read(4 * 70_001, scratch).view("<u4")
    kept = SecretDraws(Keys(key)).kept(like, 0.3)
    assert np.array_equal(kept.numpy() == 1, words < int(0.3 * 2**32))


def test_every_bit_of_the_key_counts():
    """Torch's generator on a CPU does not promise this: two seeds of 64 bits that agree in 32 are the same."""
    like = torch.zeros(1000)
    key = bytes(32)
    first = SecretDraws(Keys(key)).kept(like, 0.5)
    for bit in (0, 31, 32, 63, 64, 255):
        other = (int.from_bytes(key, "little") ^ 1 << bit).to_bytes(32, "little")
        assert not torch.equal(SecretDraws(Keys(other)).kept(like, 0.5), first)
    one, two = (TorchDraws.seeded(7 + at * 2**32, CPU).kept(like, 0.5) for at in (0, 1))
    assert torch.equal(one, two), "torch now uses more bits of a seed: update learning.models.draws"


def test_units_have_the_type_of_the_tensor_that_they_are_for():
    like = torch.zeros(3, 5, dtype=torch.float64).T
    kept = SecretDraws(Keys()).kept(like, 0.5)
    assert kept.dtype == torch.float64
    assert kept.shape == (5, 3)
    assert SecretDraws(Keys()).kept(torch.zeros(0, 4), 0.5).shape == (0, 4)


def test_two_streams_of_one_source_are_independent():
    random = Keys()
    one, two = SecretDraws(random), SecretDraws(random)
    like = torch.zeros(4096)
    assert not torch.equal(one.kept(like, 0.5), two.kept(like, 0.5))
    assert not torch.equal(one.normal(64, device=CPU), one.normal(64, device=CPU))
