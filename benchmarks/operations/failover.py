"""Runs rounds over two coordinators and lets one fail again and again.

Two coordinators share a PostgreSQL and a bucket (moto's server), as processes over mutual TLS, and members run the
rounds of one job. At moments drawn from a seed, after a number of lines of the log and a short delay, one of three
things happens to the active coordinator, in an order drawn from the seed:

    killed   SIGKILL; it is started again at once
    stopped  SIGSTOP: it hangs with its connections open; SIGCONT wakes it after the other one has gone on
    cut off  its network to the database carries nothing more, until it has ended

Sometimes the standby is killed instead. Before the next failure, both must run again. The figures are those of
`benchmarks.operations.soak`, computed from the vectors that the members recorded before they masked them, and:

    recovery_seconds      longest time from a failure to the next attempt that is opened
    late_acts             attempts and versions that a coordinator logged after it was woken or, if it was cut off,
                          after the other one's first attempt
"""

import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.library.federation import MeasurementFailed
from benchmarks.library.record import Figure, open_results, parser
from benchmarks.library.replicas import NAMES, Replicas, replicas
from benchmarks.library.untrained import member_names
from benchmarks.operations.soak import JOB, POLICY, TARGET_RECOVERY, Outcome, Siege, compare, job_file

__all__ = ["Failovers", "failover"]

BENCH = "failover"
ROUNDS, QUICK_ROUNDS = 50, 4
SEED = 1
MEMBERS, MIN = 4, 3
KINDS = ("killed", "stopped", "cut off")
# Lines of the log between the moment at which both run and the next failure. A round has about 12.
_LINES_BETWEEN = (1, 12)
# Longest delay in seconds between the line that was drawn and the failure.
_LATER = 0.08
# Lines of the log after which a stopped coordinator is woken.
_LINES_ASLEEP = (0, 12)
# Share of the failures that hit the standby.
_STANDBY = 0.1
_ACTS = ("attempt_opened", "version")


@dataclass
class Failovers(Outcome):
    """The findings: those of a soak, and the seconds of each failover by its kind."""

    recoveries: list[tuple[str, float]] = field(default_factory=list)
    standby_kills: int = 0
    late_acts: int = 0
    # How often a coordinator ended that nobody had hit.
    restarts: int = 0
    # Processes that ran or waited for a processor, at each failure.
    loads: list[float] = field(default_factory=list)


class _Siege(Siege):
    """The failures."""

    def __init__(self, running: Replicas, names: list[str], chance: random.Random) -> None:
        super().__init__(running, names, chance, NAMES)
        self.replicas = running
        self.found = self.outcome = Failovers()
        self._kinds: list[str] = []

    async def fail_over_and_over(self) -> None:
        """Let coordinators fail until the job is finished."""
        while await self.until(self.chance.randint(*_LINES_BETWEEN)):
            await asyncio.sleep(self.chance.uniform(0, _LATER))
            if not await self._fail():
                return

    async def _fail(self) -> bool:
        active = self.active
        (standby,) = set(NAMES) - {active}
        if self.chance.random() < _STANDBY:
            self.found.standby_kills += 1
            self.replicas.kill(standby)
            return await self._again(standby)
        if not self._kinds:
            self._kinds = self.chance.sample(KINDS, len(KINDS))
        kind = self._kinds.pop()
        self.found.loads.append(os.getloadavg()[0])
        began = time.monotonic()
        match kind:
            case "killed":
                self.replicas.kill(active)
            case "stopped":
                self.replicas.signal(active, signal.SIGSTOP)
            case "cut off":
                self.replicas.networks[active].stall()
                self.replicas.let_end(active)
        self.outcome.coordinator_kills += 1
        # What it said before does not count as said after.
        if not await self.until(-len(self.log.lines)):
            return False
        since = len(self.log.lines)
        if kind == "killed":
            self.replicas.run(active)
        # A coordinator that was killed may have its lease again before the other one takes it.
        if not await self.until(0, "attempt_opened", of=NAMES if kind == "killed" else (standby,)):
            return False
        self.found.recoveries.append((kind, round(time.monotonic() - began, 2)))
        print(f"{len(self.found.recoveries)}: {kind}, {self.found.recoveries[-1][1]} s", file=sys.stderr, flush=True)
        return await self.up(active, since) if kind == "killed" else await self._wake(active, kind)

    async def _wake(self, name: str, kind: str) -> bool:
        """Let a coordinator that was stopped or cut off go on, and start it again when it has ended."""
        goes_on = await self.until(self.chance.randint(*_LINES_ASLEEP))
        before = len(self.log.lines)
        if kind == "stopped":
            self.replicas.let_end(name)
            self.replicas.signal(name, signal.SIGCONT)
        code = await self.replicas.ended(name)
        if code != 1:
            raise MeasurementFailed(f"{name} was {kind} and ended with {code}, not with 1")
        self.replicas.networks[name].release()
        goes_on = goes_on and await self.until(-len(self.log.lines))
        late = [line for line in self.log.lines[before:] if line["of"] == name]
        self.found.late_acts += sum(line.get("event") in _ACTS for line in late)
        return goes_on and await self._again(name)

    async def _again(self, name: str) -> bool:
        since = len(self.log.lines)
        self.replicas.run(name)
        return await self.up(name, since)


