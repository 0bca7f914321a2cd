"""A type for secrets, which never prints itself, can be erased and cannot be copied by accident, and a latch that lets
a state be used only once.

Guarantees: `repr` and formatting show nothing; pickling and copying are errors; an erased secret cannot be read. Of two
uses of one state only the first succeeds, even from two threads. Python may keep copies of bytes that passed through a
call, so erasing shortens a secret's life but does not scrub the machine's memory.
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
        """Returns a copy of the bytes. Raises LookupError after `erase`."""
        if self._bytes is None:
            raise LookupError("this secret was erased after its one use")
        return bytes(self._bytes)

    def erase(self) -> None:
        """Overwrites the bytes and forgets them. Erasing twice is harmless."""
        if self._bytes is not None:
            self._bytes[:] = bytes(len(self._bytes))
            self._bytes = None

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret lives in one process, for one attempt; it cannot be copied or stored")


class Once:
    """A latch: `spend` succeeds once, and raises a Refusal with its reason afterwards."""

    __slots__ = ("_lock", "_reason")

    def __init__(self, reason: Reason) -> None:
        self._reason = reason
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises Refusal if already spent, without spending. Lets callers refuse early, with this reason first."""
        if self._lock.locked():
            raise Refusal(self._reason)

    def spend(self) -> None:
        """Spends the latch, or raises Refusal. Taking the lock is atomic, so two threads cannot both succeed."""
        if not self._lock.acquire(blocking=False):
            raise Refusal(self._reason)

    def close(self) -> bool:
        """Makes the latch spent, and returns whether it was not before."""
        return self._lock.acquire(blocking=False)

    def __repr__(self) -> str:
        return f"Once(spent={self._lock.locked()})"
