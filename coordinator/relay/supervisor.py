"""The parent's side of the relay: binds the port, starts the process, restarts it when it dies, and ends it.

The port stays bound while the relay restarts, so strangers wait a moment and no other program can take it. The relay
gets the listening sockets, the folder of Unix sockets and its limits, and from the environment only what Python needs
to start: no passphrase and no database address.
"""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from coordinator.relay.process import BACKLOG, Settings

__all__ = ["RelayFailed", "Supervisor", "bare_environment", "listen", "socket_folder"]

log = structlog.get_logger("coordinator.relay")

# TLS handshakes that enrolment performs, at once and per second. Each costs 3 ms of a core, so a flood takes 15 per
# cent of one core.
BURST, RATE = 100.0, 50.0

_START_SECONDS, _STOP_SECONDS = 30.0, 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
# Seconds within which a relay whose parent was killed releases the port.
_PORT_SECONDS = 2.0
_LOG_SECONDS = 60.0
# What Python needs to start. No passphrase and no address of a database.
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
)
# sockaddr_un has room for 104 bytes on some systems, and the longest socket name has 60.
_MAX_PATH = 104 - 60
_REFUSALS = ("network_full", "all_full", "displaced", "not_tls", "hello_late", "too_long", "too_much", "no_files")


class RelayFailed(RuntimeError):
    """The relay did not start."""


def bare_environment(prefix: str | None = None) -> dict[str, str]:
    """Returns the part of the environment that a child process needs, and what begins with `prefix`. No secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or (prefix is not None and name.startswith(prefix))
    }


async def listen(host: str, port: int) -> list[socket.socket]:
    """Opens listening sockets on all addresses of a host, with the same port.

    Args:
        host: A name or an address. `0.0.0.0` and `::` mean every IPv4 and IPv6 address.
        port: The port; 0 takes any free one.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    end = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return _listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= end:
                raise
            # If a coordinator was killed a moment ago, its relay may not have noticed yet.
            await asyncio.sleep(0.1)


def _listen(host: str, port: int) -> list[socket.socket]:
    if host in ("0.0.0.0", "::"):  # noqa: S104  what to compare with
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return [
                    socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
                ]
        return [socket.create_server(("0.0.0.0", port), backlog=BACKLOG)]  # noqa: S104  members come from outside
    found: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            place = (address[0], found[0].getsockname()[1] if found else port, *address[2:])
            found.append(socket.create_server(place, family=family, backlog=BACKLOG))
    except OSError:
        for each in found:
            each.close()
        raise
    return found


def socket_folder() -> Path:
    """Creates a folder for Unix sockets that no other user can enter, with a path short enough for their names.

    Raises:
        OSError: no temporary folder can be written, or its path is too long.
    """
    for parent in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  mkdtemp makes a name of its own, mode 0700
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="tacit-", dir=parent))
            if len(os.fsencode(folder)) <= _MAX_PATH:
                return folder
            folder.rmdir()
    raise OSError(
        errno.ENAMETOOLONG, "no temporary folder for sockets; make /tmp writable, or set TMPDIR to a short path"
    )


class Supervisor:
    """Runs one relay. Used from one event loop."""

    def __init__(
        self,
        listening: list[socket.socket],
        folder: Path,
        backend: Path,
        *,
        total: int,
        per_network: int,
        tell: Callable[[int, Mapping[str, int]], None],
        **more: float,
    ) -> None:
        """Prepares a relay; `start` starts it.

        Args:
            listening: The sockets of the enrolment port; `stop` closes them.
            folder: The folder of Unix sockets; `stop` removes it.
            backend: The enrolment server's socket, in that folder.
            total: Maximum number of connections.
            per_network: Maximum number of connections from one network.
            tell: Called with the number of open connections, and the outcomes counted since the last call.
            more: Other fields of `Settings`.
        """
        self._listening = listening
        self._folder = folder
        settings: dict[str, Any] = {"burst": BURST, "rate": RATE, **more}
        descriptors = tuple(each.fileno() for each in listening)
        self._settings = Settings(descriptors, str(folder), str(backend), total, per_network, **settings)
        self._tell = tell
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._refused: Counter[str] = Counter()
        self._logged = -_LOG_SECONDS

    @property
    def port(self) -> int:
        """The enrolment port."""
        return int(self._listening[0].getsockname()[1])

    async def start(self) -> None:
        """Starts the relay, and returns once it accepts connections.

        Raises:
            RelayFailed: it did not start.
        """
        await self._spawn()
        self._watching = asyncio.create_task(self._watch())

    async def _spawn(self) -> None:
        environment = bare_environment()
        try:
            # -P prevents imports from the folder in which the coordinator was started.
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "coordinator.relay", self._settings.to_json()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=self._settings.listening,
                env=environment,
            )
            assert process.stdout is not None  # noqa: S101  for the type checker: it was asked for
            async with asyncio.timeout(_START_SECONDS):
                first = await process.stdout.readline()
            files = json.loads(first)["ready"]
        except (OSError, TimeoutError, ValueError, KeyError) as error:
            await self._end()
            raise RelayFailed(f"the relay before the enrolment port did not start ({type(error).__name__})") from error
        settings = self._settings
        bounds = {"connections": settings.total, "per_network": settings.per_network}
        log.info("relay_started", process=process.pid, open_files=files, **bounds)

    async def _watch(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            if self._process is not None:
                began = time.monotonic()
                await self._listen_to(self._process)
                status = await self._process.wait()
                log.error("relay_ended", status=status, next_start_seconds=pause)
                if time.monotonic() - began > _LOG_SECONDS:
                    pause = _FIRST_PAUSE
            self._tell(0, {})
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                await self._spawn()
            except RelayFailed as error:
                log.error("relay_ended", error=str(error), next_start_seconds=pause)

    async def _listen_to(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101  for the type checker: it was asked for
        while line := await process.stdout.readline():
            with contextlib.suppress(ValueError):
                self._heard(json.loads(line))

    def _heard(self, told: Mapping[str, Any]) -> None:
        counts: dict[str, int] = told["counts"]
        self._tell(told["open"], counts)
        self._refused.update({name: count for name, count in counts.items() if name in _REFUSALS})
        # Log at most one line a minute.
        if self._refused and time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            log.warning("enrolment_flooded", open=told["open"], networks=told["networks"], **self._refused)
            self._refused.clear()

    async def stop(self) -> None:
        """Ends the relay and releases the port."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._end()
        for each in self._listening:
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
