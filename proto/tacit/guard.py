"""What a client is given of a coordinator's answers: only cleaned text, whatever was sent.

A client checks identifiers where it uses them, and may show whatever it got. Left to `tacit.wire`: the messages of a
session, which it admits as it decodes them.

Every command of an operator imports this: nothing here may cost time.
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
    """Whether the text of a method's messages (by its full path) is looked at in gRPC, and not by `tacit.wire`."""
    return method.startswith(_OURS) and method != _SESSION


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
