"""How many bytes a member moves at once, so that a ping waits a short time behind them.

A member with several addresses waits four seconds for the answer to a ping (`edge_client.identity.connection`). On a
slow line, the ping or its answer waits behind what the same connection, or the line itself, still has to carry. So a
large transfer goes in parts, each a call of its own, that take about `AIM` seconds. A part begins once the one before
has arrived, so no more than one part is ever under way. Lines that carry `most` bytes in that time need no parts.

A member with one address waits a minute for the answer to a ping, and moves everything at once.
"""

import time
from collections.abc import AsyncGenerator, Callable

import grpc.aio

from tacit.blobs import FetchMethod
from tacit.v1 import federation_pb2

__all__ = ["AIM", "FIRST", "MOST_DOWN", "MOST_UP", "Pace"]

# Seconds that a part may take: a ping that waits behind it has 1.5 of its 4 seconds left.
AIM = 2.5
# Bytes of a line's first part, which takes 2.6 s at 200 kbit/s; and of the smallest part.
FIRST, LEAST = 64 * 1024, 16 * 1024
# What a connection holds of a transfer that is not divided. Up: a message of 384 KiB, and the coordinator's window.
# Down: what gRPC lets the coordinator send ahead.
MOST_UP, MOST_DOWN = 512 * 1024, 4 * 1024 * 1024


class Pace:
    """The size of the next part in one direction. What one transfer learns of the line, the next one uses."""

    def __init__(self, most: int, *, divided: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts with a small part.

        Args:
            most: Bytes that need no parts if the line carries them in `AIM` seconds.
            divided: Whether to divide at all.
            clock: Seconds.
        """
        self._most = most
        self._divided = divided
        self.clock = clock
        # Bytes of the next part; None: all.
        self.part: int | None = FIRST if divided else None

    def took(self, moved: int, seconds: float) -> None:
        """Notes that a part arrived.

        Args:
            moved: Its bytes.
            seconds: From its beginning until the answer, so the line carries at least this much in this time.
        """
        if self.part is None:
            return
        fits = int(moved * AIM / max(seconds, 1e-3))
        if fits >= self._most:
            self.part = None
        elif moved >= self.part or fits > self.part:
            # A rest that is smaller says no more than that. The first bytes of a line may be quicker than the others,
            # so a part at most doubles.
            self.part = max(LEAST, min(fits, 2 * self.part))

    def broke(self) -> None:
        """Notes that the connection broke during a transfer: the part may have been too large for the line."""
        if self._divided:
            self.part = FIRST if self.part is None else max(LEAST, self.part // 4)

    def of(self, left: int) -> int:
        """Returns how many of the `left` bytes to move now."""
        return left if self.part is None else min(left, self.part)

    def fetching(self, method: FetchMethod) -> FetchMethod:
        """Returns a `FetchBlob` that asks for one part after another."""

        def fetch(request: federation_pb2.FetchBlobRequest) -> AsyncGenerator[federation_pb2.BlobChunk, None]:
            return self._parts(method, request)

        return fetch

    async def _parts(
        self, method: FetchMethod, request: federation_pb2.FetchBlobRequest
    ) -> AsyncGenerator[federation_pb2.BlobChunk, None]:
        at, left = request.offset, request.length
        while True:
            part = federation_pb2.FetchBlobRequest()
            part.CopyFrom(request)
            # 0 asks for all.
            part.offset, part.length = at, self.of(left) if left else self.part or 0
            began, arrived, total = self.clock(), 0, 0
            call = method(part)
            try:
                async for chunk in call:
                    arrived, total = arrived + len(chunk.data), chunk.total
                    yield chunk
                    # Not held while the next one is awaited.
                    del chunk
            finally:
                # The generator may be closed in the middle.
                if isinstance(call, grpc.aio.Call):
                    call.cancel()
            if not arrived:
                # Whoever reads this asked for more than there is.
                return
            self.took(arrived, self.clock() - began)
            at, left = at + arrived, max(0, left - arrived)
            if at >= total or (request.length and not left):
                return
