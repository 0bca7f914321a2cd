"""Runs the same cohort under this project's protocol and under Flower's SecAgg+, one after the other on this machine.

Both sides have the same members, vectors and threshold t = ceil(2n/3) on the complete graph, and lose the same members
between dealing and masking. With that t, the assumed corrupt members n_C here are the most that 2t > n + n_C allows.
`cohort` and `flower_peer` say what is timed on each side. Both work in memory, so neither pays for a network. Flower
signs nothing and does not check the list of survivors; here both are included and counted. Ratios are of wall time, and
each side uses its usual number of threads. Processor time is given beside them.

Flower has its own Python in build/flower-venv, made when it is first needed.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.library.parties import vector_of
from benchmarks.library.record import ROOT, Figure
from benchmarks.secure_aggregation.cohort import Outcome, Server, play
from benchmarks.secure_aggregation.crowd import Crowd, complete_context, due_of_server, layout_for

__all__ = ["FLOWER", "PeerMissing", "compare", "figures", "flower_python", "ours", "theirs"]

FLOWER = "flwr==1.41.0"
PEER_VENV = ROOT / "build" / "flower-venv"

SERVER_TARGET, CLIENT_TARGET, UPLOAD_TARGET = 200.0, 20.0, 4.0
# The targets for time are for this cohort.
TARGET_MEMBERS = 100
REPEATS = 3
_INSTALL_SECONDS, _RUN_SECONDS = 900.0, 1800.0


class PeerMissing(SystemExit):
    """Flower is missing and cannot be installed; the text says what to do."""


def flower_python(folder: Path = PEER_VENV, packages: Sequence[str] = (FLOWER,), *, make: bool = True) -> Path:
    """Return the Python that has Flower.

    Args:
        folder: of its virtual environment.
        packages: what it has, as pip reads it.
        make: make the environment if it is missing.

    Raises:
        PeerMissing: the environment is missing, and must not or cannot be made.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    # The stamp is written last, so an incomplete environment is made again.
    wanted = " ".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    if not make:
        raise PeerMissing(f"{folder} does not have {wanted}; run the benchmark without --quick to install it")
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=_INSTALL_SECONDS)
        subprocess.run(install, check=True, timeout=_INSTALL_SECONDS, stdout=sys.stderr)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerMissing(
            f"{wanted} cannot be installed into {folder} ({error}), so nothing was measured beside it; check that pip "
            "reaches a package index, then run the benchmark again"
        ) from error
    stamp.write_text(wanted)
    return python


def lost_of(members: int, dropped: int) -> list[int]:
    """Return the members that vanish, at equal distances over the whole cohort."""
    return [index * members // dropped for index in range(dropped)]


def threshold_of(members: int) -> int:
    """Return two thirds of the members, rounded up."""
    return math.ceil(2 * members / 3)


def theirs(members: int, values: int, dropped: int, python: Path) -> dict[str, Any]:
    """Run Flower's side in its own process, and return what `flower_peer` prints.

    Raises:
        RuntimeError: it failed; the text has the end of its errors.
    """
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        path = Path(scratch) / "vectors.npy"
        vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=(members, values))
        for member in range(members):
            vectors[member] = vector_of(member, values)
        vectors.flush()
        del vectors
        lost = [str(index) for index in lost_of(members, dropped)]
        command: list[str | Path] = [python, "-m", "benchmarks.secure_aggregation.flower_peer", "--vectors", path]
        command += ["--threshold", str(threshold_of(members)), "--lost", *lost]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_RUN_SECONDS
        )
    if done.returncode:
        raise RuntimeError(f"Flower's side failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(crowd: Crowd, values: int, dropped: int) -> tuple[Outcome, Server]:
    """Run this side once, and return the members' cost and the server with its stopwatch."""
    members = len(crowd.parties)
    layout = layout_for(members, values)
    context = complete_context(members, layout, threshold_of(members))
    lost = lost_of(members, dropped)
    names = [party.member for party in crowd.parties]
    server = Server(context, layout, names, crowd.verify, crowd.key_of, due_of_server(context, dropped))
    return play(crowd, context, layout, lost, server), server


def compare(crowd: Crowd, values: int, dropped: int, python: Path) -> list[Figure]:
    """Run both sides: three times here, and once there (three times if the cohort is small)."""
    members = len(crowd.parties)
    mine, peer = [], []
    for turn in range(REPEATS):
        mine.append(ours(crowd, values, dropped))
        if turn == 0 or members <= 10:
            peer.append(theirs(members, values, dropped, python))
    return figures(members, mine, peer, crowd.certificate_seconds)


def figures(
    members: int, mine: Sequence[tuple[Outcome, Server]], peer: Sequence[dict[str, Any]], certificate_seconds: float
) -> list[Figure]:
    """Return the figures of a cell from the runs of both sides."""

    def middle(name: str) -> float:
        return float(statistics.median(run[name] for run in peer))

    outcomes = [outcome for outcome, _ in mine]
    server = statistics.median(each.watch.wall for _, each in mine)
    server_cpu = statistics.median(each.watch.cpu for _, each in mine)
    client = statistics.median(outcome.member_wall for outcome in outcomes)
    client_cpu = statistics.median(outcome.member_cpu for outcome in outcomes)
    versions = {"versions": peer[0]["versions"]}
    checked = {"checked": dict(outcomes[0].checked), "certificate_seconds": round(certificate_seconds, 6)}

    def ratio(name: str, party: str, our: float, our_cpu: float, target: float) -> Figure:
        their, their_cpu = middle(f"{party}_seconds"), middle(f"{party}_cpu_seconds")
        aim = {"target": target} if members == TARGET_MEMBERS else {}
        cpu = {"peer_cpu": round(their_cpu, 5), "ours_cpu": round(our_cpu, 5)}
        beside = {"peer": round(their, 5), "ours": round(our, 5), **aim, **cpu, **checked, **versions}
        return Figure(name, round(their / our, 1), more=beside)

    their_error = max(run["max_abs_error"] for run in peer)
    error = max(outcome.max_abs_error for outcome in outcomes)
    upload = outcomes[0].upload_bytes_per_value
    return [
        ratio("server_times_faster_than_flower", "server", server, server_cpu, SERVER_TARGET),
        ratio("client_times_faster_than_flower", "client", client, client_cpu, CLIENT_TARGET),
        Figure(
            "upload_bytes_per_value",
            round(upload, 4),
            more={
                "peer": round(peer[0]["upload_bytes_per_value"], 4),
                "ours": round(upload, 4),
                "target": UPLOAD_TARGET,
            },
        ),
        Figure("max_abs_error", error, more={"peer": their_error, "ours": error, "target": their_error}),
    ]
