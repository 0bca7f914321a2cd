"""Limits how often strangers may try to enrol, with token buckets per address and in total. Pure; takes a clock.

Anybody who reaches the enrolment port may send requests, and each costs a signature check and a database transaction.
So every try takes a permit first, and a try that makes a member gives its permit back. Fifty machines behind one
address enrol without noticing, while somebody who guesses gets only the refill. So does a member that repeats its own
request. Nobody is blocked for longer than a bucket takes to refill: there is no ban list, and a flood is forgotten
within a minute after it ends.

Guarantees: each address makes at most `burst + seconds x rate` tries that make no member, and all addresses together at
most the same of the total bucket. `addresses` bounds the memory.

What remains possible: a flood from behind the same address translation as an honest member, or from very many addresses
at once, also takes the honest member's permits while it lasts. The member is then refused with the seconds to wait, and
loses nothing.
"""

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.buckets import Allowance, Bucket, Buckets
from coordinator.relay.names import network_of

__all__ = ["Allowance", "EnrolmentLimit", "Permit", "address_of"]

_BY_ADDRESS, _IN_ALL = Allowance(burst=60, rate=1.0), Allowance(burst=300, rate=20.0)


@dataclass(frozen=True, slots=True)
class Permit:
    """One try from one address. `refused_for` is None if it may continue, else the seconds to wait, above 0."""

    address: str
    refused_for: float | None


class EnrolmentLimit:
    """The buckets. Used from one event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        by_address: Allowance = _BY_ADDRESS,
        in_all: Allowance = _IN_ALL,
        addresses: int = 4096,
    ) -> None:
        """Creates the buckets.

        Args:
            clock: Returns monotonic seconds.
            by_address: The allowance of one address.
            in_all: The allowance of all addresses together.
            addresses: Maximum number of addresses to remember.
        """
        self._clock = clock
        self._in_all = in_all
        self._by_address = Buckets(clock, by_address, addresses)
        self._whole = Bucket(in_all.burst, clock())

    def take(self, peer: str) -> Permit:
        """Returns a permit for one try of a gRPC peer (`ipv4:192.0.2.1:50123`). A refusal takes nothing."""
        address = address_of(peer)
        short = max(
            self._by_address.seconds_short(address),
            self._whole.seconds_short(self._in_all, self._clock()),
        )
        if short:
            return Permit(address, short)
        self._whole.left -= 1
        # An address that is forgotten at its limit gains nothing, as the total bucket still limits it.
        self._by_address.take(address)
        return Permit(address, None)

    def give_back(self, permit: Permit) -> None:
        """Returns the permit of a try that made a member, which then counts against nobody."""
        self._by_address.give_back(permit.address)
        self._whole.left = min(self._in_all.burst, self._whole.left + 1)

    def __len__(self) -> int:
        """Returns the number of remembered addresses."""
        return len(self._by_address)


def address_of(peer: str) -> str:
    """Returns what a gRPC peer counts as: its IPv4 address, its IPv6 network (/64), or its text if it has neither."""
    _, _, rest = peer.partition(":")
    host = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]")
    try:
        return network_of(host)
    except ValueError:
        return peer[:64]
