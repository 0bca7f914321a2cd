"""A stopwatch for wall and processor time. Uses only the standard library: the peer's own Python imports it too."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Stopwatch"]


class Stopwatch:
    """Total time of the measured pieces. wall, cpu: in seconds; cpu counts all threads of the process."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent inside."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside, within a measured piece."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall -= time.perf_counter() - wall
            self.cpu -= time.process_time() - cpu
