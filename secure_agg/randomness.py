"""Where unpredictable bytes come from: a source that is handed in, and a stream grown from one seed of it.

Guarantees: nothing in this package draws randomness that was not handed to it; a stream is AES-256-CTR under
a fresh 32-byte key from the source, written into a buffer that is used again, so large amounts cost neither
system calls nor memory.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

__all__ = ["KeyStream", "RandomSource", "StreamScratch", "SystemRandom"]

_CIPHER_BLOCK = 16


class RandomSource(Protocol):
    """A cryptographic source of uniform bytes."""

    def bytes(self, n: int, /) -> bytes:
        """Exactly n uniform bytes, never returned to anyone before."""


class SystemRandom:
    """The operating system's source."""

    def bytes(self, n: int, /) -> bytes:
        return os.urandom(n)


class KeyStream:
    """The AES-256-CTR stream of one key from counter zero, read forward in pieces of at most `capacity`
    bytes.

    The counter starts at zero, because a key is used for one stream only; published vectors start elsewhere.
    """

    __slots__ = ("_encryptor", "capacity")

    def __init__(self, key: bytes, scratch: StreamScratch, counter: bytes = bytes(_CIPHER_BLOCK)) -> None:
        if len(key) != 32:
            raise ValueError("a stream key has 32 bytes")
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
        self.capacity = scratch.capacity

    def read(self, n: int, scratch: StreamScratch) -> NDArray[np.uint8]:
        """The next n bytes, a view of `scratch` that the next read overwrites. Releases the lock."""
        self._encryptor.update_into(scratch.zeros[:n], scratch.out)
        return scratch.view[:n]


class StreamScratch:
    """Two buffers shared by any number of streams read in turn: zeros to encrypt, and room for the result."""

    __slots__ = ("capacity", "out", "view", "zeros")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.zeros = memoryview(bytes(capacity))
        # update_into asks for a block less one byte of slack behind the result.
        self.out = bytearray(capacity + _CIPHER_BLOCK - 1)
        self.view = np.frombuffer(self.out, dtype=np.uint8, count=capacity)
