"""Measures client rounds a second and the memory of a simulation, beside Flower's.

TextCNN and a head on cached features learn TREC's questions with 100, 1,000 and 10,000 virtual members, of which 20 or
100 train in a round. Ours runs on processes and on Ray's actors, Flower's on its Ray engine in a Python of its own.

Both sides have the same start, rows, batches, epochs, optimiser, clients a round and workers, and one torch thread for
each worker. They take turns, run after run. A run's first round is a warm-up and counts with the start. Rates are of
the clock, from the median round of each run; the ratio is the median over the turns. Processor seconds are beside them.
"""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.library.record import ROOT, Figure, Results, open_results, parser
from benchmarks.secure_aggregation.flower import PeerMissing, flower_python
from benchmarks.simulation.setup import MODELS, Case, accuracy_of, places_of, prepare
from toolkit.install import install_with

__all__ = ["BENCH", "CASES", "ENGINES", "figures", "main", "measure", "run"]

BENCH, REVISION = "simulation", 2
FLOWER = ("flwr[simulation]==1.41.0", "torch==2.13.0", "psutil")
PEER_VENV = ROOT / "build" / "flower-simulation-venv"
ENGINES = ("local", "ray", "flower")
TURNS, TARGET = 3, 5.0
_RUN_SECONDS = 900.0
CASES = tuple(
    Case(model, members, cohort, rounds)
    for cohort, rounds in ((20, 8), (100, 4))
    for members in (100, 1_000, 10_000)
    for model in MODELS
)


def run(engine: str, case: Case, workers: int, folder: Path, python: Path | None) -> dict[str, Any]:
    """Run one simulation in its own process, and return what it prints and the accuracy of its last version.

    Args:
        engine: of ENGINES.
        case: what is simulated.
        workers: processes or actors.
        folder: from `prepare`.
        python: Flower's.

    Raises:
        RuntimeError: it failed; the text has the end of its errors.
        subprocess.TimeoutExpired: it takes longer than a cell is worth.
    """
    module = "flower_peer" if engine == "flower" else "ours"
    words: list[str | Path] = [sys.executable if python is None or engine != "flower" else python]
    words += ["-m", f"benchmarks.simulation.{module}", folder]
    for name, value in (("members", case.members), ("cohort", case.cohort), ("rounds", case.rounds)):
        words += [f"--{name}", str(value)]
    words += ["--workers", str(workers), *(() if engine == "flower" else ("--engine", engine))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # Flower's telemetry is a wait for a network.
    environment |= {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # By default Ray lowers its workers' priority, and on a machine with other work they would starve beside processes.
    environment["RAY_worker_niceness"] = "0"
    # It ends Ray's workers if the machine is nearly full, whoever filled it.
    environment["RAY_memory_monitor_refresh_ms"] = "0"
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_RUN_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"the simulation on {engine} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["accuracy"] = accuracy_of(folder, _version(engine, folder))
    return found


def _version(engine: str, folder: Path) -> Any:
    if engine != "flower":
        return np.load(folder / "final.npy")
    from export.bundle import read_job_bundle

    with np.load(folder / "final.npz") as file:
        return read_job_bundle(folder / "bundle").manifest.flatten({name: file[name] for name in file})


def measure(
    results: Results, case: Case, workers: int, folder: Path, python: Path | None, *, turns: int = TURNS
) -> None:
    """Run the engines by turns, and add the figures of each. Without Flower's Python, its engine is left out."""
    engines = ENGINES if python is not None else ENGINES[:-1]
    prepare(case.model, folder)
    np.save(folder / "rows.npy", places_of(case.members, len(np.load(folder / "labels.npy"))))
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for _ in range(turns):
        for engine in engines:
            found[engine].append(run(engine, case, workers, folder, python))
    results.open([0])
    for engine in engines:
        results.add(case_of(case, engine, workers), figures(case, found[engine], found.get("flower")))


def case_of(case: Case, engine: str, workers: int) -> dict[str, Any]:
    """Return the keys of a line."""
    keys = {"model": case.model, "members": case.members, "cohort": case.cohort}
    return {"engine": engine, "workers": workers, **keys}


def figures(case: Case, runs: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]] | None) -> list[Figure]:
    """Return the figures of an engine's runs. peer: Flower's of the same turns; None or the same: no ratio."""

    def rate(run: dict[str, Any]) -> float:
        return float(case.cohort / statistics.median(run["clock"][1:]))

    def processor(run: dict[str, Any]) -> float:
        return float(sum(run["processor"][1:]) / (case.cohort * (case.rounds - 1)))

    rates = [rate(each) for each in runs]
    spent = statistics.median(map(processor, runs))
    beside: dict[str, Any] = {
        "turns": [round(each, 2) for each in rates],
        "processor_seconds": round(spent, 5),
        # With the first round: its workers import, tokenise and connect.
        "start_seconds": round(statistics.median(each["start_seconds"] + each["clock"][0] for each in runs), 1),
        "rounds": case.rounds - 1,
    }
    if versions := runs[0].get("versions"):
        beside["versions"] = versions
    accuracies = [each["accuracy"] for each in runs]
    made = [
        Figure("client_rounds_per_second", round(statistics.median(rates), 2), "1/s", more=beside),
        Figure("resident_bytes", float(max(max(each["resident"]) for each in runs)), "B"),
        Figure("accuracy", round(statistics.median(accuracies), 4), more={"runs": accuracies}),
    ]
    if peer is not None and peer is not runs:
        ratios = [one / rate(other) for one, other in zip(rates, peer, strict=True)]
        theirs = statistics.median(map(processor, peer))
        more = {"target": TARGET, "processor": round(theirs / spent, 2), "turns": [round(each, 2) for each in ratios]}
        made.append(Figure("times_flower", round(statistics.median(ratios), 2), more=more))
    return made


