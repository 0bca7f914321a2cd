"""The worker's own process, `python -m coordinator.workers`: it ends TLS and gRPC, and decides nothing.

It proves that a caller holds the key of its certificate, bounds each message, and passes calls on. It has the server's
key, which a handshake needs, and neither database, authority's key nor the coordinator's environment.

It ends when the main process does, however that ends: the kernel kills it with its parent, and it watches a pulse of
its own beside that. A main process that hangs must not look alive because its workers answer pings for it.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog

from coordinator import heap
from coordinator.descriptors import raise_limit
from coordinator.workers.channel import Channel, connect
from coordinator.workers.frames import FROM_MAIN, ChannelBroken, Frame, Kind, decoded, encoded

if TYPE_CHECKING:
    import grpc.aio

__all__ = ["PULSE_SECONDS", "Settings", "main"]

log = structlog.get_logger("coordinator.workers")

# The main process sends a byte this often. After this many seconds without one, the worker ends: as long as a lease.
BEAT_SECONDS, PULSE_SECONDS = 0.5, 5.0
# How often the worker says what it uses. The main process ends one that is silent (`supervisor`).
FIGURES_SECONDS = 1.0
# Frames of one call that wait for it. The main process sends one and waits, or ends the call.
_MAX_WAITING = 4
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """The worker's settings, which its parent passes as an argument."""

    number: int  # From 1.
    parent: int  # The main process.
    channel: int  # File descriptors: the socket pair's end, and the pulse to read.
    pulse: int
    folder: str  # The coordinator's.
    host: str
    port: int
    connections: int
    window_kib: int
    # By path: whether the member sends one message only.
    methods: Mapping[str, bool]
    log_format: str = "console"

    def to_json(self) -> str:
        """Encodes the settings as a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Decodes what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(eq=False, slots=True)
class _Call:
    """One call: the frames that it has yet to act on."""

    frames: "asyncio.Queue[Frame]" = field(default_factory=asyncio.Queue)


class _Worker:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._calls: dict[int, _Call] = {}
        self._newest = 0
        self._channel: Channel | None = None
        self._over = asyncio.Event()
        self._grace: float | None = 0.0

    async def run(self) -> None:
        """Serves until the main process says so or is gone."""
        import grpc.aio

        from coordinator.config import CoordinatorFolder
        from coordinator.services.credentials import federation_credentials, server_options

        settings = self._settings
        options = dict(server_options(connections=settings.connections, window_kib=settings.window_kib))
        # The main process keeps others from the port.
        options["grpc.so_reuseport"] = 1
        server = grpc.aio.server(options=list(options.items()))
        server.add_generic_rpc_handlers((_handlers(self, settings.methods),))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        port = server.add_secure_port(
            f"{host}:{settings.port}", federation_credentials(CoordinatorFolder(Path(settings.folder)))
        )
        end = socket.socket(fileno=settings.channel)
        self._channel = channel = await connect(end, FROM_MAIN, self._heard, self._lost)
        await server.start()
        channel.send(Kind.LISTENING, payload=encoded({"port": port, **_figures()}))
        telling = asyncio.create_task(self._tell_figures(channel))
        await self._over.wait()
        telling.cancel()
        await server.stop(self._grace)
        channel.close()

    async def _tell_figures(self, channel: Channel) -> None:
        while True:
            await asyncio.sleep(FIGURES_SECONDS)
            channel.send(Kind.FIGURES, payload=encoded(_figures()))

    def _lost(self, why: str) -> None:
        if why:
            log.error("main_broke_protocol", detail=why)
        self._over.set()

    def _heard(self, frame: Frame) -> None:
        if frame.kind is Kind.DRAIN:
            self._grace = float(decoded(frame.payload)["seconds"])
            self._over.set()
            return
        # A call that has just ended may still be told something.
        if (call := self._calls.get(frame.call)) is not None:
            if call.frames.qsize() >= _MAX_WAITING:
                raise ChannelBroken("more frames for a call than it asked for")
            call.frames.put_nowait(frame)

    @contextlib.asynccontextmanager
    async def _opened(self, method: str, context: Any) -> AsyncIterator[tuple[Channel, int, _Call]]:
        channel = self._channel
        assert channel is not None  # noqa: S101  set before the server starts
        # Of a member that opens and gives up calls while the main process is busy, gRPC reads no more than has room.
        await channel.room()
        self._newest += 1
        number, call = self._newest, _Call()
        self._calls[number] = call
        caller = {
            name: [each.decode(errors="replace") for each in context.auth_context().get(name, ())]
            for name in ("peer_uri", "x509_pem_cert")
        }
        channel.send(Kind.OPEN, number, encoded({"method": method, "peer": context.peer(), **caller}))
        try:
            yield channel, number, call
        except BaseException:
            # Cancelled: the member ended the call, its connection broke, or this worker stops.
            channel.send(Kind.GONE, number)
            raise
        finally:
            del self._calls[number]

    async def one(self, method: str, request: bytes, context: Any) -> None:
        """Serves a call with one message from the member."""
        async with self._opened(method, context) as (channel, number, call):
            channel.send(Kind.SAID, number, request)
            del request
            await self._obey(channel, number, call, context)

    async def many(self, method: str, context: Any) -> None:
        """Serves a call whose messages the main process asks for one at a time."""
        async with self._opened(method, context) as (channel, number, call):
            await self._obey(channel, number, call, context)

    async def _obey(self, channel: Channel, number: int, call: _Call, context: Any) -> None:
        import grpc

        reading: asyncio.Task[None] | None = None
        try:
            while True:
                frame = await call.frames.get()
                match frame.kind:
                    case Kind.READ:
                        if reading is not None and not reading.done():
                            raise ChannelBroken("a second READ before the first was answered")
                        # A member may be silent for hours while it is written to.
                        reading = asyncio.create_task(_read(channel, number, context))
                    case Kind.TELL | Kind.LAST:
                        last = frame.kind is Kind.LAST
                        payload = frame.payload
                        del frame
                        await context.write(payload)
                        del payload
                        if not last:
                            channel.send(Kind.WRITTEN, number)
                    case _:
                        status = decoded(frame.payload)
                        metadata = tuple((str(key), str(value)) for key, value in status["metadata"])
                        code = _CODES[status["code"]] if _CODES else _codes()[status["code"]]
                        if code is grpc.StatusCode.OK:
                            context.set_trailing_metadata(metadata)
                            return
                        await context.abort(code, status["details"], metadata)
        finally:
            if reading is not None:
                reading.cancel()


_CODES: dict[int, Any] = {}


def _codes() -> dict[int, Any]:
    import grpc

    _CODES.update({code.value[0]: code for code in grpc.StatusCode})
    return _CODES


async def _read(channel: Channel, number: int, context: Any) -> None:
    import grpc.aio

    # What members say waits with them while the main process is busy.
    await channel.room()
    try:
        message = await context.read()
    except grpc.aio.UsageError:
        # The stream was closed under the reader.
        return
    if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # its stubs do not know it
        channel.send(Kind.ALL_SAID, number)
    else:
        channel.send(Kind.SAID, number, message)


def _handlers(worker: _Worker, methods: Mapping[str, bool]) -> "grpc.GenericRpcHandler[Any, Any]":
    """Returns what serves these methods on bytes, whatever they are. gRPC refuses others."""
    import grpc

    def of(method: str, one: bool) -> Any:
        if one:

            async def serve_one(request: bytes, context: Any) -> None:
                await worker.one(method, request, context)

            return grpc.unary_stream_rpc_method_handler(cast("Callable[..., Any]", serve_one))

        async def serve_many(_: Any, context: Any) -> None:
            await worker.many(method, context)

        return grpc.stream_stream_rpc_method_handler(cast("Callable[..., Any]", serve_many))

    made = {path: of(path, one) for path, one in methods.items()}

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # its stubs alone are generic
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            return made.get(details.method)

    return Handlers()


def _figures() -> dict[str, float]:
    times = os.times()
    with Path("/proc/self/statm").open("rb") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": times.user + times.system, "resident": resident, "files": len(os.listdir("/proc/self/fd"))}


def _end_with_parent(settings: Settings) -> None:
    """Lets the kernel kill this process when its parent ends, and ends it when the parent's pulse stops."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings.parent:
        # It ended before the kernel knew.
        os._exit(1)

    def watch() -> None:
        while True:
            ready, _, _ = select.select([settings.pulse], [], [], PULSE_SECONDS)
            if not ready:
                log.error("worker_alone", seconds=PULSE_SECONDS)
                os._exit(1)
            if not os.read(settings.pulse, 4096):
                os._exit(1)

    threading.Thread(target=watch, daemon=True, name="pulse").start()


def main() -> None:
    """Runs the worker."""
    settings = Settings.from_json(sys.argv[1])
    # A terminal or a supervisor sends these signals to the parent, too, which then ends the workers in its own time.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from toolkit.logs import configure
    from toolkit.tls import tls_13_only

    configure(settings.log_format)
    structlog.contextvars.bind_contextvars(worker=settings.number)
    heap.frugal()
    _end_with_parent(settings)
    raise_limit()
    # Before gRPC is imported.
    tls_13_only()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    async def run() -> None:
        await _Worker(settings).run()

    asyncio.run(run())
