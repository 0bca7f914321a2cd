"""The relay's own process, `python -m coordinator.relay`. Beyond this project it needs only the standard library.

The life of a connection:

1. If `Hall` is full, it is refused before a byte of it is read.
2. It must send one complete TLS handshake record within `HELLO_SECONDS`.
3. It waits for its turn.
4. Only then the relay dials the enrolment server.
5. It ends after `LIFE_SECONDS`, or after `MAX_BYTES` from the stranger.

The relay writes its counts to standard output, one JSON object per line, for its parent. It ends when its standard
input does. The parent holds the other end, so the relay also ends if its parent is killed.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.buckets import Allowance
from coordinator.descriptors import raise_limit
from coordinator.relay.admission import Admitted, Hall, Turnstile
from coordinator.relay.names import network_of, socket_name

__all__ = ["BACKLOG", "HELLO_SECONDS", "LIFE_SECONDS", "MAX_BYTES", "Settings", "main"]

HELLO_SECONDS = 10.0
# gRPC ends such a connection after two minutes and half a minute of grace.
LIFE_SECONDS = 150.0
# From one stranger. A request to enrol has a few kilobytes.
MAX_BYTES = 1024 * 1024
BACKLOG = 1024

_ACCEPTED_AT_ONCE = 64
_BUFFER = 16 * 1024
_TELL_SECONDS = 1.0
# RFC 8446, 5.1: a handshake record of any version under which a ClientHello is sent, of at most 2^14 bytes.
_HANDSHAKE, _MAJOR, _MAX_RECORD = 0x16, 0x03, 2**14


@dataclass(frozen=True, slots=True)
class Settings:
    """The relay's settings, which its parent passes as an argument."""

    listening: tuple[int, ...]  # File descriptors of the enrolment port.
    folder: str  # The folder of the Unix sockets; removed at the end.
    backend: str  # The enrolment server's socket.
    total: int
    per_network: int
    burst: float
    rate: float
    hello_seconds: float = HELLO_SECONDS
    life_seconds: float = LIFE_SECONDS

    def to_json(self) -> str:
        """Encodes the settings as a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Decodes what `to_json` wrote."""
        found = json.loads(text)
        return cls(**{**found, "listening": tuple(found["listening"])})


class _Unwanted(Exception):
    """A connection must end, with this outcome."""


@dataclass(eq=False, slots=True)
class _Visit:
    """One connection of a stranger."""

    number: int
    network: str
    host: str
    port: int
    task: "asyncio.Task[None] | None" = None
    turn: "asyncio.Future[None] | None" = None


