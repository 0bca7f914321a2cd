"""Many sessions that do nothing, of one process: each its own connection over mutual TLS, opened with Hello.

    python -m benchmarks.operations.idle_sessions HOME ...

What a member's machine does with a session is left out: it is the coordinator's side that is looked at. A key that
several members share is read and checked once.
"""

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

from cryptography.hazmat.primitives import serialization

from edge_client.identity.connection import open_channel
from edge_client.identity.home import MemberIdentity
from tacit import __version__, wire
from tacit.messages import Hello
from tacit.protocol import PROTOCOL_VERSION
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from toolkit.logs import configure

__all__ = ["keys_read_once", "main"]

# At once, of each process: handshakes are what takes the time, and a queue of hundreds of them times out.
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


@contextlib.contextmanager
def keys_read_once() -> Iterator[None]:
    """Whoever reads the same key file again meanwhile has the key of the first time: to check one takes a tenth of a
    second.
    """
    with patch.object(serialization, "load_pem_private_key", cache(serialization.load_pem_private_key)):
        yield


async def _all(homes: list[Path]) -> None:
    dialling = asyncio.Semaphore(_DIALLING)
    task = asyncio.ensure_future(asyncio.gather(*(_session(home, dialling) for home in homes)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> None:
    """Command line: runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations.idle_sessions", description=__doc__)
    parser.add_argument("homes", type=Path, nargs="+", help="members' folders, enrolled")
    options = parser.parse_args()
    configure("json", "warning")
    with keys_read_once():
        asyncio.run(_all(options.homes))
    os._exit(0)


if __name__ == "__main__":
    main()
