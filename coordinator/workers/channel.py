"""One end of the socket pair between the main process and a worker, on an event loop.

The pair is made before the worker starts and inherited. It has no name, so no other process can connect to it.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping

from coordinator.workers.frames import ChannelBroken, Frame, Kind, Parser, header

__all__ = ["Channel", "connect"]

# Bytes that wait to be sent before senders of large messages wait, too.
_HIGH, _LOW = 2 * 1024 * 1024, 1024 * 1024
# Payloads above this are written on their own, so that they are not copied.
_JOINED = 16 * 1024


class Channel(asyncio.Protocol):
    """Sends frames, and delivers those that arrive. Used from one event loop."""

    def __init__(
        self,
        allowed: Mapping[Kind, int],
        deliver: Callable[[Frame], None],
        lost: Callable[[str], None],
    ) -> None:
        """Creates an end.

        Args:
            allowed: What the other side may send, `frames.FROM_WORKER` or `frames.FROM_MAIN`.
            deliver: Called with each frame. It may raise ChannelBroken.
            lost: Called once, with the cause or "", when the other side is gone or broke the rules.
        """
        self._parser = Parser(allowed)
        self._deliver = deliver
        self._lost = lost
        self._broken = ""
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  for the type checker: a socket's is one
        transport.set_write_buffer_limits(_HIGH, _LOW)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Delivers the frames that these bytes complete."""
        if self._broken:
            return
        try:
            self._parser.feed(data, self._deliver)
        except ChannelBroken as error:
            self._broken = str(error)
            if self._transport is not None:
                self._transport.abort()

    def pause_writing(self) -> None:
        """Lets senders wait."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Lets senders continue."""
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the owner once."""
        self._transport = None
        self._room.set()
        self._lost(self._broken)

    # ---- sending

    def send(self, kind: Kind, call: int = 0, payload: bytes = b"") -> None:
        """Sends a frame. It is dropped if the other side is gone."""
        if self._transport is None:
            return
        head = header(kind, call, len(payload))
        if len(payload) <= _JOINED:
            self._transport.write(head + payload)
        else:
            self._transport.write(head)
            self._transport.write(payload)

    async def room(self) -> None:
        """Waits until less than two megabytes wait to be sent."""
        while not self._room.is_set():
            await self._room.wait()

    def close(self) -> None:
        """Sends what waits, then closes."""
        if self._transport is not None:
            self._transport.close()


async def connect(
    end: socket.socket,
    allowed: Mapping[Kind, int],
    deliver: Callable[[Frame], None],
    lost: Callable[[str], None],
) -> Channel:
    """Puts one end of a socket pair on the running loop; see `Channel`."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        # A chunk fits in one go. The system may allow less.
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, option, 1024 * 1024)
    _, channel = await asyncio.get_running_loop().create_connection(lambda: Channel(allowed, deliver, lost), sock=end)
    return channel
