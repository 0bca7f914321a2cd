"""Starts the programs' processes by forking one that has imported everything, which saves seconds of imports.

For `coordinator ...`, `edge_client ...`, and `python -m` with a module of `benchmarks.operations`, `tests.support` or
`examples.demo`, `start` gives the same as `subprocess.Popen`: a process with its own pid, environment and streams that
runs the same entry point. Only the imports are shared. The test processes of one `make` share a server, `python -m
tests.support.warm`, which the first of them starts. When a test process ends, the server kills what it started for it.
The server ends with the last of them.

Tests of imports, of start-up, or of another interpreter or environment start commands in the usual way instead.
TACIT_TESTS_COLD=1 starts every command in the usual way.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support import command_trees
from tests.support.places import ROOT

__all__ = ["Started", "as_at_the_start", "import_everything", "in_this_environment", "knows", "served", "start"]

_BIN = Path(sys.executable).parent
_PROGRAMS = ("coordinator", "edge_client")
_MODULES = ("benchmarks.operations.", "examples.demo.", "tests.support.")
# Largest request in bytes. A command line and an environment stay far below it.
_LONGEST = 1 << 20
# Seconds until a server without a test process ends.
_CONNECTS_WITHIN = 60.0
# All of the product is imported, and what the commands import of others when they need it.
_PRODUCT = ("coordinator", "edge_client", "export", "learning", "simulation", "tacit", "tacit_api", "toolkit")
_OTHERS = (
    "torch",
    # Torch imports it when the first optimiser is made.
    "torch._dynamo",
    # What converts and runs a model.
    # Not onnxruntime: it starts a thread, which a fork would lose.
    "onnx",
    "onnxscript",
    "torch._functorch.aot_autograd",
    "torch.onnx",
    "transformers.models.bert.modeling_bert",
    "cryptography.hazmat.backends.openssl.backend",
    "fsspec.implementations.local",
    "psycopg",
    "rich.progress",
    "s3fs",
    "scipy.stats",
    "typer._adapters",
)
# Variables that a library reads when it is imported, by how they begin. `tls_13_only` sets gRPC's others.
_READ_ON_IMPORT = ("GRPC_TRACE", "GRPC_VERBOSITY", "MKL_", "OMP_", "PYTHON", "TORCH")
# What a library or a command sets in the process that runs it, which may be a test's: the operator's commands set gRPC
# to NONE, and torch names the folder of its compiler, which nothing here uses, on import.
_SET_BY_IMPORTS = (("GRPC_VERBOSITY", "NONE"), ("TORCHINDUCTOR_CACHE_DIR", None))


def _read_on_import() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_ON_IMPORT) and not {(name, value), (name, None)} & {*_SET_BY_IMPORTS}
    }


# Of the servers: at the start of the tests, and what `in_this_environment` added.
_SERVERS = [_read_on_import()]


def as_at_the_start() -> bool:
    """Whether the variables that libraries read on import are as they were when the tests started, or when a server was
    started for others.
    """
    return _read_on_import() == _SERVERS[-1]


@contextlib.contextmanager
def in_this_environment() -> Iterator[None]:
    """Commands start warm although variables that libraries read on import have changed: a server is started for them.

    It pays from a handful of commands on. They end with the context.
    """
    _SERVERS.append(_read_on_import())
    name = _name()
    try:
        yield
    finally:
        _SERVERS.pop()
        if name != _name() and name in _CONNECTED:
            _CONNECTED.pop(name).close()


def knows(words: Sequence[str]) -> bool:
    """Whether `start` can run this command line, in the environment of this process."""
    if os.environ.get("TACIT_TESTS_COLD") or not as_at_the_start():
        return False
    if Path(words[0]).parent == _BIN and Path(words[0]).name in _PROGRAMS:
        return True
    if words[2:3] == ["tests.support.shifted_clock"]:
        # It must set the clock before anything is imported.
        return False
    return [*words[:2]] == [sys.executable, "-m"] and words[2].startswith(_MODULES)


class Started:
    """A process that the server started, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, words: Sequence[str], pid: int, status: int) -> None:
        """`status` is the reading end of a pipe, to which the server writes the process's exit code."""
        self.args = words
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._reading = threading.Lock()

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
                # Another thread may have waited, too.
                with self._reading:
                    if self.returncode is None:
                        told = os.read(self._status, 64)
                        os.close(self._status)
                        assert told, f"the server of {self.args} is gone"
                        self.returncode = int(told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            # It may end before the signal, and its server tells of the end a moment later.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def served() -> str:
    """Starts this run's server if none runs, and returns its name."""
    _server(_name())
    return _name()[1:]


def start(
    words: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    cwd: Path,
    env: Mapping[str, str],
    name: str | None = None,
) -> Started:
    """Starts a command for which `knows` is true. The caller keeps the streams, which are file descriptors.

    Args:
        words: the command line.
        stdin: a file descriptor.
        stdout: a file descriptor.
        stderr: a file descriptor.
        cwd: the folder in which the command runs.
        env: the command's environment.
        name: the server, as `served` named it in another process. None: this run's.
    """
    read, write = os.pipe()
    request = json.dumps({"words": list(words), "cwd": str(cwd), "env": dict(env)}).encode()
    with _ASKING:
        server = _server(_name() if name is None else f"\0{name}")
        socket.send_fds(server, [request], [stdin, stdout, stderr, write])
        os.close(write)
        answer = server.recv(64)
    assert answer, "the server that starts processes is gone"
    return Started(words, int(answer), read)


# Tests start processes from several threads, and the server answers one request at a time.
_ASKING = threading.Lock()
# A server that this process started may outlive it, for others.
_STARTED: list[subprocess.Popen[bytes]] = []
# By name.
_CONNECTED: dict[str, socket.socket] = {}


def _name() -> str:
    """An abstract name, the same for all test processes of one run that read the same variables on import."""
    run = os.environ.get("TACIT_TESTS_RUN") or os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    same = json.dumps([sys.executable, str(ROOT), sorted(_SERVERS[-1].items())])
    return f"\0tacit-tests-warm-{run}-{zlib.crc32(same.encode())}"


def _server(name: str) -> socket.socket:
    if name not in _CONNECTED:
        _CONNECTED[name] = _connected(name)
    return _CONNECTED[name]


def _connected(name: str) -> socket.socket:
    # The second attempt finds the server that the first one started. More are needed if one is just about to end.
    for _ in range(5):
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(ConnectionError):
            ours.connect(name)
            # It greets once it has imported everything. One that is about to end hangs up instead.
            if ours.recv(64):
                return ours
        ours.close()
        listening, its = os.pipe()
        _STARTED.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm", name[1:], str(its)],
                pass_fds=[its],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )
        os.close(its)
        # The pipe ends when the server listens, or has found that another one does.
        os.read(listening, 1)
        os.close(listening)
    raise AssertionError("the server that starts processes does not start; its error is above")


