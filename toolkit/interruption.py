"""Lets long work end early and clean up, or a measurement show what it has: Ctrl-C, and the SIGTERM of a time limit.

While it is entered, both signals raise KeyboardInterrupt, as Ctrl-C does anyway. Inside `listening`, the first one only
makes `asked` true, for work that looks at it often. The second one raises. A library that is interrupted while it is
imported may make an ImportError of it; what leaves the block is KeyboardInterrupt all the same.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

__all__ = ["Interruption"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether somebody asked the work to end. Without `with`, nobody ever does. Only the main thread hears signals."""

    def __init__(self) -> None:
        """Changes nothing yet."""
        self._asked = self._listening = self._raised = False
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        """Whether a signal came inside `listening`."""
        return self._asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Work inside it looks at `asked`, and ends by itself."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def __enter__(self) -> Self:
        """Begins to hear the signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._heard) for each in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Gives the signals back. Raises KeyboardInterrupt if the block failed after one had raised it."""
        for each, before in self._before.items():
            # None: a handler that is not Python's, which cannot be given back.
            signal.signal(each, signal.SIG_DFL if before is None else before)
        self._before = {}
        if self._raised and kind is not None:
            raise KeyboardInterrupt from None

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked or not self._listening:
            self._raised = True
            raise KeyboardInterrupt
        self._asked = True
        # Nobody may read it any more (`2>&1 | head`); an error here would be raised anywhere in the work.
        with suppress(OSError):
            sys.stderr.write("stopping; what has been measured follows; a second Ctrl-C ends at once\n")
