"""Random sources that a test can repeat or script."""

import hashlib


class Seeded:
    """Deterministic bytes: SHAKE-256 of a seed and a counter."""

    def __init__(self, seed: str) -> None:
        self.seed, self.calls = seed, 0

    def bytes(self, n: int, /) -> bytes:
        self.calls += 1
        return hashlib.shake_256(f"{self.seed}/{self.calls}".encode()).digest(n)


class Written:
    """Exactly these bytes in order, in the portions requested."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def bytes(self, n: int, /) -> bytes:
        if n > len(self.left):
            raise AssertionError(f"{n} bytes wanted, {len(self.left)} left")
        given, self.left = self.left[:n], self.left[n:]
        return given
