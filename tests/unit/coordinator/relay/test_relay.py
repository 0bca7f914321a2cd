"""The relay before enrolment, as a real process with a test server behind it."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from coordinator.relay import supervisor
from coordinator.relay.names import peer_of
from coordinator.relay.supervisor import RelayFailed, Supervisor, listen, socket_folder
from tests.support.processes import within_patience

# The header of a TLS handshake record, and a body.
RECORD = b"\x16\x03\x01\x00\x04body"


class Behind:
    """A relay, and a server that answers with what it receives, in capitals."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.open, self.told = 0, asyncio.Event()
        self.peers: list[str] = []

    def tell(self, open_now, counts) -> None:
        self.open = open_now
        self.counts.update(counts)
        self.told.set()

    async def until(self, holds) -> None:
        async with asyncio.timeout(30):
            while not holds():
                self.told.clear()
                await self.told.wait()

    async def _answer(self, reader, writer) -> None:
        self.peers.append(peer_of(f"unix:{writer.get_extra_info('peername')}"))
        while data := await reader.read(1024):
            writer.write(data.upper())
        writer.close()

    @contextlib.asynccontextmanager
    async def serving(self, host="127.0.0.1", *, total=8, per_network=4, **more):
        folder = socket_folder()
        server = await asyncio.start_unix_server(self._answer, folder / "backend")
        listening = await listen(host, 0)
        self.relay = Supervisor(
            listening, folder, folder / "backend", total=total, per_network=per_network, tell=self.tell, **more
        )
        self.port = self.relay.port
        await self.relay.start()
        try:
            yield self
        finally:
            await self.relay.stop()
            server.close()
            assert not folder.exists()

    @contextlib.asynccontextmanager
    async def stranger(self, source="127.0.0.1", host="127.0.0.1"):
        reader, writer = await asyncio.open_connection(host, self.port, local_addr=(source, 0))
        try:
            yield reader, writer
        finally:
            writer.close()


async def ended(reader) -> bool:
    async with asyncio.timeout(30):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def answered(stranger) -> bytes:
    reader, writer = stranger
    writer.write(RECORD)
    async with asyncio.timeout(30):
        return await reader.readexactly(len(RECORD))


def relayed(test=None, **how):
    def wrap(test):
        def run():
            async def whole():
                async with Behind().serving(**how) as behind:
                    await test(behind)

            asyncio.run(whole())

        return run

    return wrap if test is None else wrap(test)


@relayed
async def test_bytes_pass_both_ways_and_the_server_sees_the_address(behind):
    async with behind.stranger("127.0.0.9") as (reader, writer):
        port = writer.get_extra_info("sockname")[1]
        assert await answered((reader, writer)) == RECORD.upper()
        writer.write(b"more")
        assert await reader.readexactly(4) == b"MORE"
        writer.write_eof()
        assert await ended(reader)
    assert behind.peers == [f"ipv4:127.0.0.9:{port}"]
    await behind.until(lambda: behind.counts["forwarded"] == 1 and behind.open == 0)


@relayed(hello_seconds=0.3)
async def test_strangers_without_tls_or_too_slow_never_reach_the_server(behind):
    async with behind.stranger() as garbage, behind.stranger() as slow, behind.stranger() as silent:
        garbage[1].write(b"GET / HTTP/1.1\r\n\r\n")
        slow[1].write(RECORD[:7])
        for reader, _ in (garbage, slow, silent):
            assert await ended(reader)
    await behind.until(lambda: (behind.counts["not_tls"], behind.counts["hello_late"]) == (1, 2))
    assert behind.peers == []


@relayed(total=6, per_network=4)
async def test_a_network_is_capped_and_displaced_by_smaller_ones(behind):
    async with contextlib.AsyncExitStack() as stack:
        flood = [await stack.enter_async_context(behind.stranger("127.0.0.2")) for _ in range(4)]
        for each in flood:
            assert await answered(each) == RECORD.upper()
        # The relay closes it so early that connecting may already fail.
        with contextlib.suppress(ConnectionError):
            one_too_many = await stack.enter_async_context(behind.stranger("127.0.0.2"))
            assert await ended(one_too_many[0])
        others = [await stack.enter_async_context(behind.stranger(f"127.0.0.{number}")) for number in (3, 4, 5)]
        for each in others:
            assert await answered(each) == RECORD.upper()
        # The third newcomer found a full hall of six, so the oldest of the four was displaced.
        assert await ended(flood[0][0])
        await behind.until(lambda: (behind.counts["network_full"], behind.counts["displaced"]) == (1, 1))
        assert behind.open == 6


