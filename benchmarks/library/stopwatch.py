"""Seconds of wall and of processor time. Standard library only: the peer's own Python imports it too."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Stopwatch"]


class Stopwatch:
    """What the pieces that it ran for took together. wall, cpu: in seconds; cpu is of all threads of the process."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what happens inside."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside, within a piece that counts."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall -= time.perf_counter() - wall
            self.cpu -= time.process_time() - cpu
