"""Runs one simulation of Flower, on its Ray engine: the other side of a comparison. It has its own Python.

    PYTHON -m benchmarks.simulation.flower_peer FOLDER --members N --cohort N --rounds N --workers N

FOLDER is made by `benchmarks.simulation.setup`. The strategy is Flower's FedAvg, a client has one core, and Ray has as
many cores as there are workers, which is what Flower recommends for clients of one thread. Prints one JSON object, and
leaves the last version in FOLDER/final.npz. Imports nothing of Tacit's product.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context  # type: ignore[import-not-found]
from flwr.serverapp import Grid, ServerApp  # type: ignore[import-not-found]
from flwr.serverapp.strategy import FedAvg  # type: ignore[import-not-found]
from flwr.simulation import run_simulation  # type: ignore[import-not-found]

from benchmarks.simulation.flower_client import FOLDER, app
from benchmarks.simulation.usage import Rounds


def main() -> None:
    """Command line."""
    words = argparse.ArgumentParser()
    words.add_argument("folder", type=Path)
    for name in ("members", "cohort", "rounds", "workers"):
        words.add_argument(f"--{name}", type=int, required=True)
    chosen = words.parse_args()
    os.environ[FOLDER] = str(chosen.folder.resolve())
    logging.getLogger("flwr").setLevel(logging.ERROR)
    began, rounds = time.perf_counter(), Rounds()
    told: dict[str, Any] = {}
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def run(grid: Grid, context: Context) -> None:
        import torch

        torch.set_num_threads(1)
        with np.load(chosen.folder / "start.npz") as file:
            start = {name: torch.from_numpy(file[name]) for name in file}

        def after(number: int, arrays: ArrayRecord) -> None:
            if number:
                rounds.ended()
            else:
                told["start_seconds"] = time.perf_counter() - began
            if number < chosen.rounds:
                rounds.begins()

        strategy = FedAvg(
            fraction_train=chosen.cohort / chosen.members,
            fraction_evaluate=0.0,
            min_train_nodes=chosen.cohort,
            min_available_nodes=chosen.members,
            weighted_by_key="num-examples",
        )
        found = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(start), num_rounds=chosen.rounds, evaluate_fn=after
        )
        np.savez(chosen.folder / "final.npz", **{k: v.numpy() for k, v in found.arrays.to_torch_state_dict().items()})

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=chosen.members,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": chosen.workers, "log_to_driver": False, "logging_level": "ERROR"},
        },
    )
    versions = {name: importlib.metadata.version(name) for name in ("flwr", "ray", "torch")}
    told |= {"clock": rounds.clock, "processor": rounds.processor, "resident": rounds.resident, "versions": versions}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
