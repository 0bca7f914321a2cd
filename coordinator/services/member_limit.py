"""How much one member may send: buckets for its session's messages and for its calls. Pure; the clock is handed in.

A member is known by name, so one that sends too much is told so, logged, and the operator's to revoke; meanwhile it
must not cost the others their event loop. Guarantees, for each member and any t seconds: no more than BURST_SECONDS + t
seconds of either allowance is worked out. Memory is bounded by `members`.

What honest software sends stays far below. In a round a member says Ready and answers four phases, in each of up to
`attempts` attempts, and makes about three calls (the version, the upload's status, the upload), one more for every 512
certificates of a large cohort (20 for 10,000), and two or three a second for a line that keeps breaking. The defaults,
100 messages and 50 calls a second, carry fifteen rounds a second, of all jobs of a member together.
"""

import math
from collections.abc import Callable

from coordinator.buckets import Allowance, Buckets

__all__ = ["BURST_SECONDS", "MemberLimit", "too_frequent"]

# A full bucket holds what flows in within this time.
BURST_SECONDS = 20.0
# A member whose session was ended may open the next one when this part of its bucket is back.
_BACK_AT = 0.25
# A large message costs a token more for each of these: dealings of the largest cohort have a megabyte.
_BYTES_A_TOKEN = 64 * 1024


class MemberLimit:
    """The buckets of all members. Used from one event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        messages_per_second: float = 100.0,
        calls_per_second: float = 50.0,
        members: int = 16384,
    ) -> None:
        """
        Args:
            clock: monotonic seconds.
            messages_per_second: of a session.
            calls_per_second: of every kind, sessions included.
            members: how many are remembered at most.
        """
        self._back = messages_per_second * BURST_SECONDS * _BACK_AT
        self._messages = Buckets(clock, _allowance(messages_per_second), members)
        self._calls = Buckets(clock, _allowance(calls_per_second), members)

    def message(self, member: str, size: int) -> float:
        """Takes a message of `size` bytes; 0, or the seconds to wait where it is one too many."""
        return self._messages.take(member, 1 + size // _BYTES_A_TOKEN)

    def session_short(self, member: str) -> float:
        """Seconds until a member may open a session, 0 if it may now. Takes nothing."""
        return self._messages.seconds_short(member, self._back)

    def call(self, member: str) -> float:
        """Takes a call; 0, or the seconds to wait where it is one too many."""
        return self._calls.take(member)

    def call_short(self, member: str) -> float:
        """Seconds until a member may call, 0 if it may now. Takes nothing."""
        return self._calls.seconds_short(member)

    def __len__(self) -> int:
        """How many members are remembered, at most."""
        return max(len(self._messages), len(self._calls))


def _allowance(rate: float) -> Allowance:
    return Allowance(rate * BURST_SECONDS, rate)


def too_frequent(what: str, seconds: float) -> str:
    """What a limited member is told."""
    return (
        f"this member sends too many {what}; wait {max(1, math.ceil(seconds))} s. If it goes on, update its software, "
        "and see that only one process uses its identity"
    )
