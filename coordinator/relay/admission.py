"""Which connections of strangers stay, and whose turn it is to be passed on. Pure; the clock is handed in.

A network is an IPv4 address or an IPv6 /64.

`Hall` guarantees: at most `total` connections stand, at most `per_network` of one network. In a full hall a newcomer
takes the place of the oldest connection of the network that holds most, if that network still holds more than the
newcomer's own afterwards. So a network with none gets one in as long as fewer than `total` networks hold any, and a
network loses a connection only to one that holds fewer.

`Turnstile` guarantees: at most burst + rate * t are passed on in t seconds, because each costs the enrolment server a
TLS handshake; networks take turns, so whoever is the only one of its network waits for at most one of each other
network.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from coordinator.buckets import Allowance, Bucket

__all__ = ["Admitted", "Hall", "Refusal", "Turnstile"]

Refusal = Literal["network_full", "all_full"]
_Visitor = TypeVar("_Visitor", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Admitted(Generic[_Visitor]):
    """A connection may stay; `displaced` must go, and counts no more."""

    displaced: _Visitor | None = None


class Hall(Generic[_Visitor]):
    """The connections that stand."""

    def __init__(self, total: int, per_network: int) -> None:
        self._total = total
        self._per_network = per_network
        # By network, the oldest first.
        self._held: dict[str, OrderedDict[_Visitor, None]] = {}
        self._count = 0

    def admit(self, network: str, visitor: _Visitor) -> Admitted[_Visitor] | Refusal:
        """Takes a connection in, or says which bound it would pass."""
        own = len(self._held.get(network, ()))
        if own >= self._per_network:
            return "network_full"
        displaced = None
        if self._count >= self._total:
            largest = max(self._held, key=lambda each: len(self._held[each]), default=network)
            if len(self._held.get(largest, ())) <= own + 1:
                return "all_full"
            displaced = next(iter(self._held[largest]))
            self.leave(largest, displaced)
        self._held.setdefault(network, OrderedDict())[visitor] = None
        self._count += 1
        return Admitted(displaced)

    def leave(self, network: str, visitor: _Visitor) -> None:
        """A connection is gone. May be said twice."""
        held = self._held.get(network)
        if held is None or visitor not in held:
            return
        del held[visitor]
        self._count -= 1
        if not held:
            del self._held[network]

    @property
    def networks(self) -> int:
        """How many networks hold a connection."""
        return len(self._held)

    def __len__(self) -> int:
        """How many connections stand."""
        return self._count


class Turnstile(Generic[_Visitor]):
    """Who waits to be passed on."""

    def __init__(self, clock: Callable[[], float], allowance: Allowance) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        self._allowance = allowance
        self._bucket = Bucket(allowance.burst, clock())
        # Networks in the order of their turns.
        self._waiting: OrderedDict[str, OrderedDict[_Visitor, None]] = OrderedDict()

    def join(self, network: str, visitor: _Visitor) -> None:
        """A connection waits from now on."""
        self._waiting.setdefault(network, OrderedDict())[visitor] = None

    def leave(self, network: str, visitor: _Visitor) -> None:
        """A connection waits no more. May be said twice."""
        waiting = self._waiting.get(network)
        if waiting is not None and visitor in waiting:
            del waiting[visitor]
            if not waiting:
                del self._waiting[network]

    def next(self) -> tuple[_Visitor | None, float]:
        """The connection whose turn it is, and 0; else None, and the seconds until a turn (inf: nobody waits)."""
        if not self._waiting:
            return None, math.inf
        short = self._bucket.seconds_short(self._allowance, self._clock())
        if short:
            return None, short
        self._bucket.left -= 1
        network, waiting = next(iter(self._waiting.items()))
        visitor, _ = waiting.popitem(last=False)
        if waiting:
            self._waiting.move_to_end(network)
        else:
            del self._waiting[network]
        return visitor, 0.0
