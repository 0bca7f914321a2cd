"""The sources of a module's own randomness in training: dropout, and an autoencoder's coins.

`TorchDraws` is torch's generator: fast, repeatable, and for seeds that may be public. On a CPU it is a Mersenne twister
that uses only 32 bits of its seed. `SecretDraws` is for trainings whose privacy rests on nobody knowing the draws
(`learning.training.private`): its own AES-256-CTR stream from 32 fresh bytes of a cryptographic source, the same on
every device, used once.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from secure_agg import RandomSource
from secure_agg.randomness import KeyStream, StreamScratch

__all__ = ["Draws", "SecretDraws", "TorchDraws"]

# Words of 32 bits made at a time, so that they stay in a core's cache.
_BLOCK = 1 << 15


class Draws(Protocol):
    """The source of a forward pass. Each value is independent of all others."""

    def kept(self, like: Tensor, probability: float) -> Tensor:
        """Ones with this probability, in (0, 1), else zeros, with the shape, type and device of `like`."""

    def fork(self, device: torch.device) -> "Callable[[], Draws]":
        """Takes a seed from this source. Every call of the result starts the same new draws on the device."""

    def uniform(self, *shape: int, device: torch.device) -> Tensor:
        """float32 in [0, 1)."""

    def normal(self, *shape: int, device: torch.device) -> Tensor:
        """float32, N(0, 1)."""


class TorchDraws:
    """A torch generator; None is that of the process."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    @classmethod
    def seeded(cls, seed: int, device: torch.device) -> "TorchDraws":
        """Draws from a new generator on the device where the draws are needed."""
        return cls(torch.Generator(device=device).manual_seed(seed))

    def kept(self, like: Tensor, probability: float) -> Tensor:
        """As in `Draws`."""
        return torch.empty_like(like).bernoulli_(probability, generator=self.generator)

    def fork(self, device: torch.device) -> Callable[[], Draws]:
        """As in `Draws`."""
        where = device if self.generator is None else self.generator.device
        seed = int(torch.randint(2**62, (), generator=self.generator, device=where))
        return partial(TorchDraws.seeded, seed, device)

    def uniform(self, *shape: int, device: torch.device) -> Tensor:
        """As in `Draws`."""
        return torch.rand(*shape, generator=self.generator, device=device)

    def normal(self, *shape: int, device: torch.device) -> Tensor:
        """As in `Draws`."""
        return torch.randn(*shape, generator=self.generator, device=device)


class SecretDraws:
    """A stream that nobody can know or guess, as secret as its 32 bytes from the source. Not for two threads."""

    def __init__(self, random: RandomSource, key: bytes | None = None) -> None:
        self._random = random
        self._scratch = StreamScratch(4 * _BLOCK)
        self._stream = KeyStream(random.bytes(32) if key is None else key, self._scratch)

    def kept(self, like: Tensor, probability: float) -> Tensor:
        """As in `Draws`, with the probability rounded down to a multiple of 2^-32."""
        below = np.uint32(math.floor(probability * 2.0**32))
        made = np.empty(like.numel(), dtype=np.float32)
        for first, words in self._words(len(made)):
            np.less(words, below, out=made[first : first + len(words)], casting="unsafe")
        return torch.from_numpy(made).view(like.shape).to(device=like.device, dtype=like.dtype)

    def fork(self, device: torch.device) -> Callable[[], Draws]:
        """As in `Draws`: the key is new, and as secret as this one."""
        return partial(SecretDraws, self._random, self._random.bytes(32))

    def uniform(self, *shape: int, device: torch.device) -> Tensor:
        """As in `Draws`: multiples of 2^-24, the finest that float32 can represent evenly."""
        made = np.empty(math.prod(shape), dtype=np.float32)
        for first, words in self._words(len(made)):
            np.multiply(words >> np.uint32(8), np.float32(2.0**-24), out=made[first : first + len(words)])
        return torch.from_numpy(made).view(shape).to(device)

    def normal(self, *shape: int, device: torch.device) -> Tensor:
        """As in `Draws`."""
        from learning.mechanisms.noise import gaussian_like

        return gaussian_like(torch.empty(shape, device=device), 1.0, self._random)

    def _words(self, count: int) -> Iterator[tuple[int, NDArray[np.uint32]]]:
        """Yields blocks of uniform 32-bit words, each with its position; the next block overwrites the last one."""
        for first in range(0, count, _BLOCK):
            size = min(_BLOCK, count - first)
            yield first, self._stream.read(4 * size, self._scratch).view(np.uint32)
