"""Measures a coordinator under many members.

Coordinator and members are processes on this machine, over mutual TLS. Members do everything except train
(`library.members`). They share the machine's cores with the coordinator, and do by far the larger part of the work, so
the processor time of the two sides is given separately.

round            seconds from the round's opening to its version; the coordinator's highest resident size from the job's
                 creation on; processor time of both sides. Members have met before: each knows the others'
                 certificates, as from the second round of a federation on. (In their first round they download 1.2 KB
                 for each pair of members.)
idle             resident size of the coordinator with many idle sessions, and the share of one session
vectors          peak in a round of few members with large vectors, in vectors (`secure_aggregation.memory`)

`--workers 1 2` measures each cell with as many workers of the coordinator, one after the other. Processor time and
memory are those of the main process and its workers together. `--beside FOLDER` also runs the benchmark of another
checkout, with that checkout's coordinator and members and the libraries of this one. It measures what every checkout's
benchmark does: rounds of 16,384 values and idle sessions, without workers.

A member's key takes a quarter of a second to make. Cells of one run use the same keys, in federations that have nothing
else in common. Idle members sign nothing, so they share a few.
"""

import asyncio
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.library.federation import Federation, MeasurementFailed
from benchmarks.library.record import Figure, open_results, parser
from benchmarks.library.untrained import POLICY
from benchmarks.secure_aggregation.memory import Peak, measure
from coordinator.cli.common import operator_stub
from coordinator.config import load_config
from edge_client.identity.enrolment import enrol
from edge_client.identity.home import Home
from tacit.identity import key_pem, new_key
from tacit.token import JoinToken
from tacit.v1 import operator_pb2 as pb
from toolkit.durable import durable_file

__all__ = ["Served", "idle", "secure_round"]

BENCH = "load"
# 2 adds workers and cohorts of 2,000.
REVISION = 2

# Members and values of a round. The first one has a target for memory, and every checkout measures it.
ROUNDS = ((1000, 16_384), (2000, 1_024))
# Values of a model: its embedding, words, and maps over one word each.
_MODELS = {16_384: (64, 210, 42), 1_024: (16, 50, 10)}
IDLE = 5000
FEW, LARGE = 60, 10_000_000
QUICK_MEMBERS, QUICK_IDLE = 40, 100
PROCESSES = 4
CELL_SECONDS = 3600.0
ROUND_MEMORY, IDLE_MEMORY = 2**30, 400_000_000
_SHARED_KEYS = 16
_ENROLLING = 8
_JOB = "load"


@dataclass(frozen=True)
class Served:
    """Which coordinator a cell measures. workers: its processes for members' connections; 1: its main process alone."""

    workers: int = 1

    async def start(self, running: Federation) -> list[psutil.Process]:
        """Start it, and return its main process and then its workers."""
        words: list[str | Path] = [Path(sys.executable).parent / "coordinator", "serve", "--dir", running.dir]
        if self.workers > 1:
            words += ["--workers", str(self.workers)]
        main = psutil.Process(await running.serve(words))
        found = [each for each in main.children() if "coordinator.workers" in each.cmdline()]
        if self.workers > 1 and len(found) != self.workers:
            raise MeasurementFailed(f"{len(found)} workers run, and not {self.workers}")
        return [main, *found]


def measured_by(checkout: Path, cell: str, members: int, values: int) -> list[Figure]:
    """Return what the benchmark of another checkout measures in a cell, of its own coordinator and members.

    Raises:
        MeasurementFailed: the benchmark failed, or does not measure such a cell.
    """
    words = [sys.executable, "-m", "benchmarks.operations.load", cell, "--quick", "--members", str(members)]
    path = os.pathsep.join([str(checkout), str(checkout / "proto")])
    done = subprocess.run(
        words, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise MeasurementFailed(f"`{' '.join(words[1:])}` in {checkout} ended with {done.returncode}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # A newer checkout measures rounds of several lengths.
    found = [line for line in lines if "figure" in line and line["case"]["values"] == values]
    if not found:
        raise MeasurementFailed(f"the benchmark in {checkout} measures no {cell} with {values} values")
    more = ("members_cpu_seconds", "members_cpu_seconds_each", "connected_bytes", "alone_bytes")
    return [
        Figure(line["figure"], line["value"], line["unit"], {name: line[name] for name in more if name in line})
        for line in found
    ]


_made: list[bytes] = []


def _keys(count: int) -> list[bytes]:
    """Return `count` different keys, the same ones in each cell."""
    with ThreadPoolExecutor() as pool:
        _made.extend(pool.map(lambda _: key_pem(new_key()), range(count - len(_made))))
    return _made[:count]


async def enrol_all(running: Federation, names: list[str], keys: int | None = None) -> None:
    """Enrol members through the services, several at a time. keys: number of shared keys; None: a key for each."""
    made = _keys(len(names) if keys is None else keys)
    turns = asyncio.Semaphore(_ENROLLING)
    async with operator_stub(running.dir / "operator") as stub:

        async def one(number: int, name: str) -> None:
            async with turns:
                token = (await stub.InviteMember(pb.InviteMemberRequest(name=name, valid_seconds=36_000))).token
                # Looks like an enrolment that broke off after making its key, so `enrol` continues with this key.
                home = Home(running.home(name))
                home.prepare()
                pending = home.pending(JoinToken.parse(token).id)
                pending.path.mkdir(mode=0o700)
                durable_file(pending.key, made[number % len(made)])
                await enrol(home.path, token)
                (home.path / "policy.toml").write_text(POLICY)

        await asyncio.gather(*(one(number, name) for number, name in enumerate(names)))


def _job_file(folder: Path, members: int, values: int) -> str:
    """Return a job file of one of `_MODELS`, with two labels."""
    embedding, known, maps = _MODELS[values]
    words = folder / "words.txt"
    words.write_text("".join(f"w{number}\n" for number in range(known)))
    return (
        f'schema = 1\nname = "{_JOB}"\nlabels = ["no", "yes"]\n'
        f'[vocabulary]\nkind = "words"\nfile = "{words.name}"\n'
        f"[model]\nembedding = {embedding}\nwidths = [1]\nmaps = {maps}\n"
        f"[rounds]\ncount = 1\nmin_members = {members}\ntarget_members = {members}\nmax_attempts = 1\n"
        # All members share this machine's cores. A deadline only ends a round that fails.
        "[rounds.deadlines]\ntraining = 3000\n"
        + "".join(f"{phase} = 1800\n" for phase in ("advertise", "share", "mask", "confirm", "unmask"))
    )


def _cpu(processes: list[psutil.Process]) -> float:
    """Return the processor seconds so far."""
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))


