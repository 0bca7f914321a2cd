"""A bad network: a TCP proxy on loopback between members and a coordinator, controlled by the test.

The proxy sees only TLS (a member dials `localhost` on another port), so it can do exactly what a network can do. Only
`delay` and `line` depend on time. A fault strikes after a number of bytes, or when the test says so.

    cut         resets both ends of a connection
    truncate    ends one direction for its receiver; the other direction continues
    corrupt     flips one bit
    stall       carries and reads nothing until `release`
    delay       delays every piece by a seeded random time
    line        gives each direction a rate, a delay, and a bound on the bytes in flight
    refuse      stops listening on the port
    reorder     lets the next connection through only after the one made after it
"""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from tests.support.line import Line

__all__ = ["BadNetwork", "Fault", "Way"]

T = TypeVar("T")

_PIECE = 16 * 1024
# A network card's packets: a line is shared in pieces of this size, so that a small message waits for few bytes.
_PACKET = 4 * 1024
# Seconds to wait for an answer of the proxy. A longer wait means a bug in the proxy.
_ANSWERS = 20.0
# SO_LINGER with a time of zero turns a close into a reset.
_RESET = struct.pack("ii", 1, 0)


class Way(StrEnum):
    """A direction."""

    UP = "up"  # from the member to the coordinator
    DOWN = "down"


class Fault(StrEnum):
    """A fault that strikes one connection once, after a number of bytes."""

    CUT = "cut"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    STALL = "stall"


@dataclass
class _Planned:
    """A fault that strikes after `left` more bytes in one direction, on whichever connection carries them."""

    fault: Fault
    way: Way
    left: int


