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

import ipaddress
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Allowance", "EnrolmentLimit", "Permit", "address_of"]

# An institution has one IPv6 network, and may take its addresses one after the other.
_IPV6_NETWORK = 64


@dataclass(frozen=True, slots=True)
class Allowance:
    """A bucket's size, in tries, and what flows in, in tries a second."""

    burst: int
    rate: float


@dataclass(slots=True)
class _Bucket:
    left: float
    # When it was last looked at, in seconds of the clock.
    at: float

    def seconds_short(self, allowance: Allowance, now: float) -> float:
        """Brings the bucket up to `now`; how long until it holds a try, 0 if it does."""
        # A clock that goes backwards adds nothing and takes nothing.
        self.left = min(allowance.burst, self.left + max(0.0, now - self.at) * allowance.rate)
        self.at = max(self.at, now)
        # The sum of many small additions may fall short of a whole try by a rounding error.
        return 0.0 if self.left >= 1 - 1e-9 else (1 - self.left) / allowance.rate


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
        by_address: Allowance = Allowance(burst=60, rate=1.0),
        in_all: Allowance = Allowance(burst=300, rate=20.0),
        addresses: int = 4096,
    ) -> None:
        """clock: monotonic seconds. addresses: of how many is kept count at most."""
        self._clock = clock
        self._by_address = by_address
        self._in_all = in_all
        self._addresses = addresses
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._whole = _Bucket(in_all.burst, clock())

    def take(self, peer: str) -> Permit:
        """A permit for one try of a gRPC peer (`ipv4:192.0.2.1:50123`); nothing is taken where it is refused."""
        now = self._clock()
        address = address_of(peer)
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = _Bucket(self._by_address.burst, now)
        short = max(
            bucket.seconds_short(self._by_address, now),
            self._whole.seconds_short(self._in_all, now),
        )
        if short:
            return Permit(address, short)
        bucket.left -= 1
        self._whole.left -= 1
        self._buckets[address] = bucket
        self._buckets.move_to_end(address)
        while len(self._buckets) > self._addresses:
            # The one that was quiet for longest. If it was at its limit, the bucket for all still holds.
            self._buckets.popitem(last=False)
        return Permit(address, None)

    def give_back(self, permit: Permit) -> None:
        """The try was granted: it counts against nobody."""
        bucket = self._buckets.get(permit.address)
        if bucket is not None:
            bucket.left = min(self._by_address.burst, bucket.left + 1)
        self._whole.left = min(self._in_all.burst, self._whole.left + 1)

    def __len__(self) -> int:
        """Of how many addresses is kept count."""
        return len(self._buckets)


def address_of(peer: str) -> str:
    """What a gRPC peer is counted as: its IPv4 address, its IPv6 network (/64), else what it is."""
    _, _, rest = peer.partition(":")
    host = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return peer[:64]
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is None:
            return str(ipaddress.ip_network((address, _IPV6_NETWORK), strict=False))
        address = mapped
    return str(address)
