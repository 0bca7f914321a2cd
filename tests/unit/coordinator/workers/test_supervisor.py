"""Workers as real processes, with a small service behind them."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
import structlog.testing

from coordinator.config import CoordinatorFolder, load_operator
from coordinator.metrics import Metrics
from coordinator.services.streams import EOF
from coordinator.workers.front import Front
from coordinator.workers.supervisor import Workers, WorkersFailed, reserve
from tests.support.places import ROOT
from tests.support.processes import PATIENCE, succeed, within_patience

COUNT = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("workers") / "federation"
    succeed("coordinator", "init", path, "--listen-host=127.0.0.1")
    return path


def on_a_loop(test):
    """Runs a test on a loop of its own."""

    @functools.wraps(test)
    def run(*args, **named):
        asyncio.run(test(*args, **named))

    return run


class Behind:
    """Workers, and a service that says which worker's address called and repeats what it hears."""

    def __init__(self, folder, **more):
        self.folder = folder
        self.metrics = Metrics()
        self.pids = {}
        self.started = asyncio.Event()
        self.ended = 0
        self._more = {"connections": 64, **more}

    async def echo(self, _, context):
        try:
            while (message := await context.read()) is not EOF:
                await context.write(message)
        finally:
            self.ended += 1

    async def shown(self, request, context):
        return b"".join(context.auth_context()["peer_uri"])

    def _spawned(self, number, pid):
        self.pids[number] = pid
        self.started.set()

    async def __aenter__(self):
        held = await reserve("127.0.0.1", 0)
        workers = Workers(
            self.folder,
            held,
            host="127.0.0.1",
            count=COUNT,
            window_kib=64,
            metrics=self.metrics,
            log_format="json",
            spawned=self._spawned,
            **self._more,
        )
        self.port = workers.port
        self.server = Front((), workers.run, workers.drain)
        handlers = {
            "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
            "Shown": grpc.unary_unary_rpc_method_handler(self.shown),
        }
        self.server.add_registered_method_handlers("x", handlers)
        await self.server.start()
        return self

    async def __aexit__(self, *_):
        await self.server.stop(0.5)

    @contextlib.asynccontextmanager
    async def channel(self):
        identity = load_operator(self.folder / "operator")
        credentials = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
        # Each channel has a connection of its own.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "localhost")]
        async with grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials, options) as channel:
            yield channel

    async def until(self, holds):
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, "the expected state was never reached"
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def streams(self, count):
        """Open echoing calls, each over its own connection."""
        async with contextlib.AsyncExitStack() as stack:
            made = []
            for _ in range(count):
                channel = await stack.enter_async_context(self.channel())
                call = channel.stream_stream("/x/Echo")(wait_for_ready=True)
                await call.write(b"hello")
                assert await call.read() == b"hello"
                made.append(call)
            yield made

    def calls(self):
        return [self.metrics.value("worker_calls", worker=str(number)) for number in self.pids]


@on_a_loop
async def test_the_main_process_learns_who_calls_and_figures_add_up(folder):
    async with Behind(folder) as behind:
        async with behind.channel() as channel:
            shown = await channel.unary_unary("/x/Shown")(b"", wait_for_ready=True)
            assert shown.startswith(b"tacit://")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/x/Absent")(b"")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with behind.streams(12):
            await behind.until(lambda: sum(behind.calls()) == 12)
            # With one connection each, twelve on one side of two has a chance of 1 in 2048.
            assert all(count > 0 for count in behind.calls())
        await behind.until(lambda: sum(behind.calls()) == 0)
        assert behind.metrics.value("workers") == COUNT
        for number in behind.pids:
            assert behind.metrics.value("worker_resident_bytes", worker=str(number)) > 1e6
            assert behind.metrics.value("worker_cpu_seconds_total", worker=str(number)) > 0
    assert behind.metrics.value("workers") == 0


