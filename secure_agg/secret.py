"""How secrets are held: in a type that never prints itself, can be erased, and cannot be copied by accident;
and a latch that lets a state be used once.

Guarantees: `repr` and formatting show nothing, pickling and copying are errors, an erased secret cannot be
read, and of two uses of one state only the first goes through, also when they come from two threads. Python
may keep copies of bytes that passed through a call; erasing shortens a secret's life, it does not scrub the
machine's memory.
"""

from __future__ import annotations

import threading
from typing import NoReturn

from secure_agg.reasons import Reason, Refusal

__all__ = ["Once", "Secret"]


class Secret:
    """Secret bytes."""

    __slots__ = ("_bytes",)

    def __init__(self, value: bytes) -> None:
        self._bytes: bytearray | None = bytearray(value)

    def reveal(self) -> bytes:
        """A copy of the bytes. Raises LookupError once erased."""
        if self._bytes is None:
            raise LookupError("this secret was erased after its one use")
        return bytes(self._bytes)

    def erase(self) -> None:
        """Overwrite the bytes and forget them. Erasing twice is harmless."""
        if self._bytes is not None:
            self._bytes[:] = bytes(len(self._bytes))
            self._bytes = None

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret lives in one process, for one attempt; it is neither copied nor stored")


class Once:
    """A latch: `spend` succeeds one time, ever, and raises a Refusal with its reason afterwards."""

    __slots__ = ("_lock", "_reason")

    def __init__(self, reason: Reason) -> None:
        self._reason = reason
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise if already spent; spends nothing. For refusing early, with the reason that matters most."""
        if self._lock.locked():
            raise Refusal(self._reason)

    def spend(self) -> None:
        """Spend it, or raise Refusal. Taking the lock is one step, so two threads cannot both win."""
        if not self._lock.acquire(blocking=False):
            raise Refusal(self._reason)

    def close(self) -> bool:
        """Spent from now on; whether this is what spent it."""
        return self._lock.acquire(blocking=False)

    def __repr__(self) -> str:
        return f"Once(spent={self._lock.locked()})"
