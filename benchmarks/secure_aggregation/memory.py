"""Measures the coordinator's peak memory in a round.

Idle is the coordinator with all members connected, after the same members have finished a small job: it includes the
memory of code and connections, but no vector. The peak is the highest resident size from then to the end of the job's
last round, as recorded by the kernel (or sampled, if the kernel records none). It must not grow with the number of
members: masked vectors wait on the disk, and only one sum is in memory.
"""

import asyncio
import tempfile
import threading
from pathlib import Path

import psutil

from benchmarks.library.federation import Federation, federation
from benchmarks.library.record import Figure, open_results, parser
from benchmarks.library.untrained import POLICY, job_file, member_names, round_seconds, start_members
from tacit.v1 import operator_pb2 as pb

BENCH = "aggregation_memory"

VALUES = 1_000_000
MEMBERS = (5, 50)
ROUNDS = 3
WARM_UP_VALUES = 10_000
PROCESSES = 5
TARGET = 4.0
CELL_SECONDS = 1200.0
_SAMPLE_SECONDS = 0.01


class Peak:
    """The highest resident size of a process from now on."""

    def __init__(self, process: int) -> None:
        self._process = psutil.Process(process)
        self._folder = Path(f"/proc/{process}")
        self._stop = threading.Event()
        self.idle = self._now()
        self._highest = self.idle
        try:
            # Resets the kernel's peak (proc(5)), because a higher one from importing would hide that of a round.
            (self._folder / "clear_refs").write_text("5")
            self.method = "kernel"
        except OSError:
            self.method = "sampled"
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()

    def _now(self) -> int:
        return int(self._process.memory_info().rss)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._highest = max(self._highest, self._now())

    def highest(self) -> int:
        """Return the peak in bytes, and end the sampling."""
        self._stop.set()
        if self.method == "sampled":
            return self._highest
        lines = (self._folder / "status").read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return 1024 * int(kilobytes)


async def run_job(running: Federation, name: str, members: int, rounds: int, values: int) -> pb.JobDetail:
    """Run a job from its creation to its end."""
    specification = job_file(running.folder, name, members=members, rounds=rounds, values=values)
    await asyncio.to_thread(running.create_job, name, specification)
    return await running.finished(name, CELL_SECONDS)


async def measure(members: int, values: int, rounds: int) -> list[Figure]:
    """Measure a few rounds of one federation."""
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with federation(Path(scratch), POLICY, member_names(members)) as running:
            # Restarted, because enrolment leaves traces in memory.
            running.end()
            process = await running.serve()
            start_members(running, member_names(members), min(PROCESSES, members))
            await running.connected(members)
            await run_job(running, "warm-up", members, rounds, WARM_UP_VALUES)
            peak = Peak(process)
            detail = await run_job(running, "memory", members, rounds, values)
            highest = peak.highest()
            round_seconds(detail, members, values, running.folder / "bundle-memory")
    vectors = (highest - peak.idle) / (4 * values)
    more = {"target": TARGET, "idle_bytes": peak.idle, "peak_bytes": highest, "method": peak.method, "rounds": rounds}
    return [Figure("peak_vectors", round(vectors, 2), "vectors", more)]


def main() -> None:
    """Command line."""
    options = parser("secure_aggregation.memory")
    options.add_argument("--members", type=int, nargs="*", default=MEMBERS)
    chosen = options.parse_args()
    results = open_results(BENCH, quick=chosen.quick)
    values = 100_000 if chosen.quick else VALUES
    for members in (3,) if chosen.quick else chosen.members:
        case = {"members": members, "values": values}
        if not results.done(case):
            results.open([])
            results.add(case, asyncio.run(measure(members, values, ROUNDS)))


if __name__ == "__main__":
    main()
