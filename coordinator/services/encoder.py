"""Encodes messages as bytes, and a message to a whole cohort or group only once."""

from collections import OrderedDict
from dataclasses import dataclass

import secure_agg
from tacit import wire
from tacit.attempt import AttemptId
from tacit.messages import AttemptMessage, CoordinatorPayload, FromCoordinator

__all__ = ["Encoded", "SharedEncoder"]

# Payloads that a whole cohort or group receives alike, and how many encoded ones are kept across all jobs.
_TO_ALL = (
    secure_agg.Roster,
    secure_agg.DigestRoster,
    secure_agg.GroupRoster,
    secure_agg.Survivors,
    secure_agg.Confirmations,
)
_SHARED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message as it travels, and the name of its field in the protocol."""

    kind: str | None
    data: bytes


class SharedEncoder:
    """Encodes messages as bytes, and a payload that goes to many members only once.

    A roster of a thousand members has half a megabyte. Used from one event loop.
    """

    def __init__(self) -> None:
        # Keyed by the payload's identity, since comparing two rosters costs as much as encoding one. The entry also
        # holds the payload, so that no other object can get its id.
        self._last: OrderedDict[int, tuple[CoordinatorPayload, AttemptId, Encoded]] = OrderedDict()

    def encode(self, message: FromCoordinator) -> Encoded:
        """Returns the message as bytes."""
        if not isinstance(message, AttemptMessage):
            return _encoded(message)
        known = self._last.get(id(message.payload))
        if known is not None and known[1] == message.attempt:
            return known[2]
        encoded = _encoded(message)
        if isinstance(message.payload, _TO_ALL):
            self._last[id(message.payload)] = (message.payload, message.attempt, encoded)
            if len(self._last) > _SHARED_AT_ONCE:
                self._last.popitem(last=False)
        return encoded


def _encoded(message: FromCoordinator) -> Encoded:
    made = wire.to_member(message)
    return Encoded(made.WhichOneof("message"), made.SerializeToString())
