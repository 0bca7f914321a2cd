"""Starts the programs' processes by forking one that has imported everything, which saves seconds of imports.

For `coordinator ...`, `edge_client ...` and `python -m tests.support.NAME`, `start` gives the same as
`subprocess.Popen`: a process with its own pid, environment and streams that runs the same entry point. Only the imports
are shared. Each test process has one server, `python -m tests.support.warm`, which ends with it.

Tests of imports, of start-up, or of another interpreter or environment start commands in the usual way instead.
TACIT_TESTS_COLD=1 starts every command in the usual way.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.places import ROOT

__all__ = ["Started", "knows", "start"]

_BIN = Path(sys.executable).parent
_PROGRAMS = ("coordinator", "edge_client")
# Largest request in bytes. A command line and an environment stay far below it.
_LONGEST = 1 << 20
_IMPORTED = (
    "torch",
    # Torch imports it when the first optimiser is made.
    "torch._dynamo",
    "coordinator.cli",
    "coordinator.cli.common",
    "coordinator.operators",
    "coordinator.server",
    "edge_client.cli",
    "edge_client.identity.doctor",
    "edge_client.identity.enrolment",
    "edge_client.agent.runner",
    "export.bundle",
    "fsspec.implementations.local",
)
# Variables that a library reads when it is imported, by how they begin. `tls_13_only` sets gRPC's others.
_READ_ON_IMPORT = ("GRPC_TRACE", "GRPC_VERBOSITY", "MKL_", "OMP_", "PYTHON", "TORCH")


def _read_on_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_ON_IMPORT)}


_SERVERS = _read_on_import()


def knows(words: Sequence[str]) -> bool:
    """Whether `start` can run this command line, in the environment of this process."""
    if os.environ.get("TACIT_TESTS_COLD") or _read_on_import() != _SERVERS:
        return False
    if Path(words[0]).parent == _BIN and Path(words[0]).name in _PROGRAMS:
        return True
    if words[2:3] == ["tests.support.shifted_clock"]:
        # It must set the clock before anything is imported.
        return False
    return [*words[:2]] == [sys.executable, "-m"] and words[2].startswith("tests.support.")


class Started:
    """A process that the server started, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, words: Sequence[str], pid: int, status: int) -> None:
        """`status` is the reading end of a pipe, to which the server writes the process's exit code."""
        self.args = words
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        ended = self._ended(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return ended

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if poll.poll(None if timeout is None else 1000 * timeout):
                told = os.read(self._status, 64)
                os.close(self._status)
                assert told, f"the server of {self.args} is gone"
                self.returncode = int(told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(words: Sequence[str], *, stdin: int, stdout: int, stderr: int, cwd: Path, env: Mapping[str, str]) -> Started:
    """Starts a command for which `knows` is true. The caller keeps the streams, which are file descriptors."""
    read, write = os.pipe()
    request = json.dumps({"words": list(words), "cwd": str(cwd), "env": dict(env)}).encode()
    with _ASKING:
        server = _server()
        socket.send_fds(server, [request], [stdin, stdout, stderr, write])
        os.close(write)
        answer = server.recv(64)
    assert answer, "the server that starts processes is gone"
    return Started(words, int(answer), read)


# Tests start processes from several threads, and the server answers one request at a time.
_ASKING = threading.Lock()


@functools.cache
def _server() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# ---- the server -----------------------------------------------------------------------------------------------------


def _serve(asked: socket.socket) -> dict[str, Any] | None:
    """Returns a request in each process forked for one, and None in the server when its test process has ended."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([asked, *running], [], [])  # type: ignore[type-var]
        for each in ready:
            if each is not asked:
                pid, status = running.pop(each)  # type: ignore[call-overload]
                _, how = os.waitpid(pid, 0)
                _tell(status, os.waitstatus_to_exitcode(how))
                os.close(each)
        if asked not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(asked, _LONGEST, 4)
        if not request:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            return None
        *streams, status = descriptors
        pid = os.fork()
        if pid == 0:
            asked.close()
            for each, (_, other) in running.items():
                os.close(each)
                os.close(other)
            os.close(status)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return dict(json.loads(request))
        for stream in streams:
            os.close(stream)
        running[os.pidfd_open(pid)] = (pid, status)
        asked.send(str(pid).encode())


def _tell(status: int, code: int) -> None:
    # The reader may be gone.
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(code).encode())
    os.close(status)


def _become(words: list[str], cwd: str, env: dict[str, str]) -> None:
    """Runs the command in this process."""
    os.chdir(cwd)
    os.environ.clear()
    # gRPC has already read its settings, as `tls_13_only` set them.
    os.environ.update(env)
    if words[0] == sys.executable:
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        importlib.import_module(f"{Path(words[0]).name}.cli").main()


def _run(request: dict[str, Any]) -> NoReturn:
    """Runs the command, then ends this process as the interpreter would, but without taking its modules apart.

    Taking them apart would copy 150 MB that this process shares with the server, which costs more than most commands.
    """
    code = 0
    try:
        _become(**request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    # The order of Py_FinalizeEx: threads that are no daemons, functions registered to run at exit, streams.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Runs the server, and after a fork the command."""
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        from toolkit.tls import tls_13_only

        tls_13_only()
        for name in _IMPORTED:
            importlib.import_module(name)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a fork would lose {len(threads) - 1} threads of what was imported"
        gc.freeze()
        request = _serve(asked)
    if request is not None:
        _run(request)


if __name__ == "__main__":
    main()