@on_a_loop
async def test_a_message_above_the_members_limit_ends_in_the_worker(folder):
    from tacit.limits import MAX_FROM_MEMBER

    async with Behind(folder) as behind, behind.channel() as channel:
        call = channel.stream_stream("/x/Echo")(wait_for_ready=True)
        await call.write(bytes(MAX_FROM_MEMBER))
        assert len(await call.read()) == MAX_FROM_MEMBER
        call = channel.stream_stream("/x/Echo")(wait_for_ready=True)
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await call.write(bytes(MAX_FROM_MEMBER + 1))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Both workers still serve.
        assert behind.metrics.value("workers") == COUNT


@on_a_loop
async def test_the_cap_holds_for_all_workers_together(folder):
    async with Behind(folder, connections=8) as behind:
        began = time.monotonic()
        found = [socket.create_connection(("127.0.0.1", behind.port)) for _ in range(48)]
        for each in found:
            each.setblocking(False)

        def closed():
            gone = 0
            for each in found:
                with contextlib.suppress(BlockingIOError):
                    try:
                        gone += not each.recv(1, socket.MSG_PEEK)
                    except ConnectionError:
                        gone += 1
            return gone

        await behind.until(lambda: closed() >= 40)
        # Without a handshake the others end after 20 seconds.
        assert time.monotonic() - began < 15
        assert closed() == 40
        for each in found:
            each.close()


@on_a_loop
async def test_a_killed_worker_costs_its_connections_and_returns(folder):
    async with Behind(folder) as behind, behind.streams(12) as calls:
        first = dict(behind.pids)
        await behind.until(lambda: all(count > 0 for count in behind.calls()) and sum(behind.calls()) == 12)
        with_first = behind.metrics.value("worker_calls", worker="1")
        behind.started.clear()
        os.kill(first[1], signal.SIGKILL)
        # Its calls end in the main process, and no other.
        await behind.until(lambda: behind.ended == with_first)
        async with asyncio.timeout(PATIENCE):
            await behind.started.wait()
        assert behind.pids[1] != first[1]
        assert behind.pids[2] == first[2]
        assert behind.metrics.value("worker_starts_total", worker="1") == 2
        assert behind.metrics.value("worker_starts_total", worker="2") == 1
        # The others did not notice, and newcomers are served.
        alive = 0
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(b"again")
                alive += await call.read() == b"again"
        assert alive == 12 - with_first
        async with behind.streams(4):
            pass


