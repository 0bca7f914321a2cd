"""Runs rounds with random kills and checks every version and receipt.

A coordinator and members run the rounds of one job, as processes over mutual TLS. They are killed (SIGKILL) one at a
time, at moments drawn from a seed: after a number of lines of the coordinator's log and a short delay, so that kills
hit every phase. The coordinator is started again at once, a member after a while.

Members record their vector in each attempt before they mask it (`soak_member`). At the end every version is computed
again from these records, for the attempts and survivors that the coordinator recorded, and compared:

    lost_versions         versions that were announced (in the log, or to a member that has a receipt of it) and are
                          missing at the end, or differ from what was announced
    double_counts         published attempts whose version does not follow, to the last bit, from the version before and
                          the sum of its survivors' vectors, each counted once
    parameter_difference  largest difference of a coordinate between the final version and the one computed again
    recovery_seconds      longest time from a kill of the coordinator to the next open attempt; this includes its start
                          and the members' return until they say Ready

With `--replicas 2` two coordinators share a PostgreSQL and a bucket (moto's server). In place of the one coordinator,
the active one is killed, and at every third of its turns it is told to stop (SIGTERM), as in a rolling restart. The
other one takes over, and the first is started again as the standby. `recovery_seconds` then counts from either.

The members' policies allow any number of attempts a version, and sums that differ in few members. Both limits protect
members from a coordinator that fails on purpose, and this one is made to fail.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.federation import BIN, Federation, MeasurementFailed
from benchmarks.library.record import Figure, open_results, parser
from benchmarks.library.replicas import NAMES, Replicas, replicas
from benchmarks.library.untrained import member_names
from benchmarks.operations.soak_member import record_of
from coordinator.rounds.publish import next_version
from tacit.attempt import AttemptId
from tacit.job import JobDocument
from tacit.v1 import operator_pb2 as pb
from tacit.vector import layout_of

__all__ = ["JOB", "MEMBERS", "POLICY", "Log", "Outcome", "Siege", "compare", "job_file", "soak"]

BENCH = "soak"
JOB = "soak"
POLICY = 'schema = 1\nmechanisms = ["none"]\nallow_second_sum = true\n'

ROUNDS, QUICK_ROUNDS = 200, 6
MEMBERS, MIN = 6, 4
SEED = 1
TARGET_RECOVERY = 10.0
CELL_SECONDS = 3600.0
# Lines of the coordinator's log between two kills, and between a member's kill and its restart. A round has about 12.
_LINES_BETWEEN, _LINES_AWAY = (6, 48), (0, 36)
# Longest delay in seconds between the line that was drawn and the kill. A phase takes a few milliseconds.
_LATER = 0.08
# Share of the kills that hit the coordinator.
_COORDINATOR = 0.3
_LOOK = 0.01
# Of two coordinators, the active one is told to stop at every so many of its turns, and killed at the others.
_HANDOVER_EVERY = 3


@dataclass
class Outcome:
    """The findings of a soak."""

    rounds: int = 0
    lost_versions: int = 0
    double_counts: int = 0
    parameter_difference: float = 0.0
    recovery_seconds: list[float] = field(default_factory=list)
    coordinator_kills: int = 0
    # Coordinators that were told to stop.
    handovers: int = 0
    member_kills: int = 0
    attempts: int = 0
    receipts: int = 0
    seconds: float = 0.0


class Log:
    """The growing logs of coordinators, each over all its processes."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._paths = {name: folder / f"{name}.log" for name in names}
        self._at = dict.fromkeys(names, 0)
        self._rest = dict.fromkeys(names, b"")
        self.lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the new lines, each with the log's name as `of`. A line that a kill cut short does not count."""
        found = []
        for name, path in self._paths.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._at[name])
                data = self._rest[name] + file.read()
                self._at[name] = file.tell()
            *whole, self._rest[name] = data.split(b"\n")
            for line in whole:
                with contextlib.suppress(ValueError):
                    found.append({**json.loads(line), "of": name})
        self.lines += found
        return found


