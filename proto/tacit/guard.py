"""Cleans all text in a coordinator's answers before the client sees it, whatever was sent.

A client may show anything it receives, and checks identifiers where it uses them. `tacit.wire` handles the messages of
a session, which it admits while decoding.

Every operator command imports this module, so it must load fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.message import Message

from tacit.fields import neutralise

if TYPE_CHECKING:
    import grpc.aio

__all__ = ["guarded", "is_guarded"]

_OURS, _SESSION = "/tacit.v1.", "/tacit.v1.FederationService/Session"

M = TypeVar("M", bound=Message)


def is_guarded(method: str) -> bool:
    """Whether the text in a method's messages is checked in gRPC and not by `tacit.wire`. `method` is its full path."""
    return method.startswith(_OURS) and method != _SESSION


def guarded(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """Wraps a channel so that its answers hold only cleaned text. Closing one of the two closes both."""
    return cast("grpc.aio.Channel", _Guarded(channel))


class _Guarded:
    """Intercepts the four kinds of calls for which stubs ask a channel, and wraps the parser that they pass."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found

        def over_cleaned(
            method: str, request_serializer: Any = None, response_deserializer: Any = None, **rest: Any
        ) -> Any:
            # Without a parser, the caller gets bytes.
            parse = response_deserializer
            if parse is not None and is_guarded(method):
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