@dataclass(eq=False)
class _Link:
    """Both ends of one connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter

    def sink(self, way: Way) -> asyncio.StreamWriter:
        """The end that receives bytes of this direction."""
        return self.server if way is Way.UP else self.client

    def reset(self) -> None:
        """Resets both ends at once."""
        for writer in (self.client, self.server):
            sock = writer.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class _Broken(Exception):
    """A fault struck the connection, which carries nothing more in this direction."""


class BadNetwork:
    """A network that listens on `port` until `close`, and works well until told otherwise.

    Call its methods from the test's thread.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        """Starts the proxy towards port `target` of this machine. `seed` fixes the random delays."""
        self._target = target
        self._random = random.Random(seed)
        self._links: set[_Link] = set()
        self._planned: list[_Planned] = []
        self._delay = 0.0
        self.lines: dict[Way, Line] = {}
        # Bytes carried since the start by direction, and the number of connections let through.
        self.carried = {Way.UP: 0, Way.DOWN: 0}
        self.connections = 0
        # Set when a planned fault has struck.
        self.struck = threading.Event()
        # Releases a connection that waits for the one after it; and the order in which connections were let through.
        self._held: asyncio.Event | None = None
        self._hold_next = False
        self.order: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._flowing = self._do(self._made_event())
        self._server = self._do(self._listen(0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    # ---- the test's controls ---------------------------------------------------------------------------------------

    def plan(self, fault: Fault, way: Way = Way.UP, after: int = 0) -> None:
        """Strikes once `after` more bytes have passed in this direction, counted from now over all connections. CORRUPT
        flips a bit of the next byte.
        """
        self.struck.clear()
        self._call(lambda: self._planned.append(_Planned(fault, way, after)))

    def lead_to(self, target: int) -> None:
        """Sets the port to which new connections lead."""
        self._target = target

    def cut(self) -> None:
        """Resets every open connection now."""

        def reset() -> None:
            for link in list(self._links):
                link.reset()

        self._call(reset)

    def stall(self) -> None:
        """Stops carrying bytes on all connections."""
        self._call(self._flowing.clear)

    def release(self) -> None:
        """Carries bytes again after a stall."""
        self._call(self._flowing.set)

    def delay(self, seconds: float) -> None:
        """Delays every piece by a random time up to `seconds`. 0 ends the delays."""

        def change() -> None:
            self._delay = seconds

        self._call(change)

    def line(self, rate: float, delay: float, window: int | None = None) -> None:
        """Makes connections from now on share a line, the same in both directions.

        Args:
            rate: bytes a second.
            delay: seconds from one end to the other: half of a round trip.
            window: maximum bytes in flight. None: what fills the line, and a queue of a tenth of a second and a few
                packets.
        """
        most = int(rate * (delay + 0.1)) + 4 * _PACKET if window is None else window

        def lay() -> None:
            self.lines = {way: Line(rate, delay, most) for way in Way}

        self._call(lay)

    def measure_anew(self) -> None:
        """Forgets what the lines measured."""

        def forget() -> None:
            for line in self.lines.values():
                line.measure_anew()

        self._call(forget)

    def refuse(self) -> None:
        """Stops listening. Open connections stay open."""

        async def end() -> None:
            self._server.close()

        self._do(end())

    def accept(self) -> None:
        """Listens again on the same port."""
        self._server = self._do(self._listen(self.port))

    def reorder(self) -> None:
        """Makes the next connection wait for the one after it."""

        def hold() -> None:
            self._hold_next = True

        self._call(hold)

    def close(self) -> None:
        """Cuts every connection and releases the port."""

        async def end() -> None:
            self._server.close()
            for link in list(self._links):
                link.reset()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._do(end())
        self._call(self._loop.stop)
        self._thread.join(_ANSWERS)

    def _do(self, coroutine: "Coroutine[Any, Any, T]") -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_ANSWERS)

    def _call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    # ---- the network itself ------------------------------------------------------------------------------------

    @staticmethod
    async def _made_event() -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        return event

    async def _listen(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._connected, "127.0.0.1", port, limit=_PIECE)

    async def _connected(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        await self._in_order()
        try:
            back, server = await asyncio.open_connection("127.0.0.1", self._target, limit=_PIECE)
        except OSError:
            client.transport.abort()
            return
        link = _Link(client, server)
        self._links.add(link)
        self.connections += 1
        pumps = [
            asyncio.create_task(self._pump(link, way, source)) for way, source in ((Way.UP, reader), (Way.DOWN, back))
        ]
        try:
            await asyncio.gather(*pumps)
        except (_Broken, OSError, asyncio.CancelledError):
            link.reset()
        finally:
            for pump in pumps:
                pump.cancel()
            self._links.discard(link)
            for writer in (client, server):
                writer.close()

    async def _in_order(self) -> None:
        if self._hold_next:
            self._hold_next = False
            self._held = asyncio.Event()
            await self._held.wait()
            self.order.append("the earlier")
        elif self._held is not None:
            self.order.append("the later")
            self._held.set()
            self._held = None

    async def _pump(self, link: _Link, way: Way, source: asyncio.StreamReader) -> None:
        sink = link.sink(way)
        travelling: asyncio.Queue[tuple[float, bytes]] | None = None
        arriving: asyncio.Task[None] | None = None
        if way in self.lines:
            travelling = asyncio.Queue()
            arriving = asyncio.create_task(self._arrive(way, sink, travelling))
        try:
            while data := await source.read(_PIECE if travelling is None else _PACKET):
                await self._flowing.wait()
                while data:
                    data = await self._carry(way, source, sink, data, travelling)
            if travelling is not None:
                await travelling.join()
        finally:
            if arriving is not None:
                arriving.cancel()
        if not sink.transport.is_closing():
            with suppress(OSError, RuntimeError):
                sink.write_eof()

    async def _arrive(
        self, way: Way, sink: asyncio.StreamWriter, travelling: "asyncio.Queue[tuple[float, bytes]]"
    ) -> None:
        """Hands over what has travelled its time."""
        while True:
            arrives, data = await travelling.get()
            await asyncio.sleep(arrives - self._loop.time())
            with suppress(OSError):
                await self._hand_over(way, sink, data)
            travelling.task_done()

    async def _carry(
        self,
        way: Way,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        data: bytes,
        travelling: "asyncio.Queue[tuple[float, bytes]] | None",
    ) -> bytes:
        """Carries the bytes before the next fault, and strikes. Returns the bytes that are left."""
        due = next((each for each in self._planned if each.way is way and each.left < len(data)), None)
        if due is None:
            for each in self._planned:
                each.left -= len(data) if each.way is way else 0
            await self._write(way, sink, data, travelling)
            return b""
        before, rest = data[: due.left], data[due.left :]
        self._planned.remove(due)
        await self._write(way, sink, before, travelling)
        self.struck.set()
        match due.fault:
            case Fault.CUT:
                raise _Broken
            case Fault.TRUNCATE:
                sink.write_eof()
                # Discards everything that follows until one end closes the connection.
                while await source.read(_PIECE):
                    pass
                return b""
            case Fault.CORRUPT:
                return bytes([rest[0] ^ 1]) + rest[1:]
            case Fault.STALL:
                self._flowing.clear()
                await self._flowing.wait()
                return rest

    async def _write(
        self,
        way: Way,
        sink: asyncio.StreamWriter,
        data: bytes,
        travelling: "asyncio.Queue[tuple[float, bytes]] | None",
    ) -> None:
        if self._delay:
            await asyncio.sleep(self._random.uniform(0, self._delay))
        if travelling is None:
            await self._hand_over(way, sink, data)
            return
        line = self.lines[way]
        while (room_at := line.room_at(now := self._loop.time(), len(data))) > now:  # noqa: ASYNC110  it works in time
            await asyncio.sleep(room_at - now)
        travelling.put_nowait((line.enter(now, len(data)), data))

    async def _hand_over(self, way: Way, sink: asyncio.StreamWriter, data: bytes) -> None:
        sink.write(data)
        self.carried[way] += len(data)
        await sink.drain()
