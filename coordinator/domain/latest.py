"""The newest number of each member, with the largest and the median of them.

A look costs nothing and a new number some microseconds, also with 10,000 members.
"""

from bisect import bisect_left, insort

__all__ = ["Latest"]


class Latest:
    """Finite numbers by key."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        # Sorted.
        self._values: list[float] = []

    def take(self, key: str, number: float) -> None:
        """Replaces the number of a key."""
        if (before := self._numbers.get(key)) is not None:
            del self._values[bisect_left(self._values, before)]
        self._numbers[key] = number
        insort(self._values, number)

    @property
    def largest(self) -> float:
        """The largest number. Raises IndexError if there is none."""
        return self._values[-1]

    @property
    def median(self) -> float:
        """The middle number, or the mean of the two in the middle. Raises IndexError if there is none."""
        middle, odd = divmod(len(self._values), 2)
        return self._values[middle] if odd else (self._values[middle - 1] + self._values[middle]) / 2
