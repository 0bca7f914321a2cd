"""How much of the roster log its witnesses have signed."""

from dataclasses import dataclass

__all__ = ["Witnessed"]


@dataclass(frozen=True, slots=True)
class Witnessed:
    """What every witness that signed within a day has signed.

    Args:
        entries: The number of entries in the smallest of their newest heads; None if no witness signed within a day.
        newer: The members that got a certificate after those entries.
        least: The key of the witness that signed that head, 32 bytes; of several, the smallest key. Empty without one.
    """

    entries: int | None = None
    newer: frozenset[str] = frozenset()
    least: bytes = b""
