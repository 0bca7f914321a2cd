"""Holds many idle sessions in one process, each with its own connection over mutual TLS, opened with Hello.

    python -m benchmarks.operations.idle_sessions HOME ...

The members' side of a session is left out, because only the coordinator's is measured.
"""

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from edge_client.identity.connection import open_channel
from edge_client.identity.home import MemberIdentity
from tacit import __version__, wire
from tacit.messages import Hello
from tacit.protocol import PROTOCOL_VERSION
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from toolkit.logs import configure

__all__ = ["main"]

# Parallel handshakes in each process. Handshakes take long, and a queue of hundreds times out.
_DIALLING = 8


async def _session(home: Path, dialling: asyncio.Semaphore) -> None:
    hello = wire.to_coordinator(Hello(PROTOCOL_VERSION, __version__, os.urandom(16), ("nothing",)))

    async def said() -> AsyncIterator[pb.MemberMessage]:
        yield hello
        await asyncio.Event().wait()

    async with contextlib.AsyncExitStack() as stack:
        async with dialling:
            channel = await stack.enter_async_context(open_channel(MemberIdentity.load(home)))
            call = federation_pb2_grpc.FederationServiceStub(channel).Session(said())
            await call.read()
        while True:
            await call.read()


async def _all(homes: list[Path]) -> None:
    dialling = asyncio.Semaphore(_DIALLING)
    task = asyncio.ensure_future(asyncio.gather(*(_session(home, dialling) for home in homes)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> None:
    """Command line: runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations.idle_sessions", description=__doc__)
    parser.add_argument("homes", type=Path, nargs="+", help="folders of enrolled members")
    options = parser.parse_args()
    configure("json", "warning")
    asyncio.run(_all(options.homes))
    os._exit(0)


if __name__ == "__main__":
    main()
