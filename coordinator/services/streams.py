"""Reads the first message of a member's stream within a deadline."""

import asyncio
import contextlib
from typing import Any

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs do not know it

__all__ = ["EOF", "Context", "first_message"]

Context = grpc.aio.ServicerContext[Any, Any]


async def first_message(context: Context, seconds: float) -> Any:
    """Returns a stream's first message, or EOF if it does not arrive within `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await context.read()
    return EOF
