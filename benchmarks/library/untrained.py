"""Rounds without training: a job with an exact number of values, and several members in each process.

Guarantees: the job is made, checked and run as any other. No member builds its model, so a round costs only transport
and aggregation.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.library.federation import Federation, MeasurementFailed
from tacit.v1 import operator_pb2 as pb

__all__ = ["POLICY", "job_file", "member_names", "round_seconds", "start_members"]

POLICY = 'schema = 1\nmechanisms = ["none"]\n'

# values = rows * 100 + 66 * (100 + 1) + 2 * 66 + 2, so the rows can reach any large enough multiple of 100.
_WIDTH, _MAPS, _LABELS = 100, 66, 2
_REST = _MAPS * (_WIDTH + 1) + _LABELS * (_MAPS + 1)
_SPECIAL_ROWS = 2


def member_names(members: int) -> list[str]:
    """Return member-01, member-02 and so on."""
    return [f"member-{number:02d}" for number in range(1, members + 1)]


def job_file(folder: Path, name: str, *, members: int, rounds: int, values: int) -> str:
    """Return the text of a job file whose model has exactly `values` values, and write its word list into `folder`.

    Raises:
        ValueError: this model cannot have so few values, or a number that is not a multiple of its width.
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
        # All members share this machine's cores. A deadline only ends a round that fails.
        "[rounds.deadlines]\nadvertise = 600\nshare = 600\nmask = 600\nconfirm = 600\nunmask = 600\n"
    )


def start_members(running: Federation, names: Sequence[str], processes: int, *, clear: bool = False) -> list[str]:
    """Deal the members to processes, start these, and return the processes' names."""
    started = []
    for number in range(processes):
        homes = [running.home(name) for name in names[number::processes]]
        words: list[str | Path] = [sys.executable, "-m", "benchmarks.library.members", *homes]
        running.spawn(f"members-{number}", [*words, "--clear"] if clear else words)
        started.append(f"members-{number}")
    return started


def round_seconds(detail: pb.JobDetail, members: int, values: int, base: Path) -> list[float]:
    """Return the wall time of each round but the first, in seconds.

    A round lasts from its opening to the record of its end, by the coordinator's own times. The first round waits for
    connections and does not count.

    Args:
        base: the job's bundle.

    Raises:
        MeasurementFailed: a round had several attempts or lost a member, or the vector has another length.
    """
    from export.bundle import read_job_bundle

    if (found := read_job_bundle(base).document.values) != values:
        raise MeasurementFailed(f"the job has {found} values, not {values}")
    for each in detail.rounds:
        if len(each.attempts) != 1 or len(each.attempts[0].survivors) != members:
            raise MeasurementFailed(f"round {each.number} was not one attempt with all {members} members")
    return [(each.ended_ms - each.opened_ms) / 1000 for each in detail.rounds[1:]]
