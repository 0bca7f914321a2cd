"""A member of a soak: a real one that trains nothing, and writes down what it gives to each attempt.

    python -m benchmarks.operations.soak_member HOME RECORDS

Its update follows from its name and the version, so no two rounds and no two members give the same. Before a vector is
masked, RECORDS/JOB.ROUND.ATTEMPT.npy holds it as it was rounded to the ring: what a sum must be made of is known from
here, and not from what was sent.
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
    """Of this member in this round, float32 (values,); members differ in their weights as well."""
    return replace(synthetic_update(f"{member}/{round_}", values), examples=50 + sum(member.encode()) % 50)


def record_of(records: Path, attempt: AttemptId) -> Path:
    """The file of what was given to an attempt."""
    return records / f"{attempt.job}.{attempt.round}.{attempt.attempt}.npy"


class _Recorder(LogWatcher):
    def __init__(self, records: Path) -> None:
        super().__init__()
        self._records = records

    def encoded(self, attempt: AttemptId, vector: NDArray[np.uint32]) -> None:
        """Under its name only when it is whole: a kill must not leave half of it."""
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
    parser.add_argument("home", type=Path, help="the member's folder, enrolled")
    parser.add_argument("records", type=Path, help="the file for what it gives to each attempt")
    options = parser.parse_args()
    configure("json", "info")
    asyncio.run(_run(options.home, options.records))
    # Threads of a transfer that was cut off need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
