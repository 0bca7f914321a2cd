"""Decides which connections of strangers may stay, and which is forwarded next. Pure; takes a clock.

A network is an IPv4 address or an IPv6 /64.

`Hall` guarantees: at most `total` connections are open, at most `per_network` from one network. In a full hall a new
connection replaces the oldest connection of the network with the most, if that network then still holds at least as
many as the new connection's network. So a network without a connection gets one as long as fewer than `total` networks
hold any, and a network loses a connection only to one that holds fewer.

`Turnstile` guarantees: at most burst + rate * t connections are forwarded in t seconds, as each costs the enrolment
server a TLS handshake. Networks take turns, so the only connection of a network waits for at most one connection of
each other network.
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
    """A connection may stay. `displaced` must end, and no longer counts."""

    displaced: _Visitor | None = None


class Hall(Generic[_Visitor]):
    """The open connections."""

    def __init__(self, total: int, per_network: int) -> None:
        self._total = total
        self._per_network = per_network
        # Connections by network, the oldest first.
        self._held: dict[str, OrderedDict[_Visitor, None]] = {}
        self._count = 0

    def admit(self, network: str, visitor: _Visitor) -> Admitted[_Visitor] | Refusal:
        """Admits a connection, or returns the bound that it would exceed."""
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
        """Removes a connection that ended. Removing it twice is harmless."""
        held = self._held.get(network)
        if held is None or visitor not in held:
            return
        del held[visitor]
        self._count -= 1
        if not held:
            del self._held[network]

    @property
    def networks(self) -> int:
        """The number of networks that hold a connection."""
        return len(self._held)

    def __len__(self) -> int:
        """Returns the number of open connections."""
        return self._count


class Turnstile(Generic[_Visitor]):
    """The connections that wait to be forwarded."""

    def __init__(self, clock: Callable[[], float], allowance: Allowance) -> None:
        """Creates an empty queue.

        Args:
            clock: Returns monotonic seconds.
            allowance: How many connections may be forwarded at once, and how many a second.
        """
        self._clock = clock
        self._allowance = allowance
        self._bucket = Bucket(allowance.burst, clock())
        # Networks in the order of their turns.
        self._waiting: OrderedDict[str, OrderedDict[_Visitor, None]] = OrderedDict()

    def join(self, network: str, visitor: _Visitor) -> None:
        """Adds a waiting connection."""
        self._waiting.setdefault(network, OrderedDict())[visitor] = None

    def leave(self, network: str, visitor: _Visitor) -> None:
        """Removes a waiting connection. Removing it twice is harmless."""
        waiting = self._waiting.get(network)
        if waiting is not None and visitor in waiting:
            del waiting[visitor]
            if not waiting:
                del self._waiting[network]

    def next(self) -> tuple[_Visitor | None, float]:
        """Takes the connection whose turn it is.

        Returns:
            The connection and 0. If it is nobody's turn, None and the seconds until the next one, or infinity if no
            connection waits.
        """
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
