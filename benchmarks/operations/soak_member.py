"""Runs a member of a soak: a real one that trains nothing and records its vector in each attempt.

    python -m benchmarks.operations.soak_member HOME RECORDS

Its update follows from its name and the version, so it differs between rounds and members. Before a vector is masked,
it is written to RECORDS/JOB.ROUND.ATTEMPT.npy as it was encoded into the ring. So the inputs of a sum are known
independently of what was sent.
"""

import argparse
import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.members import run_member, synthetic_update
from edge_client.agent.watching import LogWatcher
from learning.mechanisms.contribution import Update
from tacit.attempt import AttemptId
from toolkit.logs import configure

__all__ = ["main", "record_of", "update_of"]


def update_of(member: str, round_: int, values: int) -> Update:
    """Return a member's update in a round, float32 (values,). Members differ in their weights too."""
    return replace(synthetic_update(f"{member}/{round_}", values), examples=50 + sum(member.encode()) % 50)


def record_of(records: Path, attempt: AttemptId) -> Path:
    """Return the file of a member's vector in an attempt."""
    return records / f"{attempt.job}.{attempt.round}.{attempt.attempt}.npy"


class _Recorder(LogWatcher):
    def __init__(self, records: Path) -> None:
        super().__init__()
        self._records = records

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """Write the vector atomically, so that a kill leaves no partial file."""
        path = record_of(self._records, attempt)
        fresh = path.with_suffix(".new")
        with fresh.open("wb") as file:
            np.save(file, vector)
        fresh.replace(path)


async def _run(home: Path, records: Path) -> None:
    task = asyncio.ensure_future(run_member(home, watcher=_Recorder(records), synthetic=update_of))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> None:
    """Command line: runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations.soak_member", description=__doc__)
    parser.add_argument("home", type=Path, help="folder of the enrolled member")
    parser.add_argument("records", type=Path, help="folder for its vectors")
    options = parser.parse_args()
    configure("json", "info")
    asyncio.run(_run(options.home, options.records))
    # Does not wait for threads of an interrupted transfer.
    os._exit(0)


if __name__ == "__main__":
    main()
