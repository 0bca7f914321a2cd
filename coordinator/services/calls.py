"""Calls that are under way, by whom, so that they can be ended when the caller is cut off.

gRPC looks at a certificate when a connection begins, and the services when a call does; a stream may go on for hours
after that. Used from one event loop.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tacit.reason import Reason

__all__ = ["Call", "Calls"]


@dataclass(eq=False)
class Call:
    """One call. `reason` is set once it was ended from here: its cancellation is then no mishap."""

    task: "asyncio.Task[object]"
    reason: Reason | None = None
    detail: str = ""


class Calls:
    """All that are under way. A caller is named by its name, or by the fingerprint of its certificate."""

    def __init__(self) -> None:
        self._calls: dict[str | bytes, list[Call]] = {}

    @property
    def callers(self) -> Collection[str | bytes]:
        """Whoever has a call under way."""
        return tuple(self._calls)

    def count(self, caller: str | bytes) -> int:
        """How many calls of a caller are under way."""
        return len(self._calls.get(caller, ()))

    @contextmanager
    def of(self, caller: str | bytes) -> Iterator[Call]:
        """While a call is under way. To be entered in the call's own task."""
        call = self._open(caller)
        try:
            yield call
        finally:
            self._close(caller, call)

    def watch(self, caller: str | bytes) -> None:
        """The same until the present task ends, for a call that is not written as one block."""
        call = self._open(caller)
        call.task.add_done_callback(lambda _: self._close(caller, call))

    def mine(self) -> Call | None:
        """The call that the present task is."""
        task = asyncio.current_task()
        return next((call for calls in self._calls.values() for call in calls if call.task is task), None)

    def end(self, caller: str | bytes, reason: Reason, detail: str = "") -> int:
        """Cancels every call of a caller; says how many there were."""
        calls = list(self._calls.get(caller, ()))
        for call in calls:
            call.reason, call.detail = reason, detail
            call.task.cancel()
        return len(calls)

    def _open(self, caller: str | bytes) -> Call:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call is watched from its own task")
        call = Call(task)
        self._calls.setdefault(caller, []).append(call)
        return call

    def _close(self, caller: str | bytes, call: Call) -> None:
        calls = self._calls.get(caller, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._calls.pop(caller, None)
