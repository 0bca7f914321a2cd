"""Keeps each caller's calls in progress, so that they can be ended when the caller is revoked.

gRPC checks a certificate when a connection opens, and the services check it when a call begins. A stream may continue
for hours after that. Used from one event loop.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from tacit.reason import Reason

__all__ = ["Call", "Calls"]


@dataclass(eq=False)
class Call:
    """One call. `reason` is set once the coordinator ended the call, which makes its cancellation intended.

    `until` is when the caller's certificate expires, if somebody ends calls by it.
    """

    task: "asyncio.Task[object]"
    until: datetime | None = None
    reason: Reason | None = None
    detail: str = ""


class Calls:
    """All calls in progress. A caller is identified by its name, or by the fingerprint of its certificate."""

    def __init__(self) -> None:
        self._calls: dict[str | bytes, list[Call]] = {}

    @property
    def callers(self) -> Collection[str | bytes]:
        """The callers that have a call in progress."""
        return tuple(self._calls)

    def count(self, caller: str | bytes) -> int:
        """Returns how many calls a caller has in progress."""
        return len(self._calls.get(caller, ()))

    @contextmanager
    def of(self, caller: str | bytes) -> Iterator[Call]:
        """Registers a call for the duration of the block. Enter it in the call's own task."""
        call = self._open(caller)
        try:
            yield call
        finally:
            self._close(caller, call)

    def watch(self, caller: str | bytes, until: datetime) -> None:
        """Registers a call until the current task ends, for a call that is not one block of code.

        Args:
            caller: Whose call it is.
            until: When the certificate with which it was opened expires.
        """
        call = self._open(caller)
        call.until = until
        call.task.add_done_callback(lambda _: self._close(caller, call))

    def mine(self) -> Call | None:
        """Returns the call that the current task serves, if any."""
        task = asyncio.current_task()
        return next((call for calls in self._calls.values() for call in calls if call.task is task), None)

    def end(self, caller: str | bytes, reason: Reason, detail: str = "") -> int:
        """Cancels every call of a caller, and returns their number."""
        return self._end(self._calls.get(caller, ()), reason, detail)

    def end_expired(self, now: datetime, reason: Reason, detail: str = "") -> list[tuple[bytes, int]]:
        """Cancels every call whose certificate has expired, and returns how many of each certificate."""
        ended = []
        for caller, calls in list(self._calls.items()):
            over = [call for call in calls if call.until is not None and call.until < now]
            if isinstance(caller, bytes) and (many := self._end(over, reason, detail)):
                ended.append((caller, many))
        return ended

    def _end(self, ended: Iterable[Call], reason: Reason, detail: str) -> int:
        calls = [call for call in ended if call.reason is None]
        for call in calls:
            call.reason, call.detail = reason, detail
            call.task.cancel()
        return len(calls)

    def _open(self, caller: str | bytes) -> Call:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("register a call from its own task")
        call = Call(task)
        self._calls.setdefault(caller, []).append(call)
        return call

    def _close(self, caller: str | bytes, call: Call) -> None:
        calls = self._calls.get(caller, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._calls.pop(caller, None)
