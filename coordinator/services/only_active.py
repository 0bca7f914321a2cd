"""Refuses members' and operators' calls while this coordinator is not the active one.

A standby refuses each call at once, and says which address is the active one's. Only while nobody knows whether there
is an active one does it let members wait for their session (`WaitingRoom`). The active coordinator refuses calls once
it can no longer be sure that it holds the lease, in the moment before its process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from tacit.reason import Reason
from tacit.status import abort_with

__all__ = ["STANDBY", "OnlyActive", "WaitingRoom"]

# The health service's name for a coordinator that stands by.
STANDBY = "standby"
_OURS = "/tacit.v1."
_SESSION = "/tacit.v1.FederationService/Session"
# How many members wait at a standby, and for how long. A further one is refused at once, and pauses.
_MAX_WAITING, _MAX_WAIT_SECONDS = 512, 15.0


class WaitingRoom:
    """Where members wait at a standby until it is clear which coordinator is active. Used from one event loop.

    Without it, they would dial again and again, and some would be in a pause, or dial a machine that hangs, when this
    coordinator begins to serve.
    """

    def __init__(self) -> None:
        """Starts closed: nobody waits."""
        self._clear = asyncio.Event()
        self._clear.set()
        self._waiting = 0

    def open(self) -> None:
        """Lets members wait from now on."""
        self._clear.clear()

    def close(self) -> None:
        """Lets all that wait go on, and nobody wait any more."""
        self._clear.set()

    async def wait(self) -> None:
        """Waits while the room is open, for a bounded time, unless it is full."""
        if self._waiting >= _MAX_WAITING:
            return
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MAX_WAIT_SECONDS):
                    await self._clear.wait()
        finally:
            self._waiting -= 1


class OnlyActive(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # its stubs alone are generic
    """Lets a call of tacit.v1 through only while there is no reason to refuse it. Health checks always pass."""

    def __init__(self, refusal: Callable[[], str | None], room: WaitingRoom | None = None) -> None:
        """Takes `refusal`, which returns the sentence for callers, or None while this coordinator is active.

        `room`: where members who want a session wait before they are refused.
        """
        self._refusal = refusal
        self._room = room

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the method's handler, or one of the same kind that refuses."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        sentence = self._refusal() if method.startswith(_OURS) else None
        if handler is None or sentence is None:
            return handler
        before = sentence

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
            if self._room is not None and method == _SESSION:
                await self._room.wait()
            # What is said now may be newer.
            await abort_with(context, Reason.REASON_COORDINATOR_STANDS_BY, self._refusal() or before)

        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(each for each in kinds if getattr(handler, each) is not None)
        return cast("grpc.RpcMethodHandler[Any, Any]", cast("Any", handler)._replace(**{kind: refuse}))
