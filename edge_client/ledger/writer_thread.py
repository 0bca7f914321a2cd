"""One thread for all that a running member flushes to its disk: ledger, receipts and journal.

A flush may take seconds on a busy disk. The event loop meanwhile answers the coordinator. Guarantees:

- Calls run one after another, in the order in which they were begun. So no two of them see the ledger half changed, and
  a release that was begun after a charge finds the charge.
- A caller goes on only once its call has ended. So what must be on the disk before a message leaves is on the disk.
- A call that was begun is completed, and its result reaches its caller, also if the caller's task is cancelled
  meanwhile. The cancellation then takes effect where the task next waits for something else. So a cancellation loses no
  reservation and makes no charge twice: it strikes between two calls, as if they had run on the loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

__all__ = ["WriterThread"]

P = ParamSpec("P")
T = TypeVar("T")


class WriterThread:
    """The thread. It is started by the first call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tacit-writer")

    async def run(self, call: Callable[P, T], *of: P.args, **named: P.kwargs) -> T:
        """Runs a call in the thread and returns its result, or raises its error."""
        done = asyncio.wrap_future(self._thread.submit(call, *of, **named))
        cancelled = 0
        task = asyncio.current_task()
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                cancelled += 1
                if task is not None:
                    task.uncancel()
        if task is not None:
            # It takes effect where the task waits next. A deadline counts them: it takes back only its own.
            for _ in range(cancelled):
                task.cancel()
        return done.result()

    def close(self) -> None:
        """Waits for the calls that were begun, and ends the thread."""
        self._thread.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
