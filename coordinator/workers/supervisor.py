"""Starts the workers, restarts one that dies or hangs, and ends them.

All workers listen on one port, and the kernel gives each new connection to one of them (SO_REUSEPORT). The main process
holds the port without listening on it, so that it stays taken while a worker restarts.

A worker that dies costs its connections: members come back through another worker, as after any broken connection. A
worker that says nothing for `SILENT_SECONDS` is killed. If none listens for a minute, the coordinator ends, so that its
supervisor or another coordinator can do better. What a worker uses of the machine reaches the metrics.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from coordinator.metrics import Metrics
from coordinator.relay.supervisor import bare_environment, listen
from coordinator.workers.channel import Channel, connect
from coordinator.workers.frames import FROM_WORKER, ChannelBroken, Frame, Kind, decoded, encoded
from coordinator.workers.front import Desk, Methods
from coordinator.workers.process import BEAT_SECONDS, Settings

__all__ = ["ABSENT_SECONDS", "SILENT_SECONDS", "Workers", "WorkersFailed", "reserve"]

log = structlog.get_logger("coordinator.workers")

# A worker tells its figures every second.
SILENT_SECONDS = 20
_START_SECONDS, _STOP_SECONDS = 60.0, 5.0
# For so long a coordinator may be active without a port.
ABSENT_SECONDS = 60
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
# A worker that served for this long starts again at once when it dies.
_GOOD_SECONDS = 60.0


class WorkersFailed(RuntimeError):
    """The workers did not start, start no more, or cannot work on this system."""


async def reserve(host: str, port: int) -> list[socket.socket]:
    """Takes a port for workers, and returns sockets that hold it without listening.

    Args:
        host: As of `coordinator.relay.supervisor.listen`.
        port: The port; 0 takes any free one.

    Raises:
        WorkersFailed: this system cannot share a port between processes.
        OSError: another program listens there, or the address is not this machine's.
    """
    if not sys.platform.startswith("linux"):
        raise WorkersFailed("several workers share a port as only Linux lets them; set workers = 1")
    # Alone first: a coordinator with workers would share its port with any other of the same user.
    listening = await listen(host, port)
    places = [(each.family, each.getsockname()) for each in listening]
    for each in listening:
        each.close()
    held: list[socket.socket] = []
    try:
        for family, place in places:
            held.append(one := socket.socket(family, socket.SOCK_STREAM))
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                one.setsockopt(socket.SOL_SOCKET, option, 1)
            if family == socket.AF_INET6:
                # As it was: with IPv4 on the wildcard alone.
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(place[0] != "::"))
            one.bind(place)
    except OSError:
        for each in held:
            each.close()
        raise
    return held


@dataclass(eq=False)
class _Worker:
    """One place for a worker, and the process that has it now."""

    number: int
    process: asyncio.subprocess.Process | None = None
    # A file descriptor of the process, or -1.
    handle: int = -1
    channel: Channel | None = None
    desk: Desk | None = None
    # The writing end; -1 while there is none.
    pulse: int = -1
    heard: bool = False
    listening: "asyncio.Future[None] | None" = None
    # Processor seconds that were told of the present process.
    cpu: float = 0.0
    watching: "asyncio.Task[None] | None" = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def listens(self) -> bool:
        """Whether it has said that it accepts connections, and is not gone."""
        said = self.listening
        if said is None or not said.done() or said.cancelled() or self.gone.is_set():
            return False
        return said.exception() is None

    async def ended(self, process: asyncio.subprocess.Process) -> int:
        """Waits for the end of the present process, and returns its exit status."""
        status = await process.wait()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
        return status


class Workers:
    """The workers of one coordinator. Used from one event loop."""

    def __init__(
        self,
        folder: Path,
        held: list[socket.socket],
        *,
        host: str,
        count: int,
        connections: int,
        window_kib: int,
        metrics: Metrics,
        log_format: str = "console",
        spawned: Callable[[int, int], None] = lambda _, __: None,
        silent_seconds: int = SILENT_SECONDS,
        absent_seconds: int = ABSENT_SECONDS,
        failed: Callable[[WorkersFailed], None] = lambda _: None,
    ) -> None:
        """Prepares them; `run` starts them.

        Args:
            folder: The coordinator's folder, where workers read the server's key and the authorities.
            held: The sockets of `reserve`; `drain` closes them.
            host: Where to listen.
            count: How many workers.
            connections: Maximum number of connections of all workers together.
            window_kib: See `coordinator.services.credentials.server_options`.
            metrics: Where workers are counted.
            log_format: Of the workers' own lines.
            spawned: Called with the number and the process id of each worker that accepts connections; for tests.
            silent_seconds: After how many seconds without a word a worker is killed.
            absent_seconds: After how many seconds in which no worker accepts connections `failed` is called.
            failed: Told once, after `run`, that no worker starts any more. The coordinator must then end.
        """
        self._folder = folder
        self._held = held
        self._host = host
        self._connections = max(1, connections // count)
        self._window_kib = window_kib
        self._metrics = metrics
        self._log_format = log_format
        self._spawned = spawned
        self._silent_seconds = silent_seconds
        self._absent_seconds = absent_seconds
        self._failed = failed
        self._workers = [_Worker(number) for number in range(1, count + 1)]
        self._methods = Methods()
        self._beating: threading.Thread | None = None
        self._still = threading.Event()
        self._pulses = threading.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def port(self) -> int:
        """The port of all workers."""
        return int(self._held[0].getsockname()[1])

    async def run(self, methods: Methods) -> None:
        """Starts the workers, and returns once all accept connections.

        Raises:
            WorkersFailed: one did not start.
        """
        self._methods = methods
        self._beating = threading.Thread(target=self._beat, daemon=True, name="pulse")
        self._beating.start()
        started = await asyncio.gather(*(self._spawn(each) for each in self._workers), return_exceptions=True)
        for failure in started:
            if failure is not None:
                await self.drain(0.0)
                raise failure
        for each in self._workers:
            each.watching = asyncio.create_task(self._watch(each))
        self._looking = asyncio.create_task(self._look())

    def _beat(self) -> None:
        # A thread: a busy event loop must not look like a process that hangs.
        while not self._still.wait(BEAT_SECONDS):
            with self._pulses:
                for each in self._workers:
                    if each.pulse >= 0:
                        with contextlib.suppress(OSError):
                            os.write(each.pulse, b".")

    async def _spawn(self, worker: _Worker) -> None:
        """Starts a worker, and returns once it accepts connections.

        Raises:
            WorkersFailed: it did not start.
        """
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        settings = Settings(
            number=worker.number,
            parent=os.getpid(),
            channel=theirs.fileno(),
            pulse=reading,
            folder=str(self._folder.resolve()),
            host=self._host,
            port=self.port,
            connections=self._connections,
            window_kib=self._window_kib,
            methods=self._methods.kinds(),
            log_format=self._log_format,
        )
        # gRPC may be told.
        environment = bare_environment("GRPC_")
        worker.heard, worker.cpu, worker.gone = True, 0.0, asyncio.Event()
        worker.listening = asyncio.get_running_loop().create_future()
        try:
            # -P prevents imports from the folder in which the coordinator was started.
            worker.process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "coordinator.workers", settings.to_json()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), reading),
                env=environment,
            )
            worker.handle = os.pidfd_open(process.pid)
            with self._pulses:
                worker.pulse, writing = writing, -1
            channel = await connect(
                ours, FROM_WORKER, lambda frame: self._heard(worker, frame), lambda why: self._lost(worker, why)
            )
            worker.channel = channel
            worker.desk = Desk(self._methods, channel, worker.number, self._connections)
            theirs.close()
            os.close(reading)
            reading = -1
            async with asyncio.timeout(_START_SECONDS):
                await worker.listening
        except (OSError, TimeoutError, ChannelBroken) as error:
            self._end(worker)
            why = str(error) or type(error).__name__
            raise WorkersFailed(
                f"worker {worker.number} did not start: {why}; its own last lines, above this one, say more"
            ) from error
        finally:
            theirs.close()
            for each in (reading, writing):
                if each >= 0:
                    os.close(each)
        self._metrics.worker_started(worker.number)
        log.info("worker_started", worker=worker.number, process=process.pid, connections=self._connections)
        self._spawned(worker.number, process.pid)

    def _heard(self, worker: _Worker, frame: Frame) -> None:
        worker.heard = True
        match frame.kind:
            case Kind.LISTENING:
                if worker.listening is not None and not worker.listening.done():
                    worker.listening.set_result(None)
            case Kind.FIGURES:
                self._tell(worker, decoded(frame.payload))
            case _:
                if worker.desk is not None:
                    worker.desk.heard(frame)

    def _tell(self, worker: _Worker, figures: Mapping[str, Any]) -> None:
        try:
            cpu, resident, files = (float(figures[name]) for name in ("cpu", "resident", "files"))
        except (KeyError, TypeError, ValueError) as error:
            raise ChannelBroken("figures that are none") from error
        calls = 0 if worker.desk is None else len(worker.desk)
        used = max(0.0, cpu - worker.cpu)
        worker.cpu = max(cpu, worker.cpu)
        self._metrics.worker_uses(worker.number, calls=calls, cpu=used, resident=resident, files=files)

    def _lost(self, worker: _Worker, why: str) -> None:
        """The worker is gone, or broke the protocol. Its calls end as if their connections had broken."""
        if why:
            log.error("worker_broke_protocol", worker=worker.number, detail=why)
        if worker.listening is not None and not worker.listening.done():
            worker.listening.set_exception(ChannelBroken(why or "it ended"))
            # Retrieved, whoever waits.
            worker.listening.exception()
        if worker.desk is not None:
            worker.desk.end_calls()
        self._end(worker)
        worker.gone.set()

    def _end(self, worker: _Worker) -> None:
        """Kills the process, if it still runs, and stops its pulse."""
        with self._pulses:
            if worker.pulse >= 0:
                os.close(worker.pulse)
                worker.pulse = -1
        if worker.process is not None and worker.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if worker.handle >= 0:
                    # `process.kill()` first asks whether the process has ended. That takes the exit status from the
                    # thread that waits for it, and asyncio then says 255.
                    signal.pidfd_send_signal(worker.handle, signal.SIGKILL)
                else:
                    worker.process.kill()

    async def _watch(self, worker: _Worker) -> None:
        loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE
        while True:
            began = loop.time()
            if worker.process is not None:
                await worker.gone.wait()
                status = await worker.ended(worker.process)
                if self._stopping:
                    return
                self._metrics.worker_ended(worker.number)
                pause = _FIRST_PAUSE if loop.time() - began > _GOOD_SECONDS else pause
                log.error("worker_ended", worker=worker.number, status=status, next_start_seconds=pause)
                worker.process = None
            await asyncio.sleep(pause)
            if self._stopping:
                # A stop accepts nothing more.
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                await self._spawn(worker)
            except WorkersFailed as error:
                if worker.process is not None:
                    await worker.ended(worker.process)
                    worker.process = None
                self._metrics.worker_not_started(worker.number)
                log.error("worker_ended", worker=worker.number, error=str(error), next_start_seconds=pause)

    async def _look(self) -> None:
        """Kills a worker that is silent, and gives up when none listens.

        It counts looks, so a pause of this process is nobody's silence.
        """
        missed = dict.fromkeys(self._workers, 0)
        absent = 0
        while True:
            await asyncio.sleep(1.0)
            for each in self._workers:
                # One that starts says nothing yet, and has its own limit.
                missed[each] = 0 if each.heard or not each.listens else missed[each] + 1
                each.heard = False
                if missed[each] >= self._silent_seconds:
                    log.error("worker_silent", worker=each.number, seconds=missed[each])
                    missed[each] = 0
                    self._end(each)
            absent = 0 if any(each.listens for each in self._workers) else absent + 1
            if absent >= self._absent_seconds:
                why = (
                    f"no worker has accepted connections for {absent} seconds, so the coordinator ends; the workers' "
                    "last lines in the log say why they do not start; workers = 1 serves without them"
                )
                log.error("workers_failed", detail=why)
                self._failed(WorkersFailed(why))
                return

    async def drain(self, seconds: float) -> None:
        """Lets the workers accept nothing more, gives open calls some seconds, and ends everything.

        Args:
            seconds: For open calls.
        """
        self._stopping = True
        if self._looking is not None:
            self._looking.cancel()
        running = [each for each in self._workers if each.process is not None]
        for each in running:
            if each.channel is not None:
                each.channel.send(Kind.DRAIN, payload=encoded({"seconds": seconds}))
        waiting = [asyncio.create_task(each.ended(each.process)) for each in running if each.process is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds + _STOP_SECONDS)
        for each in self._workers:
            if each.watching is not None:
                each.watching.cancel()
            self._end(each)
            if each.channel is not None:
                each.channel.close()
        await asyncio.gather(*waiting)
        watching = [each.watching for each in self._workers if each.watching is not None]
        calls = [task for each in self._workers if each.desk is not None for task in each.desk.end_calls()]
        await asyncio.gather(*watching, *calls, return_exceptions=True)
        self._still.set()
        if self._beating is not None:
            await asyncio.to_thread(self._beating.join)
        for one in self._held:
            one.close()
        for each in self._workers:
            self._metrics.worker_ended(each.number)
