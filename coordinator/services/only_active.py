"""Refuses members' and operators' calls while this coordinator is not the active one.

A standby refuses each call at once, and says which address is the active one's. The active coordinator refuses calls
once it can no longer be sure that it holds the lease, in the moment before its process ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from tacit.reason import Reason
from tacit.status import abort_with

__all__ = ["STANDBY", "OnlyActive"]

# The health service's name for a coordinator that stands by.
STANDBY = "standby"
_OURS = "/tacit.v1."


class OnlyActive(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # its stubs alone are generic
    """Lets a call of tacit.v1 through only while there is no reason to refuse it. Health checks always pass."""

    def __init__(self, refusal: Callable[[], str | None]) -> None:
        """Takes `refusal`, which returns the sentence for callers, or None while this coordinator is active."""
        self._refusal = refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the method's handler, or one of the same kind that refuses."""
        handler = await continuation(handler_call_details)
        sentence = self._refusal() if handler_call_details.method.startswith(_OURS) else None
        if handler is None or sentence is None:
            return handler
        detail = sentence

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
            await abort_with(context, Reason.REASON_COORDINATOR_STANDS_BY, detail)

        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(each for each in kinds if getattr(handler, each) is not None)
        return cast("grpc.RpcMethodHandler[Any, Any]", cast("Any", handler)._replace(**{kind: refuse}))