async def failover(folder: Path, rounds: int, seed: int) -> Failovers:
    """Run one job of `rounds` rounds in this folder.

    Raises:
        MeasurementFailed: the job did not finish by itself, or a coordinator ended in an unexpected way.
    """
    names = member_names(MEMBERS)
    began = time.monotonic()
    with replicas(folder, POLICY) as running:
        siege = _Siege(running, names, random.Random(seed))
        for name, event in zip(NAMES, ("serving", "standing_by"), strict=True):
            running.run(name)
            await siege.until(0, event, of=(name,))
        await running.enrol(names)
        for name in names:
            siege.start(name)
        await running.connected(MEMBERS)
        text = job_file(folder, rounds, MEMBERS, MIN)
        await asyncio.to_thread(running.create_job, JOB, text)
        await siege.fail_over_and_over()
        siege.log.read()
        detail = await running.show(JOB)
        versions = {number: data async for number, data in running.versions(detail)}
    outcome = siege.found
    outcome.seconds, outcome.restarts = time.monotonic() - began, running.restarts
    compare(outcome, folder, detail, versions, siege.log.lines)
    return outcome


def figures(outcome: Failovers) -> list[Figure]:
    """Return the findings as figures."""
    more = {
        "attempts": outcome.attempts,
        "failovers": len(outcome.recoveries),
        "standby_kills": outcome.standby_kills,
        "restarts": outcome.restarts,
        "receipts": outcome.receipts,
        "seconds": round(outcome.seconds, 1),
        # The machine is shared with other work.
        "load": round(statistics.median(outcome.loads), 1) if outcome.loads else 0.0,
    }
    found = [
        Figure("rounds", outcome.rounds, more=more),
        Figure("lost_versions", outcome.lost_versions, more={"target": 0}),
        Figure("double_counts", outcome.double_counts, more={"target": 0}),
        Figure("parameter_difference", outcome.parameter_difference, more={"target": 0}),
        Figure("late_acts", outcome.late_acts, more={"target": 0}),
    ]
    for kind in (None, *KINDS):
        seconds = [each for of, each in outcome.recoveries if kind in (None, of)]
        if seconds:
            name = "recovery_seconds" if kind is None else f"recovery_seconds_{kind.replace(' ', '_')}"
            beside = {"target": TARGET_RECOVERY, "median": round(statistics.median(seconds), 2), "values": seconds}
            found.append(Figure(name, max(seconds), "s", beside))
    return found


def main() -> None:
    """Command line."""
    options = parser("operations.failover")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--seed", type=int, default=SEED)
    chosen = options.parse_args()
    if chosen.rounds < 1:
        options.error("--rounds: at least 1")
    results = open_results(BENCH, quick=chosen.quick)
    case = {"replicas": len(NAMES), "database": "postgresql", "store": "s3", "members": MEMBERS}
    if not results.done(case, chosen.seed):
        results.open([chosen.seed])
        rounds = QUICK_ROUNDS if chosen.quick else chosen.rounds
        with tempfile.TemporaryDirectory(prefix="tacit-bench-", ignore_cleanup_errors=True) as scratch:
            outcome = asyncio.run(failover(Path(scratch), rounds, chosen.seed))
        results.add(case, figures(outcome), seed=chosen.seed)


if __name__ == "__main__":
    main()
