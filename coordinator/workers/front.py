"""The main process's side of the workers: a `grpc.aio.Server` whose connections are in other processes.

Services are added as to any server, and see the same context: who calls, what the member says, and how to answer. So
every check of a caller, and every limit, is in this process and counts over all workers. A worker's word is taken for
one thing: that the caller holds the key of the certificate which it shows.

When a worker dies, its calls end like those of a broken connection. A worker that breaks the protocol between the two
processes is ended.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from coordinator.workers.channel import Channel
from coordinator.workers.frames import ChannelBroken, Frame, Kind, decoded, encoded
from tacit.limits import MAX_FROM_COORDINATOR
from toolkit.text import MAX_STATUS

__all__ = ["Desk", "Front", "Methods"]

log = structlog.get_logger("coordinator.workers")

# A connection carries 64 calls at once. Calls whose member has just gone end here a moment later than in the worker,
# and no member may get its worker killed by opening and closing calls.
_CALLS_OF_A_CONNECTION, _ENDING = 64, 4096
_MAX_CALLS = 100_000

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # its stubs do not know it
_AbortError = grpc.aio.AbortError


class Methods:
    """The handlers of all services, and the interceptors before them."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> None:  # type: ignore[type-arg]
        self._interceptors = tuple(interceptors)
        self._handlers: dict[str, Any] = {}

    def add(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds a service's handlers, in place of earlier ones of the same methods."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def kinds(self) -> dict[str, bool]:
        """Returns by path whether the caller sends one message only."""
        return {path: self.one(path) for path in self._handlers}

    def one(self, path: str) -> bool:
        """Returns whether the callers of a method send one message only."""
        return not self._handlers[path].request_streaming

    def __contains__(self, path: str) -> bool:
        """Whether there is such a method."""
        return path in self._handlers

    async def find(self, path: str) -> Any:
        """Returns a method's handler as its interceptors leave it."""
        handlers = self._handlers

        async def bare(details: grpc.HandlerCallDetails) -> Any:
            return handlers[details.method]

        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]] = bare
        for each in reversed(self._interceptors):
            continuation = _behind(each, continuation)
        return await continuation(cast("grpc.HandlerCallDetails", _Details(path)))


@dataclass(frozen=True, slots=True)
class _Details:
    """What interceptors may know of a call."""

    method: str
    invocation_metadata: tuple[()] = ()


