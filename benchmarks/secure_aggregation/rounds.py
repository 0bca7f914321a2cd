"""What secure aggregation adds to a round: wall time over the services, against the same round in the clear.

Both sides are a coordinator and members in processes of their own, over mutual TLS; a round is from the moment the
coordinator opens it to the record of its new version, with fetching and uploading and without training. In the clear
(`clear`, `benchmarks.library.members --clear`) there are no keys, masks, confirmations and unmasking, and all else
is the same code. Connections are made before. All members share this machine's cores, so what they do side by side in a
real federation they do here in turns: the ratio here is an upper one.
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
    """Seconds of each round on one side; starts and ends that side's processes."""
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
    """Both sides, one after the other, with the same members."""
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        async with federation(Path(scratch), POLICY, member_names(members)) as running:
            clear = await side(running, members, values, rounds, clear=True)
            secure = await side(running, members, values, rounds, clear=False)
    ratio = statistics.median(secure) / statistics.median(clear)
    more = {"target": TARGET, "secure_seconds": secure, "clear_seconds": clear}
    return [Figure("secure_over_clear_round", round(ratio, 3), more=more)]
