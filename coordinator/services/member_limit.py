"""Limits how much one member may send, with buckets for its session's messages and its calls. Pure; takes a clock.

A member is known by name. One that sends too much is told so and logged, and the operator can revoke it. Meanwhile it
must not block the event loop for the others. Guarantee, for each member and any t seconds: the coordinator processes at
most BURST_SECONDS + t seconds' worth of either allowance. `members` bounds the memory.

Honest software stays far below. In a round a member sends Ready and answers four phases in each of up to `attempts`
attempts. It makes about three calls (the version, the upload's status, the upload), one more for every 512 certificates
of a large cohort (20 for 10,000), and two or three a second while its line keeps breaking. The defaults, 100 messages
and 50 calls a second, allow fifteen rounds a second over all jobs of a member. One call brings a
whole backbone (`tacit.pieces`). Calls that cost the database more than a look at the caller cost more tokens: a
withdrawal, and a page of the roster log by its entries. So does what is answered about every job, by their number.
"""

import math
from collections.abc import Callable

from coordinator.buckets import Allowance, Buckets

__all__ = ["BURST_SECONDS", "WITHDRAWAL_TOKENS", "MemberLimit", "jobs_tokens", "log_page_tokens", "too_frequent"]

# Seconds that an empty bucket takes to fill.
BURST_SECONDS = 20.0
# A member whose session was ended may open the next one once this fraction of its bucket has refilled.
_BACK_AT = 0.25
# Bytes for which a message costs one more token. The dealings of the largest cohort have a megabyte.
_BYTES_A_TOKEN = 64 * 1024
# Of a call that withdraws. A member repeats its withdrawals at each start, one call for each.
WITHDRAWAL_TOKENS = 10.0
# Entries of the roster log for which a call costs one more token. A member that reads a long log for the first time
# has 160,000 at once, and then 8,000 a second; at its next attempt it reads on where it stopped.
_ENTRIES_A_TOKEN = 200
# Jobs for which a call that is answered about each of them costs one more token. Jobs that are over stay.
_JOBS_A_TOKEN = 50


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
        """Creates the buckets.

        Args:
            clock: Returns monotonic seconds.
            messages_per_second: Rate of a session's messages.
            calls_per_second: Rate of calls of all kinds, including sessions.
            members: Maximum number of members to remember.
        """
        self._back = messages_per_second * BURST_SECONDS * _BACK_AT
        self._messages = Buckets(clock, _allowance(messages_per_second), members)
        self._calls = Buckets(clock, _allowance(calls_per_second), members)

    def message(self, member: str, size: int) -> float:
        """Counts a message of `size` bytes. Returns 0, or the seconds to wait if it is one too many."""
        return self._messages.take(member, 1 + size // _BYTES_A_TOKEN)

    def session_short(self, member: str) -> float:
        """Returns the seconds until a member may open a session, 0 if it may now. It counts nothing."""
        return self._messages.seconds_short(member, self._back)

    def call(self, member: str, tokens: float = 1.0) -> float:
        """Counts a call. Returns 0, or the seconds to wait if it is one too many."""
        return self._calls.take(member, tokens)

    def call_short(self, member: str, tokens: float = 1.0) -> float:
        """Returns the seconds until a member may call, 0 if it may now. It counts nothing."""
        return self._calls.seconds_short(member, tokens)

    def __len__(self) -> int:
        """Returns how many members are remembered, by the larger of the two sets of buckets."""
        return max(len(self._messages), len(self._calls))


def log_page_tokens(entries: int) -> float:
    """The tokens of a call that reads entries of the roster log."""
    return 1.0 + entries // _ENTRIES_A_TOKEN


def jobs_tokens(jobs: int) -> float:
    """The tokens of a call that is answered about every job: a session, as it opens, and a list of jobs."""
    return 1.0 + jobs // _JOBS_A_TOKEN


def _allowance(rate: float) -> Allowance:
    return Allowance(rate * BURST_SECONDS, rate)


def too_frequent(what: str, seconds: float) -> str:
    """Returns the sentence for a member over its limit.

    Args:
        what: "messages" or "calls".
        seconds: How long the member should wait.
    """
    return (
        f"this member sends too many {what}; wait {max(1, math.ceil(seconds))} s. If it happens again, update its "
        "software, and check that only one process uses its identity"
    )
