"""Admits a tacit.v1 request only with clean text and valid identifiers, before its service sees it.

`tacit.wire` admits the messages of a session as it decodes them, and gRPC reports bytes that are not protobuf. The
caller learns of a refusal, but the log does not: one line for each try would let a stranger fill the disk.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from tacit.fields import TextInvalid, admit
from tacit.guard import is_guarded
from tacit.reason import Reason
from tacit.status import abort_with

__all__ = ["GuardInterceptor"]

Context = grpc.aio.ServicerContext[Any, Any]


class GuardInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # its stubs alone are generic
    """Admits every request before its servicer sees it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the method's handler, which now sees only admitted requests."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not is_guarded(method):
            return handler
        return cast("grpc.RpcMethodHandler[Any, Any]", _over_admitted(handler))


def _over_admitted(handler: Any) -> Any:
    """Wraps a handler so that it sees only admitted requests and refuses the others."""
    parse = handler.request_deserializer

    def parse_admitted(data: bytes) -> Any:
        message = parse(data)
        admit(message)
        return message

    async def refuse(context: Context, error: TextInvalid) -> NoReturn:
        await abort_with(context, Reason.REASON_MESSAGE_MALFORMED, str(error))

    if handler.stream_unary is not None:
        take = handler.stream_unary

        async def over_stream(requests: Any, context: Context) -> Any:
            # A refused request raises where the servicer reads it.
            try:
                return await take(requests, context)
            except TextInvalid as error:
                await refuse(context, error)

        return handler._replace(request_deserializer=parse_admitted, stream_unary=over_stream)
    name = "unary_unary" if handler.unary_unary is not None else "unary_stream"
    behaviour = getattr(handler, name)
    # Servicers either yield their answers or write them themselves, and gRPC inspects the function to tell which.
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
