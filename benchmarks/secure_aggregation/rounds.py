"""Measures what secure aggregation adds to a round: wall time over the services, beside the same round in the clear.

On both sides the coordinator and the members are processes, over mutual TLS. A round lasts from the moment the
coordinator opens it to the record of its new version, with downloads and uploads and without training. The side in the
clear (`clear`, `benchmarks.library.members --clear`) has no keys, masks, confirmations or unmasking; the rest is the
same code. Connections are open before. All members share this machine's cores, so they do in turns what they do in
parallel in a real federation. The ratio is therefore an upper bound.
"""

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.library.federation import BIN, Federation, federation
from benchmarks.library.record import Figure
from benchmarks.library.untrained import POLICY, job_file, member_names, round_seconds, start_members

__all__ = ["compare"]

PROCESSES = 5
TARGET = 1.10
SIDE_SECONDS = 1200.0


async def side(running: Federation, members: int, values: int, rounds: int, *, clear: bool) -> list[float]:
    """Return the seconds of each round on one side, and start and end that side's processes."""
    kind = "clear" if clear else "secure"
    serve = [sys.executable, "-m", "benchmarks.secure_aggregation.clear"] if clear else [BIN / "coordinator", "serve"]
    running.end()
    await running.serve([*serve, "--dir", running.dir])
    started = start_members(running, member_names(members), min(PROCESSES, members), clear=clear)
    await running.connected(members)
    specification = job_file(running.folder, kind, members=members, rounds=rounds, values=values)
    await asyncio.to_thread(running.create_job, kind, specification)
    detail = await running.finished(kind, SIDE_SECONDS)
    running.end(*started)
    return round_seconds(detail, members, values, running.folder / f"bundle-{kind}")


async def compare(members: int, values: int, rounds: int) -> list[Figure]:
    """Measure both sides, one after the other, with the same members."""
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with federation(Path(scratch), POLICY, member_names(members)) as running:
            clear = await side(running, members, values, rounds, clear=True)
            secure = await side(running, members, values, rounds, clear=False)
    ratio = statistics.median(secure) / statistics.median(clear)
    more = {"target": TARGET, "secure_seconds": secure, "clear_seconds": clear}
    return [Figure("secure_over_clear_round", round(ratio, 3), more=more)]
