"""Randomness: a source that the caller passes in, and streams expanded from seeds that it gives.

Guarantees: nothing in this package draws randomness from anywhere but a source that it was passed, except that sealing
lets OpenSSL draw what an encapsulation needs (`secure_agg.sealing`). A stream is
AES-256-CTR under a fresh 32-byte key from the source, written into a reusable buffer, so large amounts cost neither
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
        """Returns exactly n uniform bytes that were never returned before."""


class SystemRandom:
    """The operating system's random source."""

    def bytes(self, n: int, /) -> bytes:
        return os.urandom(n)


def stream_writer(key: bytes, counter: bytes = bytes(CIPHER_BLOCK)) -> Callable[[memoryview, bytearray], int]:
    """Returns a function that writes the AES-256-CTR stream of `key`, starting at `counter`.

    Called with n zero bytes and a buffer of at least n + 15 bytes, it writes the next n bytes of the stream to the
    buffer's front. It releases the interpreter lock.

    Args:
        key: 32 bytes.
        counter: big-endian number of the first cipher block, 16 bytes.
    """
    if len(key) != 32:
        raise ValueError("a stream key has 32 bytes")
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update_into


class KeyStream:
    """The AES-256-CTR stream of one key, read in pieces of at most `capacity` bytes.

    The counter starts at zero, because a key is used for only one stream. Published test vectors start elsewhere.
    """

    __slots__ = ("_write", "capacity")

    def __init__(self, key: bytes, scratch: StreamScratch, counter: bytes = bytes(CIPHER_BLOCK)) -> None:
        self._write = stream_writer(key, counter)
        self.capacity = scratch.capacity

    def read(self, n: int, scratch: StreamScratch) -> NDArray[np.uint8]:
        """Returns the next n bytes: a view of `scratch`, which the next read overwrites. Releases the lock."""
        self._write(scratch.zeros[:n], scratch.out)
        return scratch.view[:n]


class StreamScratch:
    """Two buffers that any number of streams can share in turn: zeros to encrypt, and room for the result."""

    __slots__ = ("capacity", "out", "view", "zeros")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.zeros = memoryview(bytes(capacity))
        # update_into requires slack of a block minus one byte after the result.
        self.out = bytearray(capacity + CIPHER_BLOCK - 1)
        self.view = np.frombuffer(self.out, dtype=np.uint8, count=capacity)