def _turns(results: Results, case: Case, workers: int) -> int:
    """Return in how many turns a cell was measured."""
    lines = results.done(case_of(case, "flower", workers))
    return max((len(line["turns"]) for line in lines if line["figure"] == "client_rounds_per_second"), default=0)


def _ray_version() -> str | None:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Command line. Returns 1 if Ray or Flower is missing, or a cell failed."""
    options = parser("simulation.speed")
    options.add_argument("--workers", type=int, nargs="*", default=(2, 1))
    options.add_argument("--members", type=int, nargs="*", default=(100, 1_000, 10_000))
    options.add_argument("--cohorts", type=int, nargs="*", default=(20, 100))
    options.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    options.add_argument("--turns", type=int, default=TURNS, help="runs of each engine (default: 3)")
    chosen = options.parse_args()
    results = open_results(BENCH, quick=chosen.quick, revision=REVISION)
    if _ray_version() is None:
        print(f"Ray is not installed; {install_with('ray')}", file=sys.stderr)
        return 1
    try:
        python = flower_python(PEER_VENV, FLOWER, make=not chosen.quick)
    except PeerMissing as missing:
        if not chosen.quick:
            print(missing, file=sys.stderr)
            return 1
        python = None
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as scratch:
        if chosen.quick:
            model = chosen.models[0]
            measure(results, Case(model, 10, 4, 2), 1, Path(scratch) / model, python, turns=1)
            return 0
        failed = False
        for case, workers in _cells(chosen.cohorts, chosen.workers, chosen.members, chosen.models):
            if _turns(results, case, workers) >= chosen.turns:
                continue
            try:
                measure(results, case, workers, Path(scratch) / case.model, python, turns=chosen.turns)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                # The others need not wait for it; the next call tries it again.
                print(f"{case} with {workers} workers: {error}", file=sys.stderr)
                failed = True
    return int(failed)


def _cells(
    cohorts: Sequence[int], workers: Sequence[int], members: Sequence[int], models: Sequence[str]
) -> list[tuple[Case, int]]:
    """Return what is measured, what a goal needs first: 20 clients with two workers, then with one."""
    return [
        (case, each)
        for cohort in sorted(cohorts)
        for each in sorted(workers, reverse=True)
        for case in CASES
        if case.cohort == cohort and case.members in members and case.model in models
    ]


if __name__ == "__main__":
    sys.exit(main())
