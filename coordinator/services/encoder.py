"""Messages as protobuf: what a whole cohort is sent is written once."""

from collections import OrderedDict

import secure_agg
from tacit import wire
from tacit.attempt import AttemptId
from tacit.messages import AttemptMessage, CoordinatorPayload, FromCoordinator
from tacit.v1 import federation_pb2 as pb

__all__ = ["SharedEncoder"]

# What all of a cohort are sent alike; and how many of these are kept, of all jobs.
_TO_ALL = (
    secure_agg.Roster,
    secure_agg.DigestRoster,
    secure_agg.Survivors,
    secure_agg.Confirmations,
)
_SHARED_AT_ONCE = 8


class SharedEncoder:
    """Messages as protobuf. One payload that goes to many members is turned into it once: a roster of a thousand costs
    the event loop milliseconds. Used from one event loop.
    """

    def __init__(self) -> None:
        # By the payload itself, not by what it equals: comparing two rosters costs as much as writing one. The payload
        # is kept beside, so that no other object can come to stand at its place.
        self._last: OrderedDict[int, tuple[CoordinatorPayload, AttemptId, pb.CoordinatorMessage]] = OrderedDict()

    def encode(self, message: FromCoordinator) -> pb.CoordinatorMessage:
        """As it travels. The result is shared: nobody changes it."""
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