def _spawn(running: Federation, module: str, names: list[str], *more: str) -> list[psutil.Process]:
    """Start the members in a few processes."""
    count = min(PROCESSES, math.ceil(len(names) / 10))
    started = []
    for number in range(count):
        homes = [running.home(name) for name in names[number::count]]
        words: list[str | Path] = [sys.executable, "-m", module, *homes]
        started.append(psutil.Process(running.spawn(f"members-{number}", [*words, *more])))
    return started


async def _ready(running: Federation, members: int) -> None:
    """Wait until `members` have a session.

    It asks the metrics, because a list of thousands of members would dominate the coordinator's memory.
    """
    page = f"http://127.0.0.1:{load_config(running.dir).metrics_port}/metrics"
    end = time.monotonic() + CELL_SECONDS
    while time.monotonic() < end:
        running.check()
        if await asyncio.to_thread(_connected, page) >= members:
            return
        await asyncio.sleep(0.5)
    raise MeasurementFailed(f"{members} members did not connect in {CELL_SECONDS:.0f} s")


def _connected(page: str) -> float:
    with urllib.request.urlopen(page) as answer:  # noqa: S310  on loopback
        text = answer.read().decode()
    found = re.search(r"^tacit_coordinator_members_connected (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def secure_round(members: int, values: int, served: Served = Served()) -> list[Figure]:
    """Measure one full secure round."""
    from export.bundle import read_job_bundle

    names = [f"member-{number:05}" for number in range(members)]
    with tempfile.TemporaryDirectory(prefix="tacit-bench-", ignore_cleanup_errors=True) as scratch:
        running = Federation(Path(scratch), POLICY)
        try:
            await running.serve()
            await enrol_all(running, names)
            # Restarted, because enrolment leaves traces in memory.
            running.end()
            coordinator = await served.start(running)
            processes = _spawn(running, "benchmarks.library.members", names, "--met")
            await _ready(running, members)
            connected = _resident(coordinator)
            await asyncio.to_thread(_bundle, running, members, values)
            peaks = [Peak(each.pid) for each in coordinator]
            before = _cpu(coordinator), _cpu(processes), _cpu(coordinator[:1])
            await asyncio.to_thread(_create, running)
            detail = await running.finished(_JOB, CELL_SECONDS)
            after = _cpu(coordinator), _cpu(processes), _cpu(coordinator[:1])
            # Not all at one moment: the sum is at least what they had together.
            highest = sum(each.highest() for each in peaks)
            summed = read_job_bundle(running.folder / f"bundle-{_JOB}").document.values
        finally:
            running.end()
    (round_,) = detail.rounds
    (attempt,) = round_.attempts
    if len(attempt.survivors) != members or summed != values:
        raise MeasurementFailed(f"the sum has {len(attempt.survivors)} of {members} members and {summed} values")
    seconds = (round_.ended_ms - round_.opened_ms) / 1000
    own, others = after[0] - before[0], after[1] - before[1]
    more = {
        "main_cpu_seconds": round(after[2] - before[2], 1),
        "members_cpu_seconds": round(others, 1),
        "members_cpu_seconds_each": round(others / members, 3),
    }
    return [
        Figure("round_seconds", round(seconds, 1), "s"),
        Figure("coordinator_cpu_seconds", round(own, 1), "s", more),
        Figure(
            "coordinator_peak_rss_bytes",
            highest,
            "B",
            {
                **({"target": ROUND_MEMORY} if members <= ROUNDS[0][0] else {}),
                "connected_bytes": connected,
                "method": peaks[0].method,
            },
        ),
    ]


def _resident(processes: list[psutil.Process]) -> int:
    return sum(int(each.memory_info().rss) for each in processes)


def _bundle(running: Federation, members: int, values: int) -> None:
    spec = running.folder / f"{_JOB}.toml"
    spec.write_text(_job_file(running.folder, members, values))
    running.command("coordinator", "job", "bundle", spec, "--out", running.folder / f"bundle-{_JOB}")


def _create(running: Federation) -> None:
    bundle = running.folder / f"bundle-{_JOB}"
    running.command("coordinator", "job", "create", "--bundle", bundle, "--operator", running.dir / "operator")


async def idle(sessions: int, served: Served = Served()) -> list[Figure]:
    """Measure idle sessions."""
    names = [f"member-{number:05}" for number in range(sessions)]
    with tempfile.TemporaryDirectory(prefix="tacit-bench-", ignore_cleanup_errors=True) as scratch:
        running = Federation(Path(scratch), POLICY)
        try:
            await running.serve()
            await enrol_all(running, names, _SHARED_KEYS)
            running.end()
            coordinator = await served.start(running)
            alone = _resident(coordinator)
            peaks = [Peak(each.pid) for each in coordinator]
            _spawn(running, "benchmarks.operations.idle_sessions", names)
            await _ready(running, sessions)
            held, highest = _resident(coordinator), sum(each.highest() for each in peaks)
            files = sum(each.num_fds() for each in coordinator)
        finally:
            running.end()
    more = {"target": IDLE_MEMORY, "alone_bytes": alone, "peak_bytes": highest, "open_files": files}
    return [
        Figure("coordinator_peak_rss_bytes", highest, "B", more),
        Figure("idle_session_bytes", round((held - alone) / sessions), "B", {"held_bytes": held}),
    ]


def _run(measured: Callable[[], Coroutine[Any, Any, list[Figure]]]) -> list[Figure]:
    return asyncio.run(measured())


def _commit(checkout: Path) -> str:
    """Return the short name of a checkout's commit, or nothing if it has none."""
    words = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Command line."""
    options = parser("operations.load")
    options.add_argument("cells", nargs="*", help="round, idle or vectors (default: all)")
    options.add_argument("--members", type=int, help="number of members (default: that of the target)")
    options.add_argument("--values", type=int, choices=sorted(_MODELS), help="values of a round (default: each target)")
    options.add_argument("--workers", type=int, nargs="+", default=[1], help="workers of the coordinator (default: 1)")
    options.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout to measure, too")
    chosen = options.parse_args()
    cells = chosen.cells or ["round", "idle", "vectors"]
    if wrong := set(cells) - {"round", "idle", "vectors"}:
        options.error(f"unknown cells: {', '.join(sorted(wrong))}; choose from round, idle and vectors")
    if chosen.members is not None and chosen.members < 2:
        options.error("--members: a round needs at least 2")
    if min(chosen.workers) < 1:
        options.error("--workers counts processes: at least 1")
    results = open_results(BENCH, quick=chosen.quick, revision=REVISION)
    rounds = [
        (chosen.members or (QUICK_MEMBERS if chosen.quick else members), values)
        for members, values in ROUNDS
        if chosen.values in (None, values)
    ]
    sessions = chosen.members or (QUICK_IDLE if chosen.quick else IDLE)
    few, large = (3, 100_000) if chosen.quick else (FEW, LARGE)
    beside, commit = chosen.beside and chosen.beside.resolve(), ""
    if beside:
        commit = _commit(beside)
        if not (commit and (beside / "benchmarks" / "operations" / "load.py").is_file()):
            options.error(f"--beside: {beside} is no checkout with this benchmark; make one with `git worktree add`")
        if chosen.values not in (None, ROUNDS[0][1]):
            options.error(f"--beside measures rounds of {ROUNDS[0][1]} values; leave out --values {chosen.values}")

    def cell(case: dict[str, Any], measured: Callable[[], list[Figure]]) -> None:
        if not results.done(case):
            results.open([])
            results.add(case, measured())

    def others(name: str, members: int, values: int) -> None:
        if beside:
            case = {"members": members, "values": values, "workers": 1, "coordinator": commit}
            cell(case, functools.partial(measured_by, beside, name, members, values))

    if "round" in cells:
        for members, values in rounds:
            for count in chosen.workers:
                measured = functools.partial(secure_round, members, values, Served(count))
                cell({"members": members, "values": values, "workers": count}, functools.partial(_run, measured))
            if values == ROUNDS[0][1]:
                others("round", members, values)
    if "idle" in cells:
        for count in chosen.workers:
            measured = functools.partial(idle, sessions, Served(count))
            cell({"members": sessions, "values": 0, "workers": count}, functools.partial(_run, measured))
        others("idle", sessions, 0)
    if "vectors" in cells:
        case = {"members": few, "values": large, "workers": 1}
        cell(case, functools.partial(_run, functools.partial(measure, few, large, 1)))


if __name__ == "__main__":
    main()
