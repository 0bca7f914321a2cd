"""Streams of members' calls: the first message of one, in time."""

import asyncio
import contextlib
from typing import Any

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs do not know it

__all__ = ["EOF", "Context", "first_message"]

Context = grpc.aio.ServicerContext[Any, Any]


async def first_message(context: Context, seconds: float) -> Any:
    """A stream's first message; EOF where it does not come within `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await context.read()
    return EOF