class Siege:
    """The processes of a soak, and the kills."""

    def __init__(
        self, running: Federation, names: list[str], chance: random.Random, logs: Sequence[str] = ("coordinator",)
    ) -> None:
        self.running, self.names, self.chance = running, names, chance
        self.log = Log(running.folder, *logs)
        self.outcome = Outcome()
        # Killed members, and the number of log lines at which each is started again.
        self.away: dict[str, int] = {}

    @property
    def active(self) -> str:
        """The coordinator that began to serve last."""
        return str(next(line["of"] for line in reversed(self.log.lines) if line.get("event") == "serving"))

    async def up(self, name: str, since: int) -> bool:
        """Wait until a coordinator serves or stands by after line `since`. Returns False once the job is finished."""
        while not any(
            line["of"] == name and line.get("event") in ("serving", "standing_by") for line in self.log.lines[since:]
        ):
            if not await self.until(1):
                return False
        return True

    def start(self, name: str) -> None:
        """Start a member."""
        records = self.running.folder / f"records-{name}"
        records.mkdir(exist_ok=True)
        words: list[str | Path] = [
            sys.executable,
            "-m",
            "benchmarks.operations.soak_member",
            self.running.home(name),
            records,
        ]
        self.running.spawn(name, words)

    def serve(self) -> None:
        self.running.spawn(
            "coordinator", [BIN / "coordinator", "serve", "--dir", self.running.dir, "--log-format=json"]
        )

    async def until(self, lines: int, *events: str, of: Sequence[str] = ()) -> bool:
        """Wait for `lines` more lines of the log, or for a line of one of `events` if any are given.

        Meanwhile, killed members are started again when they are due. Returns False once the job is finished. Raises:
        MeasurementFailed.

        Args:
            of: logs whose lines count as one of `events`; empty means all.
        """
        target, end = len(self.log.lines) + lines, time.monotonic() + CELL_SECONDS
        while time.monotonic() < end:
            self.running.check()
            fresh = self.log.read()
            for name in [name for name, due in self.away.items() if due <= len(self.log.lines)]:
                del self.away[name]
                self.start(name)
            for line in fresh:
                if line.get("event") == "status" and line.get("status") != "running":
                    if line["status"] != "finished":
                        raise MeasurementFailed(f"the job is {line['status']}: {line.get('reason')}")
                    return False
                if line.get("event") == "job_failed":
                    raise MeasurementFailed(f"the job failed: {line}")
            told = (line for line in fresh if not of or line["of"] in of)
            if any(line.get("event") in events for line in told) or (not events and len(self.log.lines) >= target):
                return True
            await asyncio.sleep(_LOOK)
        raise MeasurementFailed(f"nothing happened for {CELL_SECONDS:.0f} s")

    async def besiege(self, max_kills: int | None) -> None:
        """Kill processes until the job is finished, or `max_kills` times."""
        chance, kills = self.chance, 0
        while max_kills is None or kills < max_kills:
            if not await self.until(chance.randint(*_LINES_BETWEEN)):
                return
            await asyncio.sleep(chance.uniform(0, _LATER))
            kills += 1
            # In a short soak the first kill hits the coordinator, so that it restarts at least once.
            if chance.random() < _COORDINATOR or (max_kills is not None and kills == 1):
                if not await self._kill_coordinator():
                    return
            else:
                self._kill_member()
        while await self.until(1):
            pass

    async def _kill_coordinator(self) -> bool:
        self.outcome.coordinator_kills += 1
        began = time.monotonic()
        self.running.kill("coordinator")
        # Skips the killed process's lines, which must not count as the next one's.
        self.log.read()
        self.serve()
        went_on = await self.until(0, "attempt_opened")
        if went_on:
            self.outcome.recovery_seconds.append(time.monotonic() - began)
        return went_on

    def _kill_member(self) -> None:
        here = [name for name in self.names if name not in self.away]
        if len(here) <= MIN:
            return
        name = self.chance.choice(here)
        self.outcome.member_kills += 1
        self.running.kill(name)
        self.away[name] = len(self.log.lines) + self.chance.randint(*_LINES_AWAY)


def job_file(folder: Path, rounds: int, members: int = MEMBERS, fewest: int = MIN) -> str:
    """Return the text of a soak's job file, and write its word list into `folder`."""
    words = folder / "words.txt"
    words.write_text("".join(f"w{number}\n" for number in range(500)))
    return (
        f'schema = 1\nname = "{JOB}"\nlabels = ["no", "yes"]\n'
        f'[vocabulary]\nkind = "words"\nfile = "{words.name}"\n'
        "[model]\nembedding = 16\nwidths = [2]\nmaps = 8\n"
        f"[rounds]\ncount = {rounds}\nmin_members = {fewest}\ntarget_members = {members}\nmax_attempts = 100\n"
        "max_failed_rounds = 1000\n[rounds.deadlines]\ntraining = 30\nreconnect = 1\n"
    )


