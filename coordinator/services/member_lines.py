"""Limits log lines about members, so that no member can fill the disk or drown the lines about others.

A structlog processor. Lines that name a member have one bucket for each event and member: the first ones pass, then one
every two seconds. The next line that passes says in `suppressed` how many did not. Lines with another event or member
have their own bucket.
"""

import threading
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from coordinator.buckets import Allowance, Buckets

__all__ = ["MemberLines"]

_ALLOWANCE = Allowance(burst=30, rate=0.5)
_KEYS = 65536


class MemberLines:
    """The processor. May be called from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Creates the processor. `clock` returns monotonic seconds."""
        self._buckets = Buckets(clock, _ALLOWANCE, _KEYS)
        self._suppressed: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Passes a line on, with `suppressed` if lines before it were dropped.

        Raises:
            structlog.DropEvent: this line is dropped.
        """
        member = event.get("member")
        if not isinstance(member, str):
            return event
        key = (str(event.get("event")), member)
        with self._lock:
            if self._buckets.take(key):
                self._suppressed[key] = self._suppressed.get(key, 0) + 1
                if len(self._suppressed) > _KEYS:
                    del self._suppressed[next(iter(self._suppressed))]
                raise structlog.DropEvent
            left_out = self._suppressed.pop(key, 0)
        return {**event, "suppressed": left_out} if left_out else event
