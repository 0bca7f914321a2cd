"""Rounds without training: a job of exactly so many values, and members held several to a process.

Guarantees: the job is made, checked and run as any other; its model is never built by a member, so that a round costs
what transport and aggregation cost.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.library.federation import Federation, MeasurementFailed
from tacit.v1 import operator_pb2 as pb

__all__ = ["POLICY", "job_file", "member_names", "round_seconds", "start_members"]

POLICY = 'schema = 1\nmechanisms = ["none"]\n'

# values = rows * 100 + 66 * (100 + 1) + 2 * 66 + 2: a multiple of 100, with the rows to make up any such number.
_WIDTH, _MAPS, _LABELS = 100, 66, 2
_REST = _MAPS * (_WIDTH + 1) + _LABELS * (_MAPS + 1)
_SPECIAL_ROWS = 2


def member_names(members: int) -> list[str]:
    """member-01 and on."""
    return [f"member-{number:02d}" for number in range(1, members + 1)]


def job_file(folder: Path, name: str, *, members: int, rounds: int, values: int) -> str:
    """A job file whose model has exactly `values` values; its word list is written into `folder`.

    Raises:
        ValueError: a number of values that this model cannot have.
    """
    rows, over = divmod(values - _REST, _WIDTH)
    if over or rows <= _SPECIAL_ROWS:
        raise ValueError(f"values must be a multiple of {_WIDTH} and more than {_REST + _SPECIAL_ROWS * _WIDTH}")
    words = folder / f"words-{values}.txt"
    words.write_text("".join(f"w{number}\n" for number in range(rows - _SPECIAL_ROWS)))
    return (
        f'schema = 1\nname = "{name}"\nlabels = ["no", "yes"]\n'
        f'[vocabulary]\nkind = "words"\nfile = "{words.name}"\n'
        f"[model]\nembedding = {_WIDTH}\nwidths = [1]\nmaps = {_MAPS}\n"
        f"[rounds]\ncount = {rounds}\nmin_members = {members}\ntarget_members = {members}\nmax_attempts = 1\n"
        # All members share this machine's cores: a deadline is there to fail, not to shape a round.
        "[rounds.deadlines]\nadvertise = 600\nshare = 600\nmask = 600\nconfirm = 600\nunmask = 600\n"
    )


def start_members(running: Federation, names: Sequence[str], processes: int, *, clear: bool = False) -> list[str]:
    """Deals the members to processes and starts these; returns the processes' names."""
    started = []
    for number in range(processes):
        homes = [running.home(name) for name in names[number::processes]]
        words: list[str | Path] = [sys.executable, "-m", "benchmarks.library.members", *homes]
        running.spawn(f"members-{number}", [*words, "--clear"] if clear else words)
        started.append(f"members-{number}")
    return started


def round_seconds(detail: pb.JobDetail, members: int, values: int, base: Path) -> list[float]:
    """Wall time of each round but the first, from its opening to the record of its end, as the coordinator wrote them.

    The first round waits for connections, and is left out. `base` is the job's bundle.

    Raises:
        MeasurementFailed: a round went without a member, or the vector is not as long as it should be.
    """
    from export.bundle import read_job_bundle

    if (found := read_job_bundle(base).document.values) != values:
        raise MeasurementFailed(f"the job has {found} values, not {values}")
    for each in detail.rounds:
        if len(each.attempts) != 1 or len(each.attempts[0].survivors) != members:
            raise MeasurementFailed(f"round {each.number} was not one attempt with all {members} members")
    return [(each.ended_ms - each.opened_ms) / 1000 for each in detail.rounds[1:]]
