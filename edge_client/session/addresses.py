"""Which of the coordinator's addresses to dial next.

A federation may have several coordinators, of which one is active and the others stand by. A member goes on to the next
address at once, and pauses only when each address that is worth a try has refused or failed since the last pause. An
address that was silent is passed over for a few pauses, because dialling a machine that hangs takes seconds, and a
standby that refuses may be active a moment later. One that failed at once costs nothing to dial again: its process is
gone, or it is a standby that has just closed its ports to serve.
"""

from collections.abc import Sequence
from enum import Enum, auto

__all__ = ["Addresses", "Failed"]

# How many pauses long a silent address is passed over, if another one answers. The pauses grow from a quarter of a
# second, so these last longer than a standby's ports are closed when its turn comes.
_PASSED_OVER = 4


class Failed(Enum):
    """How a try at an address failed."""

    # It said that it stands by.
    STANDS_BY = auto()
    # Its machine refused within a moment.
    AT_ONCE = auto()
    # Its session broke, or the try took long.
    SILENT = auto()


class Addresses:
    """The addresses in order, the present one, and what is known of them in this outage. Does no IO."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Starts with the first address (host:port). Raises ValueError if there is none."""
        if not addresses:
            raise ValueError("a member needs an address of its coordinator")
        self._all = tuple(dict.fromkeys(addresses))
        self._at = 0
        self._tried: set[int] = set()
        self._passed_over: dict[int, int] = {}
        # Those that stood by when they were last dialled in this outage.
        self._stood_by: set[int] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def present(self) -> str:
        """The address to dial."""
        return self._all[self._at]

    def worked(self) -> None:
        """Notes that the present address has a session. It is the first to be dialled after a break."""
        self._tried.clear()
        self._passed_over.clear()
        self._stood_by.clear()

    def failed(self, how: Failed) -> bool:
        """Goes on to the next address.

        Args:
            how: What became of the present one. Only a silent one is passed over.

        Returns:
            Whether to pause before dialling.
        """
        self._tried.add(self._at)
        # A standby whose turn has come may be slow for a moment, so one silence after an answer is forgiven.
        silent = how is Failed.SILENT and self._at not in self._stood_by
        self._passed_over[self._at] = _PASSED_OVER if silent else 0
        if how is Failed.STANDS_BY:
            self._stood_by.add(self._at)
        elif how is Failed.SILENT:
            self._stood_by.discard(self._at)
        ring = [(self._at + step) % len(self._all) for step in range(1, len(self._all) + 1)]
        for place in ring:
            if place not in self._tried and not self._passed_over.get(place):
                self._at = place
                return False
        self._tried.clear()
        self._passed_over = {place: max(0, left - 1) for place, left in self._passed_over.items()}
        self._at = next((place for place in ring if not self._passed_over.get(place)), ring[0])
        return True
