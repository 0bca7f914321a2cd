"""One direction of a slow and long line: when each byte leaves and arrives, and how well a sender uses it.

It reads no clock: callers say what time it is, so the arithmetic can be tested without waiting. A token bucket with a
burst of one piece: a piece leaves once all before it have left, and takes its size over the rate to do so.
"""

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Line"]


@dataclass
class Line:
    """A direction with a rate, a delay and a window, shared by all connections.

    Args:
        rate: bytes a second.
        delay: seconds from leaving to arriving.
        window: maximum bytes that have entered and not arrived. A sender with more must wait.
    """

    rate: float
    delay: float
    window: int
    # Bytes that entered, the time of the first, and the time at which the last leaves.
    entered: int = 0
    began: float | None = None
    free_at: float = 0.0
    # Spans of time in which nothing was leaving, between the first byte and the last: bytes before it, and seconds.
    gaps: list[tuple[int, float]] = field(default_factory=list)
    # How many bytes had entered each time that the line was found empty. A sender that waits for an answer before it
    # sends on leaves one behind each time. Unlike a time, a crowded machine does not change that.
    empty_at: list[int] = field(default_factory=list)
    _travelling: deque[tuple[float, int]] = field(default_factory=deque)
    _in_flight: int = 0

    def in_flight(self, now: float) -> int:
        """Bytes that have entered and not arrived."""
        while self._travelling and self._travelling[0][0] <= now:
            self._in_flight -= self._travelling.popleft()[1]
        return self._in_flight

    def room_at(self, now: float, size: int) -> float:
        """The time from which `size` bytes fit. A piece above the window needs an empty line."""
        left = self.in_flight(now)
        if left + size <= self.window:
            return now
        for arrives, part in self._travelling:
            left -= part
            if left + size <= self.window or not left:
                return arrives
        return now

    def enter(self, now: float, size: int) -> float:
        """Takes a piece, and returns when it arrives."""
        if self.began is None:
            self.began = now
            self.free_at = max(self.free_at, now)
        elif now > self.free_at:
            self.gaps.append((self.entered, now - self.free_at))
        if not self.in_flight(now):
            self.empty_at.append(self.entered)
        self.entered += size
        self.free_at = max(now, self.free_at) + size / self.rate
        arrives = self.free_at + self.delay
        self._travelling.append((arrives, size))
        self._in_flight += size
        return arrives

    def utilisation(self) -> float:
        """Bytes over what the line could have carried between the first byte and the last."""
        if self.began is None:
            return 0.0
        return self.entered / (self.rate * (self.free_at - self.began))

    def measure_anew(self) -> None:
        """Forgets what was measured. What is travelling stays."""
        self.entered, self.began, self.gaps, self.empty_at = 0, None, [], []
