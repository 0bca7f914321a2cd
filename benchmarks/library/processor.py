"""The processor time of other processes over time, so that a part of it can be cut out afterwards."""

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from types import TracebackType

__all__ = ["ProcessorClock", "processor_seconds"]

_EVERY = 0.02
# The kernel's number of the clock that counts a process's processor time (clock_getcpuclockid, CPUCLOCK_SCHED).
_SCHEDULED = 2


def processor_seconds(process: int) -> float:
    """Return the processor seconds that a running process of this machine has used, over all its threads.

    Raises:
        OSError: no such process.
    """
    return time.clock_gettime((~process << 3) | _SCHEDULED)


class ProcessorClock:
    """Notes the total processor time of some processes fifty times a second, while its block runs.

    Args:
        processes: their ids. All of them must run until the block ends.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = list(processes)
        self._times: list[float] = []
        self._used: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="processor-clock")

    def __enter__(self) -> "ProcessorClock":
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> float:
        """Return the processor seconds used between two moments of the wall clock, in seconds since 1970.

        Raises:
            ValueError: the block did not run then.
        """
        if not self._times or not self._times[0] <= begin <= end <= self._times[-1]:
            raise ValueError("the processes were not watched during this time")
        return self._at(end) - self._at(begin)

    def _at(self, moment: float) -> float:
        """Interpolate between two notes."""
        after = max(1, bisect_left(self._times, moment))
        (t0, t1), (u0, u1) = self._times[after - 1 : after + 1], self._used[after - 1 : after + 1]
        return u0 + (u1 - u0) * (moment - t0) / (t1 - t0)

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY):
            self._note()
        self._note()

    def _note(self) -> None:
        self._used.append(sum(map(processor_seconds, self._processes)))
        self._times.append(time.time())