@relayed(life_seconds=0.5)
async def test_a_connection_has_a_maximum_lifetime(behind):
    async with behind.stranger() as stranger:
        assert await answered(stranger) == RECORD.upper()
        assert await ended(stranger[0])
    await behind.until(lambda: behind.counts["too_long"] == 1)


@relayed
async def test_a_stranger_that_sends_too_much_is_disconnected(behind):
    async with behind.stranger() as (reader, writer):
        writer.write(RECORD)

        async def send() -> None:
            while True:
                writer.write(bytes(64 * 1024))
                await writer.drain()

        async def take() -> None:
            while await reader.read(64 * 1024):
                pass

        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                await asyncio.gather(send(), take())
    await behind.until(lambda: behind.counts["too_much"] == 1)


@relayed(burst=1.0, rate=0.001)
async def test_handshakes_are_paced(behind):
    async with behind.stranger() as first, behind.stranger() as second:
        assert await answered(first) == RECORD.upper()
        second[1].write(RECORD)
        await behind.until(lambda: behind.open == 2)
        assert len(behind.peers) == 1


@relayed
async def test_a_killed_relay_restarts_on_the_same_port(behind):
    before = behind.relay._process.pid
    os.kill(before, signal.SIGKILL)
    # Connections wait in the port's queue meanwhile.
    async with behind.stranger() as stranger:
        assert await answered(stranger) == RECORD.upper()
    assert behind.relay._process.pid != before


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104  what is tested
def test_a_wildcard_covers_ipv4_and_ipv6(host):
    async def scenario() -> None:
        async with Behind().serving(host) as behind:
            for source, to in (("127.0.0.1", "127.0.0.1"), ("::1", "::1")):
                async with behind.stranger(source, to) as stranger:
                    assert await answered(stranger) == RECORD.upper()
            assert [peer.split(":")[0] for peer in behind.peers] == ["ipv4", "ipv6"]

    asyncio.run(scenario())


def test_the_relay_forwards_tls_unchanged():
    """OpenSSL's ClientHello passes. `test_strangers.py` tests whole handshakes."""
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    hello = context.wrap_bio(received, to_send, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    sent = to_send.read()

    async def scenario() -> None:
        async with Behind().serving() as behind, behind.stranger() as (reader, writer):
            writer.write(sent)
            async with asyncio.timeout(30):
                assert await reader.readexactly(len(sent)) == sent.upper()

    asyncio.run(scenario())


def test_the_relay_ends_with_its_killed_parent_and_frees_the_port():
    code = (
        "import asyncio, sys\n"
        "from coordinator.relay.supervisor import Supervisor, listen, socket_folder\n"
        "async def main():\n"
        "    folder, listening = socket_folder(), await listen('127.0.0.1', 0)\n"
        "    relay = Supervisor(listening, folder, folder / 'b', total=4, per_network=4, tell=print)\n"
        "    await relay.start()\n"
        "    sys.stderr.write(f'{relay.port} {relay._process.pid} {folder}\\n'); sys.stderr.flush()\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stderr is not None
        port, _, folder = parent.stderr.readline().split()
        parent.kill()
    within_patience(lambda: not os.path.exists(folder))

    async def again() -> None:
        (listening,) = await listen("127.0.0.1", int(port))
        listening.close()

    asyncio.run(again())


def test_the_relay_loads_neither_grpc_nor_keys_nor_the_database():
    code = "import sys, coordinator.relay.process; print(' '.join(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"grpc", "cryptography", "sqlalchemy", "structlog", "pydantic", "google.protobuf", "numpy"}


def test_no_secret_of_the_environment_reaches_the_relay(monkeypatch):
    monkeypatch.setenv("TACIT_AUTHORITY_PASSPHRASE", "secret")

    def environment_of(process: int) -> bytes:
        return Path(f"/proc/{process}/environ").read_bytes()

    async def scenario() -> None:
        async with Behind().serving() as behind:
            assert b"secret" not in environment_of(behind.relay._process.pid)

    if not os.path.exists("/proc/self/environ"):
        pytest.skip("this system does not show a process's environment")
    asyncio.run(scenario())


def test_a_relay_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(supervisor.sys, "executable", "/nonexistent")  # type: ignore[attr-defined]

    async def scenario() -> None:
        with pytest.raises(RelayFailed, match="did not start"):
            async with Behind().serving():
                pass

    asyncio.run(scenario())


def test_a_taken_port_is_an_error(monkeypatch):
    monkeypatch.setattr(supervisor, "_PORT_SECONDS", 0.0)

    async def scenario() -> None:
        (listening,) = await listen("127.0.0.1", 0)
        with listening, pytest.raises(OSError, match="in use"):
            await listen("127.0.0.1", listening.getsockname()[1])

    asyncio.run(scenario())
