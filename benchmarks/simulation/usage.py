"""Reads what this process and all that it started cost. Flower's Python imports it too, so it needs only psutil."""

import os
import time
from dataclasses import dataclass

import psutil

__all__ = ["Rounds", "processor_seconds", "resident_bytes"]


def _processes() -> list[psutil.Process]:
    this = psutil.Process(os.getpid())
    return [this, *this.children(recursive=True)]


def processor_seconds() -> float:
    """Return the user and system seconds of this process and its living descendants."""
    total = 0.0
    for process in _processes():
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        total += used.user + used.system
    return total


def resident_bytes() -> int:
    """Return the memory of this process and its descendants. A page that several of them have counts once."""
    total = 0
    for process in _processes():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


@dataclass
class _Mark:
    clock: float
    processor: float


class Rounds:
    """The cost of a simulation's rounds, as it runs. What happens between `ended` and `begins` does not count."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []
        self.resident: list[int] = []
        self._mark: _Mark | None = None

    def begins(self) -> None:
        """Mark the start of a round."""
        self._mark = _Mark(time.perf_counter(), processor_seconds())

    def ended(self) -> None:
        """Note what the round cost."""
        clock = time.perf_counter()
        if self._mark is None:
            raise RuntimeError("a round ended that never began")
        self.clock.append(clock - self._mark.clock)
        self.processor.append(processor_seconds() - self._mark.processor)
        self.resident.append(resident_bytes())
        self._mark = None
