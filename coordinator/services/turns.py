"""Limits how many tasks do something at once, without letting slow ones block the others.

Guarantees: turns are given in the order of the requests. A task that holds its turn for longer than `patience`
continues, but its place goes to the next. So `places` bounds what quick tasks hold together, and a slow one costs the
others at most `patience`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["Turns"]


class Turns:
    """Lends places in turn. Used from one event loop."""

    def __init__(self, places: int, patience: float) -> None:
        """Creates the places.

        Args:
            places: How many tasks may hold a turn at once, 1 or more.
            patience: Seconds after which a held turn is lent to the next task, too.
        """
        self._free = asyncio.Semaphore(places)
        self._patience = patience

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a place, and returns it at the end of the block or after `patience` seconds."""
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
