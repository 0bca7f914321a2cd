"""Runs one of our simulations in a process of its own, as `coordinator simulate` does.

    PYTHON -m benchmarks.simulation.ours FOLDER --members N --cohort N --rounds N --workers N --engine local|ray

FOLDER is made by `benchmarks.simulation.setup`. Prints one JSON object, and leaves the last version in
FOLDER/final.npy. The same questions of TREC, features and start as Flower's side; the folder of the simulation is new.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.simulation.setup import data_of, places_of
from benchmarks.simulation.usage import Rounds


def main() -> None:
    """Command line."""
    words = argparse.ArgumentParser()
    words.add_argument("folder", type=Path)
    words.add_argument("--engine", choices=("local", "ray"), required=True)
    for name in ("members", "cohort", "rounds", "workers"):
        words.add_argument(f"--{name}", type=int, required=True)
    chosen = words.parse_args()
    began = time.perf_counter()
    import torch

    from coordinator.rounds.in_memory import InMemory
    from export.bundle import read_job_bundle
    from simulation.preparing import Engines, Prepared, opened
    from simulation.simulate import Plan

    torch.set_num_threads(1)
    rows, _ = data_of()
    members = tuple(tuple(rows[at] for at in part) for part in places_of(chosen.members, len(rows)).tolist())
    made = Prepared(read_job_bundle(chosen.folder / "bundle").document, chosen.folder / "bundle", members, ())
    rounds = Rounds()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        # Computed once for both sides.
        if (chosen.folder / "features").exists():
            (Path(scratch) / "features").symlink_to((chosen.folder / "features").resolve())
        plan, engines = Plan(cohort=chosen.cohort), Engines(chosen.engine, chosen.workers)
        with opened(made, plan, engines, InMemory(), Path(scratch)) as simulation:
            start = time.perf_counter() - began
            rounds.begins()
            for played in simulation.run(rounds=chosen.rounds):
                rounds.ended()
                if played.round < chosen.rounds:
                    rounds.begins()
            np.save(chosen.folder / "final.npy", simulation.version(chosen.rounds))
    told = {"clock": rounds.clock, "processor": rounds.processor, "resident": rounds.resident}
    print(json.dumps({**told, "start_seconds": start}))


if __name__ == "__main__":
    main()
