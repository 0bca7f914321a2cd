"""Which of the coordinator's addresses to dial next.

A federation may have several coordinators, of which one is active and the others stand by. A member goes on to the next
address at once, and pauses only when each address that is worth a try has refused or failed since the last pause. An
address that did not answer is passed over for a few pauses, because dialling a machine that hangs takes seconds, and a
standby that refuses may be active a moment later.
"""

from collections.abc import Sequence

__all__ = ["Addresses"]

# How many pauses long an address that did not answer is passed over, if another one answers.
_PASSED_OVER = 3


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

    def failed(self, *, answered: bool) -> bool:
        """Goes on to the next address.

        Args:
            answered: Whether the present one said that it stands by, so that it may be worth another try soon.

        Returns:
            Whether to pause before dialling.
        """
        self._tried.add(self._at)
        # A standby's ports are closed for a moment when its turn comes, so one failure after an answer is forgiven.
        forgiven = answered or self._at in self._stood_by
        self._passed_over[self._at] = 0 if forgiven else _PASSED_OVER
        if answered:
            self._stood_by.add(self._at)
        else:
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
