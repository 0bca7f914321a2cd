"""Where gRPC delivers messages of tacit.v1: no text gets past here that a terminal acts on, or that is too long.

A server refuses a request with an identifier that is none, and tells the caller which (`GuardInterceptor`). A client
gets only cleaned text (`guarded`): it checks identifiers where it uses them, and may show whatever it got.

Left to `tacit.wire`: the messages of a session, which it admits as it decodes them. Bytes that are no protobuf are
gRPC's own to report.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from tacit.fields import TextInvalid, admit, neutralise
from tacit.reason import Reason
from tacit.status import abort_with

__all__ = ["GuardInterceptor", "guarded"]

log = structlog.get_logger("tacit.guard")

_OURS, _SESSION = "/tacit.v1.", "/tacit.v1.FederationService/Session"

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)


def _wanted(method: str) -> bool:
    return method.startswith(_OURS) and method != _SESSION


# ---- at the server --------------------------------------------------------------------------------------------------


class GuardInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # its stubs alone are generic
    """Admits every request before its servicer sees it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The same method over admitted requests."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not _wanted(method):
            return handler
        return cast("grpc.RpcMethodHandler[Any, Any]", _over_admitted(handler, method))


def _over_admitted(handler: Any, method: str) -> Any:
    """A handler whose requests are admitted, and which says so of one that is not."""
    parse = handler.request_deserializer

    def parse_admitted(data: bytes) -> Any:
        message = parse(data)
        admit(message)
        return message

    async def refuse(context: Context, error: TextInvalid) -> NoReturn:
        # One line a try would let a stranger fill the disk.
        log.debug("message_refused", method=method, peer=context.peer(), detail=str(error))
        await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, str(error))

    if handler.stream_unary is not None:
        take = handler.stream_unary

        async def over_stream(requests: Any, context: Context) -> Any:
            # A request that is refused raises where the servicer reads it.
            try:
                return await take(requests, context)
            except TextInvalid as error:
                await refuse(context, error)

        return handler._replace(request_deserializer=parse_admitted, stream_unary=over_stream)
    name = "unary_unary" if handler.unary_unary is not None else "unary_stream"
    behaviour = getattr(handler, name)
    # gRPC tells the two apart by what they are: servicers yield their answers, or write them by hand.
    if inspect.isasyncgenfunction(behaviour):

        async def yielding(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                admit(request)
            except TextInvalid as error:
                await refuse(context, error)
            async with contextlib.aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return handler._replace(**{name: yielding})

    async def answering(request: Any, context: Context) -> Any:
        try:
            admit(request)
        except TextInvalid as error:
            await refuse(context, error)
        return await behaviour(request, context)

    return handler._replace(**{name: answering})


# ---- at the client --------------------------------------------------------------------------------------------------


def guarded(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """A channel whose answers hold only cleaned text. The same object otherwise: whoever closes one closes both."""
    return cast("grpc.aio.Channel", _Guarded(channel))


class _Guarded:
    """Stubs ask a channel for four kinds of calls, and hand it how answers are parsed."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found

        def over_cleaned(
            method: str, request_serializer: Any = None, response_deserializer: Any = None, **rest: Any
        ) -> Any:
            # Without a parser the caller takes bytes.
            parse = response_deserializer
            if parse is not None and _wanted(method):
                parse = _cleaned(parse)
            return found(method, request_serializer=request_serializer, response_deserializer=parse, **rest)

        return over_cleaned

    async def __aenter__(self) -> grpc.aio.Channel:
        await self._channel.__aenter__()
        return cast("grpc.aio.Channel", self)

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)


def _cleaned(parse: Callable[[bytes], M]) -> Callable[[bytes], M]:
    def parse_cleaned(data: bytes) -> M:
        message = parse(data)
        neutralise(message)
        return message

    return parse_cleaned