@on_a_loop
async def test_a_worker_that_hangs_is_killed(folder):
    async with Behind(folder, silent_seconds=3) as behind:
        first = behind.pids[2]
        behind.started.clear()
        os.kill(first, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            await behind.started.wait()
        assert behind.pids[2] != first
        assert not psutil.pid_exists(first)


@on_a_loop
async def test_calls_that_are_given_up_while_the_main_process_is_busy_wait_with_their_member(folder):
    async with Behind(folder) as behind:

        async def flood():
            message = os.urandom(1024 * 1024)
            async with behind.channel() as channel:
                await channel.channel_ready()
                for _ in range(25):
                    calls = [channel.unary_unary("/x/Shown")(message) for _ in range(16)]
                    # What a member sends in this time has arrived in a worker, or waits on the line.
                    await asyncio.sleep(0.15)
                    for call in calls:
                        call.cancel()

        def resident():
            return max(psutil.Process(pid).memory_info().rss for pid in behind.pids.values())

        flooding = threading.Thread(target=lambda: asyncio.run(flood()))
        before = most = resident()
        flooding.start()
        while flooding.is_alive():
            # The event loop stands still.
            flooding.join(0.2)
            most = max(most, resident())
        assert most - before < 150 * 1024 * 1024


@on_a_loop
async def test_a_worker_that_takes_long_to_start_is_not_taken_for_silent(folder, monkeypatch):
    start = asyncio.create_subprocess_exec

    async def slowly(program, *words, **more):
        code = "import runpy, time; time.sleep(4); runpy.run_module('coordinator.workers', run_name='__main__')"
        return await start(program, "-P", "-c", code, words[-1], **more)

    async with Behind(folder, silent_seconds=2) as behind:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
        behind.started.clear()
        os.kill(behind.pids[1], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            await behind.started.wait()
        # At the first try.
        assert behind.metrics.value("worker_starts_total", worker="1") == 2
        monkeypatch.undo()


@on_a_loop
async def test_a_worker_that_died_before_a_stop_does_not_start_during_it(folder):
    async with Behind(folder) as behind, behind.streams(8) as calls:
        await behind.until(lambda: all(count > 0 for count in behind.calls()))
        behind.started.clear()
        lost = behind.metrics.value("worker_calls", worker="1")
        os.kill(behind.pids[1], signal.SIGKILL)
        await behind.until(lambda: behind.metrics.value("workers") == COUNT - 1)
        # The pause before its next start has begun; open calls of the other keep the stop from its end.
        stopping = asyncio.create_task(behind.server.stop(6.0))
        await asyncio.wait({stopping}, timeout=5.0)
        assert 0 < lost < len(calls)
        assert not stopping.done()
        assert not behind.started.is_set()
        await stopping


@on_a_loop
async def test_workers_that_start_no_more_are_counted_and_end_the_coordinator(folder):
    key = CoordinatorFolder(folder).server_key
    good, failures = key.read_bytes(), []
    async with Behind(folder, absent_seconds=3, failed=failures.append) as behind:
        try:
            key.write_bytes(b"no key")
            os.kill(behind.pids[1], signal.SIGKILL)
            await behind.until(lambda: behind.metrics.value("worker_starts_total", worker="1") >= 3)
            # The other still serves.
            assert failures == []
            os.kill(behind.pids[2], signal.SIGKILL)
            await behind.until(lambda: failures)
            assert "no worker has accepted connections for 3 seconds" in str(failures[0])
            assert isinstance(failures[0], WorkersFailed)
            assert behind.metrics.value("workers") == 0
        finally:
            key.write_bytes(good)


@on_a_loop
async def test_a_new_certificate_is_shown_without_a_restart(folder):
    """Workers read the server's files at each handshake, as one process does."""
    import ssl

    def shown(port):
        context = ssl.create_default_context(cafile=str(folder / "authority" / "root.pem"))
        context.check_hostname = False
        context.load_cert_chain(folder / "operator" / "cert.pem", folder / "operator" / "key.pem")
        with (
            socket.create_connection(("127.0.0.1", port)) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as wrapped,
        ):
            return wrapped.getpeercert(binary_form=True)

    async with Behind(folder) as behind:
        before = await asyncio.to_thread(shown, behind.port)
        for name in ("key.pem", "cert.pem"):
            os.unlink(folder / "server" / name)
        from datetime import UTC, datetime

        from coordinator.authority import load_authorities
        from coordinator.config import CoordinatorFolder, load_config
        from coordinator.services.credentials import refresh_server_certificate

        book = load_authorities(CoordinatorFolder(folder), now=datetime.now(UTC), passphrase=None)
        assert refresh_server_certificate(
            CoordinatorFolder(folder), load_config(folder), book.serving, datetime.now(UTC)
        )
        after = {await asyncio.to_thread(shown, behind.port) for _ in range(12)}
        assert len(after) == 1
        assert after != {before}


@on_a_loop
async def test_open_calls_get_time_at_a_stop_and_no_process_stays(folder):
    behind = Behind(folder)
    async with behind:
        async with behind.channel() as channel:
            call = channel.stream_stream("/x/Echo")(wait_for_ready=True)
            await call.write(b"a")
            assert await call.read() == b"a"
            stopping = asyncio.create_task(behind.server.stop(60.0))
            await asyncio.sleep(0)
            await call.write(b"b")
            assert await call.read() == b"b"
            await call.done_writing()
            assert await call.read() == EOF
            assert await call.code() is grpc.StatusCode.OK
            await stopping
        assert not any(psutil.pid_exists(pid) for pid in behind.pids.values())


PARENT = """
import asyncio, sys
from pathlib import Path
from coordinator.metrics import Metrics
from coordinator.services.streams import EOF
from coordinator.workers.front import Front
from coordinator.workers.supervisor import Workers, reserve

async def main():
    held = await reserve("127.0.0.1", 0)
    workers = Workers(Path(sys.argv[1]), held, host="127.0.0.1", count=2, connections=8, window_kib=64,
                      metrics=Metrics(), spawned=lambda _, pid: print(pid, flush=True))
    server = Front((), workers.run, workers.drain)
    await server.start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def parent(folder):
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        pids = []
        for line in process.stdout:
            # Its log is between them.
            if line.strip() == "ready":
                break
            if line.strip().isdigit():
                pids.append(int(line))
        assert len(pids) == 2
        yield process, pids
    finally:
        process.kill()
        process.wait()
    within_patience(lambda: not any(map(_runs, pids)))


@on_a_loop
async def test_the_exit_status_is_told_though_the_broken_channel_comes_first(folder, monkeypatch):
    """On a busy machine the channel's end is read before anybody has asked for the status."""
    if hasattr(asyncio, "PidfdChildWatcher"):
        # It asks on the loop, and so not before the test lets it.
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        monkeypatch.setattr(type(asyncio.get_event_loop_policy()), "get_child_watcher", lambda _: watcher)
    async with Behind(folder) as behind:
        pid = behind.pids[1]
        with structlog.testing.capture_logs() as lines:
            os.kill(pid, signal.SIGKILL)
            within_patience(lambda: not _runs(pid))
            workers = behind.server._run.__self__
            workers._end(workers._workers[0])
            await behind.until(lambda: any(line["event"] == "worker_ended" for line in lines))
    assert [line["status"] for line in lines if line["event"] == "worker_ended"] == [-signal.SIGKILL]


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_end_with_a_killed_main_process(parent):
    process, pids = parent
    assert all(map(_runs, pids))
    process.kill()
    process.wait()
    within_patience(lambda: not any(map(_runs, pids)))


def test_workers_end_when_the_main_process_hangs(parent):
    """Otherwise they would answer pings for it, and members would not look for another coordinator."""
    process, pids = parent
    process.send_signal(signal.SIGSTOP)
    within_patience(lambda: not any(map(_runs, pids)))
    process.send_signal(signal.SIGCONT)


def test_a_worker_has_nothing_of_the_environment_but_what_it_needs(folder, monkeypatch):
    monkeypatch.setenv("TACIT_DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("TACIT_AUTHORITY_PASSPHRASE", "secret")

    def environment(pid):
        return Path(f"/proc/{pid}/environ").read_bytes()

    async def environments():
        async with Behind(folder) as behind:
            return [environment(pid) for pid in behind.pids.values()]

    for found in asyncio.run(environments()):
        assert b"PATH=" in found
        assert b"secret" not in found


def test_nobody_else_can_reach_the_channel(folder):
    """The socket pair has no name, nobody listens on a Unix socket, and neither relay nor sibling inherits an end."""

    def unix_sockets():
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        # Inode to (flags, name).
        return {row[6]: (row[3], row[7] if len(row) > 7 else "") for row in rows}

    def held(pid):
        names = []
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                names.append(os.readlink(each))
        return {name[8:-1] for name in names if name.startswith("socket:[")}

    async def look():
        async with Behind(folder) as behind:
            known = unix_sockets()
            return [{inode: known[inode] for inode in held(pid) if inode in known} for pid in behind.pids.values()]

    found = asyncio.run(look())
    assert all(len(each) >= 1 for each in found)
    for flags, name in (entry for each in found for entry in each.values()):
        # SO_ACCEPTCON: it listens.
        assert int(flags, 16) & 0x10000 == 0
        assert name == ""
    # Each has its own end alone.
    assert not set(found[0]) & set(found[1])


def test_a_port_that_another_program_has_is_refused(folder):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        asyncio.run(reserve("127.0.0.1", other.getsockname()[1]))


@on_a_loop
async def test_a_second_coordinator_cannot_share_the_port_of_workers(folder):
    async with Behind(folder) as behind:
        with pytest.raises(OSError, match="in use"):
            await reserve("127.0.0.1", behind.port)


def test_a_worker_that_cannot_start_is_a_sentence(folder, tmp_path):
    async def start():
        held = await reserve("127.0.0.1", 0)
        # No server's key is in this folder.
        workers = Workers(tmp_path, held, host="127.0.0.1", count=1, connections=8, window_kib=64, metrics=Metrics())
        await Front((), workers.run, workers.drain).start()

    with pytest.raises(WorkersFailed, match="worker 1 did not start"):
        asyncio.run(start())
