"""Threads that wait for the store and do nothing else, so that a store which hangs holds up no other work.

Guarantees: at most `threads` calls are with the store at once, and at most `max_calls` are with it or wait for their
turn. A call beyond that is refused at once with a sentence. All other work of the process (the event loop's own
threads, the database) goes on.
"""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from coordinator.storage.errors import StoreBusy

__all__ = ["MAX_CALLS", "THREADS", "StoreThreads"]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

THREADS = 16
# A store that works answers this many in a few seconds.
MAX_CALLS = 256


class StoreThreads:
    """A bounded number of threads, and a bounded queue before them."""

    def __init__(self, threads: int = THREADS, max_calls: int = MAX_CALLS) -> None:
        """Starts no thread before it is needed."""
        self._pool = ThreadPoolExecutor(threads, "store")
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._calls = 0

    async def run(self, work: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs) -> _Result:
        """Runs `work` in one of the threads and returns its result.

        If the caller is cancelled, work that has begun goes on there, and work that waits for its turn never begins.

        Raises:
            StoreBusy: too many calls wait already, or the coordinator is stopping.
            Exception: whatever `work` raises.
        """
        with self._lock:
            if self._calls >= self._max_calls:
                raise StoreBusy(
                    f"{self._calls} calls wait for the store, which answers slowly or not at all; type `coordinator "
                    "store check`, and try again"
                )
            self._calls += 1
        context = contextvars.copy_context()
        try:
            future = self._pool.submit(context.run, functools.partial(work, *given, **named))
        except RuntimeError as error:
            self._ended()
            raise StoreBusy("the coordinator is stopping and asks its store for nothing more") from error
        future.add_done_callback(lambda _: self._ended())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Gives up calls that have not begun. Does not wait for the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self) -> None:
        with self._lock:
            self._calls -= 1