# ---- the server -----------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A process: its pid, the pipe for its exit code, and the test process that asked for it."""

    pid: int
    status: int
    asked: socket.socket


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Returns a request in each process forked for one, and None in the server when the last test process has ended."""
    clients: set[socket.socket] = set()
    running: dict[int, _Running] = {}
    listener.setblocking(False)
    # Whoever started this server connects soon, unless it was killed.
    wait: float | None = _CONNECTS_WITHIN
    while True:
        watched: list[socket.socket | int] = [listener, *clients, *running]
        ready, _, _ = select.select(watched, [], [], wait)
        if not ready and not clients:
            return None
        for each in ready:
            if isinstance(each, int):
                ended = running.pop(each)
                _, how = os.waitpid(ended.pid, 0)
                _tell(ended.status, os.waitstatus_to_exitcode(how))
                os.close(each)
            elif each is listener:
                with contextlib.suppress(BlockingIOError):
                    client, _ = listener.accept()
                    client.setblocking(True)
                    clients.add(client)
                    _say(client, b"ready")
            else:
                request, descriptors = b"", list[int]()
                with contextlib.suppress(ConnectionError):
                    request, descriptors, _, _ = socket.recv_fds(each, _LONGEST, 4)
                if request:
                    pid = os.fork()
                    if pid == 0:
                        _leave(listener, clients, running)
                        _take(descriptors)
                        return dict(json.loads(request))
                    *streams, status = descriptors
                    for stream in streams:
                        os.close(stream)
                    running[os.pidfd_open(pid)] = _Running(pid, status, each)
                    _say(each, str(pid).encode())
                    continue
                clients.remove(each)
                each.close()
                for process in running.values():
                    if process.asked is each:
                        os.kill(process.pid, signal.SIGKILL)
        # With no test process left, only those that connect at once are served.
        wait = None if clients else 0.0


def _say(client: socket.socket, words: bytes) -> None:
    # The test process may have been killed; then its connection ends next.
    with contextlib.suppress(ConnectionError):
        client.send(words)


def _leave(listener: socket.socket, clients: set[socket.socket], running: dict[int, _Running]) -> None:
    """Closes in a forked process what belongs to the server."""
    listener.close()
    for client in clients:
        client.close()
    for pidfd, process in running.items():
        os.close(pidfd)
        os.close(process.status)


def _take(descriptors: list[int]) -> None:
    """Makes the first three descriptors the streams of this process."""
    *streams, status = descriptors
    os.close(status)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


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


def import_everything() -> None:
    """Imports what the commands need, and so compiles it if that has not been done."""
    for name in _OTHERS:
        importlib.import_module(name)
    for package in _PRODUCT:
        for each in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            # Neither a command's start nor Alembic's, which runs migrations when it is imported.
            if not each.name.endswith((".__main__", ".migrations.env")):
                importlib.import_module(each.name)
    _convert_once()
    _make_commands()


def _convert_once() -> None:
    """Converts the smallest module to ONNX: the first conversion imports more and builds tables, for 0.8 seconds."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    from export.conversion import converted

    # The exporter draws a progress bar, whose thread a fork would lose.
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0
    converted(torch.nn.Linear(3, 2).eval(), (torch.zeros(2, 3),), ["x"], "y", ({0: torch.export.Dim("batch")},))
    tqdm.monitor_interval = before


def _leave_upkeep() -> None:
    """Drops what torch does at a process's end: it takes apart its operators, which costs more than most commands."""
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False
    # It imports a library to print a table that nobody asked for. (mypy would follow an import statement through all of
    # torch's compiler and transformers, for six minutes.)
    atexit.unregister(importlib.import_module("torch._dynamo.utils").dump_compile_times)


def _make_commands() -> None:
    """Makes both programs' trees of commands, which each process that is forked then has."""
    import typer.main

    command_trees.made_once()
    for name in _PROGRAMS:
        typer.main.get_command(importlib.import_module(f"{name}.cli").app)


def main() -> None:
    """Runs the server, and after a fork the command."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(f"\0{sys.argv[1]}")
        except OSError:
            # Another one serves.
            return
        listener.listen(64)
        os.close(int(sys.argv[2]))
        from toolkit.tls import tls_13_only

        tls_13_only()
        import_everything()
        _leave_upkeep()
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a fork would lose {len(threads) - 1} threads of what was imported"
        gc.freeze()
        request = _serve(listener)
    if request is not None:
        _run(request)


if __name__ == "__main__":
    main()
