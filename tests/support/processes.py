"""A federation of real processes on localhost, for tests, started by the command lines that a person would type.

Nothing here sleeps for a fixed time. `Process.wait_for` waits for a log line and `Federation.wait_for` for a state that
the operator's service shows. Only a failing test reaches their deadline.
"""

import asyncio
import functools
import itertools
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coordinator.cli.common import operator_stub
from edge_client.identity.home import Home
from tacit.identity import key_pem
from tacit.token import JoinToken
from tacit.v1 import operator_pb2 as pb
from tests.support import keys, warm
from tests.support.places import ROOT

BIN = Path(sys.executable).parent
EXAMPLES = ROOT / "examples" / "desk"
# Seconds until a failing test gives up. On a slower machine, set the factor.
PATIENCE = 180.0 * float(os.environ.get("TACIT_TESTS_PATIENCE", "1"))


def command(
    *words: str | Path, variables: Mapping[str, str] = MappingProxyType({}), **more: Any
) -> "subprocess.CompletedProcess[str]":
    """Runs a command and returns its result, whatever the exit code.

    With options of `subprocess.run` it starts cold, else from `tests.support.warm`.

    Args:
        words: The command and its arguments.
        variables: Added to the environment of this process.
        more: Options of `subprocess.run`.
    """
    done = [str(BIN / words[0]), *map(str, words[1:])]
    if more or not warm.knows(done):
        if variables:
            more["env"] = {**more.get("env", os.environ), **variables}
        return subprocess.run(done, capture_output=True, text=True, timeout=PATIENCE, check=False, **more)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        streams = {"stdin": nothing.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
        started = warm.start(done, cwd=Path.cwd(), env={**os.environ, **variables}, **streams)
        try:
            code = started.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            started.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(done, code, out.read().decode(), err.read().decode())


def succeed(*words: str | Path, **more: Any) -> str:
    """Runs a command that must succeed, and returns its standard output."""
    done = command(*words, **more)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def within_patience(holds: Callable[[], object]) -> None:
    """Waits until `holds` is true, for a state that a process shows shortly after another event."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "the expected state was never reached"
        # Looking without a pause takes the processor from what is waited for.
        time.sleep(0.01)


def _claimed() -> tuple[socket.socket, range]:
    """A range of ports below the system's for outgoing connections, and the socket whose name claims it.

    No other test process on this machine takes the range before this process ends, whichever command started it.
    """
    for first in range(12_000, 32_000, 500):
        claim = socket.socket(socket.AF_UNIX)
        try:
            # An abstract name: it is in no folder, and free when the process ends in whatever way.
            claim.bind(f"\0tacit-tests-{first}")
        except OSError:
            claim.close()
            continue
        return claim, range(first, first + 500)
    raise RuntimeError("40 test processes have all ranges of ports")


_CLAIM, _RANGE = _claimed()
_PORTS = itertools.cycle(_RANGE)


def free_ports(count: int) -> list[int]:
    """Ports that are free now and outside the ranges of other test processes."""
    found: list[int] = []
    while len(found) < count:
        port = next(_PORTS)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


class Process:
    """A process whose standard error is a log of JSON lines."""

    def __init__(self, name: str, words: list[str], log: Path, *, told: str | None = None) -> None:
        """Starts the process, with `told` as its whole standard input."""
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self._arrived: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._log = log
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        read, write = os.pipe()
        with tempfile.TemporaryFile() as stdin, open(os.devnull, "w") as nothing:
            stdin.write((told or "").encode())
            stdin.seek(0)
            streams = {"stdin": stdin.fileno(), "stdout": nothing.fileno(), "stderr": write}
            self.process: subprocess.Popen[bytes] | warm.Started = (
                warm.start(words, cwd=ROOT, env=env, **streams)
                if warm.knows(words)
                else subprocess.Popen(words, cwd=ROOT, env=env, **streams)  # type: ignore[call-overload]
            )
        os.close(write)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, descriptor: int) -> None:
        with self._log.open("a") as log, open(descriptor, encoding="utf-8") as lines:
            for line in lines:
                log.write(line)
                log.flush()
                try:
                    self._arrived.put(json.loads(line))
                except ValueError:
                    self._arrived.put({"event": "unreadable", "line": line})
        self._arrived.put(None)

    def wait_for(self, *events: str, **fields: Any) -> dict[str, Any]:
        """The next log line with one of these events and all these fields. Skips the lines before it."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                line = self._arrived.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                tail = "\n".join(map(json.dumps, self.lines[-10:]))
                raise AssertionError(f"{self.name} never logged {events} {fields}; its last lines:\n{tail}")
            self.lines.append(line)
            if line.get("event") in events and all(line.get(key) == value for key, value in fields.items()):
                return line

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=PATIENCE)

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=PATIENCE)

    def end(self) -> None:
        """Kills the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=PATIENCE)


# The numbers of the first members' keys. Two federations that follow each other have different ones.
_FIRST_MEMBERS = itertools.cycle((200, 220))


def _init(folder: Path, host: str | None, ports: list[int]) -> None:
    named = zip(("enrolment", "federation", "metrics"), ports, strict=True)
    options = [f"--{name}-port={port}" for name, port in named] + ([] if host is None else [f"--host={host}"])
    succeed("coordinator", "init", folder, "--listen-host=127.0.0.1", *options)


@functools.cache
def _initialised(host: str | None) -> tuple[Path, list[int]]:
    """Returns a folder that `coordinator init` made for members that dial `host`, and its ports."""
    folder, ports = Path(tempfile.mkdtemp(prefix="federation-", dir=keys.KEPT)).resolve() / "federation", free_ports(3)
    _init(folder, host, ports)
    return folder, ports


def _init_reads_the_environment() -> bool:
    return any(name.startswith("TACIT_") and not name.startswith("TACIT_TESTS_") for name in os.environ)


class Federation:
    """A coordinator and its members, in one folder.

    RSA keys take more than half of the time in which a federation is made. So each test process makes one, and the
    others are copies with ports of their own, unless a variable changes what `coordinator init` makes. Each member of a
    federation has its own key of `tests.support.keys`.
    """

    # What `serve` starts. A test of a lying coordinator names another one that takes the same words.
    program: tuple[str, ...] = (str(BIN / "coordinator"),)

    def __init__(self, folder: Path, *, host: str | None = None) -> None:
        """Starts a coordinator that members dial as `host`, by default under the loopback name."""
        self.folder = folder
        self.dir = folder / "federation"
        ports = free_ports(3)
        _, self.port, self.metrics_port = ports
        if _init_reads_the_environment():
            _init(self.dir, host, ports)
        else:
            made, before = _initialised(host)
            shutil.copytree(made, self.dir, dirs_exist_ok=True)
            for old, new in zip(before, ports, strict=True):
                _replace(self.dir / "coordinator.toml", f"_port = {old}\n", f"_port = {new}\n")
            _replace(self.dir / "operator" / "operator.toml", f':{before[1]}"', f':{self.port}"')
            _replace(self.dir / "database.json", str(made), str(self.dir.resolve()))
        self.keys = itertools.count(next(_FIRST_MEMBERS))
        self.processes: list[Process] = []
        self.coordinator = self.serve()

    def serve(self) -> Process:
        """Starts the coordinator."""
        words = [*self.program, "serve", "--dir", str(self.dir), "--log-format", "json"]
        self.coordinator = Process("coordinator", words, self.folder / "coordinator.log")
        self.processes.append(self.coordinator)
        self.coordinator.wait_for("serving")
        return self.coordinator

    def operator(self, *words: str | Path) -> str:
        """Runs an operator's command that must succeed, and returns its output."""
        return succeed("coordinator", *words, "--dir", self.dir)

    def token(self, name: str, *more: str) -> str:
        """Invites a member and returns its join token."""
        return self.operator("member", "invite", name, *more).splitlines()[0]

    def enrol(self, *names: str, policy: str | None = None) -> None:
        """Enrols members with this policy, by default one that allows jobs without noise.

        `edge_client enrol` finds what it leaves if it is stopped once it has made a key.
        """
        for name in names:
            home, token = self.home(name), self.token(name)
            Home(home).prepare()
            pending = Home(home).pending(JoinToken.parse(token).id)
            pending.path.mkdir(mode=0o700)
            pending.key.touch(0o600)
            pending.key.write_bytes(key_pem(keys.key(next(self.keys))))
            succeed("edge_client", "enrol", token, "--home", home)
            (home / "policy.toml").write_text(policy or (EXAMPLES / "policy.toml").read_text())

    def home(self, name: str) -> Path:
        """A member's folder."""
        return self.folder / f"home-{name}"

    def data(self, name: str, rows: int = 60) -> Path:
        """A member's data file, which holds part of the examples."""
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            lines = (EXAMPLES / "train.jsonl").read_text().splitlines()
            start = 60 * (sum(map(ord, name)) % 10)
            path.write_text("\n".join(lines[start : start + rows]) + "\n")
        return path

    def start(self, name: str, *more: str, home: Path | None = None) -> Process:
        """Starts a member's process, `edge_client run`."""
        words = [str(BIN / "edge_client"), "run", "--data", str(self.data(name))]
        words += ["--home", str(home or self.home(name)), "--log-format", "json", *more]
        member = Process(name, words, self.folder / f"{name}.log")
        self.processes.append(member)
        return member

    def job(self, name: str, **rounds: Any) -> None:
        """Creates a small TextCNN job: a megabyte to send, a moment to train. `mechanism` is a part of its file."""
        mechanism = rounds.pop("mechanism", "")
        deadlines = {"training": 60, "reconnect": 2, **rounds.pop("deadlines", {})}
        labels = sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()})
        numbers = {"count": 3, "min_members": 3, **rounds}
        spec = self.folder / f"{name}.toml"
        spec.write_text(
            f"schema = 1\nname = {json.dumps(name)}\nlabels = {json.dumps(labels)}\n"
            f'[vocabulary]\nkind = "words"\nfile = {json.dumps(str(EXAMPLES / "words.txt"))}\n{mechanism}'
            "[model]\nembedding = 64\nwidths = [2, 3]\nmaps = 16\n"
            + "[rounds]\n"
            + "".join(f"{key} = {value}\n" for key, value in numbers.items())
            + "[rounds.deadlines]\n"
            + "".join(f"{key} = {value}\n" for key, value in deadlines.items())
        )
        self.create(spec)

    def create(self, spec: Path) -> None:
        """Creates a job from an operator's file."""
        bundle = self.folder / f"bundle-{spec.stem}"
        succeed("coordinator", "job", "bundle", spec, "--out", bundle)
        self.operator("job", "create", "--bundle", bundle)

    def show(self, job: str) -> pb.JobDetail:
        """A job as the operator sees it."""
        return self._ask(lambda stub: stub.GetJob(pb.GetJobRequest(name=job)))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        async def ask() -> Any:
            async with operator_stub(self.dir / "operator") as stub:
                return await call(stub)

        return asyncio.run(ask())

    def wait_for(self, job: str, holds: Callable[[pb.JobDetail], Any]) -> pb.JobDetail:
        """Waits until `holds` is true of the job, and returns the job. Checks after every change that is reported.

        Changes that are reported while it fetches the job count as one: a job may have hundreds of rounds.
        """

        async def wait() -> pb.JobDetail:
            detail, changed = None, asyncio.Event()

            async def watch(stub: Any) -> None:
                async for _ in stub.Watch(pb.StatusRequest()):
                    changed.set()

            try:
                async with asyncio.timeout(PATIENCE), operator_stub(self.dir / "operator") as stub:
                    watching = asyncio.create_task(watch(stub))
                    watching.add_done_callback(lambda _: changed.set())
                    try:
                        while await changed.wait():
                            changed.clear()
                            detail = await stub.GetJob(pb.GetJobRequest(name=job))
                            if holds(detail):
                                return detail
                            if watching.done():
                                await watching
                                break
                    finally:
                        watching.cancel()
                        await asyncio.gather(watching, return_exceptions=True)
            except TimeoutError:
                pass
            # Leave out the rounds: a job that runs throughout a test has thousands.
            raise AssertionError(f"job {job} never reached the expected state: {detail and detail.job}")

        return asyncio.run(wait())

    def finished(self, job: str) -> pb.JobDetail:
        """Waits until the job has done all its rounds, and returns it."""
        return self.wait_for(job, lambda detail: detail.job.status == pb.JOB_STATUS_FINISHED)

    def metric(self, name: str, **labels: str) -> float:
        """A value from the metrics endpoint, or 0 if it is not there yet."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics").read().decode()
        wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        start = f"{name}{{{wanted}}} " if wanted else f"{name} "
        found = [line for line in text.splitlines() if line.startswith(start)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    def close(self) -> None:
        """Ends every process."""
        for process in reversed(self.processes):
            process.end()


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


@contextmanager
def running_federation(folder: Path, *members: str) -> Iterator[Federation]:
    """A federation with these members enrolled."""
    federation = Federation(folder)
    try:
        federation.enrol(*members)
        yield federation
    finally:
        federation.close()


class Proxy:
    """A TCP proxy on loopback that can stall a connection after a number of bytes from the client, and cut it.

    It sees only TLS: the member calls `localhost` on another port.
    """

    def __init__(self, target: int) -> None:
        self.stall_after: int | None = None
        self.stalled = threading.Event()
        self._scissors, self._cut = socket.socketpair()
        # Bytes from the client on each connection, in order of connections.
        self.passed: list[int] = []
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            self.passed.append(0)
            number = len(self.passed) - 1
            threading.Thread(target=self._pump, args=(client, server, number), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, None), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, number: int | None) -> None:
        try:
            while data := source.recv(16 * 1024):
                if number is not None:
                    self.passed[number] += len(data)
                    if self.stall_after is not None and self.passed[number] > self.stall_after:
                        self.stalled.set()
                        _until_readable_or_gone(source, self._cut)
                        break
                sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """Cuts the stalled connection, and lets later ones pass."""
        self.stall_after = None
        self._scissors.send(b"x")

    def close(self) -> None:
        """Closes the port and every connection."""
        self._listener.close()
        for each in self._open:
            each.close()


def _until_readable_or_gone(source: socket.socket, cut: socket.socket) -> None:
    """Waits without reading until the other end of `source` is gone or `cut` becomes readable."""
    poll = select.poll()
    poll.register(source, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poll.register(cut, select.POLLIN)
    poll.poll(1000 * PATIENCE)


def behind(proxy: Proxy, home: Path) -> None:
    """Makes the member of `home` dial the proxy."""
    path = home / "identity" / "identity.json"
    document = json.loads(path.read_text())
    document["address"] = f"localhost:{proxy.port}"
    path.write_text(json.dumps(document))
