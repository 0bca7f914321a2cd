"""Where a module's own randomness comes from in training: units that drop out, and what an autoencoder tosses.

Two sources. `TorchDraws` is torch's generator: fast, repeatable, and for seeds that everybody may know; on a CPU it is
a Mersenne twister that takes 32 bits of its seed, whatever it is given. `SecretDraws` is for trainings whose privacy
rests on nobody knowing what was drawn (`learning.training.private`): an AES-256-CTR stream of its own from 32 fresh
bytes of a cryptographic source, on every device alike, used once.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from secure_agg import RandomSource
from secure_agg.randomness import KeyStream, StreamScratch

__all__ = ["Draws", "SecretDraws", "TorchDraws"]

# Of 32 bits each, made at a time: they stay in a core's cache.
_BLOCK = 1 << 15


class Draws(Protocol):
    """What a forward pass draws from. Each value is independent of all others."""

    def kept(self, like: Tensor, probability: float) -> Tensor:
        """Of the shape, type and device of `like`: one with this probability, in (0, 1), else zero."""

    def uniform(self, *shape: int, device: torch.device) -> Tensor:
        """float32 in [0, 1)."""

    def normal(self, *shape: int, device: torch.device) -> Tensor:
        """float32, N(0, 1)."""


class TorchDraws:
    """A generator of torch's; None: that of the process."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    @classmethod
    def seeded(cls, seed: int, device: torch.device) -> "TorchDraws":
        """From a generator of its own, on the device where the draws are wanted."""
        return cls(torch.Generator(device=device).manual_seed(seed))

    def kept(self, like: Tensor, probability: float) -> Tensor:
        """As `Draws` has it."""
        return torch.empty_like(like).bernoulli_(probability, generator=self.generator)

    def uniform(self, *shape: int, device: torch.device) -> Tensor:
        """As `Draws` has it."""
        return torch.rand(*shape, generator=self.generator, device=device)

    def normal(self, *shape: int, device: torch.device) -> Tensor:
        """As `Draws` has it."""
        return torch.randn(*shape, generator=self.generator, device=device)


class SecretDraws:
    """A stream that nobody can know or guess: as good as its 32 bytes of the source. Not for two threads."""

    def __init__(self, random: RandomSource) -> None:
        self._random = random
        self._scratch = StreamScratch(4 * _BLOCK)
        self._stream = KeyStream(random.bytes(32), self._scratch)

    def kept(self, like: Tensor, probability: float) -> Tensor:
        """As `Draws` has it; the probability is the next multiple of 2^-32 below."""
        below = np.uint32(math.floor(probability * 2.0**32))
        made = np.empty(like.numel(), dtype=np.float32)
        for first, words in self._words(len(made)):
            np.less(words, below, out=made[first : first + len(words)], casting="unsafe")
        return torch.from_numpy(made).view(like.shape).to(device=like.device, dtype=like.dtype)

    def uniform(self, *shape: int, device: torch.device) -> Tensor:
        """As `Draws` has it: multiples of 2^-24, all that float32 can hold evenly."""
        made = np.empty(math.prod(shape), dtype=np.float32)
        for first, words in self._words(len(made)):
            np.multiply(words >> np.uint32(8), np.float32(2.0**-24), out=made[first : first + len(words)])
        return torch.from_numpy(made).view(shape).to(device)

    def normal(self, *shape: int, device: torch.device) -> Tensor:
        """As `Draws` has it."""
        from learning.mechanisms.noise import gaussian_like

        return gaussian_like(torch.empty(shape, device=device), 1.0, self._random)

    def _words(self, count: int) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Blocks of uniform 32-bit words, each with its place; the next block overwrites the last one."""
        for first in range(0, count, _BLOCK):
            size = min(_BLOCK, count - first)
            yield first, self._stream.read(4 * size, self._scratch).view(np.uint32)