class _Relay:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hall: Hall[_Visit] = Hall(settings.total, settings.per_network)
        self._turnstile: Turnstile[_Visit] = Turnstile(time.monotonic, Allowance(settings.burst, settings.rate))
        self._joined = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._told = (0, 0)
        self._visits = 0
        self._loop = asyncio.get_running_loop()

    async def run(self, files: int) -> None:
        """Relays until standard input ends. `files` is the limit of open files, for the parent's log."""
        ended = asyncio.Event()

        def hear() -> None:
            if not os.read(0, 4096):
                ended.set()

        self._loop.add_reader(0, hear)
        for descriptor in self._settings.listening:
            listening = socket.socket(fileno=descriptor)
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)
        beside = [asyncio.create_task(self._give_turns()), asyncio.create_task(self._keep_telling())]
        os.set_blocking(1, False)
        self._tell({"ready": files})
        await ended.wait()
        for task in beside:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                # No file descriptor is free, which the parent's limits should exclude. Pause, so that the ready socket
                # does not spin meanwhile.
                self._counts["no_files"] += 1
                self._loop.remove_reader(listening)
                self._loop.call_later(0.1, self._loop.add_reader, listening, self._accept, listening)
                return
            self._visits += 1
            visit = _Visit(self._visits, network_of(address[0]), address[0], address[1])
            verdict = self._hall.admit(visit.network, visit)
            if not isinstance(verdict, Admitted):
                self._counts[verdict] += 1
                _slam(connection)
                continue
            if verdict.displaced is not None:
                self._counts["displaced"] += 1
                if verdict.displaced.task is not None:
                    verdict.displaced.task.cancel()
            visit.task = asyncio.create_task(self._serve(visit, connection))

    async def _serve(self, visit: _Visit, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self._settings.life_seconds):
                first = await self._first_record(connection)
                await self._wait_for_turn(visit)
                with await self._dial(visit) as server:
                    self._counts["forwarded"] += 1
                    await _copy_both_ways(connection, server, first)
        except _Unwanted as outcome:
            self._counts[str(outcome)] += 1
        except TimeoutError:
            self._counts["too_long"] += 1
        except OSError:
            # One of the two sides is gone.
            pass
        finally:
            self._turnstile.leave(visit.network, visit)
            self._hall.leave(visit.network, visit)
            _slam(connection)

    async def _first_record(self, connection: socket.socket) -> bytes:
        """Reads the complete first TLS record, so that the enrolment server never waits for it."""
        read = b""
        try:
            async with asyncio.timeout(self._settings.hello_seconds):
                read = await self._exactly(connection, read, 5)
                size = int.from_bytes(read[3:5])
                if read[0] != _HANDSHAKE or read[1] != _MAJOR or not 0 < size <= _MAX_RECORD:
                    raise _Unwanted("not_tls")
                return await self._exactly(connection, read, 5 + size)
        except TimeoutError:
            raise _Unwanted("hello_late") from None

    async def _exactly(self, connection: socket.socket, read: bytes, size: int) -> bytes:
        while len(read) < size:
            more = await self._loop.sock_recv(connection, size - len(read))
            if not more:
                raise _Unwanted("gone")
            read += more
        return read

    async def _wait_for_turn(self, visit: _Visit) -> None:
        visit.turn = self._loop.create_future()
        self._turnstile.join(visit.network, visit)
        self._joined.set()
        await visit.turn

    async def _give_turns(self) -> None:
        while True:
            self._joined.clear()
            visit, seconds = self._turnstile.next()
            if visit is not None:
                if visit.turn is not None and not visit.turn.done():
                    visit.turn.set_result(None)
            elif seconds <= _TELL_SECONDS:
                await asyncio.sleep(seconds)
            else:
                await self._joined.wait()

    async def _dial(self, visit: _Visit) -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        name = Path(self._settings.folder) / socket_name(visit.number, visit.host, visit.port)
        try:
            server.setblocking(False)
            server.bind(str(name))
            try:
                server.connect(self._settings.backend)
            finally:
                # The server's end still knows the name.
                name.unlink()
        except BaseException:
            server.close()
            raise
        return server

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(_TELL_SECONDS)
            held = (len(self._hall), self._hall.networks)
            if not self._counts and held == self._told:
                continue
            if self._tell({"open": held[0], "networks": held[1], "counts": dict(self._counts)}):
                self._counts.clear()
                self._told = held

    @staticmethod
    def _tell(told: Mapping[str, object]) -> bool:
        """Writes a line to the parent's pipe. Returns whether it was written; a line this short is never split."""
        with contextlib.suppress(OSError):
            return os.write(1, json.dumps(told).encode() + b"\n") > 0
        return False


async def _copy_both_ways(stranger: socket.socket, server: socket.socket, first: bytes) -> None:
    """Copies until the server ends the connection, or either side breaks it."""
    loop = asyncio.get_running_loop()

    async def inwards() -> None:
        data, left = first, MAX_BYTES
        while data:
            left -= len(data)
            if left < 0:
                raise _Unwanted("too_much")
            await loop.sock_sendall(server, data)
            data = await loop.sock_recv(stranger, _BUFFER)
        server.shutdown(socket.SHUT_WR)

    async def outwards() -> None:
        while data := await loop.sock_recv(server, _BUFFER):
            await loop.sock_sendall(stranger, data)

    tasks = {asyncio.create_task(inwards()), (down := asyncio.create_task(outwards()))}
    try:
        while not down.done():
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            tasks -= done
    finally:
        for task in (*tasks, down):
            task.cancel()
        await asyncio.gather(*tasks, down, return_exceptions=True)


def _slam(connection: socket.socket) -> None:
    """Resets a connection, so that nothing of it stays in the kernel."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def main() -> None:
    """Runs the relay."""
    settings = Settings.from_json(sys.argv[1])
    # A terminal or a supervisor sends these signals to the parent, too, which then ends the relay.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    files = raise_limit().soft

    async def run() -> None:
        await _Relay(settings).run(files)

    asyncio.run(run())
    shutil.rmtree(settings.folder, ignore_errors=True)
