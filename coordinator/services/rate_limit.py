"""How often strangers may try to enrol: token buckets, by address and in all. Pure; the clock is handed in.

Whoever reaches the enrolment port may send requests, and each costs the check of a signature and a transaction of the
database. So a try takes a permit before any of that, and one that was granted gives it back: a ward of fifty machines
behind one address enrols without noticing, while somebody who guesses is left with the trickle that refills. Nobody is
ever shut out for longer than a bucket takes to refill: there is no list of the banned, and a flood that ends is
forgotten within a minute.

Guarantees: of the tries that fail, no address makes more than `burst + seconds x rate`, and all of them together no
more than the same of the bucket for all; memory is bounded by `addresses`. What it leaves open: a flood through the
very address translation that an honest member stands behind, or one from very many addresses at once, takes the honest
one's permits too for as long as it lasts; it is then refused with the seconds to wait, and loses nothing.
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
    """One try of one address. `refused_for` is None where it may go on, else the seconds to wait, above 0."""

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
        """clock: monotonic seconds. addresses: of how many is kept count at most."""
        self._clock = clock
        self._in_all = in_all
        self._by_address = Buckets(clock, by_address, addresses)
        self._whole = Bucket(in_all.burst, clock())

    def take(self, peer: str) -> Permit:
        """A permit for one try of a gRPC peer (`ipv4:192.0.2.1:50123`); nothing is taken where it is refused."""
        address = address_of(peer)
        short = max(
            self._by_address.seconds_short(address),
            self._whole.seconds_short(self._in_all, self._clock()),
        )
        if short:
            return Permit(address, short)
        self._whole.left -= 1
        # An address that is forgotten at its limit gains nothing: the bucket for all still holds.
        self._by_address.take(address)
        return Permit(address, None)

    def give_back(self, permit: Permit) -> None:
        """The try was granted: it counts against nobody."""
        self._by_address.give_back(permit.address)
        self._whole.left = min(self._in_all.burst, self._whole.left + 1)

    def __len__(self) -> int:
        """Of how many addresses is kept count."""
        return len(self._by_address)


def address_of(peer: str) -> str:
    """What a gRPC peer is counted as: its IPv4 address, its IPv6 network (/64), else what it is."""
    _, _, rest = peer.partition(":")
    host = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]")
    try:
        return network_of(host)
    except ValueError:
        return peer[:64]