class _SiegeOfReplicas(Siege):
    """A siege of two coordinators, of which one is active."""

    running: Replicas

    def __init__(self, running: Replicas, names: list[str], chance: random.Random) -> None:
        super().__init__(running, names, chance, NAMES)

    async def begin(self) -> None:
        """Start both."""
        for name, event in zip(NAMES, ("serving", "standing_by"), strict=True):
            self.running.run(name)
            await self.until(0, event, of=(name,))

    async def _kill_coordinator(self) -> bool:
        turn = self.outcome.coordinator_kills + self.outcome.handovers + 1
        active = self.active
        began = time.monotonic()
        if turn % _HANDOVER_EVERY == 0:
            self.outcome.handovers += 1
            self.running.let_end(active)
            self.running.signal(active, signal.SIGTERM)
            if (code := await self.running.ended(active)) != 0:
                raise MeasurementFailed(f"{active} was told to stop and ended with {code}")
        else:
            self.outcome.coordinator_kills += 1
            self.running.kill(active)
        # Skips its last lines, which must not count as the next one's.
        if not await self.until(-len(self.log.lines)):
            return False
        since = len(self.log.lines)
        self.running.run(active)
        if not await self.until(0, "attempt_opened"):
            return False
        self.outcome.recovery_seconds.append(time.monotonic() - began)
        return await self.up(active, since)


async def soak_of_replicas(folder: Path, rounds: int, seed: int, max_kills: int | None = None) -> Outcome:
    """Run one soak of two coordinators in this folder. See `soak`."""
    names = member_names(MEMBERS)
    began = time.monotonic()
    with replicas(folder, POLICY) as running:
        siege = _SiegeOfReplicas(running, names, random.Random(seed))
        await siege.begin()
        await running.enrol(names)
        detail, versions = await _besieged(siege, folder, rounds, max_kills)
    return _compared(siege, folder, began, detail, versions)


async def soak(folder: Path, rounds: int, seed: int, max_kills: int | None = None) -> Outcome:
    """Run one soak in this folder, on the database of `TACIT_DATABASE_URL`, or else on SQLite.

    Args:
        max_kills: largest number of kills; None kills until the job is finished.

    Raises:
        MeasurementFailed: the job did not finish by itself.
    """
    names = member_names(MEMBERS)
    running = Federation(folder, POLICY)
    began = time.monotonic()
    try:
        await running.serve([BIN / "coordinator", "serve", "--dir", running.dir, "--log-format=json"])
        await running.enrol(names)
        siege = Siege(running, names, random.Random(seed))
        detail, versions = await _besieged(siege, folder, rounds, max_kills)
    finally:
        running.end()
    return _compared(siege, folder, began, detail, versions)


async def _besieged(
    siege: Siege, folder: Path, rounds: int, max_kills: int | None
) -> tuple[pb.JobDetail, dict[int, bytes]]:
    running = siege.running
    for name in siege.names:
        siege.start(name)
    await running.connected(MEMBERS)
    await asyncio.to_thread(running.create_job, JOB, job_file(folder, rounds))
    await siege.besiege(max_kills)
    siege.log.read()
    detail = await running.show(JOB)
    return detail, {number: data async for number, data in running.versions(detail)}


def _compared(siege: Siege, folder: Path, began: float, detail: pb.JobDetail, versions: dict[int, bytes]) -> Outcome:
    outcome = siege.outcome
    outcome.seconds = time.monotonic() - began
    compare(outcome, folder, detail, versions, siege.log.lines)
    return outcome


def compare(
    outcome: Outcome, folder: Path, detail: pb.JobDetail, versions: dict[int, bytes], log: list[dict[str, Any]]
) -> None:
    """Compute every version again, and write the findings to `outcome`."""
    from export.bundle import read_job_bundle

    job = read_job_bundle(folder / f"bundle-{JOB}").document
    published = [
        (each.number, attempt) for each in detail.rounds for attempt in each.attempts if attempt.outcome == "published"
    ]
    outcome.rounds = len(versions) - 1
    outcome.attempts = sum(len(each.attempts) for each in detail.rounds)
    outcome.lost_versions = _lost(outcome, folder, detail, published, log)
    # A round that was published twice has counted its members twice.
    outcome.double_counts = len(published) - len({number for number, _ in published})
    values = np.frombuffer(versions[0], dtype="<f4")
    for number, (round_, attempt) in enumerate(published, 1):
        values = _again(job, folder, round_, attempt, values)
        found = np.frombuffer(versions[number], dtype="<f4")
        outcome.double_counts += not np.array_equal(values, found)
        outcome.parameter_difference = float(np.abs(values.astype(np.float64) - found).max())


