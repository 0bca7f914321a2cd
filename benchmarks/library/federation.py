"""A federation of real processes on this machine: a coordinator and members enrolled with tokens, over mutual TLS.

Guarantees: all steps use the services that a person would use (invitation, enrolment, job bundle, sessions). Every
process is ended, however the measurement ends. A process that ends early fails the measurement with the last lines of
its log.
"""

import asyncio
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.library.record import ROOT
from coordinator.cli.common import operator_stub
from edge_client.identity.enrolment import enrol
from tacit.blobs import fetch_blob
from tacit.v1 import operator_pb2 as pb

__all__ = ["Federation", "MeasurementFailed", "federation", "free_ports"]

T = TypeVar("T")

BIN = Path(sys.executable).parent
# Only a measurement that fails, or a crowded machine, waits so long.
_PATIENCE = 300.0


class MeasurementFailed(RuntimeError):
    """The measurement failed; the text says why."""


class Federation:
    """A coordinator's folder, its members' homes, and the running processes."""

    def __init__(self, folder: Path, policy: str, *init: str) -> None:
        """Make the coordinator's folder. init: further options of `coordinator init`."""
        self.folder = folder
        self.dir = folder / "federation"
        self._policy = policy
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Those that shall end by themselves.
        self._ending: set[str] = set()
        enrolment, self.port, metrics = free_ports(3)
        self.command(
            "coordinator",
            "init",
            self.dir,
            "--listen-host=127.0.0.1",
            f"--enrolment-port={enrolment}",
            f"--federation-port={self.port}",
            f"--metrics-port={metrics}",
            *init,
        )

    # ---- processes ------------------------------------------------------------------------------------------------

    def command(self, *words: str | Path) -> str:
        """Run a command and return its output.

        Raises:
            MeasurementFailed: the command failed.
        """
        done = subprocess.run([str(BIN / words[0]), *map(str, words[1:])], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MeasurementFailed(f"`{' '.join(map(str, words[:3]))}` ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def spawn(self, name: str, words: Sequence[str | Path]) -> int:
        """Start a process and return its id."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                list(map(str, words)),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self._processes[name].pid

    async def serve(self, words: Sequence[str | Path] | None = None) -> int:
        """Start the coordinator (or the command given instead), wait for its port, and return its process id."""
        process = self.spawn("coordinator", words or [BIN / "coordinator", "serve", "--dir", self.dir])
        end = time.monotonic() + _PATIENCE
        while True:
            self.check()
            if time.monotonic() > end:
                raise MeasurementFailed("the coordinator's port did not open")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return process
            await asyncio.sleep(0.05)

    def process(self, name: str) -> int:
        """Return the id of a running process."""
        return self._processes[name].pid

    def check(self) -> None:
        """Raise MeasurementFailed if a process failed that shall not end."""
        for name, process in self._processes.items():
            if name not in self._ending and process.poll():
                tail = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-5:]
                raise MeasurementFailed("\n".join([f"{name} ended with {process.returncode}", *tail]))

    def end(self, *names: str) -> None:
        """End these processes, or all. Members end first, so that none loses its coordinator."""
        ending = [name for name in reversed(list(self._processes)) if not names or name in names]
        for name in ending:
            self._processes[name].terminate()
        for name in ending:
            process = self._processes.pop(name)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        self._processes[name].send_signal(number)

    def let_end(self, name: str) -> None:
        """From now on this process may end by itself, with any exit code. `ended` waits for that."""
        self._ending.add(name)

    async def ended(self, name: str) -> int:
        """Wait until a process of `let_end` has ended, and return its exit code."""
        process = self._processes[name]
        code = await asyncio.to_thread(process.wait, _PATIENCE)
        del self._processes[name]
        self._ending.discard(name)
        return code

    # ---- the operator's side --------------------------------------------------------------------------------------

    async def ask(self, call: Callable[[Any], Awaitable[T]]) -> T:
        """Call the operator's service once."""
        async with operator_stub(self.dir / "operator") as stub:
            return await call(stub)

    def home(self, member: str) -> Path:
        """Return a member's folder."""
        return self.folder / f"home-{member}"

    async def enrol(self, members: Sequence[str]) -> None:
        """Invite and enrol the members, each with its own key."""

        async def one(stub: Any, member: str) -> None:
            answer = await stub.InviteMember(pb.InviteMemberRequest(name=member, valid_seconds=3600))
            await enrol(self.home(member), answer.token)
            (self.home(member) / "policy.toml").write_text(self._policy)

        async with operator_stub(self.dir / "operator") as stub:
            for member in members:
                await one(stub, member)

    def create_job(self, name: str, specification: str) -> None:
        """Bundle and start a job from the text of a job file."""
        spec, bundle = self.folder / f"{name}.toml", self.folder / f"bundle-{name}"
        spec.write_text(specification)
        self.command("coordinator", "job", "bundle", spec, "--out", bundle)
        self.command("coordinator", "job", "create", "--bundle", bundle, "--operator", self.dir / "operator")

    async def connected(self, count: int) -> None:
        """Wait until `count` members have a session."""
        async with operator_stub(self.dir / "operator") as stub, asyncio.timeout(_PATIENCE):
            async for _ in stub.Watch(pb.StatusRequest()):
                self.check()
                members = (await stub.ListMembers(pb.ListMembersRequest())).members
                if sum(member.connected for member in members) >= count:
                    return

    async def finished(self, job: str, seconds: float) -> pb.JobDetail:
        """Wait until all rounds of a job are published, and return the job.

        Raises:
            MeasurementFailed: it ended otherwise, a round was abandoned, or it took longer than `seconds`.
        """
        try:
            async with asyncio.timeout(seconds), operator_stub(self.dir / "operator") as stub:
                async for status in stub.Watch(pb.StatusRequest()):
                    self.check()
                    state = next(each.status for each in status.jobs if each.name == job)
                    if state == pb.JOB_STATUS_RUNNING:
                        continue
                    detail: pb.JobDetail = await stub.GetJob(pb.GetJobRequest(name=job))
                    lost = [each.number for each in detail.rounds if each.outcome != "published"]
                    if state != pb.JOB_STATUS_FINISHED or lost:
                        raise MeasurementFailed(f"job {job} ended without publishing all rounds: {lost}")
                    return detail
        except TimeoutError:
            raise MeasurementFailed(f"job {job} did not finish within {seconds:.0f} s") from None
        raise MeasurementFailed("the coordinator ended before the job did")

    async def show(self, job: str) -> pb.JobDetail:
        """Return the present state of a job."""

        async def get(stub: Any) -> pb.JobDetail:
            detail: pb.JobDetail = await stub.GetJob(pb.GetJobRequest(name=job))
            return detail

        return await self.ask(get)

    async def versions(self, detail: pb.JobDetail) -> AsyncIterator[tuple[int, bytes]]:
        """Yield every version of a job from number 0 on, fetched as an operator would."""
        async with operator_stub(self.dir / "operator") as stub:
            for version in sorted(detail.versions, key=lambda each: each.number):
                data = bytearray()
                await fetch_blob(stub.FetchBlob, version.digest, data)
                if hashlib.sha256(data).digest() != version.digest:
                    raise MeasurementFailed(f"version {version.number} arrived damaged")
                yield version.number, bytes(data)


@contextlib.asynccontextmanager
async def federation(folder: Path, policy: str, members: Sequence[str]) -> AsyncIterator[Federation]:
    """Serve a coordinator with these members enrolled, and end all processes on leaving."""
    made = Federation(folder, policy)
    try:
        await made.serve()
        await made.enrol(members)
        yield made
    finally:
        made.end()


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
