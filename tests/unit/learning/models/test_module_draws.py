"""Where a module's own randomness comes from: torch's generator, and a stream that nobody can guess."""

import numpy as np
import pytest
import torch

from learning.models.draws import SecretDraws, TorchDraws
from secure_agg.randomness import KeyStream, StreamScratch

CPU = torch.device("cpu")


class Keys:
    """Each call's bytes, as they are written here, then from a count."""

    def __init__(self, *keys: bytes) -> None:
        self.keys, self.calls = list(keys), 0

    def bytes(self, n: int, /) -> bytes:
        self.calls += 1
        return self.keys.pop(0) if self.keys else self.calls.to_bytes(n, "big")


def sources():
    return [TorchDraws.seeded(5, CPU), SecretDraws(Keys())]


@pytest.mark.parametrize("draws", sources(), ids=["torch", "secret"])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.37])
def test_units_are_kept_with_their_probability_each_alone(draws, probability):
    like = torch.zeros(400, 500, dtype=torch.float32)
    kept = draws.kept(like, probability)
    assert kept.shape == like.shape
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    std = (probability * (1 - probability) / like.numel()) ** 0.5
    assert abs(kept.mean().item() - probability) < 5 * std
    # Neighbours in both directions, and the next draw: no correlation beyond five deviations.
    again = draws.kept(like, probability)
    centred = kept - probability
    for other in (centred.roll(1, 0), centred.roll(1, 1), again - probability):
        assert abs((centred * other).mean().item()) < 5 * probability * (1 - probability) / like.numel() ** 0.5


@pytest.mark.parametrize("draws", sources(), ids=["torch", "secret"])
def test_uniform_and_normal_are_what_they_say(draws):
    uniform = draws.uniform(300, 400, device=CPU)
    assert uniform.shape == (300, 400)
    assert uniform.dtype == torch.float32
    assert 0 <= uniform.min() < uniform.max() < 1
    counts = torch.histc(uniform, bins=20, min=0, max=1)
    expected = uniform.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 60  # chi squared of 19 degrees: a chance of 5e-6
    normal = draws.normal(300, 400, device=CPU)
    assert normal.shape == (300, 400)
    assert abs(normal.mean().item()) < 5 / normal.numel() ** 0.5
    assert abs(normal.std().item() - 1) < 0.02


def test_a_secret_unit_is_a_word_of_the_stream_below_its_probability():
    key = bytes(range(32))
    like = torch.zeros(70_001)
    scratch = StreamScratch(4 * 70_001)
    words = KeyStream(key, scratch).read(4 * 70_001, scratch).view("<u4")
    kept = SecretDraws(Keys(key)).kept(like, 0.3)
    assert np.array_equal(kept.numpy() == 1, words < int(0.3 * 2**32))


def test_every_bit_of_the_key_counts():
    """What torch's generator on a CPU does not promise: two seeds of 64 bits that agree in 32 are one."""
    like = torch.zeros(1000)
    key = bytes(32)
    first = SecretDraws(Keys(key)).kept(like, 0.5)
    for bit in (0, 31, 32, 63, 64, 255):
        other = (int.from_bytes(key, "little") ^ 1 << bit).to_bytes(32, "little")
        assert not torch.equal(SecretDraws(Keys(other)).kept(like, 0.5), first)
    one, two = (TorchDraws.seeded(7 + at * 2**32, CPU).kept(like, 0.5) for at in (0, 1))
    assert torch.equal(one, two), "torch takes more of a seed now: say so in learning.models.draws"


def test_a_unit_has_the_type_of_what_it_is_drawn_for():
    like = torch.zeros(3, 5, dtype=torch.float64).T
    kept = SecretDraws(Keys()).kept(like, 0.5)
    assert kept.dtype == torch.float64
    assert kept.shape == (5, 3)
    assert SecretDraws(Keys()).kept(torch.zeros(0, 4), 0.5).shape == (0, 4)


def test_two_draws_of_one_source_have_nothing_in_common():
    random = Keys()
    one, two = SecretDraws(random), SecretDraws(random)
    like = torch.zeros(4096)
    assert not torch.equal(one.kept(like, 0.5), two.kept(like, 0.5))
    assert not torch.equal(one.normal(64, device=CPU), one.normal(64, device=CPU))
