"""Encodes messages as protobuf, and a message to a whole cohort only once."""

from collections import OrderedDict

import secure_agg
from tacit import wire
from tacit.attempt import AttemptId
from tacit.messages import AttemptMessage, CoordinatorPayload, FromCoordinator
from tacit.v1 import federation_pb2 as pb

__all__ = ["SharedEncoder"]

# Payloads that a whole cohort receives alike, and how many encoded ones are kept across all jobs.
_TO_ALL = (
    secure_agg.Roster,
    secure_agg.DigestRoster,
    secure_agg.Survivors,
    secure_agg.Confirmations,
)
_SHARED_AT_ONCE = 8


class SharedEncoder:
    """Encodes messages as protobuf, and a payload that goes to many members only once.

    A roster of a thousand members costs the event loop milliseconds. Used from one event loop.
    """

    def __init__(self) -> None:
        # Keyed by the payload's identity, since comparing two rosters costs as much as encoding one. The entry also
        # holds the payload, so that no other object can get its id.
        self._last: OrderedDict[int, tuple[CoordinatorPayload, AttemptId, pb.CoordinatorMessage]] = OrderedDict()

    def encode(self, message: FromCoordinator) -> pb.CoordinatorMessage:
        """Returns the message as protobuf. The result is shared and must not be changed."""
        if not isinstance(message, AttemptMessage):
            return wire.to_member(message)
        known = self._last.get(id(message.payload))
        if known is not None and known[1] == message.attempt:
            return known[2]
        encoded = wire.to_member(message)
        if isinstance(message.payload, _TO_ALL):
            self._last[id(message.payload)] = (message.payload, message.attempt, encoded)
            if len(self._last) > _SHARED_AT_ONCE:
                self._last.popitem(last=False)
        return encoded
