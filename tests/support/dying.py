"""A worker that dies, in a module of its own: a process that is spawned for it imports nothing large."""

import multiprocessing
import os
import signal
from pathlib import Path

__all__ = ["Dying"]


class Dying:
    """Dies once in `square`, the first time that it is asked for 3, and each time in `dies`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def square(self, number: int) -> int:
        """The square of a number."""
        died = self.folder / "died"
        if number == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    def length(self, data: bytes) -> int:
        """The number of bytes."""
        return len(data)

    def variable(self, name: str) -> str | None:
        """A variable of the worker's environment."""
        return os.environ.get(name)

    def dies(self) -> None:
        """Does what it says."""
        os.kill(os.getpid(), signal.SIGKILL)

    def pid(self) -> int:
        """The worker's process."""
        return os.getpid()

    def interrupts(self) -> None:
        """Interrupts the process that asks, as Ctrl-C does, and never answers."""
        asking = multiprocessing.parent_process()
        assert asking is not None
        os.kill(asking.pid, signal.SIGINT)
        signal.pause()