def _again(
    job: JobDocument, folder: Path, round_: int, attempt: pb.Attempt, base: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the version that follows from the survivors' vectors, each counted once."""
    layout = layout_of(job, len(attempt.cohort))
    total = np.zeros(layout.values, dtype=np.uint32)
    for name in attempt.survivors:
        path = record_of(folder / f"records-{name}", AttemptId(job.name, round_, attempt.number))
        total += np.load(path, allow_pickle=False)
    total &= np.uint32((1 << layout.bits) - 1)
    return next_version(job, len(attempt.cohort), len(attempt.survivors), total, base).values


def _lost(
    outcome: Outcome,
    folder: Path,
    detail: pb.JobDetail,
    published: list[tuple[int, pb.Attempt]],
    log: list[dict[str, Any]],
) -> int:
    """Count announced versions that are missing or differ."""
    digests = {version.number: version.digest.hex() for version in detail.versions}
    missing = set(range(len(published) + 1)) ^ digests.keys()
    told = {(line["number"], line["digest"]) for line in log if line.get("event") == "version"}
    lost = missing | {number for number, digest in told if digests.get(number) != digest}
    results = {(round_, attempt.number): attempt for round_, attempt in published}
    for path in folder.glob(f"home-*/receipts/{JOB}/*.json"):
        receipt = json.loads(path.read_text())
        if receipt["outcome"] != "published":
            continue
        outcome.receipts += 1
        attempt = results.get((receipt["round"], receipt["attempt"]))
        right = attempt is not None and (
            receipt["result"] == attempt.result.hex() and receipt["survivors"] == sorted(attempt.survivors)
        )
        if not right:
            lost.add(-receipt["attempt"])
    return len(lost)


def figures(outcome: Outcome) -> list[Figure]:
    """Return the findings as figures."""
    more = {
        "attempts": outcome.attempts,
        "coordinator_kills": outcome.coordinator_kills,
        **({"handovers": outcome.handovers} if outcome.handovers else {}),
        "member_kills": outcome.member_kills,
        "receipts": outcome.receipts,
        "seconds": round(outcome.seconds, 1),
    }
    recovery = [round(each, 2) for each in outcome.recovery_seconds]
    found = [
        Figure("rounds", outcome.rounds, more=more),
        Figure("lost_versions", outcome.lost_versions, more={"target": 0}),
        Figure("double_counts", outcome.double_counts, more={"target": 0}),
        Figure("parameter_difference", outcome.parameter_difference, more={"target": 0}),
    ]
    if recovery:
        middle = {"target": TARGET_RECOVERY, "median": statistics.median(recovery), "values": recovery}
        found.append(Figure("recovery_seconds", max(recovery), "s", middle))
    return found


def main() -> None:
    """Command line."""
    options = parser("operations.soak")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--seed", type=int, default=SEED)
    options.add_argument("--database-url", help="URL of an empty PostgreSQL database (default: SQLite)")
    options.add_argument("--replicas", type=int, choices=(1, len(NAMES)), default=1)
    chosen = options.parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    if chosen.database_url:
        os.environ["TACIT_DATABASE_URL"] = chosen.database_url
    case: dict[str, Any] = {"database": (chosen.database_url or "sqlite").split("+")[0].split(":")[0]}
    several = chosen.replicas > 1
    if several:
        case = {"database": "postgresql", "store": "s3", "replicas": chosen.replicas}
    if not results.done(case, chosen.seed):
        results.open([chosen.seed])
        rounds = QUICK_ROUNDS if chosen.quick else chosen.rounds
        with tempfile.TemporaryDirectory(prefix="tacit-bench-", ignore_cleanup_errors=True) as scratch:
            run = soak_of_replicas if several else soak
            outcome = asyncio.run(run(Path(scratch), rounds, chosen.seed, 2 if chosen.quick else None))
        results.add(case, figures(outcome), seed=chosen.seed)


if __name__ == "__main__":
    main()
