"""Turns: how many may do something at once, where one who is slow must not hold up the others.

Guarantees: turns are given in the order in which they were asked for. Whoever holds one for longer than `patience`
goes on, and its place is given to the next. So `places` bounds what those who are quick hold together, and a slow one
costs the others `patience` at most.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["Turns"]


class Turns:
    """Places that are lent in turn. Used from one event loop."""

    def __init__(self, places: int, patience: float) -> None:
        """places: 1 or more; patience: seconds."""
        self._free = asyncio.Semaphore(places)
        self._patience = patience

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a place; it is given back at the end, or after `patience` seconds."""
        await self._free.acquire()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        late = asyncio.get_running_loop().call_later(self._patience, give_back)
        try:
            yield
        finally:
            late.cancel()
            give_back()
