"""Where unpredictable bytes come from: a source that is handed in, and a stream grown from one seed of it.

Guarantees: nothing in this package draws randomness that was not handed to it; a stream is AES-256-CTR under
a fresh 32-byte key from the source, written into a buffer that is used again, so large amounts cost neither
system calls nor memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

__all__ = ["CIPHER_BLOCK", "KeyStream", "RandomSource", "StreamScratch", "SystemRandom", "stream_writer"]

CIPHER_BLOCK = 16


class RandomSource(Protocol):
    """A cryptographic source of uniform bytes."""

    def bytes(self, n: int, /) -> bytes:
        """Exactly n uniform bytes, never returned to anyone before."""


class SystemRandom:
    """The operating system's source."""

    def bytes(self, n: int, /) -> bytes:
        return os.urandom(n)


def stream_writer(key: bytes, counter: bytes = bytes(CIPHER_BLOCK)) -> Callable[[memoryview, bytearray], int]:
    """What writes the AES-256-CTR stream of `key` forward from `counter`, the big-endian number of a cipher block:
    called with n zero bytes and a buffer of n + 15 or more, it leaves the next n bytes at the buffer's front. Releases
    the lock.
    """
    if len(key) != 32:
        raise ValueError("a stream key has 32 bytes")
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update_into


class KeyStream:
    """The AES-256-CTR stream of one key from counter zero, read forward in pieces of at most `capacity`
    bytes.

    The counter starts at zero, because a key is used for one stream only; published vectors start elsewhere.
    """

    __slots__ = ("_write", "capacity")

    def __init__(self, key: bytes, scratch: StreamScratch, counter: bytes = bytes(CIPHER_BLOCK)) -> None:
        self._write = stream_writer(key, counter)
        self.capacity = scratch.capacity

    def read(self, n: int, scratch: StreamScratch) -> NDArray[np.uint8]:
        """The next n bytes, a view of `scratch` that the next read overwrites. Releases the lock."""
        self._write(scratch.zeros[:n], scratch.out)
        return scratch.view[:n]


class StreamScratch:
    """Two buffers shared by any number of streams read in turn: zeros to encrypt, and room for the result."""

    __slots__ = ("capacity", "out", "view", "zeros")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.zeros = memoryview(bytes(capacity))
        # update_into asks for a block less one byte of slack behind the result.
        self.out = bytearray(capacity + CIPHER_BLOCK - 1)
        self.view = np.frombuffer(self.out, dtype=np.uint8, count=capacity)
