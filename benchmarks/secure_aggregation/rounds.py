"""Measures what secure aggregation adds to a round: wall time over the services, beside the same round in the clear.

On both sides the coordinator and the members are processes, over mutual TLS. A round lasts from the moment the
coordinator opens it to the record of its new version, with downloads and uploads and without training. The side in the
clear (`clear`, `benchmarks.library.members --clear`) has no keys, masks, confirmations or unmasking; the rest is the
same code. Connections are open before. All members share this machine's cores, so they do in turns what they do in
parallel in a real federation. The ratio is therefore an upper bound. A second ratio takes the members' own processor
time out: from each round's wall time, the members' processor time in it divided by the number of cores.
"""

import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.library.federation import BIN, Federation, federation
from benchmarks.library.processor import ProcessorClock
from benchmarks.library.record import Figure
from benchmarks.library.untrained import POLICY, job_file, member_names, round_seconds, start_members

__all__ = ["compare"]

PROCESSES = 5
# Of the wall time, and with the members' processor time taken out.
TARGET, TARGET_WITHOUT_MEMBERS = 1.10, 1.15
SIDE_SECONDS = 1200.0


async def side(
    running: Federation, members: int, values: int, rounds: int, *, clear: bool
) -> tuple[list[float], list[float]]:
    """Start one side's processes, measure it, and end them.

    Returns:
        The seconds of each round but the first, and the members' processor seconds in them.
    """
    kind = "clear" if clear else "secure"
    serve = [sys.executable, "-m", "benchmarks.secure_aggregation.clear"] if clear else [BIN / "coordinator", "serve"]
    running.end()
    await running.serve([*serve, "--dir", running.dir])
    started = start_members(running, member_names(members), min(PROCESSES, members), clear=clear)
    await running.connected(members)
    specification = job_file(running.folder, kind, members=members, rounds=rounds, values=values)
    with ProcessorClock([running.process(name) for name in started]) as clock:
        await asyncio.to_thread(running.create_job, kind, specification)
        detail = await running.finished(kind, SIDE_SECONDS)
    running.end(*started)
    seconds = round_seconds(detail, members, values, running.folder / f"bundle-{kind}")
    return seconds, [clock.between(each.opened_ms / 1000, each.ended_ms / 1000) for each in detail.rounds[1:]]


async def compare(members: int, values: int, rounds: int) -> list[Figure]:
    """Measure both sides, one after the other, with the same members."""
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with federation(Path(scratch), POLICY, member_names(members)) as running:
            clear, clear_cpu = await side(running, members, values, rounds, clear=True)
            secure, secure_cpu = await side(running, members, values, rounds, clear=False)
    cores = len(os.sched_getaffinity(0))
    ratio = statistics.median(secure) / statistics.median(clear)
    left = statistics.median(_without(secure, secure_cpu, cores)) / statistics.median(_without(clear, clear_cpu, cores))
    measured = {"secure_seconds": secure, "clear_seconds": clear}
    cpu = {"secure_members_cpu": _rounded(secure_cpu), "clear_members_cpu": _rounded(clear_cpu)}
    return [
        Figure("secure_over_clear_round", round(ratio, 3), more={"target": TARGET, **measured}),
        Figure(
            "secure_over_clear_without_members",
            round(left, 3),
            more={"target": TARGET_WITHOUT_MEMBERS, **measured, **cpu, "cores": cores},
        ),
    ]


def _without(seconds: list[float], cpu: list[float], cores: int) -> list[float]:
    """Return each round's wall time less the members' share of all cores."""
    return [wall - own / cores for wall, own in zip(seconds, cpu, strict=True)]


def _rounded(seconds: list[float]) -> list[float]:
    return [round(each, 3) for each in seconds]