def _behind(interceptor: Any, continuation: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def intercepted(details: Any) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return intercepted


class _Call(grpc.aio.ServicerContext[Any, Any]):
    """One call, as its servicer sees it."""

    def __init__(self, channel: Channel, number: int, details: Mapping[str, Any], *, one: bool) -> None:
        self._channel = channel
        self._number = number
        self._method = str(details["method"])
        self._peer = str(details["peer"])
        self._auth = {name: [str(each).encode() for each in details[name]] for name in ("peer_uri", "x509_pem_cert")}
        # The only message of a call with one comes unasked.
        self._asked = one
        self._reading: asyncio.Future[bytes | None] | None = None
        self._arrived: list[bytes | None] = []
        self._writing: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()
        self._over = False
        self.parse: Callable[[bytes], Any] | None = None
        self.serialise: Callable[[Any], bytes] | None = None
        self.task: asyncio.Task[None] | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._code: Any = None
        self._details = ""

    # ---- what the worker says

    def said(self, message: bytes | None) -> None:
        """Takes a message of the member, or None if it has no further one."""
        if not self._asked:
            raise ChannelBroken("a message that was not asked for")
        self._asked = False
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(message)
        else:
            self._arrived.append(message)

    def written(self) -> None:
        """Learns that the last message was passed on."""
        if self._writing is None:
            raise ChannelBroken("WRITTEN for nothing")
        if not self._writing.done():
            self._writing.set_result(None)

    # ---- what servicers use

    async def read(self) -> Any:
        """Returns the member's next message, or EOF."""
        message = await self.read_bytes()
        if message is None:
            return _EOF
        if self.parse is None:
            return message
        try:
            return self.parse(message)
        except DecodeError:
            await self.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is not protobuf")

    async def read_bytes(self) -> bytes | None:
        """Returns the member's next message as it travelled, or None."""
        if self._over:
            raise grpc.aio.UsageError("the call is over")
        if self._arrived:
            # The answer to a read that was given up.
            return self._arrived.pop()
        if not self._asked:
            self._asked = True
            self._channel.send(Kind.READ, self._number)
        self._reading = asyncio.get_running_loop().create_future()
        try:
            return await self._reading
        except asyncio.CancelledError:
            # It may have come in the same moment.
            if self._reading.done() and not self._reading.cancelled():
                self._arrived.append(self._reading.result())
            raise
        finally:
            self._reading = None

    async def write(self, message: Any) -> None:
        """Sends the member a message, and returns once gRPC has it."""
        data = await self._bounded(message)
        async with self._turn:
            if self._writing is not None:
                # Of a write that was given up.
                await asyncio.shield(self._writing)
            await self._channel.room()
            if self._over:
                raise grpc.aio.UsageError("the call is over")
            self._writing = asyncio.get_running_loop().create_future()
            self._channel.send(Kind.TELL, self._number, data)
            del data
            await asyncio.shield(self._writing)

    async def answer(self, message: Any) -> None:
        """Sends the only answer of a call."""
        self._channel.send(Kind.LAST, self._number, await self._bounded(message))

    async def _bounded(self, message: Any) -> bytes:
        data: bytes = message if self.serialise is None else self.serialise(message)
        if (size := len(data)) > MAX_FROM_COORDINATOR:
            # The worker would end at such a frame, and with it the calls of others.
            why = f"an answer of {size} bytes is above the limit of {MAX_FROM_COORDINATOR}; report this as a bug"
            log.error("call_failed", method=self._method, error=why)
            await self.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        return data

    def end(self) -> None:
        """Ends the call with the status that was set."""
        if not self._over:
            self._over = True
            code = grpc.StatusCode.OK if self._code is None else self._code
            status = {"code": code.value[0], "details": self._details[:MAX_STATUS], "metadata": self._metadata}
            self._channel.send(Kind.END, self._number, encoded(status))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """Ends the call with a status."""
        self._code, self._details = code, details
        self._metadata = tuple((str(key), str(value)) for key, value in trailing_metadata)
        self.end()
        raise _AbortError("Locally aborted.")

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns the identity that the handshake proved."""
        return self._auth

    def peer(self) -> str:
        """Returns the caller's address as gRPC writes it."""
        return self._peer

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Sets what travels with the status."""
        self._metadata = tuple((str(key), str(value)) for key, value in trailing_metadata)

    def trailing_metadata(self) -> Any:
        """Returns what travels with the status."""
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the status."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Sets the status's sentence."""
        self._details = details

    def code(self) -> Any:
        """Returns the status, if it was set."""
        return self._code

    def details(self) -> str:
        """Returns the status's sentence."""
        return self._details

    def invocation_metadata(self) -> Any:
        """Returns nothing: no service here reads it, so workers do not pass it on."""
        return ()

    def _absent(self, *_: Any) -> Any:
        raise NotImplementedError("no service here uses this part of gRPC's context")

    abort_with_status = send_initial_metadata = set_compression = cast("Any", _absent)
    disable_next_message_compression = peer_identities = peer_identity_key = cast("Any", _absent)


class _Requests:
    """The member's messages, for servicers that iterate over them."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if (message := await self._call.read()) is _EOF:
            raise StopAsyncIteration
        return message


class Desk:
    """Serves the calls of one worker. `supervisor` feeds it with frames."""

    def __init__(self, methods: Methods, channel: Channel, worker: int, connections: int) -> None:
        """Creates it.

        Args:
            methods: What may be called.
            channel: The way to the worker.
            worker: Its number, for the log.
            connections: How many connections it may hold.
        """
        self._methods = methods
        self._channel = channel
        self._worker = worker
        self._max_calls = min(_MAX_CALLS, connections * _CALLS_OF_A_CONNECTION + _ENDING)
        self._calls: dict[int, _Call] = {}
        self._newest = 0

    def __len__(self) -> int:
        """Returns the number of open calls."""
        return len(self._calls)

    def heard(self, frame: Frame) -> None:
        """Acts on a frame about a call.

        Raises:
            ChannelBroken: the worker must not have sent it.
        """
        if frame.kind is Kind.OPEN:
            self._open(frame)
        elif (call := self._calls.get(frame.call)) is not None:
            match frame.kind:
                case Kind.SAID:
                    call.said(frame.payload)
                case Kind.ALL_SAID:
                    call.said(None)
                case Kind.WRITTEN:
                    call.written()
                case Kind.GONE if call.task is not None:
                    call.task.cancel()
                case _:
                    pass
        elif frame.call > self._newest:
            raise ChannelBroken("a frame for a call that never began")

    def _open(self, frame: Frame) -> None:
        if frame.call <= self._newest:
            raise ChannelBroken("a call's number came twice")
        if len(self._calls) >= self._max_calls:
            raise ChannelBroken("more calls than its connections carry")
        self._newest = frame.call
        details = decoded(frame.payload)
        path = details.get("method")
        if not isinstance(path, str) or path not in self._methods:
            raise ChannelBroken("a call of no method")
        try:
            call = _Call(self._channel, frame.call, details, one=self._methods.one(path))
        except (KeyError, TypeError) as error:
            raise ChannelBroken("a call without a caller") from error
        self._calls[frame.call] = call
        call.task = asyncio.create_task(self._serve(call, path))
        call.task.add_done_callback(lambda _: self._ended(frame.call, call))

    def _ended(self, number: int, call: _Call) -> None:
        # Not in the task: one that is cancelled before it begins runs nothing of its own.
        call.end()
        del self._calls[number]

    async def _serve(self, call: _Call, path: str) -> None:
        try:
            await _run(call, await self._methods.find(path))
        except _AbortError:
            pass
        except asyncio.CancelledError:
            # The member is gone, or the coordinator stops and does not wait.
            call.set_code(grpc.StatusCode.CANCELLED)
        except Exception as error:
            # As gRPC answers.
            log.error("call_failed", method=path, worker=self._worker, error=str(error), exc_info=error)
            call.set_code(grpc.StatusCode.UNKNOWN)
            call.set_details(f"Unexpected {type(error)}")

    def end_calls(self) -> list["asyncio.Task[None]"]:
        """Cancels every open call, as when its connection breaks, and returns their tasks."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        return tasks


async def _run(call: _Call, handler: Any) -> None:
    """Runs a servicer as `grpc.aio` does."""
    call.parse, call.serialise = handler.request_deserializer, handler.response_serializer
    name = next(each for each in _KINDS if getattr(handler, each) is not None)
    behaviour = getattr(handler, name)
    request = _Requests(call) if handler.request_streaming else await call.read()
    if not handler.response_streaming:
        await call.answer(await behaviour(request, call))
    elif inspect.isasyncgenfunction(behaviour):
        answers = behaviour(request, call)
        del request
        try:
            async for answer in answers:
                await call.write(answer)
                del answer
        finally:
            await answers.aclose()
    else:
        await behaviour(request, call)


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Front(grpc.aio.Server):
    """A server over all workers. `run` starts them, and `drain` ends them."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]
        run: Callable[[Methods], Awaitable[None]],
        drain: Callable[[float], Awaitable[None]],
    ) -> None:
        """Creates it.

        Args:
            interceptors: As of `grpc.aio.server`.
            run: Starts the workers, which serve these methods.
            drain: Ends the workers; open calls get that many seconds.
        """
        self.methods = Methods(interceptors)
        self._run = run
        self._drain = drain

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Takes nothing: every service here registers its methods by name, too."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Adds a service."""
        self.methods.add(service_name, method_handlers)

    async def start(self) -> None:
        """Starts the workers."""
        await self._run(self.methods)

    async def stop(self, grace: float | None = None) -> None:
        """Ends the workers."""
        await self._drain(grace or 0.0)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  gRPC's
        """Is not used."""
        raise NotImplementedError

    def add_insecure_port(self, address: str) -> int:
        """Is not used: workers bind the port."""
        raise NotImplementedError

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Is not used: workers bind the port."""
        raise NotImplementedError
