"""The frames between the main process and a worker: their kinds, layout and limits. Pure.

A frame is a length (4 bytes), a kind (1), the number of a call (8; 0 for the worker itself) and a payload. A call's
messages travel as the bytes that the member sent or receives. Everything else is a JSON object.

Either side asks before it gets a message: the worker reads a member's next message after READ, and the main process
writes the next one after WRITTEN. So no call has more than one message each way between the processes.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any

from tacit.limits import MAX_FROM_COORDINATOR, MAX_FROM_MEMBER

__all__ = ["HEADER", "MAX_DETAILS", "ChannelBroken", "Frame", "Kind", "Parser", "decoded", "encoded", "header"]

# Length of the payload, kind, and the call's number.
HEADER = struct.Struct("<IBQ")
# A certificate, a peer's address, a refusal: kilobytes.
MAX_DETAILS = 64 * 1024


class ChannelBroken(RuntimeError):
    """The other process sent what the protocol between the two does not allow."""


@unique
class Kind(IntEnum):
    """What a frame says."""

    # ---- from the worker
    LISTENING = 1  # It accepts connections.
    FIGURES = 2  # What it uses of the machine; repeated.
    OPEN = 3  # A call begins: its method and its caller.
    SAID = 4  # A member's message.
    ALL_SAID = 5  # The member has no further message, in answer to READ.
    WRITTEN = 6  # TELL was passed on to gRPC.
    GONE = 7  # The member has ended the call, or its connection broke.
    # ---- from the main process
    READ = 8  # Read the member's next message.
    TELL = 9  # Write a message to the member; WRITTEN answers.
    LAST = 10  # Write the only answer of a call. END follows at once.
    END = 11  # The call is over, with this status.
    DRAIN = 12  # Accept nothing more, and end when the open calls have.


# By kind, the largest payload. A kind that the receiving side never gets is absent from its table.
FROM_WORKER: Mapping[Kind, int] = {
    Kind.LISTENING: MAX_DETAILS,
    Kind.FIGURES: MAX_DETAILS,
    Kind.OPEN: MAX_DETAILS,
    Kind.SAID: MAX_FROM_MEMBER,
    Kind.ALL_SAID: 0,
    Kind.WRITTEN: 0,
    Kind.GONE: 0,
}
FROM_MAIN: Mapping[Kind, int] = {
    Kind.READ: 0,
    Kind.TELL: MAX_FROM_COORDINATOR,
    Kind.LAST: MAX_FROM_COORDINATOR,
    Kind.END: MAX_DETAILS,
    Kind.DRAIN: MAX_DETAILS,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    kind: Kind
    call: int = 0
    payload: bytes = b""


def header(kind: Kind, call: int, size: int) -> bytes:
    """Returns what precedes a payload of `size` bytes."""
    return HEADER.pack(size, kind, call)


def encoded(details: Mapping[str, Any]) -> bytes:
    """Encodes the payload of a frame that is no member's message."""
    return json.dumps(details, separators=(",", ":")).encode()


def decoded(payload: bytes) -> dict[str, Any]:
    """Decodes what `encoded` wrote.

    Raises:
        ChannelBroken: it is not a JSON object.
    """
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ChannelBroken("a frame is not JSON") from error
    if not isinstance(found, dict):
        raise ChannelBroken("a frame is not a JSON object")
    return found


class Parser:
    """Cuts a stream into frames. It holds at most one frame, of at most the size that its kind allows."""

    def __init__(self, allowed: Mapping[Kind, int]) -> None:
        """Creates a parser for a direction: `FROM_WORKER` or `FROM_MAIN`."""
        self._allowed = {int(kind): (kind, most) for kind, most in allowed.items()}
        self._rest = bytearray()
        # Bytes of the frame that has begun.
        self._wanted = HEADER.size

    def feed(self, data: bytes | memoryview, deliver: Callable[[Frame], None]) -> None:
        """Adds bytes and delivers each frame that they complete.

        Raises:
            ChannelBroken: a header names an unknown kind or a payload above its limit.
        """
        rest = self._rest
        rest += data
        at = 0
        while len(rest) - at >= self._wanted:
            size, number, call = HEADER.unpack_from(rest, at)
            kind, most = self._allowed.get(number, (None, 0))
            if kind is None or size > most:
                raise ChannelBroken(f"a frame of kind {number} with {size} bytes")
            end = at + HEADER.size + size
            if len(rest) < end:
                self._wanted = end - at
                break
            self._wanted = HEADER.size
            deliver(Frame(kind, call, bytes(memoryview(rest)[at + HEADER.size : end])))
            at = end
        if at:
            del rest[:at]
